"""The token bucket: the average holds whatever the pieces, and what never waits is paid for by what does."""

import pytest

from stretto.node.swarm.buckets import BURST_SECONDS, DEBT_SECONDS, TokenBucket


@pytest.mark.parametrize("piece", [1_000, 10_000, 333_333])
def test_the_average_holds_whatever_the_pieces(piece: int) -> None:
    bucket, now, passed = TokenBucket(100_000), 50.0, 0
    while now < 150:
        wait = bucket.wait(now)
        if wait:
            now += wait
        else:
            bucket.take(piece, now)
            passed += piece
    assert 100 * 100_000 - piece <= passed <= 100 * 100_000 + bucket.burst + 2 * piece


def test_a_pause_saves_no_more_than_a_burst() -> None:
    bucket = TokenBucket(1_000)
    assert bucket.burst == 1_000 * BURST_SECONDS
    bucket.take(100, 10_000.0)
    assert bucket.wait(10_000.0) == 0
    bucket.take(50, 10_000.0)
    assert bucket.wait(10_000.0) == pytest.approx(0.05)
    assert bucket.wait(10_000.04) == pytest.approx(0.01)
    assert bucket.wait(10_000.06) == 0


def test_a_flood_of_what_never_waits_stops_the_rest_for_a_bounded_time() -> None:
    bucket = TokenBucket(1_000)
    for _ in range(100):
        bucket.take(1_000, 1.0)
    assert bucket.wait(1.0) == pytest.approx(DEBT_SECONDS + 1)


def test_no_rate_is_no_limit() -> None:
    bucket = TokenBucket(0)
    bucket.take(10**12, 0.0)
    assert bucket.wait(0.0) == 0


def test_a_clock_that_stands_or_runs_back_gives_nothing() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(1_100, 5.0)
    assert bucket.wait(5.0) == bucket.wait(4.0) == pytest.approx(1.0)
