"""Which clock is in force at a peer: the one of the last record, or one that was heard of and follows it.

A clock says when rounds depart (``stretto.protocol.schedule``). Coordinators change it, within bounds, in the records
that they sign. Peers tell each other theirs outside rounds too, so that whoever missed rounds still knows when the
next one departs; such words stand in no record and count only as far as they follow what is sure.
"""

from collections.abc import Sequence

from stretto.protocol.schedule import Clock, follows


def _further(clock: Clock, than: Clock) -> bool:
    """Whether ``clock`` is in force instead of ``than``: that of the later round, of one round the earlier one."""
    return (clock.round, -clock.at, -clock.interval) > (than.round, -than.at, -than.interval)


class HeardClock:
    """The clock in force, ``now``; None until the run has one."""

    def __init__(self) -> None:
        self.now: Clock | None = None
        self._sure: Clock | None = None
        """The latest that a record set here, or the first one: heard clocks must follow it, not only each other."""

    def adopt(self, clock: Clock) -> bool:
        """Take over a clock if it is further on than the present one; of two for one round the earlier one wins."""
        if self._sure is None or _further(clock, self._sure):
            self._sure = clock
        if self.now is None or _further(clock, self.now):
            self.now = clock
            return True
        return False

    def adopt_first(self, clocks: Sequence[Clock]) -> None:
        """Without a clock: take the one that most of the others' clocks fit, the furthest of these."""
        if self.now is None and clocks:
            fits = {clock: sum(follows(clock, other) for other in clocks) for clock in clocks}
            self.adopt(max(clocks, key=lambda clock: (fits[clock], clock.round, -clock.at)))

    def hear(self, clock: Clock) -> None:
        """Take over another peer's clock if it follows the present one, and the last one that is sure.

        With the first condition alone one peer could lead all others to any clock, by a factor at each step.
        """
        if self.now is None or self._sure is None or not _further(clock, self.now):
            return
        if follows(self.now, clock) and follows(self._sure, clock):
            self.now = clock
