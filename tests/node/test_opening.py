"""A real daemon: a start that is given up leaves nothing, and tries to reach a dead peer leave no socket open."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from stretto.node.swarm.host import Host, HostConfig, socket_dir
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.streams import BROKEN, bulk_name, open_stream
from stretto.node.swarm.thread import NetworkThread
from stretto.protocol.simulation import peer_id
from tests.fakes import toy_config

pytestmark = pytest.mark.integration
RUN = toy_config().digest()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_tries_to_reach_a_dead_peer_leave_nothing_open(tmp_path: Path) -> None:
    thread = NetworkThread()
    me = load_or_create(tmp_path / "identity.key")
    place = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=socket_dir(tmp_path))
    host = thread.call(Host.start(me, place, SignedRecords(me, [roster_key(RUN)])))

    async def fails() -> None:
        with pytest.raises(BROKEN):
            async with open_stream(host.p2p, peer_id(7), bulk_name(RUN)):
                raise AssertionError("there is no such peer")

    async def given_up() -> None:
        work = asyncio.ensure_future(host.p2p.call_binary_stream_handler(PeerID(peer_id(8)), bulk_name(RUN)))
        await asyncio.sleep(0)
        await asyncio.sleep(0.005)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, *BROKEN):
            await work

    async def tries() -> tuple[int, int]:
        await fails()
        before = descriptors()
        for _ in range(10):
            await fails()
            await given_up()
        await asyncio.sleep(0.1)
        return before, descriptors()

    try:
        before, after = thread.call(tries())
        assert after <= before + 2
    finally:
        thread.call(host.close())
        thread.close()


def daemons(key: Path) -> list[Path]:
    """The command lines of living processes that name a key file."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone in between
            if str(key).encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.parametrize("daemon", [False, True], ids=["at once", "the daemon runs"])
def test_a_start_that_is_given_up_leaves_no_daemon_no_sockets_and_no_folder(tmp_path: Path, daemon: bool) -> None:
    me = load_or_create(tmp_path / "identity.key")
    folder = socket_dir(tmp_path)
    place = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=folder)

    async def give_up() -> None:
        starting = asyncio.ensure_future(Host.start(me, place, SignedRecords(me, [roster_key(RUN)])))
        await asyncio.sleep(0)
        while daemon and not daemons(me.path):  # noqa: ASYNC110 - nothing tells when it is there
            await asyncio.sleep(0.005)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(give_up())
    assert not folder.exists()
    assert not daemons(me.path)
