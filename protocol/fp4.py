"""E3M0: four bits per value for outer gradients, the wire format ``e3m0-256``.

Streaming DiLoCo (arXiv 2501.18512, section 2.3) sends outer gradients as FP4 with one sign bit, three exponent bits
and no mantissa, and sums them in FP32. The paper leaves scale, blocks, zero and rounding open; here they are:

- the vector is cut into blocks of 256 values, the last one may be short;
- each block has one byte ``lo``, a power-of-two scale: ``lo = max(top, 7) - 7``, where ``top`` is the largest rounded
  biased exponent in the block, so ``lo`` is 0..247;
- each value is a nibble ``sign << 3 | c``: ``c = 0`` is zero (of either sign bit), ``c = 1..7`` is
  ``+-2 ** (lo + c - 127)``, which is 7 levels over 6 octaves below the block's largest value;
- rounding is to the nearest level in linear space, ``exponent = (bits + 0x00400000) >> 23``: a mantissa of 1.5 or more
  goes up. The encoder does no float arithmetic, so every machine writes the same bytes;
- a payload is ``ceil(n / 256)`` scale bytes, then ``ceil(n / 2)`` code bytes, low nibble first, an unused high nibble
  being zero: 4.031 bits per value, and no field that has an endianness.

Every level is a power of two, which is why a sum with equal weights is exact, and the same in any order, as long as
the blocks that meet lie within about 15 octaves of each other (8 peers). Other weights need a fixed order of peers.

This file holds the format and nothing else, but for the three checks at its head, which all wire codecs share. A
payload is only ever sized by ``n``, which comes from the local model and never from a peer.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Payload: TypeAlias = bytes | bytearray | memoryview

BLOCK = 256
"""Values that share one scale byte."""
CHUNK = 1 << 18
"""Values handled at a time (a multiple of BLOCK): the temporaries stay in cache and below a few MiB."""
MAX_SCALE = 247
"""Largest legal scale byte: its level 7 is 2**127, the largest power of two in FP32."""

_TOO_BIG = 0x7F40
"""Upper half of the FP32 bits of 1.5 * 2**127, the first value that rounds up to 2**128; inf and nan lie above."""


def check_values(x: Floats, what: str) -> None:
    """Refuse anything but a one-dimensional, contiguous, native float32 array.

    Other dtypes are not converted on purpose: a silent float64 -> float32 would hide an overflow.

    Raises:
        LocalProtocolError: naming ``what`` and what was handed in instead.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        got = f"{x.dtype} array of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise LocalProtocolError(f"{what} must be a contiguous float32 array of shape (n,), got {got}")


def check_sum(out: Floats, weight: float) -> np.float32:
    """Refuse an accumulator that cannot be added to in place, and a weight that is not finite in FP32.

    Returns:
        The weight as FP32, the number that every peer multiplies by.

    Raises:
        LocalProtocolError: if either is unfit.
    """
    check_values(out, "the accumulator")
    if not out.flags.writeable:
        raise LocalProtocolError("the accumulator is read-only; pass an array that owns its memory")
    if not abs(weight) <= float(np.finfo(np.float32).max):
        raise LocalProtocolError(f"a weight must be finite in float32, got {weight}")
    return np.float32(weight)


def check_payload(payload: Payload, expected: int, what: str) -> Bytes:
    """View a payload as bytes, without a copy, if it has the one length that it may have.

    Any buffer will do, read-only or at an odd address.

    Raises:
        RemoteProtocolError: if the length differs from ``expected``, in bytes.
    """
    view = memoryview(payload)
    if view.nbytes != expected:
        raise RemoteProtocolError(
            f"{what} must be {expected} bytes long, got {view.nbytes}; the sender's fragments differ from ours, "
            "or the transfer was cut"
        )
    return np.frombuffer(view, dtype=np.uint8)


def nbytes(n: int) -> int:
    """Length in bytes of the payload of ``n`` values.

    Raises:
        LocalProtocolError: if ``n`` is negative.
    """
    if n < 0:
        raise LocalProtocolError(f"a payload cannot hold {n} values")
    return -(-n // BLOCK) + (n + 1) // 2


def encode(x: Floats) -> bytes:
    """Encode (n,) float32, contiguous, into ``nbytes(n)`` bytes; ``x`` is only read.

    Raises:
        LocalProtocolError: if ``x`` is of another kind, or holds a nan, an inf or a magnitude of 1.5 * 2**127 or more.
    """
    check_values(x, "an outer gradient")
    n = x.size
    payload = np.empty(nbytes(n), dtype=np.uint8)
    scales, codes = _parts(payload, n)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        _encode_chunk(
            x[start:stop],
            start,
            scales[start // BLOCK : -(-stop // BLOCK)],
            codes[start // 2 : (stop + 1) // 2],
        )
    return payload.tobytes()


def validate(payload: Payload, n: int) -> None:
    """Check a payload of ``n`` values without decoding it.

    Raises:
        RemoteProtocolError: if the length is wrong, a scale byte is above 247, or the unused nibble is not zero.
    """
    _legal_parts(payload, n)


def decode(payload: Payload, n: int) -> Floats:
    """Decode a payload into a new (n,) float32 array; every value is zero or a normal number.

    Raises:
        RemoteProtocolError: if the payload is not a legal one for ``n`` values.
    """
    scales, codes = _legal_parts(payload, n)
    values = np.empty(n, dtype=np.float32)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        values[start:stop] = _decode_chunk(scales, codes, start, stop)
    return values


def decode_add(payload: Payload, weight: float, out: Floats) -> None:
    """Add ``float32(weight) * value`` to ``out``, (n,) float32, in place.

    Product and sum are two IEEE operations, never a fused one, so the bits are the same on every machine. A legal
    payload may still hold values near 2**127, and a sum of those is inf: the caller bounds a contribution's norm.

    Raises:
        RemoteProtocolError: if the payload is not a legal one for ``out.size`` values; ``out`` is untouched.
        LocalProtocolError: if ``out`` or ``weight`` is unfit; ``out`` is untouched.
    """
    factor = check_sum(out, weight)
    scales, codes = _legal_parts(payload, out.size)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, out.size, CHUNK):
            stop = min(start + CHUNK, out.size)
            values = _decode_chunk(scales, codes, start, stop)
            if factor != 1:
                values *= factor
            out[start:stop] += values


def _parts(body: Bytes, n: int) -> tuple[Bytes, Bytes]:
    """Cut a payload of ``n`` values into (scale bytes, code bytes), as views."""
    blocks = -(-n // BLOCK)
    return body[:blocks], body[blocks:]


def _legal_parts(payload: Payload, n: int) -> tuple[Bytes, Bytes]:
    """The parts of a payload, after all that can be wrong with it has been ruled out."""
    scales, codes = _parts(check_payload(payload, nbytes(n), f"an e3m0 payload of {n} values"), n)
    if n and int(scales.max()) > MAX_SCALE:
        block = int(np.argmax(scales > MAX_SCALE))
        raise RemoteProtocolError(
            f"scale byte {int(scales[block])} of block {block} in an e3m0 payload is above {MAX_SCALE}; "
            "the sender is faulty"
        )
    if n % 2 and codes[-1] >> 4:
        raise RemoteProtocolError(f"the unused nibble at the end of an e3m0 payload of {n} values is not zero")
    return scales, codes


def _encode_chunk(x: Floats, start: int, scales: Bytes, codes: Bytes) -> None:
    """Encode up to CHUNK values, of which the first is value ``start``, into their scale and code bytes."""
    # Rounding adds to bit 22, so the lower 16 bits of a value never matter: half the width, twice the speed.
    upper = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    magnitude = upper & np.uint16(0x7FFF)
    if int(magnitude.max()) >= _TOO_BIG:
        index = int(np.argmax(magnitude >= _TOO_BIG))
        raise LocalProtocolError(
            f"value {start + index} of an outer gradient is {x[index]}, "
            "but e3m0 holds finite values below 1.5 * 2**127 only"
        )
    magnitude += np.uint16(0x40)
    magnitude >>= np.uint16(7)
    exponents = np.zeros((scales.size, BLOCK), dtype=np.uint8)
    flat = exponents.reshape(-1)[: x.size]
    flat[:] = magnitude
    scales[:] = np.maximum(exponents.max(axis=1), 7) - np.uint8(7)
    lowest = scales[:, None]
    # Exponents at or below ``lo`` become code 0; maximum() first, because the type is unsigned.
    np.maximum(exponents, lowest, out=exponents)
    exponents -= lowest
    upper >>= np.uint16(12)
    upper &= np.uint16(8)
    flat |= upper.astype(np.uint8)
    pairs = exponents.reshape(-1)[: 2 * codes.size].view(np.dtype("<u2"))
    np.bitwise_or(pairs, pairs >> 4, out=codes, casting="unsafe")


def _decode_chunk(scales: Bytes, codes: Bytes, start: int, stop: int) -> Floats:
    """The values ``start`` to ``stop`` as a new array; ``start`` is a multiple of CHUNK."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    values = np.empty((last - first, BLOCK), dtype=np.float32)
    flat = values.reshape(-1)
    used = codes[start // 2 : (stop + 1) // 2]
    # "clip" only because it lets take() write straight into its target; a byte is always a valid index.
    np.take(_PAIRS, used, out=flat.view(np.uint64)[: used.size], mode="clip")
    flat[2 * used.size :] = 0
    values *= _SCALES[scales[first:last]][:, None]
    return flat[: stop - start]


def _pair_table() -> NDArray[np.uint64]:
    """For every code byte its two FP32 values as one 8-byte entry, in units of the block's largest level."""
    level = [0.0] + [math.ldexp(1.0, c - 7) for c in range(1, 8)]
    nibble = np.array(level + [0.0] + [-value for value in level[1:]], dtype=np.float32)
    code = np.arange(256)
    table = np.stack([nibble[code & 15], nibble[code >> 4]], axis=1)
    return np.ascontiguousarray(table).view(np.uint64).reshape(-1)


# Scaling by the largest level, 2**(lo + 7 - 127), keeps both factors and the product normal for every legal ``lo``, so
# that a processor that flushes subnormals to zero decodes the same bits.
_PAIRS = _pair_table()
_SCALES = np.ldexp(np.float32(1), np.arange(MAX_SCALE + 1) - 120).astype(np.float32)
_PAIRS.setflags(write=False)
_SCALES.setflags(write=False)
