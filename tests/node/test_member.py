"""A peer that joins: what it tells the roster, people and the metrics while the run's state comes."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stretto.node.swarm.inflow import Amount
from stretto.node.swarm.known_peers import KnownPeers
from stretto.node.swarm.member import Member, Progress
from stretto.protocol.errors import ConfigError
from stretto.protocol.roster import PeerRecord
from stretto.protocol.schedule import Clock

MB = 1_000_000


def record(versions: tuple[int, ...], clock: Clock | None) -> PeerRecord:
    return PeerRecord(
        version="1", state="training", addresses=(), client_mode=False, rate=1.0, step=0, loss=0.0, tau=1, tokens=0,
        clock=clock, versions=versions, chain_tokens=(0,) * len(versions), last_tokens=(0,) * len(versions),
        heads=bytes(32),
    )  # fmt: skip


class Scene:
    """A member whose network is a few attributes."""

    def __init__(self) -> None:
        self.versions, self.amount = [0, 0], Amount(0, 0, 0)
        self.clock: Clock | None = None
        self.peers: dict[bytes, PeerRecord] = {}
        self.looked = asyncio.Event()
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        settled = asyncio.Event()
        settled.set()
        scene = self

        class FakePeer:
            fragments = 2
            resting = None

            @property
            def clock(self) -> Clock | None:
                return scene.clock

            def tips(self) -> list[Any]:
                return [SimpleNamespace(fragment=f, version=v) for f, v in enumerate(scene.versions)]

        class FakeRoster:
            read_at = 1.0

            @property
            def peers(self) -> dict[bytes, PeerRecord]:
                return scene.peers

            def nudge(self) -> None:
                scene.looked.set()

        exchange = SimpleNamespace(peer=FakePeer(), fetched=lambda behind: self.amount, joined=lambda: 3)
        self.member = Member(
            host=cast(Any, None), exchange=cast(Any, exchange), roster=cast(Any, FakeRoster()), progress=Progress(),
            bootstraps=[], known=cast(KnownPeers, None), time=cast(Any, SimpleNamespace(settled=settled)),
            say=self.events.append, tell=self.lines.append,
        )  # fmt: skip

    async def turns(self, count: int) -> None:
        """Let it look so many more times."""
        for _ in range(count):
            self.looked.clear()
            await self.looked.wait()


def test_who_downloads_is_joining_says_how_far_it_is_and_then_trains() -> None:
    async def run() -> Scene:
        scene = Scene()
        waiting = asyncio.ensure_future(scene.member.await_start(new_run=False, start_peers=1))
        await scene.turns(2)
        assert scene.member.progress.state == "ready"
        scene.clock = Clock(5, 0.0, 10.0)
        scene.peers = {b"a": record((3, 2), scene.clock)}
        scene.amount = Amount(0, 240 * MB, 0)
        await scene.turns(2)
        # In no round, as coordinator or as one that is waited for.
        assert scene.member.progress.state == "joining"
        assert scene.member.waiting_for == "downloading the run's state: 0 of 2 fragments are here"
        scene.amount = Amount(60 * MB, 240 * MB, 3)
        await scene.turns(2)
        assert scene.member.waiting_for.startswith(
            "downloading the run's state: 0 of 2 fragments are here; 60.0 of 240.0 MB from 3 peer(s)"
        )
        scene.versions, scene.amount = [3, 2], Amount(240 * MB, 240 * MB, 0)
        await waiting
        return scene

    scene = asyncio.run(run())
    assert scene.member.waiting_for == ""
    joining, joined = scene.events
    assert (joining["event"], joining["of_bytes"], joining["fragments_left"]) == ("joining", 240 * MB, 2)
    assert (joined["event"], joined["bytes"], joined["peers"]) == ("joined", 240 * MB, 3)
    # A line when a fragment is there; the status line tells what comes in between.
    assert scene.lines[-2] == "downloading the run's state: 0 of 2 fragments are here"
    assert scene.lines[-1].startswith("the run's state is here: 240.0 MB from 3 peer(s) in ")


def test_a_run_without_a_commit_has_nothing_to_download() -> None:
    async def run() -> Scene:
        scene = Scene()
        scene.clock = Clock(0, 0.0, 10.0)
        scene.peers = {b"a": record((0, 0), scene.clock)}
        await asyncio.wait_for(scene.member.await_start(new_run=False, start_peers=1), 5)
        return scene

    scene = asyncio.run(run())
    assert scene.events == []
    assert scene.member.progress.state == "ready"


def test_a_crew_is_waited_for_and_comes_in_the_order_of_ids() -> None:
    async def run(scene: Scene) -> list[bytes]:
        scene.member.host = cast(Any, SimpleNamespace(identity=SimpleNamespace(peer_id_bytes=b"b")))
        waiting = asyncio.ensure_future(scene.member.await_crew(3))
        scene.peers = {b"c": record((0,), None), b"d": replace(record((0,), None), state="joining")}
        await scene.turns(2)
        assert scene.member.waiting_for == "waiting for the others of this lockstep run: 2 of 3 are in sight"
        scene.peers = {b"c": record((0,), None), b"a": replace(record((0,), None), state="ready")}
        return await waiting

    scene = Scene()
    assert asyncio.run(run(scene)) == [b"a", b"b", b"c"]
    assert scene.member.waiting_for == ""


def test_more_peers_than_the_crew_are_refused() -> None:
    async def run() -> None:
        scene = Scene()
        scene.peers = {b"a": record((0,), None), b"c": record((0,), None)}
        await scene.member.await_crew(2)

    with pytest.raises(ConfigError, match="3 peers are in this run, and this node is to train in lockstep with 2"):
        asyncio.run(run())
