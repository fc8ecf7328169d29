"""One simulated training run from settings to a result.

Data-parallel training is not simulated peer by peer: the replicas' gradients have equal weights, so their mean is the
gradient of the whole batch, and one model that takes a micro batch for each replica does the same arithmetic.

A result is a dict of plain values, one line of the results file:

    key, label, settings   what ran
    losses                 held-out loss, nats per token, of ``anchor``, ``average`` and ``replica`` at the end
    loss                   the one of them that the settings ask for
    curve                  [step, loss] during the run
    train_loss             mean of the last 20 steps of each replica
    tokens, rounds         seen by the swarm; committed
    bytes_sent             mean of contributions and averages per peer; for an experimental codec, what it would be
    cosine                 [step, cosine] by layer, where asked for
    seconds                of this process's CPU
    diverged               why ``loss`` is null and the other measurements are empty; only in a run that diverged
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from stretto.node.data.corpus import open_corpus
from stretto.node.data.tokenizer import load_tokenizer
from stretto.node.simulate.codecs import EXPERIMENTAL, bits_per_weight
from stretto.node.simulate.config import SimConfig
from stretto.node.simulate.replicas import Diverged, ModelReplica, Workshop, recent_loss
from stretto.node.simulate.swarm import LearningSimulation
from stretto.node.trainer import evaluate
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.outer import Vector

Report = Callable[[float], object]
"""Called with the share of the run that is done."""

SLICES = 40
"""Reports per run."""


class Judge:
    """Evaluates weights on the held-out windows, with a model of its own."""

    def __init__(self, shop: Workshop) -> None:
        self.model, self.fragments = shop.fragmented()
        self.batches, self.device = shop.heldout(), torch.device(shop.config.device)

    def loss(self, weights: Sequence[Vector]) -> float:
        """Mean loss in nats per token; weights by fragment, (n,) float32."""
        for fragment, flat in enumerate(weights):
            self.fragments.scatter(fragment, flat)
        loss = evaluate(self.model, iter(self.batches), self.device)
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss is {loss}")
        return loss


def open_shop(config: SimConfig, cache: Path | None) -> Workshop:
    """The run's data. ``cache`` is a folder for token files."""
    tokenizer = load_tokenizer("bytes")
    return Workshop(config, open_corpus(config.source, tokenizer, cache_dir=cache), tokenizer.vocab_size)


def run(
    config: SimConfig, *, label: str = "", cache: Path | None = None, report: Report = lambda _: None
) -> dict[str, Any]:
    """Train, evaluate, and return the result; see the top of the file."""
    shop = open_shop(config, cache)
    return run_in(shop, label=label, report=report)


def run_in(shop: Workshop, *, label: str = "", report: Report = lambda _: None) -> dict[str, Any]:
    """The same with data that is at hand."""
    began = time.process_time()
    config, judge = shop.config, Judge(shop)
    work = _data_parallel if config.data_parallel else _swarm
    curve: list[tuple[int, float]] = []
    result: dict[str, Any] = {}
    try:
        for step, outcome in work(shop, judge, curve):
            report(step / config.steps)
            result = outcome or result
    except (Diverged, LocalProtocolError) as error:  # the protocol refuses to send weights that are no numbers
        result = {"losses": {}, "train_loss": None, "tokens": 0, "rounds": 0, "bytes_sent": 0, "cosine": {}}
        result["diverged"] = str(error)
    return {
        "key": config.key(),
        "label": label,
        "settings": config.to_dict(),
        "loss": result["losses"].get(config.weights),
        "curve": curve,
        **result,
        "seconds": round(time.process_time() - began, 2),
    }


Work = Iterator[tuple[int, dict[str, Any] | None]]


def _stops(config: SimConfig) -> list[int]:
    """Steps at which a run pauses: to evaluate, or to report."""
    reports = {config.steps * part // SLICES for part in range(1, SLICES + 1)}
    return sorted((reports | set(range(config.eval_steps, config.steps + 1, config.eval_steps))) - {0})


def _evaluates(config: SimConfig, step: int) -> bool:
    return step % config.eval_steps == 0 and step < config.steps


def _data_parallel(shop: Workshop, judge: Judge, curve: list[tuple[int, float]]) -> Work:
    config = shop.config
    replica = ModelReplica(shop, micro_batches=config.replicas)
    fragments = range(config.fragments)
    for stop in _stops(config):
        while replica.steps < stop:
            replica.step()
        if _evaluates(config, stop):
            curve.append((stop, judge.loss([replica.get(p) for p in fragments])))
        yield stop, None
    loss = judge.loss([replica.get(p) for p in fragments])
    curve.append((config.steps, loss))
    yield (
        config.steps,
        {
            "losses": {"anchor": loss, "average": loss, "replica": loss},
            "train_loss": recent_loss([replica]),
            "tokens": config.steps * config.batch_tokens,
            "rounds": config.steps,
            "bytes_sent": _all_reduce_bytes(config, sum(spec.numel for spec in replica.fragments.specs)),
            "cosine": {},
        },
    )


def _all_reduce_bytes(config: SimConfig, weights: int) -> int:
    """What a ring all-reduce of FP32 gradients at every step sends per peer."""
    share = 2 * (config.replicas - 1) / config.replicas
    return round(config.steps * share * 4 * weights)


def _swarm(shop: Workshop, judge: Judge, curve: list[tuple[int, float]]) -> Work:
    config = shop.config
    simulation = LearningSimulation(shop)
    views: dict[str, Callable[[], list[Vector]]] = {
        "anchor": simulation.anchors,
        "average": simulation.average,
        "replica": lambda: [simulation.peers[0].replica.get(p) for p in range(config.fragments)],
    }
    for stop in _stops(config):
        simulation.play(stop + 1e-6)
        if _evaluates(config, stop):
            curve.append((stop, judge.loss(views[config.weights]())))
        yield stop, None
    losses = {name: judge.loss(view()) for name, view in views.items()}
    curve.append((config.steps, losses[config.weights]))
    factor = bits_per_weight(config.codec, config.keep) / 32 if config.codec in EXPERIMENTAL else 1.0
    yield (
        config.steps,
        {
            "losses": losses,
            "train_loss": recent_loss(simulation.replicas),
            "tokens": sum(sim.steps for sim in simulation.peers) * config.batch_tokens // config.replicas,
            "rounds": len(simulation.committed()),
            "bytes_sent": round(factor * simulation.sent / config.replicas),
            "cosine": simulation.cosines.series,
        },
    )
