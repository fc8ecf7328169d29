"""A table of rounds driven by hand: no network, no clock, every fault at the moment it is meant to come.

``Table`` seats one ``Round`` per peer and carries out their actions at once, except along cut lines. There are no
numbers in it: a contribution, a slice, an average and a state are digests of what they were made from, so two peers
hold the same bytes exactly if they hold the same digest.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from stretto.protocol import messages as m
from stretto.protocol.actions import (
    Aborted,
    Action,
    Basis,
    Committed,
    Fetch,
    Finish,
    Outcome,
    Push,
    PushAverage,
    Reduce,
    ReducePart,
    Rules,
    Send,
)
from stretto.protocol.chain import CommitRecord, Member, Tip, genesis
from stretto.protocol.digest import digest
from stretto.protocol.rounds import Round
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id

PEERS = sorted(peer_id(index) for index in range(8))
RUN = digest("run", [b"rounds"])
GENESIS = genesis(RUN, 0, digest("state", [b"before"]))
CLOCK = Clock(round=8, at=100.0, interval=10.0)
DEPARTS = 100.0
RULES = Rules(inner_steps=100, fragments=4, min_group=1, max_group=16, window=3.0, margin=2.0, min_exchange=10.0)
NUMEL = 1 << 21
"""Values of the fragment: of four equal shares each is cut into two parts."""


def voted(*electors: bytes) -> Tip:
    """A chain of one commit whose electors are given."""
    return Tip(0, 1, digest("chain", [b"v1"]), 400, electors)


def sign(peer: bytes) -> Callable[[bytes], bytes]:
    return lambda message: digest("test sign", [peer, message]) * 2


def verify(peer: bytes, message: bytes, signature: bytes) -> bool:
    return sign(peer)(message) == signature


def payload_of(peer: bytes) -> bytes:
    """The digest of the contribution of ``peer``."""
    return digest("payload", [peer])


def member(peer: bytes) -> Member:
    return Member(peer, 100, payload_of(peer), 1.0)


def average_of(part: int, owners: Sequence[bytes]) -> bytes:
    """The digest of the average of a part of these peers' contributions: the same whoever makes it."""
    return digest("average", [bytes([part]), *sorted(owners)])


def state_after(basis: Basis) -> bytes:
    """The digest of the state after the step from ``basis``."""
    return digest("state", [x.payload for x in (basis.parts or basis.members)])


def join_of(peer: bytes, tip: Tip = GENESIS, **fields: Any) -> m.Join:
    join = m.Join(0, 8, tip.head, tip.version, member(peer), rate=2.5, patience=4.0)
    return dataclasses.replace(join, **fields)


def make(
    me: bytes, tip: Tip = GENESIS, seats: Sequence[bytes] = tuple(PEERS[:4]), rules: Rules = RULES, **fields: Any
) -> Round:
    """A round as ``me`` sees it; ``seats`` coordinate in this order and expect each other."""
    arguments: dict[str, Any] = {
        "me": me, "run": RUN, "round": 8, "tip": tip, "clock": CLOCK, "candidates": list(seats), "rules": rules,
        "expected": frozenset(seats) - {me}, "sign": sign(me), "verify": verify, "numel": NUMEL,
    }  # fmt: skip
    return Round(**{**arguments, **fields})


class Table:
    """Rounds of several peers, and the network between them. A ``cut`` peer is lost for whoever talks to it."""

    def __init__(self, rounds: dict[bytes, Round], uplinks: dict[bytes, float] | None = None) -> None:
        self.rounds = rounds
        self.uplinks = uplinks or {}
        """Bytes per second that a peer announces; with none at all the group exchanges whole contributions."""
        self.outcomes: dict[bytes, Outcome] = {}
        self.store: dict[bytes, set[bytes]] = {peer: {payload_of(peer)} for peer in rounds}
        """Digests of the bytes that each peer holds."""
        self.cut: set[bytes] = set()
        self.drop: Callable[[bytes, Action], bool] = lambda peer, action: False
        self.alter: Callable[[bytes, PushAverage], bytes | None] = lambda peer, action: None
        """Other bytes (their digest) that a reducer sends instead of its average."""
        self.log: list[tuple[bytes, Action]] = []
        self._queue: deque[tuple[bytes, Action, float]] = deque()
        self._early: list[tuple[bytes, Push | PushAverage, bytes]] = []

    def join_of(self, peer: bytes, **fields: Any) -> m.Join:
        return join_of(peer, self.rounds[peer].tip, uplink=self.uplinks.get(peer, 0.0), **fields)

    def contribute(self, *peers: bytes, now: float = DEPARTS) -> None:
        for peer in peers:
            self.take(peer, self.rounds[peer].contribute(self.join_of(peer), now), now)

    def tick(self, now: float, *peers: bytes) -> None:
        for peer in peers or tuple(self.rounds):
            due = self.rounds[peer].deadline()
            if peer not in self.cut and due is not None and due <= now:
                self.take(peer, self.rounds[peer].tick(now), now)

    def run(self, now: float, until: float) -> float:
        """Tick whoever is due, in the order of time, until all that are left are done; returns the time then."""
        while True:
            dues = [self.rounds[peer].deadline() for peer in self.rounds if peer not in self.cut]
            due = min((time for time in dues if time is not None), default=None)
            if due is None or max(due, now) > until:
                return now
            now = max(due, now)
            self.tick(now)

    def lose(self, peer: bytes, now: float) -> None:
        """``peer`` is gone, and all others notice."""
        self.cut.add(peer)
        for other in self.rounds:
            if other not in self.cut:
                self.take(other, self.rounds[other].lost(peer, now), now)

    def take(self, peer: bytes, actions: Sequence[Action], now: float) -> None:
        self._queue.extend((peer, action, now) for action in actions)
        while self._queue:
            self._act(*self._queue.popleft())

    def _act(self, peer: bytes, action: Action, now: float) -> None:
        self.log.append((peer, action))
        me = self.rounds[peer]
        if peer in self.cut or self.drop(peer, action):
            return
        if isinstance(action, Finish):
            assert peer not in self.outcomes, "a round ends once"
            self.outcomes[peer] = action.outcome
        elif isinstance(action, Reduce):
            self._need(peer, action.basis)
            self.take(peer, me.reduced(action.basis, state_after(action.basis), now), now)
        elif isinstance(action, ReducePart):
            average = average_of(action.part, [x.peer for x in action.members])
            self.store[peer].add(average)
            self.take(peer, me.part_reduced(action.attempt, action.part, average, now), now)
        elif (action.source if isinstance(action, Fetch) else action.to) in self.cut:
            to = action.source if isinstance(action, Fetch) else action.to
            self.take(peer, me.lost(to, now), now)
        elif isinstance(action, Send):
            again = m.decode(m.encode(action.message))
            self.take(action.to, self.rounds[action.to].received(peer, again, now), now)
            self._late_pushes(now)
        elif isinstance(action, Fetch):
            self._fetch(peer, action, now)
        else:
            assert me.group_id is not None
            self._push(peer, action, me.group_id, now)

    def _need(self, peer: bytes, basis: Basis) -> None:
        """A step is taken only from bytes that are here."""
        assert {x.payload for x in (basis.parts or basis.members)} <= self.store[peer]

    def _push(self, peer: bytes, action: Push | PushAverage, group: bytes, now: float) -> None:
        other = self.rounds[action.to]
        if other.over:
            return
        if other.group_id != group:
            self._early.append((peer, action, group))
        elif isinstance(action, PushAverage):
            parts = self.rounds[peer].parts
            if parts is None or other.parts is None or action.attempt - other.parts.attempt not in (0, 1):
                return
            average = self.alter(peer, action) or parts.averages[action.attempt, action.part]
            self.store[action.to].add(average)
            self.take(action.to, other.average_arrived(action.attempt, action.part, average, now), now)
        elif action.parts:
            for part in action.parts:
                self.take(action.to, other.slice_arrived(peer, part), now)
        else:
            self.store[action.to].add(payload_of(peer))
            self.take(action.to, other.arrived(peer, payload_of(peer), now), now)

    def _late_pushes(self, now: float) -> None:
        """What came before the group's message goes on when that is here."""
        due = [item for item in self._early if self.rounds[item[1].to].group_id == item[2]]
        self._early = [item for item in self._early if item not in due]
        for peer, action, group in due:
            self._push(peer, action, group, now)

    def _fetch(self, peer: bytes, action: Fetch, now: float) -> None:
        me = self.rounds[peer]
        if action.payload not in self.store[action.source]:
            self.take(peer, me.fetch_failed(action.source, now), now)
            return
        self.store[peer].add(action.payload)
        if action.numel is not None:
            self.take(peer, me.fetched(action.payload, now), now)
            return
        for owner in me.owners_of(action.payload):
            self.take(peer, me.arrived(owner, action.payload, now), now)

    def held(self, peer: bytes) -> set[bytes]:
        """Peers whose whole contribution ``peer`` holds."""
        return {owner for owner in self.rounds if payload_of(owner) in self.store[peer]}

    def sent(self, kind: type) -> list[tuple[bytes, bytes]]:
        """Who sent a message of ``kind`` to whom, in order."""
        return [(p, a.to) for p, a in self.log if isinstance(a, Send) and isinstance(a.message, kind)]

    def plans(self) -> list[m.Plan]:
        """The plans that were sent, in order, each once."""
        found = [a.message for _, a in self.log if isinstance(a, Send) and isinstance(a.message, m.Plan)]
        return list(dict.fromkeys(found))

    def record(self, peer: bytes) -> CommitRecord:
        outcome = self.outcomes[peer]
        assert isinstance(outcome, Committed), outcome
        return outcome.signed.record


def table(*seats: bytes, tip: Tip = GENESIS, rules: Rules = RULES, uplink: float = 0.0, **fields: Any) -> Table:
    """All ``seats`` at one table; with an ``uplink`` they can reduce for each other."""
    rounds = {peer: make(peer, tip, seats, rules, **fields) for peer in seats}
    return Table(rounds, dict.fromkeys(seats, uplink))


def is_message(action: Action, *kinds: type) -> TypeGuard[Send]:
    """Whether ``action`` sends a message of one of these kinds."""
    return isinstance(action, Send) and isinstance(action.message, kinds)


def aborted(outcome: Outcome | None) -> str:
    """The reason of an aborted round."""
    assert isinstance(outcome, Aborted), outcome
    return outcome.reason


def outcome_of(actions: Sequence[Action]) -> Outcome:
    """The one outcome among ``actions``."""
    (outcome,) = [action.outcome for action in actions if isinstance(action, Finish)]
    return outcome


def members(record: CommitRecord) -> list[bytes]:
    """Whose contributions a record counts."""
    return [x.peer for x in record.members]
