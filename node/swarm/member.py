"""One peer's life in the swarm, in the network thread: enter, wait for the run to begin, take part, leave."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.node.data.units import UnitKeeper
from stretto.node.lockstep import PATIENCE
from stretto.node.swarm.exchange import Exchange
from stretto.node.swarm.host import Host, dial_all
from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.inflow import Inflow
from stretto.node.swarm.isolation import Isolation, Unanswered
from stretto.node.swarm.known_peers import KnownPeers
from stretto.node.swarm.losses import Losses
from stretto.node.swarm.roster import EXPIRY, Roster, online
from stretto.node.swarm.time_keeper import CALM, EVERY, TimeKeeper
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError
from stretto.protocol.peer import Peer
from stretto.protocol.roster import PeerRecord
from stretto.protocol.schedule import first_clock
from stretto.protocol.unitbook import Heard
from stretto.protocol.units import DataWord

AWAY = ("finished", "leaving")
"""States in which a peer trains no more: others may take its units."""

LINGER = 15.0
"""Seconds that a finished peer stays to serve those who still fetch."""


@dataclass
class Progress:
    """What the training thread tells the roster. Single attributes are replaced, so no lock is needed."""

    state: str = "joining"
    step: int = 0
    loss: float = 0.0
    tokens: int = 0
    tau: int = 0
    rate: float = 0.0


@dataclass
class Member:
    """A peer in a run. ``say`` takes events, ``tell`` lines for people."""

    host: Host
    exchange: Exchange
    roster: Roster
    progress: Progress
    bootstraps: Sequence[str]
    known: KnownPeers
    time: TimeKeeper
    say: Callable[[dict[str, Any]], None]
    tell: Callable[[str], None]
    waiting_for: str = ""
    """What ``await_start`` or ``linger`` waits for, in words."""
    isolation: Isolation = field(default_factory=Isolation)
    unanswered: Unanswered = field(default_factory=Unanswered)
    losses: Losses = field(default_factory=Losses)
    units: UnitKeeper | None = None
    """This node's share of the data; None where nothing is trained on."""
    _dialled: str = ""
    """What the last dialling came to, in words."""
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def enter(self) -> None:
        """Begin to answer peers and to keep the roster."""
        # Who pauses wants to be left alone.
        self.time.trainers = lambda: [peer for peer, r in self.roster.peers.items() if r.state != "paused"]
        self.time.say = self.say
        self.roster.heard = self._hear
        await self.exchange.start()
        loop = asyncio.get_running_loop()
        work = (
            self.roster.keep(),
            self.exchange.keep_limits(),
            self._keep_time(),
            self._stay_connected(),
            self._watch_twin(),
        )
        self._tasks = [loop.create_task(self.exchange.guarded(part)) for part in work]

    async def _keep_time(self) -> None:
        await self.roster.first_read.wait()
        await self.time.keep()

    async def await_start(self, *, new_run: bool, start_peers: int) -> None:
        """Until the run has a clock and this peer has the state of the peers that are ahead."""
        told = ""
        targets: dict[int, int] = {}
        inflow = Inflow()
        self.waiting_for = "measuring this machine's clock against the other peers"
        await self.time.settled.wait()
        while True:
            self.roster.nudge()
            peers = dict(self.roster.peers)
            clock = self.exchange.peer.clock
            ahead = max((max(r.versions, default=0) for r in peers.values() if r.clock is not None), default=0)
            # Who has to download takes part in no round yet: nobody shall wait for it there, nor look to it as the
            # coordinator, which it could not be without a contribution of its own.
            self.progress.state = "joining" if ahead else "ready"
            behind = self._behind(peers, targets)
            inflow.look(self.exchange.fetched(behind), time.monotonic())
            if clock is not None and not behind and self.roster.read_at:
                self.waiting_for = ""
                self._tell_joined(inflow)
                return
            ready = 1 + sum(record.state == "ready" for record in peers.values())
            if clock is None and new_run and not ahead and ready >= start_peers and self.roster.read_at:
                self._found(peers)
                self.waiting_for = ""
                return
            paused = self.exchange.peer.resting
            text = paused or self._why_waiting(peers, behind, new_run=new_run, ready=ready, start_peers=start_peers)
            self.waiting_for = f"{text}; {inflow.words()}" if behind and inflow.amount.donors else text
            if text != told:
                self.tell(self.waiting_for)  # how it goes in between is in the status line
                told = text
            if behind and inflow.entry_due(time.monotonic()):
                self._say_joining(inflow, len(behind))
            await asyncio.sleep(0.3)

    async def await_crew(self, count: int) -> list[bytes]:
        """In lockstep: until all ``count`` peers are in sight; their ids, this one's among them, in order.

        ConfigError if there are more.
        """
        while True:
            others = [peer for peer, record in self.roster.peers.items() if online(record)]
            if len(others) >= count - 1:
                break
            self.waiting_for = (
                f"waiting for the others of this lockstep run: {1 + len(others)} of {count} are in sight"
            )
            self.roster.nudge()
            await asyncio.sleep(0.3)
        self.waiting_for = ""
        if len(others) > count - 1:
            raise ConfigError(
                f"{1 + len(others)} peers are in this run, and this node is to train in lockstep with {count} in all: "
                "give all of them the same --lockstep, and let nobody else join"
            )
        return sorted([*others, self.host.identity.peer_id_bytes])

    def _behind(self, peers: dict[bytes, PeerRecord], targets: dict[int, int]) -> list[int]:
        """The fragments of which others have more than this peer, as they said when that was heard first."""
        tips = self.exchange.peer.tips()
        for record in peers.values():
            for tip, version in zip(tips, record.versions, strict=False):
                if version > tip.version:
                    # The swarm goes on meanwhile; what is committed later comes by the ordinary ways.
                    targets.setdefault(tip.fragment, version)
        return [fragment for fragment, version in targets.items() if tips[fragment].version < version]

    def _say_joining(self, inflow: Inflow, fragments_left: int) -> None:
        amount, left = inflow.amount, inflow.left
        self.say(
            {
                "event": "joining",
                "bytes": amount.have,
                "of_bytes": amount.total,
                "peers": amount.donors,
                "rate": round(inflow.rate),
                "left": None if left is None else round(left, 1),
                "fragments_left": fragments_left,
            }
        )

    def _tell_joined(self, inflow: Inflow) -> None:
        """Once the state is here: what it took. Nothing where nothing had to be fetched."""
        donors, nbytes, seconds = self.exchange.joined(), inflow.amount.have, inflow.seconds
        if nbytes:
            self.tell(
                f"the run's state is here: {nbytes / 1e6:.1f} MB from {donors} peer(s) in {seconds:.0f} s; "
                "training begins"
            )
            self.say({"event": "joined", "bytes": nbytes, "peers": donors, "seconds": round(seconds, 1)})

    def _found(self, peers: dict[bytes, PeerRecord]) -> None:
        rates = [self.progress.rate, *(record.rate for record in peers.values() if record.state == "ready")]
        outer = self.exchange.peer.config.outer
        mean = sum(rates) / len(rates)
        if self.exchange.lockstep is not None:
            clock = self.exchange.lockstep.clock(self.exchange.now())
            self.tell(f"founding the run with {len(rates)} peer(s), in lockstep: rounds depart at inner step counts")
        else:
            clock = first_clock(self.exchange.now(), mean, outer.inner_steps, self.exchange.peer.fragments)
            self.tell(
                f"founding the run with {len(rates)} peer(s): a round every {clock.interval:.1f} s, "
                f"the first in {clock.at - self.exchange.now():.0f} s"
            )
        self.exchange.set_clock(clock)
        self.roster.nudge()

    def _why_waiting(
        self, peers: dict[bytes, PeerRecord], behind: list[int], *, new_run: bool, ready: int, start_peers: int
    ) -> str:
        if behind:
            total = self.exchange.peer.fragments
            have = f"{total - len(behind)} of {total} fragments are here"
            if not peers:
                return (
                    f"waiting for a peer that has the run's state: {have}, and nobody is in sight who has the others"
                )
            return f"downloading the run's state: {have}"
        if new_run:
            return f"waiting for {start_peers - ready} more peer(s): {ready} of {start_peers} are ready"
        if peers:
            return f"waiting for the run to begin: {len(peers)} other peer(s) are here, none has founded it yet"
        return (
            "waiting for other peers: nobody is in this run yet. Its operator founds it by joining once with --new-run"
        )

    def own_record(self, version: str, client_mode: bool) -> PeerRecord:
        """This peer's record as of now."""
        peer: Peer = self.exchange.peer
        tips = peer.tips()
        progress = self.progress
        return PeerRecord(
            version=version,
            state=self._state(),
            addresses=self.host.addresses[:16],
            client_mode=client_mode,
            rate=progress.rate,
            step=progress.step,
            loss=progress.loss,
            tau=progress.tau,
            tokens=progress.tokens,
            clock=peer.clock,
            versions=tuple(tip.version for tip in tips),
            chain_tokens=tuple(tip.tokens_total for tip in tips),
            last_tokens=tuple(tip.tokens_total - tip.tokens_before for tip in tips),
            heads=digest("heads", [tip.head for tip in tips]),
            uncounted=peer.diloco.uncounted(),
            lost=self.losses.tokens,
            data=self._data_word(),
        )

    def _state(self) -> str:
        """Who rests trains on, but nobody shall wait for it in rounds, nor ask it for anything.

        It says so when it is in no round any more: from then on the others reckon with its vote no more.
        """
        peer, state = self.exchange.peer, self.progress.state
        return "paused" if state in ("ready", "training") and peer.resting is not None and not peer.busy() else state

    def _data_word(self) -> DataWord:
        if self.units is None:
            return DataWord()
        state = self.progress.state
        return self.units.word(active=state in ("ready", "training"), clean=state in AWAY)

    def _hear(self, published: PeerRecord | None, ends: float) -> None:
        """After a reading of the roster."""
        for peer, tokens in self.losses.look(self.roster.peers).items():
            self.say({"event": "lost", "peer": format_peer_id(peer), "tokens": tokens, "total": self.losses.tokens})
        if self.units is None:
            return
        others = {
            peer: Heard(
                word=record.data,
                expires=self.roster.expires[peer],
                away=record.state in AWAY,
                joining=record.state == "joining",
            )
            for peer, record in self.roster.peers.items()
        }
        self.units.heard(others, published.data if published is not None else None, ends)

    async def linger(self) -> None:
        """After the last round: stay while others are behind, so that they can fetch what they miss."""
        # In lockstep the others cannot end without this peer, and may be slow.
        end = time.monotonic() + (LINGER if self.exchange.lockstep is None else PATIENCE)
        self.waiting_for = "waiting until the others have the last round too"
        while time.monotonic() < end:
            mine = [tip.version for tip in self.exchange.peer.tips()]
            others = [record for peer, record in self.roster.peers.items() if not self.exchange.is_lost(peer)]
            if all(list(r.versions) == mine and r.state in ("finished", "leaving") for r in others):
                return
            self.roster.nudge()
            await asyncio.sleep(0.3)

    async def leave(self) -> None:
        """Say goodbye in the roster and stop."""
        self.progress.state = "leaving"
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.roster.renew(), 2)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.exchange.close()
        if self.exchange.watch is not None:
            self.exchange.watch.count()
            self.exchange.watch.save()

    # ------------------------------------------------------------------ staying in touch

    @property
    def isolated(self) -> float:
        """Seconds for which nobody has been in sight although there were peers, 0 if this node is not isolated."""
        return self.isolation.seconds(time.monotonic())

    async def _stay_connected(self) -> None:
        """Remember who is there; dial bootstrap and remembered peers, often when nobody is; say what is wrong."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self.known.meet(self.roster.peers)
            self._look_for_peers(now)
            self._look_for_listeners(now)
            self.time.every = (math.inf if self.roster.silent else CALM) if self.roster.calm else EVERY
            if self.isolation.dial_due(now) and not self._saving():
                await self._dial()

    def _saving(self) -> bool:
        """Whether this node pauses, and dialling would cost more than it brings."""
        return self.exchange.peer.resting is not None and bool(self.roster.peers or self.roster.silent)

    def _look_for_peers(self, now: float) -> None:
        here = [
            peer
            for peer, record in self.roster.peers.items()
            if record.state != "leaving" and not self.exchange.is_lost(peer)
        ]
        alone = self.isolation.seconds(now)
        self.isolation.look(now, len(here))
        if here and alone:
            self.tell(f"{len(here)} other peer(s) in sight again after {alone:.0f} s")
            self.say({"event": "isolated", "seconds": round(alone, 1), "over": True})
        elif self.isolation.warning_due(now):
            alone = self.isolation.seconds(now)
            known = len(self.known.addresses())
            self.tell(
                f"WARNING no peers for {alone:.0f} s, dialling {len(self.bootstraps)} bootstrap address(es) and "
                f"{known} of peers met before{self._dialled}"
            )
            self.say({"event": "isolated", "seconds": round(alone, 1), "over": False})

    def _look_for_listeners(self, now: float) -> None:
        """Without a single peer that accepts connections no round can have a coordinator."""
        waiting = not self.roster.peers and self.progress.state != "training"  # somebody may come yet
        records = self.roster.peers.values()
        nobody = not (self.exchange.peer.can_coordinate or waiting) and all(r.client_mode for r in records)
        if not self.unanswered.warning_due(now, nobody):
            return
        self.tell(
            f"WARNING no peer in this run accepts connections: all {1 + len(self.roster.peers)}, this one included, "
            "are in client mode, so no round can take place. One node must be reachable: start it without "
            "--client-mode, and forward its port if it is behind a router"
        )
        self.say({"event": "fault", "what": "no peer in this run accepts connections"})

    async def _dial(self) -> None:
        addresses = [*self.bootstraps, *self.known.addresses(besides=list(self.roster.peers))]
        reached, errors = await dial_all(self.host, list(dict.fromkeys(addresses)))
        first = next(iter(errors.values()), "")
        self._dialled = f" (last time {len(reached)} of {len(addresses)} answered{'; ' * bool(first)}{first})"
        if reached and not self.roster.peers:
            self.roster.nudge()

    async def _watch_twin(self) -> None:
        """A second process with this peer's key elsewhere disturbs both; nothing else would notice."""
        while True:
            await asyncio.sleep(EXPIRY)
            twin = self.roster.twin
            if twin is not None:
                self.tell(
                    f"WARNING duplicate peer id: another node uses this node's key, at {', '.join(twin)}. "
                    "Stop one of them, or give it an identity of its own with --identity"
                )
                self.say({"event": "fault", "what": "duplicate peer id", "addresses": list(twin)})
                self.roster.twin = None
