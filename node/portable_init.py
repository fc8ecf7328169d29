"""Initial weights that are the same bits on every machine.

``torch.manual_seed`` does not promise this: torch draws normal numbers with vectorised logarithms and cosines whose
last bits depend on the kind of CPU, and a GPU uses another generator altogether. Peers that found or join a run must
start from one common anchor, so the initial values come from here instead.

Method. The library's own initialisation is run once and only *measured*: which parameters are random, and how wide.
Each random parameter is then overwritten.

1. The key of a parameter is BLAKE2b(seed, name); it starts the counter-based generator Philox 4x64 (Salmon et al.,
   "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose 64-bit words NumPy keeps stable between versions.
2. Three words make twelve 16-bit integers u_1..u_12. Their sum is exact, has mean 12 (2^16 - 1) / 2 = 393210 and
   variance 12 ((2^16)^2 - 1) / 12 = 2^32 - 1 (Irwin-Hall, close to a normal law, cut at 6 standard deviations).
3. value = float32(sum - 393210) * float32(std / sqrt(2^32 - 1)). The integer is below 2^24, hence exact in float32,
   and one IEEE multiplication rounds alike everywhere.

The std in step 3 must not carry the library's own last bits. It is ``initializer_range`` itself where the measured
value agrees with it (within six standard errors), else the measured value on a grid of 64 steps to the octave.

Constant parameters (norm weights 1, biases 0) keep their value. A random parameter whose mean is not zero (state-space
models have some) cannot be described by a std; such a model is refused.

Only initial values may live here; nothing here knows a model family.
"""

import math
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.protocol.errors import ConfigError

SUM_MEAN = 12 * 0xFFFF // 2
SUM_STD = math.sqrt(2**32 - 1)
CHUNK = 1 << 14  # values per pass: 384 KiB of generator words stay in a core's cache (21 ns a value, not 35)
SIGMAS = 6.0  # a healthy parameter fails a six-sigma test about twice in 10^9
MAX_SNAP = 0.05  # a small parameter's own noise is no reason to take a std that is more than 5 % away


def init_portably(model: nn.Module, seed: int, nominal_std: float | None) -> None:
    """Overwrite every randomly initialised parameter of ``model`` in place; tied parameters once.

    model: float32, on the CPU, as its library initialised it. seed: 0 .. 2^64 - 1. nominal_std: the std that the
    model's configuration names, or None. Raises ConfigError for a parameter whose own values have a mean.
    """
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"The seed of a run is a whole number from 0 to 2^64 - 1, not {seed}. Choose another one.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)  # (n,) fp32, shares memory
            if flat.numel() and bool(flat.min() != flat.max()):
                fill(flat, seed, name, _own_std(flat, name, nominal_std))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0


def fill(flat: Tensor, seed: int, name: str, std: float) -> None:
    """Write portable values with this std into ``flat``, (n,) float32 on the CPU; see the top of the file."""
    key = blake2b(seed.to_bytes(8, "little") + name.encode(), digest_size=16, person=b"stretto-init").digest()
    words = np.random.Philox(key=int.from_bytes(key, "little"))
    factor = np.float32(std / SUM_STD)
    out: NDArray[np.float32] = flat.numpy()
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        sums = _sums_of_twelve(words.random_raw(3 * part.size).reshape(-1, 3))
        np.multiply((sums - SUM_MEAN).astype(np.float32), factor, out=part)


def _sums_of_twelve(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Sum the twelve 16-bit quarters of each row; words: (n, 3) uint64 -> (n,) int64 in 0 .. 12 * 65535.

    Two quarters are added at a time in the two 32-bit halves of a word: 6 * 65535 cannot overflow a half.
    """
    low_quarters = np.uint64(0x0000FFFF_0000FFFF)
    pairs = (words & low_quarters) + ((words >> np.uint64(16)) & low_quarters)
    halves = pairs[:, 0] + pairs[:, 1] + pairs[:, 2]
    return ((halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))).astype(np.int64)


def _own_std(flat: Tensor, name: str, nominal_std: float | None) -> float:
    """Measure the std of the library's values, freed of their last bits; flat: (n,) float32, not constant."""
    count = flat.numel()
    total = square = 0.0
    for part in flat.split(CHUNK):
        part64 = part.double()
        total += float(part64.sum())
        square += float(part64.square().sum())
    if not math.isfinite(square):
        raise ConfigError(
            f"The library's own initial values of parameter {name} are not finite. Correct the initializer fields of "
            "the model table."
        )
    std, mean = math.sqrt(square / count), total / count
    spread = math.sqrt(max(square / count - mean * mean, 0.0))
    if abs(mean) > SIGMAS * spread / math.sqrt(count):
        raise ConfigError(
            f"The initial values of parameter {name} have mean {mean:.3g} beside a spread of {spread:.3g}: this "
            "model type begins from values that cannot be made equal on all machines. Choose a model type whose "
            "weights begin as zero-mean noise or constants (qwen3, llama, gpt2, ...)."
        )
    if nominal_std and abs(std / nominal_std - 1.0) < min(MAX_SNAP, SIGMAS / math.sqrt(2.0 * count)):
        return nominal_std
    return round_to_grid(std)


def round_to_grid(std: float) -> float:
    """Round to the nearest of 64 equal steps per octave (at most 0.8 % away), exactly, with no library logarithm."""
    mantissa, exponent = math.frexp(std)  # mantissa in [0.5, 1)
    return math.ldexp(round(mantissa * 128.0), exponent - 7)
