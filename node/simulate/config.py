"""What one simulated training run is: every knob, with its default and its rules.

A *method* is a set of values for these knobs, see ``METHODS``; flags and recipes change single ones after that. The
names are those of ``protocol.config``. All methods share model, data, inner optimizer and its schedule, and all see
``tokens`` tokens: the swarm's batch is ``batch_tokens`` per swarm step whatever the number of replicas, so that with
M replicas each step of a replica takes batch_tokens / M of them (the paper's "constant global batch size", Table 6).

    method          what it is                                                                source
    data-parallel   one model, the mean gradient of the whole batch at every step
    diloco          P = 1, all weights at once, tau = 0, alpha = 0                            2501.18512, Algorithm 1
    streaming       P fragments one after the other, tau = 0, alpha = 0                       Algorithm 2
    overlap         streaming with tau = 1 and alpha = 0.5                                    section 2.2
    fp4             overlap with E3M0 on the wire: what a node does                           section 2.3
    fedavg          diloco with outer lr 1 and no momentum: the weights are averaged          1602.05629
    local-sgd       fedavg whose inner optimizer is plain SGD                                 1805.09767
    fedopt          diloco with Adam as outer optimizer                                       2003.00295
    fedpart         streaming that trains only the fragment which leaves next                 section 3.3.1
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stretto.node.model import PRESETS
from stretto.node.presets import model_table
from stretto.node.simulate.codecs import EXPERIMENTAL
from stretto.protocol.codecs import CODECS
from stretto.protocol.config import DataConfig, GroupConfig, InnerConfig, OuterConfig, RunConfig, WireConfig
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Outer = Literal["nesterov", "adam"]
Inner = Literal["adamw", "sgd"]
Weights = Literal["anchor", "average", "replica"]

HEAD = 32
"""Width of an attention head of the models that are built by layers and width."""


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """One run. Steps are swarm steps (means over the replicas) unless they say otherwise."""

    data_parallel: bool = False
    """Average gradients at each step instead of weights now and then; what concerns rounds is then without effect."""
    replicas: int = 2
    """M."""
    tokens: int = 1_024_000
    """Seen by the swarm in all."""
    batch_tokens: int = 1024
    """Seen by the swarm in one step, in whole sequences for each replica."""
    seed: int = 0
    """Of initial weights, data order and everything else that is drawn."""

    model: str = "small"
    """A preset of ``stretto new``, or ``small``: Qwen3 with ``layers`` and ``width``."""
    layers: int = 4
    width: int = 64
    """A multiple of the head size, 32."""
    source: str = "stdlib"
    sequence_length: int = 128
    device: str = "cpu"

    inner: Inner = "adamw"
    lr: float = 3e-3
    root_rule: bool = False
    """Give each replica ``lr`` times the root of the number of replicas. Adam divides by the gradient's noise, which
    is that much larger in a batch that is so many times smaller, so replicas would drift that much slower, while the
    mean of their weights has the noise of the whole batch again: the square root rule (Malladi et al. 2022, arXiv
    2205.10287) for a batch that only the mean has seen."""
    warmup_steps: int = 50
    final_lr: float = 0.1
    """At the end, as a share of ``lr``; a cosine leads there."""
    weight_decay: float = 0.1
    z_loss: float = 1e-4

    outer: Outer = "nesterov"
    outer_lr: float = 0.4
    momentum: float = 0.9
    alpha: float = 0.5
    alpha_end: float = -1.0
    """Where alpha goes, in a straight line over the run; -1 keeps it."""
    inner_steps: int = 40
    """H."""
    fragments: int = 4
    """P; the paper's fragments of so many layers are layers / P."""
    pattern: Literal["strided", "sequential"] = "strided"
    tau: tuple[int, ...] = (1,)
    """In each replica's own steps; the last one holds for all further replicas."""
    speeds: tuple[float, ...] = (1.0,)
    """Of the replicas, relative to one another; the last one holds for all further replicas. Scaled to mean 1."""
    growth: float = 0.0
    """Let rounds grow rarer as the learning rate falls: H times (peak lr / lr) to this power, at most 8 times. 0 keeps
    H; 2 is the quadratic synchronization rule (Gu et al. 2023, arXiv 2310.14423)."""
    frozen: bool = False
    """Train only the fragment that leaves next (FedPart)."""

    codec: str = "e3m0"
    """Of contributions: one of the wire's, or an experiment: ``topk``, ``dropout``, ``dare``."""
    keep: float = 0.1
    """Share of the values that an experimental codec keeps."""
    down: str = ""
    """Of averages in groups above three; empty takes int8, fp32 where contributions are fp32."""
    error_feedback: bool = False

    delay: float = 0.0
    """Of each message, in steps; up to ``jitter`` more."""
    jitter: float = 0.0
    drop: float = 0.0
    """Probability that a message or transfer is lost."""
    crashes: tuple[tuple[int, float, float], ...] = ()
    """(replica, step at which it crashes, step at which it starts again with nothing)."""

    weights: Weights = "anchor"
    """What is evaluated: the anchors (the outer parameters), the replicas' average, or the first replica."""
    eval_every: int = 0
    """Steps between two evaluations; 0 takes an eighth of the run."""
    eval_sequences: int = 256
    cosine: bool = False
    """Record the cosine similarity of the replicas' outer gradients by layer."""

    def __post_init__(self) -> None:
        self._check_numbers()
        _require(self.model == "small" or self.model in PRESETS, f"there is no model {self.model!r}", _models())
        _require(
            self.width > 0 and self.width % HEAD == 0, f"width is {self.width}", f"write a positive multiple of {HEAD}"
        )
        _require(
            self.codec in CODECS or self.codec in EXPERIMENTAL,
            f"there is no codec {self.codec!r}",
            f"choose one of {', '.join(sorted([*CODECS, *EXPERIMENTAL]))}",
        )
        for name, kind in (("outer", Outer), ("inner", Inner), ("weights", Weights)):
            value = getattr(self, name)
            _require(value in get_args(kind), f"{name} is {value!r}", f"choose one of {', '.join(get_args(kind))}")
        unit = self.replicas * self.sequence_length
        _require(
            self.batch_tokens % unit == 0,
            f"batch_tokens is {self.batch_tokens}",
            f"write a multiple of {unit}, one sequence for each replica",
        )
        _require(
            all(0 <= who < self.replicas and 0 < down < up for who, down, up in self.crashes),
            f"crashes are {self.crashes}",
            "write the replica's number and two ascending steps",
        )
        _require(
            not self.data_parallel or not (self.crashes or self.frozen),
            "data-parallel training has no rounds to crash in and no fragments to freeze",
            "leave crashes and frozen out",
        )
        self.run_config()  # whatever the product checks

    def _check_numbers(self) -> None:
        _require(self.replicas >= 1, f"replicas is {self.replicas}", "write at least 1")
        _require(self.tokens >= self.batch_tokens > 0, f"tokens is {self.tokens}", "write at least one batch's")
        _require(bool(self.tau) and min(self.tau) >= 0, f"tau is {self.tau}", "write steps, at least 0")
        _require(bool(self.speeds) and min(self.speeds) > 0, f"speeds are {self.speeds}", "write positive numbers")
        _require(0 < self.keep <= 1, f"keep is {self.keep}", "write a share in (0, 1]")
        _require(self.growth >= 0, f"growth is {self.growth}", "write a power of at least 0")
        _require(self.delay >= 0 and self.jitter >= 0, "delay and jitter are durations", "write at least 0")
        _require(0 <= self.drop < 1, f"drop is {self.drop}", "write a probability below 1")
        _require(self.eval_every >= 0, f"eval_every is {self.eval_every}", "write at least 0")
        _require(self.eval_sequences >= 1, f"eval_sequences is {self.eval_sequences}", "write at least 1")
        _require(
            self.alpha_end == -1.0 or 0 <= self.alpha_end <= 1, f"alpha_end is {self.alpha_end}", "write 0 to 1, or -1"
        )

    @property
    def steps(self) -> int:
        """Swarm steps of the run."""
        return self.tokens // self.batch_tokens

    @property
    def eval_steps(self) -> int:
        """Steps between two evaluations."""
        return self.eval_every or max(1, self.steps // 8)

    @property
    def taus(self) -> list[int]:
        """One for each replica."""
        return [_nth(self.tau, index) for index in range(self.replicas)]

    @property
    def step_times(self) -> list[float]:
        """Duration of a step of each replica; the mean of their inverses is 1."""
        speeds = [_nth(self.speeds, index) for index in range(self.replicas)]
        mean = sum(speeds) / len(speeds)
        return [mean / speed for speed in speeds]

    def model_table(self, vocab_size: int) -> dict[str, object]:
        """The model's Hugging Face configuration."""
        if self.model != "small":
            return model_table(self.model, vocab_size)
        return {
            **model_table("tiny", vocab_size),
            "hidden_size": self.width,
            "intermediate_size": round(8 * self.width / 3 / 64) * 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // HEAD,
            "num_key_value_heads": self.width // HEAD,
            "head_dim": HEAD,
        }

    def inner_config(self) -> InnerConfig:
        """The inner optimizer and its schedule."""
        root = math.sqrt(self.replicas) if self.root_rule and not self.data_parallel else 1.0
        return InnerConfig(
            lr=self.lr * root,
            warmup_steps=self.warmup_steps,
            total_steps=self.steps,
            final_lr=self.final_lr,
            weight_decay=self.weight_decay,
            tokens_per_step=self.batch_tokens // self.replicas,
            z_loss=self.z_loss,
        )

    def run_config(self, vocab_size: int = 272) -> RunConfig:
        """What the product's peers share. An experimental codec travels as FP32."""
        up = self.codec if self.codec in CODECS else "fp32"
        return RunConfig(
            name="simulate",
            seed=self.seed,
            model=self.model_table(vocab_size),
            data=DataConfig(source=self.source, sequence_length=self.sequence_length, seed=self.seed),
            inner=self.inner_config(),
            outer=OuterConfig(
                lr=self.outer_lr,
                momentum=self.momentum,
                alpha=self.alpha,
                inner_steps=self.inner_steps,
                fragments=self.fragments,
                pattern=self.pattern,
                tau_max=max(self.tau),
            ),
            wire=WireConfig(
                up=up, down=self.down or ("fp32" if up == "fp32" else "int8"), error_feedback=self.error_feedback
            ),
            group=GroupConfig(min_size=1),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the results file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "SimConfig":
        """The inverse of ``to_dict``, also from JSON or TOML. ConfigError names an unknown knob."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        unknown = sorted(set(plain) - set(defaults))
        _require(not unknown, f"unknown setting {', '.join(unknown)}", f"valid are {', '.join(sorted(defaults))}")
        values = {key: _typed(key, _tuples(value), defaults[key]) for key, value in plain.items()}
        try:
            return cls(**values)
        except TypeError as error:  # of what is inside a tuple
            raise ConfigError(f"simulate: a setting has the wrong type: {error}") from None

    def key(self) -> str:
        """Names the run in the results file: equal settings, equal key."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return digest("simulated run", [text.encode()]).hex()[:16]


METHODS: dict[str, dict[str, Any]] = {
    "data-parallel": {"data_parallel": True, "codec": "fp32"},
    "diloco": {"fragments": 1, "tau": (0,), "alpha": 0.0, "codec": "fp32"},
    "streaming": {"tau": (0,), "alpha": 0.0, "codec": "fp32"},
    "overlap": {"codec": "fp32"},
    "fp4": {},
    "fedavg": {"fragments": 1, "tau": (0,), "alpha": 0.0, "codec": "fp32", "outer_lr": 1.0, "momentum": 0.0},
    "local-sgd": {
        "fragments": 1,
        "tau": (0,),
        "alpha": 0.0,
        "codec": "fp32",
        "outer_lr": 1.0,
        "momentum": 0.0,
        "inner": "sgd",
        "lr": 0.3,
        "weight_decay": 0.0,
    },
    "fedopt": {"fragments": 1, "tau": (0,), "alpha": 0.0, "codec": "fp32", "outer": "adam", "outer_lr": 3e-3},
    "fedpart": {"tau": (0,), "alpha": 0.0, "codec": "fp32", "frozen": True},
}
"""Where each method differs from the defaults above."""


def method(name: str, **knobs: Any) -> SimConfig:
    """The method's settings, with ``knobs`` on top."""
    _require(name in METHODS, f"there is no method {name!r}", f"choose one of {', '.join(METHODS)}")
    return SimConfig.from_dict({**METHODS[name], **knobs})


def read_settings(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, at its top level; ConfigError if it cannot be read."""
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"simulate: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # also what is not UTF-8
        raise ConfigError(f"simulate: {path} is not valid TOML: {error}") from None
    return {key: _tuples(value) for key, value in plain.items()}


def _require(condition: bool, what: str, cure: str) -> None:
    if not condition:
        raise ConfigError(f"simulate: {what}; {cure}")


def _models() -> str:
    return f"choose one of small, {', '.join(PRESETS)}"


def _nth(values: tuple[Any, ...], index: int) -> Any:
    return values[min(index, len(values) - 1)]


def _typed(name: str, value: Any, default: Any) -> Any:
    """A value of the default's type; a whole number will do for a float."""
    if type(default) is float and type(value) is int:
        return float(value)
    kind = type(default).__name__
    _require(type(value) is type(default), f"{name} is {value!r}", f"write one of type {kind}, such as {default!r}")
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
