"""The played network: what becomes of each message and transfer between two peers of a simulation.

It decides *when* something arrives, how often, and whether a bit of it is wrong; what arrives is none of its business.
Delays and losses hold for all links; a ``Trouble`` belongs to one peer and spoils what that peer sends. All chance
comes from the generator that is handed in, so a run can be repeated exactly.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Trouble:
    """What is wrong with one peer's line, for what it sends; ``slow`` also for what it receives."""

    slow: float = 1.0
    """Factor on every delay."""
    duplicate: bool = False
    """Everything arrives twice, the second time after a delay of its own."""
    reorder: float = 0.0
    """Longest extra delay: messages overtake one another."""
    drop_next: int = 0
    """So many of the next messages or transfers are lost, and nobody is told."""
    corrupt_next: int = 0
    """In so many of the next messages or transfers one bit is flipped."""


@dataclass(frozen=True)
class Arrival:
    """One copy of what was sent: ``delay`` from now, and the bit that is flipped on the way, None if it is whole."""

    delay: float
    flip: int | None = None

    def apply(self, data: bytes) -> bytes:
        """``data`` as it arrives."""
        if self.flip is None or not data:
            return data
        spoiled = bytearray(data)
        place = self.flip % (8 * len(data))
        spoiled[place // 8] ^= 1 << place % 8
        return bytes(spoiled)


@dataclass
class Network:
    """Delays and losses of the played network. Times are in the unit of the step times.

    ``drop`` is the probability that a message or transfer never arrives; the sender learns nothing. ``cut`` holds
    pairs of peer numbers that cannot reach each other; the sender is told that the peer is lost, unless the cut is
    ``silent``. With ``lingers`` what a peer has sent arrives even if it dies before that. ``encoded`` messages are
    packed and unpacked on the way, as on a real wire; that takes most of a simulation's time.
    """

    delay: float = 0.0
    jitter: float = 0.0
    drop: float = 0.0
    cut: set[tuple[int, int]] = field(default_factory=set)
    silent: bool = False
    lingers: bool = False
    encoded: bool = True
    troubles: defaultdict[int, Trouble] = field(default_factory=lambda: defaultdict(Trouble))
    """By peer number."""

    def connected(self, a: int, b: int) -> bool:
        """Whether a and b can reach each other."""
        return (a, b) not in self.cut and (b, a) not in self.cut

    def isolate(self, side: set[int], others: set[int]) -> set[tuple[int, int]]:
        """Cut every link between two sides; returns the pairs, for ``heal``."""
        pairs = {(a, b) for a in side for b in others}
        self.cut = self.cut | pairs
        return pairs

    def heal(self, pairs: set[tuple[int, int]]) -> None:
        """Undo an ``isolate``."""
        self.cut = self.cut - pairs

    def arrivals(self, sender: int, receiver: int, chance: random.Random) -> list[Arrival]:
        """All copies of one message or transfer that reach the other end; none if it is lost."""
        trouble = self.troubles[sender]
        if chance.random() < self.drop:
            return []
        if trouble.drop_next:
            trouble.drop_next -= 1
            return []
        flip = None
        if trouble.corrupt_next:
            trouble.corrupt_next -= 1
            flip = chance.getrandbits(30)
        slow = max(trouble.slow, self.troubles[receiver].slow)
        copies = 2 if trouble.duplicate else 1
        return [Arrival(slow * self._delay(chance) + trouble.reorder * chance.random(), flip) for _ in range(copies)]

    def _delay(self, chance: random.Random) -> float:
        return self.delay + chance.random() * self.jitter
