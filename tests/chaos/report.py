"""The report of a run: pure functions of a ``Story``. Plain values out, ready for JSON.

Possible rounds are those that departed while more than half of the peers were alive and connected. A victim has
recovered when it has committed a round that departed after the end of its fault and that peers outside the fault
have committed too.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from tests.chaos import chains
from tests.chaos.story import Hit, Story

NEVER = float("inf")


def departures(story: Story) -> dict[int, float]:
    """When each round of the run departed. Rounds that nobody wrote about lie evenly between their neighbours."""
    told: dict[int, float] = {}
    for peer in story.peers:
        for event in story.rounds_of(peer):
            if 0 <= event["round"] < story.rounds:
                told[event["round"]] = min(told.get(event["round"], NEVER), chains.departed(event))
    full = dict(told)
    known = sorted(told)
    for a, b in itertools.pairwise(known):
        for between in range(a + 1, b):
            full[between] = told[a] + (told[b] - told[a]) * (between - a) / (b - a)
    return dict(sorted(full.items()))


def back(story: Story, hit: Hit, victim: str) -> float:
    """When ``victim`` was there again: if it was restarted the first step of its next life, else the fault's end."""
    if hit.end is None:
        return NEVER
    if hit.fault not in ("kill", "leave"):
        return hit.end
    steps = (e["time"] for e in story.events.get(victim, ()) if e["event"] == "step" and e["time"] > hit.end)
    return min(steps, default=NEVER)


def present(story: Story, at: float) -> int:
    """How many peers were alive and connected at a time, by the faults that were done."""
    away = {v for hit in story.hits for v in hit.victims if hit.begin <= at < back(story, hit, v)}
    return len(story.peers) - len(away)


def committed(story: Story) -> dict[int, set[str]]:
    """Who committed each round, on the chain that won: what a peer did on a branch of its own is no commit."""
    known = chains.records(story)
    lost = known.keys() - chains.winners(story, known).keys()
    found: dict[int, set[str]] = {}
    for peer in story.peers:
        for event in story.rounds_of(peer):
            if event["outcome"] == "committed" and event.get("head") not in lost:
                found.setdefault(event["round"], set()).add(peer)
    return found


def plain_reason(why: str) -> str:
    """A reason without its numbers and ids, so that equal ones can be counted."""
    return re.sub(r"\b[0-9a-f]{8,}\b|12D3KooW\w+|\d+(\.\d+)?", "#", why)


def round_part(story: Story) -> dict[str, Any]:
    """Rounds possible, committed, aborted and why."""
    when, by = departures(story), committed(story)
    possible = [number for number, at in when.items() if 2 * present(story, at) > len(story.peers)]
    reasons: Counter[str] = Counter()
    unmade: dict[str, dict[str, str]] = {}
    for peer in story.peers:
        for event in story.rounds_of(peer):
            if event["outcome"] == "committed":
                continue
            reasons[plain_reason(event["why"])] += 1
            if event["round"] in possible and event["round"] not in by:
                unmade.setdefault(str(event["round"]), {})[peer] = event["why"]
    for number in possible:
        if number not in by:
            unmade.setdefault(str(number), {})
    made = sum(number in by for number in possible)
    seconds = [e["seconds"] for p in story.peers for e in story.rounds_of(p) if e["outcome"] == "committed"]
    return {
        "rounds": story.rounds,
        "rounds_departed": len(when),
        "rounds_possible": len(possible),
        "rounds_committed": sum(number in by for number in when),
        "rounds_possible_committed": made,
        "committed_share": round(made / len(possible), 4) if possible else None,
        "committed_per_peer": {peer: sum(peer in who for who in by.values()) for peer in story.peers},
        "aborted_rounds": dict(sorted(unmade.items(), key=lambda item: int(item[0]))),
        "abort_reasons": dict(reasons.most_common()),
        "round_seconds_median": round(median(seconds), 3) if seconds else None,
        "round_seconds_max": round(max(seconds), 3) if seconds else None,
    }


def recovery(
    story: Story, hit: Hit, victim: str, *, when: Mapping[int, float], by: Mapping[int, set[str]]
) -> float | None:
    """Seconds from the end of ``hit`` until ``victim`` was part of the swarm again, None if never.

    ``when`` are the story's departures, ``by`` its commits.
    """
    if hit.end is None:
        return None
    for event in story.rounds_of(victim):
        if event["outcome"] != "committed" or event["time"] < hit.end:
            continue
        # Departed after the fault: what a thawed peer only hears the end of proves nothing.
        others = by.get(event["round"], set()) - set(hit.victims)
        if when.get(event["round"], 0.0) >= hit.end and victim in by.get(event["round"], ()) and others:
            return round(float(event["time"]) - hit.end, 2)
    return None


def fault_part(story: Story) -> dict[str, Any]:
    """Each fault with its recovery, and what they come to."""
    when, by = departures(story), committed(story)
    start = min(when.values(), default=0.0)
    rows: list[dict[str, Any]] = []
    never: list[dict[str, Any]] = []
    for number, hit in enumerate(story.hits):
        for victim in hit.victims:
            later = [h.begin for h in story.hits[number + 1 :] if victim in h.victims]
            found = recovery(story, hit, victim, when=when, by=by)
            again = None if hit.end is None or found is None else hit.end + found
            there = back(story, hit, victim)
            row = {
                "fault": hit.fault,
                "with_daemon": hit.whole,
                "victim": victim,
                "together_with": [other for other in hit.victims if other != victim],
                "begin": round(hit.begin - start, 1),
                "end": None if hit.end is None else round(hit.end - start, 1),
                "recovery_seconds": found,
                # Of these, until the first step: for a kill the program has to load, slowly where the machine is busy.
                "until_it_trains_seconds": None if hit.end is None or there == NEVER else round(there - hit.end, 2),
                # Its time then holds the next fault as well.
                "hit_again_before": bool(later and (again is None or later[0] < again)),
            }
            rows.append(row)
            if found is None:
                never.append({"fault": hit.fault, "victim": victim, "begin": row["begin"]})
    times = [row["recovery_seconds"] for row in rows if row["recovery_seconds"] is not None]
    by_kind = {
        kind: [r["recovery_seconds"] for r in rows if r["fault"] == kind and r["recovery_seconds"] is not None]
        for kind in sorted({hit.fault for hit in story.hits})
    }
    span = (max(when.values(), default=0.0) - start) or 1.0
    return {
        "faults_done": len(story.hits),
        "victims": len(rows),
        "faults_per_hour": round(len(story.hits) * 3600 / span, 1),
        "recovery_median": median(times) if times else None,
        "recovery_max": max(times, default=None),
        "recovery_median_by_fault": {kind: median(found) if found else None for kind, found in by_kind.items()},
        "never_recovered": never,
        "faults": rows,
    }


def end_part(story: Story) -> dict[str, Any]:
    """Whether all ended well and hold the same bits."""
    heads = {peer: tuple(report["heads"]) for peer, report in story.reports.items()}
    return {
        "anchors_equal": len(heads) == len(story.peers) and len(set(heads.values())) == 1,
        "heads": {peer: [head[:16] for head in found] for peer, found in heads.items()},
        "versions": {peer: report["versions"] for peer, report in story.reports.items()},
        "without_report": [peer for peer in story.peers if peer not in story.reports],
        "exit_codes": dict(story.exits),
        "loss_last": {peer: report["loss_last"] for peer, report in story.reports.items()},
        "utilization": {peer: round(report["compute_utilization"], 4) for peer, report in story.reports.items()},
        "bytes_up_on_the_line": dict(story.bytes_up),
        "bytes_up_by_last_life": {peer: report["bytes_up"] for peer, report in story.reports.items()},
    }


def make_report(story: Story) -> dict[str, Any]:
    """Everything about one run."""
    known = chains.records(story)
    tokens = chains.work(story, known)
    trained = sum(row["trained"] for row in tokens.values())
    lost = sum(row["lost"] for row in tokens.values())
    events = Counter(
        f"{e['event']}: {plain_reason(str(e.get('what') or e.get('state')))}"
        for peer in story.peers
        for e in story.events.get(peer, ())
        if e["event"] in ("fault", "repair")
    )
    when = departures(story)
    return {
        "note": "steps were padded to a fixed pace: emulated device time",
        "setting": dict(story.setting),
        "load_per_core": round(story.load, 2),
        "seconds": round(max(when.values(), default=0.0) - min(when.values(), default=0.0), 1),
        **round_part(story),
        **fault_part(story),
        **end_part(story),
        "forks": chains.forks(known),
        "tokens_trained": trained,
        "tokens_counted": sum(row["counted"] for row in tokens.values()),
        "tokens_lost": lost,
        "lost_share": round(lost / trained, 4) if trained else None,
        "work": tokens,
        "tokens_lost_as_peers_say": max(
            (e["total"] for peer in story.peers for e in story.events.get(peer, ()) if e["event"] == "lost"), default=0
        ),
        "weights": chains.weights(story, known),
        "taus": chains.taus(story),
        "repairs_and_faults_told": dict(events.most_common()),
    }


def steps_per_second(story: Story, peer: str, begin: float, end: float) -> float:
    """A peer's throughput between two times."""
    steps = [e for e in story.events.get(peer, ()) if e["event"] == "step" and begin <= e["time"] < end]
    return len(steps) / (end - begin) if end > begin else 0.0
