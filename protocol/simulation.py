"""N peers in one thread, with virtual time and an in-memory network that can drop, delay and reorder.

The peers run the code that real nodes run (``peer``, ``rounds``, ``streaming``); only steps, sockets and the clock are
played. Everything is drawn from one seed, so a run can be repeated exactly. Time is counted in the unit of the step
times: with all step times 1 and an ideal network it is the paper's lockstep schedule, in which fragment p leaves after
inner step H + p H / P and again every H steps, and comes back tau steps later.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from stretto.protocol import messages as m
from stretto.protocol.actions import Aborted, Committed, Rules, Send
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Effect, FetchFrom, Over, PartWork, Peer, PushAverageTo, PushTo, Repair, Work
from stretto.protocol.schedule import Clock, fragment_of
from stretto.protocol.streaming import StreamingDiLoCo, seal


class Replica(Protocol):
    """The local weights of one peer and the inner optimizer on them."""

    def step(self) -> int:
        """One inner step; returns the tokens it trained on."""

    def get(self, fragment: int) -> Vector:
        """The local weights of a fragment, (n,) float32."""

    def set(self, fragment: int, weights: Vector) -> None:
        """Replace the local weights of a fragment."""


@dataclass
class Network:
    """Delays and losses of the played network. Times are in the unit of the step times.

    ``drop`` is the probability that a message or transfer never arrives; the sender learns nothing. ``cut`` holds
    pairs of peer numbers that cannot reach each other; the sender is told that the peer is lost.
    """

    delay: float = 0.0
    jitter: float = 0.0
    drop: float = 0.0
    cut: set[tuple[int, int]] = field(default_factory=set)

    def connected(self, a: int, b: int) -> bool:
        """Whether a and b can reach each other."""
        return (a, b) not in self.cut and (b, a) not in self.cut


def peer_id(index: int) -> bytes:
    """A well-formed peer id for peer number ``index``, from a made-up public key."""
    return b"\x00\x24\x08\x01\x12\x20" + digest("sim peer", [index.to_bytes(4, "big")])


def _sign(me: bytes) -> Callable[[bytes], bytes]:
    return lambda message: digest("sim sign", [me, message]) * 2


def _verify(peer: bytes, message: bytes, signature: bytes) -> bool:
    return _sign(peer)(message) == signature


@dataclass
class SimPeer:
    """One played peer."""

    index: int
    replica: Replica
    peer: Peer
    step_time: float
    tau: int
    steps: int = 0
    alive: bool = True
    left_at: dict[int, int] = field(default_factory=dict)
    """Step at which each fragment's last contribution left."""
    overlaps: list[int] = field(default_factory=list)
    """Inner steps between snapshot and merge, for each merged round."""


class Simulation:
    """``replicas`` train together under ``config``.

    ``tau`` is the overlap of each peer in its own steps (a result never comes back earlier, later if it is late);
    ``step_times`` the duration of an inner step of each.
    """

    def __init__(
        self,
        config: RunConfig,
        replicas: Sequence[Replica],
        *,
        tau: Sequence[int] | None = None,
        step_times: Sequence[float] | None = None,
        network: Network | None = None,
        seed: int = 0,
        window: float = 0.0,
    ) -> None:
        self.config, self.network, self.random = config, network or Network(), random.Random(seed)
        self.now = 0.0
        self.over: list[tuple[int, Over]] = []
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._in_flight: dict[tuple[int, int], float] = {}
        self._departing = True
        times = list(step_times or [1.0] * len(replicas))
        h, p = config.outer.inner_steps, config.outer.fragments
        if p < 1:
            raise ConfigError("a simulation needs outer.fragments: it cannot count them from outer.fragment_bytes")
        if tau and max(tau) > config.outer.tau_max:
            raise ConfigError(f"tau is {max(tau)}, it must be at most outer.tau_max ({config.outer.tau_max})")
        unit = float(np.mean(times))
        rules = Rules(
            inner_steps=h,
            fragments=p,
            min_group=config.group.min_size,
            max_group=config.group.max_size,
            window=window,
            margin=2 * unit,
            min_exchange=2 * unit,
            ask_wait=unit,
        )
        mean_rate = float(np.mean([1 / time for time in times]))
        clock = Clock(round=0, at=h / mean_rate, interval=h / p / mean_rate)
        self.peers: list[SimPeer] = []
        for index, replica in enumerate(replicas):
            initial = [replica.get(fragment) for fragment in range(p)]
            peer = Peer(
                me=peer_id(index),
                config=config,
                diloco=StreamingDiLoCo(config, initial),
                rules=rules,
                sign=_sign(peer_id(index)),
                verify=_verify,
            )
            peer.adopt_clock(clock)
            overlap = tau[index] if tau else 0
            self.peers.append(SimPeer(index, replica, peer, times[index], overlap))
        self._by_id = {sim.peer.me: sim for sim in self.peers}
        self._refresh_rosters()
        self._at(clock.interval / 2, 1, self._gossip)
        for sim in self.peers:
            self._at(sim.step_time, 0, lambda sim=sim: self._step(sim))  # type: ignore[misc]
            self._schedule_departure(sim, 0)

    # ------------------------------------------------------------------ running

    def run(self, rounds: int) -> None:
        """Play until round ``rounds`` is about to depart. May be called again with a higher number."""
        clock = max((sim.peer.clock for sim in self.peers if sim.peer.clock), key=lambda clock: clock.round)
        self._play(clock.departure(rounds) - 1e-6)

    def settle(self) -> None:
        """Play on without new departures until the results that are under way have come back."""
        self._departing = False
        self._play(self.now + self.config.outer.inner_steps * max(sim.step_time for sim in self.peers))

    def _play(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, _, action = heapq.heappop(self._queue)
            action()

    def crash(self, index: int) -> None:
        """The peer vanishes; others learn it when they talk to it."""
        self.peers[index].alive = False
        self._refresh_rosters()

    def committed(self) -> set[int]:
        """Rounds that some peer saw committed."""
        return {over.round for _, over in self.over if isinstance(over.outcome, Committed)}

    # ------------------------------------------------------------------ events

    def _at(self, time: float, rank: int, action: Callable[[], None]) -> None:
        """At equal times: steps (0), merges follow them at once, then departures (1), then the network (2)."""
        self._count += 1
        heapq.heappush(self._queue, (time, rank, self._count, action))

    def _step(self, sim: SimPeer) -> None:
        if not sim.alive:
            return
        sim.peer.diloco.trained(sim.replica.step())
        sim.steps += 1
        for fragment in range(sim.peer.fragments):
            self._merge_if_due(sim, fragment)
        self._at(self.now + sim.step_time, 0, lambda: self._step(sim))

    def _merge_if_due(self, sim: SimPeer, fragment: int) -> None:
        if not sim.peer.diloco.fragments[fragment].pending:
            return
        overlap = sim.steps - sim.left_at.get(fragment, sim.steps - sim.tau)
        if overlap >= sim.tau:
            sim.replica.set(fragment, sim.peer.diloco.come_back(fragment, sim.replica.get(fragment)))
            sim.overlaps.append(overlap)

    def _schedule_departure(self, sim: SimPeer, round: int) -> None:
        clock = sim.peer.clock
        assert clock is not None
        self._at(max(self.now, clock.departure(round)), 1, lambda: self._depart(sim, round))

    def _depart(self, sim: SimPeer, round: int) -> None:
        clock = sim.peer.clock
        assert clock is not None
        if not sim.alive or not self._departing:
            return
        if clock.departure(round) > self.now + 1e-9:
            self._schedule_departure(sim, round)
            return
        fragment = fragment_of(round, sim.peer.fragments)
        reason = sim.peer.sits_out(round)
        if reason is None:
            sim.left_at[fragment] = sim.steps
            contribution = sim.peer.diloco.leave(fragment, sim.replica.get(fragment))
            rate, patience = 1 / sim.step_time, self._patience(sim)
            effects = sim.peer.depart(round, contribution, rate=rate, patience=patience, uplink=1.0, now=self.now)
        else:
            effects = [Over(round, fragment, Aborted(reason), False, 0.0)]
        self._carry_out(sim, effects)
        self._schedule_departure(sim, round + 1)

    def _patience(self, sim: SimPeer) -> float:
        return self.config.outer.tau_max * sim.step_time

    def _refresh_rosters(self) -> None:
        for sim in self.peers:
            others = [peer.peer.me for peer in self.peers if peer is not sim and peer.alive]
            sim.peer.set_roster(others, others)

    def _gossip(self) -> None:
        """What the roster does among real peers: all hear of each other's clock and chains now and then."""
        living = [sim for sim in self.peers if sim.alive]
        for sim in living:
            for other in living:
                if other is not sim and self.network.connected(sim.index, other.index):
                    tips = other.peer.tips()
                    versions, tokens = [tip.version for tip in tips], [tip.tokens_total for tip in tips]
                    self._carry_out(sim, sim.peer.hear(other.peer.me, other.peer.clock, versions, tokens))
        assert living[0].peer.clock is not None
        self._at(self.now + living[0].peer.clock.interval, 1, self._gossip)

    # ------------------------------------------------------------------ effects

    def _carry_out(self, sim: SimPeer, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(sim, effect.to, lambda to, message=effect.message: self._deliver(sim, to, message))  # type: ignore[misc]
            elif isinstance(effect, PushTo):
                for header, data in sim.peer.outgoing(effect):
                    self._push(sim, effect.to, header, data)
            elif isinstance(effect, PushAverageTo):
                self._push(sim, effect.to, effect.header, effect.data)
            elif isinstance(effect, FetchFrom):
                self._send(sim, effect.source, lambda to, e=effect: self._fetch(sim, to, e))  # type: ignore[misc]
            elif isinstance(effect, (Work, PartWork)):
                self._carry_out(sim, sim.peer.reduced(effect, sim.peer.reduce(effect), self.now))
            elif isinstance(effect, Over):
                self._round_over(sim, effect)
            elif isinstance(effect, Repair):
                self._send(sim, effect.source, lambda source, f=effect.fragment: self._repair(sim, source, f))  # type: ignore[misc]
                self._at(self.now + self._patience(sim), 3, lambda f=effect.fragment: sim.peer.repair_failed(f))  # type: ignore[misc]
        self._wake(sim)

    def _wake(self, sim: SimPeer) -> None:
        due = sim.peer.deadline()
        if due is not None:
            self._at(max(self.now, due), 3, lambda: self._tick(sim))

    def _tick(self, sim: SimPeer) -> None:
        due = sim.peer.deadline()
        if sim.alive and due is not None and due <= self.now:
            self._carry_out(sim, sim.peer.tick(self.now))

    def _send(self, sim: SimPeer, to: bytes, deliver: Callable[[SimPeer], None]) -> None:
        target = self._by_id[to]
        if self.random.random() < self.network.drop:
            return
        arrival = self.now + self.network.delay + self.random.random() * self.network.jitter

        def act() -> None:
            if not sim.alive:
                return
            if target.alive and self.network.connected(sim.index, target.index):
                deliver(target)
            else:
                self._carry_out(sim, sim.peer.lost(to, self.now))

        self._at(arrival, 2, act)

    def _deliver(self, sim: SimPeer, target: SimPeer, message: m.Message) -> None:
        again = m.decode(m.encode(message))
        self._carry_out(target, target.peer.received(sim.peer.me, again, self.now))

    def _push(self, sim: SimPeer, to: bytes, header: m.Push | m.Average, data: bytes) -> None:
        self._send(sim, to, lambda target: self._pushed(sim, target, header, data, tries=8))

    def _pushed(self, sim: SimPeer, target: SimPeer, header: m.Push | m.Average, data: bytes, *, tries: int) -> None:
        if target.peer.early(header) and tries and target.alive:
            # As a real receiver does: what comes before the group's message waits a little for it.
            again = self.now + self._patience(target) / 16
            self._at(again, 2, lambda: self._pushed(sim, target, header, data, tries=tries - 1))
        elif target.peer.wants(sim.peer.me, header) is None:
            target.peer.check(sim.peer.me, header, data)
            self._carry_out(target, target.peer.payload_arrived(sim.peer.me, header, data, self.now))

    def _fetch(self, sim: SimPeer, source: SimPeer, effect: FetchFrom) -> None:
        data = source.peer.payload(effect.round, effect.payload)
        if data is None:
            self._carry_out(sim, sim.peer.fetch_failed(source.peer.me, effect.round, self.now))
        else:
            sim.peer.check_fetched(effect, data)
            self._carry_out(sim, sim.peer.fetched(effect, data, self.now))

    def _round_over(self, sim: SimPeer, over: Over) -> None:
        self.over.append((sim.index, over))
        if sim.tau == 0:
            self._merge_if_due(sim, over.fragment)

    def _repair(self, sim: SimPeer, source: SimPeer, fragment: int) -> None:
        state = source.peer.diloco.fragments[fragment]
        assert source.peer.clock is not None
        copy = seal(state.anchor, state.momentum)
        nbytes = 8 * state.anchor.size
        answer = m.State(
            fragment, state.tip, state.record, source.peer.clock, copy.digest, nbytes, nbytes, (copy.digest,)
        )
        if sim.peer.adopt(answer, copy) and sim.tau == 0:
            self._merge_if_due(sim, fragment)
