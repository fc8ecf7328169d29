"""A real daemon and peers that nobody can reach: no socket stays open, however the try ends."""

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
