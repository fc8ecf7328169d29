"""Alone after there were others, or among peers that cannot be reached: when to say so, and when to dial.

A node whose line was down, or whose peers all restarted, is found by nobody unless it dials. It dials soon and often
at first, since most outages are short, and warns with growing pauses, so that an outage of a night fills no log.
"""

from dataclasses import dataclass

GRACE = 10.0
"""Seconds without anybody in sight before that is called isolation: a roster may be late."""

REDIAL = 30.0
"""Seconds between two rounds of dialling, whether alone or not; dialling also merges a DHT that was split."""

FIRST_REDIAL = 2.0
"""Seconds after which an isolated node dials at first; each pause is twice the one before, up to ``REDIAL``."""

REMIND = 1.7
"""A warning is repeated when the time alone has grown by this factor."""


UNANSWERED = 10.0
"""Seconds in which nobody in the run accepted connections before people are told."""


@dataclass
class Unanswered:
    """Watches whether anybody in the run accepts connections: without one, no round can have a coordinator."""

    since: float | None = None
    _told: float = 0.0

    def warning_due(self, now: float, nobody: bool) -> bool:
        """Whether to warn at ``now`` (steady seconds) that ``nobody`` does: after a while, then ever more rarely."""
        if not nobody:
            self.since, self._told = None, 0.0
            return False
        if self.since is None:
            self.since = now
        lasted = now - self.since
        if lasted < max(UNANSWERED, 2 * self._told):
            return False
        self._told = lasted
        return True


@dataclass
class Isolation:
    """Watches how long nobody was in sight. All times are steady time in seconds."""

    seen_at: float | None = None
    """When somebody was in sight last; None: never."""
    _dial_at: float = 0.0
    _pause: float = FIRST_REDIAL
    _warned: float = 0.0

    def look(self, now: float, in_sight: int) -> None:
        """``in_sight`` peers are in the roster and reachable, as far as this node can tell."""
        if not in_sight:
            return
        if self.seconds(now):
            self._dial_at = now + REDIAL
        self.seen_at, self._pause, self._warned = now, FIRST_REDIAL, 0.0

    def seconds(self, now: float) -> float:
        """How long this node has been isolated, 0 if it is not, or never met anybody."""
        alone = 0.0 if self.seen_at is None else now - self.seen_at
        return alone if alone >= GRACE else 0.0

    def warning_due(self, now: float) -> bool:
        """Whether to warn now; once, again when the time has grown by ``REMIND``."""
        alone = self.seconds(now)
        if not alone or alone < REMIND * self._warned:
            return False
        self._warned = alone
        return True

    def dial_due(self, now: float) -> bool:
        """Whether to dial now."""
        if self.seconds(now) and self._dial_at - now > self._pause:
            self._dial_at = now  # the peers have just vanished: do not wait for the turn of quiet times
        if now < self._dial_at:
            return False
        self._dial_at = now + (self._pause if self.seconds(now) else REDIAL)
        if self.seconds(now):
            self._pause = min(REDIAL, 2 * self._pause)
        return True
