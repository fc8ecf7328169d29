"""Which fragment leaves when, and how the clock follows the members' speeds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol.schedule import (
    MAX_DRIFT,
    MAX_INTERVAL,
    MAX_ROUND,
    MAX_TIME,
    MIN_INTERVAL,
    Clock,
    first_clock,
    follows,
    fragment_of,
    next_clock,
    plausible,
)


def test_fragments_take_turns() -> None:
    assert [fragment_of(r, 3) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("h", "p"), [(100, 4), (30, 3), (20, 20), (7, 1)])
def test_with_rate_one_the_clock_is_the_papers_schedule(h: int, p: int) -> None:
    clock = first_clock(0.0, 1.0, h, p)
    offsets = [index * h // p for index in range(p)]  # t_p
    steps = range(1, 4 * h + 1)
    # Algorithm 2: fragment q leaves when (t - t_q) mod H = 0, for the first time after H steps
    paper = [(t, q) for t in steps for q in range(p) if t >= h + offsets[q] and (t - offsets[q]) % h == 0]
    ours = [(round(clock.departure(r)), fragment_of(r, p)) for r in range(len(paper))]
    assert ours == paper


def test_a_faster_swarm_has_a_shorter_interval() -> None:
    clock = first_clock(1000.0, 2.0, 100, 4)
    assert clock == Clock(round=0, at=1050.0, interval=12.5)
    assert [clock.departure(r) for r in (0, 1, 4)] == [1050.0, 1062.5, 1100.0]


def test_next_round_is_the_first_that_departs_now_or_later() -> None:
    clock = Clock(round=5, at=100.0, interval=10.0)
    assert [clock.next_round(now) for now in (-50.0, 99.0, 100.0, 100.1, 110.0, 119.9, 121.0)] == [5, 5, 5, 6, 6, 7, 8]


def test_swarm_step_counts_mean_inner_steps() -> None:
    clock = first_clock(0.0, 2.0, 100, 4)
    assert clock.swarm_step(0.0, 100, 4) == 0.0
    assert clock.swarm_step(25.0, 100, 4) == 50.0
    assert clock.swarm_step(clock.departure(3), 100, 4) == 175.0
    assert clock.swarm_step(-99.0, 100, 4) == 0.0


def test_the_next_departure_stays_and_the_interval_after_it_changes() -> None:
    clock = Clock(round=3, at=30.0, interval=10.0)
    new = next_clock(clock, 3, [2.0, 3.0], 0.5, 100, 4)  # 25 steps at 2.5 a second
    assert new == Clock(round=4, at=40.0, interval=10.0)
    assert next_clock(clock, 3, [2.4], 0.5, 100, 4).interval == pytest.approx(25 / 2.4)


@pytest.mark.parametrize(("rate", "interval"), [(100.0, 8.0), (0.01, 12.0)])
def test_an_interval_changes_by_a_fifth_at_most(rate: float, interval: float) -> None:
    clock = Clock(round=3, at=30.0, interval=10.0)
    assert next_clock(clock, 3, [rate], 0.5, 100, 4).interval == pytest.approx(interval)


def test_the_interval_leaves_room_for_the_round() -> None:
    clock = Clock(round=3, at=30.0, interval=10.0)
    # 25 steps at 3 a second are 8.3 s, but the round took 7.2 s and wants a quarter more
    assert next_clock(clock, 3, [3.0], 7.2, 100, 4).interval == pytest.approx(9.0)


def test_a_clock_stays_within_its_bounds_for_ever() -> None:
    clock = first_clock(0.0, 1e9, 1, 1)
    assert clock.interval == MIN_INTERVAL
    assert next_clock(clock, 0, [1e6], 0.0, 1, 1).interval == MIN_INTERVAL
    slow = first_clock(0.0, 1e-9, 1000, 1)
    assert slow.interval == MAX_INTERVAL
    assert next_clock(slow, 0, [1e-9], 1e9, 1000, 1).interval == MAX_INTERVAL


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    st.floats(0, 1e4),
    st.floats(MIN_INTERVAL, MAX_INTERVAL),
    st.integers(0, 1000),
)
def test_every_next_clock_is_accepted_by_the_members(
    rates: list[float], seconds: float, interval: float, round: int
) -> None:
    clock = Clock(round=round, at=50.0, interval=interval)
    assert follows(clock, next_clock(clock, round, rates, seconds, 100, 4))


@pytest.mark.parametrize(
    ("proposed", "accepted"),
    [
        (Clock(11, 110.0, 10.0), True),
        (Clock(11, 110.0, 10.0 * MAX_DRIFT), True),
        (Clock(11, 110.0, 10.0 * MAX_DRIFT + 0.1), False),
        (Clock(11, 110.0, 10.0 / MAX_DRIFT), True),
        (Clock(11, 110.0, 10.0 / MAX_DRIFT - 0.1), False),
        (Clock(11, 219.0, 10.0), True),
        (Clock(11, 221.0, 10.0), False),
        (Clock(11, 22.0, 10.0), False),
        (Clock(14, 300.0, 12.0), True),
    ],
)
def test_a_clock_far_from_the_own_one_is_refused(proposed: Clock, accepted: bool) -> None:
    assert follows(Clock(10, 100.0, 10.0), proposed) is accepted


@pytest.mark.parametrize("at", [-MAX_TIME, 0.0, MAX_TIME])
@pytest.mark.parametrize("round", [0, MAX_ROUND])
@pytest.mark.parametrize("interval", [MIN_INTERVAL, MAX_INTERVAL])
def test_no_lawful_clock_makes_arithmetic_fail(at: float, round: int, interval: float) -> None:
    clock = Clock(round, at, interval)
    assert clock.next_round(1.7e9) >= round
    assert math.isfinite(clock.departure(0))
    assert math.isfinite(clock.swarm_step(1.7e9, 100, 4))
    assert follows(clock, clock)


def test_a_clock_far_in_the_future_is_not_in_force() -> None:
    assert plausible(Clock(7, 100.0, 10.0), now=95.0)
    assert plausible(Clock(7, 100.0, 10.0), now=1e6)  # rounds may have been aborted since
    assert not plausible(Clock(10**6, 1e7, 10.0), now=100.0)


def test_a_clock_of_many_rounds_later_must_fit_the_time_between() -> None:
    mine = Clock(0, 0.0, 10.0)
    assert follows(mine, Clock(1000, 10_000.0, 12.0))
    assert follows(mine, Clock(1000, 30_000.0, 30.0))
    assert not follows(mine, Clock(2**39, 1e10, 10.0))
    assert not follows(mine, Clock(1000, 100_000.0, 10.0))
    assert not follows(mine, Clock(1000, 1_000.0, 10.0))
