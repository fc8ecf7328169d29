"""Locks that keep something on disk to one process of this machine: an identity key, the state of a run.

``flock`` on a file of its own, where the holder leaves its process id. The kernel releases it when the process ends,
however it ends, so a stale file never blocks; the file itself stays, because removing it would let two processes hold
locks on two files of one name.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from stretto.protocol.errors import ConfigError


class ProcessLock:
    """Use it as a context manager, or call ``close``.

    ``of``, ``where`` and ``busy`` are for errors: what is locked, what its folder needs (with ``{uid}``), and what to
    do when another process (``{holder}``) has it.
    """

    def __init__(self, path: Path, *, of: str, where: str, busy: str) -> None:
        """Take the lock, or raise ConfigError that names the file and its holder."""
        self.path = path
        self._handle: int | None = None
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            cure = where.replace("{uid}", str(os.geteuid()))
            raise ConfigError(f"The lock {self.path} {of} cannot be opened: {error.strerror}. {cure}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = _holder(handle)
            os.close(handle)
            raise ConfigError(busy.replace("{holder}", holder)) from error
        except OSError as error:
            os.close(handle)
            raise ConfigError(f"The lock {self.path} {of} is not to be had: {error.strerror}.") from error
        self._handle = handle

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle is not None:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> "ProcessLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_lock(folder: Path) -> ProcessLock:
    """That of the state of a run: two nodes that share a data dir must not write over each other's checkpoints."""
    return ProcessLock(
        folder / "lock",
        of="of the run's state",
        where="The data dir must be writable for user id {uid}; choose another one with --data-dir.",
        busy=f"The state of this run in {folder} is in use by {{holder}}. Each node needs a data dir of its own: stop "
        "that process, or start this one with another --data-dir.",
    )


def _holder(handle: int) -> str:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return f"process {text}" if text.isdigit() else "another process"
