"""Every fault, at every moment of a round, to every role: the walk in virtual time, and bugs that it must find.

What must hold is in tests/fault_walk.py. A schedule that fails prints the command that plays it again.
"""

import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from stretto.protocol import outer
from stretto.protocol.chain import Member, SignedRecord, Tip
from stretto.protocol.faults import Fault, Moment, Role, Schedule, draw_schedule, every_schedule
from stretto.protocol.live import LiveRound
from stretto.protocol.peer import Peer
from stretto.protocol.streaming import Reduced, StreamingDiLoCo, seal
from tests.fault_walk import FIRST, Report, make_walk, play, play_all

SEEDS = {2: 8, 3: 7, 4: 5, 8: 1}
"""Seeds for each (fault, moment, role), by group size: 5103 schedules."""
WORKERS = 2
COMBINATIONS = len(Fault) * len(Moment) * len(Role)


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        yield pool


def walk(workers: ProcessPoolExecutor, schedules: Sequence[Schedule]) -> list[Report]:
    """Play all, shared out so that no worker is left with the long ones."""
    slices = 8 * WORKERS
    parts = workers.map(play_all, [schedules[start::slices] for start in range(slices)])
    return [report for part in parts for report in part]


def described(failed: Sequence[Report]) -> str:
    lines = [f"{len(failed)} schedule(s) failed; the smallest, and how to play it again:"]
    for report in sorted(failed, key=lambda report: (len(report.schedule.strikes), report.schedule.size))[:5]:
        schedule, strike = report.schedule, report.schedule.strikes[0]
        place = (strike.fault.name, strike.moment.name, strike.role.name)
        lines += [str(schedule), report.error]
        lines += [f"python -m tests.fault_walk {schedule.size} {' '.join(place)} {schedule.seed} -v", ""]
    return "\n".join(lines)


def summary(size: int, reports: Sequence[Report]) -> str:
    """How many schedules begin with each fault, and what all of them took."""
    counts = Counter(report.schedule.strikes[0].fault.name for report in reports)
    cpu = sum(report.cpu for report in reports)
    kinds = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{size} peers, {len(reports)} schedules, {cpu:.0f} CPU seconds: {kinds}"


# ---------------------------------------------------------------------- the walk


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SEEDS)
def test_fault_walk(size: int, workers: ProcessPoolExecutor) -> None:
    schedules = list(every_schedule({size: SEEDS[size]}, FIRST))
    reports = walk(workers, schedules)
    failed = [report for report in reports if report.error]
    assert not failed, described(failed)
    print(summary(size, reports))
    # every combination was played and has hit somebody, and the checks had something to check
    assert len({(x.fault, x.moment, x.role) for s in schedules for x in s.strikes[:1]}) == COMBINATIONS
    assert all(report.struck == len(report.schedule.strikes) for report in reports)
    assert min(report.committed for report in reports) >= 4
    assert sum(report.checked_work for report in reports) > size * len(reports)


def test_fault_walk_has_five_thousand_schedules() -> None:
    schedules = list(every_schedule(SEEDS, FIRST))
    assert len(set(schedules)) == len(schedules) >= 5000


def test_fault_walk_is_the_same_again() -> None:
    for fault in (Fault.KILL, Fault.REORDER):
        schedule = draw_schedule(3, fault, Moment.HALF_SENT, Role.COORDINATOR, 1, FIRST)
        traces: list[list[str]] = [[], []]
        assert play(schedule, traces[0]) == play(schedule, traces[1])
        assert traces[0] == traces[1]
        assert len(traces[0]) > 50


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_leaves_its_mark(fault: Fault) -> None:
    """A fault that changes nothing would test nothing: the events differ from those of a quiet run."""
    quiet = _events(draw_schedule(4, fault, Moment.GROUP_KNOWN, Role.REDUCER, 0, FIRST), strikes=False)
    assert _events(draw_schedule(4, fault, Moment.GROUP_KNOWN, Role.REDUCER, 0, FIRST), strikes=True) != quiet
    assert len(quiet) > 100


def _events(schedule: Schedule, *, strikes: bool) -> list[str]:
    trace: list[str] = []
    simulation = make_walk(schedule, trace)
    if not strikes:
        simulation.pending.clear()
    simulation.run(8)
    assert bool(simulation.struck) is strikes
    return trace


# ---------------------------------------------------------------------- planted bugs


def small_walk(sizes: Sequence[int], faults: Sequence[Fault], moments: Sequence[Moment]) -> None:
    """A few schedules in this process; AssertionError at the first that fails."""
    seeds: Mapping[int, int] = dict.fromkeys(sizes, 2)
    for schedule in every_schedule(seeds, FIRST):
        strike = schedule.strikes[0]
        if strike.fault in faults and strike.moment in moments:
            report = play(schedule)
            if report.error.startswith("AssertionError"):
                raise AssertionError(f"{schedule}: {report.error}")
            assert not report.error, report.error


def test_fault_walk_finds_a_sum_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrival_order(
        self: StreamingDiLoCo, fragment: int, members: Sequence[Member], payloads: Mapping[bytes, bytes]
    ) -> Reduced:
        order = list(payloads)
        return honest(self, fragment, sorted(members, key=lambda member: order.index(member.payload)), payloads)

    small_walk([3], [Fault.REORDER], [Moment.AFTER_JOIN])
    honest, tidy = StreamingDiLoCo.reduce, LiveRound.work
    monkeypatch.setattr(StreamingDiLoCo, "reduce", arrival_order)

    def as_they_came(self: LiveRound, basis: Any) -> Any:
        work = tidy(self, basis)
        return dataclasses.replace(
            work, payloads={name: x for name, x in self.payloads.items() if name in work.payloads}
        )

    monkeypatch.setattr(LiveRound, "work", as_they_came)
    with pytest.raises(AssertionError, match="the same contributions gave other bits"):
        small_walk([3], [Fault.REORDER], [Moment.AFTER_JOIN])


def test_fault_walk_finds_a_commit_without_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    small_walk([4], [Fault.PARTITION], [Moment.BEFORE_DEPARTURE])
    monkeypatch.setattr(Tip, "quorum", lambda self, peers, resigned=(): bool(peers))
    with pytest.raises(AssertionError, match="two decisions of round"):
        small_walk([4], [Fault.PARTITION], [Moment.BEFORE_DEPARTURE])


def test_fault_walk_finds_a_round_that_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a decision comes a second time, the outer step is taken a second time."""

    def twice(self: Peer, sender: bytes, message: Any, now: float) -> Any:
        effects = honest(self, sender, message, now)
        if type(message).__name__ == "Commit":
            state = self.diloco.fragments[message.fragment]
            if state.record == message.signed and (self.me, message.round) in heard:
                anchor, momentum = outer.nesterov(
                    state.anchor, state.momentum, np.zeros_like(state.anchor), lr=0.4, momentum_factor=0.9
                )
                state.anchor, state.momentum = anchor, momentum
            heard.add((self.me, message.round))
        return effects

    heard: set[tuple[bytes, int]] = set()
    small_walk([3], [Fault.DUPLICATE], [Moment.BEFORE_DECISION])
    honest = Peer.received
    monkeypatch.setattr(Peer, "received", twice)
    with pytest.raises(AssertionError, match="changed without a commit"):
        small_walk([3], [Fault.DUPLICATE], [Moment.BEFORE_DECISION])


def test_fault_walk_finds_a_round_that_is_half_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The anchor moves and the momentum stays."""

    def half(self: StreamingDiLoCo, fragment: int, signed: SignedRecord, reduced: Reduced, *, me: bytes) -> bool:
        old = self.fragments[fragment].momentum
        counted = honest(self, fragment, signed, reduced, me=me)
        self.fragments[fragment].momentum = seal(reduced.anchor, old).momentum
        return counted

    small_walk([2], [Fault.STOP], [Moment.DECIDED])
    honest = StreamingDiLoCo.install
    monkeypatch.setattr(StreamingDiLoCo, "install", half)
    with pytest.raises(AssertionError, match="half applied"):
        small_walk([2], [Fault.STOP], [Moment.DECIDED])


def test_fault_walk_finds_a_repair_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    small_walk([3], [Fault.KILL], [Moment.DECIDED])
    monkeypatch.setattr(Peer, "_repair", lambda self, *_: [])
    with pytest.raises(AssertionError, match="has not come back"):
        small_walk([3], [Fault.KILL], [Moment.DECIDED])
    with pytest.raises(AssertionError, match="is not back: version"):
        small_walk([3], [Fault.PARTITION], [Moment.BEFORE_DEPARTURE])


def test_fault_walk_finds_work_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was not counted merges instead of rebasing: with alpha = 0 that throws its work away."""

    def merging(state: Any, old: Any, counted: int | None) -> None:
        honest(state, old, counted)
        if counted is None:
            state.shift = state.anchor - old
            state.tokens = 0

    small_walk([4], [Fault.PARTITION], [Moment.BEFORE_DEPARTURE])
    honest = StreamingDiLoCo._wait_for_local
    monkeypatch.setattr(StreamingDiLoCo, "_wait_for_local", staticmethod(merging))
    with pytest.raises(AssertionError, match="tokens, not"):
        small_walk([4], [Fault.PARTITION], [Moment.BEFORE_DEPARTURE])
