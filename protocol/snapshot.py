"""A fragment's outer state as bytes that several peers can serve in pieces, and the manifest that describes them.

    bytes = anchor, momentum       each (n,) float32, little-endian: 8 n bytes in all
    chunk i = bytes[i c : (i + 1) c],   c = chunk_bytes(8 n)

Peers at one head have equal bits, so a chunk may come from any of them. The size of a chunk follows from the size of
the state and nothing else: a request then names a chunk by head and index, also to a peer that gave no manifest. Each
chunk is checked against the digest in the manifest, the whole against the digest in the signed commit record; the
manifest is its sender's word until then.
"""

import sys
from dataclasses import dataclass

import numpy as np

from stretto.protocol import messages as m
from stretto.protocol.chain import SignedRecord, Tip, after
from stretto.protocol.digest import payload_digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.outer import Vector
from stretto.protocol.schedule import Clock
from stretto.protocol.streaming import Reduced, seal

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk, unless that would make more than ``messages.MAX_CHUNKS`` of them."""


def chunk_bytes(nbytes: int) -> int:
    """Bytes of every chunk but the last of a state of ``nbytes`` bytes: the same on every peer."""
    return CHUNK_BYTES * max(1, -(-nbytes // (CHUNK_BYTES * m.MAX_CHUNKS)))


def chunk_sizes(nbytes: int) -> list[int]:
    """The bytes of each chunk."""
    size = chunk_bytes(nbytes)
    return [min(size, nbytes - start) for start in range(0, nbytes, size)]


@dataclass(frozen=True)
class Snapshot:
    """A fragment's state as of one commit. The arrays, (n,) float32, are never changed: holding them costs no copy."""

    anchor: Vector
    momentum: Vector
    tip: Tip
    record: SignedRecord

    @property
    def nbytes(self) -> int:
        """8 bytes per weight."""
        return 8 * self.anchor.size

    def chunk(self, index: int) -> bytes:
        """The bytes of one chunk. IndexError if there is no such chunk."""
        start = index * chunk_bytes(self.nbytes)
        if not 0 <= start < self.nbytes:
            raise IndexError(f"a state of {self.nbytes} bytes has no chunk {index}")
        stop, half = min(self.nbytes, start + chunk_bytes(self.nbytes)), self.nbytes // 2
        return b"".join(
            _little(array)[max(0, start - offset) : max(0, stop - offset)]
            for array, offset in ((self.anchor, 0), (self.momentum, half))
        )

    def manifest(self, clock: Clock) -> m.State:
        """What a peer with this state offers. Reads all of it, so it belongs in a worker thread."""
        size, nbytes = chunk_bytes(self.nbytes), self.nbytes
        chunks = tuple(payload_digest(self.chunk(index)) for index in range(-(-nbytes // size)))
        state = self.record.record.state
        return m.State(self.tip.fragment, self.tip, self.record, clock, state, nbytes, size, chunks)


def _little(array: Vector) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").data.cast("B") if array.size else memoryview(b"")


def check_manifest(manifest: m.State, fragment: int, numel: int, run: bytes) -> Tip:
    """The tip that ``manifest`` leads to, of a fragment with ``numel`` weights. RemoteProtocolError if unsound.

    The tip is made from the record; what the sender says of it is not used. The record's signature is not checked
    here.
    """
    if manifest.record is None:
        raise RemoteProtocolError("an initial state is offered, which is nothing to take over")
    record = manifest.record.record
    if manifest.fragment != fragment or record.fragment != fragment or record.run != run:
        raise RemoteProtocolError("the state of another fragment or run is offered")
    if manifest.nbytes != 8 * numel or manifest.chunk_bytes != chunk_bytes(8 * numel):
        raise RemoteProtocolError(f"a state of {manifest.nbytes} bytes is offered where {8 * numel} are due")
    if manifest.digest != record.state:
        raise RemoteProtocolError("the state that is offered is not the one that its record names")
    return after(manifest.record.record)


class Assembly:
    """A state that arrives chunk by chunk, in any order. ``anchor`` and ``momentum`` are (n,) float32 to be filled."""

    def __init__(self, anchor: Vector, momentum: Vector) -> None:
        self._anchor, self._momentum = anchor, momentum

    def put(self, index: int, data: bytes | bytearray) -> None:
        """Write chunk ``index``, whose digest and size were checked."""
        start = index * chunk_bytes(8 * self._anchor.size)
        for array, offset in ((self._anchor, 0), (self._momentum, 4 * self._anchor.size)):
            first, last = max(0, start - offset), min(4 * array.size, start + len(data) - offset)
            if first < last:
                array.data.cast("B")[first:last] = memoryview(data)[first + offset - start : last + offset - start]

    def finish(self) -> Reduced:
        """The state, with the digest of what is here; once, when all chunks are in. Heavy."""
        if sys.byteorder == "big":
            for array in (self._anchor, self._momentum):
                array.byteswap(inplace=True)
        return seal(self._anchor, self._momentum)
