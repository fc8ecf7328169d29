"""Swarm time: the time that all peers of a run share, kept by this machine between two measurements.

    swarm time = steady clock + base (+ what has been slewed so far)

The steady clock never jumps and, where the system has such a one (``CLOCK_BOOTTIME`` on Linux), goes on while the
machine sleeps. The base is the wall clock at the start, then whatever the peers' time says (see
``stretto.node.swarm.time_votes``). So setting the wall clock, by hand or by NTP, does not touch rounds.

Nothing here asks anybody: ``stretto.node.swarm.time_keeper`` measures, and calls ``jump`` or ``slew``.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

SLEW = 0.002
"""Seconds per second by which a running clock is corrected at most: rounds hardly notice 2 ms."""

SLEPT = 2.0
"""Seconds by which the machine's time must have run ahead of its running time to call it sleep."""

STOOD_STILL = 10.0
"""Seconds between two looks, meant to be one apart, from which on the process was stopped rather than busy."""


def steady() -> float:
    """Seconds since some moment, never set by anybody, the time asleep included where the system counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class _State:
    """Swarm time is ``steady + base``, plus a share of ``rest`` that grows with the time since ``at`` (steady)."""

    at: float
    base: float
    rest: float

    def offset(self, steady_now: float) -> float:
        """Swarm time minus steady time, seconds."""
        slewed = min(abs(self.rest), SLEW * max(0.0, steady_now - self.at))
        return self.base + math.copysign(slewed, self.rest)


class SwarmClock:
    """This peer's swarm time. May be read from any thread: the state is replaced whole."""

    def __init__(self, *, raw: Callable[[], float] = steady, wall: Callable[[], float] = time.time) -> None:
        self._raw, self._wall = raw, wall
        at = raw()
        self._state = _State(at, wall() - at, 0.0)
        self.settled = False
        """Whether others may rely on it: set against peers, or found to be alone."""

    def now(self) -> float:
        """Swarm time in seconds."""
        raw = self._raw()
        return raw + self._state.offset(raw)

    def raw(self) -> float:
        """The steady clock in seconds: for differences that no correction may disturb."""
        return self._raw()

    def at(self, raw: float) -> float:
        """Swarm time at ``raw``, a recent value of ``raw()``."""
        return raw + self._state.offset(raw)

    @property
    def correction(self) -> float:
        """Swarm time minus this machine's wall clock, seconds."""
        return self.now() - self._wall()

    def jump(self, by: float) -> None:
        """Correct by ``by`` seconds at once."""
        raw = self._raw()
        self._state = _State(raw, self._state.offset(raw) + by, 0.0)

    def slew(self, by: float) -> None:
        """Correct by ``by`` seconds, ``SLEW`` seconds per second; replaces what is left of an earlier correction."""
        raw = self._raw()
        self._state = _State(raw, self._state.offset(raw), by)


def machine_clocks() -> tuple[float, float, float]:
    """Seconds since boot with and without the time asleep (equal where the system cannot tell), and the wall clock."""
    return steady(), time.monotonic(), time.time()


@dataclass(frozen=True, kw_only=True)
class Break:
    """Something that a running clock may not have survived: ``words`` say what.

    ``doubtful``: swarm time may be off by as much, so that this peer's clock should not count until it was measured.
    """

    words: str
    doubtful: bool


class SleepWatch:
    """Notices that the machine slept, that its clock was set, or that this process was stopped.

    ``look`` is called about once a second. A machine that sleeps is known by its two clocks since boot; a virtual one
    that was suspended by its wall clock, which its host sets forward afterwards.
    """

    def __init__(self, clocks: Callable[[], tuple[float, float, float]] = machine_clocks) -> None:
        self._clocks = clocks
        self._last = clocks()

    def look(self) -> Break | None:
        """What happened since the last look, None if nothing did."""
        last, self._last = self._last, self._clocks()
        passed, ran, wall = (now - before for now, before in zip(self._last, last, strict=True))
        if passed - ran > SLEPT:
            return Break(words=f"this machine slept for {passed - ran:.0f} s", doubtful=True)
        if abs(wall - passed) > SLEPT:
            direction = "forward" if wall > passed else "back"
            return Break(
                words=f"this machine's clock was set {abs(wall - passed):.1f} s {direction}, or the machine was "
                "suspended; swarm time does not follow it",
                doubtful=True,
            )
        if passed > STOOD_STILL:
            return Break(words=f"this process stood still for {passed:.0f} s", doubtful=False)
        return None
