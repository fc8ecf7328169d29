"""Wire formats with one bf16 scale per block of 256 values: ``int8``, ``e2m1`` and ``e1m0``.

A vector is cut into blocks of 256 values, the last one may be short. A payload is ``ceil(n / 256)`` scales, each a
bf16 in two little-endian bytes, then the codes of all values without a gap, the first in the lowest bits; bits that
the last byte has left over are zero. A value is ``level(code) * scale``:

    name   bits    levels                                  scale                        error (normal, Laplace)
    int8   8.0625  c / 127 for c = -127..127               largest magnitude            .007  .010
    e2m1   4.0625  0, .5, 1, 1.5, 2, 3, 4, 6, either sign  largest magnitude / 6        .111  .130
    e1m0   2.0625  1, 2, either sign, no zero              least squares, see ``E1M0``  .397  .519

The error is relative, in L2. E2M1 and E1M0 are named after the bits of exponent and mantissa beside the sign; E2M1 has
the levels of the FP4 in the OCP Microscaling specification. For comparison, E3M0 (see ``fp4``) has an error of .195 at
4.031 bits on both, and stays there when a block has large outliers, which E2M1 does not.

Every machine writes and reads the same bytes and bits. A maximum depends on no order; sums run over whole numbers in
int32, which are exact in any order; all else is one correctly rounded operation after the other. Scale 0 stands
for a block of zeros. The other scales are bounded, on both sides, so that each decoded value is zero or a normal,
finite float32 (a processor that flushes subnormals decodes the same), and an encoder takes the nearest scale within
the bounds. Encoding what was decoded gives the same values again.

This file holds these formats and nothing else. As in ``fp4`` a payload is sized by the local ``n`` only.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import (
    BLOCK,
    CHUNK,
    Bytes,
    Floats,
    Payload,
    check_payload,
    check_sum,
    check_values,
    cut_blocks,
)

Words: TypeAlias = NDArray[np.uint16]


class Kernel(Protocol):
    """The loops of ``int8`` in C. Arguments have been checked; ``encode`` gives None if a value is not finite."""

    def encode(self, x: Floats, /) -> bytes | None: ...
    def add_into(self, payload: Bytes, weight: float, out: Floats, /) -> None: ...


@dataclass(frozen=True)
class _Cut:
    """Finite values in ``b`` blocks, the last one padded with zeros."""

    values: Floats  # (b, 256)
    magnitudes: Floats  # (b, 256)
    top: Floats  # (b,), the largest magnitude of each block
    sizes: NDArray[np.int32]  # (b,), values in each block, padding not counted


class _Blocks:
    """Base of the three: the payload's shape, its checks and the loops. Subclasses say what scales and codes are.

    ``smallest`` and ``largest`` are the bounds of a scale that is not 0, as bf16 words; positive floats are ordered
    like their words. ``table`` holds for each code byte the levels of its values, (256, 8 // bits) float32.
    """

    name: str
    bits: int
    smallest: int
    largest: int
    table: Floats

    def _scales(self, cut: _Cut) -> Words:
        """The blocks' scales as legal bf16 words, (b,)."""
        raise NotImplementedError

    def _codes(self, cut: _Cut, scales: Floats) -> Bytes:
        """The values' codes, (b, 256), one a byte; ``scales`` is (b, 1) float32, none of them 0."""
        raise NotImplementedError

    def _check_codes(self, codes: Bytes) -> None:
        """Refuse code bytes that stand for nothing; by default all of them stand for something."""

    def nbytes(self, n: int) -> int:
        """Length in bytes of the payload of ``n`` values; LocalProtocolError if ``n`` is negative."""
        if n < 0:
            raise LocalProtocolError(f"a payload cannot hold {n} values")
        return 2 * -(-n // BLOCK) + -(-n * self.bits // 8)

    def encode(self, x: Floats) -> bytes:
        """Encode (n,) float32, contiguous and finite; ``x`` is only read. LocalProtocolError for anything else."""
        check_values(x, f"the input of codec {self.name}")
        payload = np.empty(self.nbytes(x.size), dtype=np.uint8)
        words, codes = self._parts(payload, x.size)
        for start in range(0, x.size, CHUNK):
            part = x[start : start + CHUNK]
            if not np.isfinite(part).all():
                index = int(np.argmin(np.isfinite(part)))
                raise LocalProtocolError(f"value {start + index} is {part[index]}, which {self.name} cannot hold")
            stop = start + part.size
            self._encode_chunk(
                part,
                words[start // BLOCK : -(-stop // BLOCK)],
                codes[start * self.bits // 8 : -(-stop * self.bits // 8)],
            )
        return payload.tobytes()

    def validate(self, payload: Payload, n: int) -> None:
        """Check a payload of ``n`` values without decoding it.

        Raises:
            RemoteProtocolError: if the length is wrong, a scale is out of bounds (negative, not finite, ...), a code
                stands for nothing, or an unused bit is set.
        """
        self._legal_parts(payload, n)

    def cut(self, payload: Payload, n: int, start: int, stop: int) -> bytes:
        """The payload of values start..stop out of that of ``n``."""
        return cut_blocks(payload, n, start, stop, scale_bytes=2, bits=self.bits)

    def decode(self, payload: Payload, n: int) -> Floats:
        """Decode into a new (n,) float32 array of zeros and normal numbers; RemoteProtocolError as in ``validate``."""
        words, codes = self._legal_parts(payload, n)
        values = np.empty(n, dtype=np.float32)
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            values[start:stop] = self._decode_chunk(words, codes, start, stop)
        return values

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        """Add ``float32(weight) * value`` to ``out``, (n,) float32, in place, product and sum rounded separately.

        Whatever is refused (RemoteProtocolError for the payload, LocalProtocolError for the rest) is refused before
        ``out`` is touched. Sums of values near the end of the range may be inf: the caller bounds norms.
        """
        factor = check_sum(out, weight)
        words, codes = self._legal_parts(payload, out.size)
        with np.errstate(over="ignore", under="ignore"):
            for start in range(0, out.size, CHUNK):
                stop = min(start + CHUNK, out.size)
                values = self._decode_chunk(words, codes, start, stop)
                values *= factor
                out[start:stop] += values

    def _parts(self, body: Bytes, n: int) -> tuple[Words, Bytes]:
        """Cut a payload of ``n`` values into (scales, code bytes), as views, perhaps unaligned."""
        blocks = -(-n // BLOCK)
        return body[: 2 * blocks].view(np.dtype("<u2")), body[2 * blocks :]

    def _legal_parts(self, payload: Payload, n: int) -> tuple[Words, Bytes]:
        """The parts of a payload, after all that can be wrong with it has been ruled out."""
        words, codes = self._parts(check_payload(payload, self.nbytes(n), f"an {self.name} payload of {n} values"), n)
        illegal = (words > self.largest) | ((words < self.smallest) & (words != 0))
        if illegal.any():
            block = int(np.argmax(illegal))
            raise RemoteProtocolError(
                f"scale {float(_floats(words[block : block + 1])[0])} of block {block} in an {self.name} payload must "
                f"be 0 or in {self._bound(self.smallest)}..{self._bound(self.largest)}; the sender is faulty"
            )
        used = n * self.bits % 8
        if used and codes[-1] >> used:
            raise RemoteProtocolError(f"the unused bits at the end of an {self.name} payload of {n} values are not 0")
        if n:
            self._check_codes(codes)
        return words, codes

    @staticmethod
    def _bound(word: int) -> float:
        return float(_floats(np.array([word], dtype=np.uint16))[0])

    def _encode_chunk(self, x: Floats, words: Words, codes: Bytes) -> None:
        """Encode up to CHUNK finite values into their scales and code bytes."""
        values = np.zeros((words.size, BLOCK), dtype=np.float32)
        values.reshape(-1)[: x.size] = x
        magnitudes = np.abs(values)
        sizes = np.full(words.size, BLOCK, dtype=np.int32)
        sizes[-1] = x.size - (words.size - 1) * BLOCK
        with np.errstate(under="ignore"):
            cut = _Cut(values, magnitudes, magnitudes.max(axis=1), sizes)
            scales = self._scales(cut)
            empty = scales == 0
            wide = self._codes(cut, _floats(np.where(empty, np.uint16(self.smallest), scales))[:, None])
        wide[empty] = 0
        words[:] = scales
        # The codes of one byte as a row; what pads the last block is 0 and may be cut off.
        rows = wide.reshape(-1, 8 // self.bits)[: codes.size]
        codes[:] = rows[:, 0]
        for place in range(1, rows.shape[1]):
            codes |= rows[:, place] << np.uint8(place * self.bits)

    def _decode_chunk(self, words: Words, codes: Bytes, start: int, stop: int) -> Floats:
        """The values ``start`` to ``stop`` as a new array; ``start`` is a multiple of CHUNK."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        values = np.empty((last - first, BLOCK), dtype=np.float32)
        used = codes[start * self.bits // 8 : -(-stop * self.bits // 8)]
        rows = values.reshape(-1, 8 // self.bits)
        # "clip" only because it lets take() write straight into its target; a byte is always a valid index.
        np.take(self.table, used, axis=0, out=rows[: used.size], mode="clip")
        rows[used.size :] = 0
        values *= _floats(words[first:last])[:, None]
        return values.reshape(-1)[: stop - start]


class Int8(_Blocks):
    """Eight bits: ``code / 127`` of the block's largest magnitude, as two's complement; -128 is illegal.

    The scale is that magnitude, rounded to the nearest bf16, ties to even. Codes are ``x / scale * 127`` rounded to
    the nearest whole number, ties to even; what exceeds the scale, which is less than half a step, becomes 127.

    Averages travel in this codec in every round, so its loops also exist in C (``_int8``): ``kernel``.
    """

    name = "int8"
    bits = 8
    smallest = 0x0400  # 2**-119: a 127th of it is normal
    largest = 0x7F7F

    def __init__(self, kernel: "Kernel | None" = None) -> None:
        self._kernel = kernel
        code = np.arange(256, dtype=np.uint8).view(np.int8)
        self.table = (code.astype(np.float32) / np.float32(127))[:, None]
        self.table.setflags(write=False)

    def encode(self, x: Floats) -> bytes:
        """As in every codec."""
        payload = None
        if self._kernel is not None:
            check_values(x, f"the input of codec {self.name}")
            payload = self._kernel.encode(x)
        return super().encode(x) if payload is None else payload  # numpy names the value that is not finite

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        """As in every codec."""
        if self._kernel is None:
            super().decode_add(payload, weight, out)
            return
        factor = check_sum(out, weight)
        self._legal_parts(payload, out.size)
        self._kernel.add_into(np.frombuffer(payload, dtype=np.uint8), float(factor), out)

    def _scales(self, cut: _Cut) -> Words:
        words: Words = np.clip(_nearest(cut.top), self.smallest, self.largest)
        words[cut.top == 0] = 0
        return words

    def _codes(self, cut: _Cut, scales: Floats) -> Bytes:
        # Division first: 127 / scale could overflow.
        ratio = cut.values / scales
        ratio *= np.float32(127)
        np.rint(ratio, out=ratio)
        np.clip(ratio, -127, 127, out=ratio)
        return ratio.astype(np.int8).view(np.uint8)

    def _check_codes(self, codes: Bytes) -> None:
        if int(codes.view(np.int8).min()) == -128:
            index = int(np.argmin(codes.view(np.int8)))
            raise RemoteProtocolError(f"value {index} of an int8 payload has code -128, which does not exist")


class E2M1(_Blocks):
    """Four bits, ``sign << 3 | c``: the c-th of the levels 0, .5, 1, 1.5, 2, 3, 4, 6, times the scale.

    The scale is a sixth of the block's largest magnitude, rounded up to a bf16, so that no value lies above level 6.
    Rounding is to the nearest level, ties away from zero. Code 8, a zero with a sign, is read but never written.
    """

    name = "e2m1"
    bits = 4
    smallest = 0x0100  # 2**-125: half of it is normal
    largest = 0x7E2A  # 170 * 2**118: six times it is below 2**128, six times the next one is not

    levels = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self) -> None:
        nibble = np.array([*self.levels, 0.0, *(-level for level in self.levels[1:])], dtype=np.float32)
        self.table = _levels_of_bytes(nibble, self.bits)
        # The limits between levels are whole quarters, so the whole quarters in a magnitude, 0..24, tell its level.
        middles = [(low + high) / 2 for low, high in zip(self.levels, self.levels[1:], strict=False)]
        code = [sum(quarters / 4 >= middle for middle in middles) for quarters in range(32)]
        self._nearest = np.array([*code, *(c | 8 if c else 0 for c in code)], dtype=np.uint8)
        self._nearest.setflags(write=False)

    def _scales(self, cut: _Cut) -> Words:
        bits = (cut.top / np.float32(6)).view(np.uint32)
        up = ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
        words: Words = np.clip(up, self.smallest, self.largest)
        words[cut.top == 0] = 0
        return words

    def _codes(self, cut: _Cut, scales: Floats) -> Bytes:
        quarters = cut.magnitudes / scales
        quarters *= np.float32(4)
        index = quarters.astype(np.uint8)  # at most 24, even where the scale had to be the largest one
        index |= (cut.values < 0).view(np.uint8) << np.uint8(5)
        return np.take(self._nearest, index)


class E1M0(_Blocks):
    """Two bits, ``sign << 1 | c``: the scale (c = 0) or twice the scale (c = 1), with a sign. There is no zero.

    The scale is found in two steps, from whole numbers ``m`` up to 2**11, the magnitudes in units of 2**-10 of the
    power of two at or below the largest. First the values not below the block's root mean square are taken for level 2
    and the others for level 1; then the scale is the one with the least squared error for these levels ``l``,
    ``sum(m l) / sum(l l)``, rounded to the nearest bf16. Codes are the nearer of the two levels, ties away from zero.

    For a normal distribution the best scale is .651 sigma, with an error of .3976 and the limit between the levels at
    .977 sigma; a limit at 1 sigma gives .657 sigma and .3978. Other distributions get a scale that is nearly their own
    best one, and since with a least-squares scale the error is always smaller than the block, error feedback
    converges. The root mean square also parts any mixture of two levels, so what was decoded encodes to itself.

    A zero among other values becomes plus one scale, which only error feedback (see ``feedback``) makes good again.
    """

    name = "e1m0"
    bits = 2
    smallest = 0x0080  # 2**-126
    largest = 0x7EFF  # twice it is the largest bf16

    def __init__(self) -> None:
        self.table = _levels_of_bytes(np.array([1, 2, -1, -2], dtype=np.float32), self.bits)

    def _scales(self, cut: _Cut) -> Words:
        # The power of two at or below the largest magnitude; lower ones than 2**-126 are of no use here.
        exponent = np.maximum(np.frexp(cut.top)[1] - 1, -126)
        unit = cut.magnitudes / np.ldexp(np.float32(1), exponent)[:, None]
        unit *= np.float32(1 << 10)
        whole = np.rint(unit, out=unit).astype(np.int32)
        square = whole * whole
        # 256 squares of at most 2**22 fit into int32.
        limit = -(-square.sum(axis=1, dtype=np.int32) // cut.sizes)
        high = square >= limit[:, None]
        weighted = whole.sum(axis=1, dtype=np.int32) + (whole * high).sum(axis=1, dtype=np.int32)
        best = np.ldexp(weighted / (cut.sizes + 3 * np.count_nonzero(high, axis=1)), exponent - 10)
        words: Words = np.clip(_nearest(best.astype(np.float32)), self.smallest, self.largest)
        words[best < 2.0**-127] = 0
        return words

    def _codes(self, cut: _Cut, scales: Floats) -> Bytes:
        codes = (cut.magnitudes >= np.float32(1.5) * scales).view(np.uint8)
        codes |= (cut.values < 0).view(np.uint8) << np.uint8(1)
        return codes


def built_kernel() -> Kernel | None:
    """The loops in C, None if there was no compiler when Stretto was installed."""
    try:
        from stretto.protocol import _int8
    except ImportError:
        return None
    return _int8


def _floats(words: Words) -> Floats:
    """The float32 values of bf16 words."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nearest(x: Floats) -> Words:
    """The bf16 words nearest to finite, non-negative values, ties to even; the word of inf above the largest one."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)


def _levels_of_bytes(level: Floats, bits: int) -> Floats:
    """For each code byte the levels of the codes in it, lowest bits first: (256, 8 // bits) float32, read-only."""
    code = np.arange(256)[:, None] >> np.arange(0, 8, bits)[None, :]
    table: Floats = level[code & ((1 << bits) - 1)]
    table.setflags(write=False)
    return table
