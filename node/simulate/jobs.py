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
    task: Task
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
    selector = selectors.DefaultSelector()
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_start(waiting.pop(), folder, threads, len(tasks) - len(waiting)))
                selector.register(_stdout(workers[-1]), selectors.EVENT_READ, workers[-1])
            said = time.monotonic()
            finished: list[tuple[_Worker, dict[str, Any]]] = []
            while not finished:
                for key, _ in selector.select(timeout=1.0):
                    result = _read(key.data)
                    if result is not None:
                        finished.append((key.data, result))
                if time.monotonic() - said > STATUS_SECONDS:
                    said = time.monotonic()
                    running = [(worker.task, worker.done) for worker in workers]
                    say(progress.line(running, f"{count} of {len(tasks)} runs done"))
            for worker, result in finished:
                selector.unregister(_stdout(worker))
                workers.remove(worker)
                _end(worker)
                count, progress.finished = count + 1, progress.finished + worker.task.config.tokens
                yield result
    finally:
        selector.close()
        for worker in workers:
            _end(worker)


def _start(task: Task, folder: Path, threads: int, number: int) -> _Worker:
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
    request = {
        "label": task.label,
        "settings": task.config.to_dict(),
        "cache": str(folder / "cache"),
        "threads": threads,
    }
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is seen when it is read from
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    return _Worker(process, log, task)


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
    """Let a worker end: by itself if it has nothing to do, else at once."""
    for stream in (worker.process.stdin, worker.process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    if worker.done < 1.0:
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
