"""One replica with a real model: local weights, AdamW, and its share of the swarm's data.

The replicas of a swarm draw from one stream in the order of their steps, so every window is read once by the swarm and
two methods with the same batch see the same text. The models are small and kept apart, each with its own optimizer
state, about 16 bytes per weight and replica: swapping one model's weights and moments in and out would copy as much
at every step as the step itself reads.

With ``frozen`` (FedPart, paper section 3.3.1) a step changes only the tensors of the fragment that leaves next; the
others have no gradient, so AdamW leaves both them and its moments alone, and no weight decay pulls at them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from stretto.node.data.corpus import Corpus
from stretto.node.data.stream import TokenStream, count_windows, gather_windows
from stretto.node.model import build_model, loss_fn
from stretto.node.simulate.config import SimConfig
from stretto.node.trainer import learning_rate, make_optimizer
from stretto.protocol.config import InnerConfig
from stretto.protocol.errors import StrettoError
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.outer import Vector


class Diverged(StrettoError):
    """The loss is no longer a number: these settings do not train."""


@dataclass
class Workshop:
    """What the replicas of one run share: settings, data, and how a model is made."""

    config: SimConfig
    corpus: Corpus
    vocab_size: int
    stream: TokenStream = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        self.stream = TokenStream(self.corpus.train, c.sequence_length, c.seed, unit_sequences=512)

    def fragmented(self) -> tuple[torch.nn.Module, FragmentedModel]:
        """A model with the run's initial weights, and its fragments."""
        c = self.config
        model = build_model(c.model_table(self.vocab_size), c.seed, device=c.device)
        return model, FragmentedModel(model, split_model(model, count=c.fragments, pattern=c.pattern))

    def batch(self, sequences: int) -> torch.Tensor:
        """The swarm's next windows: (sequences, T + 1) int64 on the device."""
        self.stream.reserve(sequences)
        windows = self.stream.next(sequences)
        self.stream.consumed()
        return torch.from_numpy(windows).to(self.config.device)

    def heldout(self, at_a_time: int = 32) -> list[np.ndarray]:
        """Held-out windows spread evenly over that part of the corpus, the same for every run of this corpus."""
        length = self.config.sequence_length
        windows = count_windows(self.corpus.heldout, length, "held-out")
        count = min(self.config.eval_sequences, windows)
        chosen = np.linspace(0, windows - 1, count).astype(np.int64)
        return [
            gather_windows(self.corpus.heldout, chosen[start : start + at_a_time], length)
            for start in range(0, count, at_a_time)
        ]


def make_inner(model: torch.nn.Module, config: SimConfig) -> torch.optim.Optimizer:
    """The inner optimizer."""
    if config.inner == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    return make_optimizer(model, config.inner_config())


class ModelReplica:
    """Implements ``protocol.simpeer.Replica`` with a model.

    ``progress`` tells the swarm step at which the step that ends now began: the axis of the learning rate.
    ``trains`` tells the only fragment that such a step may change; None trains all.
    """

    def __init__(self, shop: Workshop, *, micro_batches: int = 1) -> None:
        self.shop, self.inner = shop, shop.config.inner_config()
        self.model, self.fragments = shop.fragmented()
        self.optimizer = make_inner(self.model, shop.config)
        self.progress: Callable[[], float] = lambda: float(self.steps)
        self.trains: Callable[[float], int] | None = None
        self.micro_batches = micro_batches
        self.steps = 0
        self.losses: list[float] = []

    def step(self) -> int:
        """One inner step; returns the tokens it trained on."""
        began = self.progress()
        sequences = self.inner.tokens_per_step // self.shop.config.sequence_length
        loss = 0.0
        for _ in range(self.micro_batches):
            total, cross_entropy = loss_fn(self.model, self.shop.batch(sequences), self.inner.z_loss)
            (total / self.micro_batches).backward()
            loss += cross_entropy.item() / self.micro_batches
        if not np.isfinite(loss):
            raise Diverged(f"the loss is {loss} after {self.steps} steps")
        self._freeze(began)
        self._update(began)
        self.steps += 1
        self.losses.append(loss)
        return self.micro_batches * self.inner.tokens_per_step

    def _freeze(self, began: float) -> None:
        if self.trains is None:
            return
        chosen = self.trains(began)
        for fragment in range(len(self.fragments.specs)):
            for parameter in self.fragments.parameters(fragment).values() if fragment != chosen else ():
                parameter.grad = None

    def _update(self, began: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.inner.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.inner, began)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def get(self, fragment: int) -> Vector:
        """The local weights of a fragment, (n,) float32, a copy on the host."""
        return self.fragments.gather(fragment)

    def set(self, fragment: int, weights: Vector) -> None:
        """Replace the local weights of a fragment."""
        self.fragments.scatter(fragment, weights)


def due_fragment(config: SimConfig, step: float) -> int:
    """The fragment that leaves next, after swarm step ``step``: the only one that FedPart trains.

    Round r leaves at H + r H / P; the first cycle, after which nothing leaves yet, is shared out in the same way.
    """
    per_round = config.inner_steps / config.fragments
    return (int(step / per_round + 1e-9) + 1) % config.fragments


def recent_loss(replicas: "list[ModelReplica]", steps: int = 20) -> float:
    """Mean training loss of the replicas' last steps, nats per token."""
    return float(np.mean([np.mean(replica.losses[-steps:]) for replica in replicas]))


def inner_learning_rate(inner: InnerConfig, step: float) -> float:
    """The inner learning rate at a swarm step, never 0."""
    return max(learning_rate(inner, step), 1e-12)
