"""Named experiments: each ablation of the paper in small (arXiv 2501.18512, section 3.3), and a table of them all.

A recipe is a list of cases. Flags of the command change what all cases share (model, tokens, seeds, ...); what makes
the case the case it is stays. The first case is what the others are compared with, seed by seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.node.simulate.config import METHODS, SimConfig
from stretto.protocol.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """One line of a table. ``x`` and ``series`` place it in the recipe's chart, if that has an x axis."""

    label: str
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    series: str = ""
    x: float | None = None


@dataclass(frozen=True)
class Goal:
    """``case`` should lose no more than ``limit`` percent against ``than``; with ``least`` at least so much."""

    case: str
    than: str
    limit: float
    least: bool = False


@dataclass(frozen=True)
class Recipe:
    """An experiment."""

    name: str
    what: str
    cases: Sequence[Case]
    base: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all cases where they differ from the simulator's defaults."""
    x_label: str = ""
    log_x: bool = False
    goals: Sequence[Goal] = ()

    def configs(self, flags: Mapping[str, Any], seed: int) -> list[tuple[Case, SimConfig]]:
        """Each case with its settings: defaults, then base, flags, method, and the case's own."""
        shared = {**self.base, **flags}
        return [
            (case, SimConfig.from_dict({**shared, **METHODS[case.method], **case.knobs, "seed": seed}))
            for case in self.cases
        ]


def sweep(method: str, knob: str, values: Sequence[Any], series: str = "", **knobs: Any) -> list[Case]:
    """One case for each value of a knob."""
    return [
        Case(
            f"{series or method}, {knob} {_short(value)}", method, {**knobs, knob: value}, series or method, _x(value)
        )
        for value in values
    ]


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _x(value: Any) -> float | None:
    last = value[-1] if isinstance(value, tuple) else value
    return float(last) if isinstance(last, (int, float)) else None


SHORT: Mapping[str, Any] = {"inner_steps": 8, "outer_lr": 1.0, "momentum": 0.0}
"""Outer settings for runs of a few thousand steps, chosen with ``tune``: with so few rounds, that much alike, momentum
of 0.9 overshoots at the paper's outer learning rate and lags behind at a smaller one."""

STREAMING = "streaming, M = 2"
RARE = "streaming, M = 2, H = 100"
OVERLAP = "+ tau 5"
SOFTER = "+ tau 5, alpha 0.25"
FP4 = "+ FP4"
_RARE: Mapping[str, Any] = {"inner_steps": 100}

TABLE = Recipe(
    "table",
    "Streaming DiLoCo step by step, against data-parallel training at equal tokens",
    [
        Case("data-parallel", "data-parallel"),
        Case("DiLoCo, M = 2", "diloco"),
        Case(STREAMING, "streaming"),
        Case("streaming, M = 4", "streaming", {"replicas": 4}),
        Case("freezing (FedPart), M = 2", "fedpart"),
        Case("streaming, M = 2, the paper's outer optimizer", "streaming", {"outer_lr": 0.4, "momentum": 0.9}),
        # What a delay costs is a question of tau / H: here H is the paper's.
        Case(RARE, "streaming", _RARE),
        Case(OVERLAP, "overlap", {**_RARE, "tau": (5,)}),
        Case(SOFTER, "overlap", {**_RARE, "tau": (5,), "alpha": 0.25}),
        Case(FP4, "fp4", {**_RARE, "tau": (5,)}),
        Case("+ tau 1 and 5, speeds 1 and 4", "fp4", {**_RARE, "tau": (1, 5), "speeds": (1.0, 4.0)}),
    ],
    base={
        **SHORT,
        "width": 128,
        "lr": 2e-3,
        "inner_steps": 4,
        "batch_tokens": 512,
        "warmup_steps": 500,
        "root_rule": True,
    },
    goals=(
        Goal(STREAMING, "data-parallel", 1.0),
        Goal("streaming, M = 4", "data-parallel", 2.0),
        Goal(OVERLAP, RARE, 0.3),
        Goal(SOFTER, RARE, 0.3),
        Goal(FP4, OVERLAP, 0.3),
        Goal("freezing (FedPart), M = 2", STREAMING, 3.0, least=True),
    ),
)

CODECS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "e3m0": {"codec": "e3m0"},
    "e2m1": {"codec": "e2m1"},
    "top-k 50 %": {"codec": "topk", "keep": 0.5},
    "top-k 10 %": {"codec": "topk", "keep": 0.1},
    "FedDropout 50 %": {"codec": "dropout", "keep": 0.5},
    "DARE 50 %": {"codec": "dare", "keep": 0.5},
}

TUNED = {
    "fp32": 0.7,
    "e3m0": 1.0,
    "e2m1": 0.7,
    "top-k 50 %": 1.0,
    "top-k 10 %": 1.4,
    "FedDropout 50 %": 2.0,
    "DARE 50 %": 1.0,
}
"""The best outer learning rate of each codec in ``fig11`` with seed 100."""

CODEC_RUN: Mapping[str, Any] = {
    **SHORT, "lr": 4.2e-3, "batch_tokens": 512, "warmup_steps": 125, "tokens": 262_144
}  # fmt: skip

OUTER: Sequence[tuple[int, float, Sequence[float]]] = (
    (20, 0.9, (0.1, 0.2, 0.4, 0.7)),
    (20, 0.5, (0.7,)),
    (20, 0.0, (0.8, 1.0, 1.3)),
    (8, 0.9, (0.2, 0.4, 0.7)),
    (8, 0.5, (0.7,)),
    (8, 0.0, (0.8, 1.0, 1.3)),
    (4, 0.0, (1.0,)),
)
"""What is tried of the outer optimizer: H, momentum, learning rates."""

_ALL = (
    TABLE,
    Recipe(
        "tune",
        "learning rates, before anything is compared: inner ones on data-parallel training, outer ones on streaming",
        [
            *sweep("data-parallel", "lr", [1.5e-3, 3e-3, 6e-3]),
            *(
                case
                for steps, momentum, rates in OUTER
                for case in sweep(
                    "streaming",
                    "outer_lr",
                    rates,
                    f"H {steps}, momentum {momentum}",
                    inner_steps=steps,
                    momentum=momentum,
                )
            ),
        ],
        x_label="learning rate",
        log_x=True,
    ),
    Recipe(
        "fig6",
        "fragment size: layers per fragment, with six layers",
        [Case("data-parallel", "data-parallel")]
        + [Case(f"{6 // p} layer(s) a fragment", "streaming", {"fragments": p}, "", 6 / p) for p in (1, 2, 3, 6)],
        base={"layers": 6, "inner_steps": 60},
        x_label="layers per fragment",
    ),
    Recipe(
        "fig7",
        "fragment pattern",
        [
            Case(f"{pattern}, P = {p}", "streaming", {"pattern": pattern, "fragments": p}, pattern, p)
            for pattern in ("strided", "sequential")
            for p in (2, 4)
        ],
        x_label="fragments",
    ),
    Recipe(
        "fig8",
        "overlap tau and the share alpha of local weights that is kept",
        [
            *sweep("overlap", "tau", [(0,), (1,), (2,), (5,), (10,), (20,)], "alpha 0.5", alpha=0.5),
            *sweep("overlap", "tau", [(0,), (1,), (2,), (5,), (10,), (20,)], "alpha 0", alpha=0.0),
        ],
        x_label="tau",
    ),
    Recipe(
        "fig10",
        "two replicas with different overlap: tau_1 = 1, tau_2 as given",
        sweep("overlap", "tau", [(1, 1), (1, 2), (1, 5), (1, 10), (1, 20)], "tau_1 = 1"),
        x_label="tau_2",
    ),
    Recipe(
        "fig11",
        "rounding against leaving values out, each over outer learning rates: compare the best of each",
        [
            case
            for name, knobs in CODECS.items()
            for case in sweep("streaming", "outer_lr", [0.7, 1.0, 1.4, 2.0], name, **knobs)
        ],
        base=CODEC_RUN,
        x_label="outer learning rate",
        log_x=True,
    ),
    Recipe(
        "codecs",
        "the codecs of fig11, each at the outer learning rate that was best for it, and three at that of fp32",
        [
            *(Case(f"{name}, tuned", "streaming", {**CODECS[name], "outer_lr": rate}) for name, rate in TUNED.items()),
            *(
                Case(f"{name}, outer_lr {TUNED['fp32']:g}", "streaming", {**CODECS[name], "outer_lr": TUNED["fp32"]})
                for name in ("e3m0", "top-k 10 %", "FedDropout 50 %")
            ),
        ],
        base=CODEC_RUN,
    ),
    Recipe(
        "fig12",
        "number of replicas at one global batch",
        [Case("data-parallel", "data-parallel"), *sweep("streaming", "replicas", [1, 2, 4, 8])],
        base={"sequence_length": 64},
        x_label="replicas",
        log_x=True,
    ),
    Recipe(
        "fig13",
        "inner steps H between two synchronizations of a fragment",
        [
            *sweep("streaming", "inner_steps", [8, 20, 40, 100, 200]),
            *sweep("diloco", "inner_steps", [8, 20, 40, 100, 200]),
        ],
        x_label="H",
        log_x=True,
    ),
    Recipe(
        "fig17",
        "cosine similarity of the replicas' outer gradients by layer",
        [Case("M = 2", "streaming", {"cosine": True}), Case("M = 4", "streaming", {"cosine": True, "replicas": 4})],
    ),
    Recipe(
        "table3",
        "which weights to evaluate: see the columns anchor, average and replica",
        [Case("streaming", "streaming"), Case("FP4, tau 1", "fp4")],
    ),
    Recipe(
        "freezing",
        "freezing what does not leave next (FedPart)",
        [Case("streaming", "streaming"), Case("FedPart", "fedpart")],
    ),
    Recipe(
        "outer",
        "the outer optimizer: DiLoCo's Nesterov, averaging (FedAvg), local SGD, Adam (FedOpt)",
        [
            Case("data-parallel", "data-parallel"),
            *sweep("diloco", "outer_lr", [0.2, 0.4, 0.8]),
            Case("FedAvg", "fedavg", {}, "fedavg", 1.0),
            Case("local SGD", "local-sgd", {}, "local-sgd", 1.0),
            *sweep("fedopt", "outer_lr", [1e-3, 3e-3, 1e-2]),
        ],
        x_label="outer learning rate",
        log_x=True,
    ),
    Recipe(
        "bits2",
        "two bits with and without error feedback",
        [
            Case("fp32", "overlap"),
            Case("e3m0", "fp4"),
            Case("e1m0", "fp4", {"codec": "e1m0"}),
            Case("e1m0, error feedback", "fp4", {"codec": "e1m0", "error_feedback": True}),
            Case("top-k 10 %", "fp4", {"codec": "topk", "keep": 0.1}),
            Case("top-k 10 %, error feedback", "fp4", {"codec": "topk", "keep": 0.1, "error_feedback": True}),
        ],
    ),
    Recipe(
        "alpha",
        "alpha at tau = 5, constant and on a schedule",
        [
            *sweep("overlap", "alpha", [0.0, 0.25, 0.5, 0.75], "constant", tau=(5,)),
            Case("0.5 to 0", "overlap", {"tau": (5,), "alpha": 0.5, "alpha_end": 0.0}),
            Case("0 to 0.5", "overlap", {"tau": (5,), "alpha": 0.0, "alpha_end": 0.5}),
        ],
        x_label="alpha",
    ),
    Recipe(
        "adaptive",
        "rounds that grow rarer as the learning rate falls",
        sweep("streaming", "growth", [0.0, 1.0, 2.0], inner_steps=20),
        x_label="power",
    ),
    Recipe(
        "faults",
        "slow links, lost messages, a replica that crashes and comes back with nothing",
        [
            Case("no faults", "fp4", {"tau": (2,)}),
            Case("messages take 0.2 to 0.5 steps", "fp4", {"tau": (2,), "delay": 0.2, "jitter": 0.3}),
            Case("10 % of the messages lost", "fp4", {"tau": (2,), "delay": 0.2, "drop": 0.1}),
            Case("replica 1 away for 100 steps", "fp4", {"tau": (2,), "crashes": ((1, 200.5, 300.5),)}),
        ],
        base={"replicas": 4},
    ),
    Recipe(
        "smoke",
        "a minute on two cores: does it all work",
        [Case("data-parallel", "data-parallel"), Case("DiLoCo", "diloco"), Case("FP4, tau 1", "fp4")],
        base={"tokens": 102_400, "inner_steps": 20, "eval_every": 50, "warmup_steps": 10},
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by its name."""


def get_recipe(name: str) -> Recipe:
    """Look a recipe up; ConfigError lists those there are."""
    if name not in RECIPES:
        known = "; ".join(f"{recipe.name} ({recipe.what})" for recipe in RECIPES.values())
        raise ConfigError(f"there is no recipe {name!r}; there are {known}")
    return RECIPES[name]
