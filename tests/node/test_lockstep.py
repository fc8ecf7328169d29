"""Lockstep: the schedule in inner steps, the gates between trainer and network thread, and the fixed data."""

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from stretto.node.data.fixed_units import FixedUnits
from stretto.node.data.units import Span
from stretto.node.lockstep import INTERVAL, InLockstep, Lockstep, LockstepSchedule, check_lockstep, lockstep_rules
from stretto.node.swarm.thread import Stopped
from stretto.node.sync import Merged
from stretto.protocol.errors import ConfigError
from stretto.protocol.schedule import follows, next_clock
from stretto.protocol.unitbook import Bookmark
from stretto.protocol.units import UnitCut
from tests.fakes import toy_config

H, P = 8, 4


class FakeSync:
    """Counts steps, and notes at which of them it was asked to merge."""

    def __init__(self) -> None:
        self.step, self.blocked_seconds = 0, 0.0
        self.merges: list[int] = []

    def come_back(self) -> list[Merged]:
        self.merges.append(self.step)
        return [Merged(self.step % P, 1, counted=True)]


class Pair:
    """A trainer in a thread of its own, at gates that the test opens."""

    def __init__(self, tau: int, *, rounds: int = 3, **options: Any) -> None:
        self.sync, self.failures, self.wakes = FakeSync(), list[str](), list[int]()
        self.lock = Lockstep(LockstepSchedule(H, P, rounds, tau), 2, **options)
        self.lock.fail = self.failures.append
        self.lock.wake = lambda: self.wakes.append(self.lock.reached)
        self.stopped = False
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            while not self.lock.done:
                self.sync.step += 1
                self.lock.come_back(cast(Any, self.sync))
        except Stopped:
            self.stopped = True

    def waits_for(self, text: str) -> int:
        """The inner step at which the trainer waits for ``text``."""
        self.until(lambda: text in self.lock.waiting_for)
        return self.sync.step

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"at step {self.sync.step}, waiting for {self.lock.waiting_for!r}")


# ---------------------------------------------------------------------- the schedule


def test_rounds_depart_and_merge_at_the_papers_steps() -> None:
    schedule = LockstepSchedule(H, P, rounds=5, tau=3)
    # Algorithm 2: fragment p leaves when t - p H / P is a multiple of H, for the first time after H steps
    paper = [(cycle * H + p * H // P, p) for cycle in (1, 2) for p in range(P)][:5]
    assert [(schedule.departure(round), round % P) for round in range(5)] == paper
    departing = {step: schedule.departing(step) for step in range(40) if schedule.departing(step) is not None}
    assert departing == {8: 0, 10: 1, 12: 2, 14: 3, 16: 4}
    assert {step for step in range(40) if schedule.merging(step) is not None} == {11, 13, 15, 17, 19}
    assert schedule.last_step == 19


@pytest.mark.parametrize(
    ("fields", "why"),
    [((8, 3, 5, 1), "P = 3"), ((8, 4, 5, 8), "tau is 8"), ((8, 4, 5, -1), "tau is -1")],
)
def test_a_schedule_that_cannot_be_is_refused(fields: tuple[int, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LockstepSchedule(*fields)


def test_more_peers_than_a_group_and_a_tau_above_the_runs_are_refused() -> None:
    run = toy_config(max_size=4, tau_max=3)
    check_lockstep(run, 4, 3)
    with pytest.raises(ConfigError, match=r"5 peers are more than group\.max_size"):
        check_lockstep(run, 5, 3)
    with pytest.raises(ConfigError, match=r"at most outer\.tau_max \(3\)"):
        check_lockstep(run, 4, 4)


def test_the_clock_keeps_its_interval_and_no_wait_is_shortened_by_it() -> None:
    lock = Lockstep(LockstepSchedule(H, P, 100, 1), 4)
    clock = lock.clock(1000.0)
    for round in range(100):
        following = next_clock(clock, round, [lock.rate] * 4, 0.5, H, P)
        assert follows(clock, following)
        clock = following
    assert clock.interval == pytest.approx(INTERVAL)
    rules = lockstep_rules(toy_config(inner_steps=H, tau_max=3), P, 4)
    assert rules.within(P * INTERVAL) == rules
    assert rules.min_group == 4


# ---------------------------------------------------------------------- the gates


def test_the_trainer_waits_for_the_departure_and_for_the_result() -> None:
    pair = Pair(tau=3, rounds=2)
    assert pair.waits_for("the departure of round 0") == 8
    assert pair.wakes == [8]
    pair.lock.left(0)
    # With tau 3 and a departure every two steps round 1 departs before the result of round 0 is due.
    assert pair.waits_for("the departure of round 1") == 10
    pair.lock.left(1)
    assert pair.waits_for("the result of round 0") == 11
    assert 11 not in pair.sync.merges, "nothing merges before the wait is over"
    assert pair.lock.committed(0, 2, counted=True) >= 0
    assert pair.waits_for("the result of round 1") == 13
    pair.lock.committed(1, 2, counted=True)
    pair.thread.join(10)
    assert pair.lock.done
    assert pair.sync.step == pair.lock.schedule.last_step == 13
    assert pair.sync.merges == list(range(1, 14))
    assert pair.sync.blocked_seconds > 0
    assert pair.failures == []


def test_without_overlap_a_result_merges_at_the_step_of_its_departure() -> None:
    pair = Pair(tau=0, rounds=1)
    assert pair.waits_for("the departure of round 0") == 8
    pair.lock.left(0)
    assert pair.waits_for("the result of round 0") == 8
    pair.lock.committed(0, 2, counted=True)
    pair.thread.join(10)
    assert pair.lock.done
    assert pair.sync.merges == [1, 2, 3, 4, 5, 6, 7, 8, 8]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda lock: lock.aborted(0, "nobody came"), r"round 0 \(fragment 0\) failed: nobody came"),
        (lambda lock: lock.committed(0, 1, counted=True), "it counts 1 of 2 peers"),
        (lambda lock: lock.committed(0, 2, counted=False), "this one not among them"),
    ],
)
def test_a_round_that_is_not_whole_is_the_end(end: Callable[[Lockstep], object], why: str) -> None:
    asked = threading.Event()
    pair = Pair(tau=1, stopping=asked.is_set)
    pair.waits_for("the departure of round 0")
    pair.lock.left(0)
    pair.waits_for("the result of round 0")
    end(pair.lock)
    (failure,) = pair.failures
    assert re.search(why, failure)
    asked.set()  # as the node does then
    pair.thread.join(10)
    assert pair.stopped
    assert pair.sync.step == 9


def test_a_wait_ends_after_its_limit() -> None:
    pair = Pair(tau=1, limit=0.2)
    pair.thread.join(10)
    assert pair.stopped
    assert pair.failures == [
        "the departure of round 0 after inner step 8 has not come within 0 s; some peer is stopped or far too slow"
    ]


def test_the_trainer_sees_a_sync_with_gates() -> None:
    sync = FakeSync()
    gated = InLockstep(cast(Any, sync), Lockstep(LockstepSchedule(H, P, 1, 1), 2))
    gated.blocked_seconds += 1.5
    assert (sync.blocked_seconds, gated.blocked_seconds, gated.step) == (1.5, 1.5, 0)
    sync.step = 3
    assert gated.come_back() == [Merged(3, 1, counted=True)]  # no gate after step 3


# ---------------------------------------------------------------------- the data


def seat(rank: int, peers: int, cut: UnitCut) -> FixedUnits:
    units = FixedUnits(cut)
    units.sit(rank, peers)
    return units


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_peers_share_out_all_samples_and_each_is_read_once(peers: int) -> None:
    cut = UnitCut(windows=23, length=4)  # six units in an epoch, the last one of three samples
    seen: list[tuple[int, int]] = []
    for rank in range(peers):
        units = seat(rank, peers, cut)
        for unit in range(rank, 2 * cut.per_epoch, peers):
            (span,) = units.draw(cut.size(unit))
            assert span == Span(unit, 0, cut.size(unit))
            seen += [(unit, position) for position in range(cut.size(unit))]
    assert sorted(seen) == [(unit, i) for unit in range(2 * cut.per_epoch) for i in range(cut.size(unit))]


def test_a_batch_may_span_units_and_what_was_not_trained_on_comes_again() -> None:
    units = seat(1, 3, UnitCut(windows=100, length=4))
    first = units.draw(3)
    assert first == [Span(1, 0, 3)]
    units.consumed(first)
    spans = units.draw(6)
    assert spans == [Span(1, 3, 4), Span(4, 0, 4), Span(7, 0, 1)]
    units.dropped()
    assert units.draw(6) == spans
    units.consumed(spans)
    assert units.draw(1) == [Span(7, 1, 2)]
    assert units.state() == Bookmark(samples=9)
    assert units.report()["units_done"] == 2
    assert units.reserve(1000) == 0.0


def test_drawing_in_other_portions_gives_the_same_samples() -> None:
    cut = UnitCut(windows=37, length=5)

    def samples(*portions: int) -> list[tuple[int, int]]:
        units = seat(2, 4, cut)
        spans = itertools.chain.from_iterable(units.draw(count) for count in portions)
        return [(span.unit, position) for span in spans for position in range(span.first, span.last)]

    assert samples(30) == samples(1, 2, 3, 4, 20) == samples(*[1] * 30)


def test_nobody_goes_on_in_the_middle() -> None:
    with pytest.raises(ConfigError, match="an earlier life of this peer in this run"):
        FixedUnits(UnitCut(100, 4)).restore(Bookmark(samples=12))
