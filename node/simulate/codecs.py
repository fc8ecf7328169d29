"""Codecs of the literature that leave values out instead of rounding them, for comparison (paper, section 3.3.3).

    topk      keep the values of largest magnitude                               (Stich et al. 2018, arXiv 1809.07599)
    dropout   keep each value with a chance, as it is: FedDropout                (Wen et al. 2022, arXiv 2109.15108)
    dare      the same, kept values divided by that chance, so the mean is right (Yu et al. 2024, arXiv 2311.03099)

They serve to see what learning makes of the loss, so their payload is plain FP32 with zeros; ``bits`` says what a real
one would take. topk and dropout shorten the update. An outer learning rate that is too hot then makes them look good:
find the best outer learning rate for each before comparing.

Chance must be the same wherever the same vector is encoded, so it is seeded by the vector's own digest.
"""

import numpy as np
from numpy.typing import NDArray

from stretto.protocol.codecs import FP32, Codec, Floats, get_codec
from stretto.protocol.digest import payload_digest
from stretto.protocol.errors import ConfigError

EXPERIMENTAL = ("topk", "dropout", "dare")


class TopK(FP32):
    """Keeps ``ceil(keep * n)`` values of n, those of largest magnitude; of equals the earlier ones."""

    name = "topk"

    def __init__(self, keep: float) -> None:
        self.keep = keep

    def bits(self) -> float:
        """Per weight on a real wire: FP16 values and 16-bit places within blocks."""
        return 32 * self.keep

    def encode(self, x: Floats) -> bytes:
        count = int(np.ceil(self.keep * x.size))
        kept = np.zeros_like(x)
        largest = np.argsort(-np.abs(x), kind="stable")[:count]
        kept[largest] = x[largest]
        return super().encode(kept)


class Dropout(FP32):
    """Keeps each value with chance ``keep``; ``rescaled`` (DARE) divides what is kept by it."""

    def __init__(self, keep: float, *, rescaled: bool) -> None:
        self.keep, self.rescaled = keep, rescaled
        self.name = "dare" if rescaled else "dropout"

    def bits(self) -> float:
        """Per weight on a real wire: FP16 values; the places follow from a seed."""
        return 16 * self.keep

    def encode(self, x: Floats) -> bytes:
        kept = np.where(self.mask(x), x, np.float32(0.0))
        if self.rescaled:
            kept /= np.float32(self.keep)
        return super().encode(kept)

    def mask(self, x: Floats) -> NDArray[np.bool_]:
        """Which values of (n,) float32 are kept."""
        seed = int.from_bytes(payload_digest(x.tobytes())[:8], "big")
        return np.random.default_rng(seed).random(x.size) < self.keep


def experimental(name: str, keep: float) -> TopK | Dropout:
    """A codec of this file by its name."""
    if name == "topk":
        return TopK(keep)
    if name in EXPERIMENTAL:
        return Dropout(keep, rescaled=name == "dare")
    raise ConfigError(f"simulate: there is no experimental codec {name!r}; choose one of {', '.join(EXPERIMENTAL)}")


def make_codec(name: str, keep: float) -> Codec:
    """A codec of contributions: the wire's own, or an experiment."""
    return experimental(name, keep) if name in EXPERIMENTAL else get_codec(name)


def bits_per_weight(name: str, keep: float) -> float:
    """What a contribution takes on a real wire, scales included."""
    if name in EXPERIMENTAL:
        return experimental(name, keep).bits()
    return 8 * get_codec(name).nbytes(1 << 16) / (1 << 16)
