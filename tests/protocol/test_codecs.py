"""Every wire codec through the same tests: what one promises, all promise."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.protocol.codecs import CODECS, Codec, Floats, get_codec
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import BLOCK, CHUNK

LENGTHS = [0, 1, 2, 3, 255, 256, 257, 1001, CHUNK + 257]
RELATIVE_ERROR = {
    "e3m0": (0.19, 0.21),
    "fp32": (0.0, 0.0),
    "bf16": (2.0**-10, 2.0**-9),
    "int8": (0.005, 0.011),
    "e2m1": (0.10, 0.135),
    "e1m0": (0.38, 0.54),
}
"""Smallest and largest relative L2 error on normal and Laplace values; a new codec adds its own here."""
EXTREMES = dict.fromkeys(CODECS, (2.0**127, 2.0**-126, 1.0, -(2.0**-100)))
EXTREMES["int8"] = (2.0**127, 2.0**-119, 1.0, -(2.0**-100))
EXTREMES["e2m1"] = (1.5 * 2.0**127, 2.0**-126, 1.5, -1.5 * 2.0**-100)
"""Values that a codec keeps exactly; e2m1 divides the largest by 6."""
NO_ZERO = {"e1m0"}
"""Codecs that send a zero among other values as something else."""

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


def normal(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@every_codec
@pytest.mark.parametrize("n", LENGTHS)
def test_round_trip(codec: Codec, n: int) -> None:
    x = normal(n) * np.float32(3e-4)
    payload = codec.encode(x)
    assert type(payload) is bytes
    assert len(payload) == codec.nbytes(n)
    codec.validate(payload, n)
    got = codec.decode(payload, n)
    assert got.dtype == np.float32
    assert got.shape == (n,)
    if n >= 1001:
        assert np.linalg.norm(got - x) <= RELATIVE_ERROR[codec.name][1] * np.linalg.norm(x)
    assert codec.decode(codec.encode(got), n).tobytes() == got.tobytes()
    total = np.ones(n, dtype=np.float32)
    codec.decode_add(payload, 0.25, total)
    codec.decode_add(payload, -0.3, total)
    expected = (np.float32(1) + np.float32(0.25) * got) + np.float32(-0.3) * got
    assert total.tobytes() == expected.tobytes()


@every_codec
@pytest.mark.parametrize("shape", ["normal", "laplace"])
@pytest.mark.parametrize("scale", [1e-30, 3e-4, 1.0, 1e30])
def test_the_relative_error_is_the_codecs_own_at_every_scale(codec: Codec, shape: str, scale: float) -> None:
    x = normal(1 << 16) if shape == "normal" else np.random.default_rng(1).laplace(size=1 << 16).astype(np.float32)
    x *= np.float32(scale)
    got = codec.decode(codec.encode(x), x.size)
    error = np.linalg.norm(got.astype(np.float64) - x) / np.linalg.norm(x.astype(np.float64))
    low, high = RELATIVE_ERROR[codec.name]
    assert low <= error <= high


@every_codec
def test_zeros_and_extremes_survive(codec: Codec) -> None:
    assert codec.encode(np.zeros(513, dtype=np.float32)) == bytes(codec.nbytes(513))
    assert codec.decode(bytes(codec.nbytes(513)), 513).tobytes() == bytes(4 * 513)
    for value in EXTREMES[codec.name]:
        x = np.array([value, -value, 0.0], dtype=np.float32)
        if codec.name in NO_ZERO:
            x = x[:2].copy()
        assert codec.decode(codec.encode(x), x.size).tolist() == x.tolist()


@every_codec
@pytest.mark.parametrize("n", [1, 6, 257])
def test_a_payload_of_another_length_is_refused(codec: Codec, n: int) -> None:
    payload = codec.encode(np.ones(n, dtype=np.float32))
    out = normal(n)
    before = out.tobytes()
    for wrong in (b"", payload[:-1], payload + b"\0", codec.encode(np.ones(n + 4, dtype=np.float32))):
        with pytest.raises(
            RemoteProtocolError, match=f"{codec.name} payload of {n} values must be {len(payload)} bytes"
        ):
            codec.decode(wrong, n)
        with pytest.raises(RemoteProtocolError, match="bytes long"):
            codec.validate(wrong, n)
        with pytest.raises(RemoteProtocolError, match="bytes long"):
            codec.decode_add(wrong, 1.0, out)
    assert out.tobytes() == before


@every_codec
def test_any_buffer_serves_as_payload(codec: Codec) -> None:
    x = normal(1001)
    payload = codec.encode(x)
    expected = codec.decode(payload, 1001).tobytes()
    shifted = memoryview(b"\0" + payload)[1:]
    assert shifted.readonly
    for buffer in (bytearray(payload), memoryview(payload), shifted, memoryview(bytearray(b"\0\0\0" + payload))[3:]):
        assert codec.decode(buffer, 1001).tobytes() == expected
        total = np.zeros(1001, dtype=np.float32)
        codec.decode_add(buffer, 1.0, total)
        assert total.tobytes() == expected


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 128, 256, CHUNK + 3])
def test_encode_refuses_what_is_not_finite(codec: Codec, bad: float, where: int) -> None:
    x = np.ones(max(257, where + 2), dtype=np.float32)
    x[where] = bad
    with pytest.raises(LocalProtocolError, match=f"value {where} .*{bad}"):
        codec.encode(x)


@every_codec
def test_encode_takes_flat_contiguous_float32_only(codec: Codec) -> None:
    good = normal(12)
    wrong = [good.astype(np.float64), good.astype(np.float16), good.astype(">f4"), good[::2], good.reshape(3, 4)]
    for x in [*wrong, np.arange(4), [1.0, 2.0]]:
        with pytest.raises(LocalProtocolError, match=r"contiguous float32 array of shape \(n,\), got"):
            codec.encode(x)  # type: ignore[arg-type]


@every_codec
def test_decode_add_refuses_an_unfit_accumulator_or_weight(codec: Codec) -> None:
    payload = codec.encode(np.ones(6, dtype=np.float32))
    frozen = np.zeros(6, dtype=np.float32)
    frozen.setflags(write=False)
    for out in (np.zeros(6), np.zeros(12, dtype=np.float32)[::2], np.zeros((2, 3), dtype=np.float32), frozen):
        with pytest.raises(LocalProtocolError, match="accumulator"):
            codec.decode_add(payload, 1.0, out)  # type: ignore[arg-type]
        assert not out.any()
    out32 = np.zeros(6, dtype=np.float32)
    for weight in (np.nan, np.inf, -np.inf, 1e39):
        with pytest.raises(LocalProtocolError, match="weight must be finite"):
            codec.decode_add(payload, weight, out32)
    codec.decode_add(payload, 0.0, out32)
    assert out32.tolist() == [0.0] * 6


@every_codec
def test_a_negative_count_is_refused(codec: Codec) -> None:
    with pytest.raises(LocalProtocolError, match="-3 values"):
        codec.nbytes(-3)


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [("fp32", "0000c07f", 1), ("fp32", "000080ff", 0), ("bf16", "c07f", 1), ("bf16", "80ff", 0)],
)
def test_words_that_are_not_finite_are_refused_before_the_sum(name: str, word: str, value: int) -> None:
    codec = get_codec(name)
    words = [bytes(len(word) // 2)] * 3
    words[value] = bytes.fromhex(word)
    out = np.ones(3, dtype=np.float32)
    with pytest.raises(RemoteProtocolError, match=f"value {value} of"):
        codec.validate(b"".join(words), 3)
    with pytest.raises(RemoteProtocolError, match=f"value {value} of a {name} payload is not finite"):
        codec.decode_add(b"".join(words), 1.0, out)
    assert out.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("e3m0", "7ae50487"),
        ("fp32", "0000803f000000c00000003f00000000000040400ad723bc"),
        ("bf16", "803f00c0003f0000404024bc"),
        ("int8", "40402aab15007f00"),
        ("e2m1", "003fe40207"),
        ("e1m0", "763f0c09"),
    ],
)
def test_golden_bytes(name: str, payload: str) -> None:
    x = np.array([1, -2, 0.5, 0, 3, -0.01], dtype=np.float32)
    assert get_codec(name).encode(x).hex() == payload


@pytest.mark.parametrize(
    ("bits", "word"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to the even word below
        (0x3F818000, 0x3F82),  # ... or above
        (0x3F808001, 0x3F81),
        (0xBF808001, 0xBF81),
        (0x00008001, 0x0001),  # subnormals are values like any other
        (0x80000000, 0x8000),
        (0x7F7F7FFF, 0x7F7F),
    ],
)
def test_bf16_rounds_to_nearest_even(bits: int, word: int) -> None:
    x = np.array([bits], dtype=np.uint32).view(np.float32)
    assert get_codec("bf16").encode(x) == word.to_bytes(2, "little")


def test_bf16_refuses_what_would_round_to_infinity() -> None:
    x = np.array([0x7F7F8000], dtype=np.uint32).view(np.float32)
    with pytest.raises(LocalProtocolError, match="bf16 cannot hold"):
        get_codec("bf16").encode(x)


BLOCKWISE = {"int8": (0x0400, 0x7F7F), "e2m1": (0x0100, 0x7E2A), "e1m0": (0x0080, 0x7EFF)}
"""Bounds of the scales that are not 0, as bf16 words."""


@pytest.mark.parametrize("name", BLOCKWISE)
def test_every_legal_payload_decodes_to_zeros_and_normal_numbers(name: str) -> None:
    codec, codes = get_codec(name), bytes(range(256))
    n = {"int8": 256, "e2m1": 512, "e1m0": 1024}[name]
    if name == "int8":
        codes = codes.replace(b"\x80", b"\x81")
    for word in BLOCKWISE[name]:
        values = codec.decode(word.to_bytes(2, "little") * (n // 256) + codes, n)
        assert np.isfinite(values).all()
        nonzero = np.abs(values[values != 0])
        assert nonzero.min() >= np.finfo(np.float32).tiny
        assert nonzero.size > n * 0.8
        total = np.full(n, -1.0, dtype=np.float32)
        codec.decode_add(word.to_bytes(2, "little") * (n // 256) + codes, 1.0, total)
        assert total.tobytes() == (np.float32(-1) + values).tobytes()


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("block", [0, 2])
def test_scales_out_of_bounds_are_refused_before_the_sum(name: str, block: int) -> None:
    codec, (low, high) = get_codec(name), BLOCKWISE[name]
    good = codec.encode(np.ones(601, dtype=np.float32))
    for word in (1, low - 1, high + 1, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFF80, 0xFFFF):
        bad = good[: 2 * block] + word.to_bytes(2, "little") + good[2 * block + 2 :]
        out = np.ones(601, dtype=np.float32)
        for refuse in (codec.validate, codec.decode):
            with pytest.raises(RemoteProtocolError, match=rf"scale \S+ of block {block} in an {name} payload must be"):
                refuse(bad, 601)
        with pytest.raises(RemoteProtocolError, match="the sender is faulty"):
            codec.decode_add(bad, 1.0, out)
        assert out.tobytes() == np.ones(601, dtype=np.float32).tobytes()
    for word in (0, low, high):
        codec.validate(good[: 2 * block] + word.to_bytes(2, "little") + good[2 * block + 2 :], 601)


@pytest.mark.parametrize(
    ("name", "n", "bit"), [("e2m1", 3, 4), ("e2m1", 3, 7), ("e1m0", 1, 2), ("e1m0", 2, 4), ("e1m0", 3, 7)]
)
def test_unused_bits_must_be_zero(name: str, n: int, bit: int) -> None:
    codec = get_codec(name)
    payload = bytearray(codec.encode(np.ones(n, dtype=np.float32)))
    payload[-1] |= 1 << bit
    out = np.ones(n, dtype=np.float32)
    with pytest.raises(RemoteProtocolError, match=f"unused bits at the end of an {name} payload of {n} values"):
        codec.decode_add(payload, 1.0, out)
    assert out.tolist() == [1.0] * n


def test_int8_refuses_the_code_that_stands_for_nothing() -> None:
    codec, out = get_codec("int8"), np.ones(3, dtype=np.float32)
    with pytest.raises(RemoteProtocolError, match="value 1 of an int8 payload has code -128"):
        codec.decode_add(bytes.fromhex("803f7f8000"), 1.0, out)
    assert out.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("value", [3.4028235e38, 2.0**-127, 2.0**-149])
def test_values_beyond_the_scales_bounds_take_the_nearest_scale(name: str, value: float) -> None:
    codec = get_codec(name)
    x = np.array([value, -value] * 130, dtype=np.float32)
    got = codec.decode(codec.encode(x), x.size)
    assert np.abs(got - x).max() <= max(value * 2.0**-7, 2.0**-126)
    assert np.sign(got).tolist() in ([0.0] * 260, [1.0, -1.0] * 130)


def test_int8_rounds_to_even_and_clips_what_the_scale_rounded_away() -> None:
    codec = get_codec("int8")
    # A scale of 127 makes the codes the rounded values; 127.25 is nearest to 127 as a bf16.
    x = np.array([127.25, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.25], dtype=np.float32)
    payload = codec.encode(x)
    assert payload[:2] == bytes.fromhex("fe42")
    assert np.frombuffer(payload[2:], np.int8).tolist() == [127, 0, 2, 2, 0, -2, -126, -127]


def test_e2m1_rounds_ties_away_from_zero() -> None:
    codec = get_codec("e2m1")
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = np.array([6.0, *ties, *(-tie for tie in ties)], dtype=np.float32)
    ups = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert codec.decode(codec.encode(x), 15).tolist() == [6.0, *ups, *(-up for up in ups)]
    below = np.nextafter(x, np.float32(0))
    below[0] = 6.0
    downs = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert codec.decode(codec.encode(below), 15).tolist() == [6.0, *downs, *(-down for down in downs)]


def test_e2m1_scales_are_rounded_up() -> None:
    x = np.array([np.nextafter(np.float32(6), np.float32(7), dtype=np.float32)], dtype=np.float32)
    assert get_codec("e2m1").encode(x)[:2] == bytes.fromhex("813f")
    assert get_codec("e2m1").encode(np.array([6], dtype=np.float32))[:2] == bytes.fromhex("803f")
    # Code 8 is another name of zero.
    assert get_codec("e2m1").decode(bytes.fromhex("803f08"), 1).tolist() == [0.0]


def test_e1m0_chooses_a_scale_that_is_nearly_the_best() -> None:
    codec = get_codec("e1m0")
    for x in (normal(256, 3), np.random.default_rng(4).uniform(-1, 1, 256).astype(np.float32)):
        magnitude = np.abs(x.astype(np.float64))

        def error(scale: float, magnitude: np.ndarray = magnitude) -> float:
            return float((np.minimum(np.abs(magnitude - scale), np.abs(magnitude - 2 * scale)) ** 2).sum())

        best = min(error(scale) for scale in np.linspace(0.2, 1.2, 1001))
        got = codec.decode(codec.encode(x), 256).astype(np.float64)
        assert ((got - x) ** 2).sum() <= 1.01 * best


def test_e1m0_parts_two_levels_in_any_mixture() -> None:
    codec = get_codec("e1m0")
    for count in (1, 2, 100, 254, 255):
        x = np.full(256, 1.171875, dtype=np.float32)
        x[:count] *= -2
        assert codec.decode(codec.encode(x), 256).tobytes() == x.tobytes()
        assert codec.encode(x)[:2] == bytes.fromhex("963f")


LEVELS = {
    "int8": [c / 127 for c in range(-127, 128)],
    "e2m1": [sign * level for sign in (1, -1) for level in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
    "e1m0": [1, 2, -1, -2],
}


@pytest.mark.parametrize("name", BLOCKWISE)
def test_each_value_becomes_the_nearest_of_all_levels_of_its_block(name: str) -> None:
    codec, n = get_codec(name), CHUNK + 600
    x = normal(n, 7)
    payload = codec.encode(x)
    got = codec.decode(payload, n).astype(np.float64)
    words = np.frombuffer(payload, "<u2", -(-n // 256))
    scale = (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    for start in (0, 256, CHUNK - 256, CHUNK, CHUNK + 512):
        part = slice(start, min(start + 256, n))
        grid = np.array(LEVELS[name]) * scale[start // 256]
        nearest = np.abs(x[part, None] - grid).min(axis=1)
        np.testing.assert_allclose(np.abs(got[part] - x[part]), nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("int8", "764be2bf3e1cf5d2"), ("e2m1", "b2f033cd6f501a66"), ("e1m0", "c227076ce6476fd2")],
)
def test_golden_digest_of_many_blocks(name: str, expected: str) -> None:
    # Whole numbers times powers of two from 2**-130 to 2**120, the same on every machine.
    count = np.arange(CHUNK + 999, dtype=np.uint32)
    bits = (count * np.uint32(2654435761)).view(np.int32)
    x = np.ldexp(bits.astype(np.float32), (count // 256 % 252).astype(np.int32) - 161)
    assert digest("payload", [get_codec(name).encode(x)]).hex()[:16] == expected


def test_blocks_do_not_touch_each_other() -> None:
    for name in BLOCKWISE:
        codec = get_codec(name)
        x = normal(1001)
        x[256:512] *= np.float32(1e-20)
        x[512:768] *= np.float32(1e20)
        whole = codec.decode(codec.encode(x), 1001)
        for start in range(0, 1001, 256):
            part = x[start : start + 256].copy()
            assert codec.decode(codec.encode(part), part.size).tobytes() == whole[start : start + 256].tobytes()


CUT = normal(CHUNK + 999, 11)
"""Blocks of very different sizes, so that a scale from the wrong block would be seen."""
CUT *= np.exp2(np.arange(CUT.size) // BLOCK % 41 - 20).astype(np.float32)
WHOLE = {name: codec.encode(CUT) for name, codec in CODECS.items()}


@every_codec
@settings(deadline=None)
@given(data=st.data())
def test_a_cut_is_what_encoding_the_slice_alone_gives(codec: Codec, data: st.DataObject) -> None:
    n = CUT.size
    start = BLOCK * data.draw(st.integers(0, (n - 1) // BLOCK), "first block")
    ends = st.sampled_from(range(start // BLOCK + 1, n // BLOCK + 1)).map(lambda block: block * BLOCK) | st.just(n)
    stop = data.draw(ends if start // BLOCK < n // BLOCK else st.just(n), "stop")
    payload = codec.cut(WHOLE[codec.name], n, start, stop)
    assert type(payload) is bytes
    assert len(payload) == codec.nbytes(stop - start)
    assert payload == codec.encode(CUT[start:stop])
    assert codec.cut(memoryview(WHOLE[codec.name]), n, start, stop) == payload


@every_codec
def test_cuts_put_together_decode_to_the_whole(codec: Codec) -> None:
    n = CUT.size
    stops = [0, BLOCK, 5 * BLOCK, CHUNK, n]
    cuts = [(codec.cut(WHOLE[codec.name], n, *bounds), bounds) for bounds in itertools.pairwise(stops)]
    values = [codec.decode(cut, stop - start) for cut, (start, stop) in cuts]
    assert np.concatenate(values).tobytes() == codec.decode(WHOLE[codec.name], n).tobytes()
    assert codec.cut(WHOLE[codec.name], n, 0, n) == WHOLE[codec.name]


@every_codec
@pytest.mark.parametrize(
    ("start", "stop"), [(-256, 256), (0, 0), (256, 256), (512, 256), (1, 256), (0, 255), (0, 1001), (256, 600)]
)
def test_a_cut_that_is_not_made_of_whole_blocks_is_refused(codec: Codec, start: int, stop: int) -> None:
    payload = codec.encode(np.ones(1000, dtype=np.float32))
    with pytest.raises(LocalProtocolError, match=f"values {start}..{stop} of 1000 are not whole blocks of 256"):
        codec.cut(payload, 1000, start, stop)
    assert len(codec.cut(payload, 1000, 768, 1000)) == codec.nbytes(232)  # the last block may be short


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="'fp5'; choose one of bf16, e1m0, e2m1, e3m0, fp32, int8"):
        get_codec("fp5")
    assert [get_codec(name).name for name in CODECS] == list(CODECS)
