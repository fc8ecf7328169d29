"""The log of commits on disk: what is written is read back, whatever is torn, foreign or over budget is not."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from stretto.node.swarm import chainlog
from stretto.node.swarm.chainlog import MAX_VERSIONS, SUFFIX, ChainLog, write_whole
from stretto.protocol.chain import CommitRecord, Member, Part, SignedRecord
from stretto.protocol.digest import digest, payload_digest
from stretto.protocol.messages import MAX_RECORDS
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id

RUN = digest("run", [b"log"])
START = digest("test", [b"genesis"])


def commit(
    version: int, prev: bytes, *, fragment: int = 0, run: bytes = RUN, size: int = 100, parts: bool = False
) -> tuple[SignedRecord, dict[bytes, bytes]]:
    """A commit of two members, and its bytes."""
    payloads = [random.Random(f"{fragment} {version} {i} {prev.hex()}").randbytes(size) for i in range(2)]
    digests = [payload_digest(data) for data in payloads]
    members = tuple(Member(peer_id(i), 5, d) for i, d in sorted(enumerate(digests), key=lambda pair: peer_id(pair[0])))
    record = CommitRecord(
        run=run, fragment=fragment, round=2 * version + fragment, version=version, prev=prev, members=members,
        electors=tuple(member.peer for member in members), state=digest("test", [prev]), tokens_total=10 * version,
        clock=Clock(2 * version + fragment + 1, float(version), 1.0), coordinator=peer_id(0),
        parts=tuple(Part(10 * (i + 1), d) for i, d in enumerate(digests)) if parts else (),
    )  # fmt: skip
    return SignedRecord(record, bytes(64)), dict(zip(digests, payloads, strict=True))


def chain(count: int, *, fragment: int = 0, size: int = 100) -> list[tuple[SignedRecord, dict[bytes, bytes]]]:
    found, head = [], START
    for version in range(1, count + 1):
        found.append(commit(version, head, fragment=fragment, size=size))
        head = found[-1][0].record.head()
    return found


def open_log(folder: Path, *, budget: int = 10**9, said: list[str] | None = None, **options: object) -> ChainLog:
    warn: Callable[[str], None] = (said if said is not None else []).append
    return ChainLog(folder, run=RUN, budget=budget, warn=warn, **options)  # type: ignore[arg-type]


def fill(log: ChainLog, commits: list[tuple[SignedRecord, dict[bytes, bytes]]]) -> None:
    for signed, payloads in commits:
        log.append(signed.record.fragment, signed, payloads)
        log.flush(30)


def test_records_and_bytes_come_back_before_and_after_they_are_written(tmp_path: Path) -> None:
    commits = chain(5)
    log = open_log(tmp_path)
    for signed, payloads in commits:
        log.append(0, signed, payloads)
    for _ in ("waiting", "on disk", "after a restart"):
        assert log.after(0, START) == [signed for signed, _ in commits]
        assert log.after(0, commits[2][0].record.head()) == [commits[3][0], commits[4][0]]
        assert log.after(0, commits[4][0].record.head()) == []
        assert log.after(0, digest("test", [b"elsewhere"])) is None
        assert log.after(1, START) is None
        for signed, payloads in commits:
            for wanted, data in payloads.items():
                assert log.payload(0, signed.record.version, wanted) == data
        assert log.payload(0, 1, bytes(32)) is None
        assert log.payload(0, 9, next(iter(commits[0][1]))) is None
        log.close()
        log = open_log(tmp_path)
    assert log.nbytes() == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_averages_of_parts_are_kept_in_the_place_of_contributions(tmp_path: Path) -> None:
    signed, payloads = commit(1, START, parts=True)
    log = open_log(tmp_path)
    fill(log, [(signed, payloads)])
    assert log.after(0, START) == [signed]
    assert [log.payload(0, 1, part.payload) for part in signed.record.parts] == list(payloads.values())


def test_two_members_with_the_same_bytes_are_kept_once(tmp_path: Path) -> None:
    signed, payloads = commit(1, START)
    same = tuple(Member(member.peer, 5, signed.record.members[0].payload) for member in signed.record.members)
    record = CommitRecord(**{**vars(signed.record), "members": same})
    log = open_log(tmp_path)
    fill(log, [(SignedRecord(record, bytes(64)), {same[0].payload: payloads[same[0].payload]})])
    log.close()
    again = open_log(tmp_path)
    assert again.payload(0, 1, same[0].payload) == payloads[same[0].payload]
    assert again.nbytes() < 1000


def test_the_budget_holds_over_all_fragments_and_the_oldest_rounds_go_first(tmp_path: Path) -> None:
    zero, one = chain(10, size=5000), chain(10, fragment=1, size=5000)
    log = open_log(tmp_path, budget=100_000)
    for pair in zip(zero, one, strict=True):
        fill(log, list(pair))
        assert log.nbytes() <= 100_000
    log.flush(30)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == log.nbytes() > 80_000
    assert log.kept(0) == [7, 8, 9, 10] or log.kept(0) == [6, 7, 8, 9, 10]
    assert log.kept(1)[-1] == 10
    assert abs(len(log.kept(0)) - len(log.kept(1))) <= 1
    log.close()
    smaller = open_log(tmp_path, budget=50_000)
    assert smaller.nbytes() <= 50_000
    assert smaller.kept(0)[-1] == smaller.kept(1)[-1] == 10


def test_the_versions_of_a_fragment_are_bounded(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, chain(MAX_VERSIONS + 3, size=1))
    assert log.kept(0) == list(range(4, MAX_VERSIONS + 4))
    assert log.after(0, START) is None
    head = chain(4, size=1)[3][0].record.head()
    assert len(log.after(0, head) or []) == MAX_RECORDS


def test_zero_switches_it_off_and_leaves_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, chain(2))
    log.close()
    said: list[str] = []
    off = open_log(tmp_path, budget=0, said=said)
    fill(off, chain(3))
    assert list(tmp_path.iterdir()) == []
    assert off.after(0, START) is None
    assert said == []


def test_a_budget_below_one_commit_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = open_log(tmp_path, budget=50, said=said)
    fill(log, chain(3))
    assert len(said) == 1
    assert said[0].startswith("--log-budget is 50 bytes, less than one commit's ")
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_does_not_follow_begins_the_log_anew(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, chain(3))
    gap = commit(7, digest("test", [b"downloaded"]))
    fill(log, [gap])
    log.flush(30)
    assert log.kept(0) == [7]
    assert len(list(tmp_path.iterdir())) == 1
    log.forget(0)
    log.flush(30)
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_at_any_byte_is_dropped_with_one_line(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    commits = chain(3, size=40)
    fill(log, commits)
    log.close()
    last = max(tmp_path.iterdir())
    whole = last.read_bytes()
    for length in range(len(whole)):
        last.write_bytes(whole[:length])
        said: list[str] = []
        again = open_log(tmp_path, said=said)
        again.close()
        assert again.kept(0) == [1, 2], length
        assert said == [f"1 unfinished, damaged or outdated file(s) were removed from {tmp_path}"]
        assert not last.exists()


def test_what_no_commit_can_be_is_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, chain(3))
    log.close()
    (tmp_path / f"0000-x{SUFFIX}").write_bytes(os.urandom(500))
    (tmp_path / f"0001-x{SUFFIX}").write_bytes(b"stretto\x01\xff\xff\xff\xff" + bytes(100))
    (tmp_path / f"0002-x{SUFFIX}.new").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    other = open_log(tmp_path / "other")
    signed, payloads = commit(1, START, run=digest("run", [b"another"]))
    fill(other, [(signed, payloads)])
    (file,) = (tmp_path / "other").iterdir()
    file.rename(tmp_path / f"0003-x{SUFFIX}")
    said: list[str] = []
    again = open_log(tmp_path, said=said)
    assert said == [f"4 unfinished, damaged or outdated file(s) were removed from {tmp_path}"]
    assert again.kept(0) == [1, 2, 3]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_hole_in_the_chain_costs_what_came_before_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, chain(5))
    log.close()
    sorted(tmp_path.iterdir())[1].unlink()
    assert open_log(tmp_path).kept(0) == [3, 4, 5]


def test_bytes_that_changed_on_disk_are_never_handed_out(tmp_path: Path) -> None:
    log, said = open_log(tmp_path), []
    commits = chain(4)
    fill(log, commits)
    log._warn = said.append  # type: ignore[method-assign]
    path = sorted(tmp_path.iterdir())[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert log.payload(0, 2, commits[1][0].record.payloads()[1]) is None
    assert said == [f"{path} is damaged and left out of the chain log, with the commits before it"]
    assert log.kept(0) == [3, 4]
    assert log.payload(0, 3, commits[2][0].record.payloads()[1]) is not None


class FullDisk:
    """Writes until it is full."""

    def __init__(self) -> None:
        self.full, self.error = False, errno.ENOSPC

    def __call__(self, path: Path, parts: Iterable[bytes]) -> None:
        if self.full:
            raise OSError(self.error, os.strerror(self.error))
        write_whole(path, parts)


def test_a_full_disk_costs_the_log_and_one_line_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, said = FullDisk(), []
    log = open_log(tmp_path, said=said, write=disk)
    commits = chain(8)
    fill(log, commits[:2])
    room = {"free": 0}
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), room))
    disk.full = True
    fill(log, commits[2:5])
    assert len(said) == 1
    assert said[0].startswith(f"the chain log cannot be written to {tmp_path}: No space left on device.")
    assert "--log-budget" in said[0]
    assert log.kept(0) == []  # what came before the gap leads nowhere
    disk.full, room["free"] = False, 10**9
    fill(log, commits[5:])
    assert said[1:] == [f"the chain log in {tmp_path} is written again"]
    assert log.kept(0) == [6, 7, 8]
    assert sorted(path.name[5:17] for path in tmp_path.iterdir()) == [f"{v:012}" for v in (6, 7, 8)]


def test_a_log_that_fills_the_disk_gives_half_of_it_back(tmp_path: Path) -> None:
    def small(path: Path, parts: Iterable[bytes]) -> None:
        size = sum(map(len, parts))
        if size + sum(file.stat().st_size for file in tmp_path.iterdir()) > 60_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, parts)

    said: list[str] = []
    log = open_log(tmp_path, said=said, write=small)
    fill(log, chain(40, size=2000))
    assert len(said) == 1
    assert said[0].startswith(f"the disk of {tmp_path} is full: the chain log keeps to ")
    assert 20_000 < log.nbytes() < 30_000
    assert log.kept(0)[-1] == 40
    log.close()
    assert open_log(tmp_path).kept(0) == log.kept(0)


def test_a_failing_disk_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, said = FullDisk(), []
    log = open_log(tmp_path, said=said, write=disk)
    commits = chain(4)
    disk.full, disk.error = True, errno.EIO
    fill(log, commits[:1])
    disk.full = False
    fill(log, commits[1:2])
    assert log.kept(0) == []
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    fill(log, commits[2:])
    assert log.kept(0) == [3, 4]
    assert [line.split(":")[0] for line in said] == [
        f"the chain log cannot be written to {tmp_path}",
        f"the chain log in {tmp_path} is written again",
    ]


def test_a_folder_that_cannot_be_made_does_not_end_the_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    log = open_log(tmp_path / "file" / "log", said=said)
    fill(log, chain(2))
    assert len(said) == 1
    assert log.after(0, START) is None


def test_a_disk_slower_than_the_rounds_loses_commits_and_not_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chainlog, "MAX_WAITING", 5000)
    go, writing, said = threading.Event(), threading.Event(), []

    def slow(path: Path, parts: Iterable[bytes]) -> None:
        writing.set()
        go.wait(60)
        write_whole(path, parts)

    log = open_log(tmp_path, said=said, write=slow)
    commits = chain(20)
    log.append(0, *commits[0])
    assert writing.wait(30)
    began = time.monotonic()
    for signed, payloads in commits[1:-2]:
        log.append(0, signed, payloads)
    assert time.monotonic() - began < 5
    assert 5000 < log._queued < 6000
    assert log.kept(0) == []  # there is a gap now
    assert len(said) == 1
    assert said[0].startswith(f"the disk of {tmp_path} is slower than the rounds")
    go.set()
    log.flush(30)
    fill(log, commits[-2:])
    log.close()
    assert open_log(tmp_path).kept(0) == [19, 20]


WRITER = """
    import sys
    from pathlib import Path
    from tests.node.test_chainlog import chain, open_log
    log = open_log(Path(sys.argv[1]))
    commits = chain(400, size=20_000)
    print("ready", flush=True)
    for signed, payloads in commits:
        log.append(0, signed, payloads)
        log.flush(30)
"""


def test_kill_9_at_any_moment_leaves_a_whole_chain(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    heads = [START, *(signed.record.head() for signed, _ in chain(400, size=20_000))]
    pauses = random.Random(5)
    for life in range(4):
        folder = tmp_path / str(life)
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(pauses.random() * 0.1)
            process.send_signal(signal.SIGKILL)
        log = open_log(folder)
        kept = log.kept(0)
        first = kept[0] if kept else 1  # above 1 where more was written than the log keeps
        assert kept == list(range(first, first + len(kept)))
        if kept:
            records = log.after(0, heads[first - 1]) or []
            assert [signed.record.head() for signed in records] == heads[first : first + len(records)]
            assert records
            for version in kept:
                record = (log.after(0, heads[version - 1]) or [])[0].record
                assert all(log.payload(0, version, wanted) is not None for wanted in record.payloads())
        assert not list(folder.glob("*.new"))
