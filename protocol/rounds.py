"""One peer's part in one round, as a state machine: messages, arrivals and ``now`` go in, actions come out.

Every peer of a round runs one ``Round``. It is always a member, and it is the coordinator when it is the first in
rendezvous order that answers. Nothing here waits, sends or reads a clock; a driver does (``stretto.protocol.peer``).

    member        OPEN --Group--> EXCHANGE --Commit--> DECIDED --all payloads here--> DONE
                  OPEN --Abort, Behind, nobody answers--> DONE       EXCHANGE --Abort, no decision--> DONE
    coordinator   gathers Join until the roster is in or the window ends, sends Group, gathers Have,
                  asks for the reduction, sends Commit; Abort at any point before that

Rules:
1. A round commits whole or changes nothing. The only way to change state is ``Finish(Committed)``.
2. Once it has a Group, a member never joins another coordinator of the same round: groups of one round are disjoint,
   so at most one has the quorum of dynamic voting (``chain.Tip.quorum``).
3. A coordinator counts only contributions that it holds itself and that more than half of the living members hold,
   so that whoever misses one can fetch it.
4. A member accepts a decision from anybody, since it checks signature, chain, quorum, clock and digests itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import TypeAlias

from stretto.protocol import messages as m
from stretto.protocol.chain import CommitRecord, Member, SignedRecord, Tip, check_extends
from stretto.protocol.digest import digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.schedule import Clock, next_clock


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a round needs to know of the run config, and its time limits in seconds."""

    inner_steps: int
    fragments: int
    min_group: int
    max_group: int
    window: float
    """How long a coordinator waits for expected peers after the departure."""
    margin: float = 3.0
    """How much longer a member waits than the coordinator should need."""
    min_exchange: float = 10.0
    """An exchange may always take this long, however impatient the members are."""
    ask_wait: float = 2.0
    """How long to wait for answers to Ask, and for a fetched payload before the next holder is tried."""

    def within(self, cycle: float) -> "Rules":
        """These rules for a run whose fragments leave every ``cycle`` seconds: no wait may outlast the round's turn.

        Without it a silent peer holds every round until the fragment's next one overtakes it. Below a few
        seconds waits are not shortened: on a busy machine messages take their time.
        """

        def capped(wait: float, share: float, least: float) -> float:
            return min(wait, max(least, share * cycle))

        return replace(
            self,
            window=capped(self.window, 1 / 4, 2.0),
            margin=capped(self.margin, 1 / 4, 1.0),
            min_exchange=capped(self.min_exchange, 1 / 2, 4.0),
            ask_wait=capped(self.ask_wait, 1 / 8, 0.5),
        )


@dataclass(frozen=True)
class Send:
    """Deliver a control message."""

    to: bytes
    message: m.Message


@dataclass(frozen=True)
class Push:
    """Send the own contribution to a member over a bulk stream."""

    to: bytes


@dataclass(frozen=True)
class Fetch:
    """Get a contribution by digest from a peer that should hold it."""

    source: bytes
    member: Member


@dataclass(frozen=True)
class Reduce:
    """Average these contributions and take the outer step on a copy; report its digest through ``reduced``."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Committed:
    """The round is decided and every payload is here."""

    signed: SignedRecord


@dataclass(frozen=True)
class Aborted:
    """Nothing changed."""

    reason: str


@dataclass(frozen=True)
class Outrun:
    """The fragment's chain goes on elsewhere: this peer must repair, for example from ``source``."""

    source: bytes
    reason: str


Outcome: TypeAlias = Committed | Aborted | Outrun


@dataclass(frozen=True)
class Finish:
    """The round is over for this peer."""

    outcome: Outcome


Action: TypeAlias = Send | Push | Fetch | Reduce | Finish


class Phase(Enum):
    """Where a member stands."""

    OPEN = "finding the group"
    EXCHANGE = "exchanging contributions"
    DECIDED = "fetching what is missing"
    DONE = "done"


def rendezvous_order(run: bytes, fragment: int, round: int, peers: Sequence[bytes]) -> list[bytes]:
    """Peers in the order in which they serve as coordinator of this round: highest random weight first."""
    place = [run, fragment.to_bytes(4, "big"), round.to_bytes(8, "big")]
    return sorted(peers, key=lambda peer: digest("rendezvous", [*place, peer]), reverse=True)


@dataclass
class _Desk:
    """What a coordinator keeps of the round it serves."""

    close_at: float
    joined: dict[bytes, m.Join] = field(default_factory=dict)
    have: dict[bytes, set[bytes]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    late: set[bytes] = field(default_factory=set)
    ahead: bytes | None = None
    decide_at: float | None = None
    reducing: tuple[Member, ...] | None = None


class Round:
    """One peer's view of round ``round`` of ``fragment``.

    ``candidates`` are coordinators in the order to try, this peer among them if it can serve; ``expected`` are the
    peers that a coordinator waits for within the window; ``departs`` is the swarm time of the departure.
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
    ) -> None:
        self.resigned = resigned
        self.me, self.run, self.round, self.fragment = me, run, round, tip.fragment
        self.tip, self.clock, self.rules = tip, clock, rules
        self.departs = clock.departure(round)
        self.candidates, self.expected = list(candidates), set(expected)
        self._sign, self._verify = sign, verify
        self.phase = Phase.OPEN
        self.mine: m.Join | None = None
        self.coordinator: bytes | None = None
        self.group: m.Group | None = None
        self.outcome: Outcome | None = None
        self._desk: _Desk | None = None
        self._tried: list[bytes] = []
        self._early_joins: dict[bytes, m.Join | None] = {}
        self._arrived: dict[bytes, bytes] = {}
        self._commit: SignedRecord | None = None
        self._holders: dict[bytes, list[bytes]] = {}
        self._asked: dict[bytes, bytes] = {}
        self._wait_until: float | None = None
        self._half_at: float | None = None
        self._asks = 0

    @property
    def over(self) -> bool:
        """Whether there is an outcome; no event changes it any more."""
        return self.phase is Phase.DONE

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
            return self._on_join(self.me, join, now)
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
            return self._on_have(peer, message)
        if peer != self.coordinator:
            return []
        if isinstance(message, m.Group):
            return self._on_group(message, now)
        if isinstance(message, m.Abort):
            return self._finish(Aborted(message.reason))
        if isinstance(message, m.Redirect):
            return self._on_redirect(peer, message, now)
        return self._on_behind(peer, message, now)

    def arrived(self, owner: bytes, payload: bytes, now: float) -> list[Action]:
        """The contribution of ``owner`` with digest ``payload`` is here, checked and stored by the driver."""
        if self.phase is Phase.DONE:
            return []
        self._arrived[owner] = payload
        if self.phase is Phase.EXCHANGE:
            return self._report(now)
        if self.phase is Phase.DECIDED:
            return self._complete(now)
        return []

    def lost(self, peer: bytes, now: float) -> list[Action]:
        """``peer`` cannot be reached: the connection was refused or broke."""
        if self.phase is Phase.DONE:
            return []
        actions: list[Action] = []
        if self._desk is not None and peer != self.me:
            actions += self._member_lost(self._desk, peer, now)
        elif peer == self.coordinator and self.phase is Phase.OPEN:
            self._tried.append(peer)
            actions += self._next_coordinator(now)
        elif peer == self.coordinator and self.phase is Phase.EXCHANGE and not self._asks:
            actions += self._ask(now)
        if self.phase is Phase.DECIDED:
            actions += self._fetch_failed(peer, now)
        return actions

    def fetch_failed(self, source: bytes, now: float) -> list[Action]:
        """``source`` did not have what was to be fetched from it."""
        return self._fetch_failed(source, now) if self.phase is Phase.DECIDED else []

    def reduced(self, state: bytes, now: float) -> list[Action]:
        """The reduction that ``Reduce`` asked for is done; ``state`` is the digest of the state after it."""
        desk = self._desk
        if desk is None or desk.reducing is None or self.phase is Phase.DONE:
            return []
        members = desk.reducing
        rates = [desk.joined[member.peer].rate for member in members]
        clock = next_clock(
            self.clock, self.round, rates, max(0.0, now - self.departs), self.rules.inner_steps, self.rules.fragments
        )
        record = CommitRecord(
            run=self.run,
            fragment=self.fragment,
            round=self.round,
            version=self.tip.version + 1,
            prev=self.tip.head,
            members=members,
            electors=self._electors(members),
            state=state,
            tokens_total=self.tip.tokens_total + sum(member.tokens for member in members),
            clock=clock,
            coordinator=self.me,
        )
        signed = SignedRecord(record, self._sign(record.signed_bytes()))
        self._commit = signed
        audience = sorted((set(desk.joined) | desk.late) - {self.me} - desk.gone)
        tell: list[Action] = [Send(peer, m.Commit(self.fragment, self.round, signed)) for peer in audience]
        return tell + self._finish(Committed(signed))

    def _electors(self, members: tuple[Member, ...]) -> tuple[bytes, ...]:
        """Whoever is counted, and earlier electors that are still seen alive."""
        alive = (set(self.candidates) | self.expected) & set(self.tip.electors)
        counted = {member.peer for member in members}
        # No more than fit into a group, so that the next one has room for a quorum and for newcomers.
        others = sorted(alive - counted)[: max(0, self.rules.max_group - len(counted))]
        return tuple(sorted(counted | set(others)))

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call at or after ``deadline()``."""
        if self.over:
            return []
        actions: list[Action] = []
        if self._desk is not None:
            actions += self._desk_tick(self._desk, now)
        if not self.over and self._half_at is not None and now >= self._half_at:
            actions += self._report(now)
        if not self.over and self._wait_until is not None and now >= self._wait_until:
            actions += self._waited(now)
        return actions

    def deadline(self) -> float | None:
        """When ``tick`` is due next, None if nothing is awaited."""
        if self.phase is Phase.DONE:
            return None
        times = [self._wait_until, self._half_at]
        if self._desk is not None and self._desk.reducing is None:
            times.append(self._desk.close_at if self._desk.decide_at is None else self._desk.decide_at)
        known = [time for time in times if time is not None]
        return min(known) if known else None

    def waiting_for(self) -> str:
        """What this peer waits for in this round, in words."""
        if self._desk is not None and self._desk.decide_at is None:
            return f"gathering peers ({len(self._desk.joined)} of {len(self.expected | {self.me})})"
        if self.phase is Phase.EXCHANGE and self.group is not None:
            return f"exchanging contributions ({len(self._held())} of {len(self.group.members)})"
        return self.phase.value

    # ------------------------------------------------------------------ member

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
        return self._finish(Aborted("no coordinator answered"))

    def _join(self) -> m.Join:
        assert self.mine is not None
        j = self.mine
        return m.Join(j.fragment, j.round, j.head, j.version, j.member, j.rate, j.patience, tuple(self._tried))

    def _on_redirect(self, peer: bytes, message: m.Redirect, now: float) -> list[Action]:
        if self.phase is not Phase.OPEN:
            return []
        self._tried.append(peer)
        if message.to in self.candidates and message.to not in self._tried and message.to != self.me:
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
            why = f"version {self.tip.version} here, {message.tip.version} there"
            return self._finish(Outrun(peer, why))
        self._tried.append(peer)
        return self._next_coordinator(now)

    def _on_group(self, group: m.Group, now: float) -> list[Action]:
        if self.phase is not Phase.OPEN:
            return []
        if len(group.members) > self.rules.max_group:
            raise RemoteProtocolError(f"group of {len(group.members)}, the run allows {self.rules.max_group}")
        self.phase, self.group = Phase.EXCHANGE, group
        seconds = min(group.seconds, 3600.0)
        # A coordinator has its own limit, and may need longer than a margin for the reduction.
        self._wait_until = None if self._desk is not None else now + seconds + self.rules.margin
        mine = self.mine.member if self.mine else None
        if mine not in group.members:
            return []
        self._half_at = now + seconds / 2
        others = [member.peer for member in group.members if member.peer != self.me]
        pushes: list[Action] = [Push(peer) for peer in others]
        return pushes + self._report(now)

    def _held(self) -> set[bytes]:
        if self.group is None:
            return set()
        return {member.peer for member in self.group.members if self._arrived.get(member.peer) == member.payload}

    def _report(self, now: float) -> list[Action]:
        """Tell the coordinator what is here: when all is, or from half time on whatever is."""
        if self.group is None or self.mine is None or self.mine.member not in self.group.members:
            return []
        held = self._held()
        late = self._half_at is not None and now >= self._half_at
        if len(held) < len(self.group.members) and not late:
            return []
        self._half_at = None if late or len(held) == len(self.group.members) else self._half_at
        have = m.Have(self.fragment, self.round, tuple(sorted(held)))
        if self.coordinator == self.me:
            return self._on_have(self.me, have)
        assert self.coordinator is not None
        return [Send(self.coordinator, have)]

    def _on_commit(self, peer: bytes, message: m.Commit, now: float) -> list[Action]:
        record = message.signed.record
        if self.phase is Phase.DECIDED:
            return []
        if record.run != self.run:
            raise RemoteProtocolError("commit of another run")
        if not self._verify(record.coordinator, record.signed_bytes(), message.signed.signature):
            raise RemoteProtocolError("commit with a wrong signature")
        if record.prev != self.tip.head:
            return self._finish(Outrun(peer, f"round {self.round} was committed on another chain"))
        check_extends(record, self.tip, self.clock, self.resigned)
        self._check_counted(record)
        self._commit, self.phase, self._half_at = message.signed, Phase.DECIDED, None
        if self._desk is not None:
            # Another group has decided: whoever joined here gets that outcome.
            waiting = set(self._desk.joined) | self._desk.late
            self._early_joins |= {peer: self._desk.joined.get(peer) for peer in sorted(waiting - {self.me})}
            self._desk = None
        return self._complete(now)

    def _check_counted(self, record: CommitRecord) -> None:
        """The decision may name only contributions that were offered: the group's, and the own one as it was."""
        if self.group is not None and record.coordinator == self.coordinator:
            offered = set(self.group.members)
            if not offered.issuperset(record.members):
                raise RemoteProtocolError("commit counts a contribution that was not offered to the group")
        for member in record.members:
            if member.peer == self.me and (self.mine is None or member != self.mine.member):
                raise RemoteProtocolError("commit counts a contribution that this peer did not make")

    def _complete(self, now: float) -> list[Action]:
        """After the decision: finish if every counted contribution is here, else fetch."""
        assert self._commit is not None
        members = self._commit.record.members
        missing = [member for member in members if self._arrived.get(member.peer) != member.payload]
        if not missing:
            return self._finish(Committed(self._commit))
        actions: list[Action] = []
        for member in missing:
            if member.peer not in self._holders:
                others = [c.peer for c in members if c.peer not in (member.peer, self.me)]
                coordinator = self._commit.record.coordinator
                first = [member.peer] if member.peer != self.me else []
                self._holders[member.peer] = list(dict.fromkeys([*first, coordinator, *others]))
                actions += self._fetch_next(member, now)
        return actions

    def _fetch_next(self, member: Member, now: float) -> list[Action]:
        holders = self._holders[member.peer]
        if not holders:
            assert self._commit is not None
            return self._finish(Outrun(self._commit.record.coordinator, "a counted contribution could not be fetched"))
        self._wait_until = now + max(self.rules.ask_wait, self.rules.min_exchange)
        self._asked[member.peer] = holders.pop(0)
        return [Fetch(self._asked[member.peer], member)]

    def _fetch_failed(self, source: bytes, now: float) -> list[Action]:
        assert self._commit is not None
        missing = [x for x in self._commit.record.members if self._arrived.get(x.peer) != x.payload]
        actions: list[Action] = []
        for member in missing:
            if self.phase is Phase.DECIDED and self._asked.get(member.peer) == source:
                actions += self._fetch_next(member, now)
        return actions

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
            if self._asks < 2:
                return self._ask(now)
            return self._finish(Aborted("the coordinator fell silent and nobody knows a decision"))
        assert self._commit is not None
        members = self._commit.record.members
        missing = [x for x in members if self._arrived.get(x.peer) != x.payload]
        return self._fetch_next(missing[0], now)

    def _finish(self, outcome: Outcome) -> list[Action]:
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

    # ------------------------------------------------------------------ coordinator

    def _serve(self, now: float) -> list[Action]:
        self._desk = _Desk(close_at=max(now, self.departs) + self.rules.window)
        joins, self._early_joins = {self.me: self.mine, **self._early_joins}, {}
        actions: list[Action] = []
        for peer, join in joins.items():
            if join is not None:
                actions += self._on_join(peer, join, now)
        return actions

    def _on_join(self, peer: bytes, join: m.Join, now: float) -> list[Action]:
        if join.member.peer != peer:
            raise RemoteProtocolError("joined in another peer's name")
        if self.phase is Phase.DONE:
            return self._on_ask(peer) or [Send(peer, m.Behind(self.fragment, self.round, self.tip))]
        if self._desk is None:
            if self.phase is Phase.EXCHANGE and self.coordinator is not None and self.coordinator != peer:
                return [Send(peer, m.Redirect(self.fragment, self.round, self.coordinator))]
            self._early_joins[peer] = join
            return self._serve(now) if self._my_turn(join) else []
        desk = self._desk
        if desk.decide_at is not None:
            desk.late.add(peer)
            assert self.group is not None
            return [Send(peer, self.group)]
        if join.head != self.tip.head:
            if join.version > self.tip.version:
                desk.ahead = peer
            return [Send(peer, m.Behind(self.fragment, self.round, self.tip))]
        desk.gone.discard(peer)
        desk.joined[peer] = join
        return self._maybe_close(desk, now)

    def _my_turn(self, join: m.Join) -> bool:
        """Whether a peer that asks before this one has contributed is right to ask."""
        if self.mine is not None or self.me not in self.candidates:
            return False
        before = self.candidates[: self.candidates.index(self.me)]
        return all(peer in join.tried for peer in before)

    def _maybe_close(self, desk: _Desk, now: float) -> list[Action]:
        full = len(desk.joined) >= self.rules.max_group and self.tip.quorum(desk.joined, self.resigned)
        if self.mine is not None and (full or self.expected <= desk.joined.keys() | desk.gone):
            return self._close(desk, now)
        return []

    def _close(self, desk: _Desk, now: float) -> list[Action]:
        self._turn_away_surplus(desk)
        members = tuple(desk.joined[peer].member for peer in sorted(desk.joined))
        count, needed = len(members), self.rules.min_group
        if self.mine is None or self.me not in desk.joined:
            return self._abort(desk, "the coordinator had no contribution of its own")
        if desk.ahead is not None and count < needed:
            return self._finish(Outrun(desk.ahead, "others are ahead"))
        if count < needed:
            return self._abort(desk, f"waiting for {needed - count} more peer(s): {count} of {needed} are here")
        if not self.tip.quorum(desk.joined.keys(), self.resigned):
            here = len([peer for peer in self.tip.electors if peer in desk.joined])
            return self._abort(desk, f"no quorum: {here} of {len(self.tip.electors)} electors are here")
        patience = median(join.patience for join in desk.joined.values())
        seconds = max(self.rules.min_exchange, patience)
        group = m.Group(self.fragment, self.round, members, seconds)
        desk.decide_at = now + seconds
        audience = sorted((set(desk.joined) | desk.late) - {self.me})
        tell: list[Action] = [Send(peer, group) for peer in audience]
        return tell + self._on_group(group, now)

    def _turn_away_surplus(self, desk: _Desk) -> None:
        """Keep ``max_group`` members: this peer, a quorum, then whoever came first. The rest hear the outcome."""
        chosen = [self.me]
        for peer in desk.joined:
            if peer in self.tip.electors and not self.tip.quorum(chosen, self.resigned):
                chosen.append(peer)
        order = list(dict.fromkeys([*chosen, *desk.joined]))
        for peer in order[self.rules.max_group :]:
            del desk.joined[peer]
            desk.late.add(peer)

    def _on_have(self, peer: bytes, message: m.Have) -> list[Action]:
        desk = self._desk
        if desk is None or desk.decide_at is None or peer not in desk.joined:
            return []
        desk.have[peer] = set(message.peers) & set(desk.joined)
        return self._maybe_decide(desk)

    def _maybe_decide(self, desk: _Desk) -> list[Action]:
        """Decide as soon as nothing more can come: every living member holds what every living member gave."""
        if desk.reducing is not None or desk.decide_at is None:
            return []
        living = desk.joined.keys() - desk.gone
        if all(desk.have.get(peer, set()) >= living for peer in living):
            held_by_all = set.intersection(*(desk.have[peer] for peer in living))
            return self._decide(desk, held_by_all, set(living))
        return []

    def _decide(self, desk: _Desk, counted: set[bytes], voters: set[bytes]) -> list[Action]:
        needed = self.rules.min_group
        if len(counted) < needed or not counted:
            return self._abort(desk, f"{len(counted)} contributions arrived, {needed} are needed")
        if not (self.tip.quorum(counted, self.resigned) and self.tip.quorum(voters, self.resigned)):
            return self._abort(desk, f"no quorum: {len(counted)} contributions held by {len(voters)} peers")
        desk.reducing = tuple(desk.joined[peer].member for peer in sorted(counted))
        return [Reduce(desk.reducing)]

    def _decide_late(self, desk: _Desk) -> list[Action]:
        """Time is up: count what this peer holds and more than half of the living hold too."""
        desk.have[self.me] = self._held()
        living = desk.joined.keys() - desk.gone
        voters = {peer for peer in living if desk.have.get(peer)}
        holders = {owner: sum(owner in desk.have.get(peer, set()) for peer in living) for owner in desk.joined}
        counted = {owner for owner in self._held() if 2 * holders.get(owner, 0) > len(living)}
        return self._decide(desk, counted, voters)

    def _member_lost(self, desk: _Desk, peer: bytes, now: float) -> list[Action]:
        desk.gone.add(peer)
        desk.late.discard(peer)
        if desk.decide_at is None:
            desk.joined.pop(peer, None)
            return self._maybe_close(desk, now)
        return self._maybe_decide(desk)

    def _desk_tick(self, desk: _Desk, now: float) -> list[Action]:
        if desk.reducing is not None:
            return []
        if desk.decide_at is None:
            if now < desk.close_at:
                return []
            if self.mine is None and now < self.departs + 2 * self.rules.window:
                # Others are early or this peer is late: its own contribution may still come.
                desk.close_at = self.departs + 2 * self.rules.window
                return []
            return self._close(desk, now)
        return self._decide_late(desk) if now >= desk.decide_at else []

    def _abort(self, desk: _Desk, reason: str) -> list[Action]:
        audience = sorted((set(desk.joined) | desk.late) - {self.me} - desk.gone)
        tell: list[Action] = [Send(peer, m.Abort(self.fragment, self.round, reason)) for peer in audience]
        return tell + self._finish(Aborted(reason))
