"""Every path of the E3M0 codec through the same tests: C, numpy and torch write the same bytes and add the same bits.

`golden/e3m0.bin` holds 1027 FP32 values, little-endian, and behind them their payload. The values are all that the
format finds hard: every exponent with mantissas around the tie at 1.5, subnormals, zeros of both signs, a short block.
"""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.node import codec_pool
from stretto.protocol import fp4, fp4_numpy, fp4_torch
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4 import BLOCK, Floats

GOLDEN = Path(__file__).parent / "golden" / "e3m0.bin"
TOO_BIG = 0x7F400000
LENGTHS = [
    0,
    1,
    2,
    3,
    127,
    255,
    256,
    257,
    511,
    513,
    32767,
    65537,
    *(fp4_numpy.CHUNK + d for d in (-1, 0, 1, 255, 257)),
]
LENGTHS += [fp4_torch.CHUNK + 257, 3 * codec_pool.PIECE + 1]


@dataclass(frozen=True)
class Way:
    """One way to encode and to add, over arrays; the arrays' memory is also the tensors'."""

    name: str

    def encode(self, x: Floats) -> bytes:
        if self.name == "torch":
            return fp4_torch.encode(torch.from_numpy(x))
        with fp4.use_path(self.name.removesuffix(" in pieces")):
            if self.name.endswith("in pieces"):
                with ThreadPoolExecutor(2) as pool:
                    return codec_pool.encode_parallel(x, pool)
            return fp4.encode(x)

    def decode_add(self, payload: fp4.Payload, weight: float, out: Floats) -> None:
        if self.name == "torch":
            fp4_torch.decode_add(payload, weight, torch.from_numpy(out))
            return
        with fp4.use_path(self.name.removesuffix(" in pieces")):
            if self.name.endswith("in pieces"):
                with ThreadPoolExecutor(2) as pool:
                    codec_pool.decode_add_parallel(payload, weight, out, pool)
            else:
                fp4.decode_add(payload, weight, out)


WAYS = [Way(name) for name in ("c", "numpy", "torch", "c in pieces", "numpy in pieces")]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def hard_values(n: int, seed: int) -> Floats:
    """(n,) values of any exponent, a third with mantissas at the tie, runs of equal exponent, zeros, -0.0."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    mantissas = np.array([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], dtype=np.uint32)
    at_the_tie = rng.random(n) < 1 / 3
    bits[at_the_tie] = bits[at_the_tie] & 0xFF800000 | rng.choice(mantissas, int(at_the_tie.sum()))
    near = np.repeat(rng.integers(0, 254, -(-n // 1000)), 1000)[:n] + rng.integers(-9, 1, n)
    alike = rng.random(n) < 0.7
    bits[alike] = bits[alike] & 0x807FFFFF | np.clip(near[alike], 0, 253).astype(np.uint32) << 23
    bits[rng.random(n) < 0.02] &= 0x80000000
    too_big = bits & 0x7FFFFFFF >= TOO_BIG
    bits[too_big] &= 0xBFFFFFFF
    return bits.view(np.float32)


def one_by_one(x: Floats) -> bytes:
    """The format once more, value by value and with Python integers."""
    scales, nibbles = [], []
    words = [int(word) for word in x.view(np.uint32)]
    for start in range(0, len(words), BLOCK):
        rounded = [(word % 2**31 + 2**22) // 2**23 for word in words[start : start + BLOCK]]
        lo = max(*rounded, 7) - 7
        scales.append(lo)
        nibbles += [max(exponent - lo, 0) for exponent in rounded]
    nibbles = [c + 8 * (word // 2**31) for c, word in zip(nibbles, words, strict=True)] + [0] * (len(words) % 2)
    return bytes(scales) + bytes(low + 16 * high for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))


@pytest.fixture(scope="module")
def many() -> Floats:
    return np.concatenate(
        [hard_values(4_000_001, 1), np.random.default_rng(2).standard_normal(6_000_000).astype(np.float32)]
    )


def test_the_c_path_was_built_and_is_the_one_taken() -> None:
    assert list(fp4.PATHS) == ["c", "numpy"], "no C extension here: run `make` again, or pip install -e . --no-deps"
    assert fp4.path_name() == "c"
    assert fp4_torch.path_name() == "torch"


def test_another_path_is_taken_for_a_while() -> None:
    with fp4.use_path("numpy"):
        assert fp4.path_name() == "numpy"
    assert fp4.path_name() == "c"
    with pytest.raises(LocalProtocolError, match="no path 'cuda' here, only c and numpy"), fp4.use_path("cuda"):
        pass


@every_way
def test_golden_file(way: Way) -> None:
    data = GOLDEN.read_bytes()
    x = np.frombuffer(data, "<f4", 1027).astype(np.float32)
    payload = data[4 * 1027 :]
    assert len(payload) == fp4.nbytes(1027)
    assert one_by_one(x) == payload
    assert way.encode(x) == payload
    out = np.zeros(1027, dtype=np.float32)
    way.decode_add(payload, 1.0, out)
    assert way.encode(out) == way.encode(fp4.decode(payload, 1027))


@every_way
def test_ten_million_values(way: Way, many: Floats) -> None:
    with fp4.use_path("numpy"):
        payload = fp4.encode(many)
        expected = many[::-1].copy()
        fp4.decode_add(payload, 1 / 3, expected)
    assert way.encode(many) == payload
    got = many[::-1].copy()
    way.decode_add(payload, 1 / 3, got)
    assert got.tobytes() == expected.tobytes()


@every_way
@pytest.mark.parametrize("n", LENGTHS)
def test_every_length(way: Way, n: int) -> None:
    x = hard_values(n, n)
    payload = way.encode(x)
    if n < 1000:
        assert payload == one_by_one(x)
    with fp4.use_path("numpy"):
        assert payload == fp4.encode(x)
    got, expected = np.full(n, -0.0, dtype=np.float32), np.full(n, -0.0, dtype=np.float32)
    for weight in (1.0, -0.3, 0.0, 1e-30, 2.0**-140, 3e30):
        way.decode_add(payload, weight, got)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            expected += np.float32(weight) * fp4.decode(payload, n)
        assert got.tobytes() == expected.tobytes()


@every_way
@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, TOO_BIG, 0xFF400000])
@pytest.mark.parametrize("where", [0, 300, 512])
def test_what_cannot_be_held_is_refused_by_position(way: Way, bad: int, where: int) -> None:
    x = np.ones(513, dtype=np.float32)
    x.view(np.uint32)[where] = bad
    with pytest.raises(LocalProtocolError, match=f"value {where} of an outer gradient is .*finite values below"):
        way.encode(x)


@every_way
def test_the_first_of_several_is_named(way: Way) -> None:
    x = np.ones(3 * codec_pool.PIECE, dtype=np.float32)
    x[[codec_pool.PIECE + 7, codec_pool.PIECE + 5 + 128 * BLOCK, 2 * codec_pool.PIECE + 1]] = np.inf
    with pytest.raises(LocalProtocolError, match=f"value {codec_pool.PIECE + 7} of .* is inf"):
        way.encode(x)


@every_way
def test_large_but_finite_values_are_held(way: Way) -> None:
    x = np.array([2.5e38, -2.5e38, np.nextafter(np.float32(1.5 * 2.0**127), np.float32(0))], dtype=np.float32)
    assert way.encode(x) == bytes([247, 0xF7, 0x07])


@every_way
def test_an_illegal_payload_is_refused_and_nothing_is_added(way: Way) -> None:
    good = way.encode(np.ones(513, dtype=np.float32))
    high, padded = bytearray(good), bytearray(good)
    high[2], padded[-1] = 248, 0x17
    out = np.ones(513, dtype=np.float32)
    for payload, why in [
        (b"", "must be 260 bytes long, got 0"),
        (good[:-1], "must be 260 bytes long, got 259"),
        (good + b"\0", "must be 260 bytes long, got 261"),
        (high, "scale byte 248 of block 2"),
        (padded, "unused nibble"),
    ]:
        with pytest.raises(RemoteProtocolError, match=why):
            way.decode_add(payload, 1.0, out)
    for weight in (np.nan, np.inf, -1e39):
        with pytest.raises(LocalProtocolError, match="weight must be finite"):
            way.decode_add(good, weight, out)
    assert out.tolist() == [1.0] * 513


@every_way
def test_buffers_at_odd_addresses(way: Way) -> None:
    x = hard_values(1001, 9)
    payload = fp4.encode(x)
    out, expected = np.ones(1001, dtype=np.float32), np.ones(1001, dtype=np.float32)
    fp4.decode_add(payload, 0.5, expected)
    for buffer in (memoryview(b"\0" + payload)[1:], memoryview(bytearray(b"\0\0\0" + payload))[3:]):
        out[:] = 1
        way.decode_add(buffer, 0.5, out)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", list(fp4.PATHS))
def test_arrays_at_odd_addresses(name: str) -> None:
    x = hard_values(1001, 9)
    with fp4.use_path(name):
        odd = np.frombuffer(bytearray(b"\0" + x.tobytes()), np.float32, offset=1)
        assert not odd.flags.aligned
        assert fp4.encode(odd) == fp4.encode(x)
        expected = x.copy()
        fp4.decode_add(fp4.encode(x), 0.25, expected)
        fp4.decode_add(fp4.encode(x), 0.25, odd)
        assert odd.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", [*fp4.PATHS, "torch"])
def test_threads_do_not_disturb_each_other(name: str) -> None:
    inputs = [hard_values(200_001, k) for k in range(6)]
    alone = [fp4.encode(x) for x in inputs]
    with ThreadPoolExecutor(3) as pool, fp4.use_path("c" if name == "torch" else name):
        if name == "torch":
            together = list(pool.map(fp4_torch.encode, map(torch.from_numpy, inputs)))
        else:
            together = list(pool.map(fp4.encode, inputs))
    assert together == alone


@pytest.mark.parametrize("name", ["c", "numpy", "c in pieces", "numpy in pieces"])
def test_no_second_copy_of_the_payload_is_made(name: str) -> None:
    way, x = Way(name), np.zeros(1 << 24, dtype=np.float32)
    tracemalloc.start()
    payload = way.encode(x)
    way.decode_add(payload, 0.5, x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(payload) == 8_454_144
    assert peak < len(payload) + 5 * 2**20


@pytest.mark.parametrize("name", list(fp4.PATHS))
def test_pieces_must_fit_together(name: str) -> None:
    x, scales, codes = np.ones(513, np.float32), np.zeros(3, np.uint8), np.zeros(257, np.uint8)
    with fp4.use_path(name):
        fp4.encode_into(x, scales, codes)
        assert scales.tobytes() + codes.tobytes() == fp4.encode(x)
        for short in ((scales[:2], codes), (scales, codes[1:])):
            with pytest.raises(LocalProtocolError, match="do not hold 513 values"):
                fp4.encode_into(x, *short)
            with pytest.raises(LocalProtocolError, match="do not hold 513 values"):
                fp4.add_into(*short, 1.0, x)
        x[5] = np.nan
        with pytest.raises(LocalProtocolError, match="value 1029 of"):
            fp4.encode_into(x, scales, codes, first=1024)


def test_the_extension_checks_sizes_itself() -> None:
    x, scales, codes = np.ones(513, np.float32), np.zeros(3, np.uint8), np.zeros(257, np.uint8)
    kernel = fp4.PATHS["c"]
    for short in ((x[:512], scales, codes), (x, scales[:2], codes), (x, scales, codes[:256])):
        with pytest.raises(ValueError, match="do not go with"):
            kernel.encode_into(*short)
        with pytest.raises(ValueError, match="do not go with"):
            kernel.add_into(short[1], short[2], 1.0, short[0])


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_is_encoded_as_its_fp32_value(dtype: torch.dtype) -> None:
    tensor = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    tensor = tensor[tensor.float().abs() < 1.5 * 2.0**127]
    payload = fp4.encode(tensor.float().numpy())
    assert fp4_torch.encode(tensor) == payload
    words = tensor.view(torch.int16).numpy().view(np.uint16)
    assert fp4.encode_words(words, "bf16" if dtype == torch.bfloat16 else "fp16") == payload


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7F40])
def test_16_bit_values_that_cannot_be_held(word: int) -> None:
    words = np.zeros(fp4.CHUNK + 300, dtype=np.uint16)
    words[fp4.CHUNK + 299] = word
    with pytest.raises(LocalProtocolError, match=f"value {fp4.CHUNK + 299} of"):
        fp4.encode_words(words, "bf16")
    with pytest.raises(LocalProtocolError, match=f"value {fp4.CHUNK + 299} of"):
        fp4_torch.encode(torch.from_numpy(words.view(np.int16)).view(torch.bfloat16))
    words[-1] = 0x7C01  # a signalling nan in FP16
    with pytest.raises(LocalProtocolError, match=f"value {fp4.CHUNK + 299} of .* nan"):
        fp4.encode_words(words, "fp16")


def test_words_of_another_kind_are_refused() -> None:
    for words in (np.zeros(4, np.int16), np.zeros((2, 2), np.uint16), np.zeros(8, np.uint16)[::2], [1, 2]):
        with pytest.raises(LocalProtocolError, match=r"contiguous uint16 array of shape \(n,\)"):
            fp4.encode_words(words, "bf16")  # type: ignore[arg-type]


def test_tensors_of_another_kind_are_refused() -> None:
    good = torch.zeros(12)
    for x in (good.double(), good.int(), good[::2], good.view(3, 4), torch.tensor(1.0), [1.0]):
        with pytest.raises(
            LocalProtocolError, match=r"contiguous float32 or bfloat16 or float16 tensor of shape \(n,\)"
        ):
            fp4_torch.encode(x)  # type: ignore[arg-type]
    for out in (good.bfloat16(), good.double(), good[::2], good.view(3, 4)):
        with pytest.raises(LocalProtocolError, match="the accumulator must be a contiguous float32 tensor"):
            fp4_torch.decode_add(bytes(7), 1.0, out)


def test_a_parameter_is_encoded_and_left_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(hard_values(777, 3)))
    before = parameter.detach().clone()
    payload = fp4_torch.encode(parameter)
    assert payload == fp4.encode(before.numpy())
    assert torch.equal(parameter.detach(), before)
    fp4_torch.decode_add(payload, 0.5, parameter)
    assert not parameter.grad_fn
