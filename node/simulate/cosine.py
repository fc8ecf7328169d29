"""Cosine similarity of the replicas' outer gradients, layer by layer (paper, Figures 17 and 18).

For each round and layer: the mean over all pairs of replicas of <a, b> / (|a| |b|), from the outer gradients as they
leave, before any codec. Values near 1 say that the replicas learn the same, near 0 that their updates are orthogonal,
below 0 that they undo one another.
"""

import math
import re
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from stretto.protocol.fragments import FragmentSpec
from stretto.protocol.outer import Vector


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: ``layer 3``, ``embedding``, or ``other`` (final norm, head)."""
    found = re.search(r"\.(?:layers|h|blocks?)\.(\d+)\.", name)
    if found:
        return f"layer {found[1]}"
    return "embedding" if "embed" in name or "wte" in name else "other"


def cosine(a: Vector, b: Vector) -> float:
    """<a, b> / (|a| |b|), 0 where one of them is zero."""
    norms = math.sqrt(float(np.dot(a, a)) * float(np.dot(b, b)))
    return float(np.dot(a, b)) / norms if norms else 0.0


def mean_cosine(vectors: list[Vector]) -> float:
    """The mean over all pairs."""
    pairs = list(combinations(vectors, 2))
    return sum(cosine(a, b) for a, b in pairs) / len(pairs)


def by_layer(spec: FragmentSpec, gradient: Vector) -> dict[str, Vector]:
    """A fragment's (n,) float32 vector cut into the parts of its layers."""
    parts: dict[str, list[Vector]] = {}
    start = 0
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        stop = start + math.prod(shape)
        parts.setdefault(layer_of(name), []).append(gradient[start:stop])
        start = stop
    return {layer: np.concatenate(pieces) for layer, pieces in parts.items()}


@dataclass
class CosineLog:
    """Collects outer gradients until all ``replicas`` have left in a round."""

    replicas: int
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By layer: (step, mean cosine)."""
    _open: dict[int, dict[int, dict[str, Vector]]] = field(default_factory=dict)

    def add(self, replica: int, round: int, step: float, spec: FragmentSpec, gradient: Vector) -> None:
        """The outer gradient of a replica in a round, (n,) float32."""
        here = self._open.setdefault(round, {})
        here[replica] = by_layer(spec, gradient)
        if len(here) == self.replicas > 1:
            for layer in next(iter(here.values())):
                value = mean_cosine([parts[layer] for parts in here.values()])
                self.series.setdefault(layer, []).append((step, value))
        for old in [number for number in self._open if number < round or len(self._open[number]) == self.replicas]:
            del self._open[old]
