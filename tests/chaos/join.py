"""The scenario ``join``: a peer with an empty disk comes to a run of 30 million parameters, twice.

    1. Three peers train; after two cycles a fourth joins. How much of its downlink does the download use, how soon
       does a round count it, and what does it cost the donors?
    2. A fifth joins. When half is there one donor is killed with -9 and another one stopped: the join still ends.

The *download* lasts from the first bytes that are asked for to the last that come, as the joiner itself tells in its
event ``joined``; its bytes are those of states and missed rounds, without headers and without what came twice. The
share of the downlink is bytes / seconds / rate of the line. What the line itself counted, headers and all, is reported
beside it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import chains
from tests.chaos.options import Options, Outcome
from tests.chaos.report import plain_reason
from tests.chaos.stage import Stage
from tests.chaos.story import Event, Story
from tests.chaos.swarm import Setting, Swarm

SETTING = Setting(
    peers=3,
    rounds=1_000_000,
    pace=2.5,
    inner_steps=40,
    hidden=544,
    layers=8,
    heads=8,
    tokens_per_step=32,
    sequence_length=32,
    tau_max=8,
    log_budget="80MB",
)
"""30.9 million parameters. The log of each peer holds a cycle and a half, as the usual one does of a run that has gone
on for long: who joins downloads states, and replays what is committed meanwhile. A cycle of 100 s: a peer's own rounds
then take a quarter of its uplink (2 contributions of 4 bits per weight), so that three donors have more to give than
the joiner can take."""

SHARE = 0.8
"""Of the downlink, at least."""
CYCLES = 2.0
"""From the end of the download to the first round that counts the joiner, at most."""
DOWNLOAD_LIMIT = 600.0
"""Seconds from the start of the program."""


@dataclass
class Joining:
    """One join as it was watched: the joiner, its donors, and what its line had carried at what time."""

    peer: str
    donors: tuple[str, ...]
    begin: float
    rounds_at_end: int = -1
    """The latest round that anybody had spoken of when the download ended."""
    line: list[tuple[float, int]] = field(default_factory=list)
    killed: str = ""
    stopped: str = ""

    def told(self, events: Sequence[Event]) -> Event | None:
        """The joiner's own word that the state is here."""
        return next((event for event in events if event["event"] == "joined"), None)

    def watch(self, swarm: Swarm) -> bool:
        """Note what the line carries; whether the download is over."""
        node = swarm.nodes[self.peer]
        self.line.append((time.time(), swarm.links.bytes_down(node.line)))
        assert not node.ended, f"{self.peer} ended while it joined\n{node.process.tail()}"
        self.rounds_at_end = swarm.last_round()
        return self.told(node.events) is not None

    def half(self, swarm: Swarm) -> bool:
        """Whether half of the state is there."""
        over = self.watch(swarm)
        events = [event for event in swarm.nodes[self.peer].events if event["event"] == "joining"]
        return over or (bool(events) and 2 * events[-1]["bytes"] >= events[-1]["of_bytes"] > 0)


def join(stage: Stage, options: Options) -> Outcome:
    """Two joins, the second one while its donors die. ``minutes`` and ``peers`` do not count."""
    with stage.swarm(SETTING) as swarm:
        swarm.await_first_commit()
        stage.pass_cycles(swarm, 2)
        stage.say("a fourth peer joins with an empty disk")
        first = _join(stage, swarm, "p3")
        _until_counted(stage, swarm, "p3")
        stage.say("a fifth peer joins; when half is there one donor is killed and one is stopped")
        second = _join(stage, swarm, "p4", kill="p1", stop="p2")
        swarm.thaw("p2")
        counted = _until_counted(stage, swarm, "p4")
        stay = [name for name, node in swarm.nodes.items() if not node.ended and not node.down]
        equal = stage.part(swarm, stay, limit=4 * SETTING.cycle)
        story = swarm.story()
    return judge(story, [first, second], stay, equal=equal, counted=counted, seed=options.seed)


def _join(stage: Stage, swarm: Swarm, peer: str, *, kill: str = "", stop: str = "") -> Joining:
    joining = Joining(peer, tuple(swarm.nodes), time.time(), killed=kill, stopped=stop)
    swarm.add(peer)
    if kill:
        stage.follow(swarm, None, done=lambda: joining.half(swarm), limit=DOWNLOAD_LIMIT)
        stage.say(f"half is there: kill -9 of {kill}, SIGSTOP of {stop}")
        swarm.kill(kill)
        swarm.freeze(stop, whole=False)
    stage.follow(swarm, None, done=lambda: joining.watch(swarm), limit=DOWNLOAD_LIMIT)
    event = joining.told(swarm.nodes[peer].events)
    stage.say(f"{peer}: {event}")
    return joining


def _until_counted(stage: Stage, swarm: Swarm, peer: str) -> bool:
    """Wait until a round of every fragment has counted work of ``peer``."""

    def done() -> bool:
        return len({event["fragment"] for event in swarm.story().worked_rounds(peer)}) == SETTING.fragments

    return stage.follow(swarm, None, done=done, limit=4 * SETTING.cycle)


def judge(
    story: Story, joins: Sequence[Joining], stay: Sequence[str], *, equal: bool, counted: bool, seed: int
) -> Outcome:
    """The report and the goals that were missed."""
    known = chains.records(story)
    rows = [describe(story, joining, known) for joining in joins]
    heads = {peer: tuple(story.reports[peer]["heads"]) for peer in stay if peer in story.reports}
    all_equal = chains.one_end(story, known, stay)
    missed = []
    for number, row in enumerate(rows, 1):
        if row["seconds"] is None:
            missed.append(f"join {number}: the download did not end")
    first = rows[0]
    if first["seconds"] is not None and first["share_of_downlink"] < SHARE:
        missed.append(f"join 1 used {first['share_of_downlink']:.0%} of the downlink, the goal is {SHARE:.0%}")
    if first["seconds"] is not None and (
        first["cycles_until_counted"] is None or first["cycles_until_counted"] > CYCLES
    ):
        missed.append(
            f"join 1: counted {first['cycles_until_counted']} cycles after the download, the goal is {CYCLES}"
        )
    if first["donors_rounds_not_committed"]:
        missed.append(f"join 1: donors' rounds were not committed: {first['donors_rounds_not_committed']}")
    if not counted:
        missed.append("join 2: no round of every fragment counted the joiner")
    if not (equal and all_equal):
        missed.append(f"the chains of {', '.join(stay)} are not equal at the end")
    forks = chains.forks(known)
    missed += chains.fork_missed(forks)
    report = {
        "note": "steps were padded to a fixed pace: emulated device time",
        "setting": dict(story.setting),
        "seed": seed,
        "load_per_core": round(story.load, 2),
        "joins": rows,
        "anchors_equal": all_equal,
        "heads": {peer: [head[:16] for head in found] for peer, found in heads.items()},
        "forks": forks,
        "exit_codes": dict(story.exits),
    }
    return Outcome(report, missed)


def describe(story: Story, joining: Joining, known: Mapping[str, chains.Record]) -> dict[str, Any]:
    """One join in numbers."""
    events = story.events.get(joining.peer, ())
    told = joining.told(events)
    _, down = story.setting["lines_mbit"].get(joining.peer, story.setting["line_mbit"])
    row: dict[str, Any] = {
        "peer": joining.peer,
        "donors": list(joining.donors),
        "killed": joining.killed,
        "stopped": joining.stopped,
        "downlink_bytes_per_second": down * 125_000,
        "seconds": None,
    }
    if told is None:
        return row
    end, seconds = told["time"], max(told["seconds"], 1e-9)
    counted = story.worked_rounds(joining.peer)
    first = counted[0] if counted else None
    until = first["time"] if first else story.told_at
    row |= {
        "seconds": told["seconds"],
        "seconds_since_the_program_began": round(end - joining.begin, 1),
        "bytes": told["bytes"],
        "bytes_per_second": round(told["bytes"] / seconds),
        "share_of_downlink": round(told["bytes"] / seconds / (down * 125_000), 3),
        "share_of_downlink_on_the_line": _share_on_line(joining.line, end - seconds, end, down * 125_000),
        "gave": told["peers"],
        "repairs": [
            {key: event[key] for key in ("fragment", "seconds", "downloaded_bytes", "replayed_bytes") if key in event}
            for event in events
            if event["event"] == "repair" and event["state"] == "done" and event["time"] <= end + 1
        ],
        "repair_failures": [e["why"] for e in events if e["event"] == "repair" and e["state"] == "failed"],
        "first_round_counted": first["round"] if first else None,
        "first_members": first["members"] if first else None,
        "cycles_until_counted": _cycles(joining, first, story.fragments),
        "donors_rounds_not_committed": _not_committed(story, joining, until),
        "donors_rounds_committed": len(
            {
                record.round
                for record in known.values()
                for donor in joining.donors
                if donor in record.told_by and joining.begin <= _time_of(story, donor, record.round) <= until
            }
        ),
        "donors_late_merges": sum(
            event.get("late", False)
            for donor in joining.donors
            for event in story.events.get(donor, ())
            if event["event"] == "merge" and joining.begin <= event["time"] <= until
        ),
    }
    return row


def _cycles(joining: Joining, first: Event | None, fragments: int) -> float | None:
    """Cycles from the last round before the end of the download to the first one that counts the joiner."""
    return None if first is None else round((first["round"] - joining.rounds_at_end) / fragments, 2)


def _share_on_line(line: Sequence[tuple[float, int]], begin: float, end: float, rate: float) -> float | None:
    inside = [(at, nbytes) for at, nbytes in line if begin <= at <= end]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    (a, before), (b, after) = inside[0], inside[-1]
    return round((after - before) / (b - a) / rate, 3)


def _time_of(story: Story, peer: str, round: int) -> float:
    return next((event["time"] for event in story.rounds_of(peer) if event["round"] == round), 0.0)


def _not_committed(story: Story, joining: Joining, until: float) -> dict[str, dict[str, str]]:
    """Rounds that departed at a donor between the joiner's start and its first counted round, and did not commit."""
    found: dict[str, dict[str, str]] = {}
    for donor in joining.donors:
        for event in story.rounds_of(donor):
            if event["outcome"] != "committed" and joining.begin <= chains.departed(event) <= until:
                found.setdefault(str(event["round"]), {})[donor] = plain_reason(event["why"])
    return found
