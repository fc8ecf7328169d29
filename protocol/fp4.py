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

Three paths write and read the same bytes:

    c       `_fp4`, a C extension, at the speed of memory; there if a compiler was there at installation
    numpy   `fp4_numpy`, always there
    torch   `fp4_torch`, for tensors on any device: they are encoded before they are copied to the host

The first two lie behind the functions of this file, which takes the fastest of them (``path_name`` says which). This
file holds the format, what is legal in it, and that choice, and three checks that all wire codecs share. A payload is
only ever sized by ``n``, which comes from the local model and never from a peer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stretto.protocol import fp4_numpy
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4_numpy import BLOCK, MAX_SCALE, Bytes, Floats

__all__ = [
    "BLOCK", "CHUNK", "MAX_SCALE", "PATHS", "Bytes", "Floats", "Kernel", "Payload", "Word",
    "add_into", "check_payload", "check_sum", "check_values", "check_weight", "decode", "decode_add",
    "encode", "encode_into", "encode_words", "nbytes", "parts", "path_name", "use_path", "validate",
]  # fmt: skip

Payload: TypeAlias = bytes | bytearray | memoryview
Word: TypeAlias = Literal["bf16", "fp16"]
"""The 16-bit formats that can be encoded, besides FP32."""

CHUNK = 1 << 18
"""Values handled at a time by whoever needs temporaries (a multiple of BLOCK): they stay below a few MiB."""


class Kernel(Protocol):
    """The inner loops of a path. Arguments have been checked; `fp4_numpy` says what the functions do."""

    def encode(self, x: Floats, /) -> bytes | None: ...
    def encode_into(self, x: Floats, scales: Bytes, codes: Bytes, /) -> bool: ...
    def add_into(self, scales: Bytes, codes: Bytes, weight: float, out: Floats, /) -> None: ...


def _built() -> dict[str, Kernel]:
    """The paths of this installation, the fastest first."""
    try:
        from stretto.protocol import _fp4
    except ImportError:  # there was no compiler when Stretto was installed
        return {"numpy": fp4_numpy}
    return {"c": _fp4, "numpy": fp4_numpy}


PATHS: Mapping[str, Kernel] = MappingProxyType(_built())
"""The paths behind `encode` and `decode_add`, the fastest first."""

_path = next(iter(PATHS))


def path_name() -> str:
    """The path that encodes and decodes arrays in this process: "c" or "numpy"."""
    return _path


@contextmanager
def use_path(name: str) -> Iterator[None]:
    """Take another path for a while, in all threads: for tests and benchmarks.

    Raises:
        LocalProtocolError: if this installation has no such path.
    """
    global _path
    if name not in PATHS:
        raise LocalProtocolError(
            f"the e3m0 codec has no path {name!r} here, only {' and '.join(PATHS)}; 'c' is built when Stretto is "
            "installed on a machine with a C compiler"
        )
    before, _path = _path, name
    try:
        yield
    finally:
        _path = before


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
    return check_weight(weight)


def check_weight(weight: float) -> np.float32:
    """The weight as FP32, the number that every peer multiplies by.

    Raises:
        LocalProtocolError: if it is not finite in FP32.
    """
    if not abs(weight) <= float(np.finfo(np.float32).max):
        raise LocalProtocolError(f"a weight must be finite in float32, got {weight}")
    return np.float32(weight)


def check_cut(n: int, start: int, stop: int) -> None:
    """LocalProtocolError unless start..stop can be cut out of ``n`` values."""
    if not 0 <= start < stop <= n or start % BLOCK or (stop % BLOCK and stop != n):
        raise LocalProtocolError(f"values {start}..{stop} of {n} are not whole blocks of {BLOCK}")


def cut_blocks(payload: Payload, n: int, start: int, stop: int, *, scale_bytes: int, bits: int) -> bytes:
    """Values start..stop of a payload of ``n`` values that has all scales first, then codes of ``bits`` bits."""
    check_cut(n, start, stop)
    view, blocks = memoryview(payload), -(-n // BLOCK)
    scales = view[scale_bytes * (start // BLOCK) : scale_bytes * -(-stop // BLOCK)]
    first = scale_bytes * blocks
    return b"".join((scales, view[first + start * bits // 8 : first + -(-stop * bits // 8)]))


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
    payload = PATHS[_path].encode(x)
    if payload is None:
        _refuse(x, 0)
    return payload


def encode_words(words: NDArray[np.uint16], kind: Word) -> bytes:
    """Encode (n,) values of a 16-bit format, given as the uint16 that hold their bits; numpy knows no bf16.

    Every value of either format is a value of FP32, so the payload is the one of the values in FP32.

    Raises:
        LocalProtocolError: as `encode`.
    """
    if (
        not isinstance(words, np.ndarray)
        or words.dtype != np.uint16
        or words.ndim != 1
        or not words.flags.c_contiguous
    ):
        raise LocalProtocolError(f"{kind} values must be handed in as a contiguous uint16 array of shape (n,)")
    body = np.empty(nbytes(words.size), dtype=np.uint8)
    scales, codes = _cut(body, words.size)
    for start in range(0, words.size, CHUNK):
        stop = min(start + CHUNK, words.size)
        part = slice(start // BLOCK, -(-stop // BLOCK)), slice(start // 2, (stop + 1) // 2)
        encode_into(_widen(words[start:stop], kind), scales[part[0]], codes[part[1]], first=start)
    return body.tobytes()


def encode_into(x: Floats, scales: Bytes, codes: Bytes, *, first: int = 0) -> None:
    """Encode a piece of a vector: (n,) float32 into (ceil(n / 256),) and (ceil(n / 2),) bytes of its payload.

    Pieces that start at multiples of 256 can be encoded apart, by several threads. ``first`` is the piece's first
    value, for the error.

    Raises:
        LocalProtocolError: as `encode`, or if the sizes do not go together.
    """
    check_values(x, "an outer gradient")
    _check_parts(scales, codes, x.size)
    if not PATHS[_path].encode_into(x, scales, codes):
        _refuse(x, first)


def validate(payload: Payload, n: int) -> None:
    """Check a payload of ``n`` values without decoding it.

    Raises:
        RemoteProtocolError: if the length is wrong, a scale byte is above 247, or the unused nibble is not zero.
    """
    parts(payload, n)


def decode(payload: Payload, n: int) -> Floats:
    """Decode a payload into a new (n,) float32 array; every value is zero or a normal number.

    Raises:
        RemoteProtocolError: if the payload is not a legal one for ``n`` values.
    """
    scales, codes = parts(payload, n)
    values = np.zeros(n, dtype=np.float32)
    PATHS[_path].add_into(scales, codes, 1.0, values)
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
    scales, codes = parts(payload, out.size)
    PATHS[_path].add_into(scales, codes, float(factor), out)


def add_into(scales: Bytes, codes: Bytes, weight: float, out: Floats) -> None:
    """Add a piece of a payload whose `parts` have been checked: its bytes, and the (n,) float32 that they belong to.

    Raises:
        LocalProtocolError: if ``out`` or ``weight`` is unfit, or the sizes do not go together.
    """
    factor = check_sum(out, weight)
    _check_parts(scales, codes, out.size)
    PATHS[_path].add_into(scales, codes, float(factor), out)


def parts(payload: Payload, n: int) -> tuple[Bytes, Bytes]:
    """The (scale bytes, code bytes) of a payload, as views, after all that can be wrong with it has been ruled out.

    Raises:
        RemoteProtocolError: if the length is wrong, a scale byte is above 247, or the unused nibble is not zero.
    """
    scales, codes = _cut(check_payload(payload, nbytes(n), f"an e3m0 payload of {n} values"), n)
    if n and int(scales.max()) > MAX_SCALE:
        block = int(np.argmax(scales > MAX_SCALE))
        raise RemoteProtocolError(
            f"scale byte {int(scales[block])} of block {block} in an e3m0 payload is above {MAX_SCALE}; "
            "the sender is faulty"
        )
    if n % 2 and codes[-1] >> 4:
        raise RemoteProtocolError(f"the unused nibble at the end of an e3m0 payload of {n} values is not zero")
    return scales, codes


def _cut(body: Bytes, n: int) -> tuple[Bytes, Bytes]:
    """Cut a payload of ``n`` values into (scale bytes, code bytes), as views."""
    blocks = -(-n // BLOCK)
    return body[:blocks], body[blocks:]


def _check_parts(scales: Bytes, codes: Bytes, n: int) -> None:
    """Refuse parts that are not those of ``n`` values."""
    if scales.shape != (-(-n // BLOCK),) or codes.shape != ((n + 1) // 2,):
        raise LocalProtocolError(f"{scales.size} scale bytes and {codes.size} code bytes do not hold {n} values")


def _widen(words: NDArray[np.uint16], kind: Word) -> Floats:
    """16-bit values as FP32, exactly."""
    if kind == "bf16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling nan; it stays a nan and is refused
        return words.view(np.float16).astype(np.float32)


def _refuse(x: Floats, first: int) -> NoReturn:
    """Name the first value that cannot be held; ``x`` starts at value ``first`` of its vector."""
    for start in range(0, x.size, CHUNK):
        bad = ~(np.abs(x[start : start + CHUNK]) < np.float32(1.5 * 2.0**127))  # true for nan as well
        if bad.any():
            index = start + int(np.argmax(bad))
            raise LocalProtocolError(
                f"value {first + index} of an outer gradient is {x[index]}, "
                "but e3m0 holds finite values below 1.5 * 2**127 only"
            )
    raise LocalProtocolError("an outer gradient was changed by another thread while it was encoded")
