"""One peer's part in one round, as a state machine: messages, arrivals and ``now`` go in, actions come out.

Every peer of a round runs one ``Round``. It is always a member, and it is the coordinator (``desk.Desk``) when it is
the first in rendezvous order that answers. Nothing here waits, sends or reads a clock; a driver does
(``stretto.protocol.peer``).

    member        OPEN --Group--> EXCHANGE --Commit--> DECIDED --all payloads here--> DONE
                  OPEN --Abort, Behind, nobody answers--> DONE       EXCHANGE --Abort--> DONE
                  EXCHANGE --coordinator lost or silent, nobody knows a decision--> OPEN, with the next coordinator

Rules:
1. A round commits whole or changes nothing. The only way to change state is ``Finish(Committed)``.
2. A member votes for one coordinator only: it reports to it that it holds what is to be averaged. It gives one up when
   the connection broke or when a coordinator could not decide any more, asks the other members, and joins the next
   one, but only if it has not voted. A decision needs the votes of a quorum (``chain.Tip.quorum``), and two quorums
   have a member in common, so a round is decided once.
3. A coordinator counts only contributions that it holds itself and that more than half of the living members hold,
   or averages that a quorum holds, so that whoever misses one can fetch it.
4. A member accepts a decision from anybody, since it checks signature, chain, quorum, clock and digests itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

from stretto.protocol import messages as m
from stretto.protocol.actions import (
    Aborted,
    Action,
    Basis,
    Committed,
    Fetch,
    Finish,
    Outcome,
    Outrun,
    Push,
    PushAverage,
    Reduce,
    ReducePart,
    Rules,
    Send,
)
from stretto.protocol.chain import MAX_MEMBERS, CommitRecord, Member, SignedRecord, Tip, check_extends
from stretto.protocol.desk import Desk
from stretto.protocol.digest import digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.fp4_numpy import BLOCK
from stretto.protocol.reduce import Parts, group_digest
from stretto.protocol.schedule import Clock


class Phase(Enum):
    """Where a member stands."""

    OPEN = "finding the group"
    EXCHANGE = "exchanging contributions"
    DECIDED = "fetching what is missing"
    DONE = "done"


def rendezvous_order(run: bytes, fragment: int, round: int, peers: Sequence[bytes]) -> list[bytes]:
    """Peers in the order in which they serve as coordinator of this round: highest random weight first."""
    return list(_rendezvous_order(run, fragment, round, tuple(peers)))


@lru_cache(maxsize=8)
def _rendezvous_order(run: bytes, fragment: int, round: int, peers: tuple[bytes, ...]) -> tuple[bytes, ...]:
    # Kept, since in a simulation all peers ask for the same order, one digest for each of them.
    place = [run, fragment.to_bytes(4, "big"), round.to_bytes(8, "big")]
    return tuple(sorted(peers, key=lambda peer: digest("rendezvous", [*place, peer]), reverse=True))


class Round:
    """One peer's view of round ``round`` of ``fragment``, which has ``numel`` values.

    ``candidates`` are coordinators in the order to try, this peer among them if it can serve; ``expected`` are the
    peers that a coordinator waits for within the window; ``departs`` is the swarm time of the departure. ``elders``
    vote where the fragment has no electors yet: those of another fragment.
    """

    def __init__(
        self,
        *,
        me: bytes,
        run: bytes,
        round: int,
        tip: Tip,
        clock: Clock,
        candidates: Sequence[bytes],
        expected: frozenset[bytes],
        rules: Rules,
        sign: Callable[[bytes], bytes],
        verify: Callable[[bytes, bytes, bytes], bool],
        resigned: frozenset[bytes] = frozenset(),
        numel: int = 0,
        elders: tuple[bytes, ...] = (),
    ) -> None:
        self.elders = elders
        self.me, self.run, self.round, self.fragment, self.numel = me, run, round, tip.fragment, numel
        self.tip, self.clock, self.rules, self.resigned = tip, clock, rules, resigned
        self.departs = clock.departure(round)
        self.candidates, self.expected = list(candidates), set(expected)
        self.sign, self._verify = sign, verify
        self.phase = Phase.OPEN
        self.mine: m.Join | None = None
        self.coordinator: bytes | None = None
        self.group: m.Group | None = None
        self.group_id: bytes | None = None
        self.parts: Parts | None = None
        """The exchange in parts, None where whole contributions are exchanged."""
        self.outcome: Outcome | None = None
        self._desk: Desk | None = None
        self._tried: list[bytes] = []
        self._early_joins: dict[bytes, m.Join | None] = {}
        self._arrived: dict[bytes, bytes] = {}
        self._states: dict[Basis, bytes | None] = {}
        self._commit: SignedRecord | None = None
        self._fetching: dict[bytes, list[bytes]] = {}
        self._asked: dict[bytes, bytes] = {}
        self._wait_until: float | None = None
        self._half_at: float | None = None
        self._asks = 0
        self._voted = False
        self._corrections: dict[bytes, tuple[int, int]] = {}
        """Averages that are fetched because others hold them, and where they belong."""

    @property
    def over(self) -> bool:
        """Whether there is an outcome; no event changes it any more."""
        return self.phase is Phase.DONE

    @property
    def decided(self) -> bool:
        """Whether there is a decision: the round will end with it, however long that takes."""
        return self.phase is Phase.DECIDED or isinstance(self.outcome, Committed)

    # ------------------------------------------------------------------ events

    def contribute(self, join: m.Join, now: float) -> list[Action]:
        """This peer's contribution is ready; it enters the round."""
        if self.phase is Phase.DONE:
            return []
        if self.mine is not None:
            raise LocalProtocolError(f"second contribution to round {self.round}")
        self.mine = join
        self._arrived[self.me] = join.member.payload
        if self._desk is not None:
            self.coordinator = self.me
            return self._desk.on_join(self.me, join, now)
        return self._next_coordinator(now)

    def received(self, peer: bytes, message: m.Message, now: float) -> list[Action]:
        """A control message from ``peer``. RemoteProtocolError if it breaks the rules."""
        if isinstance(message, m.Join):
            return self._on_join(peer, message, now)
        if isinstance(message, m.Ask):
            return self._on_ask(peer)
        if self.phase is Phase.DONE:
            return []
        if isinstance(message, m.Commit):
            return self._on_commit(peer, message, now)
        if isinstance(message, m.Have):
            return self._desk.on_have(peer, message, now) if self._desk else []
        if isinstance(message, m.Averaged):
            return self._desk.on_averaged(peer, message, now) if self._desk else []
        if peer != self.coordinator:
            return []
        if isinstance(message, m.Group):
            return self.on_group(message, now)
        if isinstance(message, m.Plan):
            return self.on_plan(message, now)
        if isinstance(message, m.Abort):
            return self.finish(Aborted(message.reason))
        if isinstance(message, m.Redirect):
            return self._on_redirect(peer, message, now)
        return self._on_behind(peer, message, now)

    def arrived(self, owner: bytes, payload: bytes, now: float) -> list[Action]:
        """The contribution of ``owner`` with digest ``payload`` is here, checked and stored by the driver."""
        if self.phase is Phase.DONE:
            return []
        self._arrived[owner] = payload
        if self.phase is Phase.EXCHANGE and self.parts is None:
            return self._report(now)
        return self._complete(now) if self.phase is Phase.DECIDED else []

    def slice_arrived(self, owner: bytes, part: int) -> list[Action]:
        """The slice of ``owner``'s contribution that makes ``part`` is here."""
        if self.parts is None or self.phase is not Phase.EXCHANGE:
            return []
        self.parts.slice_here(owner, part)
        return self._reduce_ready()

    def part_reduced(self, attempt: int, part: int, payload: bytes, now: float) -> list[Action]:
        """The reduction that ``ReducePart`` asked for is done; ``payload`` is the digest of the encoded average."""
        if self.parts is None or self.phase is Phase.DONE or attempt != self.parts.attempt:
            return []
        others = [member.peer for member in self.parts.group.members if member.peer != self.me]
        after = [peer for peer in others if peer > self.me] + [peer for peer in others if peer < self.me]
        pushes: list[Action] = [PushAverage(peer, attempt, part) for peer in after]
        return pushes + self.average_arrived(attempt, part, payload, now)

    def average_arrived(self, attempt: int, part: int, payload: bytes, now: float) -> list[Action]:
        """The encoded average of ``part`` is here, checked and stored by the driver."""
        if self.parts is None or self.phase is Phase.DONE:
            return []
        self.parts.averages[attempt, part] = payload
        if self.phase is Phase.DECIDED:
            return self._complete(now)
        return self._vote(now)

    def lost(self, peer: bytes, now: float) -> list[Action]:
        """``peer`` cannot be reached: the connection was refused or broke."""
        if self.phase is Phase.DONE:
            return []
        if self.phase is Phase.DECIDED:
            return self._fetch_failed(peer, now)
        if self._desk is not None and peer != self.me:
            return self._desk.member_lost(peer, now)
        if peer == self.coordinator and self.phase is Phase.OPEN:
            self._tried.append(peer)
            return self._next_coordinator(now)
        if peer == self.coordinator and self.phase is Phase.EXCHANGE and not self._asks:
            self._asks = 1  # one question is enough: the others have lost it too, or know more
            return self._ask(now)
        return []

    def fetch_failed(self, source: bytes, now: float) -> list[Action]:
        """``source`` did not have what was to be fetched from it."""
        return self._fetch_failed(source, now) if self.phase is Phase.DECIDED else []

    def reduced(self, basis: Basis, state: bytes, now: float) -> list[Action]:
        """The step that ``Reduce`` asked for is done; ``state`` is the digest of the state after it."""
        self._states[basis] = state
        if self._desk is None or self.phase is Phase.DONE:
            return []
        return self._desk.state_known(basis, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call at or after ``deadline()``."""
        if self.over:
            return []
        actions: list[Action] = []
        if self._half_at is not None and now >= self._half_at:
            actions += self._half_time(now)
        if not self.over and self._desk is not None:
            actions += self._desk.tick(now)
        if not self.over and self._wait_until is not None and now >= self._wait_until:
            actions += self._waited(now)
        return actions

    def deadline(self) -> float | None:
        """When ``tick`` is due next, None if nothing is awaited."""
        if self.phase is Phase.DONE:
            return None
        times = [self._wait_until, self._half_at, self._desk.deadline() if self._desk else None]
        return min((time for time in times if time is not None), default=None)

    def waiting_for(self) -> str:
        """What this peer waits for in this round, in words."""
        if self._desk is not None and not self._desk.closed:
            return f"gathering peers ({len(self._desk.joined)} of {len(self.expected | {self.me})})"
        if self.phase is Phase.EXCHANGE and self.parts is not None:
            done = sum(attempt == self.parts.attempt for attempt, _ in self.parts.averages)
            return f"reducing in parts ({done} of {len(self.parts.reducers)} averages)"
        if self.phase is Phase.EXCHANGE and self.group is not None:
            return f"exchanging contributions ({len(self.held())} of {len(self.group.members)})"
        return self.phase.value

    # ------------------------------------------------------------------ finding the group

    def _next_coordinator(self, now: float) -> list[Action]:
        assert self.mine is not None
        for peer in self.candidates:
            if peer in self._tried:
                continue
            self.coordinator = peer
            if peer == self.me:
                self._wait_until = None
                return self._serve(now)
            self._wait_until = max(now, self.departs) + self.rules.window + self.rules.margin
            return [Send(peer, self._join())]
        return self.finish(Aborted("no coordinator answered"))

    def _join(self) -> m.Join:
        assert self.mine is not None
        return replace(self.mine, tried=tuple(self._tried)[:MAX_MEMBERS])

    def _serve(self, now: float) -> list[Action]:
        self._desk = Desk(self, now, self._tried)
        joins, self._early_joins = {self.me: self.mine, **self._early_joins}, {}
        actions: list[Action] = []
        for peer, join in joins.items():
            if join is not None and not self.over:
                actions += self._on_join(peer, join, now)
        return actions

    def _on_join(self, peer: bytes, join: m.Join, now: float) -> list[Action]:
        if join.member.peer != peer:
            raise RemoteProtocolError("joined in another peer's name")
        if self.phase is Phase.DONE:
            return self._on_ask(peer) or [Send(peer, m.Behind(self.fragment, self.round, self.tip))]
        if self._desk is not None:
            return self._desk.on_join(peer, join, now)
        if (
            self.phase is Phase.EXCHANGE
            and self.coordinator is not None
            and self.coordinator not in (peer, *join.tried)
        ):
            return [Send(peer, m.Redirect(self.fragment, self.round, self.coordinator))]
        # It is early, or it has given up a coordinator that this peer still waits for: it hears what comes of it.
        self._early_joins[peer] = join
        return self._serve(now) if self._my_turn(join) else []

    def _my_turn(self, join: m.Join) -> bool:
        """Whether a peer that asks before this one has contributed is right to ask."""
        if self.mine is not None or self.me not in self.candidates:
            return False
        before = self.candidates[: self.candidates.index(self.me)]
        return all(peer in join.tried for peer in before)

    def _on_redirect(self, peer: bytes, message: m.Redirect, now: float) -> list[Action]:
        if self.phase is not Phase.OPEN:
            return []
        if message.to == peer:  # it coordinates, and waits for others: it is not silent
            self._wait_until = max(now, self.departs) + 2 * (self.rules.window + self.rules.margin)
            return []
        self._tried.append(peer)
        if message.to == self.me:
            return self._next_coordinator(now)
        if message.to in self.candidates and message.to not in self._tried:
            self.coordinator = message.to
            self._wait_until = now + self.rules.window + self.rules.margin
            return [Send(message.to, self._join())]
        # The others meet at a peer that this one cannot reach: no way in, but the outcome can still be had.
        self.phase, self.coordinator = Phase.EXCHANGE, message.to
        self._wait_until = now + self.rules.min_exchange
        return []

    def _on_behind(self, peer: bytes, message: m.Behind, now: float) -> list[Action]:
        if self.phase is not Phase.OPEN or message.tip.fragment != self.fragment:
            return []
        if message.tip.beats(self.tip):
            return self.finish(Outrun(peer, f"version {self.tip.version} here, {message.tip.version} there"))
        self._tried.append(peer)
        return self._next_coordinator(now)

    # ------------------------------------------------------------------ exchange

    def on_group(self, group: m.Group, now: float) -> list[Action]:
        """The group is closed. The coordinator calls it for itself."""
        if self.phase is not Phase.OPEN:
            return []
        if len(group.members) > self.rules.max_group:
            raise RemoteProtocolError(f"group of {len(group.members)}, the run allows {self.rules.max_group}")
        if group.shares and group.shares[-1].stop != self.numel:
            raise RemoteProtocolError(f"shares of {group.shares[-1].stop} values where the fragment has {self.numel}")
        if odd := [share.stop for share in group.shares[:-1] if share.stop % BLOCK]:
            raise RemoteProtocolError(f"a part ends at value {odd[0]}, which is not the end of a block of {BLOCK}")
        self.phase, self.group, self.group_id = Phase.EXCHANGE, group, group_digest(group)
        self._await_decision(now)
        mine = self.mine.member if self.mine else None
        if mine not in group.members:
            self.parts = None
            return []
        self._half_at = now + self._seconds / 2
        others = [member.peer for member in group.members if member.peer != self.me]
        # Each begins with the peer after itself, so that not all send to the same one at first.
        after = [peer for peer in others if peer > self.me] + [peer for peer in others if peer < self.me]
        if not group.shares:
            pushes: list[Action] = [Push(peer) for peer in after]
            return pushes + self._report(now)
        self.parts = Parts(self.me, group)
        for part in range(len(group.shares)):
            self.parts.slice_here(self.me, part)
        pushes = [Push(peer, self.parts.of(peer)) for peer in after if self.parts.of(peer)]
        return pushes + self._reduce_ready()

    @property
    def _seconds(self) -> float:
        """How long the coordinator lets the exchange take."""
        return min(self.group.seconds, 3600.0) if self.group else self.rules.min_exchange

    def _await_decision(self, now: float) -> None:
        # A coordinator has its own limit, and may need longer than a margin for the reduction.
        self._wait_until = None if self._desk is not None else now + self._seconds + self.rules.margin

    def on_plan(self, plan: m.Plan, now: float) -> list[Action]:
        """A further attempt: somebody fell out. RemoteProtocolError if it does not fit the group."""
        parts = self.parts
        if self.phase is not Phase.EXCHANGE or (parts is not None and plan.attempt <= parts.attempt):
            return []
        if parts is None:  # it came late and waits for the outcome, which now takes longer
            self._await_decision(now)
            return []
        members = {member.peer for member in parts.group.members}
        if len(plan.reducers) != len(parts.reducers) or not {*plan.counted, *plan.reducers} <= members:
            raise RemoteProtocolError("a plan that does not fit its group")
        moved = parts.adopt(plan)
        self._await_decision(now)
        self._half_at = now + self._seconds / 2
        pushes: list[Action] = []
        if self.me in plan.counted:
            pushes = [Push(peer, numbers) for peer, numbers in sorted(moved.items())]
        return pushes + self._reduce_ready() + self._vote(now)

    def _reduce_ready(self) -> list[Action]:
        parts = self.parts
        assert parts is not None
        members = tuple(member for member in parts.group.members if member.peer in parts.counted)
        return [ReducePart(parts.attempt, part, members) for part in parts.ready()]

    def _vote(self, now: float) -> list[Action]:
        """Tell the coordinator when all averages of the present attempt are here."""
        assert self.parts is not None
        assert self.coordinator is not None
        digests = self.parts.complete()
        if digests is None:
            return []
        members = tuple(member for member in self.parts.group.members if member.peer in self.parts.counted)
        actions = self.want_state(Basis(members, self.parts.as_parts(digests)))
        if self._desk is not None:
            return actions + self._desk.progressed(now)
        if self._asks:  # it is given up already
            return actions
        self._voted = True
        vote = m.Averaged(self.fragment, self.round, self.parts.attempt, digests)
        return [Send(self.coordinator, vote), *actions]

    def held(self) -> set[bytes]:
        """Members whose whole contributions are here, as the group was told of them."""
        if self.group is None:
            return set()
        return {member.peer for member in self.group.members if self._arrived.get(member.peer) == member.payload}

    def _report(self, now: float) -> list[Action]:
        """Tell the coordinator what is here: when all is, or from half time on whatever is."""
        if self.group is None or self.mine is None or self.mine.member not in self.group.members:
            return []
        held = self.held()
        late = self._half_at is not None and now >= self._half_at
        whole = len(held) == len(self.group.members)
        if not whole and not late:
            return []
        self._half_at = None
        early = self.want_state(Basis(self.group.members)) if whole else []
        return self._tell_have(m.Have(self.fragment, self.round, 0, tuple(sorted(held))), now) + early

    def _half_time(self, now: float) -> list[Action]:
        if self.parts is None:
            return self._report(now)
        self._half_at = None
        if not self.parts.mine:
            return []
        return self._tell_have(m.Have(self.fragment, self.round, self.parts.attempt, self.parts.held()), now)

    def _tell_have(self, have: m.Have, now: float) -> list[Action]:
        if self._desk is not None:
            return self._desk.on_have(self.me, have, now)
        assert self.coordinator is not None
        if self._asks:  # it is given up already: a vote could only stand in the way of another one
            return []
        self._voted = self._voted or self.parts is None
        return [Send(self.coordinator, have)]

    def want_state(self, basis: Basis) -> list[Action]:
        """Have the state after ``basis`` computed, once."""
        if basis in self._states:
            return []
        self._states[basis] = None
        return [Reduce(basis)]

    def state_of(self, basis: Basis) -> bytes | None:
        """The digest of the state after ``basis``, None while it is not known."""
        return self._states.get(basis)

    def state_pending(self, basis: Basis) -> bool:
        """Whether the state after ``basis`` is being computed."""
        return basis in self._states and self._states[basis] is None

    # ------------------------------------------------------------------ decision

    def _on_commit(self, peer: bytes, message: m.Commit, now: float) -> list[Action]:
        record = message.signed.record
        if self.phase is Phase.DECIDED:
            return []
        if record.run != self.run:
            raise RemoteProtocolError("commit of another run")
        if not self._verify(record.coordinator, record.signed_bytes(), message.signed.signature):
            raise RemoteProtocolError("commit with a wrong signature")
        if record.prev != self.tip.head:
            return self.finish(Outrun(peer, f"round {self.round} was committed on another chain"))
        check_extends(record, self.tip, self.clock, self.resigned)
        self._check_counted(record)
        self._commit, self.phase, self._half_at, self._wait_until = message.signed, Phase.DECIDED, None, None
        if self._desk is not None:
            # Another group has decided: whoever joined here gets that outcome.
            waiting = set(self._desk.joined) | self._desk.late
            self._early_joins |= {peer: self._desk.joined.get(peer) for peer in sorted(waiting - {self.me})}
            self._desk = None
        return self._complete(now)

    def _check_counted(self, record: CommitRecord) -> None:
        """The decision may name only contributions that were offered: the group's, and the own one as it was."""
        if record.parts and record.parts[-1].stop != self.numel:
            raise RemoteProtocolError("commit averages another number of values than the fragment has")
        if self.group is not None and record.coordinator == self.coordinator:
            if not set(self.group.members).issuperset(record.members):
                raise RemoteProtocolError("commit counts a contribution that was not offered to the group")
            if [part.stop for part in record.parts] != [share.stop for share in self.group.shares]:
                raise RemoteProtocolError("commit cuts the fragment differently than the group")
        for member in record.members:
            if member.peer == self.me and (self.mine is None or member != self.mine.member):
                raise RemoteProtocolError("commit counts a contribution that this peer did not make")

    def _missing(self) -> dict[bytes, tuple[list[bytes], int | None]]:
        """What the decision needs and is not here: digest, who should hold it, values (None: a whole contribution)."""
        assert self._commit is not None
        record = self._commit.record
        peers = [member.peer for member in record.members if member.peer not in (self.me, record.coordinator)]
        rest = [record.coordinator, *peers]
        if not record.parts:
            gone: list[Member] = [x for x in record.members if self._arrived.get(x.peer) != x.payload]
            return {x.payload: ([p for p in dict.fromkeys([x.peer, *rest]) if p != self.me], None) for x in gone}
        here = set(self.parts.averages.values()) if self.parts else set()
        here |= set(self._arrived.values())
        missing: dict[bytes, tuple[list[bytes], int | None]] = {}
        for start, part in zip([0, *(part.stop for part in record.parts)], record.parts, strict=False):
            if part.payload not in here:
                missing[part.payload] = ([peer for peer in rest if peer != self.me], part.stop - start)
        return missing

    def _complete(self, now: float) -> list[Action]:
        """After the decision: finish if every counted byte is here, else fetch."""
        assert self._commit is not None
        missing = self._missing()
        if not missing:
            return self.finish(Committed(self._commit))
        actions: list[Action] = []
        for payload, (holders, _) in missing.items():
            if payload not in self._fetching and not self.over:
                self._fetching[payload] = list(holders)
                actions += self._fetch_next(payload, now)
        return actions

    def fetched(self, payload: bytes, now: float) -> list[Action]:
        """An averaged part that ``Fetch`` asked for is here, checked and stored by the driver."""
        if self.phase is Phase.EXCHANGE and self.parts is not None and payload in self._corrections:
            self.parts.averages[self._corrections.pop(payload)] = payload
            return self._vote(now)
        if self.phase is not Phase.DECIDED:
            return []
        self._arrived[payload] = payload  # under its own name: it has no owner
        return self._complete(now)

    def owners_of(self, payload: bytes) -> list[bytes]:
        """Counted members whose contribution has this digest."""
        members = self._commit.record.members if self._commit else ()
        return [member.peer for member in members if member.payload == payload]

    def correct(self, voter: bytes, digests: Sequence[bytes]) -> list[Action]:
        """Others hold these averages and this peer holds other ones: somebody gave it false bytes. Get theirs."""
        assert self.parts is not None
        actions: list[Action] = []
        for part, payload in enumerate(digests):
            key, (start, stop) = (self.parts.attempt, part), self.parts.bounds(part)
            if self.parts.averages.get(key) != payload and payload not in self._corrections:
                self._corrections[payload] = key
                actions.append(Fetch(voter, payload, stop - start))
        return actions

    def _fetch_next(self, payload: bytes, now: float) -> list[Action]:
        assert self._commit is not None
        holders, (_, numel) = self._fetching[payload], self._missing()[payload]
        if not holders:
            return self.finish(Outrun(self._commit.record.coordinator, "what was averaged could not be fetched"))
        self._wait_until = now + max(self.rules.ask_wait, self.rules.min_exchange)
        self._asked[payload] = holders.pop(0)
        return [Fetch(self._asked[payload], payload, numel)]

    def _fetch_failed(self, source: bytes, now: float) -> list[Action]:
        actions: list[Action] = []
        for payload in self._missing():
            if self.phase is Phase.DECIDED and self._asked.get(payload) == source:
                actions += self._fetch_next(payload, now)
        return actions

    # ------------------------------------------------------------------ silence

    def _ask(self, now: float) -> list[Action]:
        """The coordinator is silent: perhaps another member has heard the decision."""
        self._asks += 1
        self._wait_until = now + self.rules.ask_wait
        peers = [member.peer for member in self.group.members] if self.group else list(self.candidates)
        return [Send(peer, m.Ask(self.fragment, self.round)) for peer in peers if peer != self.me]

    def _waited(self, now: float) -> list[Action]:
        """The time for what this member awaited is over."""
        if self.phase is Phase.OPEN:
            assert self.coordinator is not None
            self._tried.append(self.coordinator)
            return self._next_coordinator(now)
        if self.phase is Phase.EXCHANGE:
            return self._ask(now) if self._asks < 2 else self._take_over(now)
        for payload in self._missing():
            return self._fetch_next(payload, now)
        return []

    def _take_over(self, now: float) -> list[Action]:
        """The coordinator is gone and nobody knows a decision: begin again with the next one."""
        if self._voted:
            # With this vote it may have decided; then two groups could commit the same round.
            return self.finish(Aborted("the coordinator fell silent and nobody knows a decision"))
        inside = self.group is not None and self.mine is not None and self.mine.member in self.group.members
        if not inside or self.coordinator is None:
            # It came late or found no way in: the others may well be going on without it.
            return self.finish(Aborted("the coordinator fell silent and nobody knows a decision"))
        self._tried.append(self.coordinator)
        self.phase, self.group, self.group_id, self.parts, self._asks = Phase.OPEN, None, None, None, 0
        self._half_at = self._wait_until = None
        return self._next_coordinator(now)

    # ------------------------------------------------------------------ the end

    def finish(self, outcome: Outcome) -> list[Action]:
        """The round is over for this peer."""
        self.phase, self.outcome = Phase.DONE, outcome
        self._wait_until = self._half_at = None
        actions: list[Action] = [Finish(outcome)]
        # Peers that hoped this one would coordinate get the outcome at once instead of a time-out.
        for peer in self._early_joins:
            actions += self._on_ask(peer)
        self._early_joins.clear()
        return actions

    def _on_ask(self, peer: bytes) -> list[Action]:
        if isinstance(self.outcome, Committed):
            return [Send(peer, m.Commit(self.fragment, self.round, self.outcome.signed))]
        if isinstance(self.outcome, Aborted) and self._desk is not None:
            return [Send(peer, m.Abort(self.fragment, self.round, self.outcome.reason))]
        return []
