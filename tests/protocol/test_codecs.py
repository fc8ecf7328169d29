"""Every wire codec through the same tests: what one promises, all promise."""

import numpy as np
import pytest

from stretto.protocol.codecs import CODECS, Codec, Floats, get_codec
from stretto.protocol.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import CHUNK

LENGTHS = [0, 1, 2, 3, 255, 256, 257, 1001, CHUNK + 257]
RELATIVE_ERROR = {"e3m0": 0.21, "fp32": 0.0, "bf16": 2.0**-8}
"""Largest relative L2 error on normal values; a new codec adds its own here."""

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
        assert np.linalg.norm(got - x) <= RELATIVE_ERROR[codec.name] * np.linalg.norm(x)
    assert codec.decode(codec.encode(got), n).tobytes() == got.tobytes()
    total = np.ones(n, dtype=np.float32)
    codec.decode_add(payload, 0.25, total)
    codec.decode_add(payload, -0.3, total)
    expected = (np.float32(1) + np.float32(0.25) * got) + np.float32(-0.3) * got
    assert total.tobytes() == expected.tobytes()


@every_codec
def test_zeros_and_extremes_survive(codec: Codec) -> None:
    assert codec.encode(np.zeros(513, dtype=np.float32)) == bytes(codec.nbytes(513))
    for value in (2.0**127, 2.0**-126, 1.0, -(2.0**-100)):
        x = np.array([value, -value, 0.0], dtype=np.float32)
        assert codec.decode(codec.encode(x), 3).tolist() == x.tolist()


@every_codec
@pytest.mark.parametrize("n", [1, 6, 257])
def test_a_payload_of_another_length_is_refused(codec: Codec, n: int) -> None:
    payload = codec.encode(np.ones(n, dtype=np.float32))
    out = normal(n)
    before = out.tobytes()
    for wrong in (b"", payload[:-1], payload + b"\0", codec.encode(np.ones(n + 2, dtype=np.float32))):
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


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="'fp5'; choose one of bf16, e3m0, fp32"):
        get_codec("fp5")
    assert [get_codec(name).name for name in CODECS] == list(CODECS)
