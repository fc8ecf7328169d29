"""Swarm time: what a clock keeps, what is made of the peers' clocks, and that a swarm of clocks stays together."""

import random
from dataclasses import dataclass, field

import pytest

from stretto.node.swarm.clock import SLEW, SleepWatch, SwarmClock
from stretto.node.swarm.time_keeper import steer
from stretto.node.swarm.time_votes import (
    DEAD_BAND,
    STEP,
    TOLERANCE,
    Sample,
    compare_walls,
    correction_due,
    decide,
    round_trip,
    walls_in_words,
)


@dataclass
class Machine:
    """A machine's own clocks: ``true`` is moved by the test, its steady clock runs ``drift`` too fast."""

    drift: float = 0.0
    wrong: float = 0.0
    true: float = 0.0
    asleep: float = 0.0
    clock: SwarmClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = SwarmClock(raw=lambda: self.true * (1 + self.drift), wall=self.wall)

    def wall(self) -> float:
        return 1e9 + self.true + self.wrong

    def clocks(self) -> tuple[float, float, float]:
        return self.true, self.true - self.asleep, self.wall()


def sample(peer: int, offset: float, error: float = 0.001, correction: float = 0.0) -> Sample:
    return Sample(peer=bytes([peer]), offset=offset, error=error, correction=correction)


ME = b"\x05"

# ---- the clock ----


def test_it_begins_with_the_wall_clock_and_then_ignores_it() -> None:
    machine = Machine()
    assert machine.clock.now() == 1e9
    machine.true, machine.wrong = 5.0, -3600.0
    assert machine.clock.now() == 1e9 + 5.0
    assert machine.clock.correction == 3600.0


def test_a_jump_is_at_once_and_a_slew_takes_its_time() -> None:
    machine = Machine()
    machine.clock.jump(-10.0)
    assert machine.clock.now() == 1e9 - 10.0
    machine.clock.slew(0.1)
    assert machine.clock.now() == 1e9 - 10.0
    machine.true = 10.0
    assert machine.clock.now() == pytest.approx(1e9 + 10 * SLEW, abs=1e-6)
    machine.true = 1000.0
    assert machine.clock.now() == pytest.approx(1e9 + 990.1, abs=1e-6)
    machine.clock.slew(-50.0)
    before = machine.clock.now()
    machine.true = 1001.0
    assert machine.clock.now() - before == pytest.approx(1 - SLEW, abs=1e-6)  # slower, never backwards


def test_a_new_slew_replaces_the_rest_of_the_old_one() -> None:
    machine = Machine()
    machine.clock.slew(1.0)
    machine.true = 50.0
    machine.clock.slew(0.0)
    machine.true = 5000.0
    assert machine.clock.now() == pytest.approx(1e9 + 5000.1, abs=1e-6)


def test_sleep_a_set_clock_and_a_stopped_process_are_told_apart() -> None:
    machine = Machine()
    watch = SleepWatch(machine.clocks)
    machine.true = 1.0
    assert watch.look() is None
    machine.true, machine.asleep = 3602.0, 3600.0
    slept = watch.look()
    assert slept is not None
    assert (slept.words, slept.doubtful) == ("this machine slept for 3600 s", True)
    machine.true, machine.wrong = 3603.0, 60.0
    moved = watch.look()
    assert moved is not None
    assert moved.words.startswith("this machine's clock was set 60.0 s forward")
    machine.true = 3633.0
    stopped = watch.look()
    assert stopped is not None
    assert (stopped.words, stopped.doubtful) == ("this process stood still for 30 s", False)
    machine.true = 3634.0
    assert watch.look() is None


# ---- round trips ----


def test_a_round_trip_is_right_within_its_error_wherever_the_delay_was() -> None:
    for there, back in ((0.0, 0.2), (0.2, 0.0), (0.1, 0.1)):
        found = round_trip(b"p", sent=100.0, received=107.0 + there, answered=107.5 + there, back=100.5 + there + back)
        assert found is not None
        assert found.error == pytest.approx(0.1)
        assert abs(found.offset - 7.0) <= found.error + 1e-9


def test_an_impossible_round_trip_is_no_sample() -> None:
    assert round_trip(b"p", sent=0.0, received=5.0, answered=6.1, back=1.0) is None
    assert round_trip(b"p", sent=0.0, received=5.0, answered=4.9, back=1.0) is None


# ---- votes ----


@pytest.mark.parametrize("liar", [-1e6, -10.0, -0.3, 0.3, 10.0, 1e6])
def test_a_single_liar_moves_nobody(liar: float) -> None:
    for honest in ([0.001], [0.001, -0.002], [0.001, -0.002, 0.0]):
        verdict = decide([*(sample(i, o) for i, o in enumerate(honest)), sample(9, liar)], me=ME, votes=True)
        assert verdict is not None
        assert abs(verdict.target) <= 0.002
        assert correction_due(verdict) == 0.0
        assert verdict.majority


def test_a_newcomer_is_set_by_the_others_and_not_by_itself() -> None:
    verdict = decide([sample(1, -10.0), sample(2, -10.1)], me=ME, votes=False)
    assert verdict is not None
    assert verdict.target == pytest.approx(-10.05)
    assert (verdict.majority, verdict.agreeing, verdict.asked) == (True, 2, 2)


def test_a_newcomer_breaks_the_tie_of_two_that_disagree() -> None:
    verdict = decide([sample(1, 10.0), sample(2, 0.01)], me=ME, votes=False)
    assert verdict is not None
    assert verdict.majority
    assert verdict.target == pytest.approx(0.005)


def test_two_that_disagree_follow_the_same_one() -> None:
    """Of two running peers only one moves, so they do not swap their times."""
    low, high = bytes([1]), bytes([2])
    at_low = decide([Sample(peer=high, offset=40.0, error=0.01)], me=low, votes=True)
    at_high = decide([Sample(peer=low, offset=-40.0, error=0.01)], me=high, votes=True)
    assert at_low is not None
    assert at_high is not None
    assert (at_low.target, at_high.target) == (0.0, -40.0)
    assert not at_low.majority
    assert not at_high.majority


def test_two_that_nearly_agree_meet_half_way() -> None:
    verdict = decide([sample(1, TOLERANCE)], me=ME, votes=True)
    assert verdict is not None
    assert verdict.majority
    assert verdict.target == TOLERANCE / 2


def test_nobody_asked_is_no_verdict() -> None:
    assert decide([], me=ME, votes=True) is None


def test_what_the_error_may_explain_is_not_corrected() -> None:
    verdict = decide([sample(1, 0.30, 0.28), sample(2, 0.32, 0.30)], me=ME, votes=False)
    assert verdict is not None
    assert correction_due(verdict) == pytest.approx(0.31 - 0.29)


# ---- people's clocks ----


def test_a_wrong_clock_is_told_with_its_value() -> None:
    right = [sample(1, -10.0), sample(2, -10.0)]
    text = walls_in_words(compare_walls(right, correction=0.0), "")
    assert text is not None
    assert text.startswith("WARNING your clock is 10.0 s ahead of 2 of 2 peers; Stretto corrects for it")
    # Once swarm time is corrected, the machine's clock is as wrong as before.
    text = walls_in_words(compare_walls([sample(1, 0.0), sample(2, 0.0)], correction=-10.0), "")
    assert text is not None
    assert "10.0 s ahead of 2 of 2 peers" in text
    text = walls_in_words(compare_walls([sample(1, 25.0), sample(2, 0.0), sample(3, 25.0)], correction=0.0), "")
    assert text is not None
    assert "25.0 s behind 2 of 3 peers" in text


def test_a_wrong_bootstrap_is_the_odd_one_though_all_follow_its_time() -> None:
    # Swarm time is the bootstrap's, 10 s ahead of every other machine: each of them corrects by +10 s.
    others = [sample(1, 0.0, correction=0.0), sample(2, 0.0, correction=10.0), sample(3, 0.0, correction=10.0)]
    walls = compare_walls(others, correction=10.0)
    assert not walls.wrong
    assert walls.odd == ((b"\x01", 10.0),)
    text = walls_in_words(walls, "abc")
    assert text is not None
    assert text.startswith("WARNING the clocks of 1 of 3 peers (abc) differ")
    assert "by 10.0 s (ahead)" in text


def test_clocks_within_three_seconds_are_nobodys_business() -> None:
    assert walls_in_words(compare_walls([sample(1, 2.9), sample(2, -2.9)], correction=0.0), "") is None
    assert walls_in_words(compare_walls([], correction=100.0), "") is None


# ---- a swarm of clocks ----


def measure(asker: Machine, asked: Machine, name: int, rng: random.Random, slow: float) -> Sample:
    """The better of two round trips over a line whose way to the asked peer takes up to ``slow`` seconds longer."""
    found = []
    for _ in range(2):
        there, back = rng.uniform(0.005, 0.03) + rng.uniform(0, slow), rng.uniform(0.005, 0.03)
        offset = asked.clock.now() - asker.clock.now()
        sent = asker.clock.now()
        at = sent + offset + there
        trip = round_trip(bytes([name]), sent=sent, received=at, answered=at, back=sent + there + back)
        assert trip is not None
        found.append(trip)
    return min(found, key=lambda trip: trip.error)


def simulate(machines: list[Machine], minutes: int, rng: random.Random, slow: float) -> None:
    """Each machine measures all others once a minute, at a moment of its own, and steers its clock."""
    for minute in range(minutes):
        for name in rng.sample(range(len(machines)), len(machines)):
            for machine in machines:
                machine.true = 60.0 * minute + 60.0 * name / len(machines)
            samples = [
                measure(machines[name], other, index, rng, slow)
                for index, other in enumerate(machines)
                if index != name
            ]
            verdict = decide(samples, me=bytes([name]), votes=True)
            assert verdict is not None
            steer(machines[name].clock, verdict, running=True)


def errors(machines: list[Machine]) -> list[float]:
    """Swarm time minus true time on each machine."""
    return [machine.clock.now() - 1e9 - machine.true for machine in machines]


@pytest.mark.parametrize("slow", [0.0, 0.4], ids=["even lines", "every question is slower than its answer"])
def test_a_swarm_of_clocks_stays_together_and_does_not_run_away(slow: float) -> None:
    rng = random.Random(3)
    machines = [Machine(drift=rng.uniform(-5e-5, 5e-5), wrong=rng.uniform(-0.1, 0.1)) for _ in range(7)]
    minutes = 12 * 60
    simulate(machines, minutes, rng, slow)
    found = errors(machines)
    # Clocks left alone would be up to 4.3 s apart by now; a swarm that believed its slow questions would be 40 s off.
    assert max(found) - min(found) < 0.5
    # It goes no faster than its fastest clock and no slower than its slowest.
    seconds = 60.0 * minutes
    slowest, fastest = (pick(machine.drift for machine in machines) * seconds for pick in (min, max))
    assert slowest - 0.1 < min(found)
    assert max(found) < fastest + 0.1
    if not slow:
        middle = sorted(machine.drift for machine in machines)[3] * seconds
        assert abs(sum(found) / 7 - middle) < 0.8


def test_without_drift_they_meet_among_themselves_and_stay() -> None:
    rng = random.Random(5)
    machines = [Machine(wrong=wrong) for wrong in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    simulate(machines, 120, rng, 0.3)
    met = errors(machines)
    assert max(met) - min(met) < 0.15
    assert all(abs(error) <= 0.2 for error in met)
    for machine in machines:
        machine.true = 0.0
    simulate(machines, 600, rng, 0.3)
    assert all(abs(later - earlier) < 0.05 for later, earlier in zip(errors(machines), met, strict=True))


def test_a_liar_does_not_move_a_swarm() -> None:
    rng = random.Random(7)
    machines = [Machine() for _ in range(4)]
    liar = Machine(drift=0.01)  # always a little further ahead
    for minute in range(120):
        for machine in [*machines, liar]:
            machine.true = 60.0 * minute
        for name, machine in enumerate(machines):
            others = [measure(machine, other, i, rng, 0.0) for i, other in enumerate([*machines, liar]) if i != name]
            verdict = decide(others, me=bytes([name]), votes=True)
            assert verdict is not None
            steer(machine.clock, verdict, running=True)
    assert errors([liar])[0] > 60
    assert all(abs(error) < DEAD_BAND for error in errors(machines))


def test_a_running_clock_that_is_far_off_is_set_and_a_near_one_slewed() -> None:
    machine = Machine()
    far = decide([sample(1, -3600.0), sample(2, -3600.0)], me=ME, votes=True)
    assert far is not None
    steer(machine.clock, far, running=True)
    assert machine.clock.now() == 1e9 - 3600.0
    near = decide([sample(1, STEP / 2), sample(2, STEP / 2)], me=ME, votes=True)
    assert near is not None
    steer(machine.clock, near, running=True)
    assert machine.clock.now() == 1e9 - 3600.0
    steer(machine.clock, near, running=False)
    assert machine.clock.now() == 1e9 - 3600.0 + STEP / 2
