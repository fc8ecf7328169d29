"""Repair among real processes: replay after a restart, and a download whose donors die and fall silent under it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stretto.node.swarm.host import Host, HostConfig, socket_dir
from stretto.node.swarm.identity import format_peer_id, load_or_create, parse_peer_id
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.repair import Word
from stretto.node.swarm.thread import NetworkThread
from stretto.protocol import snapshot
from stretto.protocol.chain import after
from stretto.protocol.effects import Repair
from tests.integration.donor_process import CHUNK_BYTES
from tests.integration.processes import MARK, Lab, Process, micro_run, no_traceback, until
from tests.node.repair_scene import CHUNKS, CONFIG, NUMEL, Joiner, Net, history

COMMITS = 20
ROOT = Path(__file__).resolve().parents[2]


def peer_of(node: Process) -> bytes:
    (line,) = node.see(r"peer 12D3KooW\w+")
    return parse_peer_id(line.split()[1])


def versions(node: Process) -> int:
    return min(sum(e["fragment"] == f for e in node.events("round") if e["outcome"] == "committed") for f in (0, 1))


def test_a_restarted_peer_catches_up_by_replay(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=120)))
    nodes = sorted(lab.found(invite, 2), key=peer_of)
    stays, victim = nodes  # of two electors the first one commits alone
    until(lambda: versions(victim) >= 2, "two commits of each fragment", logs=lab.logs)
    victim.daemon()
    victim.signal(signal.SIGKILL)
    victim.all_gone()
    before = versions(stays)
    until(lambda: versions(stays) > before, "a commit without it", logs=lab.logs)
    again = lab.join(invite, "again", folder=victim.folder)
    known = len(again.events("round"))  # of its earlier life, in the same file

    def repairs() -> list[dict[str, Any]]:
        return [event for event in again.events("repair") if event["state"] == "done"]

    until(lambda: sum(done["versions"] for done in repairs()) >= 2, "a repair of both fragments", logs=lab.logs)
    until(lambda: [e for e in again.events("round")[known:] if e.get("counted")], "its work counts", logs=lab.logs)
    for fragment in (0, 1):
        own = [done for done in repairs() if done["fragment"] == fragment]
        assert sum(done["own_versions"] for done in own) >= 1, "what it had before costs nothing"
        assert all(done["downloaded_bytes"] == 0 for done in own)
        assert 0 < sum(done["replayed_bytes"] for done in own) < own[0]["state_bytes"]
        assert f"{own[-1]['versions']} version(s) replayed from 0.0" in own[-1]["why"]
    for node in (stays, again):
        no_traceback(node)


# ---------------------------------------------------------------------- donors that die under a download


@dataclass
class DonorProcess:
    """A donor in a process of its own, and what it said."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()

    def address(self) -> dict[str, Any]:
        until(self.lines, "its address", logs=lambda: self.log.with_suffix(".err").read_text(encoding="utf-8"))
        found: dict[str, Any] = json.loads(self.lines()[0])
        return found

    def chunks(self) -> int:
        return self.lines().count("FetchChunk")


@contextmanager
def donors(lab: Lab, count: int, seconds: float) -> Iterator[list[DonorProcess]]:
    started: list[DonorProcess] = []
    mark = {MARK: f"{lab.mark}donor", "TMPDIR": str(lab.temp), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **mark, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    try:
        for index in range(count):
            folder = lab.folder / f"d{index}"
            folder.mkdir()
            log = folder / "out.log"
            command = [
                sys.executable,
                "-m",
                "tests.integration.donor_process",
                str(folder),
                str(COMMITS),
                str(seconds),
            ]
            with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
                popen = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors, cwd=ROOT
                )
            started.append(DonorProcess(popen, log))
        yield started
    finally:
        for donor in started:
            donor.popen.send_signal(signal.SIGCONT)
            assert donor.popen.stdin is not None
            donor.popen.stdin.close()
        for donor in started:
            try:
                donor.popen.wait(20)
            except subprocess.TimeoutExpired:
                donor.popen.kill()
                donor.popen.wait(10)
            lab.remove_sockets(donor.log.parent)


class RealJoiner(Joiner):
    """The peer that is behind, with a daemon of its own in this process."""

    def __init__(self, host: Host, folder: Path, words: list[Word]) -> None:
        super().__init__(Net(folder), timeout=3.0)
        self.repairer._p2p, self._words = host.p2p, words

    def words(self) -> list[Word]:
        return self._words


def test_kill_9_and_stop_of_donors_during_a_download(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", CHUNK_BYTES)
    tip = history(COMMITS)[-1][0].record
    thread = NetworkThread()
    folder = lab.folder / "joiner"
    folder.mkdir()
    me = load_or_create(folder / "identity.key")
    with donors(lab, 3, 0.25) as (dies, stops, healthy):
        place = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=socket_dir(folder))
        host = thread.call(Host.start(me, place, SignedRecords(me, [roster_key(CONFIG.digest())])))
        try:
            ids = []
            for donor in (dies, stops, healthy):
                said = donor.address()
                ids.append(parse_peer_id(said["peer"]))
                assert thread.call(host.connect(ids[-1], said["addresses"]))
            words = [Word(peer=peer, weight=after(tip).weight) for peer in ids]

            async def make() -> RealJoiner:
                return RealJoiner(host, folder, words)

            joiner = thread.call(make())
            joiner.peer.repairing[0] = (ids[0], tip.version)
            repair = thread.start(joiner.repairer.repair(Repair(0, ids[0], "test")))
            until(
                lambda: dies.chunks() >= 2 and stops.chunks() >= 1, "chunks from both", logs=lambda: str(joiner.events)
            )
            dies.popen.kill()
            stops.popen.send_signal(signal.SIGSTOP)
            repair.result(60)
            done = joiner.last()
            assert (done["state"], done["downloaded_bytes"]) == ("done", 8 * NUMEL), joiner.events
            assert joiner.peer.tips()[0].head == tip.head()
            assert joiner.peer.diloco.fragments[0].record is not None
            assert healthy.chunks() < CHUNKS, "what came from the others is not fetched again"
            assert not [event for event in joiner.of("fault") if event["peer"] == format_peer_id(ids[2])]
            joiner.repairer.close()
            joiner.log.close()
        finally:
            thread.call(host.close())
            thread.close()
