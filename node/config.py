"""The node config: what concerns this machine only, and no setting of the run.

``tau`` and ``lockstep``, for experiments, are the only keys that say how this peer takes part.

Three sources, the later ones win: a TOML file, ``STRETTO_*`` environment variables (``STRETTO_MICRO_BATCH=4``), flags
of the command line. An unknown key or variable is an error that lists the valid ones. What peers must share is the
run config (``stretto.protocol.config``).
"""

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from stretto.node.ports import check_announce
from stretto.node.rates import Rate, check_rate, parse_rate
from stretto.node.sizes import parse_size
from stretto.node.swarm.crowd import check_limit
from stretto.protocol.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "STRETTO_"
NOT_KEYS = frozenset({"STRETTO_DEBUG", "STRETTO_INVITE"})
"""Variables with the prefix that belong to the command line itself."""

LEAST_MONTH = 10**6
"""Smallest monthly cap in bytes."""


def default_data_dir() -> Path:
    """Where a node keeps its identity and its state: the same folder from any working directory."""
    return Path(platformdirs.user_data_dir("stretto", appauthor=False))


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One machine's settings."""

    data_dir: Path = field(default_factory=default_data_dir)
    """Identity, caches, metrics and checkpoints live here and nowhere else."""
    identity: Path | None = None
    """Key file; default is identity.key in the data dir."""
    expect: Path | None = None
    """A run.toml that the run must equal; otherwise the node refuses and names each differing key."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``."""
    micro_batch: int = 8
    """Sequences per forward pass; gradients are accumulated up to the run's tokens per step."""
    threads: int = 0
    """CPU threads for arithmetic; 0 leaves torch's default."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 0
    """TCP port to listen on; 0 takes any free one. Forward a fixed one in your router to be reachable."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to announce in place of those that the machine sees, such as /ip4/203.0.113.5/tcp/4001."""
    client_mode: bool = False
    """This peer cannot be reached from outside: it joins rounds but never coordinates one."""
    max_upload: Rate = Rate(0.0)  # noqa: RUF009 - a NewType of float is no mutable default
    """Bytes per second that this node sends at most, on average; 0 for no cap. Texts such as 4Mbit/s are accepted."""
    max_download: Rate = Rate(0.0)  # noqa: RUF009
    """Bytes per second that it receives at most, on average."""
    monthly_cap: str = "0"
    """Bytes per calendar month (UTC), up and down together, such as 100GB; 0 for no cap."""
    max_connections: int = 0
    """Connections to other peers that are kept at most; 0 for no limit."""
    tau: int | None = None
    """Fixed overlap in inner steps; without it a result is merged as soon as it is there."""
    lockstep: int = 0
    """For experiments: train in lockstep with so many peers in all, this one included, each with a fixed ``tau``. Then
    rounds depart at inner step counts, peers wait for each other, and what they compute is bit for bit what the
    simulation computes (docs/lockstep.md). 0 trains as volunteers do."""
    new_run: bool = False
    """Found the run if nobody has: for its operator, once."""
    start_peers: int = 1
    """A founder waits until so many peers are ready, itself included."""
    rounds: int = 0
    """Stop after so many rounds of the run; 0 goes on to the run's end."""
    join_timeout: float = 0.0
    """Give up after so many seconds without a bootstrap peer; 0 keeps trying."""
    log_budget: str = "1GB"
    """Disk space for the last commits of all fragments, which peers that are behind replay; 0 keeps none."""
    checkpoint_every: float = 300.0
    """Seconds between two checkpoints; 0 writes one at the end only."""
    checkpoints: int = 2
    """How many checkpoints are kept; the oldest ones go."""
    seconds_per_status: float = 15.0
    """Time between two status lines."""
    pace: float = 0.0
    """Pad every inner step to at least so many seconds, for tests with many peers on one machine: emulated device
    time, and marked as such wherever it shows. 0 does not pad."""

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ConfigError(message)

        require(self.micro_batch >= 1, f"micro_batch is {self.micro_batch}, it must be at least 1")
        require(self.threads >= 0, f"threads is {self.threads}, it must not be negative")
        require(0 <= self.port < 65536, f"port is {self.port}, it must be in 0..65535")
        require(self.tau is None or self.tau >= 0, f"tau is {self.tau}, it must not be negative")
        require(self.lockstep >= 0, f"lockstep is {self.lockstep}, it must be the number of peers, or 0 for none")
        require(
            not self.lockstep or self.tau is not None,
            "lockstep needs a fixed overlap: give tau as well (--tau), in inner steps",
        )
        require(self.start_peers >= 1, f"start_peers is {self.start_peers}, it must be at least 1")
        require(self.rounds >= 0, f"rounds is {self.rounds}, it must not be negative")
        require(self.join_timeout >= 0, f"join_timeout is {self.join_timeout}, it must not be negative")
        require(
            0.1 <= self.seconds_per_status <= 30,
            f"seconds_per_status is {self.seconds_per_status}, it must be in 0.1..30: nothing runs in silence",
        )
        check_rate(self.max_upload, "max_upload")
        check_rate(self.max_download, "max_download")
        check_limit(self.max_connections, "max_connections")
        require(
            self.monthly_bytes == 0 or self.monthly_bytes >= LEAST_MONTH,
            f"monthly_cap is {self.monthly_cap!r}, it must be at least {LEAST_MONTH // 10**6}MB, or 0 for no cap: "
            "with less a node does little more than stay in the roster",
        )
        parse_size("log_budget", self.log_budget)
        require(self.checkpoint_every >= 0, f"checkpoint_every is {self.checkpoint_every} s, it must not be negative")
        require(self.checkpoints >= 1, f"checkpoints is {self.checkpoints}, at least 1 must be kept")
        require(0 <= self.pace <= 600, f"pace is {self.pace}, it must be in 0..600 seconds")
        for address in self.announce:
            check_announce(address)

    @property
    def log_bytes(self) -> int:
        """``log_budget`` in bytes."""
        return parse_size("log_budget", self.log_budget)

    @property
    def monthly_bytes(self) -> int:
        """``monthly_cap`` in bytes."""
        return parse_size("monthly_cap", self.monthly_cap)

    @property
    def key_file(self) -> Path:
        """The identity's key file."""
        return self.identity if self.identity is not None else self.data_dir / "identity.key"


def load_node_config(
    flags: Mapping[str, Any], *, environment: Mapping[str, str], file: Path | None = None
) -> NodeConfig:
    """The config from a TOML file, the environment and flags (None means: not given). ConfigError names the source."""
    hints = typing.get_type_hints(NodeConfig)
    values: dict[str, Any] = {}
    if file is not None:
        values |= _from_file(file, hints)
    values |= _from_environment(environment, hints)
    values |= {key: value for key, value in flags.items() if value is not None}
    return NodeConfig(**{key: _shaped(hints[key], key, value) for key, value in values.items()})


def _from_file(file: Path, hints: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"node config {file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"node config {file} is not valid TOML: {error}") from None
    unknown = [key for key in plain if key not in hints]
    if unknown:
        raise ConfigError(f"node config {file} has unknown keys {', '.join(unknown)}; valid are {', '.join(hints)}")
    return plain


def _from_environment(environment: Mapping[str, str], hints: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in NOT_KEYS:
            continue
        key = name.removeprefix(PREFIX).lower()
        if key not in hints:
            valid = ", ".join(PREFIX + hint.upper() for hint in hints)
            raise ConfigError(f"environment variable {name} is unknown; valid are {valid}")
        values[key] = _from_text(hints[key], name, text)
    return values


def _from_text(kind: Any, name: str, text: str) -> Any:
    kind = _without_none(kind)
    if kind is Rate:
        return parse_rate(text, name)
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind in (int, float):
            return kind(text)
    except (KeyError, ValueError):
        words = {bool: "1 or 0", int: "a whole number", float: "a number"}
        raise ConfigError(f"{name} is {text!r}, it must be {words[kind]}") from None
    if typing.get_origin(kind) is tuple:
        return tuple(part for part in text.split(",") if part)
    return text


def _shaped(kind: Any, key: str, value: Any) -> Any:
    kind = _without_none(kind)
    if value is None:
        return None
    if kind is Rate:
        return parse_rate(value, key)
    if kind is Path:
        return Path(str(value)).expanduser().absolute()
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{key} must be a list of texts")
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{key} is {value!r}, it must be of type {kind.__name__}")
    return value


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return inner
    return kind


def refuse_ranks(environment: Mapping[str, str]) -> None:
    """ConfigError if a launcher such as torchrun has started several processes as one node.

    Each would be a peer of its own and average with its neighbour over the internet, and all but one would find the
    identity in use.
    """
    ranks = environment.get("WORLD_SIZE", "1")
    if "LOCAL_RANK" in environment and ranks != "1":
        raise ConfigError(
            f"a launcher (torchrun?) has started {ranks} processes of this node, but a node is one process and trains "
            "on one device. Start `stretto join` by itself. For a second GPU start a second node with its own "
            "--data-dir, --port and --device cuda:1: it is a peer of its own, and sends as much as the first"
        )


def describe(config: NodeConfig) -> dict[str, str]:
    """Each setting as text, for ``doctor`` and logs."""
    return {item.name: str(getattr(config, item.name)) for item in dataclasses.fields(config)}
