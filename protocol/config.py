"""The run config: everything that all peers of a run must share. Its digest names the run.

A person writes it as TOML, one table per concern; ``RunConfig.from_toml`` reads it, fills in the defaults below and
refuses what cannot work, naming the rule. ``canonical()`` gives the same bytes on every machine, ``digest()`` is their
BLAKE2b hash, the *run id*. Every address that peers use on the network contains it, so peers with different settings
never meet. What may differ between peers (device, ports, limits) is in ``stretto.node.config``.

Names follow the paper (arXiv 2501.18512): H inner steps between two departures of a fragment, P fragments, tau steps
of overlap, alpha the share of the local weights kept at a merge.
"""

import dataclasses
import json
import math
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.protocol import wire
from stretto.protocol.codecs import CODECS
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError
from stretto.protocol.messages import PROTOCOL_VERSION
from stretto.protocol.units import MAX_UNIT_SEQUENCES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATTERNS = ("strided", "sequential")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """``stdlib`` (the running Python's library sources) or ``text:PATH``."""
    tokenizer: str = "bytes"
    """``bytes`` or ``file:PATH`` of a tokenizers JSON file."""
    sequence_length: int = 128
    """Tokens per training sequence."""
    seed: int = 0
    """Seed of the order in which the swarm reads."""
    unit_sequences: int = 512
    """Training sequences in a work unit, the piece of data that one peer takes at a time: more than a fast peer trains
    on in some seconds, since each new one costs a look at the roster. So many at most are read twice after a crash."""
    fingerprint: str = ""
    """Hex digest of the corpus, so that peers with another one are told; empty accepts any."""
    tokenizer_digest: str = ""
    """Hex digest of the tokenizer; empty accepts any."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 1, f"data.sequence_length is {self.sequence_length}, it must be at least 1")
        _require(0 <= self.seed < 2**63, f"data.seed is {self.seed}, it must be in 0..2^63 - 1")
        _require(
            1 <= self.unit_sequences <= MAX_UNIT_SEQUENCES,
            f"data.unit_sequences is {self.unit_sequences}, it must be in 1..{MAX_UNIT_SEQUENCES}",
        )
        _require(bool(self.source), "data.source is empty; write stdlib or text:PATH")


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer, AdamW, and its learning-rate schedule in swarm steps (means over the peers)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm."""
    warmup_steps: int = 100
    total_steps: int = 10_000
    """Length of the run in swarm steps; the cosine ends here, and so does the run."""
    final_lr: float = 0.1
    """Learning rate at the end, as a share of ``lr``."""
    tokens_per_step: int = 4096
    """Tokens that one peer trains on in one inner step: a target that gradient accumulation meets."""
    z_loss: float = 1e-4
    """Weight of the squared log-partition in the loss; 0 switches it off."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"inner.lr is {self.lr}, it must be positive")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"inner.{name} is {getattr(self, name)}, it must be in [0, 1)")
        _require(self.eps > 0, f"inner.eps is {self.eps}, it must be positive")
        _require(self.weight_decay >= 0, f"inner.weight_decay is {self.weight_decay}, it must not be negative")
        _require(self.clip > 0, f"inner.clip is {self.clip}, it must be positive")
        _require(self.z_loss >= 0, f"inner.z_loss is {self.z_loss}, it must not be negative")
        _require(0 <= self.final_lr <= 1, f"inner.final_lr is {self.final_lr}, it must be in [0, 1]")
        _require(self.tokens_per_step >= 1, f"inner.tokens_per_step is {self.tokens_per_step}, it must be at least 1")
        _require(
            0 <= self.warmup_steps < self.total_steps,
            f"inner.warmup_steps is {self.warmup_steps}, it must be at least 0 and less than inner.total_steps "
            f"({self.total_steps})",
        )


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The outer optimizer (Nesterov) and the schedule of the fragments."""

    lr: float = 0.4
    momentum: float = 0.9
    alpha: float = 0.5
    """Share of the local weights kept at a merge: 0 takes the anchor, 1 never synchronizes."""
    inner_steps: int = 100
    """H: swarm-mean inner steps between two departures of one fragment."""
    fragments: int = 0
    """P: number of fragments; 0 means as many as ``fragment_bytes`` asks for."""
    fragment_bytes: int = 0
    """Largest fragment in bytes of FP32 weights, as an alternative to ``fragments``."""
    pattern: Literal["strided", "sequential"] = "strided"
    tau_max: int = 5
    """Largest overlap in inner steps."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"outer.lr is {self.lr}, it must be positive")
        _require(0 <= self.momentum < 1, f"outer.momentum is {self.momentum}, it must be in [0, 1)")
        _require(0 <= self.alpha <= 1, f"outer.alpha is {self.alpha}, it must be in [0, 1]")
        h, p = self.inner_steps, self.fragments
        _require(h >= 1, f"outer.inner_steps (H) is {h}, it must be at least 1")
        _require(
            0 <= self.tau_max < h,
            f"outer.tau_max is {self.tau_max}, it must be at least 0 and less than outer.inner_steps (H = {h}): a "
            "result has to be merged before its fragment leaves again",
        )
        _require(
            (p > 0) != (self.fragment_bytes > 0),
            "write either outer.fragments (how many) or outer.fragment_bytes (how large), one of them positive",
        )
        _require(p >= 0 and self.fragment_bytes >= 0, "outer.fragments and outer.fragment_bytes must not be negative")
        _require(
            p == 0 or h % p == 0,
            f"outer.fragments (P = {p}) does not divide outer.inner_steps (H = {h}): departures must be evenly spaced",
        )
        _require(
            self.pattern in PATTERNS, f"outer.pattern is {self.pattern!r}, it must be one of {', '.join(PATTERNS)}"
        )


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Codecs of the exchange."""

    up: str = "e3m0"
    """Contributions."""
    down: str = "int8"
    """Averages that a reducer returns; groups of up to three exchange contributions only."""
    error_feedback: bool = False
    """Whether a peer adds what the codec lost to its next contribution: for 2 bits and fewer, 4 bytes per weight."""

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            value = getattr(self, name)
            _require(value in CODECS, f"wire.{name} is {value!r}, it must be one of {', '.join(sorted(CODECS))}")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Who averages together."""

    max_size: int = 16
    min_size: int = 1
    """A round with fewer contributions changes nothing; 1 lets a lone peer commit."""
    window: float = 3.0
    """Seconds after a departure in which a coordinator waits for the peers it expects."""
    absence: float = 900.0
    """Seconds after which an elector that nobody has seen is reckoned with no more. Until then half a network cannot
    go on without the other half; after it, the chain with fewer tokens is given up when they meet again."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.min_size <= self.max_size <= 256,
            f"group.min_size ({self.min_size}) and group.max_size ({self.max_size}) must be ordered and within 1..256",
        )
        _require(0 < self.window <= 600, f"group.window is {self.window} s, it must be in (0, 600]")
        _require(
            self.absence > 20 * self.window,
            f"group.absence is {self.absence} s, it must be more than 20 times group.window ({self.window} s): a peer "
            "that is only slow must not be reckoned as gone",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the held-out split."""

    every_rounds: int = 0
    """Evaluate after this many committed rounds; 0 evaluates at the end only."""
    sequences: int = 64

    def __post_init__(self) -> None:
        _require(self.every_rounds >= 0, "eval.every_rounds must not be negative")
        _require(self.sequences >= 1, f"eval.sequences is {self.sequences}, it must be at least 1")


_SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "inner": InnerConfig,
    "outer": OuterConfig,
    "wire": WireConfig,
    "group": GroupConfig,
    "eval": EvalConfig,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. ``model`` is a Hugging Face config: ``model_type`` and its fields."""

    name: str
    model: Mapping[str, Any]
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=lambda: OuterConfig(fragments=4))
    wire: WireConfig = field(default_factory=WireConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _require(
            0 < len(self.name) <= 64 and self.name.isprintable(), f"name is {self.name!r}, write 1 to 64 characters"
        )
        _require(
            isinstance(self.model.get("model_type"), str),
            'model.model_type is missing: write a Hugging Face model type such as "qwen3"',
        )
        _require(0 <= self.seed < 2**63, f"seed is {self.seed}, it must be in 0..2^63 - 1")
        tokens, length = self.inner.tokens_per_step, self.data.sequence_length
        _require(
            tokens % length == 0,
            f"inner.tokens_per_step ({tokens}) must be a multiple of data.sequence_length ({length})",
        )

    def canonical(self) -> bytes:
        """The config and the protocol version as bytes that are the same on every machine."""
        return wire.pack({"protocol": PROTOCOL_VERSION, **self.to_dict()})

    def digest(self) -> bytes:
        """The run id, 32 bytes."""
        return digest("run", [self.canonical()])

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, every field written out."""
        plain: dict[str, Any] = {"name": self.name, "seed": self.seed, "model": _plain(self.model)}
        for section in _SECTIONS:
            plain[section] = dataclasses.asdict(getattr(self, section))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "RunConfig":
        """The inverse of ``to_dict``; missing fields take defaults. ConfigError names whatever is wrong."""
        known = ["name", "seed", "model", *_SECTIONS]
        _refuse_unknown(plain, known, "")
        if "name" not in plain or not isinstance(plain.get("model"), Mapping):
            raise ConfigError("a run config needs a name and a [model] table")
        sections = {name: _section(kind, name, plain[name]) for name, kind in _SECTIONS.items() if name in plain}
        name, seed = _typed(str, "name", plain["name"]), _typed(int, "seed", plain.get("seed", 0))
        return cls(name=name, seed=seed, model=_plain(plain["model"]), **sections)

    @classmethod
    def from_canonical(cls, data: bytes) -> "RunConfig":
        """The inverse of ``canonical``. Raises ConfigError also for another protocol version."""
        plain = wire.unpack(data)
        if not isinstance(plain, dict) or plain.get("protocol") != PROTOCOL_VERSION:
            theirs = plain.get("protocol") if isinstance(plain, dict) else None
            raise ConfigError(
                f"the run speaks protocol version {theirs}, this stretto speaks {PROTOCOL_VERSION}: "
                "install the version that the run's operator uses"
            )
        config = cls.from_dict({key: value for key, value in plain.items() if key != "protocol"})
        if config.canonical() != data:
            raise ConfigError("the run config is not in canonical form")
        return config

    @classmethod
    def from_toml(cls, text: str) -> "RunConfig":
        """A config from the text of a run.toml."""
        try:
            plain = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, deep nesting
            raise ConfigError(f"not valid TOML: {error}") from None
        return cls.from_dict(plain)

    def to_toml(self) -> str:
        """The text of a run.toml with every field."""
        plain = self.to_dict()
        lines = [f"name = {_toml(plain.pop('name'))}", f"seed = {_toml(plain.pop('seed'))}"]
        for section, fields in plain.items():
            lines += ["", f"[{section}]"]
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in fields.items()]
        return "\n".join(lines) + "\n"

    def differences(self, other: "RunConfig") -> list[str]:
        """One line for each key in which ``other`` differs: ``key: mine != theirs``."""
        mine, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        keys = sorted(mine.keys() | theirs.keys())
        absent = "(not set)"
        return [
            f"{key}: {mine.get(key, absent)} != {theirs.get(key, absent)}"
            for key in keys
            if mine.get(key, absent) != theirs.get(key, absent)
        ]


def _section(kind: type, name: str, plain: Any) -> Any:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"[{name}] must be a table")
    hints = typing.get_type_hints(kind)
    _refuse_unknown(plain, list(hints), f"{name}.")
    return kind(**{key: _typed(hints[key], f"{name}.{key}", value) for key, value in plain.items()})


def _typed(kind: type, name: str, value: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        kind = str
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or not _encodable(value):
        words = {
            bool: "true or false",
            int: "a whole number of 64 bits",
            float: "a finite number",
            str: "a text in quotes",
        }
        raise ConfigError(f"{name} is {value!r}, it must be {words[kind]}")
    return value


def _refuse_unknown(plain: Mapping[str, Any], known: list[str], prefix: str) -> None:
    unknown = [key for key in plain if key not in known]
    if unknown:
        names = ", ".join(f"{prefix}{key}" for key in unknown)
        raise ConfigError(f"unknown key {names}; valid are {', '.join(prefix + key for key in known)}")


def _plain(value: Any) -> Any:
    """Dicts, lists and scalars only, so that canonical bytes exist."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, float, str)) and _encodable(value):
        return value
    raise ConfigError(f"a run config cannot hold {value!r}; leave the key out, or write a text, number, list or table")


def _encodable(value: object) -> bool:
    """Whether a scalar has canonical bytes: floats must be finite, whole numbers have 64 bits, texts be Unicode."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's too; only the delete character has none in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
