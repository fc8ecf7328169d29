"""The pooled codec is the codec: same bytes, same sums, same refusals, whatever the size."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stretto.node.codec_pool import PIECE, PooledE3M0
from stretto.protocol.codecs import get_codec
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError


@pytest.mark.parametrize("size", [0, 1, 257, PIECE, PIECE + 1, 2 * PIECE + 301])
def test_it_gives_the_bits_of_the_plain_codec(size: int) -> None:
    x = np.random.default_rng(size).normal(0, 1e-3, size).astype(np.float32)
    plain = get_codec("e3m0")
    with ThreadPoolExecutor(2) as pool:
        pooled = PooledE3M0(pool)
        payload = pooled.encode(x)
        assert payload == plain.encode(x)
        mine, theirs = np.full(size, 0.25, np.float32), np.full(size, 0.25, np.float32)
        pooled.decode_add(payload, 0.3, mine)
        plain.decode_add(payload, 0.3, theirs)
    assert mine.tobytes() == theirs.tobytes()


def test_it_refuses_what_the_plain_codec_refuses() -> None:
    x = np.zeros(2 * PIECE, np.float32)
    x[PIECE + 7] = np.nan
    with ThreadPoolExecutor(2) as pool:
        pooled = PooledE3M0(pool)
        with pytest.raises(LocalProtocolError):
            pooled.encode(x)
        out = np.ones(2 * PIECE, np.float32)
        with pytest.raises(RemoteProtocolError):
            pooled.decode_add(bytes(pooled.nbytes(2 * PIECE) - 1), 1.0, out)
        assert (out == 1).all()
