"""The outer optimizer: what a fragment's round does to numbers. float32, the same bits on every machine.

    outer gradient   d_m   = anchor - local_m                                  (Algorithm 1, line 7)
    average          g     = sum_m c_m d_m,   c_m = clip_m w_m / sum w         (accumulated in FP32)
    Nesterov         b     = mu b + g,   anchor = anchor - lr (g + mu b)       (as torch.optim.SGD(nesterov=True))
    merge            local = alpha local + (1 - alpha) anchor                  (Algorithm 2, line 12)

Equal inputs must give equal bits on any CPU, since peers compare digests: every product and every sum is rounded on
its own. numpy's multiply and add are separate operations and are not contracted into fused multiply-add, unlike
``add_(alpha=...)``, ``addcmul_`` or a fused optimizer. Sums run in the order of peer ids. The Nesterov step also
exists in C (``_outer``), where it is one pass over memory; it is taken where a compiler was there at installation.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from stretto.protocol.codecs import Codec
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.fp4 import check_values

Vector = np.ndarray
"""(n,) float32 in host memory: one fragment, flattened."""

WEIGHT_BOUND = 4
"""No peer counts for more than this multiple of the group's median token weight."""

NORM_BOUND = 8
"""A contribution whose norm is a larger multiple of the group's median norm is scaled down to it."""

CHUNK = 1 << 16
"""Elements handled at once, so that temporaries stay in a core's own cache; a multiple of the codecs' blocks."""


Kernel = Callable[[Vector, Vector, Vector, float, float, Vector, Vector], None]
"""(anchor, momentum, gradient, lr, mu, new anchor, new momentum); arguments have been checked."""


def outer_gradient(anchor: Vector, local: Vector, out: Vector | None = None) -> Vector:
    """anchor - local, (n,) float32, written to ``out`` where given, which may be ``local``."""
    difference: Vector = np.subtract(anchor, local, out=out, dtype=np.float32)
    return difference


def norm(vector: Vector) -> float:
    """L2 norm of (n,) float32; it is announced, and need not have the same bits everywhere."""
    total = 0.0
    for start in range(0, vector.size, CHUNK):
        part = vector[start : start + CHUNK]
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(part, part))
            if not math.isfinite(square):  # squares above 3e38
                square = float(np.dot(part.astype(np.float64), part.astype(np.float64)))
        total += square
    return math.sqrt(total) if math.isfinite(total) else math.inf


def coefficients(tokens: Sequence[int], norms: Sequence[float] = ()) -> list[np.float32]:
    """The share of each contribution, from the tokens behind it, as float32 values that sum to about 1.

    Tokens are bounded to ``WEIGHT_BOUND`` times their median. A group that reports no tokens at all counts equally.
    ``norms`` are the L2 norms that the owners announce: one above ``NORM_BOUND`` times their median is clipped to
    that, as gradients are in training, so that one peer whose training diverged does not throw all others off.
    """
    if not tokens or min(tokens) < 0:
        raise LocalProtocolError(f"token weights must be counts, at least one: {list(tokens)}")
    bound = WEIGHT_BOUND * median(tokens)
    weights = [min(float(count), float(bound)) for count in tokens] if bound else [float(c) for c in tokens]
    total = sum(weights)
    if total == 0:
        weights, total = [1.0] * len(tokens), float(len(tokens))
    return [np.float32(weight / total * clip) for weight, clip in zip(weights, clips(norms, len(tokens)), strict=True)]


def clips(norms: Sequence[float], count: int) -> list[float]:
    """By what each of ``count`` contributions is multiplied because of its norm: 1 unless far above the median."""
    bound = NORM_BOUND * median(norms) if norms else 0.0
    return [bound / norm if norm > bound > 0 else 1.0 for norm in norms] if norms else [1.0] * count


def weighted_average(
    payloads: Sequence[bytes | memoryview],
    tokens: Sequence[int],
    codec: Codec,
    numel: int,
    out: Vector | None = None,
    norms: Sequence[float] = (),
) -> Vector:
    """Average of encoded outer gradients, (numel,) float32. Payloads, tokens and norms in the order of peer ids.

    Written to ``out`` where given, whatever it held.
    """
    average = np.empty(numel, dtype=np.float32) if out is None else out
    average.fill(0.0)
    for payload, coefficient in zip(payloads, coefficients(tokens, norms), strict=True):
        codec.decode_add(payload, float(coefficient), average)
    return average


def nesterov(
    anchor: Vector,
    momentum: Vector,
    gradient: Vector,
    *,
    lr: float,
    momentum_factor: float,
    anchor_out: Vector | None = None,
    momentum_out: Vector | None = None,
) -> tuple[Vector, Vector]:
    """One outer step. Returns a new (anchor, momentum); the inputs stay as they are.

    All (n,) float32. lr and momentum_factor are rounded to float32 first. The results are written to ``anchor_out``
    and ``momentum_out`` where given; the latter may be ``gradient`` itself, which saves its memory.
    """
    new_anchor = np.empty_like(anchor) if anchor_out is None else anchor_out
    new_momentum = np.empty_like(momentum) if momentum_out is None else momentum_out
    for array in (anchor, momentum, gradient, new_anchor, new_momentum):
        check_values(array, "an array of the outer step")
    _step(anchor, momentum, gradient, lr, momentum_factor, new_anchor, new_momentum)
    return new_anchor, new_momentum


def step_in_numpy(
    anchor: Vector,
    momentum: Vector,
    gradient: Vector,
    lr: float,
    factor: float,
    new_anchor: Vector,
    new_momentum: Vector,
) -> None:
    """The step of ``nesterov`` into given arrays."""
    rate, mu = np.float32(lr), np.float32(factor)
    for start in range(0, anchor.size, CHUNK):
        part = slice(start, start + CHUNK)
        g = gradient[part]
        b = momentum[part] * mu
        b += g
        step = b * mu
        step += g
        step *= rate
        new_momentum[part] = b
        np.subtract(anchor[part], step, out=new_anchor[part])


def _built() -> Kernel:
    """The fastest step of this installation."""
    try:
        from stretto.protocol import _outer
    except ImportError:  # there was no compiler when Stretto was installed
        return step_in_numpy
    return _outer.nesterov


_step = _built()


def merge(local: Vector, anchor: Vector, alpha: float) -> Vector:
    """alpha local + (1 - alpha) anchor, (n,) float32, a new array. alpha = 1 keeps local, 0 takes the anchor."""
    if alpha == 0.0:
        return anchor.copy()
    if alpha == 1.0:
        return local.copy()
    mixed = local * np.float32(alpha)
    mixed += anchor * np.float32(1.0 - alpha)
    return mixed
