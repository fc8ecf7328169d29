"""What a peer does in all its rounds, without input or output: the part that nodes and simulation share.

A driver (``stretto.node.swarm.exchange`` with sockets, ``stretto.protocol.simulation`` with virtual time) calls
``depart`` when a round is due, hands in what arrives, and carries out the effects that come back: ``Send``,
``PushTo``, ``PushAverageTo`` and ``FetchFrom`` move bytes, ``Work`` and ``PartWork`` are arithmetic that may run in
another thread, ``Over`` reports a finished round, ``Repair`` wants a state from elsewhere.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

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
from stretto.protocol.chain import Member, SignedRecord, Tip, after, genesis
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import payload_digest, state_digest
from stretto.protocol.effects import Averaged, Effect, FetchFrom, Over, PartWork, PushTo, Repair, Work
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.heard_clock import HeardClock
from stretto.protocol.live import LiveRound, decoded_norm
from stretto.protocol.reduce import MAX_ATTEMPTS
from stretto.protocol.replay import check_records
from stretto.protocol.rounds import Round, rendezvous_order
from stretto.protocol.schedule import Clock, fragment_of
from stretto.protocol.snapshot import check_manifest
from stretto.protocol.streaming import Contribution, FragmentState, Reduced, StreamingDiLoCo

NORM_SLACK = 1.5
"""By how much a codec may enlarge a norm: E3M0 rounds 1.5 up to 2."""


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
        self._clock = HeardClock()
        self.can_coordinate = can_coordinate
        self.resting: str | None = None
        """Why this peer takes part in no rounds and repairs nothing for now; None if it does. Set by the driver."""
        self._sign, self._verify = sign, verify
        self._live: dict[int, LiveRound] = {}
        self._candidates: frozenset[bytes] = frozenset()
        self._expected: frozenset[bytes] = frozenset()
        self._resigned: frozenset[bytes] = frozenset()
        self.repairing: dict[int, tuple[bytes, int]] = {}
        """Fragments that are being downloaded: from whom, and at which version it announced them."""
        self._no_better: set[tuple[int, bytes, int]] = set()
        self._overtaken: list[Effect] = []

    @property
    def clock(self) -> Clock | None:
        """When rounds depart; None until the run has begun."""
        return self._clock.now

    def adopt_clock(self, clock: Clock) -> bool:
        """Take over a clock that is sure: of a record, or the first one. Whether it is further on than the present."""
        return self._clock.adopt(clock)

    def adopt_first_clock(self, clocks: Sequence[Clock]) -> None:
        """Without a clock: take the one that most of the others' clocks fit, the furthest of these."""
        self._clock.adopt_first(clocks)

    @property
    def fragments(self) -> int:
        """P."""
        return len(self.diloco.fragments)

    def set_roster(
        self, candidates: Collection[bytes], expected: Collection[bytes], resigned: Collection[bytes] = ()
    ) -> None:
        """Other peers that may coordinate, those that a coordinator waits for, and those that vote no more."""
        self._candidates, self._expected = frozenset(candidates), frozenset(expected)
        self._resigned = frozenset(resigned)

    def tips(self) -> list[Tip]:
        """The end of each fragment's chain."""
        return [state.tip for state in self.diloco.fragments]

    def restore(self, states: Sequence[FragmentState], clock: Clock | None) -> None:
        """Begin with states from a checkpoint, one per fragment, instead of the initial ones.

        RemoteProtocolError if one has other bits than its record says, or a record that is not lawful; then nothing
        has changed.
        """
        for fragment, (state, initial) in enumerate(zip(states, self.diloco.fragments, strict=True)):
            digest = state_digest(state.anchor, state.momentum)
            if state.record is None:
                if state.tip != genesis(self.run, fragment, digest) or state.tip != initial.tip:
                    raise RemoteProtocolError(f"fragment {fragment} begins from other initial weights")
                continue
            record = state.record.record
            if (record.run, record.fragment, record.state) != (self.run, fragment, digest):
                raise RemoteProtocolError(f"fragment {fragment} has another state than its record says")
            if state.tip != after(record):
                raise RemoteProtocolError(f"fragment {fragment} has a record that does not lead to its tip")
            if not self._verify(record.coordinator, record.signed_bytes(), state.record.signature):
                raise RemoteProtocolError(f"fragment {fragment} has a record with a wrong signature")
        self.diloco.fragments = list(states)
        for state in states:
            if state.record is not None:
                self.adopt_clock(state.record.record.clock)
        if clock is not None and self.clock is None:
            self.adopt_clock(clock)
        elif clock is not None:
            self._clock.hear(clock)

    # ------------------------------------------------------------------ rounds

    def sits_out(self, round: int) -> str | None:
        """Why this peer cannot contribute to a round that is due, None if it can."""
        fragment = fragment_of(round, self.fragments)
        if self.resting is not None:
            return self.resting
        if fragment in self.repairing:
            return f"fragment {fragment} is being repaired"
        if self.diloco.fragments[fragment].pending:
            return f"the last result of fragment {fragment} is not merged yet"
        for earlier, live in self._live.items():
            if live.round.fragment == fragment and earlier < round and not live.over and live.round.decided:
                return f"round {earlier} of fragment {fragment} is decided and not installed yet"
        return None

    def depart(
        self, round: int, contribution: Contribution, *, rate: float, patience: float, uplink: float = 0.0, now: float
    ) -> list[Effect]:
        """Round ``round`` is due: enter it with ``contribution`` (from ``diloco.leave``, after ``sits_out``).

        ``rate`` is this peer's inner steps per second, ``patience`` the seconds until its deadline, ``uplink`` the
        bytes per second that it can send (0: it reduces nothing for others).
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
            member=Member(self.me, contribution.tokens, contribution.digest, contribution.norm),
            rate=rate,
            patience=patience,
            uplink=uplink,
        )
        return self._effects(live, live.round.contribute(join, now), now)

    def received(self, sender: bytes, message: m.Message, now: float) -> list[Effect]:
        """A control message of a round. RemoteProtocolError if it breaks the rules."""
        live = self._live.get(message.round)
        if isinstance(message, m.Join) and (aside := self._step_aside(live, message)) is not None:
            return [Send(sender, aside)]
        if live is None:
            if not isinstance(message, m.Join) or not self._near(message, now):
                return []
            live = self._open(message.round)
        if message.fragment != live.round.fragment:
            raise RemoteProtocolError(f"round {message.round} is of fragment {live.round.fragment}")
        return self._effects(live, live.round.received(sender, message, now), now)

    # ------------------------------------------------------------------ bytes

    def early(self, header: m.Push | m.Average) -> bool:
        """Whether ``header`` may belong to a group or plan that this peer has not heard of yet: ask again soon."""
        live = self._live.get(header.round)
        if live is None or live.over:
            return False
        parts = live.round.parts
        if live.round.group_id != header.group or parts is None:
            return live.round.group_id != header.group
        if isinstance(header, m.Average):
            return parts.attempt < header.attempt <= MAX_ATTEMPTS
        return header.part < len(parts.reducers) and header.part not in parts.mine

    def wants(self, sender: bytes, header: m.Push | m.Average) -> str | None:
        """Why bytes that ``sender`` wants to send are not wanted, None if they are: asked before any byte."""
        live = self._live.get(header.round)
        if live is None or live.over or live.round.fragment != header.fragment:
            return f"round {header.round} is not going on here"
        if live.round.group is None or live.round.group_id != header.group:
            return "another group"
        if sender not in {member.peer for member in live.round.group.members}:
            return "not a member of the group"
        if isinstance(header, m.Average):
            return live.wants_average(sender, header, down=self.diloco.down)
        return live.wants_slice(sender, header, me=self.me, codec=self.diloco.codec)

    def outgoing(self, effect: PushTo) -> list[tuple[m.Push, bytes]]:
        """Headers and bytes of a push. Heavy; reads only immutable bytes, so any thread may run it."""
        contribution, codec = effect.contribution, self.diloco.codec
        found = []
        for part, start, stop in effect.parts:
            whole = stop - start == effect.numel
            data = contribution.payload if whole else codec.cut(contribution.payload, effect.numel, start, stop)
            digest = contribution.digest if whole else payload_digest(data)
            found.append((m.Push(contribution.fragment, effect.round, effect.group, part, digest, len(data)), data))
        return found

    def payload_size(self, fragment: int) -> int:
        """Bytes of an encoded contribution."""
        return self.diloco.codec.nbytes(self.diloco.fragments[fragment].anchor.size)

    def check(self, sender: bytes, header: m.Push | m.Average, data: bytes) -> None:
        """RemoteProtocolError if the bytes are not those announced, malformed, or larger in norm than announced.

        Reads every byte, so it belongs in a worker thread; then ``payload_arrived``.
        """
        if payload_digest(data) != header.payload:
            raise RemoteProtocolError("bytes do not match their digest")
        live = self._live.get(header.round)
        if live is None or live.round.group is None or live.round.group_id != header.group:
            return  # the group was replaced meanwhile: nobody's fault, and nobody wants it any more
        parts = live.round.parts
        start, stop = parts.bounds(header.part) if parts else (0, live.round.numel)
        if isinstance(header, m.Average):
            self.diloco.down.validate(data, stop - start)
            return
        announced = [member.norm for member in live.round.group.members if member.peer == sender]
        size = decoded_norm(self.diloco.codec, data, stop - start)
        if not announced or size > NORM_SLACK * announced[0]:
            raise RemoteProtocolError(
                f"contribution with norm {size:.3g}, announced were {(announced or [0.0])[0]:.3g}"
            )

    def payload_arrived(self, sender: bytes, header: m.Push | m.Average, data: bytes, now: float) -> list[Effect]:
        """Checked bytes from ``sender`` are here."""
        live = self._live.get(header.round)
        if live is None or live.over or live.round.group_id != header.group:
            return []
        if isinstance(header, m.Average):
            live.payloads[header.payload] = data
            actions = live.round.average_arrived(header.attempt, header.part, header.payload, now)
        elif live.round.parts is not None:
            live.slices[sender, header.part] = data
            actions = live.round.slice_arrived(sender, header.part)
        else:
            live.payloads[header.payload] = data
            live.owners.add(sender)
            actions = live.round.arrived(sender, header.payload, now)
        return self._effects(live, actions, now)

    def fetch_size(self, effect: FetchFrom) -> int:
        """Bytes that a fetch must bring."""
        if effect.numel is not None:
            return self.diloco.down.nbytes(effect.numel)
        return self.payload_size(fragment_of(effect.round, self.fragments))

    def check_fetched(self, effect: FetchFrom, data: bytes) -> None:
        """RemoteProtocolError if fetched bytes are not what was asked for; for a worker thread, as ``check``."""
        if payload_digest(data) != effect.payload:
            raise RemoteProtocolError("fetched bytes do not match their digest")
        fragment = fragment_of(effect.round, self.fragments)
        if effect.numel is None:
            self.diloco.codec.validate(data, self.diloco.fragments[fragment].anchor.size)
        else:
            self.diloco.down.validate(data, effect.numel)

    def fetched(self, effect: FetchFrom, data: bytes, now: float) -> list[Effect]:
        """Checked bytes that ``effect`` asked for are here."""
        live = self._live.get(effect.round)
        if live is None or live.over:
            return []
        live.payloads[effect.payload] = data
        actions: list[Action] = []
        if effect.numel is not None:
            actions = live.round.fetched(effect.payload, now)
        else:
            for owner in live.round.owners_of(effect.payload):
                live.owners.add(owner)
                actions += live.round.arrived(owner, effect.payload, now)
        return self._effects(live, actions, now)

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

    def reduce(self, work: Work | PartWork) -> "Reduced | Averaged":
        """Do the work, on copies. Heavy; reads only immutable arrays, so any thread may run it.

        RemoteProtocolError if what came from others cannot be averaged: not finite after the sum, for example.
        """
        if isinstance(work, PartWork):
            data = self.diloco.reduce_part(work.part.members, work.slices, work.numel)
            return Averaged(data, payload_digest(data))
        if work.basis.parts:
            return self.diloco.apply(work.fragment, work.basis.parts, work.payloads)
        return self.diloco.reduce(work.fragment, work.basis.members, work.payloads)

    def reduced(self, work: Work | PartWork, result: "Reduced | Averaged", now: float) -> list[Effect]:
        """The work is done."""
        live = self._live.get(work.round)
        if live is None or live.over:
            return []
        if isinstance(work, PartWork):
            if not isinstance(result, Averaged) or work.group != live.round.group_id:
                return []
            live.payloads[result.digest] = result.data
            actions = live.round.part_reduced(work.part.attempt, work.part.part, result.digest, now)
            return self._effects(live, actions, now)
        assert isinstance(result, Reduced)
        live.reduced = (work.basis, result)
        if live.installing is not None:
            return self._install(live, live.installing, now)
        return self._effects(live, live.round.reduced(work.basis, result.digest, now), now)

    def log(self, round: int) -> Mapping[bytes, bytes]:
        """The bytes that the state after a committed round is made from, by digest; {} if they are gone."""
        live = self._live.get(round)
        outcome = live.round.outcome if live else None
        if live is None or not isinstance(outcome, Committed):
            return {}
        names = outcome.signed.record.payloads()
        return {name: live.payloads[name] for name in names if name in live.payloads}

    # ------------------------------------------------------------------ repair

    def adopt(self, state: m.State, reduced: Reduced, *, go_on: bool = False) -> bool:
        """Take over a downloaded state, sealed by whoever downloaded it. False if it is no better than this peer's.

        With ``go_on`` the fragment stays in repair, for what was committed meanwhile. RemoteProtocolError if digest,
        record, signature or tip do not fit each other.
        """
        origin = self.repairing.get(state.fragment)
        if not go_on:
            self.repairing.pop(state.fragment, None)
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

    def sound(self, fragment: int, manifest: m.State) -> Tip:
        """The tip of a state that is offered. RemoteProtocolError if what is said of it cannot be true."""
        tip = check_manifest(manifest, fragment, self.diloco.fragments[fragment].anchor.size, self.run)
        assert manifest.record is not None
        record = manifest.record.record
        if not self._verify(record.coordinator, record.signed_bytes(), manifest.record.signature):
            raise RemoteProtocolError("the state that is offered comes with a wrong signature")
        return tip

    def follow(self, fragment: int, records: Sequence[SignedRecord]) -> None:
        """RemoteProtocolError unless ``records`` lawfully continue the chain of this fragment."""
        state = self.diloco.fragments[fragment]
        check_records(records, state.tip, state.record, run=self.run, verify=self._verify, resigned=self._resigned)

    def replayed(self, signed: SignedRecord, reduced: Reduced) -> bool:
        """Install a missed commit that was computed anew from its bytes; whether it counts this peer's contribution.

        RemoteProtocolError if the result has other bits than the record says; then nothing has changed.
        """
        fragment = signed.record.fragment
        counted = self.diloco.install(fragment, signed, reduced, me=self.me)
        self._forget(fragment)
        self.adopt_clock(signed.record.clock)
        return counted

    def repaired(self, fragment: int, *, better: bool) -> None:
        """The repair is over. Without ``better`` whoever asked for it had nothing, and is not asked again for that."""
        origin = self.repairing.pop(fragment, None)
        if origin is not None and not better:
            self._no_better.add((fragment, *origin))

    def hear(self, source: bytes, clock: Clock | None, weights: Sequence[tuple[int, int, int]]) -> list[Effect]:
        """What another peer says of itself outside rounds: its clock, and the ``Tip.weight`` of each fragment's chain.

        Not versions alone: of two branches of a fork the longer one may be the worse one, and a peer on the better one
        that heard of versions only would download a state that it then cannot adopt.
        """
        if clock is not None:
            self._clock.hear(clock)
        if self.resting is not None:
            return []
        going = {live.round.fragment for live in self._live.values() if not live.over}
        effects: list[Effect] = []
        for fragment, (state, weight) in enumerate(zip(self.diloco.fragments, weights, strict=False)):
            version = weight[-1]
            if weight > state.tip.weight and fragment not in going:
                why = f"version {state.tip.version} here, {version} there"
                effects += self._repair(fragment, source, version, why)
        return effects

    def _repair(self, fragment: int, source: bytes, version: int, reason: str) -> list[Effect]:
        """Download, but not twice what has proved to be no better."""
        if fragment in self.repairing or source == self.me or (fragment, source, version) in self._no_better:
            return []
        if len(self._no_better) > 1000:
            self._no_better.clear()
        self.repairing[fragment] = (source, version)
        return [Repair(fragment, source, reason)]

    # ------------------------------------------------------------------ inside

    def _step_aside(self, live: LiveRound | None, join: m.Join) -> m.Redirect | None:
        """Who sits a round out cannot coordinate it: the next candidate does. None if it can, or there is no other."""
        fragment = fragment_of(join.round, self.fragments)
        if (live is not None and live.contribution is not None) or join.fragment != fragment:
            return None
        if self.sits_out(join.round) is None:
            return None
        order = rendezvous_order(self.run, fragment, join.round, sorted(self._candidates - {self.me, *join.tried}))
        return m.Redirect(fragment, join.round, order[0]) if order else None

    def _elders(self) -> tuple[bytes, ...]:
        """The electors of the fragment with the most commits, for fragments that have none yet."""
        return max((state.tip for state in self.diloco.fragments), key=lambda tip: tip.version).electors

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

    def _open(self, round: int) -> LiveRound:
        live = self._live.get(round)
        if live is not None:
            return live
        if self.clock is None:
            raise LocalProtocolError("a round before the run has a clock")
        fragment = fragment_of(round, self.fragments)
        self._forget(fragment)
        serving = {self.me} if self.can_coordinate else set()
        live = LiveRound(
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
                numel=self.diloco.fragments[fragment].anchor.size,
                elders=self._elders(),
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

    def _effects(self, live: LiveRound, actions: Sequence[Action], now: float) -> list[Effect]:
        effects, self._overtaken = self._overtaken, []
        if live.group != live.round.group_id:
            # A new group has other parts: what is here of the last one's is of no use.
            live.group, live.slices = live.round.group_id, {}
        for action in actions:
            if isinstance(action, Send):
                effects.append(action)
            elif isinstance(action, Push):
                effects.append(live.push(action))
            elif isinstance(action, PushAverage):
                effects.append(live.push_average(action))
            elif isinstance(action, Fetch):
                effects.append(FetchFrom(action.source, live.round.round, action.payload, action.numel))
            elif isinstance(action, ReducePart):
                effects.append(live.part_work(action, me=self.me, codec=self.diloco.codec))
            elif isinstance(action, Reduce):
                effects.append(live.work(action.basis))
            elif isinstance(action, Finish):
                effects += self._finish(live, action.outcome, now)
        return effects

    def _finish(self, live: LiveRound, outcome: Outcome, now: float) -> list[Effect]:
        if isinstance(outcome, Committed):
            live.installing = outcome.signed
            return self._install(live, outcome.signed, now)
        return self._over(live, outcome, False, now)

    def _install(self, live: LiveRound, signed: SignedRecord, now: float) -> list[Effect]:
        record = signed.record
        basis = Basis(record.members, record.parts)
        if live.reduced is None or live.reduced[0] != basis:
            return [] if live.round.state_pending(basis) else [live.work(basis)]
        if record.prev != self.diloco.fragments[record.fragment].tip.head:
            return self._over(live, Aborted("the fragment was repaired meanwhile"), False, now)
        try:
            counted = self.diloco.install(record.fragment, signed, live.reduced[1], me=self.me)
        except RemoteProtocolError as error:
            return self._over(live, Outrun(record.coordinator, str(error)), False, now)
        self.adopt_clock(record.clock)
        return self._over(live, Committed(signed), counted, now)

    def _over(self, live: LiveRound, outcome: Outcome, counted: bool, now: float) -> list[Effect]:
        live.over, live.reduced, live.slices = True, None, {}
        fragment = live.round.fragment
        effects: list[Effect] = [Over(live.round.round, fragment, outcome, counted, max(0.0, now - live.departed))]
        if isinstance(outcome, Outrun):
            least = self.diloco.fragments[fragment].tip.version + 1
            effects += self._repair(fragment, outcome.source, least, outcome.reason)
        return effects

    def partners(self) -> set[bytes]:
        """The other peers in the rounds that this peer entered and that are going on."""
        found: set[bytes] = set()
        for live in self._live.values():
            if live.over or live.contribution is None:
                continue
            if live.round.group is not None:
                found |= {member.peer for member in live.round.group.members}
            if live.round.coordinator is not None:
                found.add(live.round.coordinator)
        return found - {self.me}

    def busy(self) -> bool:
        """Whether a round that this peer entered is still going on."""
        return any(not live.over and live.contribution is not None for live in self._live.values())
