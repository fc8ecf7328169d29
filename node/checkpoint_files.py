"""Checkpoints as folders on disk: each there whole or not at all, and known to be whole before it is used.

    checkpoints/step-000000001200/       one checkpoint, named after the inner step
        *.safetensors                    tensors
        contents.msgpack                 32 bytes digest, then msgpack: names, sizes and digests of the files above,
                                         and all that is not a tensor
    checkpoints/unfinished-...           being written or removed; left over by a kill, gone at the next start
    checkpoints/damaged-step-...         did not pass the checks; removed when a new one is whole

A checkpoint is written under another name, every file and the folder itself are flushed to the disk, and one rename
makes it appear. So a kill at any moment, a full disk or a power cut leave the older ones as they were. Nothing read
here is trusted: sizes are compared before a file is read, and digests before its contents are used.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.node.swarm.folders import flush
from stretto.protocol import wire
from stretto.protocol.digest import DIGEST_BYTES, bulk_digest, check_digest
from stretto.protocol.errors import RemoteProtocolError, StrettoError

CONTENTS = "contents.msgpack"
MAX_CONTENTS = 64 << 20
"""Largest file of contents in bytes: records of 256 fragments with groups of the largest size fit."""

WHOLE, UNFINISHED, DAMAGED = "step-", "unfinished-", "damaged-"
READ = 1 << 20


class Damaged(StrettoError):
    """A checkpoint that is not what was written."""


class NoRoom(StrettoError):
    """The disk has no room for a checkpoint."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: its name, its bytes, their digest."""

    name: str
    nbytes: int
    digest: bytes

    def __post_init__(self) -> None:
        check_digest("digest", self.digest)
        if not self.name or Path(self.name).name != self.name or self.name == CONTENTS or self.nbytes < 0:
            raise ValueError(f"{self.name!r} is not the name of a file in a checkpoint")


@dataclass(frozen=True)
class Table:
    """What a checkpoint consists of, and its contents as bytes of msgpack."""

    files: tuple[FileEntry, ...]
    contents: bytes


class CheckpointFiles:
    """The checkpoints of one run in ``folder``, of which the newest ``keep`` stay. One process at a time."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, the newest first; they may still turn out to be damaged."""
        return sorted((_step_of(path) for path in self._entries(WHOLE)), reverse=True)

    def write(self, step: int, nbytes: int, files: Sequence[tuple[str, Callable[[Path], None]]]) -> "Unfinished":
        """Begin a checkpoint of about ``nbytes``: each file by the function that writes it. NoRoom, OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise NoRoom(f"a checkpoint needs {_mb(nbytes)} MB and {self.folder} has {_mb(free)} MB free")
        unfinished = Unfinished(self, step, self.folder / f"{UNFINISHED}{step:012}")
        shutil.rmtree(unfinished.path, ignore_errors=True)
        unfinished.path.mkdir()
        unfinished.add(files)
        return unfinished

    def read(self, step: int) -> tuple[Path, bytes]:
        """Folder and contents of the checkpoint of ``step``, after every file was checked; Damaged says why not."""
        folder = self.folder / f"{WHOLE}{step:012}"
        try:
            table = _read_table(folder / CONTENTS)
            for entry in table.files:
                _check_file(folder / entry.name, entry)
        except OSError as error:
            name = Path(error.filename or folder).name
            raise Damaged(f"{name} of {folder} cannot be read: {error.strerror}") from None
        return folder, table.contents

    def set_aside(self, step: int) -> None:
        """A damaged checkpoint shall not be mistaken for the newest one again."""
        path = self.folder / f"{WHOLE}{step:012}"
        target = path.with_name(DAMAGED + path.name)
        shutil.rmtree(target, ignore_errors=True)
        with suppress(OSError):  # then it is named again at the next start
            path.rename(target)

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        for path in self._entries(UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)

    def prune(self) -> None:
        """Remove the older checkpoints, and damaged ones."""
        for step in self.steps()[self.keep :]:
            _remove(self.folder / f"{WHOLE}{step:012}")
        for path in self._entries(DAMAGED):
            shutil.rmtree(path, ignore_errors=True)

    def _entries(self, prefix: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.startswith(prefix) and path.is_dir()]
        return [path for path in found if prefix != WHOLE or path.name.removeprefix(WHOLE).isdecimal()]


@dataclass
class Unfinished:
    """A checkpoint that is being written. Either ``finish`` or ``discard`` ends it."""

    owner: CheckpointFiles
    step: int
    path: Path

    def add(self, files: Sequence[tuple[str, Callable[[Path], None]]]) -> None:
        """Write files. On any failure nothing of this checkpoint stays."""
        try:
            for name, write in files:
                write(self.path / name)
        except BaseException:
            self.discard()
            raise

    def finish(self, contents: bytes) -> int:
        """Flush all to the disk, let it appear, prune; the bytes that it has. OSError: nothing of it stays."""
        try:
            names = sorted(path.name for path in self.path.iterdir())
            files = tuple(_flushed(self.path / name) for name in names)
            table = wire.pack(wire.to_plain(Table(files, contents)))
            (self.path / CONTENTS).write_bytes(bulk_digest("checkpoint", [table]) + table)
            flush(self.path / CONTENTS)
            flush(self.path)
            target = self.path.with_name(f"{WHOLE}{self.step:012}")
            _remove(target)  # of the same step, from before a resume
            self.path.rename(target)
            flush(target.parent)
        except BaseException:
            self.discard()
            raise
        self.owner.prune()
        return sum(entry.nbytes for entry in files)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


def _remove(path: Path) -> None:
    """A checkpoint goes as it came, by one rename: a kill in between must not leave half of it under its name."""
    aside = path.with_name(f"{UNFINISHED}old-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(WHOLE))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _flushed(path: Path) -> FileEntry:
    flush(path)
    return FileEntry(path.name, path.stat().st_size, bulk_digest("checkpoint", _pieces(path)))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ):
            yield piece


def _check_file(path: Path, entry: FileEntry) -> None:
    size = path.stat().st_size
    if size != entry.nbytes:
        raise Damaged(f"{path} has {size:,} bytes instead of {entry.nbytes:,}")
    if bulk_digest("checkpoint", _pieces(path)) != entry.digest:
        raise Damaged(f"{path} does not have the bytes that were written")


def _read_table(path: Path) -> Table:
    if path.stat().st_size > MAX_CONTENTS + DIGEST_BYTES:
        raise Damaged(f"{path} is too large")
    data = path.read_bytes()
    digest, table = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if bulk_digest("checkpoint", [table]) != digest:
        raise Damaged(f"{path} does not have the bytes that were written")
    try:
        return wire.from_plain(Table, wire.unpack(table, MAX_CONTENTS))
    except RemoteProtocolError as error:
        raise Damaged(f"{path} is not understood: {error.why}") from None
