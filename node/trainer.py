"""The inner optimizer: AdamW on this replica, one visible loop.

    lr(s) = lr * s / warmup                                   while s < warmup
    lr(s) = lr * (final + (1 - final) (1 + cos(pi q)) / 2)    after it, q = (s - warmup) / (total - warmup)

with s the *swarm step* (mean inner steps of all peers, from the shared clock), so that a peer that joins late or is
slow has the same learning rate as the others. The loss is cross-entropy plus z-loss (the paper, section 3.1).

With a *pace* each step is padded to a fixed time, so that many peers fit one machine: emulated device time. The
padding lies where a slower device would still compute, before the optimizer's step and outside all locks; what the
exchange takes from the trainer comes on top of it and stays visible.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.node.data.stream import TokenStream
from stretto.node.data.units import Span
from stretto.node.model import loss_fn
from stretto.node.sync import Merged
from stretto.protocol.config import InnerConfig


def learning_rate(config: InnerConfig, step: float) -> float:
    """The inner learning rate at swarm step ``step``. The very first step has a small one, not 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def make_optimizer(model: torch.nn.Module, config: InnerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as is usual for language models."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


FRESH_STEPS = 20
"""Steps over which the learning rate rises after the inner optimizer began anew in the middle of a run: the second
moments of AdamW are averages over some steps, and until then single gradients decide over whole updates."""


@dataclass(frozen=True)
class StepReport:
    """One inner step: its number, mean cross-entropy, learning rate, tokens, duration, what it merged and read."""

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    merged: tuple[Merged, ...]
    samples: tuple[Span, ...]


class StepSync(Protocol):
    """What the loop needs of ``stretto.node.sync.Sync``: a lock around optimizer steps, and what is due after them."""

    blocked_seconds: float

    @property
    def step(self) -> int:
        """Inner steps done."""

    def acquire_step(self) -> None:
        """Before ``optimizer.step()``."""

    def release_step(self, tokens: int, seconds: float) -> None:
        """After it."""

    def come_back(self) -> list[Merged]:
        """Between two steps: results meet the local weights."""

    def reload_if_asked(self) -> bool:
        """Between two steps: whether the local weights were replaced by the anchors."""


@dataclass
class Trainer:
    """Everything the loop needs. ``micro_batch`` sequences go through the model at once."""

    model: torch.nn.Module
    optimizer: torch.optim.AdamW
    stream: TokenStream
    config: InnerConfig
    sync: StepSync
    sequence_length: int
    micro_batch: int
    device: torch.device
    pace: float = 0.0
    """Least seconds of forward and backward pass together; 0 does not pad."""
    wait: Callable[[float], object] = time.sleep
    """Waits so many seconds, or less when the node is asked to stop."""
    fresh: int = FRESH_STEPS
    """Steps since the optimizer began anew, up to ``FRESH_STEPS``; at the run's own start its schedule warms up."""

    def steps(self, swarm_step: Callable[[], float]) -> Iterator[StepReport]:
        """Train for ever; yields after each inner step. ``swarm_step`` tells the swarm's progress."""
        sequences = self.config.tokens_per_step // self.sequence_length
        self.model.train()
        while True:
            # Between two steps, so that a wait for data is neither in a step's time nor in this machine's rate.
            self.sync.blocked_seconds += self.stream.reserve(sequences)
            began = time.perf_counter()
            lr = learning_rate(self.config, swarm_step()) * min(1.0, (self.fresh + 1) / FRESH_STEPS)
            self.fresh = min(self.fresh + 1, FRESH_STEPS)
            for group in self.optimizer.param_groups:
                group["lr"] = lr

            # Forward and backward. The network thread may copy weights meanwhile: nothing here changes them.
            loss = 0.0
            for first in range(0, sequences, self.micro_batch):
                count = min(self.micro_batch, sequences - first)
                total, cross_entropy = loss_fn(self.model, self._batch(self.stream.next(count)), self.config.z_loss)
                (total * (count / sequences)).backward()
                loss += cross_entropy.item() * count / sequences  # waits for the device
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self._pad(began)

            # The only place where the inner optimizer changes weights.
            self.sync.acquire_step()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            tokens = sequences * self.sequence_length
            self.sync.release_step(tokens, time.perf_counter() - began)
            samples = tuple(self.stream.consumed())

            # Finished rounds come back between two steps. Due fragments leave by themselves, see Sync.leave.
            merged = tuple(self.sync.come_back())
            if self.sync.reload_if_asked():
                self.begin_anew()
            yield StepReport(self.sync.step, loss, lr, tokens, time.perf_counter() - began, merged, samples)

    def begin_anew(self) -> None:
        """Forget the inner optimizer's state, for weights that it does not belong to, and warm up."""
        self.optimizer.state.clear()
        self.fresh = 0

    def rehearse(self, count: int) -> float:
        """Seconds of an inner step, from ``count`` forward and backward passes that change nothing.

        A pace counts as if it had been waited for.
        """
        sequences = self.config.tokens_per_step // self.sequence_length
        self.model.train()
        times = []
        for _ in range(count):
            sizes = [min(self.micro_batch, sequences - first) for first in range(0, sequences, self.micro_batch)]
            batches = (self._batch(self.stream.rehearsal(size)) for size in sizes)
            times.append(time_passes(self.model, batches, self.config.z_loss))
            self.optimizer.zero_grad(set_to_none=True)
        return max(self.pace, float(np.median(times)))

    def _pad(self, began: float) -> None:
        """Wait until the step that ``began`` then has taken as long as the pace wants."""
        left = self.pace - (time.perf_counter() - began)
        if left > 0:
            self.wait(left)

    def _batch(self, windows: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(windows).to(self.device)


def time_passes(model: torch.nn.Module, batches: Iterable[torch.Tensor], z_loss: float) -> float:
    """Seconds of forward and backward passes over ``batches``, each (B, T+1) int64. Their gradients stay, added up."""
    began = time.perf_counter()
    for batch in batches:
        total, _ = loss_fn(model, batch, z_loss)
        total.backward()
    finish(next(model.parameters()).device)
    return time.perf_counter() - began


def finish(device: torch.device) -> None:
    """Wait until ``device`` has done what was asked of it: calls return before that, but for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterator[np.ndarray], device: torch.device) -> float:
    """Mean cross-entropy in nats per token over ``batches``, each (B, T+1) int64."""
    model.eval()
    losses, weights = [], []
    for batch in batches:
        _, cross_entropy = loss_fn(model, torch.from_numpy(batch).to(device), 0.0)
        losses.append(cross_entropy.item())
        weights.append(batch.shape[0])
    model.train()
    return float(np.average(losses, weights=weights)) if losses else float("nan")
