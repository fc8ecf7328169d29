"""A token bucket: an average rate that holds, with short bursts allowed.

Tokens are bytes; they flow in at ``rate`` up to ``burst``. Whoever is let through when the level is not negative takes
what it needs, even more than there is, and those after it wait until the debt is paid. So over a time t at most
rate * t + burst + one piece pass, whatever the sizes of the pieces. What may not wait (control messages) only takes.
Values in, values out: the time in seconds is handed in.
"""

BURST_SECONDS = 0.1
DEBT_SECONDS = 5.0
"""The deepest debt. A flood of what never waits cannot stop the rest for longer than this."""


class TokenBucket:
    """``rate`` in bytes per second, 0 for no limit."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.burst = rate * BURST_SECONDS
        """Bytes that may pass at once after a pause, and the size of a good piece."""
        self._level, self._at = self.burst, 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next piece may pass, 0 for at once."""
        if not self.rate:
            return 0.0
        self._flow(now)
        # A debt of less than a microsecond may be too short to move the clock.
        wait = -self._level / self.rate
        return wait if wait > 1e-6 else 0.0

    def take(self, nbytes: int, now: float) -> None:
        """``nbytes`` pass."""
        if self.rate:
            self._flow(now)
            self._level = max(self._level - nbytes, -DEBT_SECONDS * self.rate - nbytes)

    def _flow(self, now: float) -> None:
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now
