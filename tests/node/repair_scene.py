"""Peers that repair from each other over real asyncio streams in one event loop, without a daemon.

``Net`` stands in for the daemon's client: it connects a stream to a donor by a pair of unix sockets, and lets donors
die, fall silent or lie. The donor and the repairer are the real ones.
"""

import asyncio
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.donor import REQUESTS, Donor, Stream
from stretto.node.swarm.line import Line
from stretto.node.swarm.repair import Repairer, Word
from stretto.node.swarm.streams import BROKEN, read_message
from stretto.node.swarm.transfer import Traffic
from stretto.protocol import messages as m
from stretto.protocol.chain import SignedRecord
from stretto.protocol.config import WireConfig
from stretto.protocol.digest import digest
from stretto.protocol.effects import Repair, Work
from stretto.protocol.peer import Peer
from stretto.protocol.replay import recompute
from stretto.protocol.rounds import Rules
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo
from tests.fakes import toy_config

NUMEL = 8000
CHUNKS = 16
"""With chunks of 4000 bytes."""
CONFIG = dataclasses.replace(toy_config(fragments=1), wire=WireConfig(up="e3m0", down="int8"))
START = np.linspace(-1, 1, NUMEL, dtype=np.float32)
FOUNDER = peer_id(99)

Hook = Callable[[Any], Awaitable[None]]


def sign(peer: bytes, message: bytes) -> bytes:
    return digest("test sign", [peer, message]) * 2


def make_peer(me: bytes, start: np.ndarray = START) -> Peer:
    rules = Rules(inner_steps=20, fragments=1, min_group=1, max_group=3, window=3.0)
    peer = Peer(
        me=me, config=CONFIG, diloco=StreamingDiLoCo(CONFIG, [start]), rules=rules,
        sign=lambda text: sign(me, text), verify=lambda who, text, s: s == sign(who, text),
    )  # fmt: skip
    peer.adopt_clock(Clock(0, 0.0, 10.0))
    peer.set_roster((), ())
    return peer


Commit = tuple[SignedRecord, dict[bytes, bytes]]


def commit(peer: Peer, seed: int, tokens: int = 100) -> Commit:
    """A round that ``peer`` commits alone, and the bytes behind it."""
    state = peer.diloco.fragments[0]
    peer.diloco.trained(tokens)
    noise = np.random.default_rng(seed).normal(scale=0.1, size=NUMEL).astype(np.float32)
    contribution = peer.diloco.leave(0, state.anchor - noise)
    round = state.record.record.round + 1 if state.record else 0
    (work,) = peer.depart(round, contribution, rate=1.0, patience=5.0, now=10.0 * round)
    assert isinstance(work, Work)
    peer.reduced(work, peer.reduce(work), 10.0 * round)
    peer.diloco.take_result(0)
    assert state.record is not None
    return state.record, {contribution.digest: contribution.payload}


def history(count: int, seed: int = 0, tokens: int = 100) -> list[Commit]:
    """The commits of a run that ``FOUNDER`` began."""
    founder = make_peer(FOUNDER)
    return [commit(founder, seed + index, tokens) for index in range(count)]


class ScriptedDonor(Donor):
    """A donor that a test may interfere with: ``hook(request)`` runs before each answer."""

    hook: Hook | None = None
    asked: list[Any]

    async def answer(self, sender: bytes, request: Any, to: Stream) -> None:
        self.asked.append(request)
        if self.hook is not None:
            await self.hook(request)
        await super().answer(sender, request, to)

    def chunks(self) -> list[int]:
        """Indices of the chunks that were asked for."""
        return [request.index for request in self.asked if isinstance(request, m.FetchChunk)]


@dataclass
class Place:
    """One donor: its peer, its log, what it answers with, how it can be reached."""

    peer: Peer
    log: ChainLog
    donor: ScriptedDonor
    reachable: bool = True
    said: tuple[int, int] | None = None
    """Version and tokens that it claims in the roster, where they are not the true ones."""

    def move(self, commits: list[Commit], *, logged: bool = True) -> None:
        """Install further commits, as the rounds would."""
        for signed, payloads in commits:
            self.peer.replayed(signed, recompute(self.peer.diloco, signed.record, payloads))
            self.peer.diloco.take_result(0)
            if logged:
                self.log.append(0, signed, payloads)

    def word(self) -> Word:
        tip = self.peer.tips()[0]
        if self.said is not None:
            version, tokens = self.said
            return Word(peer=self.peer.me, weight=(tokens, tokens, version))
        return Word(peer=self.peer.me, weight=tip.weight)


@dataclass
class Net:
    """All donors, by peer id; it is the repairer's ``p2p``."""

    folder: Path
    places: dict[bytes, Place] = field(default_factory=dict)
    opened: list[bytes] = field(default_factory=list)
    _ends: list[Any] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def log(self, name: str, budget: int = 10**9) -> ChainLog:
        return ChainLog(self.folder / name, run=CONFIG.digest(), budget=budget, warn=print)

    def add(self, index: int, commits: list[Commit], *, logged: bool = True, **options: Any) -> Place:
        """A donor that has seen ``commits``; with ``logged`` it has their bytes too."""
        peer = make_peer(peer_id(index))
        log = self.log(f"donor{index}", 10**9 if logged else 0)
        donor = ScriptedDonor(peer, log, Traffic(), self.in_thread, **options)
        donor.asked = []
        place = Place(peer, log, donor)
        place.move(commits)
        self.places[peer.me] = place
        return place

    async def call_binary_stream_handler(self, peer: Any, _: str) -> tuple[None, Any, Any]:
        """As the daemon's client does it."""
        name = peer.to_bytes()
        self.opened.append(name)
        if not self.places[name].reachable:
            raise ConnectionRefusedError("connection refused")
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        other = await asyncio.open_connection(sock=right)
        self._ends += [writer, other[1]]
        self._tasks.append(asyncio.ensure_future(self._serve(name, *other)))
        return None, reader, writer

    async def _serve(self, name: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request: Any = await read_message(reader, *REQUESTS)
            await self.places[name].donor.serve(peer_id(0), request, Stream(reader, writer, Line().to(peer_id(0))))
        except BROKEN:
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:
            end.close()
        for place in self.places.values():
            place.log.close()
        self._pool.shutdown()


class Joiner:
    """The peer that is behind."""

    def __init__(self, net: Net, *, timeout: float | None = 1.0, log_budget: int = 10**9) -> None:
        self.net, self.peer = net, make_peer(peer_id(0))
        self.log, self.events, self.traffic = net.log("joiner", log_budget), [], Traffic()
        self.repairer = Repairer(
            p2p=net, peer=self.peer, lock=threading.Lock(), log=self.log, words=lambda _: self.words(),
            say=self.events.append, settled=lambda: None, traffic=self.traffic, line=Line(), timeout=timeout,
            randomness=random.Random(1),
        )  # fmt: skip

    def words(self) -> list[Word]:
        return [place.word() for place in self.net.places.values()]

    async def repair(self, source: bytes | None = None) -> dict[str, Any]:
        """One attempt, as the protocol asks for it; its last event."""
        name = source or next(iter(self.net.places))
        self.peer.repairing[0] = (name, self.net.places[name].word().weight[-1])
        await self.repairer.repair(Repair(0, name, "test"))
        assert not self.peer.repairing
        return self.last()

    def last(self) -> dict[str, Any]:
        return self.of("repair")[-1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def has_the_bits_of(self, place: Place) -> bool:
        mine, theirs = (peer.diloco.fragments[0] for peer in (self.peer, place.peer))
        return (mine.anchor.tobytes(), mine.momentum.tobytes(), mine.tip) == (
            theirs.anchor.tobytes(),
            theirs.momentum.tobytes(),
            theirs.tip,
        )

    def forgive(self) -> None:
        """As if the pause after a failure were over."""
        self.repairer._ledger._next.clear()


def play(folder: Path, scene: Callable[[Net], Awaitable[None]]) -> float:
    """Run ``scene`` in an event loop of its own; the seconds it took."""

    async def run() -> float:
        net = Net(folder)
        began = time.monotonic()
        try:
            await scene(net)
        finally:
            took = time.monotonic() - began
            await net.close()
        return took

    return asyncio.run(run())
