"""The loops in C give the same bytes and bits as numpy: the codec ``int8`` and the outer step."""

import numpy as np
import pytest

from stretto.protocol import outer
from stretto.protocol.blockwise import Int8, Kernel, built_kernel
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError

SIZES = (0, 1, 2, 255, 256, 257, 511, 512, 1000, 70_001, (1 << 18) + 300)


def kernel() -> Kernel:
    built = built_kernel()
    assert built is not None, "the C extensions were not built; the set-up has a compiler"
    return built


def awkward(n: int, seed: int) -> np.ndarray:
    """(n,) float32 over the whole range: normal values of any scale, ties, subnormals, zeros of both signs."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(n) * 2.0 ** random.integers(-140, 120, n // 256 + 1).repeat(256)[:n]
    x[random.random(n) < 0.05] = 0.0
    x[random.random(n) < 0.05] = -0.0
    x[random.random(n) < 0.02] = 1e-45
    ties = random.random(n) < 0.1
    x[ties] = random.integers(-254, 255, int(ties.sum())) / 2.0
    return x.astype(np.float32)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_int8_in_c_writes_and_adds_as_numpy_does(n: int, seed: int) -> None:
    plain, fast, x = Int8(), Int8(kernel()), awkward(n, seed)
    payload = plain.encode(x)
    assert fast.encode(x) == payload
    sums = [np.full(n, 0.25, dtype=np.float32) for _ in range(2)]
    with np.errstate(over="ignore", invalid="ignore"):
        plain.decode_add(payload, 0.37, sums[0])
        fast.decode_add(memoryview(payload), 0.37, sums[1])
    assert sums[0].tobytes() == sums[1].tobytes()


@pytest.mark.parametrize("n", [1, 256, 700])
def test_int8_in_c_at_the_ends_of_the_range(n: int) -> None:
    plain, fast = Int8(), Int8(kernel())
    for value in (0.0, -0.0, 1e-45, 2.0**-126, 2.0**-119, np.finfo(np.float32).max, -np.finfo(np.float32).max):
        x = np.full(n, value, dtype=np.float32)
        assert fast.encode(x) == plain.encode(x), value


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 511])
def test_int8_in_c_names_the_value_that_is_not_finite(value: float, place: int) -> None:
    x = np.ones(512, dtype=np.float32)
    x[place] = value
    with pytest.raises(LocalProtocolError, match=f"value {place} "):
        Int8(kernel()).encode(x)


def test_int8_in_c_refuses_what_numpy_refuses() -> None:
    fast, out = Int8(kernel()), np.zeros(512, dtype=np.float32)
    payload = bytearray(fast.encode(np.ones(512, dtype=np.float32)))
    payload[4] = 0x80
    with pytest.raises(RemoteProtocolError, match="code -128"):
        fast.decode_add(payload, 1.0, out)
    with pytest.raises(RemoteProtocolError, match="must be 516 bytes"):
        fast.decode_add(payload[:-1], 1.0, out)
    with pytest.raises(LocalProtocolError, match="float64"):
        fast.encode(np.ones(4))  # type: ignore[arg-type]
    assert not out.any()


@pytest.mark.parametrize("n", SIZES)
def test_the_outer_step_in_c_has_the_bits_of_numpy(n: int) -> None:
    from stretto.protocol import _outer

    anchor, momentum, gradient = (awkward(n, seed) for seed in range(3))
    results = []
    for step in (outer.step_in_numpy, _outer.nesterov):
        new_anchor, new_momentum = np.empty_like(anchor), gradient.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            step(anchor, momentum, new_momentum, 0.7, 0.9, new_anchor, new_momentum)  # momentum over the gradient
        results.append((new_anchor.tobytes(), new_momentum.tobytes()))
    assert results[0] == results[1]


def test_the_outer_step_refuses_other_arrays() -> None:
    good = np.ones(4, dtype=np.float32)
    with pytest.raises(LocalProtocolError, match="float64"):
        outer.nesterov(good, good, np.ones(4), lr=0.7, momentum_factor=0.9)
