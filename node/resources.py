"""What a process takes from its machine: memory, open files, threads. A leak shows as a line that climbs for hours.

Before each entry Python frees its cycles and the allocator gives back what it does not need, so that a node's memory
is what it uses. The figures come from ``/proc`` (Linux); where a system has none, or does not let us look, they are
left out. Counting Python's objects would tell more and stop the trainer for seconds, so it is not done.
"""

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.node import allocator

EVERY = 30.0
"""Seconds between two entries in the metrics."""

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One process at one moment."""

    rss: int
    """Bytes of its memory that lie in RAM."""
    fds: int
    """Open files, sockets included."""
    sockets: int
    threads: int


def usage(pid: int, *, proc: Path = PROC) -> Usage | None:
    """What process ``pid`` takes now; None if it is gone, is somebody else's, or this system does not tell."""
    folder = proc / str(pid)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        links = [_link(entry) for entry in (folder / "fd").iterdir()]
    except OSError:
        return None
    if "VmRSS" not in fields:
        return None  # a zombie
    return Usage(
        rss=1024 * int(fields["VmRSS"].split()[0]),
        fds=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        threads=int(fields["Threads"]),
    )


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""  # closed in between


def entry(tasks: int, daemon: int | None) -> dict[str, Any]:
    """The metrics event of this process with ``tasks`` asyncio tasks, and of its network daemon (a process id)."""
    event: dict[str, Any] = {"event": "resources", "tasks": tasks}
    for prefix, pid in (("", os.getpid()), ("daemon_", daemon)):
        found = usage(pid) if pid is not None else None
        if found is not None:
            event |= {prefix + name: getattr(found, name) for name in ("rss", "fds", "sockets", "threads")}
    held = allocator.held()
    if held is not None:
        event |= {"heap_used": held.used, "heap_free": held.free}
    return event


async def watch(
    say: Callable[[dict[str, Any]], None],
    daemon: int | None,
    *,
    every: float = EVERY,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write an entry with ``more`` fields every so many seconds, for ever. Runs in the loop whose tasks it counts."""
    while True:
        await asyncio.to_thread(_tidy)
        say(entry(len(asyncio.all_tasks()), daemon) | more())
        await asyncio.sleep(every)


def _tidy() -> None:
    gc.collect()  # cheap after garbage.settle
    allocator.give_back()
