"""How a join goes, for the person who waits for it: megabytes of megabytes, rate, time left, from how many peers.

    rate = bytes that came in the last SPAN seconds / SPAN        time left = (total - have) / rate

The rate is that of what came, pauses included, so that the time left is honest on a line that stutters. The total may
grow meanwhile: what the swarm commits during a download has to be fetched too. Values in, values out.
"""

from collections import deque
from dataclasses import dataclass, field

SPAN = 10.0
"""Seconds over which the rate is taken: a few chunks of a slow line."""

SAY_EVERY = 5.0
"""Seconds between two entries in the metrics about the same download."""


@dataclass(frozen=True)
class Amount:
    """Bytes of all fragments that are here, of how many that are needed, and the peers that they come from now."""

    have: int
    total: int
    donors: int


@dataclass
class Inflow:
    """Follows the download of a whole run's state; ``look`` is called every now and then, times are steady seconds."""

    amount: Amount = Amount(0, 0, 0)
    began: float | None = None
    """When the first bytes were asked for."""
    came: float = 0.0
    """When the last bytes came."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    _said: float = float("-inf")

    def look(self, amount: Amount, now: float) -> None:
        """What is here at ``now``."""
        if self.began is None and (amount.donors or amount.have):
            self.began = now
        if amount.have > self.amount.have:
            self.came = now
        self.amount = amount
        self._seen.append((now, amount.have))
        while len(self._seen) > 2 and self._seen[1][0] <= now - SPAN:
            self._seen.popleft()

    @property
    def seconds(self) -> float:
        """From the first bytes that were asked for to the last that came."""
        return max(0.0, self.came - self.began) if self.began is not None else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second of late, 0 before anything can be said."""
        if len(self._seen) < 2:
            return 0.0
        (began, before), (now, have) = self._seen[0], self._seen[-1]
        return max(0.0, (have - before) / (now - began)) if now > began else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at this rate, None if nothing comes."""
        return (self.amount.total - self.amount.have) / self.rate if self.rate else None

    def entry_due(self, now: float) -> bool:
        """Whether to write an entry now."""
        if now - self._said < SAY_EVERY:
            return False
        self._said = now
        return True

    def words(self) -> str:
        """All of it in a few words."""
        amount, left = self.amount, self.left
        text = f"{amount.have / 1e6:.1f} of {amount.total / 1e6:.1f} MB from {amount.donors} peer(s)"
        if left is None:
            return text
        return f"{text}, {self.rate / 1e6:.2f} MB/s, about {_time(left)} left"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
