"""A real bootstrap peer and a real node's host in this process, with their daemons, over loopback."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.bootstrap.server import Bootstrap, BootstrapConfig
from stretto.node.swarm.host import Host, HostConfig, HostError
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import check_run, fetch_run, sign_run
from stretto.node.swarm.streams import bulk_name, open_stream, read_message, write_message
from stretto.node.swarm.thread import NetworkThread
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
