"""Overlap tau: how many inner steps pass between a contribution's snapshot and its merge, per peer.

    tau = clamp(ceil(EMA(round time) / EMA(step time)), 1, tau_max)

A slow line or a fast machine has a large tau, and nobody else is delayed by it (the paper, section 3.3.2 and Figure
10: quality holds while tau <= 5 on some peers). ``patience`` is the longest time in seconds that a peer can wait for
a round's result before its deadline of tau_max steps; it is announced when the peer joins the round.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TauEstimate:
    """Running means in seconds; ``gain`` is the weight of a new measurement."""

    tau_max: int
    step_seconds: float = 0.0
    round_seconds: float = 0.0
    gain: float = 0.2

    def with_step(self, seconds: float) -> "TauEstimate":
        """After one inner step."""
        return replace(self, step_seconds=self._mix(self.step_seconds, seconds))

    def with_round(self, seconds: float) -> "TauEstimate":
        """After one round, from snapshot to result."""
        return replace(self, round_seconds=self._mix(self.round_seconds, seconds))

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0.0 else (1 - self.gain) * old + self.gain * new

    @property
    def tau(self) -> int:
        """Inner steps of overlap to expect; tau_max before anything was measured."""
        if not self.step_seconds or not self.round_seconds:
            return self.tau_max
        return max(min(1, self.tau_max), min(self.tau_max, math.ceil(self.round_seconds / self.step_seconds)))

    @property
    def patience(self) -> float:
        """Seconds until the deadline of a contribution that leaves now."""
        return self.tau_max * self.step_seconds
