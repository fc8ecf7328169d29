"""The inner loops of the E3M0 codec in numpy: no compiler needed, and the reference for the other paths.

The format and the checks are in `fp4`; here are the numbers of the format and what is done to legal input. Work goes
chunk by chunk through a set of scratch arrays that fits into a core's second-level cache and is used again. What
makes it fast:

- rounding adds to bit 22 of a value, so its lower 16 bits never matter: half the width, half the time;
- two values are decoded by one look-up: a code byte gives the eight bytes of both, in units of the block's largest
  level 2**(lo + 7 - 127). Both factors and their product are normal numbers for every legal ``lo``, so a processor
  that flushes subnormals to zero decodes the same bits;
- scale and weight are multiplied once per block, if that product is exact; then the result has been rounded once,
  exactly as if the value had been multiplied by the weight.
"""

import io
import math
import sys
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

BLOCK = 256
"""Values that share one scale byte."""
MAX_SCALE = 247
"""Largest legal scale byte: its level 7 is 2**127, the largest power of two in FP32."""
CHUNK = 1 << 17
"""Values handled at a time, a multiple of BLOCK."""

_TOO_BIG = 0x7F40
"""Upper half of the FP32 bits of 1.5 * 2**127, the first value that rounds up to 2**128; inf and nan lie above."""


if sys.byteorder != "little":
    raise ImportError("Stretto's codecs look at the halves of FP32 words and need a little-endian processor")


class _Scratch:
    """Work space for one chunk, about 2 MiB. Whatever is read has been written first."""

    def __init__(self) -> None:
        self.upper = np.empty(CHUNK, np.uint16)
        self.magnitude = np.empty(CHUNK, np.uint16)
        self.nibbles = np.empty(CHUNK, np.uint8)
        self.signs = np.empty(CHUNK, np.bool_)
        self.pairs = np.empty(CHUNK // 2, np.uint16)
        self.index = np.empty(CHUNK // 2, np.intp)
        self.values = np.empty(CHUNK, np.float32)


_free: list[_Scratch] = []
"""Scratch that no thread is using. Taking from a list and adding to it are atomic, so this needs no lock; it grows to
the number of threads that were ever in here at once."""
_block_starts = np.arange(0, CHUNK, BLOCK)
_block_starts.setflags(write=False)


def _take_scratch() -> _Scratch:
    try:
        return _free.pop()
    except IndexError:
        return _Scratch()


def encode(x: Floats, /) -> bytes | None:
    """The payload of (n,) float32, or None if a value cannot be held."""
    blocks = -(-x.size // BLOCK)
    # The one way to a bytes object that is written in place: its memory belongs to a BytesIO, which hands it out.
    store = io.BytesIO(bytes(blocks + (x.size + 1) // 2))
    if not _encode_into_view(x, store.getbuffer(), blocks):
        return None
    return store.getvalue()


def _encode_into_view(x: Floats, view: memoryview, blocks: int) -> bool:
    body = np.frombuffer(view, np.uint8)
    return encode_into(x, body[:blocks], body[blocks:])


def encode_into(x: Floats, scales: Bytes, codes: Bytes, /) -> bool:
    """Encode (n,) float32 into (ceil(n / 256),) scale bytes and (ceil(n / 2),) code bytes.

    Returns:
        False if a value cannot be held; the bytes mean nothing then.
    """
    scratch = _take_scratch()
    good = all(
        _encode_chunk(
            x[start : start + CHUNK],
            scales[start // BLOCK : (start + CHUNK) // BLOCK],
            codes[start // 2 : (start + CHUNK) // 2],
            scratch,
        )
        for start in range(0, x.size, CHUNK)
    )
    _free.append(scratch)
    return good


def _encode_chunk(x: Floats, scales: Bytes, codes: Bytes, scratch: _Scratch) -> bool:
    """Encode up to CHUNK values."""
    padded = scales.size * BLOCK
    upper, magnitude = scratch.upper[:padded], scratch.magnitude[:padded]
    nibbles, signs, pairs = scratch.nibbles[:padded], scratch.signs[:padded], scratch.pairs[: padded // 2]
    # Upper halves: read two bytes later, they are the lower halves, and those are what a cast keeps. It takes half the
    # time of a shift and a cast. The last value has nothing behind it.
    np.copyto(upper[: x.size - 1], x.view(np.uint8)[2:-2].view(np.uint32), casting="unsafe")
    upper[x.size - 1] = x[-1:].view(np.uint32)[0] >> np.uint32(16)
    upper[x.size :] = 0
    np.bitwise_and(upper, np.uint16(0x7FFF), out=magnitude)
    top = np.maximum.reduceat(magnitude, _block_starts[: scales.size])
    if int(top.max()) >= _TOO_BIG:
        return False
    scales[:] = np.maximum((top + np.uint16(0x40)) >> np.uint16(7), np.uint16(7)) - np.uint16(7)
    magnitude += np.uint16(0x40)
    magnitude >>= np.uint16(7)
    nibbles[:] = magnitude
    rows, lowest = nibbles.reshape(-1, BLOCK), scales[:, None]
    # Exponents at or below ``lo`` become code 0; maximum() first, because the type is unsigned.
    np.maximum(rows, lowest, out=rows)
    rows -= lowest
    np.less(upper.view(np.int16), np.int16(0), out=signs)
    eights = signs.view(np.uint8)
    eights *= np.uint8(8)  # numpy shifts bytes ten times more slowly than it multiplies them
    nibbles |= eights
    words = nibbles.view(np.uint16)
    np.right_shift(words, np.uint16(4), out=pairs)
    pairs |= words
    np.copyto(codes, pairs[: codes.size], casting="unsafe")
    return True


def add_into(scales: Bytes, codes: Bytes, weight: float, out: Floats, /) -> None:
    """``out += weight * value`` for (n,) float32 ``out``; ``weight`` is a float32 value, all bytes are legal."""
    factor = np.float32(weight)
    scratch = _take_scratch()
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, out.size, CHUNK):
            _add_chunk(
                scales[start // BLOCK : (start + CHUNK) // BLOCK],
                codes[start // 2 : (start + CHUNK) // 2],
                factor,
                out[start : start + CHUNK],
                scratch,
            )
    _free.append(scratch)


def _add_chunk(scales: Bytes, codes: Bytes, factor: np.float32, out: Floats, scratch: _Scratch) -> None:
    """Add up to CHUNK values."""
    index, values = scratch.index[: codes.size], scratch.values[: scales.size * BLOCK]
    np.copyto(index, codes)
    # "wrap" only because it lets take() write straight into its target; a byte is always a valid index.
    np.take(PAIRS, index, out=values.view(np.uint64)[: codes.size], mode="wrap")
    values[2 * codes.size :] = 0
    rows = values.reshape(-1, BLOCK)
    unit = SCALES[scales]
    weighted = unit * factor
    size = np.abs(weighted)
    if size.min() >= _NORMAL and size.max() < np.inf:
        rows *= weighted[:, None]
    else:
        rows *= unit[:, None]
        rows *= factor
    out += values[: out.size]


def _pair_table() -> NDArray[np.uint64]:
    """For every code byte its two FP32 values as one 8-byte entry, in units of the block's largest level."""
    level = [0.0] + [math.ldexp(1.0, c - 7) for c in range(1, 8)]
    nibble = np.array(level + [0.0] + [-value for value in level[1:]], dtype=np.float32)
    code = np.arange(256)
    table = np.stack([nibble[code & 15], nibble[code >> 4]], axis=1)
    return np.ascontiguousarray(table).view(np.uint64).reshape(-1)


PAIRS = _pair_table()
"""(256,) 8-byte entries: what a code byte decodes to, as two FP32 in units of the block's largest level."""
SCALES = np.ldexp(np.float32(1), np.arange(MAX_SCALE + 1) - 120).astype(np.float32)
PAIRS.setflags(write=False)
SCALES.setflags(write=False)
_NORMAL = np.float32(2.0**-126)
