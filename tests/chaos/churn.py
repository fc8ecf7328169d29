"""The scenario ``churn``: peers come and go for as long as one likes, and nothing may climb meanwhile.

Every so many seconds one peer leaves (SIGTERM, or kill -9) or one comes: the same one with its data dir, or a
brand-new one with an empty disk behind the same line. The first peer and the bootstrap peer stay: their memory, files,
threads, sockets and tasks are watched, and those of every other process that lives from the beginning to the end.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tests.chaos import chains
from tests.chaos.options import Options, Outcome
from tests.chaos.report import committed, departures, round_part
from tests.chaos.samples import EVERY, Sampler, floors, growth, last_two_thirds
from tests.chaos.stage import Stage
from tests.chaos.story import Hit, Story
from tests.chaos.swarm import Setting, Swarm

LEAVE, KILL, BACK, NEW = "leave", "kill", "back", "new"
PAIRS = ((LEAVE, BACK), (KILL, BACK), (LEAVE, NEW), (KILL, NEW))
"""How somebody goes, and who comes next."""

COMMITTED = 0.9
"""Share of the rounds that commit: a round in hand may be lost with a member that is killed in it."""


@dataclass(frozen=True)
class Change:
    """At ``at`` seconds the peer at ``place`` leaves or is killed, comes back, or is replaced by a new one."""

    at: float
    what: str
    place: str


def plan(*, seed: int, places: Sequence[str], seconds: float, every: float) -> list[Change]:
    """One change every ``every`` seconds: somebody goes, then somebody comes. In the end everybody is there, and the
    last change is at least ``every`` seconds before the end. ValueError if nobody may go or there is no time."""
    count = (int(seconds / every) - 1) // 2 * 2
    if not places or count < 2:
        raise ValueError(f"no two changes {every:g} s apart fit into {seconds:g} s, or nobody may leave")
    chance = random.Random(seed)
    deck: list[tuple[str, str]] = []
    changes: list[Change] = []
    last = ""
    for number in range(0, count, 2):
        if not deck:
            deck = chance.sample(PAIRS, len(PAIRS))
        going, coming = deck.pop()
        place = chance.choice([name for name in places if name != last or len(places) == 1])
        changes.append(Change(every * (number + 1), going, place))
        changes.append(Change(every * (number + 2), coming, place))
        last = place
    return changes


class Tenants:
    """Who lives behind which line, and how changes are carried out."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.tenant = {name: name for name in swarm.nodes}
        self.exits: dict[str, int] = {}
        """Exit codes of those that were asked to leave."""
        self._going: dict[str, Hit] = {}
        self._count = 0

    def carry_out(self, change: Change) -> bool:
        """Do it; False while what was there before is not gone yet."""
        swarm, name = self._swarm, self.tenant[change.place]
        if change.what in (LEAVE, KILL):
            hit = self._going[change.place] = Hit(change.what, (name,), time.time())
            swarm.hits.append(hit)
            (swarm.leave if change.what == LEAVE else swarm.kill)(name)
            return True
        node = swarm.nodes[name]
        if not node.ended or node.process.family():
            return False
        if self._going[change.place].fault == LEAVE:
            self.exits[f"{name} at {time.strftime('%H:%M:%S')}"] = node.process.exit_code(limit=1)
        if change.what == BACK:
            swarm.restart(name)
        else:
            self._count += 1
            self.tenant[change.place] = f"{change.place}.{self._count}"
            swarm.add(self.tenant[change.place], line=node.line)
        self._going.pop(change.place).end = time.time()
        return True


def churn(stage: Stage, options: Options) -> Outcome:
    """``peers`` peers for ``minutes``, a change every ``every`` seconds."""
    # Often, so that as many checkpoints as are kept are there before anything is measured.
    setting = Setting(peers=options.peers, rounds=1_000_000, hidden=256, checkpoint_every=20.0)
    seconds = options.minutes * 60
    todo = plan(seed=options.seed, places=setting.names[1:], seconds=seconds, every=options.every)
    changes = list(todo)
    with stage.swarm(setting) as swarm:
        begin = swarm.await_first_commit()
        stage.say(f"the first round is committed; {len(todo)} changes, one every {options.every:g} s")
        tenants, sampler = Tenants(swarm), Sampler(swarm)
        sampled = 0.0

        def done() -> bool:
            nonlocal sampled
            now = time.time()
            if now - sampled >= EVERY:
                sampled = now
                sampler.sample(now)
            if todo and now >= begin + todo[0].at and tenants.carry_out(todo[0]):
                change = todo.pop(0)
                stage.say(f"{change.place}: {change.what} ({tenants.tenant[change.place]})")
            return not todo and now >= begin + seconds

        # A change may be late, since a peer that leaves is waited for; it does not move those that follow.
        stage.follow(swarm, None, done=done, limit=seconds + 300)
        end = time.time()
        present = list(tenants.tenant.values())
        equal = stage.part(swarm, present, limit=4 * setting.cycle)
        story = swarm.story()
        sampler.add_their_own()
    return judge(story, changes, todo, present, sampler, begin=begin, end=end, exits=tenants.exits, equal=equal)


# ---------------------------------------------------------------------- the verdict


def payload_bytes(story: Story) -> int:
    """Bytes of the largest contribution, as the nodes report it."""
    return max((max(report["payload_bytes"]) for report in story.reports.values()), default=0)


def limit_of(process: str, kind: str, payload: int) -> float:
    """By how much a figure may grow over the last two thirds, whatever their length.

    Not in proportion to the time: what leaks per round or per change passes any of these in two hours.
    """
    if kind == "rss":
        return max(float(payload), GO_RSS if process.endswith("p2pd") else RSS)
    return {
        "heap": max(float(payload), HEAP),
        "fds": 12.0,
        "sockets": 12.0,
        "threads": 3.0,
        "tasks": 12.0,
        "files": 2.0,
        "unix_sockets": 2.0,
    }[kind]


RSS = 12e6
"""Bytes. The memory of a node wanders by 2 MB from minute to minute and by a step of some MB when a thread is made, so
less could not be told from noise in ten minutes. One payload in all would not be seen in that; one per round, which is
what a round can leak, is 20 MB in ten minutes."""

HEAP = 4e6
"""Bytes of malloc in use, which does not wander: what a node computes with is taken once, and what it is handed it
gives back. Nine of ten samples of half an hour lie within 1 MB; some are 10 MB lower, a few 2 MB higher."""

GO_RSS = 16e6
"""Bytes: memory of its daemon, whose garbage collector lets the heap grow to twice what is in use."""


def climbs(sampler: Sampler, begin: float, end: float, payload: int) -> list[dict[str, Any]]:
    """Growth of every figure that was sampled from the beginning to the end, the worst first."""
    rows = []
    for series in sampler.series.values():
        points = last_two_thirds(series.points, begin, end)
        if not points:
            continue
        limit = limit_of(series.process, series.kind, payload)
        grown = growth(floors(points) if series.kind == "rss" else points)
        rows.append(
            {
                "process": series.process,
                "kind": series.kind,
                "samples": len(points),
                "mean": round(fmean(value for _, value in points), 1),
                "first": points[0][1],
                "last": points[-1][1],
                "growth": round(grown, 1),
                "limit": limit,
                "flat": grown <= limit,
            }
        )
    return sorted(rows, key=lambda row: row["growth"] / row["limit"], reverse=True)


def losses(story: Story, peer: str) -> tuple[float, float] | None:
    """Mean loss of the first and the last quarter of a peer's steps."""
    found = [event["loss"] for event in story.events.get(peer, ()) if event["event"] == "step"]
    quarter = len(found) // 4
    return (fmean(found[:quarter]), fmean(found[-quarter:])) if quarter else None


def judge(
    story: Story,
    changes: Sequence[Change],
    left: Sequence[Change],
    present: Sequence[str],
    sampler: Sampler,
    *,
    begin: float,
    end: float,
    exits: Mapping[str, int],
    equal: bool,
) -> Outcome:
    """The report and the goals that were missed."""
    known, when, by = chains.records(story), departures(story), committed(story)
    due = [number for number, at in when.items() if begin <= at <= end]
    share = sum(number in by for number in due) / len(due) if due else 0.0
    payload = payload_bytes(story)
    rows = climbs(sampler, begin, end, payload)
    all_equal = chains.one_end(story, known, present)
    loss = losses(story, present[0])
    downloads = [
        {"peer": peer, **{key: event[key] for key in ("bytes", "seconds", "peers")}}
        for peer in story.peers
        for event in story.events.get(peer, ())
        if event["event"] == "joined"
    ]
    missed = [
        f"{row['process']}: {row['kind']} grew by {row['growth']:g}, the limit is {row['limit']:g}"
        for row in rows
        if not row["flat"]
    ]
    watched = {row["process"] for row in rows}
    missed += [f"{name} was not watched to the end" for name in (present[0], "boot") if name not in watched]
    if left:
        missed.append(f"{len(left)} change(s) were not carried out, the first one: {left[0]}")
    if share < COMMITTED:
        missed.append(f"{share:.1%} of {len(due)} rounds committed, the goal is {COMMITTED:.0%}")
    if loss is None or loss[1] >= loss[0]:
        missed.append(f"the loss did not fall: {loss} in the first and in the last quarter")
    if not (equal and all_equal):
        missed.append(f"the anchors of {', '.join(present)} are not equal at the end")
    forks = chains.forks(known)
    missed += chains.fork_missed(forks)
    missed += [f"{name} left with exit code {code}" for name, code in exits.items() if code != 0]
    uncounted = [p for p in present if not story.worked_rounds(p)]
    if uncounted:
        missed.append(f"no round counted {', '.join(uncounted)}")
    report = {
        "note": "steps were padded to a fixed pace: emulated device time",
        "setting": dict(story.setting),
        "load_per_core": round(story.load, 2),
        "seconds": round(end - begin, 1),
        "changes": [f"{change.at:g} s: {change.place} {change.what}" for change in changes],
        "rounds": len(due),
        "rounds_committed": sum(number in by for number in due),
        "committed_share": round(share, 4),
        "abort_reasons": round_part(story)["abort_reasons"],
        "payload_bytes": payload,
        "growth": rows,
        "loss_first_and_last_quarter": None if loss is None else [round(value, 4) for value in loss],
        "downloads": downloads,
        "anchors_equal": all_equal,
        "forks": forks,
        "exit_codes": dict(story.exits),
        "left_with": dict(exits),
    }
    return Outcome(report, missed)
