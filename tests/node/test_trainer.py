"""The trainer: learning rates, one AdamW step against torch by hand, accumulation, and a rehearsal without traces."""

import itertools
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.node.data.stream import TokenStream
from stretto.node.data.units import Span
from stretto.node.model import build_model
from stretto.node.sync import Sync
from stretto.node.trainer import FRESH_STEPS, StepReport, Trainer, evaluate, learning_rate, make_optimizer
from stretto.protocol.actions import Rules
from stretto.protocol.config import InnerConfig
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.peer import Peer
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo
from stretto.protocol.unitbook import Bookmark
from tests.fakes import toy_config

LENGTH = 8
MODEL = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
INNER = InnerConfig(
    lr=1e-2, tokens_per_step=6 * LENGTH, warmup_steps=4, total_steps=100, weight_decay=0.1, clip=0.5, z_loss=1e-3
)
TOKENS = np.random.default_rng(3).integers(0, 32, size=400).astype(np.uint16)


def make(*, micro_batch: int = 6, inner: InnerConfig = INNER) -> Trainer:
    """A trainer of a tiny model on random tokens."""
    config = toy_config(codec="fp32", fragments=2)
    model = build_model(MODEL, 5)
    fragments = FragmentedModel(model, split_model(model, count=2))
    diloco = StreamingDiLoCo(config, [fragments.gather(index) for index in range(2)])
    rules = Rules(inner_steps=20, fragments=2, min_group=1, max_group=4, window=3.0)
    peer = Peer(
        me=peer_id(0), config=config, diloco=diloco, rules=rules, sign=lambda _: bytes(64), verify=lambda *_: True
    )  # fmt: skip
    return Trainer(
        model=model,
        optimizer=make_optimizer(model, inner),
        stream=TokenStream(TOKENS, LENGTH, 0, unit_sequences=512),
        config=inner,
        sync=Sync(fragments, peer, tau_max=5),
        sequence_length=LENGTH,
        micro_batch=micro_batch,
        device=torch.device("cpu"),
    )


def train(trainer: Trainer, count: int, swarm_step: Callable[[], float] = lambda: 50.0) -> list[StepReport]:
    return list(itertools.islice(trainer.steps(swarm_step), count))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1e-2 / 5),
        (1.5, 1e-2 * 2.5 / 5),
        (3, 1e-2 * 4 / 5),
        (4, 1e-2),
        (4 + 96 / 4, 1e-2 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)),
        (4 + 96 / 2, 1e-2 * 0.55),
        (100, 1e-3),
        (1_000_000, 1e-3),
    ],
)
def test_the_learning_rate_warms_up_and_follows_a_cosine(step: float, expected: float) -> None:
    assert learning_rate(INNER, step) == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_it_begins_at_the_top_and_never_rises() -> None:
    config = InnerConfig(lr=1.0, warmup_steps=0, total_steps=10, final_lr=0.0)
    rates = [learning_rate(config, step) for step in range(12)]
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)
    assert rates[10] == rates[11] == 0.0
    assert rates == sorted(rates, reverse=True)


def test_it_is_the_swarms_progress_that_sets_the_rate() -> None:
    progress = iter([0.0, 10.0, 52.0])
    reports = train(make(), 3, lambda: next(progress))
    assert [report.lr for report in reports] == [learning_rate(INNER, step) for step in (0.0, 10.0, 52.0)]


# ---------------------------------------------------------------------- steps


def test_only_matrices_decay() -> None:
    optimizer = make().optimizer
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() >= 2 for parameter in matrices["params"])
    assert {tuple(parameter.shape) for parameter in vectors["params"]} == {(16,)}
    assert len(vectors["params"]) == 5  # two norms per layer and the last one
    assert matrices["betas"] == (INNER.beta1, INNER.beta2)


def test_two_steps_are_adamw_written_by_hand() -> None:
    trainer = make()
    reference = build_model(MODEL, 5)
    stream = TokenStream(TOKENS, LENGTH, 0, unit_sequences=512)
    first = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    reports = train(trainer, 2)
    lr = learning_rate(INNER, 50.0)
    for number in (1, 2):
        batch = torch.from_numpy(stream.next(6))
        logits = reference(input_ids=batch[:, :-1]).logits
        cross_entropy = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        z = torch.logsumexp(logits, -1).square().mean()
        reference.zero_grad()
        (cross_entropy + INNER.z_loss * z).backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in reference.parameters() if p.grad is not None))
        assert norm > INNER.clip  # so that clipping is seen
        with torch.no_grad():
            for name, p in reference.named_parameters():
                assert p.grad is not None
                gradient = p.grad * (INNER.clip / (norm + 1e-6))
                first[name] = INNER.beta1 * first[name] + (1 - INNER.beta1) * gradient
                second[name] = INNER.beta2 * second[name] + (1 - INNER.beta2) * gradient**2
                mean = first[name] / (1 - INNER.beta1**number)
                spread = (second[name] / (1 - INNER.beta2**number)).sqrt() + INNER.eps
                decay = INNER.weight_decay if p.dim() >= 2 else 0.0
                p.copy_(p * (1 - lr * decay) - lr * mean / spread)
        assert reports[number - 1].loss == pytest.approx(cross_entropy.item(), abs=1e-5)
    found = weights(trainer.model)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_accumulated_small_batches_make_the_same_step_as_one_large(micro_batch: int) -> None:
    # 4 does not divide the 6 sequences of a step: the last small batch weighs less.
    large, small = make(micro_batch=6), make(micro_batch=micro_batch)
    (one,), (other,) = train(large, 1), train(small, 1)
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert small.stream.state() == large.stream.state()
    assert small.stream.state().samples == 6
    assert one.samples == other.samples == (Span(0, 0, 6),)
    for name, expected in weights(large.model).items():
        torch.testing.assert_close(weights(small.model)[name], expected, rtol=1e-4, atol=2e-6)


def test_a_step_reports_what_it_did() -> None:
    trainer = make()
    reports = train(trainer, 3)
    assert [report.step for report in reports] == [1, 2, 3]
    assert {report.tokens for report in reports} == {6 * LENGTH}
    assert all(report.seconds > 0 and report.merged == () for report in reports)
    assert [report.samples for report in reports] == [(Span(0, first, first + 6),) for first in (0, 6, 12)]
    assert reports[0].loss == pytest.approx(math.log(32), abs=0.2)
    assert [state.tokens for state in trainer.sync.peer.diloco.fragments] == [18 * LENGTH] * 2
    assert not trainer.sync.step_lock.locked()


def test_the_model_learns() -> None:
    inner = InnerConfig(lr=1e-2, tokens_per_step=6 * LENGTH, warmup_steps=4, total_steps=100)
    trainer = make(inner=inner)
    trainer.stream = TokenStream(np.tile(np.arange(8, dtype=np.uint16), 50), LENGTH, 0, unit_sequences=512)
    reports = train(trainer, 25)
    assert reports[-1].loss < reports[0].loss - 1.5


def test_a_reload_clears_the_optimizer() -> None:
    trainer = make()
    train(trainer, 2)
    assert trainer.optimizer.state
    start = [state.anchor for state in trainer.sync.peer.diloco.fragments]
    trainer.sync.ask_reload()
    train(trainer, 1)
    assert not trainer.optimizer.state
    for fragment, anchor in enumerate(start):
        assert np.array_equal(trainer.sync.model.gather(fragment), anchor)


def test_an_optimizer_that_begins_anew_warms_up_over_some_steps() -> None:
    trainer = make()
    train(trainer, 1)
    steady = [trainer.optimizer.param_groups[0]["lr"]]
    trainer.begin_anew()
    assert not trainer.optimizer.state
    rates = []
    for _ in range(FRESH_STEPS + 1):
        train(trainer, 1)
        rates.append(trainer.optimizer.param_groups[0]["lr"] / steady[0])
    assert rates == pytest.approx([*((step + 1) / FRESH_STEPS for step in range(FRESH_STEPS)), 1.0])


# ---------------------------------------------------------------------- pace


def test_a_paced_step_waits_outside_all_locks_for_what_is_left() -> None:
    trainer = make()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        assert not trainer.sync.step_lock.locked()
        assert not trainer.sync.outer_lock.locked()
        assert trainer.sync.step == len(waits)  # before the optimizer's step, as a slower device would
        waits.append(seconds)

    trainer.pace, trainer.wait = 100.0, wait
    train(trainer, 2)
    assert len(waits) == 2
    assert all(90.0 < seconds < 100.0 for seconds in waits)


def test_the_pace_is_in_the_rate_and_not_in_the_blocked_time() -> None:
    trainer = make()
    trainer.pace = 0.2
    reports = train(trainer, 3)
    assert all(report.seconds >= 0.2 for report in reports)
    assert trainer.sync.estimate.step_seconds >= 0.2
    assert trainer.sync.blocked_seconds < 0.1
    assert trainer.rehearse(1) >= 0.2


def test_a_stop_ends_the_padding_at_once() -> None:
    trainer = make()
    stop = threading.Event()
    trainer.pace, trainer.wait = 60.0, stop.wait
    threading.Timer(0.1, stop.set).start()
    (report,) = train(trainer, 1)
    assert report.seconds < 30.0


def test_a_slow_step_is_not_padded() -> None:
    trainer = make()
    trainer.pace, trainer.wait = 1e-6, lambda seconds: pytest.fail(f"waits {seconds} s")
    assert len(train(trainer, 2)) == 2


def test_a_step_counts_as_read_only_when_the_weights_have_changed() -> None:
    trainer = make()
    states = []

    def look(*_: object) -> None:
        states.append(trainer.stream.state().samples)

    trainer.optimizer.register_step_pre_hook(look)
    train(trainer, 2)
    assert states == [0, 6]
    assert trainer.stream.state().samples == 12


def test_a_wait_for_data_is_blocked_time_and_not_step_time() -> None:
    trainer = make()
    trainer.stream.reserve = lambda _: 5.0  # type: ignore[method-assign]
    reports = train(trainer, 2)
    assert trainer.sync.blocked_seconds >= 10.0
    assert all(report.seconds < 5.0 for report in reports)


# ---------------------------------------------------------------------- rehearsal and evaluation


def test_a_rehearsal_changes_nothing() -> None:
    trainer, untouched = make(micro_batch=4), make(micro_batch=4)
    seconds = trainer.rehearse(2)
    assert 0 < seconds < 10
    assert trainer.stream.state() == Bookmark()
    assert trainer.sync.step == 0
    assert [state.tokens for state in trainer.sync.peer.diloco.fragments] == [0, 0]
    assert not trainer.optimizer.state
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    (after,), (without,) = train(trainer, 1), train(untouched, 1)
    assert after.loss == without.loss
    found, expected = weights(trainer.model), weights(untouched.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_evaluation_is_the_mean_over_sequences_and_leaves_no_gradient() -> None:
    model = build_model(MODEL, 5)
    stream = TokenStream(TOKENS, LENGTH, 0, unit_sequences=512)
    batches = [stream.next(3), stream.next(1)]
    whole = torch.from_numpy(np.concatenate(batches))
    with torch.no_grad():
        logits = model(input_ids=whole[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten()).item()
    assert evaluate(model, iter(batches), torch.device("cpu")) == pytest.approx(expected, abs=1e-5)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert math.isnan(evaluate(model, iter([]), torch.device("cpu")))
