"""A real bootstrap peer and a real node's host in this process, with their daemons, over loopback."""

import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stretto.bootstrap.server import Bootstrap, BootstrapConfig
from stretto.node.doctor import run_doctor
from stretto.node.swarm import runs
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.host import Host, HostConfig, HostError
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import check_run, fetch_run, sign_run
from stretto.node.swarm.streams import bulk_name, open_stream, read_message, write_message
from stretto.node.swarm.thread import NetworkThread
from stretto.node.swarm.time_keeper import TimeKeeper, ask_time
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError, RemoteProtocolError
from stretto.protocol.invite import Invite
from stretto.protocol.roster import PeerRecord
from tests.fakes import toy_config

pytestmark = pytest.mark.integration

RUN: RunConfig = toy_config()


@dataclass
class Scene:
    """One bootstrap peer, one host of a node, and the thread that both live in."""

    thread: NetworkThread
    bootstrap: Bootstrap
    host: Host
    folder: Path

    @property
    def invite(self) -> Invite:
        """The bootstrap peer's invite."""
        return self.bootstrap.invite()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("boot")
    for name in ("operator", "node"):
        (folder / name).mkdir()
    thread = NetworkThread()
    operator, me = (load_or_create(folder / name / "identity.key") for name in ("operator", "node"))
    config = BootstrapConfig(data_dir=folder / "operator", host="127.0.0.1", port=0)
    bootstrap = thread.call(Bootstrap.start(RUN, operator, config))
    place = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=folder / "node" / "run")
    host = thread.call(Host.start(me, place, SignedRecords(me, [roster_key(RUN.digest())])))
    for address in bootstrap.invite().addresses:
        thread.call(host.dial(address))
    yield Scene(thread, bootstrap, host, folder)
    daemons = [host.p2p._child.pid, bootstrap.host.p2p._child.pid]
    thread.call(host.close())
    thread.call(bootstrap.close())
    thread.close()
    for pid in daemons:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [path for path in folder.rglob("*") if path.is_socket()]


def test_the_invite_is_one_word_that_reads_back(scene: Scene) -> None:
    invite = scene.invite
    text = str(invite)
    assert text.startswith("stretto:")
    assert len(text.split()) == 1
    assert Invite.parse(text) == invite
    assert invite.run == RUN.digest()
    assert invite.operator == scene.bootstrap.host.identity.peer_id_bytes
    (address,) = invite.addresses
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert "/tcp/0/" not in address
    assert address.endswith(f"/p2p/{scene.bootstrap.host.identity.peer_id}")


def test_a_node_fetches_the_run_and_checks_it(scene: Scene) -> None:
    signed = scene.thread.call(fetch_run(scene.host, scene.invite))
    assert check_run(signed, scene.invite) == RUN
    assert signed == sign_run(RUN, scene.bootstrap.host.identity)


def test_an_invite_to_another_run_is_refused(scene: Scene) -> None:
    wrong = Invite(bytes(32), scene.invite.operator, scene.invite.addresses)
    with pytest.raises(HostError, match=r"no bootstrap peer has run 0000000000000000 \(.*Is the invite of this run"):
        scene.thread.call(fetch_run(scene.host, wrong))


def test_a_run_of_another_operator_is_refused(scene: Scene) -> None:
    stranger = load_or_create(scene.folder / "stranger.key")
    wrong = Invite(RUN.digest(), stranger.peer_id_bytes, scene.invite.addresses)
    with pytest.raises(HostError, match="not signed by the operator that the invite names"):
        scene.thread.call(fetch_run(scene.host, wrong))


def test_a_bootstrap_peer_with_another_key_leads_to_the_runs_peers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two bootstrap peers the one that is left signs with a key of its own."""
    monkeypatch.setattr(runs, "OTHERS_PAUSE", 0.01)
    stranger = load_or_create(scene.folder / "operator.key")
    invite = Invite(RUN.digest(), stranger.peer_id_bytes, scene.invite.addresses)
    answers, said = [[], [scene.bootstrap.host.identity.peer_id_bytes]], []

    async def others() -> list[bytes]:
        found = answers.pop(0)
        if not answers:
            scene.bootstrap._signed = sign_run(RUN, stranger)  # the peer that is found holds what the operator signed
        return found

    try:
        signed = scene.thread.call(fetch_run(scene.host, invite, others=others, say=said.append))
    finally:
        scene.bootstrap._signed = sign_run(RUN, scene.bootstrap.host.identity)
    assert check_run(signed, invite) == RUN
    assert said == [
        "the bootstrap peers that answer serve this run under another key; asking the run's peers for its config"
    ]

    async def nobody() -> list[bytes]:
        return []

    monkeypatch.setattr(runs, "OTHERS_WAIT", 0.2)
    with pytest.raises(HostError, match="not signed by the operator"):
        scene.thread.call(fetch_run(scene.host, invite, others=nobody))


def test_forged_runs_do_not_pass_the_check(scene: Scene) -> None:
    invite, operator = scene.invite, scene.bootstrap.host.identity
    signed = sign_run(RUN, operator)
    assert check_run(signed, invite) == RUN
    stranger = load_or_create(scene.folder / "forger.key")
    with pytest.raises(RemoteProtocolError, match="not signed by the operator"):
        check_run(sign_run(RUN, stranger), invite)
    with pytest.raises(RemoteProtocolError, match="not signed by the operator"):
        check_run(m.SignedRun(signed.config, operator.peer_id_bytes, bytes(64)), invite)
    with pytest.raises(RemoteProtocolError, match="not the one that the invite names"):
        check_run(sign_run(toy_config(min_size=2), operator), invite)


def test_other_requests_are_answered_with_what_it_has(scene: Scene) -> None:
    async def ask() -> object:
        bootstrap = scene.bootstrap.host.identity.peer_id_bytes
        async with open_stream(scene.host.p2p, bootstrap, bulk_name(RUN.digest())) as (reader, writer):
            await write_message(writer, m.FetchState(0))
            return await read_message(reader)

    assert scene.thread.call(ask()) == m.Missing("a bootstrap peer holds the run config only")


def test_its_time_sets_the_clock_of_who_arrives(scene: Scene) -> None:
    clock = SwarmClock(wall=lambda: time.time() - 3600.0)
    told: list[str] = []
    events: list[dict[str, Any]] = []

    async def take() -> None:
        keeper = TimeKeeper(host=scene.host, run=RUN.digest(), clock=clock, tell=told.append)
        keeper.say = events.append
        await keeper.arrive()
        assert not clock.settled
        await keeper.settle()
        assert clock.settled

    scene.thread.call(take())
    assert abs(clock.now() - scene.bootstrap.clock.now()) < 0.1
    assert clock.correction == pytest.approx(3600.0, abs=0.1)
    assert told == [
        "this machine's clock is 3600.0 s off the swarm's, which is used from now on",
        "WARNING your clock is 3600.0 s behind 1 of 1 peers (or that one's clock is wrong); Stretto corrects for it, "
        "other programs do not: turn on time synchronization (NTP) here",
    ]
    (event,) = events
    assert event["offset"] == pytest.approx(-3600.0, abs=0.1)
    assert (event["agreeing"], event["asked"], event["majority"]) == (1, 1, True)


def test_who_has_not_settled_tells_no_time(scene: Scene) -> None:
    bootstrap, clock = scene.bootstrap.host.identity.peer_id_bytes, SwarmClock()
    ask = functools.partial(ask_time, scene.host.p2p, RUN.digest(), bootstrap, clock)
    scene.bootstrap.clock.settled = False
    try:
        assert scene.thread.call(ask()) is None
    finally:
        scene.bootstrap.clock.settled = True
    sample = scene.thread.call(ask())
    assert sample is not None
    assert abs(sample.offset) <= sample.error + 0.01
    assert 0 < sample.error < 1


def test_the_doctor_compares_the_clocks(scene: Scene, tmp_path: Path) -> None:
    report = run_doctor(
        scene.invite.addresses, data_dir=tmp_path, port=None, device="cpu", timeout=20, run=RUN.digest()
    )
    clock = report.checks[-1]
    assert (clock.name, clock.status) == ("clock", "ok"), report
    assert clock.text.startswith("this machine's clock agrees with 1 of 1 peers (")


def test_a_record_stored_at_the_node_is_read_at_the_bootstrap_peer(scene: Scene) -> None:
    record = PeerRecord(
        version="0.1.0",
        state="training",
        addresses=scene.host.addresses,
        client_mode=False,
        rate=2.0,
        step=3,
        loss=1.5,
        tau=1,
        tokens=30,
        clock=None,
        versions=(1, 0, 0, 0),
        chain_tokens=(30, 0, 0, 0),
        last_tokens=(10, 0, 0, 0),
        heads=bytes(32),
    )
    scene.thread.call(Roster(scene.host, RUN.digest(), lambda: record).renew())
    found = scene.thread.call(scene.bootstrap.roster.read())
    assert found == {scene.host.identity.peer_id_bytes: record}
    line = scene.bootstrap.monitor.line(found)
    assert line.startswith("1 peer(s) training")
    assert scene.host.identity.peer_id[-8:] in line


def test_unreachable_addresses_are_told_apart(scene: Scene) -> None:
    name = scene.bootstrap.host.identity.peer_id
    stranger = load_or_create(scene.folder / "nobody.key").peer_id
    with pytest.raises(HostError, match="is this peer itself"):
        scene.thread.call(scene.host.dial(f"/ip4/127.0.0.1/tcp/4001/p2p/{scene.host.identity.peer_id}"))
    with pytest.raises(ConfigError, match="/p2p/PEER_ID is missing"):
        scene.thread.call(scene.host.dial("/ip4/127.0.0.1/tcp/4001"))
    (address,) = scene.invite.addresses
    elsewhere = address.replace(name, stranger)
    with pytest.raises(HostError) as caught:
        scene.thread.call(scene.host.dial(elsewhere))
    assert str(caught.value).startswith(elsewhere)


def test_while_the_daemon_holds_off_the_first_reason_is_told_again(scene: Scene) -> None:
    stranger = load_or_create(scene.folder / "absent.key").peer_id
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"
    for _ in range(3):
        with pytest.raises(HostError) as caught:
            scene.thread.call(scene.host.dial(dead))
        assert str(caught.value) == f"{dead}: connection refused"
