"""The E3M0 format: golden bytes, rounding at the edges, and the properties that averaging relies on.

All of it runs on every path behind `fp4`; `test_fp4_paths` compares the paths with each other, torch included.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.protocol import fp4
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import BLOCK, CHUNK, Floats


@pytest.fixture(scope="module", autouse=True, params=list(fp4.PATHS))
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with fp4.use_path(request.param):
        yield


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def trip(x: Floats) -> Floats:
    return fp4.decode(fp4.encode(x), x.size)


def by_the_book(x: Floats) -> Floats:
    """The format once more, with real numbers in float64 instead of bit tricks (normal values only)."""
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK)
    padded[: x.size] = x
    blocks = padded.reshape(-1, BLOCK)
    mantissa, exponent = np.frexp(np.abs(blocks))  # mantissa in [0.5, 1)
    level = np.where(mantissa >= 0.75, np.ldexp(1.0, exponent), np.ldexp(0.5, exponent))
    level[blocks == 0] = 0
    level[level < level.max(axis=1, keepdims=True) / 64] = 0
    return np.copysign(level, blocks).reshape(-1)[: x.size].astype(np.float32)


@pytest.mark.parametrize(
    ("values", "payload"),
    [
        ([1, -2, 0.5, 0, 3, -0.01], "7ae50487"),
        ([], ""),
        ([0.0], "0000"),
        ([1.0], "7807"),
        ([-1.0, 1.0, 0.25], "787f05"),
        ([2.0**-126], "0001"),
        ([2.0**127], "f707"),
    ],
)
def test_golden_bytes(values: list[float], payload: str) -> None:
    assert fp4.encode(floats(*values)).hex() == payload


def test_golden_bytes_over_two_blocks() -> None:
    x = np.concatenate([np.full(BLOCK, 2.0), [-1e30]]).astype(np.float32)
    # 2.0 has exponent 128, lo 121; 1e30 is 1.578 * 2**99, so it rounds up to 2**100: exponent 227, lo 220.
    assert fp4.encode(x).hex() == "79dc" + "77" * 128 + "0f"
    assert trip(x)[-1] == -(2.0**100)


@pytest.mark.parametrize(
    ("n", "size"), [(0, 0), (1, 2), (2, 2), (3, 3), (255, 129), (256, 129), (257, 131), (2**20, 528384)]
)
def test_nbytes(n: int, size: int) -> None:
    assert fp4.nbytes(n) == size


def test_nbytes_of_a_negative_count_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="-1 values"):
        fp4.nbytes(-1)


@pytest.mark.parametrize(
    ("value", "decoded"),
    [(1.0, 1.0), (1.4999999, 1.0), (1.5, 2.0), (3.0, 4.0), (-0.1, -0.125), (-1.5, -2.0), (1e-30, 2.0**-100)],
)
def test_rounding_is_linear_and_ties_go_up(value: float, decoded: float) -> None:
    assert trip(np.full(BLOCK, value, dtype=np.float32)).tolist() == [decoded] * BLOCK


def test_levels_below_the_largest() -> None:
    powers = floats(*(2.0**k for k in range(1, -6, -1)))
    assert trip(powers).tolist() == powers.tolist()
    edges = trip(floats(1.0, 0.75 * 2**-6, 0.7499 * 2**-6, 2**-7, -(2**-6)))
    assert edges.tolist() == [1.0, 2**-6, 0.0, 0.0, -(2**-6)]


def test_zeros() -> None:
    assert fp4.encode(np.zeros(513, dtype=np.float32)) == bytes(fp4.nbytes(513))
    minus_zero = trip(floats(-0.0, 1.0, -1e-9))
    assert not np.signbit(minus_zero).any()
    assert minus_zero.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "decoded"),
    [(5.8e-39, 0.0), (9e-39, 2.0**-126), (1.2e-38, 2.0**-126), (1e-45, 0.0), (-1.1754944e-38, -(2.0**-126))],
)
def test_subnormals_round_to_zero_or_to_the_smallest_normal(value: float, decoded: float) -> None:
    assert trip(floats(value)).tolist() == [decoded]


def test_blocks_do_not_disturb_each_other() -> None:
    together = trip(floats(1e30, 1e-30))
    assert together.tolist() == [2.0**100, 0.0]
    x = np.concatenate([np.full(BLOCK, 1e30), np.full(3, 1e-30)]).astype(np.float32)
    assert trip(x)[-3:].tolist() == [2.0**-100] * 3


LENGTHS = [1, 2, 3, 127, 255, 256, 257, 511, 513, 65537, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 257, 2 * CHUNK + 255]


@pytest.mark.parametrize("n", LENGTHS)
def test_agrees_with_the_definition_at_every_length(n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    got = trip(x)
    assert got.shape == (n,)
    assert got.dtype == np.float32
    assert np.array_equal(got, by_the_book(x))


@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F400000, 0xFF400000])
@pytest.mark.parametrize("where", [0, 300, 512])
def test_values_that_cannot_be_held_are_refused_by_position(bad: int, where: int) -> None:
    x = np.ones(513, dtype=np.float32)
    x.view(np.uint32)[where] = bad
    with pytest.raises(LocalProtocolError, match=f"value {where} of"):
        fp4.encode(x)


def test_position_is_counted_over_all_chunks() -> None:
    x = np.ones(CHUNK + 9, dtype=np.float32)
    x[CHUNK + 5] = np.nan
    with pytest.raises(LocalProtocolError, match=f"value {CHUNK + 5} of .* nan"):
        fp4.encode(x)


def test_finite_values_with_an_infinite_sum_are_fine() -> None:
    x = floats(2.5e38, 2.5e38, np.nextafter(np.float32(1.5 * 2.0**127), np.float32(0)))
    assert trip(x).tolist() == [2.0**127] * 3


@pytest.mark.parametrize("n", [1, 256, 257])
@pytest.mark.parametrize("scale", [248, 255])
def test_illegal_scale_bytes_are_refused(n: int, scale: int) -> None:
    payload = bytearray(fp4.encode(np.ones(n, dtype=np.float32)))
    payload[-(-n // BLOCK) - 1] = scale
    out = np.ones(n, dtype=np.float32)
    for refuses in (fp4.decode, fp4.validate):
        with pytest.raises(RemoteProtocolError, match=f"scale byte {scale}"):
            refuses(payload, n)
    with pytest.raises(RemoteProtocolError, match=f"scale byte {scale}"):
        fp4.decode_add(payload, 1.0, out)
    assert out.tolist() == [1.0] * n


def test_a_used_padding_nibble_is_refused() -> None:
    payload = bytearray(fp4.encode(np.ones(3, dtype=np.float32)))
    payload[-1] |= 0x10
    out = np.zeros(3, dtype=np.float32)
    with pytest.raises(RemoteProtocolError, match="unused nibble"):
        fp4.decode_add(payload, 1.0, out)
    assert out.tolist() == [0.0, 0.0, 0.0]
    assert fp4.decode(payload, 4).tolist() == [1.0, 1.0, 1.0, 2.0**-6]


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
def test_any_legal_payload_decodes_to_zero_or_normal_numbers(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    body = rng.integers(0, 256, fp4.nbytes(n), dtype=np.uint8)
    body[: -(-n // BLOCK)] %= 248
    if n % 2:
        body[-1] &= 15
    values = fp4.decode(body.tobytes(), n)
    magnitude = np.abs(values[values != 0])
    assert ((magnitude >= 2.0**-126) & (magnitude <= 2.0**127)).all()
    assert trip(values).tolist() == values.tolist()


def test_the_extreme_scales_decode_exactly() -> None:
    assert fp4.decode(bytes([247, 0xF1]), 2).tolist() == [2.0**121, -(2.0**127)]
    assert fp4.decode(bytes([0, 0x97]), 2).tolist() == [2.0**-120, -(2.0**-126)]
    assert fp4.decode(bytes([120, 0x88]), 2).tobytes() == bytes(8)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-60, 60), n=st.integers(1, 600))
def test_idempotent_odd_and_scaled_by_powers_of_two(seed: int, power: int, n: int) -> None:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    once = trip(x)
    assert trip(once).tolist() == once.tolist()
    assert trip(-x).tolist() == (-once).tolist()
    factor = np.float32(2.0**power)
    assert trip(x * factor).tolist() == (once * factor).tolist()


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("scale", [1.0, 3e-7, 1.37e12])
def test_error_and_gain_are_those_of_nearest_rounding(kind: str, scale: float) -> None:
    rng = np.random.default_rng(5)
    x = (scale * (rng.standard_normal(1 << 17) if kind == "normal" else rng.laplace(size=1 << 17))).astype(np.float32)
    got = trip(x).astype(np.float64)
    exact = x.astype(np.float64)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    gain = got @ exact / (exact @ exact)
    assert 0.19 <= error <= 0.20
    # Dropping the mantissa instead of rounding would give 0.72, rounding in log space 1.02.
    assert 0.95 <= gain <= 0.97


def test_equal_weight_sums_do_not_depend_on_the_order() -> None:
    rng = np.random.default_rng(11)
    payloads = [fp4.encode(rng.standard_normal(5001).astype(np.float32) * np.float32(1e-3)) for _ in range(8)]
    exact = sum(fp4.decode(p, 5001).astype(np.float64) for p in payloads)
    for order in (range(8), range(7, -1, -1), rng.permutation(8)):
        total = np.zeros(5001, dtype=np.float32)
        for index in order:
            fp4.decode_add(payloads[index], 1.0, total)
        assert total.tolist() == np.asarray(exact).tolist()


def test_decode_add_rounds_product_and_sum_separately() -> None:
    x = np.random.default_rng(3).standard_normal(CHUNK + 77).astype(np.float32)
    payload = fp4.encode(x)
    out = np.random.default_rng(4).standard_normal(x.size).astype(np.float32)
    weight = 0.3141592653589793
    expected = out + np.float32(weight) * fp4.decode(payload, x.size)
    fp4.decode_add(payload, weight, out)
    assert out.tobytes() == expected.tobytes()


def test_the_input_is_not_changed() -> None:
    x = np.random.default_rng(3).standard_normal(1001).astype(np.float32)
    x.setflags(write=False)
    before = x.tobytes()
    fp4.encode(x)
    assert x.tobytes() == before


def test_threads_do_not_share_buffers() -> None:
    inputs = [np.random.default_rng(k).standard_normal(60_001).astype(np.float32) for k in range(8)]
    alone = [trip(x).tobytes() for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = [y.tobytes() for y in pool.map(trip, inputs)]
    assert together == alone
