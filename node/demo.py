"""``stretto demo``: a whole swarm on one machine, as real processes over loopback, from start to report.

One bootstrap peer and N nodes are started just as people would start them; the demo only watches their metrics files
and adds up their reports. It ends by itself, and takes every process along however it ends itself: children stop when
their standard input does.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from stretto.node.endings import ending, peak_rss
from stretto.node.presets import demo_run
from stretto.node.runfile import read_run
from stretto.node.stopping import stop_signals
from stretto.node.swarm.folders import own_folder, write_whole
from stretto.protocol.errors import ConfigError, StrettoError

START_SECONDS = 90.0
"""A child that has not shown itself by then will not."""

STOP_SECONDS = 6.0
"""Children get so long to leave before they are killed."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What to run. ``folder`` None uses a temporary one that is removed after success."""

    peers: int
    rounds: int
    report: Path
    folder: Path | None
    inner_steps: int
    fragments: int
    seed: int
    lockstep: bool = False
    """Train step by step as the simulation does, and compare with it at the end."""
    tau: tuple[int, ...] = ()
    """In lockstep: the overlap of all peers, or of each; 1 if nothing is given."""

    def __post_init__(self) -> None:
        for name in ("peers", "rounds", "inner_steps", "fragments"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be at least 1")
        if self.peers > 64:
            raise ConfigError(f"--peers is {self.peers}; more than 64 do not fit one machine")
        if self.tau and not self.lockstep:
            raise ConfigError(
                "--tau of a demo is for --lockstep: without it peers merge a result as soon as it is there"
            )
        if len(self.tau) not in (0, 1, self.peers):
            raise ConfigError(
                f"--tau is given {len(self.tau)} times: give it once, or once for each of {self.peers} peers"
            )

    @property
    def taus(self) -> tuple[int, ...]:
        """In lockstep: the overlap of each peer."""
        return self.tau if len(self.tau) == self.peers else (self.tau or (1,)) * self.peers


@dataclass
class Child:
    """A process of the swarm and what its metrics file has told so far."""

    name: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: Path
    seen: int = 0
    step: int = 0
    loss: float = float("nan")
    first_loss: float = float("nan")
    committed: int = 0
    aborted: int = 0
    last_event: str = "starting"
    peak: int = 0
    """Bytes of RAM that it has held at the most."""

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None


@dataclass
class Swarm:
    """The processes of a demo."""

    config: DemoConfig
    folder: Path
    children: list[Child] = field(default_factory=list)
    stopping: bool = False

    def spawn(self, name: str, *arguments: str) -> Child:
        """Start ``stretto`` with ``arguments`` in a session of its own."""
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        for key in [key for key in environment if key.startswith("STRETTO_") and key != "STRETTO_DEBUG"]:
            del environment[key]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "stretto.node.cli", *arguments, "--exit-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        child = Child(name, process, self.folder / name, log)
        self.children.append(child)
        return child

    @property
    def nodes(self) -> list[Child]:
        """The training peers."""
        return self.children[1:]

    def start(self, say: Any) -> None:
        """Bootstrap first, then the nodes with its invite."""
        run_file, invite_file = self.folder / "run.toml", self.folder / "invite"
        config = self.config
        run = demo_run(
            inner_steps=config.inner_steps, fragments=config.fragments, seed=config.seed, rounds=config.rounds
        )
        if config.lockstep:
            from stretto.node.lockstep import check_lockstep

            for tau in config.taus:
                check_lockstep(run, config.peers, tau)
        run_file.write_text(run.to_toml(), encoding="utf-8")
        say(f"run {run.digest().hex()[:16]}, files in {self.folder}")
        place = ["--host", "127.0.0.1"]
        bootstrap = self.spawn(
            "bootstrap",
            "bootstrap",
            str(run_file),
            *place,
            "--data-dir",
            str(self.folder / "bootstrap"),
            "--invite-file",
            str(invite_file),
        )
        say("starting the bootstrap peer")
        self._wait_for(invite_file, bootstrap)
        invite = invite_file.read_text(encoding="utf-8").strip()
        say(f"starting {config.peers} training peer(s)")
        for index in range(config.peers):
            founder = ["--new-run", "--start-peers", str(config.peers)] if index == 0 else []
            tau = config.taus[index]
            lockstep = ["--lockstep", str(config.peers), "--tau", str(tau)] if config.lockstep else []
            self.spawn(
                f"node{index}",
                "join",
                invite,
                *place,
                "--data-dir",
                str(self.folder / f"node{index}"),
                "--rounds",
                str(config.rounds),
                "--device",
                "cpu",
                "--threads",
                "1",
                *founder,
                *lockstep,
            )
        pids = {child.name: child.process.pid for child in self.children}
        (self.folder / "pids.json").write_text(json.dumps(pids), encoding="utf-8")
        say("processes: " + ", ".join(f"{name} {pid}" for name, pid in pids.items()))

    def _wait_for(self, file: Path, child: Child) -> None:
        end = time.monotonic() + START_SECONDS
        while not file.exists():
            if self.stopping:
                raise KeyboardInterrupt
            if child.ended or time.monotonic() > end:
                raise StrettoError(f"the {child.name} did not start: {tail(child.log)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ask all to leave, then make them."""
        self.stopping = True
        for child in self.children:
            if not child.ended:
                child.process.terminate()
        end = time.monotonic() + STOP_SECONDS
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.05, end - time.monotonic()))
            if not child.ended:
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()


def run_demo(config: DemoConfig) -> int:
    """Run a swarm, write the report, return the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    folder = _folder(config)
    swarm = Swarm(config, folder)
    keep = config.folder is not None

    def interrupted(_number: int, _frame: object) -> None:
        if swarm.stopping:
            return
        swarm.stopping = True
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupted)
    try:
        swarm.start(console.print)
        _watch(swarm, console)
        report = make_report(swarm, time.monotonic() - began)
        if config.lockstep:
            report |= _compare(swarm, report, console)
        write_whole(config.report, json.dumps(report, indent=2) + "\n", "--report")
        console.print(render(report, config.report))
        fine = report["heads_equal"] and not report["failed"] and report["simulation_equal"] is not False
        keep = keep or not fine
        return 0 if fine else 1
    except KeyboardInterrupt:
        console.print("interrupted: stopping all peers")
        return 130
    except BaseException:
        keep = True
        raise
    finally:
        swarm.stop()
        if keep:
            console.print(f"logs and metrics: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(config: DemoConfig) -> Path:
    """A folder of the demo's own. What cannot work in the end is refused before anything starts."""
    parent = config.report.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK) or config.report.is_dir():
        raise ConfigError(f"the report cannot be written to {config.report}. Choose another place with --report")
    if config.folder is None:
        return Path(tempfile.mkdtemp(prefix="stretto-demo-"))
    own_folder(config.folder, parents=True)
    if any(config.folder.iterdir()):
        raise ConfigError(
            f"{config.folder} is not empty: an earlier demo's files would be taken for this one's. Remove it, or "
            "choose another one with --folder"
        )
    return config.folder


def _watch(swarm: Swarm, console: Console) -> None:
    """Show progress until all nodes have ended."""
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, refresh_per_second=2)) if console.is_terminal else None
        said = 0.0
        while not all(child.ended for child in swarm.nodes):
            for child in swarm.nodes:
                child.peak = peak_rss(child.process.pid) or child.peak
                for event in _new_events(child):
                    _note(child, event)
            if live is not None:
                live.update(_table(swarm))
            elif time.monotonic() - said >= 5:
                said = time.monotonic()
                console.print(_line(swarm))
            time.sleep(0.25)
        for child in swarm.nodes:
            for event in _new_events(child):
                _note(child, event)
        if live is not None:
            live.update(_table(swarm))


def _new_events(child: Child) -> Iterator[dict[str, Any]]:
    for path in child.folder.glob("runs/*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(child.seen)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                child.seen += len(line)
                yield json.loads(line)


def _note(child: Child, event: dict[str, Any]) -> None:
    if event["event"] == "step":
        child.step, child.loss = event["step"], event["loss"]
        if child.first_loss != child.first_loss:
            child.first_loss = child.loss
        if child.last_event == "starting":
            child.last_event = "training"
    elif event["event"] == "round":
        committed = event["outcome"] == "committed"
        child.committed += committed
        child.aborted += not committed
        child.last_event = f"round {event['round']} " + (
            f"committed by {event['members']} in {event['seconds']:.2f} s" if committed else event["why"]
        )


def _state(child: Child) -> str:
    if not child.ended:
        return child.last_event
    code = child.process.returncode
    return "done" if code == 0 else ending(code, child.peak)


def _table(swarm: Swarm) -> Table:
    table = Table("peer", "step", "loss", "committed", "aborted", "now", title="stretto demo")
    for child in swarm.nodes:
        loss = f"{child.loss:.3f}" if child.step else "-"
        table.add_row(child.name, str(child.step), loss, str(child.committed), str(child.aborted), _state(child))
    return table


def _line(swarm: Swarm) -> str:
    parts = [
        f"{child.name} step {child.step} loss {child.loss:.2f}" if child.step else f"{child.name} {_state(child)}"
        for child in swarm.nodes
    ]
    rounds = max((child.committed for child in swarm.nodes), default=0)
    return f"{time.strftime('%H:%M:%S')} {rounds} of {swarm.config.rounds} rounds; " + "; ".join(parts)


def make_report(swarm: Swarm, wall: float) -> dict[str, Any]:
    """Add up the nodes' own reports. StrettoError if not one node wrote one."""
    reports: dict[str, dict[str, Any]] = {}
    for child in swarm.nodes:
        for path in child.folder.glob("runs/*/report.json"):
            reports[child.name] = json.loads(path.read_text(encoding="utf-8"))
    if not reports:
        ends = "; ".join(f"{child.name} {_state(child)}: {tail(child.log)}" for child in swarm.nodes)
        raise StrettoError(f"no peer came to the end: {ends}")
    nodes = list(reports.values())
    begun = {number for node in nodes for number in node["rounds_begun"]}
    committed = {number for node in nodes for number in node["committed"]}

    def mean(key: str) -> float | None:
        # A node that was stopped on the way has no final figures.
        known = [node[key] for node in nodes if node[key] is not None]
        return statistics.fmean(known) if known else None

    return {
        "peers": swarm.config.peers,
        "rounds_begun": len(begun),
        "rounds_committed": len(committed),
        "rounds_aborted": len(begun - committed),
        "heads_equal": all(node["heads"] == nodes[0]["heads"] for node in nodes),
        "loss_first": mean("loss_first"),
        "loss_last": mean("loss_last"),
        "eval_loss": mean("eval_loss"),
        "bytes_up_per_peer": mean("bytes_up"),
        "bytes_up_payload_per_peer": mean("bytes_up_contributions"),
        "bytes_up_control_per_peer": mean("bytes_up_control"),
        "bytes_up_group_payload": mean("bytes_due"),
        "bytes_up_fp32_equivalent": mean("bytes_due_fp32"),
        "emulated_device_time": any(node["emulated_device_time"] for node in nodes),
        "step_seconds": mean("step_seconds"),
        "blocked_seconds": mean("blocked_seconds"),
        "compute_utilization": mean("compute_utilization"),
        "tau": {name: node["tau"] for name, node in reports.items()},
        "wall_seconds": wall,
        "lost": [child.name for child in swarm.nodes if (child.process.returncode or 0) < 0],
        "failed": [child.name for child in swarm.nodes if (child.process.returncode or 0) > 0],
        "endings": {child.name: _state(child) for child in swarm.nodes if child.process.returncode},
        "abort_reasons": sorted({why for node in nodes for why in node["aborted"].values()}),
        "simulation_equal": None,
        "simulation_differences": [],
        "nodes": reports,
    }


def _compare(swarm: Swarm, report: dict[str, Any], console: Console) -> dict[str, Any]:
    """Simulate what the nodes have done in lockstep: whether all bits are equal, and what differs."""
    import torch

    from stretto.node.lockstep_simulation import compare_with_simulation

    whole = len(report["nodes"]) == swarm.config.peers and report["rounds_committed"] == swarm.config.rounds
    if not whole or report["failed"] or report["lost"]:
        return {"simulation_equal": False, "simulation_differences": ["the swarm did not come to its end"]}
    console.print(f"simulating the same run: {swarm.config.peers} peers, {swarm.config.rounds} rounds")
    torch.set_num_threads(1)  # as many as the nodes have: sums in another order have other bits
    run = read_run(swarm.folder / "run.toml")
    found = compare_with_simulation(run, report["nodes"], swarm.nodes[0].folder)
    return {"simulation_equal": found["equal"], "simulation_differences": found["differences"]}


def render(report: dict[str, Any], path: Path) -> str:
    """The summary for people."""
    fp32 = report["bytes_up_fp32_equivalent"]
    saved = f", {fp32 / report['bytes_up_per_peer']:.1f} times less than FP32" if report["bytes_up_per_peer"] else ""
    lines = [
        f"{report['rounds_committed']} of {report['rounds_begun']} rounds committed by {report['peers']} peer(s) in "
        f"{report['wall_seconds']:.0f} s; anchors {'bit-identical' if report['heads_equal'] else 'DIFFER'} on all",
        f"training loss {_figure(report['loss_first'])} -> {_figure(report['loss_last'])}, held-out "
        f"{_figure(report['eval_loss'])} nats per byte",
        f"{report['bytes_up_per_peer'] / 1e6:.2f} MB sent per peer{saved}",
        f"{report['step_seconds'] * 1e3:.0f} ms per step, compute utilization {report['compute_utilization']:.1%}, "
        f"tau {', '.join(f'{name} {tau}' for name, tau in report['tau'].items())}",
    ]
    if report["simulation_equal"]:
        lines.append("simulation of the same run: anchors, momenta and local weights bit-identical on all peers")
    elif report["simulation_equal"] is False:
        lines.append(f"DIFFERS FROM ITS SIMULATION: {'; '.join(report['simulation_differences'])}")
    if report["emulated_device_time"]:
        lines.append("WARNING steps were padded to a pace: times and utilization are emulated device time")
    lines += [f"WARNING {name} {report['endings'][name]}; the others went on" for name in report["lost"]]
    lines += [f"FAILED: {name} {report['endings'][name]}; see its log" for name in report["failed"]]
    if report["abort_reasons"]:
        lines.append("aborted rounds: " + "; ".join(report["abort_reasons"]))
    return "\n".join([*lines, f"report: {path}"])


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log, for error messages."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return " | ".join(text[-lines:]) or "it said nothing"
