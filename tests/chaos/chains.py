"""The chains that the nodes wrote down: who committed what on which lineage, and what work went into it.

A commit event carries ``head`` and ``prev`` (the chain's head after and before it) and ``contributions`` (tokens by
the last characters of the peers' ids). So a fork shows as two heads of one fragment and version, and the tokens of
the winning chain, set against all tokens trained, tell how much work was lost.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from tests.chaos.story import Event, Story

WEIGHT_BOUND = 4
"""A contribution weighs at most so many times the group's median, as in ``stretto.protocol.outer``."""


@dataclass
class Record:
    """One commit, as told by those who installed it."""

    fragment: int
    version: int
    round: int
    head: str
    prev: str
    tokens: dict[str, int]
    """Tokens of each counted peer, by name."""
    told_by: set[str] = field(default_factory=set)

    def shares(self) -> dict[str, float]:
        """Each counted peer's weight in the average."""
        bound = WEIGHT_BOUND * median(self.tokens.values())
        weights = {name: min(count, bound) for name, count in self.tokens.items()}
        total = sum(weights.values())
        return {name: weight / total if total else 1 / len(weights) for name, weight in weights.items()}


def tips(events: Sequence[Event]) -> Iterator[Event]:
    """The events that say where a fragment's chain is now, in order."""
    return (event for event in events if "head" in event)


def records(story: Story) -> dict[str, Record]:
    """All commits that anybody knows, by head."""
    found: dict[str, Record] = {}
    for peer in story.peers:
        for event in tips(story.events.get(peer, ())):
            record = found.get(event["head"])
            if record is None:
                tokens = {story.name_of(tail): count for tail, count in event["contributions"].items()}
                record = found[event["head"]] = Record(
                    event["fragment"], event["version"], event["round"], event["head"], event["prev"], tokens
                )
            record.told_by.add(peer)
    return found


def forks(known: dict[str, Record]) -> list[dict[str, Any]]:
    """Fragments and versions with more than one head, and those of the heads that were ``heard``: by several peers, or
    by one that went on from it.

    A coordinator that is killed or cut off between its decision and the first word of it leaves a head that nobody
    else ever has. The others decide anew, and it comes over to them: that is no second lineage.
    """
    extended = {record.prev for record in known.values()}
    found: dict[tuple[int, int], list[Record]] = {}
    for record in known.values():
        found.setdefault((record.fragment, record.version), []).append(record)
    return [
        {
            "fragment": fragment,
            "version": version,
            "heads": sorted(record.head for record in rivals),
            "heard": sorted(r.head for r in rivals if len(r.told_by) > 1 or r.head in extended),
        }
        for (fragment, version), rivals in sorted(found.items())
        if len(rivals) > 1
    ]


def fork_missed(found: Sequence[dict[str, Any]]) -> list[str]:
    """What to say of forks with two heads that were heard; nothing where there are none."""
    grown = [fork for fork in found if len(fork["heard"]) > 1]
    return [f"the chains forked: {grown[:3]}"] if grown else []


def final_heads(story: Story, known: dict[str, Record]) -> list[str]:
    """The head of each fragment on most peers in the end; where no report tells, the one with the most commits."""
    ends: list[str] = []
    for fragment in range(story.fragments):
        told = Counter(report["heads"][fragment][:16] for report in story.reports.values())
        if told:
            ends.append(told.most_common(1)[0][0])
        else:
            longest = max((r for r in known.values() if r.fragment == fragment), key=lambda r: r.version, default=None)
            ends.append(longest.head if longest else "")
    return ends


def one_end(story: Story, known: Mapping[str, Record], peers: Sequence[str]) -> bool:
    """Whether the reports of ``peers`` end on the same chains: per fragment one head, or a head and the one before it,
    for who is asked to leave while a commit goes round may end without it. Equal heads must mean equal bits."""
    reports = [story.reports[peer] for peer in peers if peer in story.reports]
    if len(reports) < len(peers):
        return False
    bits: dict[str, set[str]] = {}
    for report in reports:
        for head, state in zip(report["heads"], report.get("states", ()), strict=False):
            bits.setdefault(head, set()).add(state)
    ends = [{report["heads"][fragment][:16] for report in reports} for fragment in range(story.fragments)]
    return all(len(found) == 1 for found in bits.values()) and all(
        len(heads) == 1 or (len(heads) == 2 and any(h in known and {known[h].prev} == heads - {h} for h in heads))
        for heads in ends
    )


def lineage(known: dict[str, Record], head: str, fragment: int) -> list[Record]:
    """The commits behind ``head``, the last one first. Over a gap that nobody wrote down it goes on with the commits
    that most peers told of."""
    found: list[Record] = []
    record = known.get(head)
    top = record.version if record else max((r.version for r in known.values() if r.fragment == fragment), default=0)
    for version in range(top, 0, -1):
        if record is None or record.version != version:
            there = [r for r in known.values() if (r.fragment, r.version) == (fragment, version)]
            record = max(there, key=lambda r: len(r.told_by), default=None)
        if record is not None:
            found.append(record)
            record = known.get(record.prev)
    return found


def winners(story: Story, known: dict[str, Record]) -> dict[str, Record]:
    """The commits of the chains that won, by head."""
    ends = enumerate(final_heads(story, known))
    return {record.head: record for fragment, head in ends for record in lineage(known, head, fragment)}


def departed(event: Event) -> float:
    """When the round of this event departed."""
    return float(event["time"] - event["seconds"])


def work(story: Story, known: dict[str, Record]) -> dict[str, dict[str, float]]:
    """Tokens of each peer: trained, counted in the chains that won, still under way at the end, and lost.

    A token is trained once and counted once for each fragment, so counted and under way are means over the fragments.
    Under way is what was trained since the peer's last counted contribution of a fragment, in its last life: a kill
    loses it.
    """
    chains = [lineage(known, head, f) for f, head in enumerate(final_heads(story, known))]
    result = {}
    for peer in story.peers:
        steps = [event for event in story.events.get(peer, ()) if event["event"] == "step"]
        trained = sum(event["tokens"] for event in steps)
        begins = [b["time"] for a, b in itertools.pairwise(steps) if b["step"] <= a["step"]]
        times = {event["round"]: departed(event) for event in story.rounds_of(peer)}
        counted, under_way = [], []
        for chain in chains:
            mine = [record for record in chain if peer in record.tokens]
            counted.append(sum(record.tokens[peer] for record in mine))
            since = max([times.get(record.round, 0.0) for record in mine] + begins[-1:], default=0.0)
            under_way.append(sum(event["tokens"] for event in steps if event["time"] > since))
        lost = trained - fmean(counted) - fmean(under_way)
        result[peer] = {
            "trained": trained,
            "counted": round(fmean(counted)),
            "under_way_at_the_end": round(fmean(under_way)),
            "lost": round(lost),
        }
    return result


def weights(story: Story, known: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """How often each peer was counted in the chains that won, and its mean weight and tokens when it was."""
    result = {}
    won = winners(story, known)
    for peer in story.peers:
        mine = [record for record in won.values() if peer in record.tokens]
        result[peer] = {
            "rounds_counted": len(mine),
            "mean_weight": round(fmean(record.shares()[peer] for record in mine), 4) if mine else None,
            "mean_tokens": round(fmean(record.tokens[peer] for record in mine)) if mine else None,
        }
    return result


def taus(story: Story) -> dict[str, dict[str, Any]]:
    """Overlap of each peer's counted merges: how often which tau, and how many merges came by rebasing instead."""
    result: dict[str, dict[str, Any]] = {}
    for peer in story.peers:
        merges = [event for event in story.events.get(peer, ()) if event["event"] == "merge"]
        counts = Counter(event["tau"] for event in merges if event["counted"])
        result[peer] = {
            "counts": {str(tau): count for tau, count in sorted(counts.items())},
            "median": median(counts.elements()) if counts else None,
            "rebased": sum(not event["counted"] for event in merges),
        }
    return result


def switches(story: Story, known: dict[str, Record], since: float, until: float) -> dict[str, int]:
    """How often each peer left its lineage for another one between two times: the new head does not descend from the
    old one. Once per fragment and heal is a repair; more is a flip-flop. The largest count of any fragment."""
    result = {}
    for peer in story.peers:
        counts = Counter[int]()
        last: dict[int, str] = {}
        for event in tips(story.events.get(peer, ())):
            fragment, old = event["fragment"], last.get(event["fragment"])
            last[fragment] = event["head"]
            if old is not None and since < event["time"] < until and not _descends(known, event["head"], old):
                counts[fragment] += 1
        result[peer] = max(counts.values(), default=0)
    return result


def _descends(known: dict[str, Record], head: str, ancestor: str) -> bool:
    """Whether ``head`` comes after ``ancestor``. A chain that nobody wrote down far enough is taken to do so."""
    least = known[ancestor].version
    record = known.get(head)
    while record is not None and record.version > least:
        record = known.get(record.prev)
    return record is None or record.head == ancestor
