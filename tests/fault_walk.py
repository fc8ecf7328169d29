"""Plays one schedule of faults in a tiny swarm and checks what must hold whatever goes wrong.

Used by tests/protocol/test_fault_walk.py, whose worker processes import it. One schedule again, to look into it:

    python -m tests.fault_walk SIZE FAULT MOMENT ROLE SEED [-v]

The checks look at states, records and reports of the peers after each event, not at how the protocol came to them.
"""

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stretto.protocol.actions import Committed, Rules
from stretto.protocol.chain import CommitRecord, SignedRecord, Tip, after
from stretto.protocol.digest import state_digest
from stretto.protocol.effects import Effect, Over, PartWork, Work
from stretto.protocol.errors import StrettoError
from stretto.protocol.faults import Fault, FaultySimulation, Moment, Role, Schedule, draw_schedule
from stretto.protocol.outer import Vector
from stretto.protocol.reduce import ALL_GATHER
from stretto.protocol.simnet import Network
from stretto.protocol.simulation import SimPeer
from stretto.protocol.streaming import Contribution
from tests.fakes import QuadraticReplica, toy_config

H, P = 8, 2
FIRST = 2
"""The first round that is struck: by then every fragment has electors."""
TOKENS = (100, 31, 370, 90, 57, 211, 143, 19)
CYCLES_TO_RECOVER = 2
FINDINGS = (
    AssertionError, StrettoError,
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a check raises, and what the protocol raises where it should not: a crash is a finding like any other."""


@dataclass
class Seen:
    """A fragment's state when a peer was looked at last."""

    tip: Tip
    anchor: Vector
    momentum: Vector


@dataclass
class Ledger:
    """All that peers have signed, decided and installed, and whether it fits together."""

    signed: set[tuple[bytes, bytes]] = field(default_factory=set)
    records: dict[bytes, CommitRecord] = field(default_factory=dict)
    """By the head of the chain that ends with them."""
    tips: dict[int, tuple[CommitRecord, Tip]] = field(default_factory=dict)
    """What follows from each record, by its ``id``: hashing takes most of the time of a walk."""
    decisions: dict[tuple[int, int, bytes], bytes] = field(default_factory=dict)
    """Head of the record of each (fragment, round) on a chain."""
    results: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    seen: dict[tuple[int, int, int], Seen] = field(default_factory=dict)
    installed: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    """Heads that each life of each peer has had."""

    def look(self, sim: SimPeer) -> None:
        """Compare a peer's states with those of the last look."""
        for index, state in enumerate(sim.peer.diloco.fragments):
            place = (sim.index, sim.life, index)
            last = self.seen.get(place)
            if last is None or state.tip is not last.tip:
                self.seen[place] = Seen(state.tip, state.anchor, state.momentum)
                if last is not None:
                    assert state.record is not None
                    self._installed(sim, last.tip, state.tip, state.record, state_digest(state.anchor, state.momentum))
            else:
                same = state.anchor is last.anchor and state.momentum is last.momentum
                assert same, f"peer {sim.index}: fragment {index} changed without a commit"

    def _installed(self, sim: SimPeer, old: Tip, new: Tip, signed: SignedRecord, bits: bytes) -> None:
        record = signed.record
        what = f"peer {sim.index}, fragment {record.fragment}, round {record.round}, version {record.version}"
        assert self.note(signed) == new, f"{what}: the tip is not that of the record"
        assert record.state == bits, f"{what}: half applied, the state is not that of the record"
        heads = self.installed.setdefault((sim.index, sim.life), set())
        assert new.head not in heads, f"{what}: installed twice"
        heads.add(new.head)
        if record.prev == old.head:
            assert new.version == old.version + 1, f"{what}: follows version {old.version}"
        else:
            assert new.beats(old), f"{what}: took the place of a better state, version {old.version}"

    def note(self, signed: SignedRecord) -> Tip:
        """A decision was made; the tip of the chain that ends with it."""
        record = signed.record
        known = self.tips.get(id(record))
        if known is not None:
            return known[1]
        tip = after(record)
        self.tips[id(record)] = record, tip
        head = tip.head
        if head in self.records:
            return tip
        assert (record.coordinator, record.signed_bytes()) in self.signed, "nobody has signed this record"
        self.records[head] = record
        other = self.decisions.setdefault((record.fragment, record.round, record.prev), head)
        assert other == head, f"two decisions of round {record.round}, fragment {record.fragment}"
        return tip

    def worked(self, key: tuple[Any, ...], result: bytes) -> None:
        """A peer has reduced something: all that reduce the same must get the same bits."""
        assert self.results.setdefault(key, result) == result, "the same contributions gave other bits"

    def chain(self, tip: Tip) -> list[CommitRecord]:
        """The records of the lineage that ends at ``tip``, latest first; no round may come twice."""
        chain, head = [], tip.head
        while head in self.records:
            chain.append(self.records[head])
            head = self.records[head].prev
        assert len(chain) == tip.version, f"the chain of {tip.version} records has a gap"
        rounds = [record.round for record in chain]
        assert rounds == sorted(set(rounds), reverse=True), f"rounds of one lineage: {rounds[::-1]}"
        return chain

    def rivals(self) -> list[CommitRecord]:
        """Records that were extended although another one that extends the same record was extended first."""
        extended = {record.prev for record in self.records.values()}
        grown: dict[bytes, bytes] = {}
        grew = [(head, record) for head, record in self.records.items() if head in extended]
        return [record for head, record in grew if grown.setdefault(record.prev, head) != head]


class Walk(FaultySimulation):
    """A faulty simulation that is watched; ``trace`` collects a line for each report, if there is one."""

    def __init__(self, *args: Any, trace: list[str] | None = None, **kwargs: Any) -> None:
        self.ledger, self.trace = Ledger(), trace
        self.gossiping = True
        self.begun: dict[tuple[int, int, int], float] = {}
        """When each round departed at each life of a peer, while it lasts."""
        self.ended: set[tuple[int, int, int]] = set()
        """Rounds that are over: a late peer may find that its round was over before it departed."""
        self.left: dict[tuple[int, int, bytes], tuple[Vector, Vector]] = {}
        """Outer gradient and local weights of each contribution, by peer, fragment and digest."""
        self.lost_in_merge: dict[tuple[int, int], Vector] = {}
        """Local work that merges have overwritten, as they do with alpha = 0, by peer and fragment."""
        super().__init__(*args, **kwargs)

    def say(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f}  {what}")

    def cycle(self) -> float:
        """Duration of a cycle at present."""
        return self.clock().interval * P

    # ------------------------------------------------------------------ what is watched

    def _sign(self, me: bytes, message: bytes) -> bytes:
        # Signed are the words "stretto commit" and the record; the ledger asks with what the record would sign.
        self.ledger.signed.add((me, message))
        return super()._sign(me, message)

    def _carry_out(self, sim: SimPeer, effects: Sequence[Effect]) -> None:
        if sim.alive:
            self.ledger.look(sim)
        super()._carry_out(sim, effects)

    def _effect_now(self, sim: SimPeer, effect: Effect, decided: bool) -> None:
        if isinstance(effect, Over):
            self._note_over(sim, effect)
        elif self.trace is not None:
            self.say(f"peer {sim.index}: {_short(effect)}")
        super()._effect_now(sim, effect, decided)

    def _note_over(self, sim: SimPeer, over: Over) -> None:
        began = self.begun.pop((sim.index, sim.life, over.round), None)
        self.say(f"peer {sim.index}: round {over.round} over: {_outcome(over)}")
        if isinstance(over.outcome, Committed):
            self.ledger.note(over.outcome.signed)
        self.ended.add((sim.index, sim.life, over.round))
        if began is not None and not self._disturbed(sim, began):
            lasted = self.now - began
            assert lasted <= 1.25 * self.cycle(), f"peer {sim.index}: round {over.round} lasted {lasted:.2f}"

    def _disturbed(self, sim: SimPeer, since: float) -> bool:
        return any(struck.victim == sim.index and struck.ended >= since for struck in self.struck)

    def _worked(self, sim: SimPeer, work: Work | PartWork) -> list[Effect]:
        result = sim.peer.reduce(work)
        if isinstance(work, PartWork):
            # Two peers reduce one part of the same members only after a plan; attempts differ then, bits must not.
            self.ledger.worked((work.group, work.part.part, work.part.members), result.digest)
        else:
            head = sim.peer.diloco.fragments[work.fragment].tip.head
            self.ledger.worked((head, work.basis), result.digest)
        return sim.peer.reduced(work, result, self.local(sim))

    def _depart(self, sim: SimPeer, round: int) -> None:
        self.begun[sim.index, sim.life, round] = self.now
        super()._depart(sim, round)

    def _leave(self, sim: SimPeer, fragment: int) -> Contribution:
        contribution = super()._leave(sim, fragment)
        local = sim.replica.get(fragment)
        gradient = sim.peer.diloco.fragments[fragment].anchor - local
        self.left[sim.index, fragment, contribution.digest] = gradient, local
        return contribution

    def _merge(self, sim: SimPeer, fragment: int) -> None:
        state = sim.peer.diloco.fragments[fragment]
        if state.merge_with is not None:
            assert state.record is not None
            (mine,) = [x.payload for x in state.record.record.members if x.peer == sim.peer.me]
            lost = sim.replica.get(fragment) - self.left[sim.index, fragment, mine][1]
            before = self.lost_in_merge.get((sim.index, fragment), np.zeros_like(lost))
            self.lost_in_merge[sim.index, fragment] = before + lost
        super()._merge(sim, fragment)

    def _gossip(self) -> None:
        if self.gossiping:
            super()._gossip()

    # ------------------------------------------------------------------ the end

    def check_recovered(self, versions: list[int]) -> None:
        """All peers are there, on the same heads with the same bits, and all chains have grown beyond ``versions``."""
        assert all(sim.alive and not sim.joining and not sim.frozen for sim in self.peers), "a peer has not come back"
        best = [max((sim.peer.tips()[p] for sim in self.peers), key=_rank) for p in range(P)]
        for sim in self.peers:
            self.ledger.look(sim)
            for p, state in enumerate(sim.peer.diloco.fragments):
                have = f"version {state.tip.version} of fragment {p}, the winning head has {best[p].version}"
                assert state.tip == best[p], f"peer {sim.index} is not back: {have}"
                first = self.peers[0].peer.diloco.fragments[p]
                assert state.anchor.tobytes() == first.anchor.tobytes(), "equal heads, other anchors"
                assert state.momentum.tobytes() == first.momentum.tobytes(), "equal heads, other momenta"
        grown = [tip.version > version for tip, version in zip(best, versions, strict=True)]
        assert all(grown), f"fragments that have grown since: {grown}"
        hang = [at for at in self.begun.keys() - self.ended if at[1] == self.peers[at[0]].life]
        assert not hang, f"rounds that never ended: {hang}"

    def check_work(self) -> int:
        """No work is lost or counted twice, at peers that kept their memory and never left the lineage."""
        checked = 0
        for p in range(P):
            chain = self.ledger.chain(self.peers[0].peer.tips()[p])
            heads = {record.head() for record in chain}
            for sim in self.peers:
                had = self.ledger.installed.get((sim.index, sim.life), set())
                mine = {head for head in had if self.ledger.records[head].fragment == p}
                counted = [x for record in chain for x in record.members if x.peer == sim.peer.me]
                # A download does not tell which records it has skipped counted this peer: a known limit.
                skipped = [r for r in chain if r.head() not in mine and sim.peer.me in {x.peer for x in r.members}]
                if sim.life or not mine <= heads or skipped:
                    continue
                checked += 1
                self._check_work_of(sim, p, [(x.tokens, x.payload) for x in counted])
        return checked

    def _check_work_of(self, sim: SimPeer, fragment: int, counted: list[tuple[int, bytes]]) -> None:
        replica, state = sim.replica, sim.peer.diloco.fragments[fragment]
        assert isinstance(replica, QuadraticReplica)
        assert replica.tokens is not None
        tokens = sum(tokens for tokens, _ in counted) + state.tokens
        what = f"peer {sim.index}, fragment {fragment}"
        assert tokens == sim.steps * replica.tokens, f"{what}: {tokens} tokens, not {sim.steps * replica.tokens}"
        work = (replica.get(fragment) - state.anchor).astype(np.float64)
        for _, payload in counted:
            work -= self.left[sim.index, fragment, payload][0]
        work += self.lost_in_merge.get((sim.index, fragment), 0.0)
        error = float(np.abs(work - replica.work[fragment]).max())
        assert error < 1e-4, f"{what}: the work counted and kept is off by {error:g}"


def _rank(tip: Tip) -> tuple[int, int, bytes]:
    return tip.tokens_total, tip.version, tip.head


def _outcome(over: Over) -> str:
    if isinstance(over.outcome, Committed):
        record = over.outcome.signed.record
        return f"committed version {record.version}, {len(record.members)} members, counted: {over.counted}"
    return f"{type(over.outcome).__name__}: {over.outcome.reason}"


def _short(effect: Effect) -> str:
    message = getattr(effect, "message", None)
    name = type(effect).__name__ if message is None else type(message).__name__
    to = getattr(effect, "to", getattr(effect, "source", b""))
    number = getattr(message or effect, "round", getattr(effect, "fragment", None))
    return f"{name} {number} -> {to[6:8].hex()}"


@dataclass(frozen=True)
class Report:
    """How one schedule went; ``error`` is empty if all held."""

    schedule: Schedule
    error: str
    struck: int
    committed: int
    checked_work: int
    """For how many peers and fragments the work was added up."""
    cpu: float = field(default=0.0, compare=False)
    """Processor seconds that it took."""


def make_walk(schedule: Schedule, trace: list[str] | None = None) -> Walk:
    """The swarm of a schedule: delays, speeds and settings are drawn from it."""
    chance = schedule.random()
    size = schedule.size
    config = toy_config(
        codec="fp32", min_size=chance.choice((1, 2)), inner_steps=H, fragments=P, tau_max=2, alpha=0.0
    )  # fmt: skip
    network = Network(
        delay=chance.uniform(0.01, 0.1),
        jitter=chance.choice((0.0, 0.05, 0.2)),
        silent=chance.random() < 0.3,
        lingers=chance.random() < 0.5,
        encoded=chance.random() < 0.2,
    )
    rules = Rules(
        inner_steps=H, fragments=P, min_group=config.group.min_size, max_group=config.group.max_size,
        window=0.5, margin=0.6, min_exchange=1.0, ask_wait=0.4,
    )  # fmt: skip
    lives = [0] * size
    values = 33 if size <= ALL_GATHER else 700  # three blocks, so that three peers have a part to reduce

    def restarted(index: int) -> QuadraticReplica:
        lives[index] += 1
        return QuadraticReplica(index + 100 * lives[index], P, values, tokens=TOKENS[index])

    return Walk(
        config,
        [QuadraticReplica(index, P, values, tokens=TOKENS[index]) for index in range(size)],
        step_times=[chance.choice((0.8, 1.0, 1.25)) for _ in range(size)],
        network=network,
        seed=chance.getrandbits(30),
        rules=rules,
        work_time=chance.choice((0.0, 0.05)),
        expiry=chance.uniform(4.0, 8.0),
        clients=(size - 1,) if size > 3 else (),
        strikes=schedule.strikes,
        restarted=restarted,
        trace=trace,
    )


def run(schedule: Schedule, walk: Walk) -> Report:
    """Until the last strike is over and the swarm has had time to recover. AssertionError if something is wrong."""
    while walk.pending:
        assert walk.now < 40 * H, f"never reached: {', '.join(map(str, walk.pending))}"
        walk.play(walk.now + walk.clock().interval)
    ended = max(struck.ended for struck in walk.struck)
    walk.play(ended)
    versions = [max(sim.peer.tips()[p].version for sim in walk.peers) for p in range(P)]
    walk.play(ended + CYCLES_TO_RECOVER * walk.cycle())
    walk.gossiping = False
    walk.settle()
    walk.check_recovered(versions)
    rivals = walk.ledger.rivals()
    assert not rivals, f"two lineages grew, one of them from version {rivals[0].version}"
    checked = walk.check_work()
    if not any(struck.strike.fault is Fault.CORRUPT for struck in walk.struck):
        assert not walk.refused, f"an honest peer was refused: {walk.refused[0]}"
    return Report(schedule, "", len(walk.struck), len(walk.committed()), checked)


def play(schedule: Schedule, trace: list[str] | None = None) -> Report:
    """Play a schedule; whatever is wrong ends up in the report."""
    walk = make_walk(schedule, trace)
    try:
        return run(schedule, walk)
    except FINDINGS as error:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError) or not str(error):
            text += "\n" + "".join(traceback.format_exception(error)[-3:]).rstrip()
        return Report(schedule, text, len(walk.struck), len(walk.committed()), 0)


def play_all(schedules: Sequence[Schedule]) -> list[Report]:
    """What a worker process does."""
    reports = []
    for schedule in schedules:
        began = time.process_time()
        report = play(schedule)
        reports.append(replace(report, cpu=time.process_time() - began))
    return reports


def main(size: str, fault: str, moment: str, role: str, seed: str, *options: str) -> None:
    """Play one schedule and print what happened."""
    schedule = draw_schedule(int(size), Fault[fault], Moment[moment], Role[role], int(seed), FIRST)
    trace: list[str] = []
    report = play(schedule, trace)
    print(schedule)
    print("\n".join(trace) if "-v" in options else "", report.error or "all held", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
