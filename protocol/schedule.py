"""When which fragment leaves.

Round r synchronizes fragment order[r mod P]. The paper (arXiv 2501.18512, Algorithm 2) counts inner steps: fragment p
leaves when (t - t_p) mod H = 0, with t_p = p H / P. Peers at home have different speeds, so here a shared *clock*
takes the place of the step count: round r departs at swarm time T_r, and T_(r+1) = T_r + interval, where

    interval = (H / P) / mean inner step rate of the group

so that H is the swarm-mean number of inner steps between two departures of one fragment, and every peer does a number
in proportion to its speed. With time counted in steps and rate 1 the clock is exactly the paper's schedule.

Round 0 departs one full cycle after the start, as in the paper (fragment p first leaves at H + t_p). Every commit
record carries a clock; the one with the highest round is in force. A new interval takes effect one round later than
the record that sets it, so that a record may be late without peers departing at different times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHANGE = 0.2
"""Largest relative change of the interval per round: one odd measurement cannot throw the schedule."""

MAX_DRIFT = 4.0
"""A record whose interval differs from a member's clock by more than this factor is refused."""

ROUND_TIME_MARGIN = 1.25
"""The interval stays at least this multiple of the measured round time."""

MIN_INTERVAL, MAX_INTERVAL = 1e-3, 24 * 3600.0
"""Seconds. A clock beyond these is a mistake or an attack."""

MAX_ROUND, MAX_TIME = 1 << 40, 1e11
"""Bounds of a clock's round and time (seconds), so that no arithmetic with a clock from a peer overflows."""


@dataclass(frozen=True)
class Clock:
    """Round ``round`` departs at swarm time ``at`` (seconds), later ones every ``interval`` seconds."""

    round: int
    at: float
    interval: float

    def __post_init__(self) -> None:
        if not 0 <= self.round <= MAX_ROUND:
            raise ValueError(f"clock round {self.round} is not in 0..2^40")
        if not -MAX_TIME <= self.at <= MAX_TIME:
            raise ValueError(f"clock time {self.at} s is not within {MAX_TIME:.0e} s of zero")
        if not MIN_INTERVAL <= self.interval <= MAX_INTERVAL:
            raise ValueError(f"clock interval {self.interval} s is not in {MIN_INTERVAL}..{MAX_INTERVAL:.0f}")

    def departure(self, round: int) -> float:
        """Swarm time at which ``round`` departs."""
        return self.at + (round - self.round) * self.interval

    def next_round(self, now: float) -> int:
        """The first round that departs at or after ``now``, never one before this clock's own."""
        return self.round + max(0, math.ceil((now - self.at) / self.interval - 1e-9))

    def swarm_step(self, now: float, inner_steps: int, fragments: int) -> float:
        """Mean number of inner steps that the swarm has done at ``now``: the time axis of learning-rate schedules.

        ``inner_steps`` is H. Round r departs at swarm step H + r H / P.
        """
        rounds = self.round + (now - self.at) / self.interval
        return max(0.0, inner_steps + rounds * inner_steps / fragments)


def fragment_of(round: int, fragments: int) -> int:
    """The fragment that ``round`` synchronizes: 0, 1, ..., P-1 and again."""
    return round % fragments


def first_clock(now: float, rate: float, inner_steps: int, fragments: int) -> Clock:
    """The clock of a new run: ``rate`` inner steps per second, round 0 after one full cycle."""
    interval = _bounded(inner_steps / fragments / rate)
    return Clock(round=0, at=now + fragments * interval, interval=interval)


def _bounded(interval: float) -> float:
    return min(max(interval, MIN_INTERVAL), MAX_INTERVAL)


def next_clock(
    clock: Clock, round: int, rates: Sequence[float], round_seconds: float, inner_steps: int, fragments: int
) -> Clock:
    """The clock that the record of ``round`` carries.

    ``rates`` are the members' inner steps per second, ``round_seconds`` the measured time from departure to decision.
    The departure of ``round`` + 1 stays as it was; the interval after it is new.
    """
    wanted = inner_steps / fragments / (sum(rates) / len(rates))
    wanted = max(wanted, ROUND_TIME_MARGIN * round_seconds)
    low, high = clock.interval * (1 - MAX_CHANGE), clock.interval * (1 + MAX_CHANGE)
    return Clock(round=round + 1, at=clock.departure(round + 1), interval=_bounded(min(max(wanted, low), high)))


def follows(clock: Clock, proposed: Clock) -> bool:
    """Whether a peer whose clock is ``clock`` accepts ``proposed``, from a record or from another peer.

    Looser than ``MAX_CHANGE``, since a peer may have missed the records of some rounds, each a bounded change: the
    interval, and the mean interval of the rounds between the two, may differ by the factor ``MAX_DRIFT``.
    """
    if not 1 / MAX_DRIFT <= proposed.interval / clock.interval <= MAX_DRIFT:
        return False
    rounds, seconds = proposed.round - clock.round, proposed.at - clock.at
    if rounds < 0:
        rounds, seconds = -rounds, -seconds
    slack = 2 * MAX_DRIFT * max(clock.interval, proposed.interval)
    due = rounds * clock.interval
    return due / MAX_DRIFT - slack <= seconds <= due * MAX_DRIFT + slack


def plausible(clock: Clock, now: float) -> bool:
    """Whether ``clock`` can be in force at swarm time ``now``: its own round is not far in the future."""
    return clock.at - now <= 2 * MAX_DRIFT * clock.interval
