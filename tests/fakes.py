"""Stand-ins that tests share: toy replicas for the simulation, and short ways to make configs, ids and records.

Toys only: nothing here waits, opens a socket or reads a clock, and everything is drawn from a seed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from stretto.protocol.config import GroupConfig, OuterConfig, RunConfig, WireConfig
from stretto.protocol.outer import Vector
from stretto.protocol.simulation import Simulation

TOY_MODEL = {"model_type": "toy"}
LOSSLESS = WireConfig(up="fp32", down="fp32")


def toy_config(
    *, codec: str = "e3m0", down: str = "", min_size: int = 1, max_size: int = 16, **outer: float
) -> RunConfig:
    """A run config for toy replicas; keywords beyond these are fields of ``OuterConfig``."""
    fields = {"inner_steps": 20, "fragments": 4, "tau_max": 10} | outer
    return RunConfig(
        name="toy",
        model=TOY_MODEL,
        outer=OuterConfig(**fields),  # type: ignore[arg-type]
        wire=WireConfig(up=codec, down=down or ("fp32" if codec == "fp32" else "int8")),
        group=GroupConfig(min_size=min_size, max_size=max_size),
    )


class QuadraticReplica:
    """Gradient descent on |w - target|^2 / 2 per fragment, with its own target and token counts.

    ``work[p]`` is the sum of its own inner updates to fragment p since the start, float64: what the swarm owes it.
    """

    def __init__(
        self, seed: int, fragments: int = 4, size: int = 33, *, tokens: int | None = None, rate: float = 0.05
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.targets = [self.random.normal(size=size).astype(np.float32) for _ in range(fragments)]
        # all replicas begin with the same weights
        common = np.random.default_rng(1_000_003)
        self.weights = [common.normal(size=size).astype(np.float32) for _ in range(fragments)]
        self.work = [np.zeros(size) for _ in range(fragments)]
        self.rate, self.tokens = np.float32(rate), tokens

    def step(self) -> int:
        """One inner step; the tokens are drawn from 50..149 unless fixed."""
        for p, (weights, target) in enumerate(zip(self.weights, self.targets, strict=True)):
            after = weights + self.rate * (target - weights)
            self.work[p] += after.astype(np.float64) - weights
            self.weights[p] = after
        return int(self.random.integers(50, 150)) if self.tokens is None else self.tokens

    def get(self, fragment: int) -> Vector:
        """A copy of the local weights, (size,) float32."""
        return self.weights[fragment].copy()

    def set(self, fragment: int, weights: Vector) -> None:
        """Replace the local weights."""
        self.weights[fragment] = weights.copy()


class TorchReplica:
    """A two-layer network and AdamW on random regression data of its own; one fragment, or one per layer."""

    def __init__(self, seed: int, *, per_layer: bool = False, tokens: int = 16) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)  # all replicas begin with the same weights
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
        self.generator = torch.Generator().manual_seed(seed)
        self.slope = torch.randn(6, 1, generator=self.generator)
        parameters = list(self.net.parameters())
        self.groups = [parameters[:2], parameters[2:]] if per_layer else [parameters]
        self.tokens = tokens

    def step(self) -> int:
        """One AdamW step on a fresh batch of 16."""
        x = torch.randn(16, 6, generator=self.generator)
        self.optimizer.zero_grad()
        loss = (self.net(x) - torch.sin(x @ self.slope)).square().mean()
        loss.backward()
        self.optimizer.step()
        return self.tokens

    def get(self, fragment: int) -> Vector:
        """The parameters of the fragment, flattened, float32."""
        return torch.cat([p.detach().reshape(-1) for p in self.groups[fragment]]).numpy()

    def set(self, fragment: int, weights: Vector) -> None:
        """Write flattened parameters back."""
        flat = torch.from_numpy(weights.copy())
        with torch.no_grad():
            for parameter, part in zip(
                self.groups[fragment], flat.split([p.numel() for p in self.groups[fragment]]), strict=True
            ):
                parameter.copy_(part.reshape(parameter.shape))


def outer_states(simulation: Simulation, peers: Sequence[int] | None = None) -> list[tuple[bytes, ...]]:
    """Per peer: anchor bytes, momentum bytes and head of every fragment, to be compared for equality."""
    chosen = simulation.peers if peers is None else [simulation.peers[index] for index in peers]
    return [
        tuple(
            part
            for state in sim.peer.diloco.fragments
            for part in (state.anchor.tobytes(), state.momentum.tobytes(), state.tip.head)
        )
        for sim in chosen
    ]
