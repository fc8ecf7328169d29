"""Faults at chosen moments of a round, in virtual time: what strikes, when, and whom.

A schedule is one or two strikes. A *strike* names a fault, a moment and a role: the peer that plays the role in a
round is hit when it reaches the moment in that round. Moments are events of the victim (it has joined, it knows the
group, the first payload has come), not times, so every step of the protocol is hit, however long the steps take.
``every_schedule`` lists all combinations; ``FaultySimulation`` plays one. What must hold whatever strikes is for the
caller to check.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stretto.protocol import messages as m
from stretto.protocol.actions import Committed, Send
from stretto.protocol.effects import Effect, Over, PushTo
from stretto.protocol.rounds import rendezvous_order
from stretto.protocol.schedule import fragment_of
from stretto.protocol.simnet import Arrival
from stretto.protocol.simulation import Header, Replica, SimPeer, Simulation
from stretto.protocol.streaming import Contribution


class Fault(Enum):
    """What goes wrong."""

    KILL = "crashes, and starts again later with nothing but its identity"
    STOP = "is frozen for a while, then goes on with all that has queued up"
    SLOW = "its line or its arithmetic takes 10 times as long for a while"
    DROP_LAST_REPLY = "the next that it sends is lost, and nobody is told"
    DUPLICATE = "all that it sends arrives twice, for a while"
    REORDER = "what it sends arrives in another order, for a while"
    CORRUPT = "in the next that it sends a bit is flipped"
    PARTITION = "it, or a minority with it, is cut off from the others for two cycles"
    CLOCK_JUMP = "its clock is off for a while"


class Moment(Enum):
    """When it goes wrong, as the victim sees the round."""

    BEFORE_DEPARTURE = "the round is due"
    AFTER_JOIN = "its contribution has left, and it has asked to join"
    GROUP_KNOWN = "it has learnt (a coordinator: decided) who is in the group, and has not acted on it"
    HALF_SENT = "the first piece of its contribution is on the way"
    FIRST_PAYLOAD = "the first payload of another peer is here"
    LAST_PAYLOAD = "all payloads that are due to it are here, and nobody knows"
    BEFORE_DECISION = "the decision is about to reach it (a coordinator: the first report of a member)"
    DECIDED = "it knows the decision, and has not told anybody"
    AFTER_COMMIT = "it has the result (a coordinator: it has told one member)"


class Role(Enum):
    """Whom it hits."""

    COORDINATOR = "the first in rendezvous order"
    REDUCER = "another one that others can reach, so that it reduces a part where the group works in parts"
    MEMBER = "one that only contributes, where there is one"


@dataclass(frozen=True)
class Strike:
    """``fault`` hits the peer that is ``role`` when it reaches ``moment`` in a round, the first from ``first`` on.

    ``cycles`` is how long a fault with a duration lasts.
    """

    fault: Fault
    moment: Moment
    role: Role
    first: int
    cycles: float = 1.0

    def __str__(self) -> str:
        when = f"round >= {self.first}, {self.cycles:.2f} cycles"
        return f"{self.fault.name} {self.moment.name} {self.role.name} ({when})"


@dataclass(frozen=True)
class Schedule:
    """Strikes in a group of ``size`` peers; all else that is drawn comes from ``random()``."""

    size: int
    strikes: tuple[Strike, ...]
    seed: int

    def random(self) -> random.Random:
        """The generator of everything else, the same for an equal schedule."""
        return random.Random(repr(self))

    def __str__(self) -> str:
        return f"{self.size} peers, {' then '.join(map(str, self.strikes))}, seed {self.seed}"


def draw_schedule(size: int, fault: Fault, moment: Moment, role: Role, seed: int, first: int) -> Schedule:
    """A schedule that begins with this strike; its duration and, one time in three, a second strike are drawn."""
    chance = random.Random(f"{size} {fault.name} {moment.name} {role.name} {seed}")

    def duration(fault: Fault) -> float:
        return 2.0 if fault is Fault.PARTITION else chance.uniform(0.4, 2.0)

    strikes = [Strike(fault, moment, role, first + chance.randrange(2), duration(fault))]
    if chance.random() < 1 / 3:
        # In a small group two that have lost everything would be too many: nobody could give the state back.
        kinds = [kind for kind in Fault if size > 3 or not kind is fault is Fault.KILL]
        kind, when, whom = chance.choice(kinds), chance.choice(list(Moment)), chance.choice(list(Role))
        strikes.append(Strike(kind, when, whom, first + chance.randrange(4), duration(kind)))
    return Schedule(size, tuple(strikes), seed)


def every_schedule(seeds: Mapping[int, int], first: int) -> Iterator[Schedule]:
    """Every fault, moment and role for each group size, with so many seeds; no round before ``first`` is hit."""
    for size, count in seeds.items():
        for seed in range(count):
            for fault, moment, role in itertools.product(Fault, Moment, Role):
                yield draw_schedule(size, fault, moment, role, seed, first)


@dataclass(frozen=True)
class Struck:
    """A strike that has found its victim: its number, the round, and from when to when.

    ``ended`` includes what the fault leaves behind: a slow step that has begun, waits that a wrong clock has set.
    """

    strike: Strike
    victim: int
    round: int
    began: float
    ended: float


class FaultySimulation(Simulation):
    """A simulation in which ``strikes`` happen. ``restarted`` makes the replica of a peer that starts again."""

    def __init__(
        self, *args: Any, strikes: Sequence[Strike], restarted: Callable[[int], Replica], **kwargs: Any
    ) -> None:
        self.pending, self.struck = list(strikes), list[Struck]()
        self._restarted = restarted
        self._groups: dict[tuple[int, int, int], m.Group] = {}
        self._payloads: dict[tuple[int, int, int], set[tuple[bytes, type, int]]] = {}
        self._entered = False
        super().__init__(*args, **kwargs)

    # ------------------------------------------------------------------ who, when

    def role_of(self, round: int, role: Role) -> int:
        """The number of the peer that has ``role`` in ``round``, if all are there."""
        ids = {sim.peer.me: sim.index for sim in self.peers}
        reachable = [peer for peer, index in ids.items() if index not in self.clients]
        fragment = fragment_of(round, self.config.outer.fragments)
        order = [ids[peer] for peer in rendezvous_order(self.config.digest(), fragment, round, reachable)]
        if role is Role.COORDINATOR:
            return order[0]
        if role is Role.REDUCER:
            return order[1]
        return min(self.clients, default=order[-1])

    def _reach(self, sim: SimPeer, round: int, moment: Moment) -> None:
        """The peer is at ``moment`` of ``round``: strike, if that was waited for."""
        for strike in list(self.pending):
            if strike.moment is not moment or round < strike.first or not sim.alive or sim.frozen:
                continue
            if self.role_of(round, strike.role) == sim.index:
                self.pending.remove(strike)
                ends = self.now + strike.cycles * self.clock().interval * sim.peer.fragments
                self._at(ends, 0, getattr(self, "_" + strike.fault.name.lower())(sim))
                left_behind = sim.step_time * sim.slow if sim.slow > 1.0 else max(0.0, sim.skew)
                self.struck.append(Struck(strike, sim.index, round, self.now, ends + left_behind))

    # ------------------------------------------------------------------ the faults: each returns what ends it

    def _kill(self, sim: SimPeer) -> Callable[[], None]:
        # A process that ends closes its connections; a machine without power does not.
        self.crash(sim.index, told=self.random.random() < 0.5)
        return lambda: self.restart(sim.index, self._restarted(sim.index))

    def _stop(self, sim: SimPeer) -> Callable[[], None]:
        self.freeze(sim.index)
        return lambda: self.thaw(sim.index)

    def _slow(self, sim: SimPeer) -> Callable[[], None]:
        line = self.network.troubles[sim.index]
        if self.random.random() < 0.5:
            line.slow = 10.0
            return lambda: setattr(line, "slow", 1.0)
        sim.slow = 10.0
        return lambda: setattr(sim, "slow", 1.0)

    def _drop_last_reply(self, sim: SimPeer) -> Callable[[], None]:
        line = self.network.troubles[sim.index]
        line.drop_next = self.random.choice((1, 1, 2))
        return lambda: setattr(line, "drop_next", 0)

    def _duplicate(self, sim: SimPeer) -> Callable[[], None]:
        line = self.network.troubles[sim.index]
        line.duplicate = True
        return lambda: setattr(line, "duplicate", False)

    def _reorder(self, sim: SimPeer) -> Callable[[], None]:
        line = self.network.troubles[sim.index]
        line.reorder = self.random.uniform(0.2, 1.0) * self.rules.min_exchange
        return lambda: setattr(line, "reorder", 0.0)

    def _corrupt(self, sim: SimPeer) -> Callable[[], None]:
        line = self.network.troubles[sim.index]
        line.corrupt_next = self.random.choice((1, 1, 2, 4))
        return lambda: setattr(line, "corrupt_next", 0)

    def _partition(self, sim: SimPeer) -> Callable[[], None]:
        others = [other.index for other in self.peers if other is not sim]
        with_it = self.random.sample(others, self.random.randrange(max(1, len(self.peers) // 2)))
        side = {sim.index, *with_it}
        pairs = self.network.isolate(side, set(others) - side)
        return lambda: self.network.heal(pairs)

    def _clock_jump(self, sim: SimPeer) -> Callable[[], None]:
        intervals = self.random.uniform(0.2, 3.0) * self.random.choice((-1, 1))
        self.set_skew(sim.index, intervals * self.clock().interval)
        return lambda: self.set_skew(sim.index, 0.0)

    # ------------------------------------------------------------------ the moments

    def _depart(self, sim: SimPeer, round: int) -> None:
        self._reach(sim, round, Moment.BEFORE_DEPARTURE)
        self._act(sim, lambda: self._depart_now(sim, round))

    def _depart_now(self, sim: SimPeer, round: int) -> None:
        self._entered = False
        super()._depart(sim, round)
        if self._entered:
            self._reach(sim, round, Moment.AFTER_JOIN)

    def _leave(self, sim: SimPeer, fragment: int) -> Contribution:
        self._entered = True
        return super()._leave(sim, fragment)

    def _deliver(self, sim: SimPeer, target: SimPeer, message: m.Message, arrival: Arrival) -> None:
        if isinstance(message, m.Commit | m.Have | m.Averaged):
            self._reach(target, message.round, Moment.BEFORE_DECISION)
        self._act(target, lambda: self._guarded(sim, lambda: self._deliver_now(sim, target, message, arrival)))

    def _deliver_now(self, sim: SimPeer, target: SimPeer, message: m.Message, arrival: Arrival) -> None:
        super()._deliver(sim, target, message, arrival)

    def _received(self, sim: SimPeer, target: SimPeer, message: m.Message) -> list[Effect]:
        effects = super()._received(sim, target, message)
        if isinstance(message, m.Group):
            self._group_known(target, message)
        elif isinstance(message, m.Commit):
            self._reach(target, message.round, Moment.DECIDED)
        return effects

    def _arrived(self, sim: SimPeer, target: SimPeer, header: Header, data: bytes) -> list[Effect]:
        effects = super()._arrived(sim, target, header, data)
        place = (target.index, target.life, header.round)
        self._payloads.setdefault(place, set()).add((sim.peer.me, type(header), header.part))
        self._payloads_reach(target, header.round)
        return effects

    def _effect(self, sim: SimPeer, effect: Effect) -> None:
        told = effect.message if isinstance(effect, Send) else None
        decided = isinstance(told, m.Commit) and told.signed.record.coordinator == sim.peer.me
        if isinstance(told, m.Group):
            self._group_known(sim, told)
        elif decided and told is not None:
            self._reach(sim, told.round, Moment.DECIDED)
        self._act(sim, lambda: self._effect_now(sim, effect, decided))

    def _effect_now(self, sim: SimPeer, effect: Effect, decided: bool) -> None:
        super()._effect(sim, effect)
        if isinstance(effect, PushTo):
            self._reach(sim, effect.round, Moment.HALF_SENT)
        elif isinstance(effect, Send) and decided:
            self._reach(sim, effect.message.round, Moment.AFTER_COMMIT)
        elif isinstance(effect, Over) and _decided_by_another(effect, sim.peer.me):
            self._reach(sim, effect.round, Moment.AFTER_COMMIT)

    def _group_known(self, sim: SimPeer, group: m.Group) -> None:
        self._groups[sim.index, sim.life, group.round] = group
        self._reach(sim, group.round, Moment.GROUP_KNOWN)
        self._payloads_reach(sim, group.round)

    def _payloads_reach(self, sim: SimPeer, round: int) -> None:
        place = (sim.index, sim.life, round)
        here, group = self._payloads.get(place, set()), self._groups.get(place)
        if here:
            self._reach(sim, round, Moment.FIRST_PAYLOAD)
        if group is not None and here and len(here) >= _due(group, sim.peer.me):
            self._reach(sim, round, Moment.LAST_PAYLOAD)


def _decided_by_another(over: Over, me: bytes) -> bool:
    return isinstance(over.outcome, Committed) and over.outcome.signed.record.coordinator != me


def _due(group: m.Group, me: bytes) -> int:
    """How many payloads a member gets: all contributions; in parts, slices of its own and averages of the others."""
    others = len(group.members) - 1
    if not group.shares:
        return others
    mine = sum(share.reducer == me for share in group.shares)
    return mine * others + len(group.shares) - mine
