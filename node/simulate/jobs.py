"""Many runs, some at a time, each in a worker process (``worker``), with lines that say how far it all is.

Workers are leaders of sessions of their own: Ctrl-C reaches the parent alone, which ends them. What they print besides
replies goes to a log file each in the results folder.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stretto.node.simulate.config import SimConfig
from stretto.protocol.errors import StrettoError

STATUS_SECONDS = 15.0
"""Longest time between two lines."""


@dataclass(frozen=True)
class Task:
    """One run that is to be done."""

    label: str
    config: SimConfig

    def __str__(self) -> str:
        return f"{self.label}, seed {self.config.seed}"


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    log: Path
    task: Task | None = None
    """What it is doing."""
    done: float = 0.0
    partial: bytes = b""


@dataclass
class Progress:
    """How much of all runs is done, by tokens, and when the rest will be."""

    total: int
    began: float = field(default_factory=time.monotonic)
    finished: int = 0

    def line(self, running: Sequence[tuple[Task, float]], runs: str) -> str:
        """One line for people."""
        share = (self.finished + sum(done * task.config.tokens for task, done in running)) / self.total
        elapsed = time.monotonic() - self.began
        left = f", about {_duration(elapsed * (1 - share) / share)} left" if share > 0.005 else ""
        current = "; ".join(f"{task} {done:.0%}" for task, done in running)
        return f"{runs}, {share:.0%} of the work{left}; now {current}"


def run_all(
    tasks: Sequence[Task], *, jobs: int, threads: int, folder: Path, say: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """Do the tasks, ``jobs`` at a time, and yield each result as it comes. StrettoError if a worker fails."""
    waiting = list(reversed(tasks))
    progress, count = Progress(sum(task.config.tokens for task in tasks)), 0
    said = 0.0
    workers = [_start(folder, number, threads) for number in range(min(jobs, len(tasks)))]
    with selectors.DefaultSelector() as selector:
        try:
            for worker in workers:
                selector.register(_stdout(worker), selectors.EVENT_READ, worker)
                _give(worker, waiting.pop(), folder, threads)
            while busy := [(w.task, w.done) for w in workers if w.task is not None]:
                if time.monotonic() - said > STATUS_SECONDS:
                    said = time.monotonic()
                    say(progress.line(busy, f"{count} of {len(tasks)} runs done"))
                for key, _ in selector.select(timeout=1.0):
                    worker, task = key.data, key.data.task
                    result = _read(worker)
                    if result is None:
                        continue
                    count, progress.finished = count + 1, progress.finished + task.config.tokens
                    worker.task = None
                    if waiting:
                        _give(worker, waiting.pop(), folder, threads)
                    yield result
        finally:
            for worker in workers:
                _end(worker)


def _start(folder: Path, number: int, threads: int) -> _Worker:
    log = folder / f"worker-{number}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto.node.simulate.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    return _Worker(process, log)


def _give(worker: _Worker, task: Task, folder: Path, threads: int) -> None:
    worker.task, worker.done = task, 0.0
    request = {
        "label": task.label,
        "settings": task.config.to_dict(),
        "cache": str(folder / "cache"),
        "threads": threads,
    }
    assert worker.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is seen when it is read from
        worker.process.stdin.write(json.dumps(request).encode() + b"\n")
        worker.process.stdin.flush()


def _stdout(worker: _Worker) -> IO[bytes]:
    assert worker.process.stdout is not None
    return worker.process.stdout


def _read(worker: _Worker) -> dict[str, Any] | None:
    """Take in what a worker has written; its result, if that is among it."""
    data = os.read(_stdout(worker).fileno(), 1 << 16)
    if not data:
        raise StrettoError(f"the run {worker.task} ended without a result: {_tail(worker.log)}")
    *lines, worker.partial = (worker.partial + data).split(b"\n")
    for reply in map(json.loads, lines):
        if "error" in reply:
            raise StrettoError(f"the run {worker.task} failed: {reply['error']}")
        if "result" in reply:
            result: dict[str, Any] = reply["result"]
            return result
        worker.done = reply["done"]
    return None


def _end(worker: _Worker) -> None:
    """Let a worker end: by itself if it has nothing to do, else at once; an empty log goes."""
    for stream in (worker.process.stdin, worker.process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    if worker.task is not None:
        worker.process.kill()
    worker.process.wait()
    with contextlib.suppress(OSError):
        if worker.log.stat().st_size == 0:
            worker.log.unlink()


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(text[-3:]) or f"it said nothing (log {log})"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min"
        if minutes
        else "less than 1 min"
    )
