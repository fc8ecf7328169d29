"""Which units are done: a watermark and a bitmap of the ``WINDOW`` units from it on.

The watermark rises over every done unit that lies directly at it, so the set takes a few hundred bytes however long
the run lasts. It only grows: two peers' sets are joined by union, and need no order of messages.
"""

from collections.abc import Iterator

from stretto.protocol.units import MASK_BYTES, MAX_UNIT, WINDOW


class DoneSet:
    """A set of units; see the top of the file."""

    def __init__(self, below: int = 0, mask: bytes = b"") -> None:
        self.below = below
        self._bits = int.from_bytes(mask[:MASK_BYTES], "little")
        """Bit i stands for unit ``below`` + i."""
        self._rise()

    def __contains__(self, unit: int) -> bool:
        return unit < self.below or bool(self._bits >> (unit - self.below) & 1)

    def __len__(self) -> int:
        """Number of units done."""
        return self.below + self._bits.bit_count()

    @property
    def end(self) -> int:
        """The first unit beyond the window."""
        return self.below + WINDOW

    def open_units(self) -> Iterator[int]:
        """The units of the window that are not done, in order."""
        bits, below = self._bits, self.below
        return (below + index for index in range(WINDOW) if not bits >> index & 1)

    def mask(self) -> bytes:
        """The bitmap without the zero bytes at its end."""
        return self._bits.to_bytes((self._bits.bit_length() + 7) // 8, "little")

    def add(self, unit: int) -> None:
        """A unit of the window is done; one below the watermark is so already."""
        if self.below <= unit < self.end:
            self._bits |= 1 << (unit - self.below)
            self._rise()

    def raise_to(self, below: int) -> None:
        """Every unit under ``below`` is done."""
        below = min(below, MAX_UNIT)
        if below > self.below:
            self._bits >>= min(below - self.below, WINDOW)
            self.below = below
            self._rise()

    def join(self, below: int, mask: bytes, limit: int) -> None:
        """Add another set, of which only the units under ``limit`` are believed."""
        self.raise_to(min(below, limit))
        bits = int.from_bytes(mask[:MASK_BYTES], "little")
        shift = below - self.below
        if -WINDOW < shift < WINDOW:
            bits = bits << shift if shift >= 0 else bits >> -shift
            room = min(WINDOW, limit - self.below)
            self._bits |= bits & ((1 << max(room, 0)) - 1)
            self._rise()

    def _rise(self) -> None:
        ones = (~self._bits & (self._bits + 1)).bit_length() - 1
        self._bits >>= ones
        self.below += ones
