"""The wire codecs: one interface, and the table of names that a run config may use.

A codec turns a vector of FP32 values into bytes and back: two functions, a size and a check. The number of bytes is
a function of the number of values alone, so a receiver knows it before the first byte comes. Sums are FP32 whatever
the wire holds (arXiv 2501.18512, section 2.3).

To add one: write a class with the methods of `Codec` (in a file of its own if it has a format to explain, as `fp4`
and `blockwise` do) and put an instance into `CODECS`; the round-trip test takes it from there. No sockets and no
state in here: one instance serves every thread.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.protocol import fp4
from stretto.protocol.blockwise import E1M0, E2M1, Int8, built_kernel
from stretto.protocol.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import CHUNK, Floats, Payload, check_cut, check_payload, check_sum, check_values, cut_blocks

__all__ = ["BF16", "CODECS", "E1M0", "E2M1", "E3M0", "FP32", "Codec", "Floats", "Int8", "Payload", "get_codec"]


class Codec(Protocol):
    """What the rest of the program knows about a codec."""

    @property
    def name(self) -> str:
        """The name in run configs and frame headers."""

    def nbytes(self, n: int) -> int:
        """Length in bytes of the payload of ``n`` values."""

    def encode(self, x: Floats) -> bytes:
        """Encode (n,) float32, contiguous and finite; anything else is a LocalProtocolError."""

    def validate(self, payload: Payload, n: int) -> None:
        """Refuse an illegal payload with a RemoteProtocolError, without decoding it; the same check as in the others.

        What passes has the right length and decodes to finite values.
        """

    def cut(self, payload: Payload, n: int, start: int, stop: int) -> bytes:
        """From the payload of ``n`` values that of values start..stop, the same as if they were encoded alone.

        ``start`` must be a multiple of ``BLOCK``, ``stop`` too unless it is ``n``.
        """

    def decode(self, payload: Payload, n: int) -> Floats:
        """Decode into a new (n,) float32 array of finite values; an illegal payload is a RemoteProtocolError."""

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        """Add ``float32(weight) * value`` to ``out``, (n,) float32, in place, product and sum rounded separately.

        Whatever is refused (RemoteProtocolError for the payload, LocalProtocolError for the rest) is refused before
        ``out`` is touched.
        """


class E3M0:
    """Four bits per value in blocks with a power-of-two scale; the format is described in `fp4`."""

    name = "e3m0"

    def nbytes(self, n: int) -> int:
        return fp4.nbytes(n)

    def encode(self, x: Floats) -> bytes:
        return fp4.encode(x)

    def validate(self, payload: Payload, n: int) -> None:
        fp4.validate(payload, n)

    def cut(self, payload: Payload, n: int, start: int, stop: int) -> bytes:
        return cut_blocks(payload, n, start, stop, scale_bytes=1, bits=4)

    def decode(self, payload: Payload, n: int) -> Floats:
        return fp4.decode(payload, n)

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        fp4.decode_add(payload, weight, out)


class _Words:
    """Base of the codecs that send one little-endian word per value, without blocks.

    A subclass says how wide a word is and how it follows from a value. A word that decodes to nan or inf is refused.
    """

    name: str
    word: np.dtype[np.generic]

    def _pack(self, x: Floats) -> NDArray[np.generic]:
        """Finite values to words."""
        raise NotImplementedError

    def _unpack(self, words: NDArray[np.generic]) -> Floats:
        """Words to values."""
        raise NotImplementedError

    def nbytes(self, n: int) -> int:
        if n < 0:
            raise LocalProtocolError(f"a payload cannot hold {n} values")
        return n * self.word.itemsize

    def encode(self, x: Floats) -> bytes:
        check_values(x, f"the input of codec {self.name}")
        words = np.empty(x.size, dtype=self.word)
        for start in range(0, x.size, CHUNK):
            part = x[start : start + CHUNK]
            packed = self._pack(part)
            # Looking at the words rather than at the values also finds what overflows when it is rounded.
            good = np.isfinite(part) & np.isfinite(self._unpack(packed))
            if not good.all():
                index = int(np.argmin(good))
                raise LocalProtocolError(f"value {start + index} is {part[index]}, which {self.name} cannot hold")
            words[start : start + CHUNK] = packed
        return words.tobytes()

    def validate(self, payload: Payload, n: int) -> None:
        self._legal_words(payload, n)

    def cut(self, payload: Payload, n: int, start: int, stop: int) -> bytes:
        check_cut(n, start, stop)
        return bytes(memoryview(payload)[start * self.word.itemsize : stop * self.word.itemsize])

    def decode(self, payload: Payload, n: int) -> Floats:
        words = self._legal_words(payload, n)
        values = np.empty(n, dtype=np.float32)
        for start in range(0, n, CHUNK):
            values[start : start + CHUNK] = self._unpack(words[start : start + CHUNK])
        return values

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        factor = check_sum(out, weight)
        words = self._legal_words(payload, out.size)
        with np.errstate(over="ignore", under="ignore"):
            for start in range(0, out.size, CHUNK):
                out[start : start + CHUNK] += factor * self._unpack(words[start : start + CHUNK])

    def _legal_words(self, payload: Payload, n: int) -> NDArray[np.generic]:
        """The payload as (n,) words, perhaps unaligned, after every word has been found finite."""
        words = check_payload(payload, self.nbytes(n), f"a {self.name} payload of {n} values").view(self.word)
        for start in range(0, n, CHUNK):
            good = np.isfinite(self._unpack(words[start : start + CHUNK]))
            if not good.all():
                raise RemoteProtocolError(
                    f"value {start + int(np.argmin(good))} of a {self.name} payload is not finite"
                )
        return words


class FP32(_Words):
    """The values as they are: IEEE 754 binary32, little-endian. Lossless; a zero keeps its sign."""

    name = "fp32"
    word = np.dtype("<f4")

    def _pack(self, x: Floats) -> NDArray[np.generic]:
        return x

    def _unpack(self, words: NDArray[np.generic]) -> Floats:
        return words.astype(np.float32)


class BF16(_Words):
    """The upper half of FP32, rounded to nearest, ties to even; relative error at most 2**-8, subnormals kept.

    Values of (2 - 2**-8) * 2**127 and more would round to inf and are refused.
    """

    name = "bf16"
    word = np.dtype("<u2")

    def _pack(self, x: Floats) -> NDArray[np.generic]:
        bits = x.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)

    def _unpack(self, words: NDArray[np.generic]) -> Floats:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


_ALL: tuple[Codec, ...] = (E3M0(), FP32(), BF16(), Int8(built_kernel()), E2M1(), E1M0())

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
"""Every codec by its name."""


def get_codec(name: str) -> Codec:
    """Look a codec up.

    Raises:
        ConfigError: if there is no such codec; lists those there are.
    """
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError(f"there is no wire codec {name!r}; choose one of {', '.join(sorted(CODECS))}")
    return codec
