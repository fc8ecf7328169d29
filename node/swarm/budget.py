"""How a cap on bytes per calendar month is spread over the month, and when a node pauses because of it.

An allowance in bytes flows in at (what is left of the cap) / (what is left of the month), and everything sent or
received is taken from it. It holds a day's worth at most, so a node that was quiet for a week may not send the week's
bytes in one evening; what overflows is spread over the rest of the month. Rounds are whole: a node begins one if the
allowance covers it, so at most one round's bytes go beyond the allowance, and beyond the cap.

    pause    the allowance is smaller than what a round costs
    go on    it holds what the missed rounds cost, and four rounds or an hour's inflow, whichever is more

Without the second line a node would go on, spend everything on catching up, and pause again before its first round.
Where a day's worth is less than all that, a full allowance is enough; it then goes into debt, and waits longer.

The month is that of UTC. Values in, values out: the time in seconds since 1970 is handed in.
"""

import datetime
from dataclasses import dataclass

DAY, HOUR = 86400.0, 3600.0

ROUNDS = 4
"""A node that goes on has the bytes of so many rounds, so that it does not pause after each one."""

FULL = 0.999
"""Share of the most that it can hold at which an allowance is full: an inflow approaches that without end."""


@dataclass(frozen=True)
class Used:
    """Bytes sent and received in ``month``, written like 2026-11."""

    month: str
    up: int
    down: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.up + self.down


def month_of(now: float) -> tuple[str, float, float]:
    """The name of the month that ``now`` is in, and when it begins and ends."""
    begin = datetime.datetime.fromtimestamp(now, datetime.timezone.utc).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    end = (begin + datetime.timedelta(days=32)).replace(day=1)
    return begin.strftime("%Y-%m"), begin.timestamp(), end.timestamp()


class MonthlyBudget:
    """A cap in bytes per month, 0 for none: then it only counts. ``used`` is what was counted before ``now``."""

    def __init__(self, cap: int, used: Used | None, now: float) -> None:
        self.cap = cap
        name, begin, end = month_of(now)
        # Of a later month: the clock was wrong then. What it counted was used all the same.
        counts = used is not None and used.month >= name
        self.used = Used(name, used.up, used.down) if used is not None and counts else Used(name, 0, 0)
        self.paused = False
        self.pauses = 0
        self._ends, self._at = end, now
        # A straight line that is a day ahead: who starts again does not get the day's worth again.
        ahead = cap * (now - begin + DAY) / (end - begin) - self.used.total
        self.level = min(ahead, self.most)

    # ------------------------------------------------------------------ what is left

    @property
    def left(self) -> int:
        """Bytes of the month's cap that are not used; negative beyond it."""
        return self.cap - self.used.total

    @property
    def inflow(self) -> float:
        """Bytes per second."""
        return max(0.0, self.left / max(1.0, self._ends - self._at))

    @property
    def most(self) -> float:
        """What the allowance can hold: a day's worth, and never more than is left."""
        return min(max(0.0, float(self.left)), self.inflow * DAY)

    @property
    def ends(self) -> float:
        """When the month ends."""
        return self._ends

    # ------------------------------------------------------------------ what happens

    def count(self, up: int, down: int, now: float) -> None:
        """So many bytes passed until ``now``."""
        self._flow(now)
        self.used = Used(self.used.month, self.used.up + up, self.used.down + down)
        self.level = min(self.level - up - down, self.most)

    def look(self, now: float, *, round_bytes: float, catch_up: float = 0.0) -> bool:
        """Whether the node is to pause, given what a round costs and what it costs to catch up with the others."""
        self._flow(now)
        if not self.cap:
            return False
        if self.paused:
            self.paused = self.left < round_bytes or self.level < self.enough(round_bytes, catch_up)
        else:
            self.paused = self.left < round_bytes or self.level < min(round_bytes, FULL * self.most)
            self.pauses += self.paused
        return self.paused

    def enough(self, round_bytes: float, catch_up: float = 0.0) -> float:
        """The allowance at which a paused node goes on."""
        return min(FULL * self.most, catch_up + max(ROUNDS * round_bytes, self.inflow * HOUR))

    def may_fetch(self, nbytes: float) -> bool:
        """Whether a download may begin: something is allowed now, and the whole fits into what is left."""
        return not self.cap or (not self.paused and self.level > 0 and nbytes <= self.left)

    def resumes_at(self, round_bytes: float, catch_up: float = 0.0) -> float:
        """When a paused node goes on, if it uses nothing meanwhile; the month's end at the latest."""
        if self.left < round_bytes or not self.inflow:
            return self._ends
        missing = self.enough(round_bytes, catch_up) - self.level
        return min(self._ends, self._at + max(0.0, missing / self.inflow))

    def _flow(self, now: float) -> None:
        """Time passes. A clock that is set back stops the inflow for as long; it brings no month back."""
        if now >= self._ends:
            name, begin, end = month_of(now)
            self.used = Used(name, 0, 0)
            self._ends, self._at = end, max(begin, self._at)
            # What a node owed is paid; what it had left over is not taken into the new month.
            self.level = self.most
        passed = max(0.0, now - self._at)
        inflow = self.inflow
        self._at = max(self._at, now)
        self.level = min(self.level + passed * inflow, self.most)
