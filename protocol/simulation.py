"""N peers in one thread, with virtual time and an in-memory network that can drop, delay and reorder.

The peers run the code that real nodes run (``peer``, ``rounds``, ``streaming``); only steps, sockets and the clock are
played. Everything is drawn from one seed, so a run can be repeated exactly. Time is counted in the unit of the step
times: with all step times 1 and an ideal network it is the paper's lockstep schedule, in which fragment p leaves after
inner step H + p H / P and again every H steps, and comes back tau steps later.

A peer can crash and start again with nothing but its identity, freeze and go on, be slow, or have a clock that is off.
``faults`` plays these at chosen moments of a round; it overrides the small methods of this class, one for each thing
that a driver does with the protocol.
"""

import heapq
import random
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np

from stretto.protocol import messages as m
from stretto.protocol.actions import Aborted, Committed, Rules, Send
from stretto.protocol.config import RunConfig
from stretto.protocol.effects import Effect, FetchFrom, Over, PartWork, PushAverageTo, PushTo, Repair, Work
from stretto.protocol.errors import ConfigError, RemoteProtocolError
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer
from stretto.protocol.schedule import Clock, fragment_of
from stretto.protocol.simnet import Arrival, Network
from stretto.protocol.simpeer import Replica, SimPeer, peer_id, signature, verify
from stretto.protocol.streaming import Contribution, Reduced, StreamingDiLoCo, seal

Header: TypeAlias = m.Push | m.Average

__all__ = ["Network", "Replica", "SimPeer", "Simulation", "peer_id"]


class Simulation:
    """``replicas`` train together under ``config``.

    ``tau`` is the overlap of each peer in its own steps (a result never comes back earlier, later if it is late);
    ``step_times`` the duration of an inner step of each, ``work_time`` that of averaging and outer step. ``rules`` are
    the time limits of a round; by default they follow from the step times and ``window``. With ``expiry`` peers know
    each other by roster records that are renewed once per interval and hold so long; without, they know at once who is
    there. ``clients`` are the numbers of peers that others cannot reach: they coordinate and reduce nothing.
    ``ids`` are the peers' ids, made up by default. Sums run in their order: repeating a real run takes its ids. With
    ``hears`` each peer hears of the clocks and chains of so many others per interval, drawn anew, where all of all
    would be the square of their number: enough for news to spread through any swarm in a few intervals.
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
        rules: Rules | None = None,
        work_time: float = 0.0,
        expiry: float | None = None,
        clients: Collection[int] = (),
        ids: Sequence[bytes] | None = None,
        hears: int | None = None,
    ) -> None:
        self.clients = frozenset(clients)
        self.ids = tuple(ids) if ids is not None else tuple(peer_id(index) for index in range(len(replicas)))
        if len(set(self.ids)) != len(replicas):
            raise ConfigError(
                f"{len(replicas)} replicas need as many different peer ids, {len(set(self.ids))} are given"
            )
        self.config, self.network, self.random = config, network or Network(), random.Random(seed)
        self.work_time, self.expiry, self.hears = work_time, expiry, hears
        self.now = 0.0
        self.over: list[tuple[int, Over]] = []
        self.refused: list[tuple[int, str]] = []
        """Peer number and reason, for each message or transfer that broke the rules."""
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._departing = True
        times = list(step_times or [1.0] * len(replicas))
        h, p = config.outer.inner_steps, config.outer.fragments
        if p < 1:
            raise ConfigError("a simulation needs outer.fragments: it cannot count them from outer.fragment_bytes")
        if tau and max(tau) > config.outer.tau_max:
            raise ConfigError(f"tau is {max(tau)}, it must be at most outer.tau_max ({config.outer.tau_max})")
        self.rules = rules or _rules(config, window, float(np.mean(times)))
        mean_rate = float(np.mean([1 / time for time in times]))
        clock = Clock(round=0, at=h / mean_rate, interval=h / p / mean_rate)
        self.peers: list[SimPeer] = []
        for index, replica in enumerate(replicas):
            peer = self._make_peer(index, replica)
            peer.adopt_clock(clock)
            self.peers.append(SimPeer(index, replica, peer, times[index], tau[index] if tau else 0))
        self._by_id = {sim.peer.me: sim for sim in self.peers}
        self._renew_rosters()
        self._at(clock.interval / 2, 1, self._gossip)
        for sim in self.peers:
            self._begin(sim)

    def _make_peer(self, index: int, replica: Replica) -> Peer:
        """A peer in the initial state, with the replica's weights as anchors."""
        me = self.ids[index]
        initial = [replica.get(fragment) for fragment in range(self.config.outer.fragments)]
        return Peer(
            me=me,
            config=self.config,
            diloco=self._make_diloco(initial),
            rules=self.rules,
            sign=lambda message: self._sign(me, message),
            verify=verify,
            can_coordinate=index not in self.clients,
        )

    def _make_diloco(self, initial: Sequence[Vector]) -> StreamingDiLoCo:
        return StreamingDiLoCo(self.config, initial)

    def _sign(self, me: bytes, message: bytes) -> bytes:
        return signature(me, message)

    # ------------------------------------------------------------------ running

    def run(self, rounds: int) -> None:
        """Play until round ``rounds`` is about to depart. May be called again with a higher number."""
        self.play(self.clock().departure(rounds) - 1e-6)

    def settle(self, until: float | None = None) -> None:
        """Play on without new departures, up to the time ``until``, or until all that is under way has come back."""
        self._departing = False
        cycle = self.config.outer.inner_steps * max(sim.step_time for sim in self.peers)
        self.play(self.now + cycle if until is None else until)

    def play(self, until: float) -> None:
        """Let everything happen that is due up to the time ``until``."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, _, action = heapq.heappop(self._queue)
            action()

    def clock(self) -> Clock:
        """The furthest clock that any peer follows."""
        return max((sim.peer.clock for sim in self.peers if sim.peer.clock), key=lambda clock: clock.round)

    def committed(self) -> set[int]:
        """Rounds that some peer saw committed."""
        return {over.round for _, over in self.over if isinstance(over.outcome, Committed)}

    # ------------------------------------------------------------------ what happens to peers

    def crash(self, index: int, *, told: bool = False) -> None:
        """The peer vanishes; others learn it when they talk to it, or at once where they are ``told``."""
        sim = self.peers[index]
        sim.alive = sim.frozen = False
        sim.life += 1
        sim.backlog.clear()
        self._refresh_rosters()
        for other in self.peers if told else ():
            if other is not sim and self.network.connected(sim.index, other.index):
                self._act(other, lambda other=other: self._lose(other, sim.peer.me))  # type: ignore[misc]

    def restart(self, index: int, replica: Replica) -> None:
        """A crashed peer starts again: the same identity, initial state, and it has to learn all else."""
        sim = self.peers[index]
        sim.peer, sim.replica = self._make_peer(index, replica), replica
        sim.alive = sim.joining = True
        sim.steps, sim.next_round, sim.slow, sim.skew = 0, 0, 1.0, 0.0
        sim.left_at, sim.seen, sim.asked, sim.tick_at, sim.roster = {}, {}, [], None, None
        self._join_run(sim, {})

    def freeze(self, index: int) -> None:
        """The peer neither handles nor sends anything until ``thaw``; nobody is told."""
        self.peers[index].frozen = True

    def thaw(self, index: int) -> None:
        """A frozen peer goes on with all that has queued up, in its order."""
        sim = self.peers[index]
        sim.frozen = False
        while sim.backlog and not sim.frozen:
            sim.backlog.popleft()()

    def set_skew(self, index: int, skew: float) -> None:
        """The peer's clock jumps to ``skew`` ahead of the true time."""
        sim = self.peers[index]
        sim.skew = skew
        self._act(sim, lambda: self._clock_moved(sim))

    def _clock_moved(self, sim: SimPeer) -> None:
        sim.tick_at = None
        self._wake(sim)
        if not sim.joining:
            self._await_departure(sim)

    def local(self, sim: SimPeer) -> float:
        """What the peer takes for the time."""
        return self.now + sim.skew

    # ------------------------------------------------------------------ events

    def _at(self, time: float, rank: int, action: Callable[[], None]) -> None:
        """At equal times: steps (0), merges follow them at once, then departures (1), then the network (2)."""
        self._count += 1
        heapq.heappush(self._queue, (time, rank, self._count, action))

    def _for(self, sim: SimPeer, time: float, rank: int, action: Callable[[], None]) -> None:
        """Like ``_at``, for something that this peer does: not if it has crashed by then, later if it is frozen."""
        life = sim.life
        self._at(max(self.now, time), rank, lambda: self._act(sim, action) if sim.life == life else None)

    @staticmethod
    def _act(sim: SimPeer, action: Callable[[], None]) -> None:
        if sim.frozen:
            sim.backlog.append(action)
        elif sim.alive:
            action()

    def _begin(self, sim: SimPeer) -> None:
        """From now on it trains and takes part in rounds."""
        self._for(sim, self.now + sim.step_time * sim.slow, 0, lambda: self._step(sim))
        self._await_departure(sim)

    def _step(self, sim: SimPeer) -> None:
        sim.peer.diloco.trained(sim.replica.step())
        sim.steps += 1
        for fragment in range(sim.peer.fragments):
            self._merge_if_due(sim, fragment)
        self._for(sim, self.now + sim.step_time * sim.slow, 0, lambda: self._step(sim))

    def _merge_if_due(self, sim: SimPeer, fragment: int) -> None:
        if not sim.peer.diloco.fragments[fragment].pending:
            return
        overlap = sim.steps - sim.left_at.get(fragment, sim.steps - sim.tau)
        if overlap >= sim.tau:
            self._merge(sim, fragment)
            sim.overlaps.append(overlap)

    def _merge(self, sim: SimPeer, fragment: int) -> None:
        sim.replica.set(fragment, sim.peer.diloco.come_back(fragment, sim.replica.get(fragment)))

    # ------------------------------------------------------------------ departures

    def _await_departure(self, sim: SimPeer) -> None:
        """Wait for the next round that this peer can still enter in time; an earlier wait is given up."""
        clock = sim.peer.clock
        assert clock is not None
        if self.local(sim) - clock.departure(sim.next_round) > clock.interval:
            sim.next_round = max(sim.next_round, clock.next_round(self.local(sim)))  # late to the run, or it has slept
        sim.waits += 1
        wait = sim.waits
        due = clock.departure(sim.next_round) - sim.skew
        self._for(sim, due, 1, lambda: self._depart_if_due(sim) if sim.waits == wait else None)

    def _depart_if_due(self, sim: SimPeer) -> None:
        clock = sim.peer.clock
        assert clock is not None
        if not self._departing:
            return
        waited = self.local(sim) - clock.departure(sim.next_round)
        if -1e-9 <= waited <= clock.interval:
            sim.next_round += 1
            self._depart(sim, sim.next_round - 1)
        self._act(sim, lambda: self._await_departure(sim))

    def _depart(self, sim: SimPeer, round: int) -> None:
        fragment = fragment_of(round, sim.peer.fragments)
        reason = sim.peer.sits_out(round)
        if reason is None:
            sim.left_at[fragment] = sim.steps
            contribution = self._leave(sim, fragment)
            uplink, patience, now = float(sim.index not in self.clients), self._patience(sim), self.local(sim)
            rate = self._rate(sim)
            effects = sim.peer.depart(round, contribution, rate=rate, patience=patience, uplink=uplink, now=now)
        else:
            effects = [Over(round, fragment, Aborted(reason), False, 0.0)]
        self._carry_out(sim, effects)

    def _leave(self, sim: SimPeer, fragment: int) -> Contribution:
        return sim.peer.diloco.leave(fragment, sim.replica.get(fragment))

    def _rate(self, sim: SimPeer) -> float:
        """Inner steps per unit of time that the peer reports; the clock follows their mean."""
        return 1 / (sim.step_time * sim.slow)

    def _patience(self, sim: SimPeer) -> float:
        return self.config.outer.tau_max * sim.step_time * sim.slow

    # ------------------------------------------------------------------ who is there, and how far

    def _renew_rosters(self) -> None:
        """All records are renewed; a cut or a frozen peer keeps its own from doing so."""
        for sim in self.peers if self.expiry is not None else ():
            for other in self.peers:
                if self._hears(sim, other):
                    sim.seen[other.peer.me] = self.now
                elif other.joining:
                    sim.seen.pop(other.peer.me, None)
        self._refresh_rosters()

    def _refresh_rosters(self) -> None:
        if self.expiry is None:
            self._share_roster()
            return
        for sim in self.peers:
            others = [other for other in self.peers if other is not sim and self._listed(sim, other)]
            candidates = [other.peer.me for other in others if other.index not in self.clients]
            sim.peer.set_roster(candidates, [other.peer.me for other in others])

    def _share_roster(self) -> None:
        """All know the same peers: the list is made once, and handed only to whom it is new."""
        listed = [sim for sim in self.peers if sim.alive and not sim.joining]
        everybody = frozenset(sim.peer.me for sim in listed)
        candidates = frozenset(sim.peer.me for sim in listed if sim.index not in self.clients)
        for sim in self.peers:
            if sim.roster != everybody:
                sim.roster = everybody
                sim.peer.set_roster(candidates - {sim.peer.me}, everybody - {sim.peer.me})

    def _listed(self, sim: SimPeer, other: SimPeer) -> bool:
        assert self.expiry is not None
        return self.now - sim.seen.get(other.peer.me, -2 * self.expiry) <= self.expiry

    def _hears(self, sim: SimPeer, other: SimPeer) -> bool:
        awake = sim.alive and other.alive and not (sim.frozen or other.frozen or other.joining)
        return sim is not other and awake and self.network.connected(sim.index, other.index)

    def _gossip(self) -> None:
        """What the roster does among real peers: all hear of each other's clock and chains now and then."""
        self._renew_rosters()
        for sim in self.peers:
            for other in self._speakers():
                if self._hears(sim, other):
                    self._hear(sim, other)
        self._at(self.now + self.clock().interval, 1, self._gossip)

    def _speakers(self) -> Sequence[SimPeer]:
        """Of whom a peer hears in this interval."""
        if self.hears is None or self.hears >= len(self.peers):
            return self.peers
        return self.random.sample(self.peers, self.hears)

    def _hear(self, sim: SimPeer, other: SimPeer) -> None:
        weights = [tip.weight for tip in other.peer.tips()]
        self._carry_out(sim, sim.peer.hear(other.peer.me, other.peer.clock, weights))

    def _join_run(self, sim: SimPeer, targets: dict[int, int]) -> None:
        """As a node that starts: until it has a clock, and of each fragment the version that others had at first."""
        heard = [other for other in self.peers if self._hears(sim, other) and other.peer.clock is not None]
        sim.peer.adopt_first_clock([other.peer.clock for other in heard if other.peer.clock is not None])
        for other in heard:
            self._hear(sim, other)
            for mine, theirs in zip(sim.peer.tips(), other.peer.tips(), strict=True):
                if theirs.version > mine.version:
                    targets.setdefault(mine.fragment, theirs.version)
        if heard and all(sim.peer.tips()[fragment].version >= version for fragment, version in targets.items()):
            for fragment in range(sim.peer.fragments):
                sim.replica.set(fragment, sim.peer.diloco.reload(fragment))
            sim.joining = False
            self._refresh_rosters()
            self._begin(sim)
        else:
            self._for(sim, self.now + self.clock().interval / 4, 1, lambda: self._join_run(sim, targets))

    # ------------------------------------------------------------------ effects

    def _carry_out(self, sim: SimPeer, effects: Sequence[Effect]) -> None:
        """One after the other: in the middle the peer may crash, and the rest is lost, or freeze, and it waits."""
        life = sim.life
        for effect in effects:
            if sim.life == life:
                self._act(sim, lambda effect=effect: self._effect(sim, effect))  # type: ignore[misc]
        if sim.life == life:
            self._act(sim, lambda: self._wake(sim))

    def _effect(self, sim: SimPeer, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(sim, effect.to, lambda to, a, x=effect.message: self._deliver(sim, to, x, a))  # type: ignore[misc]
        elif isinstance(effect, PushTo):
            for header, data in sim.peer.outgoing(effect):
                self._push(sim, effect.to, header, data)
        elif isinstance(effect, PushAverageTo):
            self._push(sim, effect.to, effect.header, effect.data)
        elif isinstance(effect, FetchFrom):
            self._request(sim, effect.source, effect, lambda source: self._fetch(sim, source, effect))
        elif isinstance(effect, Repair):
            self._request(sim, effect.source, effect, lambda source: self._repair(sim, source, effect))
        elif isinstance(effect, (Work, PartWork)):
            self._work(sim, effect)
        elif isinstance(effect, Over):
            self._round_over(sim, effect)

    def _wake(self, sim: SimPeer) -> None:
        """Let ``tick`` be called at the peer's next deadline."""
        due = sim.peer.deadline()
        if due is not None and due != sim.tick_at:
            sim.tick_at = due
            self._for(sim, due - sim.skew, 3, lambda: self._tick(sim, due))

    def _tick(self, sim: SimPeer, meant: float) -> None:
        due = sim.peer.deadline()
        sim.tick_at = None if sim.tick_at == meant else sim.tick_at
        if due is not None and due <= self.local(sim) + 1e-9:
            self._carry_out(sim, sim.peer.tick(max(due, self.local(sim))))
        else:
            self._wake(sim)

    def _send(self, sim: SimPeer, to: bytes, deliver: Callable[[SimPeer, Arrival], None]) -> None:
        """``deliver(target, arrival)`` happens at the other end, or this peer learns that the other is lost."""
        target, life = self._by_id.get(to), sim.life
        if target is None:
            self._for(sim, self.now, 2, lambda: self._lose(sim, to))
            return

        def arrive(arrival: Arrival) -> None:
            if sim.life != life and not self.network.lingers:
                return
            if target.alive and self.network.connected(sim.index, target.index):
                self._act(target, lambda: self._guarded(sim, lambda: deliver(target, arrival)))
            elif sim.life == life and not self.network.silent:
                self._act(sim, lambda: self._lose(sim, to))

        for arrival in self.network.arrivals(sim.index, target.index, self.random):
            self._at(self.now + arrival.delay, 2, lambda arrival=arrival: arrive(arrival))  # type: ignore[misc]

    def _guarded(self, sender: SimPeer, action: Callable[[], None]) -> None:
        try:
            action()
        except RemoteProtocolError as error:
            self.refused.append((sender.index, str(error)))

    def _lose(self, sim: SimPeer, peer: bytes) -> None:
        self._carry_out(sim, sim.peer.lost(peer, self.local(sim)))

    def _deliver(self, sim: SimPeer, target: SimPeer, message: m.Message, arrival: Arrival) -> None:
        if self.network.encoded or arrival.flip is not None:
            message = m.decode(arrival.apply(m.encode(message)), *_CONTROL)
        self._carry_out(target, self._received(sim, target, message))

    def _received(self, sim: SimPeer, target: SimPeer, message: m.Message) -> list[Effect]:
        return target.peer.received(sim.peer.me, message, self.local(target))

    # ------------------------------------------------------------------ payloads and arithmetic

    def _push(self, sim: SimPeer, to: bytes, header: Header, data: bytes) -> None:
        self._send(sim, to, lambda target, arrival: self._pushed(sim, target, header, arrival.apply(data)))

    def _pushed(self, sim: SimPeer, target: SimPeer, header: Header, data: bytes, tries: int = 16) -> None:
        if target.peer.early(header) and tries:
            # As a real receiver does: what comes before the group's message waits a little for it.
            later = self.now + self.rules.min_exchange / 16
            again = lambda: self._guarded(sim, lambda: self._pushed(sim, target, header, data, tries - 1))  # noqa: E731
            self._for(target, later, 2, again)
        elif target.peer.wants(sim.peer.me, header) is None:
            target.peer.check(sim.peer.me, header, data)
            self._carry_out(target, self._arrived(sim, target, header, data))

    def _arrived(self, sim: SimPeer, target: SimPeer, header: Header, data: bytes) -> list[Effect]:
        return target.peer.payload_arrived(sim.peer.me, header, data, self.local(target))

    def _request(self, sim: SimPeer, to: bytes, effect: FetchFrom | Repair, answer: Callable[[SimPeer], None]) -> None:
        """Ask another peer; ``answer(source)`` happens there. Failed if nothing has come back within the patience."""
        sim.asked.append(effect)
        self._send(sim, to, lambda source, _: answer(source))
        self._for(sim, self.now + self._patience(sim), 3, lambda: self._request_failed(sim, effect))

    def _request_failed(self, sim: SimPeer, effect: FetchFrom | Repair) -> None:
        if not self._answered(sim, effect):
            return
        if isinstance(effect, Repair):
            sim.peer.repair_failed(effect.fragment)
            self._carry_out(sim, [])
        else:
            self._carry_out(sim, sim.peer.fetch_failed(effect.source, effect.round, self.local(sim)))

    @staticmethod
    def _answered(sim: SimPeer, effect: Effect) -> bool:
        """Close a request; False if it was closed before."""
        open_before = len(sim.asked)
        sim.asked = [other for other in sim.asked if other is not effect]
        return len(sim.asked) < open_before

    def _fetch(self, sim: SimPeer, source: SimPeer, effect: FetchFrom) -> None:
        """At the source: answer."""
        payload = source.peer.payload(effect.round, effect.payload)
        self._send(source, sim.peer.me, lambda _, a: self._fetched(sim, effect, payload and a.apply(payload)))

    def _fetched(self, sim: SimPeer, effect: FetchFrom, payload: bytes | None) -> None:
        """Back at the peer that asked."""
        if payload is None:
            self._request_failed(sim, effect)
            return
        try:
            sim.peer.check_fetched(effect, payload)
        except RemoteProtocolError:
            self._request_failed(sim, effect)
            raise
        if self._answered(sim, effect):
            self._carry_out(sim, sim.peer.fetched(effect, payload, self.local(sim)))

    def _work(self, sim: SimPeer, work: Work | PartWork) -> None:
        if self.work_time:
            time = self.now + self.work_time * sim.slow
            self._for(sim, time, 3, lambda: self._carry_out(sim, self._worked(sim, work)))
        else:
            self._carry_out(sim, self._worked(sim, work))

    def _worked(self, sim: SimPeer, work: Work | PartWork) -> list[Effect]:
        return sim.peer.reduced(work, sim.peer.reduce(work), self.local(sim))

    def _round_over(self, sim: SimPeer, over: Over) -> None:
        self.over.append((sim.index, over))
        if sim.tau == 0:
            self._merge_if_due(sim, over.fragment)

    # ------------------------------------------------------------------ repair

    def _repair(self, sim: SimPeer, source: SimPeer, effect: Repair) -> None:
        """At the source: answer with the fragment's state, if there is anything to give."""
        state, clock = source.peer.diloco.fragments[effect.fragment], source.peer.clock
        if clock is None:
            self._send(source, sim.peer.me, lambda *_: self._request_failed(sim, effect))
            return
        copy = seal(state.anchor, state.momentum)
        nbytes = 8 * state.anchor.size
        answer = m.State(effect.fragment, state.tip, state.record, clock, copy.digest, nbytes, nbytes, (copy.digest,))
        self._send(source, sim.peer.me, lambda _, arrival: self._repaired(sim, effect, answer, copy, arrival))

    def _repaired(self, sim: SimPeer, effect: Repair, answer: m.State, copy: Reduced, arrival: Arrival) -> None:
        """Back at the peer that asked."""
        if not self._answered(sim, effect):
            return
        if arrival.flip is not None:
            copy = seal(np.frombuffer(arrival.apply(copy.anchor.tobytes()), np.float32), copy.momentum)
        better = sim.peer.adopt(answer, copy)
        self._carry_out(sim, [])
        if better and sim.tau == 0 and not sim.joining:
            self._merge_if_due(sim, effect.fragment)


_CONTROL = (m.Join, m.Group, m.Redirect, m.Behind, m.Have, m.Commit, m.Abort, m.Ask, m.Plan, m.Averaged)


def _rules(config: RunConfig, window: float, unit: float) -> Rules:
    """Time limits in proportion to an inner step of ``unit``."""
    return Rules(
        inner_steps=config.outer.inner_steps,
        fragments=config.outer.fragments,
        min_group=config.group.min_size,
        max_group=config.group.max_size,
        window=window,
        margin=2 * unit,
        min_exchange=2 * unit,
        ask_wait=unit,
    )
