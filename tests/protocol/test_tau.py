"""The overlap that each peer chooses for itself."""

import pytest

from stretto.protocol.tau import TauEstimate


def estimate(step: float, round: float, tau_max: int = 5) -> TauEstimate:
    return TauEstimate(tau_max).with_step(step).with_round(round)


@pytest.mark.parametrize(
    ("step", "round", "tau"),
    [(1.0, 0.1, 1), (1.0, 1.0, 1), (1.0, 1.01, 2), (2.0, 7.9, 4), (0.5, 2.5, 5), (0.5, 100.0, 5)],
)
def test_tau_is_round_time_in_steps_rounded_up_within_bounds(step: float, round: float, tau: int) -> None:
    assert estimate(step, round).tau == tau


def test_before_any_measurement_tau_is_the_largest() -> None:
    assert TauEstimate(5).tau == 5
    assert TauEstimate(5).with_step(1.0).tau == 5
    assert TauEstimate(5).with_round(1.0).tau == 5


def test_a_run_without_overlap_has_tau_zero() -> None:
    assert TauEstimate(0).tau == 0
    assert estimate(1.0, 3.0, tau_max=0).tau == 0


def test_the_first_measurement_counts_fully_and_later_ones_by_their_gain() -> None:
    first = TauEstimate(5).with_step(2.0)
    assert first.step_seconds == 2.0
    assert first.with_step(4.0).step_seconds == pytest.approx(0.8 * 2.0 + 0.2 * 4.0)
    assert estimate(1.0, 2.0).with_round(7.0).round_seconds == pytest.approx(0.8 * 2.0 + 0.2 * 7.0)


def test_measurements_return_a_new_estimate() -> None:
    old = TauEstimate(5)
    old.with_step(1.0)
    assert old == TauEstimate(5)


def test_tau_follows_a_line_that_becomes_slow() -> None:
    now = estimate(1.0, 1.0, tau_max=9)
    seen = [now.tau]
    for _ in range(12):
        now = now.with_round(4.0)
        seen.append(now.tau)
    assert seen == sorted(seen)
    assert (seen[0], seen[1], seen[-1]) == (1, 2, 4)


def test_patience_is_the_largest_overlap_in_seconds() -> None:
    assert estimate(0.5, 1.0).patience == 2.5
    assert TauEstimate(5).patience == 0.0
