"""The last commits of every fragment on disk, with the bytes they were made from, for peers that have to catch up.

One file per commit, ``log/FRAGMENT-VERSION-HEAD.commit``::

    8 bytes   "stretto" and a format number
    4 bytes   length of the head, big-endian
    head      msgpack: the signed commit record, the length of each payload
    32 bytes  digest of the head
    payloads  in the order in which the record names them, each once

A file is written under another name and renamed, so a kill at any byte leaves either no file or a whole one; what the
machine's own crash leaves (a name without its bytes) shows by its length. At the start whatever is torn, foreign or
not in line with the newest commit is removed, with one line that says so. Nothing read here is trusted: lengths are
bounded before memory is taken, the head and each payload are checked against their digests, and whoever replays a
record checks it like one from the network.

The files of a fragment are one chain without gaps: a commit that does not follow the last one (its state came by
download) begins it anew. All fragments together stay within a budget; the commits of the oldest rounds go first.
Writing happens in a thread of its own, never in a round's path. A disk that is full or fails costs the log, not the
node: one warning, and writing begins again when there is room.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stretto.protocol import wire
from stretto.protocol.chain import SignedRecord
from stretto.protocol.digest import DIGEST_BYTES, digest, payload_digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.messages import MAX_RECORDS

MAGIC = b"stretto\x01"
SUFFIX, UNFINISHED = ".commit", ".new"

MAX_VERSIONS = 256
"""Commits kept of a fragment. With 2 bits per weight and one member 32 already cost as much as the state itself; more
help a peer only after a download that outlasted many rounds."""

MAX_WAITING = 256 << 20
"""Bytes that may wait for the disk, besides the last commit; with a slower disk the log has gaps, not the memory."""

RETRY = 60.0
"""Seconds between two tries to write to a disk that failed for another reason than being full."""

ANSWER_BYTES = wire.MAX_MESSAGE * 3 // 4
"""Records of up to this size go into one answer."""

FULL = (errno.ENOSPC, errno.EDQUOT)

Write = Callable[[Path, Iterable[bytes]], None]


@dataclass(frozen=True)
class LogHead:
    """What a file says of itself before the payloads."""

    signed: SignedRecord
    lengths: tuple[int, ...]

    def payload_digests(self) -> tuple[bytes, ...]:
        """Digests of the payloads, in the order of the file."""
        return tuple(dict.fromkeys(self.signed.record.payloads()))


@dataclass
class _Entry:
    """One commit of the log. ``waiting`` holds what is not on disk yet."""

    fragment: int
    version: int
    round: int
    prev: bytes
    head: bytes
    path: Path
    nbytes: int
    waiting: tuple[LogHead, Mapping[bytes, bytes]] | None = field(default=None, repr=False)


def _entry(head: LogHead, path: Path, nbytes: int) -> _Entry:
    record = head.signed.record
    return _Entry(record.fragment, record.version, record.round, record.prev, record.head(), path, nbytes)


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write ``parts`` to ``path`` so that there is a whole file or none. OSError."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


class ChainLog:
    """The log in ``folder``, of at most ``budget`` bytes; 0 switches it off, and removes what is there.

    ``run`` is the run's digest, ``warn`` takes lines for people, from any thread. All methods may be called from any
    thread; those that say so read the disk.
    """

    def __init__(
        self, folder: Path, *, run: bytes, budget: int, warn: Callable[[str], None], write: Write = write_whole
    ) -> None:
        self._folder, self._run, self._budget, self._warn, self._write = folder, run, budget, warn, write
        self._lock = threading.Lock()
        self._chains: dict[int, list[_Entry]] = {}
        self._off_until: float | None = None
        self._needs = self._queued = 0
        self._slow = self._too_small = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="chainlog")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._turn_off(error, 0)

    # ------------------------------------------------------------------ writing

    def append(self, fragment: int, signed: SignedRecord, payloads: Mapping[bytes, bytes]) -> None:
        """Keep a commit that was installed, with the bytes of ``record.payloads()`` by digest. Never waits."""
        if not self._budget:
            return
        record = signed.record
        kept = {wanted: payloads[wanted] for wanted in record.payloads()}
        head = LogHead(signed, tuple(map(len, kept.values())))
        nbytes = len(MAGIC) + 4 + len(wire.encode(head)) + DIGEST_BYTES + sum(head.lengths)
        path = self._folder / f"{fragment:04}-{record.version:012}-{record.head().hex()[:16]}{SUFFIX}"
        entry = _entry(head, path, nbytes)
        entry.waiting = head, kept
        if nbytes > self._budget and not self._too_small:
            self._too_small = True
            self._warn(f"--log-budget is {self._budget:,} bytes, less than one commit's {nbytes:,}: nothing is logged")
        with self._lock:
            chain = self._chains.setdefault(fragment, [])
            dropped: list[_Entry] = []
            if chain and chain[-1].head != entry.prev:
                dropped, self._chains[fragment] = chain, []
            slow, self._slow = self._slow, self._queued > MAX_WAITING
            if not self._slow:
                self._queued += nbytes
                self._chains[fragment].append(entry)
                dropped += self._surplus()
        self._pool.submit(self._remove, dropped)
        if not self._slow:
            self._pool.submit(self._store, entry)
        elif not slow:
            self._warn(f"the disk of {self._folder} is slower than the rounds: commits are left out of the chain log")

    def forget(self, fragment: int) -> None:
        """The state of ``fragment`` came by another way: the commits kept here lead nowhere."""
        with self._lock:
            dropped = self._chains.pop(fragment, [])
        self._pool.submit(self._remove, dropped)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was appended is on disk, or for ``timeout`` seconds."""
        self._pool.submit(lambda: None).result(timeout)

    def close(self) -> None:
        """Write what waits, and end. Later appends fail."""
        self._pool.shutdown(wait=True)

    def _surplus(self) -> list[_Entry]:
        """Take out of the chains what is over the limits: the lowest versions, of the oldest rounds first."""
        surplus: list[_Entry] = []
        for chain in self._chains.values():
            while len(chain) > MAX_VERSIONS:
                surplus.append(chain.pop(0))
        total = sum(entry.nbytes for chain in self._chains.values() for entry in chain)
        while total > self._budget:
            oldest = min((chain for chain in self._chains.values() if chain), key=lambda chain: chain[0].round)
            surplus.append(oldest.pop(0))
            total -= surplus[-1].nbytes
        return surplus

    # ------------------------------------------------------------------ the writing thread

    def _store(self, entry: _Entry) -> None:
        with self._lock:
            self._queued -= entry.nbytes
            waiting = entry.waiting
            wanted = any(other is entry for other in self._chains.get(entry.fragment, ()))
        if waiting is None or not wanted:
            return
        head, payloads = waiting
        try:
            if not self._is_on(entry.nbytes):
                raise OSError(errno.ENOSPC, "still off")
            data = wire.encode(head)
            self._folder.mkdir(parents=True, exist_ok=True)
            parts = (MAGIC, len(data).to_bytes(4, "big"), data, digest("chain log", [data]))
            try:
                self._write(entry.path, (*parts, *payloads.values()))
            except OSError as error:
                if error.errno not in FULL or not self._shrink(entry):
                    raise
                self._write(entry.path, (*parts, *payloads.values()))
        except OSError as error:
            self._lose(entry)
            self._turn_off(error, entry.nbytes)
        else:
            with self._lock:
                entry.waiting = None
                gone = not any(other is entry for other in self._chains.get(entry.fragment, ()))
            if gone:
                self._remove([entry])

    def _shrink(self, entry: _Entry) -> bool:
        """The disk is full: give half of what the log has back to it, and keep to the other half from now on."""
        with self._lock:
            written = sum(e.nbytes for chain in self._chains.values() for e in chain if e.waiting is None)
            if written // 2 < 2 * entry.nbytes:
                return False
            self._budget = written // 2
            dropped = self._surplus()
        self._remove(dropped)
        self._warn(f"the disk of {self._folder} is full: the chain log keeps to {self._budget:,} bytes from now on")
        return True

    def _is_on(self, nbytes: int) -> bool:
        """Whether writing may be tried: there is room again on a full disk, or some time has passed."""
        if self._off_until is None:
            return True
        if self._needs:
            ready = shutil.disk_usage(self._folder).free >= 2 * max(nbytes, self._needs)
        else:
            ready = time.monotonic() >= self._off_until
        if not ready:
            return False
        self._off_until, self._needs = None, 0
        self._warn(f"the chain log in {self._folder} is written again")
        return True

    def _turn_off(self, error: OSError, nbytes: int) -> None:
        if self._off_until is not None:
            return
        full = error.errno in FULL
        self._off_until, self._needs = time.monotonic() + RETRY, max(1, nbytes) if full else 0
        self._warn(
            f"the chain log cannot be written to {self._folder}: {error.strerror}. Training goes on; peers that are "
            "behind will download whole states from here until it can be. "
            + ("Make room on that disk, or set a smaller --log-budget" if full else "Check the disk and its rights")
        )

    def _lose(self, entry: _Entry) -> None:
        """An entry that could not be written: what follows it stays, what comes before it leads nowhere."""
        with self._lock:
            chain = self._chains.get(entry.fragment, [])
            place = next((i for i, other in enumerate(chain) if other is entry), None)
            dropped = [] if place is None else chain[:place]
            if place is not None:
                del chain[: place + 1]
        self._remove(dropped)

    def _remove(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            _unlink(entry.path)

    # ------------------------------------------------------------------ reading

    def after(self, fragment: int, head: bytes) -> list[SignedRecord] | None:
        """Records that follow ``head``, as many as fit into one answer; None if the log does not reach back to it.

        Empty if ``head`` is the last one here. Reads the disk.
        """
        with self._lock:
            chain = list(self._chains.get(fragment, ()))
        if not chain:
            return None
        if chain[-1].head == head:
            return []
        start = next((i for i, entry in enumerate(chain) if entry.prev == head), None)
        if start is None:
            return None
        records: list[SignedRecord] = []
        size = 0
        for entry in chain[start : start + MAX_RECORDS]:
            found = self._head(entry)
            size += 0 if found is None else len(wire.encode(found.signed))
            if found is None or (size > ANSWER_BYTES and records):
                break
            records.append(found.signed)
        return records or None

    def payload(self, fragment: int, version: int, wanted: bytes) -> bytes | None:
        """The bytes with digest ``wanted`` behind the commit of ``version``, None if they are not here. Reads disk."""
        with self._lock:
            entry = next((e for e in self._chains.get(fragment, ()) if e.version == version), None)
            waiting = entry.waiting if entry else None
        if entry is None:
            return None
        if waiting is not None:
            return waiting[1].get(wanted)
        found = self._head(entry)
        if found is None or wanted not in found.payload_digests():
            return None
        place = found.payload_digests().index(wanted)
        start = len(MAGIC) + 4 + len(wire.encode(found)) + DIGEST_BYTES + sum(found.lengths[:place])
        try:
            with entry.path.open("rb") as file:
                file.seek(start)
                data = file.read(found.lengths[place])
        except OSError:
            data = b""
        if payload_digest(data) == wanted:
            return data
        self._damaged(entry)
        return None

    def kept(self, fragment: int) -> list[int]:
        """Versions of ``fragment`` that are here."""
        with self._lock:
            return [entry.version for entry in self._chains.get(fragment, ())]

    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return sum(entry.nbytes for chain in self._chains.values() for entry in chain)

    def _head(self, entry: _Entry) -> LogHead | None:
        """What the file of ``entry`` says of itself; a damaged one costs the commits up to it."""
        waiting = entry.waiting
        if waiting is not None:
            return waiting[0]
        found = read_head(entry.path)
        if found is None or found.signed.record.head() != entry.head:
            self._damaged(entry)
            return None
        return found

    def _damaged(self, entry: _Entry) -> None:
        if entry.path.exists():  # not if it was removed between the look at the table and the one at the disk
            self._warn(f"{entry.path} is damaged and left out of the chain log, with the commits before it")
        self._lose(entry)
        _unlink(entry.path)

    # ------------------------------------------------------------------ start

    def _open(self) -> None:
        """Read what an earlier life left; what is no whole chain is removed."""
        found: dict[int, list[_Entry]] = {}
        dropped = 0
        for path in _files(self._folder):
            entry = None if path.name.endswith(UNFINISHED) or not self._budget else self._read_entry(path)
            if entry is None:
                _unlink(path)
                dropped += 1
            else:
                found.setdefault(entry.fragment, []).append(entry)
        for fragment, entries in found.items():
            entries.sort(key=lambda entry: (entry.version, entry.head))
            chain = [entries.pop()]
            while entries:
                entry = entries.pop()
                if entry.head == chain[0].prev and entry.version + 1 == chain[0].version:
                    chain.insert(0, entry)
                else:
                    _unlink(entry.path)
                    dropped += 1
            self._chains[fragment] = chain
        self._remove(self._surplus())
        if dropped and self._budget:
            self._warn(f"{dropped} unfinished, damaged or outdated file(s) were removed from {self._folder}")

    def _read_entry(self, path: Path) -> _Entry | None:
        head = read_head(path)
        if head is None or head.signed.record.run != self._run:
            return None
        return _entry(head, path, path.stat().st_size)


def read_head(path: Path) -> LogHead | None:
    """What a file of the log says of itself, None unless it is whole as far as its length tells."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + 4)
            size = int.from_bytes(start[len(MAGIC) :], "big")
            if start[: len(MAGIC)] != MAGIC or len(start) != len(MAGIC) + 4 or size > wire.MAX_MESSAGE:
                return None
            data, checksum = file.read(size), file.read(DIGEST_BYTES)
            length = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if checksum != digest("chain log", [data]):
        return None
    try:
        head = wire.decode(LogHead, data)
    except RemoteProtocolError:
        return None
    whole = len(MAGIC) + 4 + size + DIGEST_BYTES + sum(head.lengths)
    sound = len(head.lengths) == len(head.payload_digests()) and min(head.lengths, default=0) >= 0
    return head if sound and length == whole else None


def _files(folder: Path) -> Iterator[Path]:
    """The log's own files in ``folder``; anything else that lies there is left alone."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith((SUFFIX, SUFFIX + UNFINISHED)) and path.is_file() and not path.is_symlink():
            yield path


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # it is out of the table; the next start tries again
