"""What processes take from the machine, sampled while they live, and whether it climbs.

    slope by least squares = sum (t - mean t)(y - mean y) / sum (t - mean t)^2
    growth = slope * seconds from the first sample to the last

A single high value hardly moves the growth, a leak does. The last two thirds of the samples count: before that caches
fill, and the first rounds touch memory that stays in use. Of memory the least value of each minute counts: a node
needs tens of megabytes more while it serves somebody's download, and gives them back afterwards unless they leak.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.node.resources import usage
from tests.chaos.swarm import Swarm

EVERY = 10.0
"""Seconds between two samples."""


@dataclass
class Series:
    """One figure of one process over time: (seconds, value)."""

    process: str
    kind: str
    points: list[tuple[float, float]] = field(default_factory=list)


def growth(points: Sequence[tuple[float, float]]) -> float:
    """By how much a figure has grown from the first point to the last, along the line of least squares."""
    if len(points) < 2:
        return 0.0
    count = len(points)
    middle = sum(at for at, _ in points) / count
    mean = sum(value for _, value in points) / count
    spread = sum((at - middle) ** 2 for at, _ in points)
    if not spread:
        return 0.0
    slope = sum((at - middle) * (value - mean) for at, value in points) / spread
    return slope * (points[-1][0] - points[0][0])


def floors(points: Sequence[tuple[float, float]], width: float = 60.0) -> list[tuple[float, float]]:
    """The least value of each ``width`` seconds, at the middle of them; a last window that is not half full is left
    out, since it may hold nothing but a peak."""
    if not points:
        return []
    start = points[0][0]
    windows: dict[int, list[float]] = {}
    for at, value in points:
        windows.setdefault(int((at - start) / width), []).append(value)
    last = max(windows)
    if len(windows) > 1 and points[-1][0] - start < (last + 0.5) * width:
        del windows[last]
    return [(start + (number + 0.5) * width, min(values)) for number, values in sorted(windows.items())]


def last_two_thirds(points: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """The points of the last two thirds of the time from ``begin`` to ``end``; none unless they cover all of it: a
    process that came later is still filling its caches."""
    start, slack = begin + (end - begin) / 3, 0.1 * (end - begin)
    inside = [(at, value) for at, value in points if start <= at <= end]
    whole = len(inside) >= 5 and points[0][0] <= begin + slack and inside[-1][0] >= end - slack
    return inside if whole else []


class Sampler:
    """Samples all processes of a swarm. A process that is restarted begins series of its own."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.series: dict[tuple[str, str], Series] = {}

    def sample(self, now: float) -> None:
        """One sample of everything that lives."""
        swarm = self._swarm
        folders = {"the temp dir": swarm.lab.temp}
        living = [(node.name, len(node.lives), node.process) for node in swarm.nodes.values()]
        if swarm.bootstrap is not None:
            living.append(("boot", 1, swarm.bootstrap))
        for name, life, process in living:
            if process.popen.poll() is not None:
                continue
            label = name if life == 1 else f"{name} (life {life})"
            folders[label] = process.folder if name != "boot" else swarm.lab.folder / "boot"
            for what, pid in ((label, process.popen.pid), (f"{label} p2pd", _daemon(process.family()))):
                found = usage(pid) if pid else None
                if found is not None:
                    for kind in ("rss", "fds", "threads", "sockets"):
                        self._add(what, kind, now, getattr(found, kind))
        for label, folder in folders.items():
            files, sockets = count_files(folder)
            self._add(label, "files", now, files)
            self._add(label, "unix_sockets", now, sockets)

    def add_their_own(self) -> None:
        """What only the nodes themselves know, asyncio tasks and malloc's use; of those that were never restarted."""
        for node in self._swarm.nodes.values():
            if len(node.lives) == 1:
                for event in node.events:
                    if event["event"] == "resources":
                        for kind, name in (("tasks", "tasks"), ("heap", "heap_used")):
                            if name in event:
                                self._add(node.name, kind, event["time"], event[name])

    def _add(self, process: str, kind: str, now: float, value: float) -> None:
        self.series.setdefault((process, kind), Series(process, kind)).points.append((now, value))


def _daemon(family: dict[int, str]) -> int | None:
    return next((pid for pid, command in family.items() if "p2pd" in command.split(" ")[0]), None)


def count_files(folder: Path) -> tuple[int, int]:
    """Files below ``folder``, and unix sockets. The log of commits has a budget and grows up to it: it is left out."""
    files = sockets = 0
    # Not Path.rglob, which ends with an error where a folder goes while it looks: nodes remove old checkpoints.
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                mode = os.lstat(os.path.join(place, name)).st_mode
            except OSError:
                continue  # gone in between
            if stat.S_ISSOCK(mode):
                sockets += 1
            elif stat.S_ISREG(mode) and os.path.basename(place) != "log":
                files += 1
    return files, sockets
