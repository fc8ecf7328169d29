"""The E3M0 codec on several threads: a vector in pieces, one call per piece, the same bytes as in one.

The C path and numpy release the GIL, so pieces run side by side. One thread comes close to the bandwidth of a home
machine's memory; a few more help the numpy path and machines with more channels. Threads belong to the pool that is
handed in, and none is started inside an operation: math libraries that do so slow down badly on a busy machine.

Pieces start at multiples of the block size, so each owns a range of scale bytes and one of code bytes, and all write
into the one payload. Extra memory is the codec's scratch, at most 2 MiB per thread.
"""

import io
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from stretto.protocol import fp4
from stretto.protocol.codecs import E3M0
from stretto.protocol.fp4 import Bytes, Floats, Payload

PIECE = 1 << 20
"""Values per call, a multiple of the block size: hundreds of microseconds of work, far above a thread switch."""


class PooledE3M0(E3M0):
    """The codec ``e3m0`` that spreads large vectors over the threads of ``pool``."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def encode(self, x: Floats) -> bytes:
        """As ``E3M0.encode``."""
        return encode_parallel(x, self._pool) if x.size > PIECE else super().encode(x)

    def decode_add(self, payload: Payload, weight: float, out: Floats) -> None:
        """As ``E3M0.decode_add``."""
        if out.size > PIECE:
            decode_add_parallel(payload, weight, out, self._pool)
        else:
            super().decode_add(payload, weight, out)


def encode_parallel(x: Floats, pool: Executor) -> bytes:
    """Encode (n,) float32, contiguous, on the threads of ``pool``; the payload of `fp4.encode`.

    Raises:
        LocalProtocolError: as `fp4.encode`. All pieces have ended by then.
    """
    fp4.check_values(x, "an outer gradient")
    # The payload is written where it lies: a BytesIO hands out the bytes object that it wrote to, if nobody else still
    # looks at it, which is why the pieces get the view and make their own arrays.
    store = io.BytesIO(bytes(fp4.nbytes(x.size)))
    view = store.getbuffer()
    futures = [pool.submit(_encode_piece, x, view, start, stop) for start, stop in _pieces(x.size)]
    faults = [future.exception() for future in futures]
    for fault in faults:
        if fault is not None:
            raise fault
    view.release()
    return store.getvalue()


def decode_add_parallel(payload: Payload, weight: float, out: Floats, pool: Executor) -> None:
    """Add ``float32(weight) * value`` to ``out``, (n,) float32, in place, on the threads of ``pool``.

    Raises:
        RemoteProtocolError, LocalProtocolError: as `fp4.decode_add`; ``out`` is untouched.
    """
    factor = float(fp4.check_sum(out, weight))
    scales, codes = fp4.parts(payload, out.size)
    futures = [pool.submit(_add_piece, scales, codes, factor, out, start, stop) for start, stop in _pieces(out.size)]
    for future in futures:
        future.result()


def _pieces(n: int) -> Iterator[tuple[int, int]]:
    """The pieces of ``n`` values, (first, last + 1)."""
    return ((start, min(start + PIECE, n)) for start in range(0, n, PIECE))


def _encode_piece(x: Floats, view: memoryview, start: int, stop: int) -> None:
    body = np.frombuffer(view, np.uint8)
    blocks = -(-x.size // fp4.BLOCK)
    scales, codes = _part(body[:blocks], body[blocks:], start, stop)
    fp4.encode_into(x[start:stop], scales, codes, first=start)


def _add_piece(scales: Bytes, codes: Bytes, factor: float, out: Floats, start: int, stop: int) -> None:
    fp4.add_into(*_part(scales, codes, start, stop), factor, out[start:stop])


def _part(scales: Bytes, codes: Bytes, start: int, stop: int) -> tuple[Bytes, Bytes]:
    """The scale and code bytes of a piece."""
    return scales[start // fp4.BLOCK : -(-stop // fp4.BLOCK)], codes[start // 2 : (stop + 1) // 2]
