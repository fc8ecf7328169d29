"""What the coordinator of a round does: gather a group, watch the exchange, decide.

    gather Join until the expected peers are in or the window ends  ->  Group
    whole contributions:  Have from all living members, or time is up          ->  what most of them hold counts
    parts:                Averaged from all living members, or time is up      ->  a quorum that agrees commits
                          a member is lost, or a reducer silent at half time   ->  Plan: the same without it
    the state after the step is known                                          ->  Commit, signed
    anything else                                                              ->  Abort

It counts only what it holds itself, and it never decides after ``expires``: by then members may have gone to the next
coordinator (a machine that slept wakes up with all answers in its sockets).
"""

from collections.abc import Collection
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from stretto.protocol import messages as m
from stretto.protocol.actions import Aborted, Action, Basis, Committed, Outrun, PushAverage, Send
from stretto.protocol.chain import CommitRecord, SignedRecord, Tip
from stretto.protocol.reduce import ALL_GATHER, MAX_ATTEMPTS, cut_shares
from stretto.protocol.schedule import next_clock

LATE_PLANS = 3
"""After so many plans a round whose time is up is given up."""

TOO_LATE = "this peer was away when the round was to be decided"

if TYPE_CHECKING:
    from stretto.protocol.rounds import Round


class Desk:
    """What a coordinator keeps of the round it serves. ``round`` is its own part in it as a member."""

    def __init__(self, round: "Round", now: float, gone: Collection[bytes]) -> None:
        self.r = round
        self.close_at = max(now, round.departs) + round.rules.window
        self.short = False
        """The window has ended without a quorum; the group closes soon after there is one."""
        self.joined: dict[bytes, m.Join] = {}
        self.gone: set[bytes] = set(gone)
        self.silent: set[bytes] = set()
        """Planned out, and not waited for any more; they may still vote."""
        self.late: set[bytes] = set()
        self.ahead: bytes | None = None
        self.have: dict[bytes, tuple[int, set[bytes]]] = {}
        self.votes: dict[bytes, tuple[int, tuple[bytes, ...]]] = {}
        self.seconds = 0.0
        self.closed_at = now
        self.decide_at: float | None = None
        self.soft_at: float | None = None
        self.expires: float | None = None
        self.deciding: Basis | None = None

    @property
    def closed(self) -> bool:
        """Whether the group was sent."""
        return self.decide_at is not None

    @property
    def audience(self) -> list[bytes]:
        """Whoever is to hear the outcome."""
        return sorted((set(self.joined) | self.late) - {self.r.me} - self.gone)

    def deadline(self) -> float | None:
        """When ``tick`` is due next."""
        if self.deciding is not None:
            return None
        if self.decide_at is None:
            return self.close_at
        return self.decide_at if self.soft_at is None else min(self.soft_at, self.decide_at)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.deciding is not None:
            return []
        if self.decide_at is None:
            if now < self.close_at:
                return []
            if self.r.mine is None and now < self.r.departs + 2 * self.r.rules.window:
                # Others are early or this peer is late: its own contribution may still come.
                self.close_at = self.r.departs + 2 * self.r.rules.window
                return []
            return self.close(now)
        actions: list[Action] = []
        if self.soft_at is not None and now >= self.soft_at:
            self.soft_at = None
            actions += self._replan(now, self._silent())
        if not self.r.over and self.deciding is None and now >= self.decide_at:
            actions += self._decide_late(now)
        return actions

    # ------------------------------------------------------------------ the group

    def on_join(self, peer: bytes, join: m.Join, now: float) -> list[Action]:
        """``peer`` wants to take part."""
        if self.closed:
            self.late.add(peer)
            self.gone.discard(peer)
            assert self.r.group is not None
            return [Send(peer, self.r.group)]
        if join.head != self.r.tip.head:
            if join.version > self.r.tip.version:
                self.ahead = peer
            return [Send(peer, m.Behind(self.r.fragment, self.r.round, self.r.tip))]
        self.gone.discard(peer)
        self.joined[peer] = join
        wait: list[Action] = [self._wait_here(peer)] if self.short and peer != self.r.me else []
        return wait + self._maybe_close(now)

    def _wait_here(self, peer: bytes) -> Action:
        """A redirect to this very peer says that it is not silent, only waiting."""
        return Send(peer, m.Redirect(self.r.fragment, self.r.round, self.r.me))

    @property
    def _patience_ends(self) -> float:
        """Until when a quorum may still come: members give up a silent candidate after window and margin."""
        rules = self.r.rules
        return self.r.departs + 2 * rules.window + 1.5 * rules.margin

    def _maybe_close(self, now: float) -> list[Action]:
        if self.short and self._quorum(self.joined):
            self.close_at, self.short = min(self.close_at, now + self.r.rules.margin / 4), False
        full = len(self.joined) >= self.r.rules.max_group and self._quorum(self.joined)
        if self.r.mine is not None and (full or self.r.expected <= self.joined.keys() | self.gone):
            return self.close(now)
        return []

    def close(self, now: float) -> list[Action]:
        """Send the group, or abort if it cannot commit."""
        self._turn_away_surplus()
        r, needed, count = self.r, self.r.rules.min_group, len(self.joined)
        if r.mine is None or r.me not in self.joined:
            return self._hand_over("the coordinator had no contribution of its own")
        if self.ahead is not None and count < needed:
            return r.finish(Outrun(self.ahead, "others are ahead"))
        if count < needed:
            return self.abort(f"waiting for {needed - count} more peer(s): {count} of {needed} are here")
        if not self._quorum(self.joined) and now < self._patience_ends:
            # Others may still wait for a candidate before this one, whom they have not found out to be gone.
            self.close_at, self.short = self._patience_ends, True
            return [self._wait_here(peer) for peer in self.audience]
        if not self._quorum(self.joined):
            electors = self._voting.electors
            here = len([peer for peer in electors if peer in self.joined])
            return self.abort(f"no quorum: {here} of {len(electors)} electors are here")
        members = tuple(self.joined[peer].member for peer in sorted(self.joined))
        shares: tuple[m.Share, ...] = ()
        if count > ALL_GATHER:
            shares = cut_shares(r.numel, {peer: join.uplink for peer, join in self.joined.items()})
        patience = median(join.patience for join in self.joined.values())
        self.seconds = max(r.rules.min_exchange, patience)
        group = m.Group(r.fragment, r.round, members, shares, self.seconds)
        self.closed_at = now
        self._restart_clock(now)
        tell: list[Action] = [Send(peer, group) for peer in self.audience]
        return tell + r.on_group(group, now)

    def _restart_clock(self, now: float) -> None:
        self.decide_at = now + self.seconds
        self.soft_at = now + self.seconds / 2 + self.r.rules.margin / 4
        self.expires = self.decide_at + self.r.rules.margin / 2

    def _turn_away_surplus(self) -> None:
        """Keep ``max_group`` members: this peer, a quorum, then whoever came first. The rest hear the outcome."""
        chosen = [self.r.me]
        for peer in self.joined:
            if peer in self._voting.electors and not self._quorum(chosen):
                chosen.append(peer)
        order = list(dict.fromkeys([*chosen, *self.joined]))
        for peer in order[self.r.rules.max_group :]:
            del self.joined[peer]
            self.late.add(peer)

    # ------------------------------------------------------------------ the exchange

    def on_have(self, peer: bytes, message: m.Have, now: float) -> list[Action]:
        """``peer`` reports whose contributions it holds."""
        if not self.closed or peer not in self.joined:
            return []
        self.have[peer] = (message.attempt, set(message.peers) & set(self.joined))
        return self._maybe_decide(now) if self.r.parts is None else []

    def on_averaged(self, peer: bytes, message: m.Averaged, now: float) -> list[Action]:
        """``peer`` holds all averages of an attempt."""
        if not self.closed or peer not in self.joined or self.r.parts is None:
            return []
        self.votes[peer] = (message.attempt, message.parts)
        self.silent.discard(peer)
        return self._maybe_decide(now)

    def member_lost(self, peer: bytes, now: float) -> list[Action]:
        """The connection to ``peer`` broke."""
        self.gone.add(peer)
        self.late.discard(peer)
        if not self.closed:
            self.joined.pop(peer, None)
            return self._maybe_close(now)
        if peer not in self.joined or self.deciding is not None:
            return []
        actions = self._maybe_decide(now)
        if actions or self.r.parts is None:
            return actions
        return self._replan(now, {peer}) if self.r.parts.complete() is None else self._pass_on(peer)

    def _pass_on(self, reducer: bytes) -> list[Action]:
        """All averages are here, but a lost reducer may not have sent its own to everybody: do it in its place."""
        assert self.r.parts is not None
        attempt, parts = self.r.parts.attempt, self.r.parts.of(reducer)
        waiting = sorted(self._living - self._agreeing())
        return [PushAverage(peer, attempt, part) for peer in waiting for part in parts]

    @property
    def _living(self) -> set[bytes]:
        return set(self.joined) - self.gone - self.silent

    @property
    def _voting(self) -> Tip:
        """The tip with those who vote on what follows it."""
        return self.r.tip if self.r.tip.electors else replace(self.r.tip, electors=self.r.elders)

    def _quorum(self, peers: Collection[bytes]) -> bool:
        return self._voting.quorum(peers, self.r.resigned)

    def _silent(self) -> set[bytes]:
        """At half time: reducers that owe an average and have not even said what they hold."""
        parts = self.r.parts
        if parts is None or parts.complete() is not None:
            return set()
        spoken = {peer for peer, (attempt, _) in self.have.items() if attempt == parts.attempt}
        return parts.missing_reducers() - spoken - {self.r.me}

    def _replan(
        self, now: float, without: set[bytes], slow: Collection[bytes] = (), *, late: bool = False
    ) -> list[Action]:
        """Without these peers, if that changes anything; when it is ``late``, without what reducers lack too.

        Who is ``slow`` reduces nothing any more, but counts.
        """
        r, parts = self.r, self.r.parts
        if parts is None or parts.attempt >= MAX_ATTEMPTS or parts.complete() is not None:
            return []
        if self._too_late(now):
            return self.abort(TOO_LATE)
        living = self._living - without
        counted = set(living)
        for reducer in parts.missing_reducers() & living:
            attempt, owners = self.have.get(reducer, (-1, set()))
            if reducer == r.me:
                attempt, owners = parts.attempt, set(parts.held())
            if attempt == parts.attempt and late:
                counted &= owners
        able = [peer for peer in living - set(slow) if self.joined[peer].uplink > 0] or [r.me]
        plan = parts.replan(able, counted)
        if plan is None or not self._quorum(plan.counted) or len(plan.counted) < r.rules.min_group:
            return []
        self._restart_clock(now)
        self.silent |= without - self.gone
        tell: list[Action] = [Send(peer, plan) for peer in self.audience]
        return tell + r.on_plan(plan, now)

    # ------------------------------------------------------------------ the decision

    def progressed(self, now: float) -> list[Action]:
        """What this peer holds has changed."""
        return self._maybe_decide(now)

    def _maybe_decide(self, now: float) -> list[Action]:
        """Decide as soon as nothing more can come: every living member holds what every living member gave."""
        if self.deciding is not None or not self.closed:
            return []
        if self.r.parts is not None:
            agreeing = self._agreeing()
            return self._decide_parts(agreeing, now) if agreeing >= self._living else self._correct(agreeing)
        living = self._living
        held = {peer: owners for peer, (_, owners) in self.have.items()}
        if all(held.get(peer, set()) >= living for peer in living):
            return self._decide_whole(set.intersection(*(held[peer] for peer in living)), living, now)
        return []

    def _agreeing(self) -> set[bytes]:
        """Members that hold the same averages as this peer; empty if it does not hold all itself."""
        parts = self.r.parts
        mine = parts.complete() if parts else None
        if parts is None or mine is None:
            return set()
        agree = {peer for peer, vote in self.votes.items() if vote == (parts.attempt, mine)}
        return {self.r.me} | (agree & self._living)

    def _correct(self, agreeing: set[bytes]) -> list[Action]:
        """If a quorum of the others holds the same averages, and not those that are here, get theirs."""
        parts = self.r.parts
        if parts is None or not agreeing or self._quorum(agreeing):
            return []
        votes = {peer: vote for peer, (attempt, vote) in self.votes.items() if attempt == parts.attempt}
        for peer in sorted(votes.keys() & self._living):
            same = {other for other, vote in votes.items() if vote == votes[peer]}
            if len(same) > 1 and self._quorum(same | {self.r.me}) and len(votes[peer]) == len(parts.reducers):
                return self.r.correct(peer, votes[peer])
        return []

    def _decide_late(self, now: float) -> list[Action]:
        """Time is up."""
        if self.r.parts is not None:
            agreeing = self._agreeing()
            if not agreeing:
                slow = self.r.parts.missing_reducers() - {self.r.me}
                plan = self._replan(now, self._silent(), slow, late=True) if self.r.parts.attempt < LATE_PLANS else []
                return plan or self.abort("not all averages arrived in time")
            return self._decide_parts(agreeing, now)
        mine = self.r.held()
        self.have[self.r.me] = (0, mine)
        living = self._living
        held = {peer: owners for peer, (_, owners) in self.have.items() if peer in living}
        voters = {peer for peer, owners in held.items() if owners}
        counted = {owner for owner in mine if 2 * sum(owner in owners for owners in held.values()) > len(living)}
        return self._decide_whole(counted, voters, now)

    def _decide_whole(self, counted: set[bytes], voters: set[bytes], now: float) -> list[Action]:
        members = tuple(self.joined[peer].member for peer in sorted(counted))
        return self._decide(Basis(members), voters, now)

    def _decide_parts(self, voters: set[bytes], now: float) -> list[Action]:
        parts = self.r.parts
        digests = parts.complete() if parts else None
        assert parts is not None
        assert digests is not None
        members = tuple(self.joined[peer].member for peer in parts.counted)
        return self._decide(Basis(members, parts.as_parts(digests)), voters, now)

    def _decide(self, basis: Basis, voters: set[bytes], now: float) -> list[Action]:
        counted, needed = {member.peer for member in basis.members}, self.r.rules.min_group
        if self._too_late(now):
            return self.abort(TOO_LATE)
        if len(counted) < needed or not counted:
            return self.abort(f"{len(counted)} contributions arrived, {needed} are needed")
        if not (self._quorum(counted) and self._quorum(voters)):
            return self.abort(f"no quorum: {len(counted)} contributions held by {len(voters)} peers")
        self.deciding = basis
        return self.r.want_state(basis) or self.state_known(basis, now)

    def state_known(self, basis: Basis, now: float) -> list[Action]:
        """The state after the step from ``basis`` is computed: commit if that is what was decided."""
        r = self.r
        state = r.state_of(basis)
        if state is None or basis != self.deciding:
            return []
        if self._too_late(now):
            return self.abort(TOO_LATE)
        rates = [self.joined[member.peer].rate for member in basis.members]
        record = CommitRecord(
            run=r.run,
            fragment=r.fragment,
            round=r.round,
            version=r.tip.version + 1,
            prev=r.tip.head,
            members=basis.members,
            electors=self._electors({member.peer for member in basis.members}),
            state=state,
            tokens_total=r.tip.tokens_total + sum(member.tokens for member in basis.members),
            clock=next_clock(r.clock, r.round, rates, self._busy_seconds(now), r.rules.inner_steps, r.rules.fragments),
            coordinator=r.me,
            parts=basis.parts,
        )
        signed = SignedRecord(record, r.sign(record.signed_bytes()))
        tell: list[Action] = [Send(peer, m.Commit(r.fragment, r.round, signed)) for peer in self.audience]
        return tell + r.finish(Committed(signed))

    def _busy_seconds(self, now: float) -> float:
        """How long the exchange kept the members' lines busy; waiting for one that fell out is no measure of it."""
        replanned = self.r.parts is not None and self.r.parts.attempt > 0
        return 0.0 if replanned else max(0.0, now - self.closed_at)

    def _too_late(self, now: float) -> bool:
        return self.expires is not None and now > self.expires

    def _electors(self, counted: set[bytes]) -> tuple[bytes, ...]:
        """Whoever is counted, and earlier electors that are still seen alive."""
        alive = (set(self.r.candidates) | self.r.expected) & set(self.r.tip.electors)
        # No more than fit into a group, so that the next one has room for a quorum and for newcomers.
        others = sorted(alive - counted)[: max(0, self.r.rules.max_group - len(counted))]
        return tuple(sorted(counted | set(others)))

    def _hand_over(self, reason: str) -> list[Action]:
        """Without a contribution of its own it cannot coordinate: the next of those who joined does."""
        following = [peer for peer in self.r.candidates if peer in self.joined]
        if not following:
            return self.abort(reason)
        redirect = m.Redirect(self.r.fragment, self.r.round, following[0])
        tell: list[Action] = [Send(peer, redirect) for peer in self.audience]
        return tell + self.r.finish(Aborted(reason))

    def abort(self, reason: str) -> list[Action]:
        """Nothing changes; everybody is told."""
        tell: list[Action] = [Send(peer, m.Abort(self.r.fragment, self.r.round, reason)) for peer in self.audience]
        return tell + self.r.finish(Aborted(reason))
