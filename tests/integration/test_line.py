"""The line with real daemons: caps that hold, throughput on loopback, and control messages on a slow link.

The slow link is two network namespaces, joined by a veth pair whose both ends send through a token bucket of 1 Mbit/s
with a queue of 400 ms, about what a modem has. It needs root, ``ip`` and ``tc``.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT, LIMIT = 90.0, 110.0
"""Seconds for a process to start and to obey, on a busy machine."""


class Process:
    """One ``line_peer``."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", up: float = 0, down: float = 0, within: str = ""):
        folder.mkdir()
        prefix = ["ip", "netns", "exec", within] if within else []
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.integration.line_peer", str(folder), host, str(up), str(down)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HIVEMIND_LOGLEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address = ""

    def ready(self) -> "Process":
        self.address = self._answer(START_LIMIT)["address"]
        return self

    @property
    def peer_id(self) -> str:
        return self.address.rsplit("/", 1)[1]

    def tell(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer(LIMIT)

    def send(self, to: "Process", nbytes: int, *, streams: int = 1, plain: bool = False, every: float = 0.0) -> Any:
        return self.tell("send", to=to.peer_id, streams=streams, nbytes=nbytes, plain=plain, every=every)

    def _answer(self, limit: float) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(limit, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the peer ended or was silent for {limit:.0f} s:\n{self._log.read()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def peers(*settings: dict[str, Any], folder: Path) -> Iterator[list[Process]]:
    """Processes that know each other: all others have dialled the first one, and one another."""
    started: list[Process] = []
    try:
        for number, setting in enumerate(settings):
            started.append(Process(folder / str(number), **setting))
        for process in started:
            process.ready()
        for number, process in enumerate(started):
            for other in started[:number]:
                process.tell("dial", address=other.address)
        yield started
    finally:
        for process in started:
            process.close()


@pytest.fixture
def short(session_temp: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    folder = session_temp / f"line{abs(hash(request.node.name)) % 10**6}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def command(*words: str) -> None:
    """Run ``ip`` or ``tc``; what they say is in the error."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2 in them, each sending at ``rate``. Returns their names."""
    assert os.geteuid() == 0, "network namespaces need root: run this test as root, or deselect it with -k 'not link'"
    for tool in ("ip", "tc"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install iproute2"
    names = (f"line{os.getpid()}a", f"line{os.getpid()}b")
    devices = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            command("ip", "netns", "add", name)
            stack.callback(command, "ip", "netns", "delete", name)
        command("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            inside: Sequence[str] = ("ip", "-n", name)
            command("ip", "link", "set", device, "netns", name)
            command(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", device)
            command(*inside, "link", "set", device, "up")
            command(*inside, "link", "set", "lo", "up")
            command(
                "tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf",
                "rate", rate, "burst", "64kb", "latency", "400ms",
            )  # fmt: skip
        yield names


def delays(sender: Process, receiver: Process, **how: Any) -> tuple[list[float], float]:
    """Seconds that control messages took while bulk data went the same way, and seconds of the bulk data."""
    receiver.tell("state")
    sent = sender.send(receiver, every=0.2, **how)
    heard = receiver.tell("state")["heard"]
    # The last ones may still be on their way, all others have arrived.
    numbers = [n for n in sent["spoken"] if n in heard]
    assert len(numbers) >= len(sent["spoken"]) - 3
    return [heard[n] - sent["spoken"][n] for n in numbers], sent["seconds"]
