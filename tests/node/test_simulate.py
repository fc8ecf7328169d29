"""The simulator's methods against plain loops, its codecs, its files and its recipes, with the smallest of models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.node.data.corpus import Corpus
from stretto.node.model import loss_fn
from stretto.node.simulate import jobs
from stretto.node.simulate.codecs import Dropout, TopK, bits_per_weight
from stretto.node.simulate.config import METHODS, SimConfig, method, read_settings
from stretto.node.simulate.cosine import cosine, layer_of, mean_cosine
from stretto.node.simulate.diloco import EPSILON, AdamDiLoCo
from stretto.node.simulate.lab import Lab, LabConfig
from stretto.node.simulate.recipes import RECIPES, Case, Goal, Recipe, get_recipe
from stretto.node.simulate.replicas import ModelReplica, Workshop, due_fragment
from stretto.node.simulate.report import Mean, charts, check, markdown, percent_above
from stretto.node.simulate.results import Results
from stretto.node.simulate.run import run_in
from stretto.node.simulate.swarm import LearningSimulation
from stretto.node.trainer import learning_rate, make_optimizer
from stretto.protocol import outer
from stretto.protocol.errors import ConfigError
from tests.fakes import toy_config

torch.set_num_threads(1)

KNOBS: dict[str, Any] = {
    "tokens": 64 * 24, "batch_tokens": 64, "sequence_length": 16, "layers": 2, "width": 32, "fragments": 2,
    "inner_steps": 4, "warmup_steps": 3, "eval_sequences": 4,
}  # fmt: skip


def small(name: str, **knobs: Any) -> SimConfig:
    own = METHODS[name]
    return method(name, **{**{key: value for key, value in KNOBS.items() if key not in own}, **knobs})


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    text = np.frombuffer(Path(__file__).read_bytes() * 3, dtype=np.uint8).astype(np.uint16)
    return Corpus(source="test", documents=1, fingerprint=b"", train=text[:-4000], heldout=text[-4000:])


def shop_of(config: SimConfig, corpus: Corpus) -> Workshop:
    return Workshop(config, corpus, 272)


def weights_of(replica: ModelReplica) -> list[np.ndarray]:
    return [replica.get(p) for p in range(len(replica.fragments.specs))]


# ---------------------------------------------------------------------- methods against plain loops


def test_the_root_rule_is_for_replicas_that_share_a_batch(corpus: Corpus) -> None:
    four = small("streaming", replicas=4, root_rule=True, lr=1e-3)
    assert four.inner_config().lr == 2e-3
    assert learning_rate(four.inner_config(), 3) == pytest.approx(2e-3)
    assert small("streaming", replicas=4, lr=1e-3).inner_config().lr == 1e-3
    assert small("data-parallel", replicas=4, root_rule=True, lr=1e-3).inner_config().lr == 1e-3
    assert ModelReplica(shop_of(four, corpus)).optimizer.param_groups[0]["lr"] == 2e-3


def test_data_parallel_with_one_replica_is_plain_adamw_bit_for_bit(corpus: Corpus) -> None:
    config = small("data-parallel", replicas=1)
    replica = ModelReplica(shop_of(config, corpus))
    for _ in range(5):
        replica.step()
    shop, inner = shop_of(config, corpus), config.inner_config()
    model, fragments = shop.fragmented()
    optimizer = make_optimizer(model, inner)
    for step in range(5):
        total, _ = loss_fn(model, shop.batch(4), inner.z_loss)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, step)
        optimizer.step()
        optimizer.zero_grad()
    assert all(np.array_equal(mine, fragments.gather(p)) for p, mine in enumerate(weights_of(replica)))


def test_data_parallel_gradients_are_those_of_the_whole_batch(corpus: Corpus) -> None:
    # with SGD, whose step is the gradient itself: Adam's first one is its sign, and rounding may turn that over
    two = ModelReplica(shop_of(small("data-parallel", replicas=2, inner="sgd", lr=0.1), corpus), micro_batches=2)
    one = ModelReplica(shop_of(small("data-parallel", replicas=1, inner="sgd", lr=0.1), corpus))
    before = weights_of(one)
    assert two.step() == one.step() == 64
    for a, b, start in zip(weights_of(two), weights_of(one), before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert np.abs(a - start).max() > 1e-4


def lockstep(config: SimConfig, corpus: Corpus, rounds: int) -> list[np.ndarray]:
    """DiLoCo as Algorithm 1 has it: H steps of each replica, one outer step on the mean, all start from there."""
    shop = shop_of(config, corpus)
    replicas = [ModelReplica(shop) for _ in range(config.replicas)]
    anchors = weights_of(replicas[0])
    momenta = [np.zeros_like(anchor) for anchor in anchors]
    for _ in range(rounds):
        for _ in range(config.inner_steps):
            for replica in replicas:
                replica.step()
        for p, anchor in enumerate(anchors):
            mean = np.zeros_like(anchor)
            for replica in replicas:
                mean += np.float32(1 / len(replicas)) * (anchor - replica.get(p))
            anchors[p], momenta[p] = outer.nesterov(
                anchor, momenta[p], mean, lr=config.outer_lr, momentum_factor=config.momentum
            )
            for replica in replicas:
                replica.set(p, anchors[p])
    return anchors


def test_diloco_is_algorithm_1_bit_for_bit(corpus: Corpus) -> None:
    config = small("diloco")
    simulation = LearningSimulation(shop_of(config, corpus))
    simulation.play(3 * config.inner_steps + 1e-6)
    expected = lockstep(config, corpus, 3)
    assert len(simulation.committed()) == 3
    assert np.array_equal(simulation.anchors()[0], expected[0])
    assert np.array_equal(simulation.average()[0], expected[0])
    assert expected[0].any()


def test_diloco_is_streaming_with_one_fragment() -> None:
    assert small("diloco") == small("streaming", fragments=1)


def test_fedavg_averages_the_weights(corpus: Corpus) -> None:
    config = small("fedavg")
    shop = shop_of(config, corpus)
    replicas = [ModelReplica(shop) for _ in range(2)]
    for _ in range(config.inner_steps):
        for replica in replicas:
            replica.step()
    expected = (replicas[0].get(0) + replicas[1].get(0)) / 2
    simulation = LearningSimulation(shop_of(config, corpus))
    simulation.play(config.inner_steps + 1e-6)
    np.testing.assert_allclose(simulation.anchors()[0], expected, rtol=1e-5, atol=1e-7)
    assert np.abs(replicas[0].get(0) - replicas[1].get(0)).max() > 1e-4


def test_freezing_trains_the_fragment_that_leaves_next_and_nothing_else(corpus: Corpus) -> None:
    config = small("fedpart")
    replica = LearningSimulation(shop_of(config, corpus)).replicas[0]
    before = weights_of(replica)
    replica.step()
    after = weights_of(replica)
    chosen = due_fragment(config, 0.0)
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [p != chosen for p in range(2)]


def test_frozen_fragments_take_turns_in_the_order_of_the_rounds() -> None:
    config = small("fedpart")  # H = 4, P = 2: round r leaves at 4 + 2 r
    assert [due_fragment(config, step) for step in range(10)] == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]


def test_replicas_of_other_speed_see_the_same_tokens_in_all(corpus: Corpus) -> None:
    config = small("fp4", tau=(1, 2), speeds=(1.0, 4.0))
    assert config.step_times == [2.5, 0.625]
    result = run_in(shop_of(config, corpus))
    assert result["tokens"] == pytest.approx(config.tokens, abs=64)
    simulation = LearningSimulation(shop_of(config, corpus))
    simulation.play(20)
    assert [sim.steps for sim in simulation.peers] == [8, 32]
    assert [set(sim.overlaps) for sim in simulation.peers] == [{1}, {2}]


def test_the_result_depends_on_the_seed_and_on_nothing_else(corpus: Corpus) -> None:
    config = small("fp4", cosine=True)
    first, second = (run_in(shop_of(config, corpus)) for _ in range(2))
    other = run_in(shop_of(replace(config, seed=1), corpus))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["losses"] != other["losses"]
    assert {"layer 0", "layer 1", "embedding", "other"} == set(first["cosine"])
    assert all(-1 <= value <= 1 for points in first["cosine"].values() for _, value in points)
    assert json.loads(json.dumps(first, allow_nan=False))["key"] == config.key()


def test_training_learns_and_is_told_on_the_way(corpus: Corpus) -> None:
    config, shares = small("fp4", tokens=64 * 60), list[float]()
    result = run_in(shop_of(config, corpus), report=shares.append)
    assert result["loss"] < result["curve"][0][1] < 6
    assert [step for step, _ in result["curve"]] == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert result["rounds"] == 29  # from step 4 on, every second one
    assert set(result["losses"]) == {"anchor", "average", "replica"}


def test_settings_that_diverge_are_a_result_of_their_own(corpus: Corpus) -> None:
    result = run_in(shop_of(small("local-sgd", lr=1e30), corpus))
    assert result["loss"] is None
    assert "diverged" in result
    json.dumps(result, allow_nan=False)


def test_a_replica_that_crashes_comes_back(corpus: Corpus) -> None:
    config = small("fp4", replicas=4, crashes=((1, 9.5, 15.5),), delay=0.05)
    simulation = LearningSimulation(shop_of(config, corpus))
    simulation.play(12)
    assert [sim.alive for sim in simulation.peers] == [True, False, True, True]
    simulation.play(24)
    assert all(sim.alive and not sim.joining for sim in simulation.peers)
    assert len({tuple(tip.head for tip in sim.peer.tips()) for sim in simulation.peers}) == 1


def test_rounds_grow_rarer_as_the_learning_rate_falls(corpus: Corpus) -> None:
    runs = [LearningSimulation(shop_of(small("streaming", growth=growth), corpus)) for growth in (0.0, 2.0)]
    for simulation in runs:
        simulation.play(24)
    fixed, growing = (len(simulation.committed()) for simulation in runs)
    assert fixed == 11
    assert 3 < growing < fixed


def test_alpha_goes_where_it_should(corpus: Corpus) -> None:
    config = small("streaming", alpha=0.0, alpha_end=1.0)
    simulation = LearningSimulation(shop_of(config, corpus))
    simulation.play(0.5)
    first = simulation.peers[0]
    local, anchor = first.replica.get(0), np.zeros_like(first.replica.get(0))
    for now, share in ((0.0, 0.0), (6.0, 0.25), (24.0, 1.0)):
        first.replica.set(0, local)
        first.peer.diloco.fragments[0].merge_with = anchor
        simulation.now = now
        simulation._merge(first, 0)
        np.testing.assert_allclose(first.replica.get(0), share * local, rtol=1e-6)


# ---------------------------------------------------------------------- outer optimizer


def test_adam_as_outer_optimizer_follows_its_formula_and_may_be_asked_twice() -> None:
    run = toy_config(fragments=1, lr=0.1)
    start, gradient = np.full(3, 2.0, np.float32), np.array([1.0, -2.0, 0.0], np.float32)
    diloco = AdamDiLoCo(run, [start], small("fedopt"))
    reduced = [diloco.outer_step(0, gradient.copy()) for _ in range(2)]
    assert reduced[0].digest == reduced[1].digest
    second = 0.99 * EPSILON**2 + 0.01 * gradient**2
    expected = start - 0.1 * 0.1 * gradient / (np.sqrt(second) + EPSILON)
    np.testing.assert_allclose(reduced[0].anchor, expected, rtol=1e-5)
    assert np.array_equal(diloco.fragments[0].anchor, start)


# ---------------------------------------------------------------------- codecs


VALUES = np.random.default_rng(0).normal(size=1000).astype(np.float32)


@pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 1.0])
def test_top_k_keeps_the_largest(keep: float) -> None:
    codec = TopK(keep)
    decoded = codec.decode(codec.encode(VALUES), 1000)
    kept = np.flatnonzero(decoded)
    assert len(kept) == round(1000 * keep)
    assert np.array_equal(decoded[kept], VALUES[kept])
    assert np.abs(np.delete(VALUES, kept)).max(initial=0.0) <= np.abs(VALUES[kept]).min()


def test_dropout_shortens_and_dare_does_not() -> None:
    x = np.ones(200_000, np.float32)
    means = [
        float(codec.decode(codec.encode(x), x.size).mean())
        for codec in (Dropout(0.3, rescaled=False), Dropout(0.3, rescaled=True))
    ]
    assert means[0] == pytest.approx(0.3, abs=0.005)
    assert means[1] == pytest.approx(1.0, abs=0.017)


def test_what_is_dropped_is_the_same_for_the_same_vector_only() -> None:
    codec = Dropout(0.5, rescaled=True)
    assert codec.encode(VALUES) == codec.encode(VALUES.copy())
    assert not np.array_equal(codec.mask(VALUES), codec.mask(VALUES + 1))


@pytest.mark.parametrize("codec", [TopK(0.1), Dropout(0.5, rescaled=False)], ids=["topk", "dropout"])
def test_a_codec_that_leaves_out_never_adds(codec: TopK | Dropout) -> None:
    decoded = codec.decode(codec.encode(VALUES), 1000)
    assert np.linalg.norm(decoded) <= np.linalg.norm(VALUES)
    assert np.linalg.norm(VALUES - decoded) <= np.linalg.norm(VALUES)


def test_bits_on_the_wire() -> None:
    assert bits_per_weight("fp32", 0.1) == 32
    assert bits_per_weight("e3m0", 0.1) == pytest.approx(4.03, abs=0.01)
    assert bits_per_weight("topk", 0.1) == pytest.approx(3.2)
    assert bits_per_weight("dare", 0.5) == 8


# ---------------------------------------------------------------------- settings and recipes


def test_settings_survive_json_and_name_the_run() -> None:
    config = method("fp4", tau=(1, 5), crashes=((1, 2.0, 3.0),))
    again = SimConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.key() == config.key()
    assert replace(config, seed=1).key() != config.key()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"replicas": 3}, "multiple of 384"),
        ({"codec": "mp3"}, "choose one of"),
        ({"model": "huge"}, "choose one of small"),
        ({"width": 40}, "multiple of 32"),
        ({"tau": ()}, "at least 0"),
        ({"tau": (40,)}, "tau_max"),
        ({"speeds": (0.0,)}, "positive"),
        ({"outer": "lion"}, "nesterov, adam"),
        ({"crashes": ((2, 1.0, 2.0),)}, "replica's number"),
        ({"alpha_end": 2.0}, "0 to 1"),
        ({"tokens": 1}, "at least one batch"),
        ({"fragments": 3}, "does not divide"),
        ({"colour": 1}, "unknown setting colour"),
        ({"tokens": 1e6}, "type int"),
        ({"codec": 4}, "type str"),
    ],
)
def test_settings_that_cannot_work_are_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method("fp4", **knobs)


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("tau = [1, 5]\nlr = 0.001\n")
    assert read_settings(file) == {"tau": (1, 5), "lr": 0.001}
    file.write_text("tau = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_settings(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.toml")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_lawful_cases_with_names_of_their_own(name: str) -> None:
    recipe = get_recipe(name)
    found = recipe.configs({}, 3)
    assert {config.seed for _, config in found} == {3}
    assert len({case.label for case in recipe.cases}) == len(found) >= 2
    assert len({config.key() for _, config in found}) == len(found)
    assert len({config.tokens for _, config in found}) == 1
    labels = {case.label for case in recipe.cases}
    assert all({goal.case, goal.than} <= labels for goal in recipe.goals)
    assert not recipe.x_label or any(case.x is not None for case in recipe.cases)
    assert all(case.x is None or case.x > 0 for case in recipe.cases if recipe.log_x)


def test_an_unknown_recipe_or_method_is_refused_with_a_list() -> None:
    with pytest.raises(ConfigError, match="fig8"):
        get_recipe("fig99")
    with pytest.raises(ConfigError, match="fedpart"):
        method("fedfoo")


def test_flags_change_what_cases_share_and_not_what_makes_them() -> None:
    found = get_recipe("fig12").configs({"tokens": 102_400, "replicas": 2}, 0)
    assert [config.replicas for _, config in found] == [2, 1, 2, 4, 8]
    assert {config.tokens for _, config in found} == {102_400}


# ---------------------------------------------------------------------- numbers, tables, files


def result(label: str, seed: int, loss: float | None) -> dict[str, Any]:
    losses = {} if loss is None else {"anchor": loss, "average": loss, "replica": loss}
    return {"label": label, "settings": {"seed": seed}, "loss": loss, "losses": losses, "bytes_sent": 2_000_000,
            "curve": [(1, 3.0), (2, loss)], "cosine": {}}  # fmt: skip


RUNS = {
    "base": {0: result("base", 0, 2.0), 1: result("base", 1, 4.0)},
    "case": {0: result("case", 0, 2.02), 1: result("case", 1, 4.12)},
    "bad": {0: result("bad", 0, None)},
}


def test_means_and_standard_errors() -> None:
    mean = Mean.of([1.0, 2.0, 3.0])
    assert mean.value == 2.0
    assert mean.error == pytest.approx((1 / 3) ** 0.5)
    assert mean.text(2) == "2.00 ± 0.58"
    assert Mean.of([1.0]).text(1) == "1.0"


def test_cases_are_compared_seed_by_seed() -> None:
    above = percent_above(RUNS, "case", "base")
    assert above is not None
    assert above.value == pytest.approx(2.0)  # 1 % and 3 %; the ratio of the means would be 2.33 %
    assert above.error == pytest.approx(1.0)
    assert percent_above(RUNS, "bad", "base") is None


@pytest.mark.parametrize(("limit", "least", "met"), [(2.1, False, True), (1.9, False, False), (1.9, True, True)])
def test_goals_are_met_or_missed(limit: float, least: bool, met: bool) -> None:
    found = check(Goal("case", "base", limit, least), RUNS)
    assert found is not None
    assert found["met"] is met
    diverged = check(Goal("bad", "base", 1.0), RUNS)
    assert diverged is not None
    assert diverged["met"] is False
    assert check(Goal("absent", "base", 1.0), RUNS) is None


def test_the_page_shows_every_case_and_the_charts_those_that_trained() -> None:
    cases = [
        Case("base", "fp4", {}, "s", 1.0),
        Case("case", "fp4", {}, "s", 2.0),
        Case("bad", "fp4"),
        Case("absent", "fp4"),
    ]
    recipe = Recipe("r", "what", cases, x_label="x", goals=(Goal("case", "base", 3.0),))
    page = markdown(recipe, RUNS, "stretto simulate")
    assert "| case | 2 | 3.0700 ± 1.0500 | 2.00 ± 1.00 | 3.0700 | 3.0700 | 3.0700 | 2 |" in page
    assert "| bad | 1 | diverged |" in page
    assert "absent" not in page
    assert "met: 'case' at most 3.0 % above 'base': +2.00 ± 1.00 %" in page
    curves, over_x = charts(recipe, RUNS)
    assert [series.name for series in curves.series] == ["base", "case"]
    assert list(over_x.series[0].xs) == [1.0, 2.0]
    assert over_x.series[0].low is not None


def test_results_are_kept_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out" / "results.jsonl"
    results = Results(path)
    results.add({"key": "a", "loss": 1.0})
    results.add({"key": "b", "loss": None})
    with path.open("a") as file:
        file.write('{"key": "c", "lo')
    again = Results(path)
    assert again.by_key == {"a": {"key": "a", "loss": 1.0}, "b": {"key": "b", "loss": None}}
    again.add({"key": "c", "loss": 3.0})
    assert set(Results(path).by_key) == {"a", "b", "c"}
    path.write_text("no result\n")
    with pytest.raises(ConfigError, match="line 1"):
        Results(path)


def test_cosines() -> None:
    a, b = np.array([1.0, 0.0], np.float32), np.array([1.0, 1.0], np.float32)
    assert cosine(a, b) == pytest.approx(0.5**0.5)
    assert cosine(a, np.zeros(2, np.float32)) == 0.0
    assert mean_cosine([a, -a, b]) == pytest.approx(-1 / 3)
    assert layer_of("model.layers.11.mlp.up_proj.weight") == "layer 11"
    assert layer_of("model.embed_tokens.weight") == "embedding"
    assert layer_of("model.norm.weight") == "other"


# ---------------------------------------------------------------------- the whole command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(Path(__file__).read_text() * 2)
    return file


def test_a_command_does_its_runs_in_processes_and_goes_on_where_it_was(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**KNOBS, "source": f"text:{text}", "tokens": 64 * 8}
    asked = LabConfig(methods=("data-parallel", "fp4"), settings=settings, jobs=2, out=tmp_path / "out")
    said: list[str] = []
    Lab(asked).work(said.append)
    lab = Lab(asked)
    assert lab.missing() == []
    assert set(lab.finished()) == {"data-parallel", "fp4"}
    assert "fp4" in (tmp_path / "out" / "table.md").read_text()
    assert sum("of CPU" in line for line in said) == 2

    # one more seed: only that is done; and a run that fails is told with its reason
    more = Lab(replace(asked, seeds=2))
    assert [(task.label, task.config.seed) for task in more.missing()] == [("data-parallel", 1), ("fp4", 1)]
    gone = [jobs.Task("gone", replace(task.config, source="text:/nowhere")) for task in more.missing()]
    with pytest.raises(Exception, match=r"the run gone, seed 1 failed: .*nowhere"):
        list(jobs.run_all(gone, jobs=1, threads=1, folder=tmp_path / "out", say=said.append))
