"""A swarm behind emulated home lines: one bootstrap peer and N nodes, real processes in network namespaces.

It starts and follows them, and does to them what a fault wants. What happened is read from the nodes' own
metrics.jsonl, which a restarted node appends to, and from their report.json; ``story`` hands all of it to the report.
"""

import argparse
import contextlib
import json
import os
import signal
import tarfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.protocol.config import DataConfig, EvalConfig, GroupConfig, InnerConfig, OuterConfig, RunConfig
from tests.chaos.links import Line, Links
from tests.chaos.story import Hit, Story
from tests.integration.processes import Lab, Process, until

BOOTSTRAP = "boot"
PORT = 4001
START_LIMIT = 240.0
"""Seconds until the first round commits: that many processes load torch at once."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that shapes a run. Paces are emulated device time, in seconds per inner step."""

    peers: int
    rounds: int
    pace: float = 0.5
    inner_steps: int = 72
    fragments: int = 4
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    tokens_per_step: int = 128
    sequence_length: int = 64
    tau_max: int = 5
    window: float = 3.0
    log_budget: str = "1GB"
    checkpoint_every: float = 300.0
    line: Line = field(default_factory=Line)
    lines: Mapping[str, Line] = field(default_factory=dict)
    """Lines of single peers."""
    paces: Mapping[str, float] = field(default_factory=dict)
    """Paces of single peers."""

    @property
    def names(self) -> list[str]:
        """The peers' names."""
        return [f"p{index}" for index in range(self.peers)]

    def pace_of(self, name: str) -> float:
        """Seconds per inner step of one peer."""
        return self.paces.get(name, self.pace)

    @property
    def interval(self) -> float:
        """About the seconds from one departure to the next: H / P inner steps at the swarm's mean rate."""
        rate = sum(1 / self.pace_of(name) for name in self.names) / self.peers
        return self.inner_steps / self.fragments / rate

    @property
    def cycle(self) -> float:
        """About the seconds between two departures of one fragment."""
        return self.interval * self.fragments

    def run(self, corpus: Path) -> RunConfig:
        """The run config. With h hidden units a layer has 13 h^2 parameters: four of 128 make 0.9 million."""
        model: dict[str, Any] = {
            "model_type": "llama",
            "vocab_size": 272,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "tie_word_embeddings": True,
        }
        return RunConfig(
            name="chaos",
            model=model,
            data=DataConfig(source=f"text:{corpus}", sequence_length=self.sequence_length),
            inner=InnerConfig(lr=2e-3, tokens_per_step=self.tokens_per_step, warmup_steps=10, total_steps=1_000_000),
            outer=OuterConfig(fragments=self.fragments, inner_steps=self.inner_steps, tau_max=self.tau_max),
            group=GroupConfig(window=self.window),
            eval=EvalConfig(sequences=8),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the report; what is emulated says so."""
        line = {name: self.lines.get(name, self.line) for name in self.names}
        return {
            "peers": self.peers,
            "rounds": self.rounds,
            "emulated_device_time": True,
            "pace_seconds": {name: self.pace_of(name) for name in self.names},
            "inner_steps": self.inner_steps,
            "fragments": self.fragments,
            "hidden": self.hidden,
            "layers": self.layers,
            "tokens_per_step": self.tokens_per_step,
            "interval_seconds": round(self.interval, 2),
            "cycle_seconds": round(self.cycle, 2),
            "window_seconds": self.window,
            "lines_mbit": {name: [line[name].up, line[name].down] for name in self.names},
            "line_mbit": [self.line.up, self.line.down],
        }


def write_corpus(folder: Path) -> Path:
    """About 250 kB of English and code that is here on any machine."""
    file = folder / "text.txt"
    parts = (Path(str(module.__file__)).read_text(encoding="utf-8") for module in (argparse, textwrap, tarfile))
    file.write_text("\n".join(parts), encoding="utf-8")
    return file


@dataclass
class Node:
    """One peer over all its lives. ``line`` names the one that it is behind."""

    name: str
    line: str
    lives: list[Process]
    events: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0
    round: int = -1
    """The latest round that it has spoken of."""
    down: bool = False
    """Killed on purpose and not yet started again."""

    @property
    def process(self) -> Process:
        """The present life."""
        return self.lives[-1]

    @property
    def ended(self) -> bool:
        """Whether the present life is over."""
        return self.process.popen.poll() is not None

    def tips(self) -> tuple[tuple[int, str], ...]:
        """Fragment and head of each chain that it has spoken of, as of its last word."""
        heads = {event["fragment"]: event["head"] for event in self.events if "head" in event}
        return tuple(sorted(heads.items()))

    def read(self) -> None:
        """Take in what the metrics file has more."""
        for path in self.process.folder.glob("runs/*/metrics.jsonl"):
            with path.open("rb") as file:
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.offset += len(line)
                    # A node that was killed within a write leaves half a line, which the next one's begin completes.
                    with contextlib.suppress(json.JSONDecodeError):
                        event = json.loads(line)
                        self.events.append(event)
                        if event["event"] == "round":
                            self.round = max(self.round, event["round"])


class Swarm:
    """All processes of one run, and the faults' hands."""

    def __init__(self, setting: Setting, lab: Lab, links: Links) -> None:
        self.setting, self.lab, self.links = setting, lab, links
        self.nodes: dict[str, Node] = {}
        self.hits: list[Hit] = []
        self.invite = ""
        self.bootstrap: Process | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Namespaces, bootstrap peer, nodes. The first node founds the run when all are ready."""
        setting = self.setting
        run = self.lab.write_run(setting.run(self.lab.corpus))
        host = self.links.add(BOOTSTRAP, Line(up=100, down=100))
        for name in setting.names:
            self.links.add(name, setting.lines.get(name, setting.line))
        invite_file = self.lab.folder / "invite"
        bootstrap = self.bootstrap = self.lab.start(
            BOOTSTRAP, "bootstrap", run, "--data-dir", self.lab.folder / BOOTSTRAP, "--host", host,
            "--port", str(PORT), "--invite-file", invite_file, inside=self.links.inside(BOOTSTRAP), tied=True,
        )  # fmt: skip
        bootstrap.see("invite: stretto:", limit=START_LIMIT)
        until(invite_file.exists, "the invite file", logs=bootstrap.tail)
        self.invite = invite_file.read_text(encoding="utf-8").strip()
        for index, name in enumerate(setting.names):
            founder = ("--new-run", "--start-peers", str(setting.peers)) if index == 0 else ()
            self.nodes[name] = Node(name, name, [self._join(name, name, *founder)])

    def add(self, name: str, *, line: str | None = None) -> Node:
        """One more peer, with an empty disk: behind a line of its own, or behind that of a peer that is gone."""
        if line is None:
            line = name
            self.links.add(name, self.setting.lines.get(name, self.setting.line))
        node = self.nodes[name] = Node(name, line, [self._join(name, line)])
        return node

    def _join(self, name: str, line: str, *more: str) -> Process:
        folder = self.lab.folder / name
        return self.lab.start(
            name, "join", self.invite, "--data-dir", folder, "--host", self.links.address(line), "--port", str(PORT),
            "--device", "cpu", "--threads", "1", "--pace", f"{self.setting.pace_of(name):g}",
            "--rounds", str(self.setting.rounds), "--log-budget", self.setting.log_budget,
            "--checkpoint-every", f"{self.setting.checkpoint_every:g}", *more,
            folder=folder, inside=self.links.inside(line), tied=True,
        )  # fmt: skip

    def poll(self) -> None:
        """Read what is new."""
        for node in self.nodes.values():
            node.read()

    def await_first_commit(self) -> float:
        """Wait until a round is committed by somebody; the time of that. AssertionError if a node ends before."""

        def found() -> float:
            self.poll()
            for node in self.nodes.values():
                assert not node.ended, f"{node.name} ended during the start\n{node.process.tail()}"
            times = [e["time"] for node in self.nodes.values() for e in node.events if e.get("outcome") == "committed"]
            return float(min(times, default=0.0))

        return until(found, "the first committed round", limit=START_LIMIT, logs=self.lab.logs)

    @property
    def all_ended(self) -> bool:
        """Whether every node has ended and none is about to start again."""
        return all(node.ended and not node.down for node in self.nodes.values())

    def ask_to_leave(self) -> None:
        """SIGTERM to all nodes: they leave in order and write their reports."""
        for node in self.nodes.values():
            if not node.ended:
                node.process.signal(signal.SIGCONT)
                node.process.signal(signal.SIGTERM)

    def last_round(self) -> int:
        """The latest round that any node has spoken of, -1 before the first."""
        return max((node.round for node in self.nodes.values()), default=-1)

    # ------------------------------------------------------------------ what faults do

    def kill(self, name: str) -> None:
        """kill -9 of the node; its daemon ends by itself."""
        node = self.nodes[name]
        node.down = True
        node.process.signal(signal.SIGKILL)
        node.process.popen.wait(10)

    def leave(self, name: str) -> None:
        """SIGTERM: it leaves in order, and ``restart`` may bring it back."""
        self.nodes[name].down = True
        self.nodes[name].process.signal(signal.SIGTERM)

    def restart(self, name: str) -> bool:
        """Start a node that is gone with the same data dir; False while something of its last life is still there."""
        node = self.nodes[name]
        if node.process.family():
            return False
        node.lives.append(self._join(name, node.line))
        node.down = False
        return True

    def freeze(self, name: str, *, whole: bool) -> None:
        """SIGSTOP of the node, with ``whole`` of its daemon too."""
        self._signal(name, signal.SIGSTOP, whole=whole)

    def thaw(self, name: str) -> None:
        """SIGCONT of node and daemon."""
        self._signal(name, signal.SIGCONT, whole=True)

    def _signal(self, name: str, number: signal.Signals, *, whole: bool) -> None:
        process = self.nodes[name].process
        if process.popen.poll() is None:
            process.signal(number)
        for pid in process.family() if whole else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # ------------------------------------------------------------------ the end

    def story(self) -> Story:
        """What has happened so far."""
        self.poll()
        reports, ids, exits = {}, {}, {}
        for name, node in self.nodes.items():
            if node.ended and not node.down:  # a file from an earlier life, or of a peer that left for good, is old
                with contextlib.suppress(ValueError, FileNotFoundError):
                    reports[name] = node.process.report()
            with contextlib.suppress(FileNotFoundError):
                ids[name] = (node.process.folder / "identity.key.peer-id").read_text(encoding="utf-8").strip()
            exits[name] = node.process.popen.poll()
        return Story(
            setting=self.setting.to_dict(),
            peers=list(self.nodes) or self.setting.names,
            rounds=self.setting.rounds,
            fragments=self.setting.fragments,
            ids=ids,
            events={name: list(node.events) for name, node in self.nodes.items()},
            hits=list(self.hits),
            reports=reports,
            exits=exits,
            bytes_up={name: self.links.bytes_up(node.line) for name, node in self.nodes.items()},
            told_at=time.time(),
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
        )

    def close(self) -> None:
        """End all processes. AssertionError if some had to be made to."""
        for name in self.nodes:
            self.thaw(name)
        self.lab.close()
