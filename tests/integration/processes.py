"""Real ``stretto`` processes for the tests: started as people start them, followed, and always ended.

A ``Lab`` belongs to one test. Everything that it starts, and whatever those processes start in turn, carries a mark in
its environment, which children inherit and cannot lose: so ``/proc`` tells who is still there, orphans included, and
nothing is ever signalled that the test did not start.

Nothing here waits a fixed time. ``until`` polls for an event and gives up, with the logs, after a generous limit.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stretto.node.ports import free_port
from stretto.node.swarm.host import socket_dir
from stretto.protocol.config import DataConfig, EvalConfig, GroupConfig, InnerConfig, OuterConfig, RunConfig

T = TypeVar("T")

MARK = "SWARM_TEST_MARK"
WRONG_CLOCK = """import os, time

_right = time.time
_seconds = float(os.environ["SWARM_TEST_CLOCK"])
time.time = lambda: _right() + _seconds
"""
"""Python imports this module at its start, before anything of Stretto or hivemind asks for the time."""

LIMIT = 200.0
"""Seconds after which an awaited event will not come any more, however busy the machine is."""

MICRO_MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}
"""About 50,000 parameters: a step takes milliseconds, so that a test sees many rounds."""


def micro_run(
    corpus: Path, *, min_size: int = 1, inner_steps: int = 40, window: float = 3.0, seed: int = 0
) -> RunConfig:
    """A run of small steps and P = 2, some rounds per second, on the text in ``corpus``."""
    return RunConfig(
        name="micro",
        seed=seed,
        model=MICRO_MODEL,
        data=DataConfig(source=f"text:{corpus}", sequence_length=64),
        inner=InnerConfig(lr=3e-3, tokens_per_step=128, warmup_steps=10, total_steps=100_000),
        outer=OuterConfig(fragments=2, inner_steps=inner_steps, tau_max=5),
        group=GroupConfig(min_size=min_size, window=window),
        eval=EvalConfig(sequences=8),
    )


def until(condition: Callable[[], T], what: str, *, limit: float = LIMIT, logs: Callable[[], str] = str) -> T:
    """The first true value of ``condition()``; AssertionError with ``logs()`` after ``limit`` seconds."""
    end = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what}: not within {limit:.0f} s\n{logs()}"
        time.sleep(0.05)


def marked(mark: str) -> dict[int, str]:
    """Process id and command line of every living process that carries ``mark``; zombies carry nothing."""
    found: dict[int, str] = {}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found[int(folder.name)] = command.strip()
    return found


@dataclass
class Process:
    """One started command. ``folder`` is its data dir (a demo's folder), ``log`` holds all that it printed."""

    name: str
    popen: "subprocess.Popen[bytes]"
    mark: str
    folder: Path
    log: Path

    @property
    def text(self) -> str:
        """Everything printed so far, standard error last."""
        return self.log.read_text(encoding="utf-8", errors="replace") + self.errors

    @property
    def errors(self) -> str:
        """Everything printed on standard error so far."""
        return self.log.with_suffix(".err").read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """The end of the log, for messages."""
        return f"--- {self.name} (exit code {self.popen.poll()})\n" + "\n".join(self.text.splitlines()[-25:])

    def see(self, pattern: str, *, limit: float = LIMIT, count: int = 1) -> list[str]:
        """Wait until ``pattern`` is in the log ``count`` times; fails at once when the process ends before."""

        def found() -> list[str]:
            ended = self.popen.poll() is not None
            hits = [match.group(0) for match in re.finditer(pattern, self.text)]
            assert len(hits) >= count or not ended, f"{self.name} ended before {pattern!r}\n{self.tail()}"
            return hits if len(hits) >= count else []

        return until(found, f"{pattern!r} in the log of {self.name}", limit=limit, logs=self.tail)

    def exit_code(self, *, limit: float = LIMIT) -> int:
        """Wait for the end; negative for a signal."""
        try:
            return self.popen.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {limit:.0f} s\n{self.tail()}") from None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        self.popen.send_signal(number)

    def family(self) -> dict[int, str]:
        """Living processes that this one started, directly or not, and itself: id and command line."""
        return marked(self.mark)

    def daemon(self) -> int:
        """The process id of its p2pd."""
        (pid,) = (pid for pid, command in self.family().items() if "p2pd" in command.split(" ")[0])
        return pid

    def all_gone(self, *, limit: float = 10.0) -> None:
        """Wait until it and all that it started are gone."""
        until(
            lambda: not self.family(),
            f"end of the family of {self.name}",
            limit=limit,
            logs=lambda: str(self.family()),
        )

    # ------------------------------------------------------------------ a node's files

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The node's metrics events of one kind so far."""
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("runs/*/metrics.jsonl"):
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is still being written
            found += [event for event in map(json.loads, lines) if event["event"] == kind]
        return found

    def committed(self) -> list[int]:
        """Numbers of the rounds that the node committed, in the order in which it did."""
        return [event["round"] for event in self.events("round") if event["outcome"] == "committed"]

    def commits(self, more_than: int, *, limit: float = LIMIT) -> list[int]:
        """Wait until the node has committed a round later than ``more_than``; all its rounds."""

        def found() -> list[int]:
            assert self.popen.poll() is None, f"{self.name} ended\n{self.tail()}"
            rounds = self.committed()
            return rounds if max(rounds, default=-1) > more_than else []

        return until(found, f"{self.name} commits a round after {more_than}", limit=limit, logs=self.tail)

    def report(self) -> dict[str, Any]:
        """The node's report, once it has ended."""
        (path,) = self.folder.glob("runs/*/report.json")
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


@dataclass
class Lab:
    """All processes of one test. ``folder`` takes their files, ``temp`` is their temp dir."""

    folder: Path
    temp: Path
    mark: str
    corpus: Path
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        name: str,
        *arguments: str | Path,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
        tied: bool = False,
    ) -> Process:
        """Start ``stretto ARGUMENTS``. ``folder`` is where it keeps its files, if that is not ``name``'s own.

        ``inside`` are the words of a command that executes another one, such as ``ip netns exec NAME``. ``tied`` is
        for programs that last long: the process ends when this one does, even by kill -9.
        """
        mark = f"{self.mark}-{len(self.processes)}-"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("STRETTO_")}
        environment = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.temp),
            MARK: mark,
            **(variables or {}),
        }
        tie = ["--exit-with-stdin"] if tied else []
        log = self.folder / f"{len(self.processes)}-{name}.log"
        with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
            popen = subprocess.Popen(
                [*inside, sys.executable, "-m", "stretto.node.cli", *map(str, arguments), *tie],
                stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        process = Process(name, popen, mark, folder or self.folder / name, log)
        self.processes.append(process)
        return process

    def run(self, *arguments: str | Path, limit: float = LIMIT, variables: Mapping[str, str] | None = None) -> Process:
        """Start ``stretto ARGUMENTS`` and wait for its end."""
        process = self.start("command", *arguments, variables=variables)
        process.exit_code(limit=limit)
        return process

    def write_run(self, run: RunConfig | str, name: str = "run.toml") -> Path:
        """A run.toml, from a config or as it is."""
        file = self.folder / name
        file.write_text(run if isinstance(run, str) else run.to_toml(), encoding="utf-8")
        return file

    def bootstrap(self, run: Path, name: str = "bootstrap", *flags: str, port: int = 0) -> tuple[Process, str]:
        """A bootstrap peer of the run in a file, and its invite."""
        invite_file = self.folder / f"{name}.invite"
        invite_file.unlink(missing_ok=True)
        process = self.start(
            name, "bootstrap", run, "--data-dir", self.folder / name, "--host", "127.0.0.1", "--port", str(port),
            "--invite-file", invite_file, *flags,
        )  # fmt: skip
        process.see("invite: stretto:")
        until(invite_file.exists, "the invite file", logs=process.tail)
        return process, invite_file.read_text(encoding="utf-8").strip()

    def join(
        self,
        invite: str,
        name: str,
        *flags: str | Path,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        """A node on the loopback interface with one thread; ``folder`` is its data dir."""
        place = folder or self.folder / name
        return self.start(
            name, "join", invite, "--data-dir", place, "--host", "127.0.0.1", "--device", "cpu", "--threads", "1",
            *flags, folder=place, variables=variables,
        )  # fmt: skip

    def found(self, invite: str, peers: int, *flags: str | Path) -> list[Process]:
        """``peers`` nodes that begin the run together; the first one founds it."""
        founder = ("--new-run", "--start-peers", str(peers))
        return [self.join(invite, f"node{i}", *flags, *(founder if i == 0 else ())) for i in range(peers)]

    def wrong_clock(self, seconds: float) -> dict[str, str]:
        """Variables for a process whose wall clock is ``seconds`` ahead; its steady clocks stay right."""
        place = self.folder / "wrong-clock"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(WRONG_CLOCK, encoding="utf-8")
        path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "SWARM_TEST_CLOCK": str(seconds)}

    def remove_sockets(self, data_dir: Path) -> None:
        """What a killed process left in the temp dir, if they did not fit into its data dir: its next start would."""
        if data_dir.is_dir() and (place := socket_dir(data_dir, self.temp)).parent == self.temp:
            shutil.rmtree(place, ignore_errors=True)

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(process.tail() for process in self.processes)

    def close(self) -> None:
        """End everything: politely at first, then by force. AssertionError if something did not go by itself."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
        left: dict[int, str] = {}
        try:
            until(lambda: not marked(self.mark), "the end", limit=60)
        except AssertionError:
            left = marked(self.mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.popen.wait(10)
            if process.popen.stdin is not None:
                process.popen.stdin.close()
            if process.popen.returncode == -signal.SIGKILL:
                self.remove_sockets(process.folder)
        assert not left, f"these did not end by themselves: {left}\n{self.logs()}"


def no_traceback(process: Process) -> None:
    """AssertionError if a person saw a traceback."""
    assert "Traceback" not in process.text, process.text


def heads_equal(nodes: list[Process]) -> bool:
    """Whether the reports of ended nodes name the same chain heads."""
    heads = [node.report()["heads"] for node in nodes]
    return all(head == heads[0] for head in heads)


def one_lineage(nodes: list[Process]) -> bool:
    """Whether all ended nodes saw the same chain head for each version of each fragment that several of them have had,
    and have the same bits where they ended with the same head.

    For runs that end at some moment, where one node may be a round ahead of another.
    """
    bits: dict[str, set[str]] = {}
    for report in (node.report() for node in nodes):
        for head, state in zip(report["heads"], report["states"], strict=True):
            bits.setdefault(head, set()).add(state)
    heads: dict[tuple[int, int], set[str]] = {}
    seen: dict[tuple[int, int], int] = {}
    for node in nodes:
        mine = {
            (event["fragment"], event["version"]): event["head"]
            for kind in ("round", "repair")
            for event in node.events(kind)
            if "head" in event
        }
        for key, head in mine.items():
            heads.setdefault(key, set()).add(head)
            seen[key] = seen.get(key, 0) + 1
    assert max(seen.values(), default=0) == len(nodes), "no version that all nodes have had"
    return all(len(found) == 1 for found in (*heads.values(), *bits.values()))


__all__ = [
    "LIMIT", "Lab", "Process", "free_port", "heads_equal", "marked", "micro_run", "no_traceback", "one_lineage",
    "until",
]  # fmt: skip
