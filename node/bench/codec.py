"""``stretto bench codec``: how fast the E3M0 codec is, next to copying memory and to hivemind's codecs.

Speeds are GB/s of FP32, 4 bytes times values over time, on one thread. Machines differ, so ratios are what counts, and
they are taken within one run: the contenders take turns, round after round, and medians are compared. Every size walks
through arrays of at least 256 MB, so what is read next has long left the caches that belong to a core.

The limit is what memory allows: encoding moves 4.5 bytes per value (4 in, half a byte out), decode-and-accumulate 8.5
(half a byte in, 4 in, 4 out), at the rate at which ``np.copyto`` moves its 8 in the same run. That rate depends on the
size: for very large arrays the C library writes past the caches. ``encode`` writes into a payload that is there
already, as ``copyto`` does; ``encode_fresh`` makes a new bytes object, whose pages the kernel has to find and clear.

hivemind's codecs take one tensor per call. Its averager cuts tensors into parts of 512 KiB first, which fit a cache,
and so does this; ``uniform8bit_whole`` is one call for all. Its 8-bit ``extract`` fails under numpy 2.4 and later; the
report says so then, and only ``compress`` is timed.
"""

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from hivemind.compression import CompressionInfo, Float16Compression, Uniform8BitQuantization

from stretto.protocol import fp4, fp4_torch
from stretto.protocol.errors import ConfigError
from stretto.protocol.fp4 import Floats

WALK = 1 << 26
"""Floats that are walked through, 256 MB."""
SLOW = 1 << 24
"""Floats that slow contenders get per round: a quarter of that."""
PART = 1 << 17
"""Floats in one of hivemind's parts."""
WEIGHT = 0.3
"""Of a contribution; not a power of two, so that the product rounds."""
ENCODE_BYTES, DECODE_ADD_BYTES, COPY_BYTES = 4.5, 8.5, 8.0
MAX_FLOATS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that is timed: a call on the values ``start`` to ``stop``; a slow one gets fewer of them."""

    name: str
    call: Callable[[int, int], None]
    slow: bool = False


def bench_codec(sizes: Sequence[int] = (16_000_000, 64_000_000), runs: int = 7) -> dict[str, Any]:
    """Time every path for vectors of each size, in floats, in ``runs`` interleaved rounds.

    Returns:
        A JSON object. Ratios at its top are the lowest over the sizes; ``best_path`` is the one they speak of unless
        they name another. ``sizes`` holds the speeds and all ratios of each size.

    Raises:
        ConfigError: if a size or ``runs`` is out of range.
    """
    if not sizes or not all(fp4.BLOCK <= size <= MAX_FLOATS for size in sizes) or not 1 <= runs <= 1000:
        raise ConfigError(f"bench codec takes sizes of 256 to {MAX_FLOATS} floats and 1 to 1000 runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch will drop what hivemind quantizes with
            fault = _extract_fault()
            reports = [_bench_size(size, runs, fault) for size in sizes]
    finally:
        torch.set_num_threads(threads)
    ratios = [key for key, value in reports[0]["ratios"].items() if value is not None]
    return {
        **{key: min(report["ratios"][key] for report in reports) for key in ratios},
        "best_path": fp4.path_name(),
        "paths": [*fp4.PATHS, fp4_torch.path_name()],
        "uniform8bit_extract": fault or "works",
        "cpu": _cpu_model(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("numpy", "torch", "hivemind")},
        "threads": 1,
        "runs": runs,
        "sizes": reports,
    }


def _bench_size(size: int, runs: int, extract_fault: str | None) -> dict[str, Any]:
    """Speeds in GB/s of FP32 and their ratios, for vectors of ``size`` floats."""
    count = max(1, WALK // size)
    x = np.random.default_rng(0).standard_normal(size * count, dtype=np.float32)
    contenders = _contenders(x, size, extract_fault)
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(runs + 1):
        for contender in contenders:
            calls, stop = (max(1, SLOW // size), min(size, SLOW)) if contender.slow else (count, size)
            # Slow contenders walk as well, from round to round.
            first = turn * calls % count if contender.slow else 0
            begin = perf_counter()
            for k in range(first, first + calls):
                offset = k % count * size
                contender.call(offset, offset + stop)
            seconds = (perf_counter() - begin) / (calls * stop)
            if turn:  # the first round warms up
                times[contender.name].append(seconds)
    speed = {name: 4e-9 / median(seconds) for name, seconds in times.items()}
    return {"floats": size, "gb_per_s": speed, "ratios": _ratios(speed)}


def _contenders(x: Floats, size: int, extract_fault: str | None) -> list[Contender]:
    """All that is timed, over ``x`` and one accumulator of its shape; ``size`` values belong to one vector."""
    out = x.copy()
    scales, codes = np.zeros(-(-size // fp4.BLOCK), np.uint8), np.zeros((size + 1) // 2, np.uint8)
    payloads = {start: fp4.encode(x[start : start + size]) for start in range(0, x.size, size)}

    def copy(start: int, stop: int) -> None:
        np.copyto(out[start:stop], x[start:stop])

    def on(path: str, call: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def run(start: int, stop: int) -> None:
            with fp4.use_path(path):
                call(start, stop)

        return run

    def encode(start: int, stop: int) -> None:
        fp4.encode_into(x[start:stop], scales, codes)

    def encode_fresh(start: int, stop: int) -> None:
        fp4.encode(x[start:stop])

    def decode_add(start: int, stop: int) -> None:
        fp4.decode_add(payloads[start], WEIGHT, out[start:stop])

    def torch_encode(start: int, stop: int) -> None:
        fp4_torch.encode(torch.from_numpy(x[start:stop]))

    def torch_decode_add(start: int, stop: int) -> None:
        payload = payloads[start] if stop - start == size else short_payloads[start]
        fp4_torch.decode_add(payload, WEIGHT, torch.from_numpy(out[start:stop]))

    short_payloads = {start: fp4.encode(x[start : start + SLOW]) for start in payloads} if size > SLOW else {}
    found = [Contender(name="memcpy", call=copy)]
    for path in fp4.PATHS:
        found += [
            Contender(name=f"{path}_encode", call=on(path, encode)),
            Contender(name=f"{path}_encode_fresh", call=on(path, encode_fresh)),
            Contender(name=f"{path}_decode_add", call=on(path, decode_add)),
        ]
    found += [
        Contender(name="torch_encode", call=torch_encode, slow=True),
        Contender(name="torch_decode_add", call=torch_decode_add, slow=True),
    ]
    return found + _hivemind_contenders(x, out, size, extract_fault)


def _hivemind_contenders(x: Floats, out: Floats, size: int, extract_fault: str | None) -> list[Contender]:
    """hivemind's half precision and 8-bit codecs, over the same arrays."""
    found = []
    for name, codec in (("float16", Float16Compression()), ("uniform8bit", Uniform8BitQuantization())):
        info = CompressionInfo.from_tensor(torch.from_numpy(x[:PART]))

        def encode(start: int, stop: int, codec: Any = codec, info: Any = info) -> None:
            for at in range(start, stop, PART):
                codec.compress(torch.from_numpy(x[at : min(at + PART, stop)]), info)

        def encode_whole(start: int, stop: int, codec: Any = codec, info: Any = info) -> None:
            codec.compress(torch.from_numpy(x[start:stop]), info)

        if name == "uniform8bit":
            found.append(Contender(name=f"{name}_whole_encode", call=encode_whole, slow=True))
        found.append(Contender(name=f"{name}_encode", call=encode, slow=True))
        if name == "uniform8bit" and extract_fault:
            continue
        messages = [codec.compress(torch.from_numpy(part), info) for part in _cut(x[: min(size, SLOW)])]

        def decode_add(start: int, stop: int, codec: Any = codec, messages: Any = messages) -> None:
            for message, part in zip(messages, _cut(out[start:stop]), strict=True):
                torch.from_numpy(part).add_(codec.extract(message), alpha=WEIGHT)

        found.append(Contender(name=f"{name}_decode_add", call=decode_add, slow=True))
    return found


def _cut(x: Floats) -> list[Floats]:
    """``x`` in hivemind's parts, as views."""
    return [x[at : at + PART] for at in range(0, x.size, PART)]


def _extract_fault() -> str | None:
    """What hivemind's 8-bit extract says here, or None if it works."""
    codec = Uniform8BitQuantization()
    values = torch.linspace(-1, 1, 256)
    message = codec.compress(values, CompressionInfo.from_tensor(values))
    try:
        codec.extract(message)
    except TypeError as error:
        return f"TypeError under numpy {np.__version__}: {error}; only compress was timed"
    return None


def _ratios(speed: dict[str, float]) -> dict[str, float | None]:
    """The comparisons, each within this run; None for what could not be timed."""
    copied = speed["memcpy"] * COPY_BYTES
    best = fp4.path_name()
    ratios: dict[str, float | None] = {}
    for prefix, path in (("", best), ("numpy_", "numpy"), ("torch_", "torch")):
        encode, decode_add = speed[f"{path}_encode"], speed[f"{path}_decode_add"]
        ratios[f"{prefix}encode_over_memcpy"] = encode / speed["memcpy"]
        ratios[f"{prefix}decode_add_over_memcpy"] = decode_add / speed["memcpy"]
        ratios[f"{prefix}encode_over_limit"] = encode * ENCODE_BYTES / copied
        ratios[f"{prefix}decode_add_over_limit"] = decode_add * DECODE_ADD_BYTES / copied
        for other in ("uniform8bit", "uniform8bit_whole", "float16"):
            for what, mine in (("encode", encode), ("decode_add", decode_add)):
                theirs = speed.get(f"{other}_{what}")
                ratios[f"{prefix}{what}_over_{other}"] = mine / theirs if theirs else None
    ratios["encode_fresh_over_limit"] = speed[f"{best}_encode_fresh"] * ENCODE_BYTES / copied
    ratios["numpy_encode_fresh_over_limit"] = speed["numpy_encode_fresh"] * ENCODE_BYTES / copied
    return ratios


def _cpu_model() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
