"""The processes of a benchmark as its parent sees them: started once, asked by lines of JSON, and always ended.

A worker (``stretto.node.bench.worker``) reads one request per line from its standard input and writes replies, one
JSON object per line, to its standard output; what libraries print goes to its log. Each is the leader of a session of
its own, so Ctrl-C reaches the parent alone, and each carries a mark in its environment which everything that it
starts inherits: that is how left-overs are found, hivemind's forked processes above all, and how nothing else is ever
signalled. A worker whose standard input ends takes its whole session along, so none outlives a killed parent.
"""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto.node.bench.counters import marked
from stretto.protocol.errors import StrettoError

MARK = "STRETTO_BENCH_MARK"
LIMIT = 120.0
"""Seconds for an answer, on a machine that is busy with many processes."""
STOP_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")


class Worker:
    """One process and what it has written so far."""

    def __init__(self, index: int, folder: Path, mark: str) -> None:
        self.index, self.log = index, folder / f"worker{index}.log"
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stretto.node.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._partial = b""

    def send(self, request: dict[str, Any]) -> None:
        """Write one request."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # whoever waits for the answer will see that it is gone
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[dict[str, Any]]:
        """The replies in what can be read now; StrettoError when the worker has ended or failed."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise StrettoError(f"worker {self.index} ended: {self.tail()}")
        *lines, self._partial = (self._partial + data).split(b"\n")
        replies: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for reply in replies:
            if "error" in reply:
                raise StrettoError(f"worker {self.index}: {reply['error']} ({self.tail()})")
        return replies

    def tail(self) -> str:
        """The end of its log, for error messages."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(text[-3:]) or "it said nothing"


class Crew:
    """The workers of one benchmark and their folder; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stretto-bench-"))
        self.workers: list[Worker] = []
        self.mark = secrets.token_hex(8)
        self.pids: set[int] = set()
        """All processes that were seen to belong to it."""
        self._folders = 0

    def new_folder(self) -> str:
        """An empty folder for one peer's files and sockets, with a short path."""
        self._folders += 1
        folder = self.folder / str(self._folders)
        folder.mkdir(mode=0o700)
        return str(folder)

    def grow(self, count: int) -> list[Worker]:
        """The first ``count`` workers, started where they are not there yet and ready for requests."""
        fresh = [Worker(index, self.folder, self.mark) for index in range(len(self.workers), count)]
        self.workers += fresh
        self._gather(fresh)
        return self.workers[:count]

    def ask(self, workers: Sequence[Worker], request: dict[str, Any]) -> list[dict[str, Any]]:
        """The same request to all, and the answer of each."""
        return self.ask_each(workers, [request] * len(workers))

    def ask_each(self, workers: Sequence[Worker], requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """To each its own request, at once, and the answer of each."""
        for worker, request in zip(workers, requests, strict=True):
            worker.send(request)
        return self._gather(workers)

    def _gather(self, workers: Sequence[Worker]) -> list[dict[str, Any]]:
        """The next reply of each worker."""
        found: dict[int, dict[str, Any]] = {}
        if workers:
            for worker, reply in self.listen(workers):
                found[worker.index] = reply
                if len(found) == len(workers):
                    break
        return [found[worker.index] for worker in workers]

    def listen(self, workers: Sequence[Worker], limit: float = LIMIT) -> Iterator[tuple[Worker, dict[str, Any]]]:
        """Replies as they come. StrettoError after ``limit`` seconds without any."""
        self.pids.update(marked(MARK, self.mark))
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while True:
                ready = selector.select(limit)
                if not ready:
                    raise StrettoError(f"no worker said anything for {limit:.0f} s: {workers[0].tail()}")
                for key, _ in ready:
                    for reply in key.data.read():
                        yield key.data, reply

    def close(self) -> None:
        """Ask all workers to end, make those that do not, and remove what they leave behind."""
        self.pids.update(marked(MARK, self.mark))
        for worker in self.workers:
            if worker.process.stdin is not None:
                with contextlib.suppress(OSError):
                    worker.process.stdin.close()
        end = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.1, end - time.monotonic()))
        while marked(MARK, self.mark) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in marked(MARK, self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
            if worker.process.stdout is not None:
                worker.process.stdout.close()
        self._remove_shared_memory()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_shared_memory(self) -> None:
        """torch names its files in shared memory after the process that made them; killed ones leave them there."""
        if SHARED_MEMORY.is_dir():
            for file in SHARED_MEMORY.glob("torch_*"):
                owner = file.name.split("_")[1]
                if owner.isdigit() and int(owner) in self.pids:
                    with contextlib.suppress(OSError):
                        file.unlink()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
