"""Work units: the pieces in which peers share the training data, and what a peer says about them in its roster record.

**Order.** The n windows of the corpus are put into an order of their own for each epoch (see ``stretto.node.data``).
A unit is U consecutive places of that order; the last unit of an epoch takes what is left. Units are numbered over all
epochs, so a small corpus with many peers simply has units of several epochs in hand at once:

    k = ceil(n / U) units per epoch,    unit u = places (u mod k) U .. min(n, (u mod k + 1) U) - 1 of epoch u div k

A **sample** is one window of one epoch, named (unit, position). A peer works through a unit in order, so a unit and
the position in it say exactly what has been trained on.

**Word.** What a peer publishes: its claims, which units it knows to be done, and where units stand that nobody has.
All of it is the sender's word; everything is bounded here. What peers do with it is in ``unitbook.py``.
"""

import math
from dataclasses import dataclass

WINDOW = 2048
"""Units above the watermark that can be claimed or known to be done."""

MASK_BYTES = WINDOW // 8

MAX_CLAIMS = 4
"""Units that one peer may claim, the one that it trains on included."""

MAX_ABANDONED = 4
"""Units without an owner that one record tells of."""

MAX_UNIT = 1 << 48
MAX_UNIT_SEQUENCES = 1 << 20
MAX_SINCE = 1e11
"""Bounds of a unit's number, its length in windows, and a swarm time in seconds (as for clocks)."""


@dataclass(frozen=True)
class UnitCut:
    """How ``windows`` windows are cut into units of ``length``."""

    windows: int
    length: int

    def __post_init__(self) -> None:
        if self.windows < 1 or not 1 <= self.length <= MAX_UNIT_SEQUENCES:
            raise ValueError(f"{self.windows} windows cannot be cut into units of {self.length}")

    @property
    def per_epoch(self) -> int:
        """Units in an epoch."""
        return -(-self.windows // self.length)

    def size(self, unit: int) -> int:
        """Samples in a unit: ``length``, less only for the last one of an epoch."""
        return min(self.length, self.windows - unit % self.per_epoch * self.length)

    def place(self, unit: int) -> tuple[int, int]:
        """Epoch, and the place in its order at which the unit begins."""
        epoch, index = divmod(unit, self.per_epoch)
        return epoch, index * self.length


@dataclass(frozen=True)
class Claim:
    """A unit that a peer has taken, from position ``first``; it has trained on everything before ``position``.

    ``since`` is the swarm time at which it was chosen. ``held``: the claim has been published, and a reading of the
    roster begun after that showed no other one; only a held unit is trained on.
    """

    unit: int
    first: int
    position: int
    since: float
    held: bool

    def __post_init__(self) -> None:
        _check_place(self.unit, self.position)
        if not 0 <= self.first <= self.position:
            raise ValueError(f"a claim of unit {self.unit} begins at {self.first}, behind its position")
        if not (math.isfinite(self.since) and abs(self.since) <= MAX_SINCE):
            raise ValueError(f"a claim since {self.since}")


@dataclass(frozen=True)
class Trace:
    """How far a unit has come that nobody has. ``exact``: its last owner left in order, and trained no further."""

    unit: int
    position: int
    exact: bool

    def __post_init__(self) -> None:
        _check_place(self.unit, self.position)


@dataclass(frozen=True)
class DataWord:
    """One peer's word on the data: units below ``done_below`` are done, and unit ``done_below`` + i if bit i is set.

    Bit i of ``done_mask`` is bit i mod 8 of byte i div 8.
    """

    claims: tuple[Claim, ...] = ()
    done_below: int = 0
    done_mask: bytes = b""
    abandoned: tuple[Trace, ...] = ()

    def __post_init__(self) -> None:
        if len(self.claims) > MAX_CLAIMS or len({claim.unit for claim in self.claims}) < len(self.claims):
            raise ValueError(f"more than {MAX_CLAIMS} claims, or two of one unit")
        if not 0 <= self.done_below <= MAX_UNIT or len(self.done_mask) > MASK_BYTES:
            raise ValueError("the units done are beyond all bounds")
        if len(self.abandoned) > MAX_ABANDONED:
            raise ValueError(f"more than {MAX_ABANDONED} units without an owner")


def units_done(word: DataWord) -> int:
    """How many units the sender of ``word`` knows to be done."""
    return word.done_below + int.from_bytes(word.done_mask, "little").bit_count()


def _check_place(unit: int, position: int) -> None:
    if not (0 <= unit <= MAX_UNIT and 0 <= position <= MAX_UNIT_SEQUENCES):
        raise ValueError(f"unit {unit}, position {position} is no place in the data")
