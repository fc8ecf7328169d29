"""What a running node or bootstrap peer says of itself, in a small file in its data dir: for health checks.

A container's health check and a service manager ask every few seconds, so the answer must cost little: the process
writes ``status.json`` from its network loop, whole or not at all, and ``stretto status`` without an invite reads it
and opens no connection. A file that is not renewed tells that the process hangs or is gone, however it went.

The file: ``time`` (seconds since 1970), ``pid``, ``version``, ``peer`` (its id), ``role`` (``node`` or ``bootstrap``)
and ``state``; then ``doing`` in words, ``addresses`` that are announced, and ``swarm``, the same summary as that of
`stretto status INVITE`, as this process sees it, itself included.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.node.version import VERSION
from stretto.protocol.errors import ConfigError, StrettoError

EVERY = 5.0
"""Seconds between two writings."""

FRESH = 60.0
"""Seconds after which a file that was not renewed tells that nobody is there. A loop that a busy machine holds up for
some seconds is no failure."""

WELL = ("ready", "joining", "training", "finished", "serving")
"""States of a process that does its work. Before these it is ``starting``, after them ``leaving`` or ``ended``."""

NAME = "status.json"


class NotWell(StrettoError):
    """The process that was asked about is not there, or does not do its work; the message says which."""


@dataclass
class StatusFile:
    """Writes the file of one process. A disk that cannot be written is no reason to stop: the file is then stale."""

    data_dir: Path
    role: str
    peer: str
    tell: Callable[[], Mapping[str, Any]]
    """The fields of the moment, ``state`` among them; called in the loop. Replaced as the process comes along."""

    def write(self, **more: Any) -> None:
        """Write the file with ``more`` fields, which must be JSON values."""
        fields = {
            "time": round(time.time(), 3),
            "pid": os.getpid(),
            "version": VERSION,
            "role": self.role,
            "peer": self.peer,
            **more,
        }
        path = self.data_dir / NAME
        new = path.with_name(NAME + ".new")
        try:
            new.write_text(json.dumps(fields, separators=(",", ":")) + "\n", encoding="utf-8")
            new.replace(path)
        except OSError:
            return

    async def keep(self, *, every: float = EVERY) -> None:
        """Write the file every so many seconds until cancelled."""
        while True:
            self.write(**self.tell())
            await asyncio.sleep(every)


def read_status(data_dir: Path) -> dict[str, Any]:
    """The status in ``data_dir``, with ``age`` in seconds. NotWell if there is none, ConfigError if it is damaged."""
    path = data_dir / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["age"] = round(max(0.0, time.time() - found["time"]), 1)
        found["state"], found["role"], found["peer"] = (str(found[name]) for name in ("state", "role", "peer"))
    except FileNotFoundError:
        raise NotWell(
            f"no node or bootstrap peer has run with the data dir {data_dir}: there is no {NAME} in it. Name another "
            "one with --data-dir, or give an invite to look at a swarm"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is damaged; it is written anew every {EVERY:.0f} s by the process it belongs to"
        ) from None
    return dict(found)


def check_well(status: Mapping[str, Any], *, fresh: float = FRESH) -> None:
    """NotWell, in words, unless the process with this status is there and does its work."""
    name = f"the {status['role']} {status['peer'][-8:]}"
    if status["state"] == "ended":
        raise NotWell(f"{name} has ended, {status['age']:.0f} s ago")
    if status["age"] > fresh:
        raise NotWell(
            f"{name} has not renewed its status for {status['age']:.0f} s (it was {status['state']!r}, process "
            f"{status.get('pid')}): it was killed, or it hangs"
        )
    if status["state"] not in WELL:
        raise NotWell(f"{name} is {status['state']}: {status.get('doing', '')}".rstrip(": "))


def in_words(status: Mapping[str, Any]) -> str:
    """The status for people: one line for the process, one for each peer that it knows."""
    swarm = status.get("swarm") or {}
    lines = [
        f"{status['role']} {status['peer'][-8:]}, {status['state']}, {status['age']:.0f} s ago"
        + (f": {status['doing']}" if status.get("doing") else "")
    ]
    for member in swarm.get("members", ()):
        lines.append(f"  knows {member['peer'][-8:]}  {member['state']:<9} step {member['step']:>7}")
    return "\n".join(lines)
