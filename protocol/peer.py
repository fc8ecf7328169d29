"""What a peer does in all its rounds, without input or output: the part that nodes and simulation share.

A driver (``stretto.node.swarm.exchange`` with sockets, ``stretto.protocol.simulation`` with virtual time) calls
``depart`` when a round is due, hands in what arrives, and carries out the actions that come back: ``Send``, ``Push``
and ``Fetch`` move bytes, ``Work`` is arithmetic that may run in another thread, ``Over`` reports a finished round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stretto.protocol import messages as m
from stretto.protocol.chain import Member, SignedRecord, Tip, after
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import payload_digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.rounds import (
    Aborted,
    Action,
    Committed,
    Fetch,
    Finish,
    Outcome,
    Outrun,
    Push,
    Reduce,
    Round,
    Rules,
    Send,
    rendezvous_order,
)
from stretto.protocol.schedule import Clock, follows, fragment_of
from stretto.protocol.streaming import Contribution, Reduced, StreamingDiLoCo


@dataclass(frozen=True)
class PushTo:
    """Send ``payload`` (bytes of the own contribution) to a member."""

    to: bytes
    round: int
    contribution: Contribution


@dataclass(frozen=True)
class FetchFrom:
    """Get the payload of ``member`` in ``round`` from ``source``; report ``payload_arrived`` or ``fetch_failed``."""

    source: bytes
    round: int
    member: Member


@dataclass(frozen=True)
class Work:
    """Arithmetic of a round: call ``Peer.reduce(work)``, in any thread, then ``Peer.reduced(work, result, now)``."""

    round: int
    fragment: int
    members: tuple[Member, ...]
    payloads: Mapping[bytes, bytes]


@dataclass(frozen=True)
class Over:
    """A round is over for this peer; ``counted`` says whether its own contribution is in the record."""

    round: int
    fragment: int
    outcome: Outcome
    counted: bool
    seconds: float
    """From the departure to now."""


@dataclass(frozen=True)
class Repair:
    """Download the state of ``fragment`` from ``source``; report ``adopt`` or ``repair_failed``."""

    fragment: int
    source: bytes
    reason: str


Effect: TypeAlias = Send | PushTo | FetchFrom | Work | Over | Repair


@dataclass
class _Live:
    """A round that is going on, or is kept a while for those who ask."""

    round: Round
    departed: float
    payloads: dict[bytes, bytes]
    owners: set[bytes] = field(default_factory=set)
    """Whose contributions are here: each member has one, and cannot fill the memory with more."""
    contribution: Contribution | None = None
    reduced: Reduced | None = None
    installing: SignedRecord | None = None
    over: bool = False


def _further(clock: Clock, than: Clock) -> bool:
    """Whether ``clock`` is in force instead of ``than``: that of the later round, of one round the earlier one."""
    return (clock.round, -clock.at, -clock.interval) > (than.round, -than.at, -than.interval)


class Peer:
    """All rounds of one peer.

    ``roster`` holds the peers that can be reached (set by the driver): candidates may coordinate, expected peers are
    waited for. ``clock`` is None until the run has one.
    """

    def __init__(
        self,
        *,
        me: bytes,
        config: RunConfig,
        diloco: StreamingDiLoCo,
        rules: Rules,
        sign: Callable[[bytes], bytes],
        verify: Callable[[bytes, bytes, bytes], bool],
        can_coordinate: bool = True,
    ) -> None:
        self.me, self.config, self.diloco, self.rules = me, config, diloco, rules
        self.run = config.digest()
        self.clock: Clock | None = None
        self._sure_clock: Clock | None = None
        """The latest that a record set here, or the first one: heard clocks must follow it, not only each other."""
        self.can_coordinate = can_coordinate
        self._sign, self._verify = sign, verify
        self._live: dict[int, _Live] = {}
        self._candidates: frozenset[bytes] = frozenset()
        self._expected: frozenset[bytes] = frozenset()
        self._resigned: frozenset[bytes] = frozenset()
        self.repairing: dict[int, tuple[bytes, int]] = {}
        """Fragments that are being downloaded: from whom, and at which version it announced them."""
        self._no_better: set[tuple[int, bytes, int]] = set()
        self._overtaken: list[Effect] = []

    @property
    def fragments(self) -> int:
        """P."""
        return len(self.diloco.fragments)

    def set_roster(
        self, candidates: Sequence[bytes], expected: Sequence[bytes], resigned: Sequence[bytes] = ()
    ) -> None:
        """Other peers that may coordinate, those that a coordinator waits for, and those that vote no more."""
        self._candidates, self._expected = frozenset(candidates), frozenset(expected)
        self._resigned = frozenset(resigned)

    def adopt_clock(self, clock: Clock) -> bool:
        """Take over a clock if it is further on than the present one; of two for one round the earlier one wins."""
        if self._sure_clock is None or _further(clock, self._sure_clock):
            self._sure_clock = clock
        if self.clock is None or _further(clock, self.clock):
            self.clock = clock
            return True
        return False

    def adopt_first_clock(self, clocks: Sequence[Clock]) -> None:
        """Without a clock: take the one that most of the others' clocks fit, the furthest of these."""
        if self.clock is None and clocks:
            fits = {clock: sum(follows(clock, other) for other in clocks) for clock in clocks}
            self.adopt_clock(max(clocks, key=lambda clock: (fits[clock], clock.round, -clock.at)))

    def tips(self) -> list[Tip]:
        """The end of each fragment's chain."""
        return [state.tip for state in self.diloco.fragments]

    # ------------------------------------------------------------------ rounds

    def sits_out(self, round: int) -> str | None:
        """Why this peer cannot contribute to a round that is due, None if it can."""
        fragment = fragment_of(round, self.fragments)
        if fragment in self.repairing:
            return f"fragment {fragment} is being repaired"
        if self.diloco.fragments[fragment].pending:
            return f"the last result of fragment {fragment} is not merged yet"
        return None

    def depart(
        self, round: int, contribution: Contribution, *, rate: float, patience: float, now: float
    ) -> list[Effect]:
        """Round ``round`` is due: enter it with ``contribution`` (from ``diloco.leave``, after ``sits_out``).

        ``rate`` is this peer's inner steps per second, ``patience`` the seconds until its deadline.
        """
        fragment = fragment_of(round, self.fragments)
        state = self.diloco.fragments[fragment]
        if contribution.head != state.tip.head or self.sits_out(round):
            return [Over(round, fragment, Aborted("its state changed while the contribution left"), False, 0.0)]
        live = self._open(round)
        if live.contribution is not None:
            raise LocalProtocolError(f"round {round} departed twice")
        self.diloco.left(contribution)
        live.contribution = contribution
        live.payloads[contribution.digest] = contribution.payload
        join = m.Join(
            fragment=fragment,
            round=round,
            head=state.tip.head,
            version=state.tip.version,
            member=Member(self.me, contribution.tokens, contribution.digest),
            rate=rate,
            patience=patience,
        )
        return self._effects(live, live.round.contribute(join, now), now)

    def received(self, sender: bytes, message: m.Message, now: float) -> list[Effect]:
        """A control message of a round. RemoteProtocolError if it breaks the rules."""
        live = self._live.get(message.round)
        if live is None:
            if not isinstance(message, m.Join) or not self._near(message, now):
                return []
            live = self._open(message.round)
        if message.fragment != live.round.fragment:
            raise RemoteProtocolError(f"round {message.round} is of fragment {live.round.fragment}")
        return self._effects(live, live.round.received(sender, message, now), now)

    def expects(self, sender: bytes, push: m.Push) -> str | None:
        """Why a contribution that ``sender`` wants to send is not wanted, None if it is: asked before any byte."""
        live = self._live.get(push.round)
        if live is None or live.over or live.round.mine is None or live.round.fragment != push.fragment:
            return f"round {push.round} is not going on here"
        if push.nbytes != self.payload_size(push.fragment):
            return f"{push.nbytes} bytes where {self.payload_size(push.fragment)} are due"
        if sender in live.owners:  # not by digest: two peers may contribute the same bytes
            return "already here"
        group = live.round.group
        if group and not any((x.peer, x.payload) == (sender, push.payload) for x in group.members):
            return "not what the group was told of"
        if len(live.owners) >= self.rules.max_group:
            return "more contributions than the group can have"
        return None

    def payload_size(self, fragment: int) -> int:
        """Bytes of an encoded contribution."""
        return self.diloco.codec.nbytes(self.diloco.fragments[fragment].anchor.size)

    def check_payload(self, round: int, payload: bytes) -> bytes:
        """The digest of a contribution's bytes. RemoteProtocolError if no codec could have made them.

        Reads every byte, so it belongs in a worker thread; then ``payload_arrived``.
        """
        fragment = fragment_of(round, self.fragments)
        self.diloco.codec.validate(payload, self.diloco.fragments[fragment].anchor.size)
        return payload_digest(payload)

    def payload_arrived(self, owner: bytes, round: int, payload: bytes, digest: bytes, now: float) -> list[Effect]:
        """The checked bytes of ``owner``'s contribution are here, pushed by it or fetched from anybody."""
        live = self._live.get(round)
        if live is None or live.over:
            return []
        live.payloads[digest] = payload
        live.owners.add(owner)
        return self._effects(live, live.round.arrived(owner, digest, now), now)

    def fetch_failed(self, source: bytes, round: int, now: float) -> list[Effect]:
        """A fetch came to nothing."""
        live = self._live.get(round)
        return self._effects(live, live.round.fetch_failed(source, now), now) if live else []

    def lost(self, peer: bytes, now: float) -> list[Effect]:
        """``peer`` cannot be reached."""
        effects: list[Effect] = []
        for live in list(self._live.values()):
            effects += self._effects(live, live.round.lost(peer, now), now)
        return effects

    def payload(self, round: int, digest: bytes) -> bytes | None:
        """A contribution that this peer holds, for those who ask."""
        live = self._live.get(round)
        return live.payloads.get(digest) if live else None

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        effects: list[Effect] = []
        for live in list(self._live.values()):
            due = live.round.deadline()
            if due is not None and now >= due:
                effects += self._effects(live, live.round.tick(now), now)
        return effects

    def deadline(self) -> float | None:
        """When ``tick`` is due next."""
        times = [live.round.deadline() for live in self._live.values()]
        return min((time for time in times if time is not None), default=None)

    def waiting_for(self) -> list[str]:
        """What goes on, one line for each open round."""
        return [f"round {r}: {live.round.waiting_for()}" for r, live in self._live.items() if not live.over]

    # ------------------------------------------------------------------ arithmetic

    def reduce(self, work: Work) -> Reduced:
        """Average and outer step on copies. Heavy; reads only immutable arrays, so any thread may run it."""
        return self.diloco.reduce(work.fragment, work.members, work.payloads)

    def reduced(self, work: Work, result: Reduced, now: float) -> list[Effect]:
        """The work is done."""
        live = self._live.get(work.round)
        if live is None or live.over:
            return []
        live.reduced = result
        if live.installing is not None:
            return self._install(live, live.installing, now)
        return self._effects(live, live.round.reduced(result.digest, now), now)

    # ------------------------------------------------------------------ repair

    def adopt(self, state: m.State, reduced: Reduced) -> bool:
        """Take over a downloaded state, sealed by whoever downloaded it. False if it is no better than this peer's.

        RemoteProtocolError if digest, record, signature or tip do not fit each other.
        """
        origin = self.repairing.pop(state.fragment, None)
        mine = self.diloco.fragments[state.fragment]
        signed = state.record
        # An initial state is nothing to take over: whoever has another one waits for the first commit.
        if signed is not None:
            record = signed.record
            if record.run != self.run or record.fragment != state.fragment or record.state != reduced.digest:
                raise RemoteProtocolError("downloaded state does not match its record")
            if not self._verify(record.coordinator, record.signed_bytes(), signed.signature):
                raise RemoteProtocolError("downloaded state comes with a wrong signature")
        if signed is None or not after(signed.record).beats(mine.tip):
            if origin is not None:
                self._no_better.add((state.fragment, *origin))
            return False
        self.diloco.replace(state.fragment, reduced, signed, me=self.me)
        self._forget(state.fragment)
        self.adopt_clock(signed.record.clock)
        return True

    def repair_failed(self, fragment: int) -> None:
        """The download came to nothing; the next round or the next word from a peer tries again."""
        self.repairing.pop(fragment, None)

    def hear(self, source: bytes, clock: Clock | None, versions: Sequence[int], tokens: Sequence[int]) -> list[Effect]:
        """What another peer says of itself outside rounds: its clock, version and tokens of each fragment's chain.

        Tokens come first, as in ``Tip.beats``: of two branches of a fork the longer one may be the worse one, and a
        peer on the better one that heard of versions only would download a state that it then cannot adopt.
        """
        if clock is not None:
            self._hear_clock(clock)
        going = {live.round.fragment for live in self._live.values() if not live.over}
        effects: list[Effect] = []
        for fragment, (state, version) in enumerate(zip(self.diloco.fragments, versions, strict=False)):
            tip = state.tip
            better = (tokens[fragment], version) > (tip.tokens_total, tip.version)
            if better and fragment not in going:
                why = f"version {tip.version} here, {version} there"
                effects += self._repair(fragment, source, version, why)
        return effects

    def _hear_clock(self, clock: Clock) -> None:
        """Take over another peer's clock if it follows the present one, and the last one that is sure.

        With the first condition alone one peer could lead all others to any clock, by a factor at each step.
        """
        if self.clock is None or self._sure_clock is None or not _further(clock, self.clock):
            return
        if follows(self.clock, clock) and follows(self._sure_clock, clock):
            self.clock = clock

    def _repair(self, fragment: int, source: bytes, version: int, reason: str) -> list[Effect]:
        """Download, but not twice what has proved to be no better."""
        if fragment in self.repairing or source == self.me or (fragment, source, version) in self._no_better:
            return []
        if len(self._no_better) > 1000:
            self._no_better.clear()
        self.repairing[fragment] = (source, version)
        return [Repair(fragment, source, reason)]

    # ------------------------------------------------------------------ inside

    def _near(self, message: m.Join, now: float) -> bool:
        """Whether a round that this peer has not begun may be begun by another's message."""
        if self.clock is None or message.fragment != fragment_of(message.round, self.fragments):
            return False
        # Opening a round ends what is kept of its fragment: not for an old one, nor, while one goes on, too early.
        due = self.clock.departure(message.round) <= now + self.rules.window
        for round, live in self._live.items():
            if live.round.fragment == message.fragment and (round > message.round or not (live.over or due)):
                return False
        return abs(message.round - self.clock.next_round(now)) <= 1 and message.fragment not in self.repairing

    def _open(self, round: int) -> _Live:
        live = self._live.get(round)
        if live is not None:
            return live
        if self.clock is None:
            raise LocalProtocolError("a round before the run has a clock")
        fragment = fragment_of(round, self.fragments)
        self._forget(fragment)
        serving = {self.me} if self.can_coordinate else set()
        live = _Live(
            Round(
                me=self.me,
                run=self.run,
                round=round,
                tip=self.diloco.fragments[fragment].tip,
                clock=self.clock,
                candidates=rendezvous_order(self.run, fragment, round, sorted(self._candidates | serving)),
                expected=self._expected,
                rules=self.rules.within(self.fragments * self.clock.interval),
                sign=self._sign,
                verify=self._verify,
                resigned=self._resigned,
            ),
            departed=self.clock.departure(round),
            payloads={},
        )
        self._live[round] = live
        return live

    def _forget(self, fragment: int) -> None:
        """Drop what is kept of this fragment's earlier rounds."""
        for round in [r for r, live in self._live.items() if live.round.fragment == fragment]:
            live = self._live.pop(round)
            if not live.over and live.contribution is not None:
                reason = "overtaken by a later state of its fragment"
                self._overtaken.append(Over(round, fragment, Aborted(reason), False, 0.0))

    def _effects(self, live: _Live, actions: Sequence[Action], now: float) -> list[Effect]:
        effects, self._overtaken = self._overtaken, []
        for action in actions:
            if isinstance(action, Send):
                effects.append(action)
            elif isinstance(action, Push):
                assert live.contribution is not None
                effects.append(PushTo(action.to, live.round.round, live.contribution))
            elif isinstance(action, Fetch):
                effects.append(FetchFrom(action.source, live.round.round, action.member))
            elif isinstance(action, Reduce):
                effects.append(self._work(live, action.members))
            elif isinstance(action, Finish):
                effects += self._finish(live, action.outcome, now)
        return effects

    def _work(self, live: _Live, members: tuple[Member, ...]) -> Work:
        return Work(live.round.round, live.round.fragment, members, dict(live.payloads))

    def _finish(self, live: _Live, outcome: Outcome, now: float) -> list[Effect]:
        if isinstance(outcome, Committed):
            live.installing = outcome.signed
            if live.reduced is None:
                return [self._work(live, outcome.signed.record.members)]
            return self._install(live, outcome.signed, now)
        return self._over(live, outcome, False, now)

    def _install(self, live: _Live, signed: SignedRecord, now: float) -> list[Effect]:
        assert live.reduced is not None
        record = signed.record
        if record.prev != self.diloco.fragments[record.fragment].tip.head:
            return self._over(live, Aborted("the fragment was repaired meanwhile"), False, now)
        try:
            counted = self.diloco.install(record.fragment, signed, live.reduced, me=self.me)
        except RemoteProtocolError as error:
            return self._over(live, Outrun(record.coordinator, str(error)), False, now)
        self.adopt_clock(record.clock)
        return self._over(live, Committed(signed), counted, now)

    def _over(self, live: _Live, outcome: Outcome, counted: bool, now: float) -> list[Effect]:
        live.over, live.reduced = True, None
        fragment = live.round.fragment
        effects: list[Effect] = [Over(live.round.round, fragment, outcome, counted, max(0.0, now - live.departed))]
        if isinstance(outcome, Outrun):
            least = self.diloco.fragments[fragment].tip.version + 1
            effects += self._repair(fragment, outcome.source, least, outcome.reason)
        return effects

    def busy(self) -> bool:
        """Whether a round that this peer entered is still going on."""
        return any(not live.over and live.contribution is not None for live in self._live.values())
