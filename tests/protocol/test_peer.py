"""What guards a peer between its rounds: unwanted bytes, rounds opened by others, downloads that do not fit."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from stretto.protocol import messages as m
from stretto.protocol.actions import Aborted, Committed, Rules, Send
from stretto.protocol.chain import Member, SignedRecord, Tip, genesis
from stretto.protocol.digest import digest, payload_digest, state_digest
from stretto.protocol.effects import FetchFrom, Over, PushTo, Repair, Work
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.peer import Peer
from stretto.protocol.reduce import group_digest
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import Simulation, peer_id
from stretto.protocol.streaming import Reduced, StreamingDiLoCo, seal
from tests.fakes import QuadraticReplica, toy_config

ME, A, B, C = (peer_id(index) for index in range(4))
CONFIG = toy_config(codec="fp32", fragments=2, max_size=3)
START = [np.arange(5, dtype=np.float32), np.ones(7, np.float32)]
LOCAL = [weights - np.float32(0.25) for weights in START]
RULES = Rules(inner_steps=20, fragments=2, min_group=1, max_group=3, window=3.0)


ONES = np.ones(5, "<f4").tobytes()
"""A contribution to fragment 0: 20 bytes, norm 2.24."""


def sign(peer: bytes, message: bytes) -> bytes:
    return digest("test sign", [peer, message]) * 2


def make(*others: bytes, **fields: Any) -> Peer:
    """A peer whose clock says that round r departs at 10 r, with ``others`` in its roster."""
    arguments: dict[str, Any] = {
        "me": ME, "config": CONFIG, "diloco": StreamingDiLoCo(CONFIG, START), "rules": RULES,
        "sign": lambda message: sign(ME, message), "verify": lambda peer, message, s: s == sign(peer, message),
    }  # fmt: skip
    peer = Peer(**{**arguments, **fields})
    peer.adopt_clock(Clock(0, 0.0, 10.0))
    peer.set_roster(others, others)
    return peer


def make_alone(peer: Peer) -> Peer:
    """The same peer, which now hears of nobody."""
    peer.set_roster((), ())
    return peer


def depart(peer: Peer, round: int, now: float | None = None) -> list[Any]:
    contribution = peer.diloco.leave(round % 2, LOCAL[round % 2])
    return list(peer.depart(round, contribution, rate=1.0, patience=5.0, now=10.0 * round if now is None else now))


def join(
    peer: bytes, round: int, head: bytes, tried: tuple[bytes, ...] = (), payload: bytes = ONES, norm: float = 9.0
) -> m.Join:
    return m.Join(round % 2, round, head, 0, Member(peer, 10, payload_digest(payload), norm), 1.0, 5.0, tried)


def test_alone_a_peer_reduces_and_commits() -> None:
    peer = make()
    (work,) = depart(peer, 0)
    assert isinstance(work, Work)
    assert peer.busy()
    (again,) = peer.reduced(work, peer.reduce(work), 0.5)
    assert isinstance(again, Over)
    assert isinstance(again.outcome, Committed)
    assert (again.round, again.fragment, again.counted, again.seconds) == (0, 0, True, 0.5)
    assert peer.tips()[0].version == 1
    assert peer.clock == again.outcome.signed.record.clock
    assert not peer.busy()


def test_a_fragment_whose_result_waits_sits_out() -> None:
    peer = make()
    (work,) = depart(peer, 0)
    peer.reduced(work, peer.reduce(work), 0.0)
    assert peer.sits_out(2) == "the last result of fragment 0 is not merged yet"
    assert peer.sits_out(1) is None
    peer.diloco.come_back(0, LOCAL[0])
    assert peer.sits_out(2) is None
    peer.hear(A, None, [(0, 10**6, 9), (0, 0, 0)])
    assert peer.sits_out(2) == "fragment 0 is being repaired"


def test_who_rests_enters_no_round_and_repairs_nothing() -> None:
    peer = make()
    peer.resting = "saving traffic"
    assert peer.sits_out(0) == "saving traffic"
    assert peer.hear(A, None, [(0, 10**6, 9), (0, 0, 0)]) == []
    assert not peer.repairing
    peer.resting = None
    assert peer.sits_out(0) is None
    assert [type(effect) for effect in peer.hear(A, None, [(0, 10**6, 9), (0, 0, 0)])] == [Repair]


def test_partners_are_those_of_rounds_in_hand() -> None:
    peer = make()
    assert peer.partners() == set()
    (work,) = depart(peer, 0)
    assert peer.partners() == set()  # alone
    peer.reduced(work, peer.reduce(work), 0.0)
    other = make(A)
    other.depart(0, other.diloco.leave(0, LOCAL[0]), rate=1.0, patience=5.0, now=0.0)
    assert other.partners() == {other._live[0].round.coordinator} - {other.me}


def test_a_contribution_from_an_anchor_that_is_gone_does_not_enter() -> None:
    peer = make()
    old = peer.diloco.leave(0, LOCAL[0])
    (work,) = depart(peer, 0)
    peer.reduced(work, peer.reduce(work), 0.0)
    peer.diloco.come_back(0, LOCAL[0])
    (over,) = peer.depart(2, old, rate=1.0, patience=5.0, now=20.0)
    assert isinstance(over, Over)
    assert over.outcome == Aborted("its state changed while the contribution left")


def test_a_round_departs_once() -> None:
    peer = make(A)
    depart(peer, 0)
    with pytest.raises(LocalProtocolError, match="round 0 departed twice"):
        depart(peer, 0)


# ---------------------------------------------------------------------- pushes


def grouped(*offers: tuple[bytes, bytes, float], me_too: bool = True, **fields: Any) -> tuple[Peer, m.Group]:
    """A peer in round 0 whose coordinator has closed a group of these (peer, payload, announced norm)."""
    peer = make(A, B, can_coordinate=False, **fields)
    (send,) = [effect for effect in depart(peer, 0) if isinstance(effect, Send)]
    assert isinstance(send.message, m.Join)
    found = [Member(owner, 10, payload_digest(payload), norm) for owner, payload, norm in offers]
    members = sorted([*found, *([send.message.member] if me_too else [])], key=lambda x: x.peer)
    group = m.Group(0, 0, tuple(members), (), 10.0)
    effects = peer.received(send.to, group, 0.0)
    assert [effect.to for effect in effects if isinstance(effect, PushTo)] == sorted(
        (owner for owner, *_ in offers), key=lambda owner: (owner < ME, owner)
    ) * me_too
    return peer, group


def push(of: m.Group, payload: bytes = ONES, **fields: Any) -> m.Push:
    header = m.Push(0, 0, group_digest(of), 0, payload_digest(payload), len(payload))
    return dataclasses.replace(header, **fields)


def arrive(peer: Peer, owner: bytes, group: m.Group, payload: bytes = ONES) -> list[Any]:
    header = push(group, payload)
    assert peer.wants(owner, header) is None
    peer.check(owner, header, payload)
    return peer.payload_arrived(owner, header, payload, 0.0)


def test_only_what_is_due_is_let_in_before_any_byte() -> None:
    peer, group = grouped((A, ONES, 9.0))
    fresh = make(A, B)
    assert fresh.wants(A, push(group)) == "round 0 is not going on here"
    assert peer.wants(A, push(group)) is None
    assert peer.wants(A, push(group, nbytes=21)) == "21 bytes where 20 are due"
    assert peer.wants(A, push(group, nbytes=0)) == "0 bytes where 20 are due"
    assert peer.wants(A, push(group, round=2)) == "round 2 is not going on here"
    assert peer.wants(A, push(group, fragment=1)) == "round 0 is not going on here"
    assert peer.wants(A, push(group, group=bytes(32))) == "another group"
    assert peer.wants(C, push(group)) == "not a member of the group"
    average = m.Average(0, 0, group_digest(group), 0, 0, payload_digest(ONES), 20)
    assert peer.wants(A, average) == "no such part"


def test_before_the_group_is_known_nothing_is_let_in_but_it_may_be_asked_again_soon() -> None:
    _, group = grouped((A, ONES, 9.0))
    peer = make(A, B, can_coordinate=False)
    assert not peer.early(push(group))  # the round is not going on here
    (send,) = [effect for effect in depart(peer, 0) if isinstance(effect, Send)]
    assert peer.wants(A, push(group)) == "another group"
    assert peer.early(push(group))
    peer.received(send.to, group, 0.0)
    assert not peer.early(push(group))
    assert peer.wants(A, push(group)) is None
    peer.received(send.to, m.Abort(0, 0, "no"), 0.0)
    assert not peer.early(push(group, group=bytes(32)))
    assert peer.wants(A, push(group)) == "round 0 is not going on here"


def test_each_peer_has_one_contribution() -> None:
    peer, group = grouped((A, ONES, 9.0), (B, ONES, 9.0))
    arrive(peer, A, group)
    assert peer.wants(A, push(group)) == "already here"
    # the same bytes from another peer are that peer's contribution
    assert peer.wants(B, push(group)) is None
    arrive(peer, B, group)
    assert peer.wants(B, push(group)) == "already here"


def test_once_the_group_is_known_only_its_contributions_are_let_in() -> None:
    peer, group = grouped((A, ONES, 9.0))
    assert peer.wants(A, push(group)) is None
    assert peer.wants(A, push(group, b"q" * 20)) == "not what the group was told of"
    assert peer.wants(B, push(group)) == "not a member of the group"


def test_a_payload_with_illegal_values_is_the_senders_fault() -> None:
    bad = np.full(5, np.nan, "<f4").tobytes()
    peer, group = grouped((A, bad, 9.0))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        peer.check(A, push(group, bad), bad)
    with pytest.raises(RemoteProtocolError, match="19 bytes where 20 are due"):
        peer.check(A, push(group, bad[1:]), bad[1:])
    with pytest.raises(RemoteProtocolError, match="do not match their digest"):
        peer.check(A, push(group, bad), ONES)


def test_a_contribution_larger_in_norm_than_announced_is_the_senders_fault() -> None:
    # the announced norm is that before encoding, which a codec may enlarge a little; ONES has norm 2.236
    for norm, good in ((9.0, True), (2.2361, True), (1.5, True), (1.49, False), (0.0, False)):
        peer, group = grouped((A, ONES, norm))
        if good:
            peer.check(A, push(group), ONES)
            continue
        with pytest.raises(RemoteProtocolError, match=f"contribution with norm 2.24, announced were {norm:.3g}"):
            peer.check(A, push(group), ONES)


def test_what_arrives_for_another_group_is_dropped() -> None:
    peer, group = grouped((A, ONES, 9.0))
    assert peer.payload_arrived(A, push(group, group=bytes(32)), ONES, 0.0) == []
    assert peer.payload(0, payload_digest(ONES)) is None
    arrive(peer, A, group)
    assert peer.payload(0, payload_digest(ONES)) == ONES


# ---------------------------------------------------------------------- rounds that others open


def test_a_join_opens_a_round_that_is_near_and_no_other() -> None:
    peer = make(A)
    head = peer.tips()[0].head
    for round in (4, 6, 100):
        assert peer.received(A, join(A, round, head), 10.5) == []
        assert peer.payload(round, bytes(32)) is None
    assert peer.waiting_for() == []
    peer.received(A, join(A, 2, head), 10.5)  # next_round(10.5) is 2
    assert [line.split(":")[0] for line in peer.waiting_for()] == ["round 2"]


def test_a_join_of_another_fragment_is_refused() -> None:
    peer = make(A)
    depart(peer, 0)
    with pytest.raises(RemoteProtocolError, match="round 0 is of fragment 0"):
        peer.received(A, m.Abort(1, 0, "x"), 0.0)
    assert peer.received(A, dataclasses.replace(join(A, 1, bytes(32)), fragment=0), 0.0) == []


def test_nobody_can_end_a_round_by_joining_a_later_or_an_earlier_one() -> None:
    peer = make(A, B)
    depart(peer, 2)
    assert peer.busy()
    head = peer.tips()[0].head
    # rounds 4 and 0 are of the same fragment; 4 is near at 20.5, but not due for a long time
    assert peer.received(A, join(A, 4, head), 20.5) == []
    assert peer.received(A, join(A, 0, head), 20.5) == []
    assert peer.busy()
    # when it is due, the hanging round gives way
    effects = peer.received(A, join(A, 4, head), 37.5)
    over = [effect for effect in effects if isinstance(effect, Over)]
    assert [(effect.round, effect.outcome) for effect in over] == [
        (2, Aborted("overtaken by a later state of its fragment"))
    ]


def test_messages_of_unknown_rounds_are_ignored() -> None:
    peer = make(A)
    for message in (
        m.Ask(0, 0),
        m.Abort(0, 0, "x"),
        m.Have(0, 0, 0, (A,)),
        m.Plan(0, 0, 1, (A,), (A,)),
        m.Averaged(0, 0, 0, (bytes(32),)),
    ):
        assert peer.received(A, message, 0.0) == []
    assert peer.fetch_failed(A, 0, 0.0) == []
    header = m.Push(0, 0, bytes(32), 0, payload_digest(ONES), 20)
    assert peer.payload_arrived(A, header, ONES, 0.0) == []
    assert peer.fetched(FetchFrom(A, 0, payload_digest(ONES), None), ONES, 0.0) == []


# ---------------------------------------------------------------------- clocks and repair


def test_the_clock_of_the_latest_round_is_in_force_and_of_two_the_earlier_one() -> None:
    peer = make()
    assert not peer.adopt_clock(Clock(0, 1.0, 10.0))
    assert peer.adopt_clock(Clock(5, 60.0, 12.0))
    assert not peer.adopt_clock(Clock(4, 0.0, 1.0))
    assert not peer.adopt_clock(Clock(5, 60.0, 13.0))
    assert peer.adopt_clock(Clock(5, 59.0, 20.0))
    assert peer.clock == Clock(5, 59.0, 20.0)


def test_hearing_of_a_longer_chain_asks_for_one_repair() -> None:
    peer = make(A)
    assert peer.hear(A, None, [(0, 0, 0), (0, 0, 0)]) == []
    assert peer.hear(A, None, [(0, 0, 0), (0, 30, 3)]) == [Repair(1, A, "version 0 here, 3 there")]
    assert peer.hear(A, None, [(0, 0, 0), (0, 40, 4)]) == []  # one at a time
    peer.repair_failed(1)
    assert peer.hear(A, None, [(0, 0, 0), (0, 40, 4), (0, 70, 7), (0, 70, 7)]) == [
        Repair(1, A, "version 0 here, 4 there")
    ]
    depart(peer, 0)
    assert peer.hear(A, None, [(0, 90, 9), (0, 0, 0)]) == []  # its round is going on and will say what is wrong


def test_of_two_branches_the_one_with_more_tokens_is_repaired_from_not_the_longer_one() -> None:
    peer = make(A)
    peer.diloco.trained(1000)
    (work,) = depart(make_alone(peer), 1)
    peer.reduced(work, peer.reduce(work), 10.0)
    assert (peer.tips()[1].version, peer.tips()[1].tokens_total) == (1, 1000)
    assert peer.hear(A, None, [(0, 0, 0), (0, 999, 3)]) == []
    assert peer.hear(A, None, [(0, 0, 0), (0, 1000, 1)]) == []
    assert peer.hear(A, None, [(0, 0, 0), (0, 1001, 1)]) == [Repair(1, A, "version 1 here, 1 there")]


def test_what_proved_to_be_no_better_is_not_downloaded_twice() -> None:
    peer, (state, copy) = make(A), _donor()
    assert peer.adopt(state, copy)
    announced = [(0, 0, 0), (0, 10**6, 7)]  # A says that it is far ahead, and then serves what is here already
    assert peer.hear(A, None, announced) == [Repair(1, A, "version 1 here, 7 there")]
    assert not peer.adopt(state, copy)
    assert peer.hear(A, None, announced) == []
    assert peer.hear(B, None, announced) == [Repair(1, B, "version 1 here, 7 there")]


def _donor() -> tuple[m.State, Reduced]:
    """Fragment 1 of a peer that is one commit ahead."""
    donor = make(me=A, sign=lambda message: sign(A, message))
    donor.diloco.trained(100)
    (work,) = depart(donor, 1)
    donor.reduced(work, donor.reduce(work), 10.0)
    state = donor.diloco.fragments[1]
    assert donor.clock is not None
    copy = seal(state.anchor, state.momentum)
    nbytes = 8 * state.anchor.size
    return m.State(1, state.tip, state.record, donor.clock, bytes(32), nbytes, nbytes, (copy.digest,)), copy


def test_a_download_that_fits_its_record_is_adopted() -> None:
    peer, (state, copy) = make(A), _donor()
    assert peer.hear(A, None, [(0, 0, 0), (0, 100, 1)]) != []
    assert peer.adopt(state, copy)
    assert peer.tips()[1] == state.tip
    assert peer.diloco.fragments[1].anchor.tobytes() == copy.anchor.tobytes()
    assert not peer.repairing
    assert state.record is not None
    assert peer.clock == state.record.record.clock
    assert not peer.adopt(state, copy)  # no better than what is here now


def test_a_download_that_is_worse_than_what_is_here_is_not_adopted() -> None:
    peer = make(A)
    peer.diloco.trained(1000)
    state, copy = _donor()  # 100 tokens
    (work,) = depart(make_alone(peer), 1)
    peer.reduced(work, peer.reduce(work), 10.0)  # 1000 tokens
    tip = peer.tips()[1]
    assert not peer.adopt(state, copy)
    assert peer.tips()[1] == tip


def test_downloads_that_do_not_fit_are_refused_and_change_nothing() -> None:
    state, copy = _donor()
    assert state.record is not None
    record = state.record.record
    other = dataclasses.replace(record, run=digest("run", [b"other"]))
    moved = dataclasses.replace(record, fragment=0)
    cases = [
        (state, seal(copy.anchor + np.float32(1), copy.momentum), "does not match its record"),
        (state, seal(copy.anchor, copy.momentum * 0), "does not match its record"),
        (dataclasses.replace(state, record=_signed(other)), copy, "does not match its record"),
        (dataclasses.replace(state, record=_signed(moved)), copy, "does not match its record"),
        (dataclasses.replace(state, record=SignedRecord(record, bytes(64))), copy, "wrong signature"),
    ]
    for bad, arrays, why in cases:
        peer = make(A)
        with pytest.raises(RemoteProtocolError, match=why):
            peer.adopt(bad, arrays)
        assert peer.tips() == [genesis(peer.run, p, state_digest(w, w * 0)) for p, w in enumerate(START)]


def _signed(record: Any) -> SignedRecord:
    return SignedRecord(record, sign(record.coordinator, record.signed_bytes()))


def test_the_tip_in_a_download_is_not_believed() -> None:
    state, copy = _donor()
    peer = make(A)
    lie = Tip(1, 99, bytes(32), 10**9, (A,))
    assert peer.adopt(dataclasses.replace(state, tip=lie), copy)
    assert peer.tips()[1] == state.tip


def test_a_client_mode_peer_never_coordinates() -> None:
    peer = make(A, B, can_coordinate=False)
    depart(peer, 0)
    effects = [effect for gone in (A, B, A) for effect in peer.lost(gone, 1.0)]  # in whichever order they are tried
    (over,) = [effect for effect in effects if isinstance(effect, Over)]
    assert over.outcome == Aborted("no coordinator answered")


def test_nothing_of_old_rounds_is_kept() -> None:
    simulation = Simulation(toy_config(), [QuadraticReplica(index) for index in range(3)], tau=[1] * 3)
    simulation.run(40)
    for sim in simulation.peers:
        kept = [round for round in range(40) if round in sim.peer._live]
        assert kept == [36, 37, 38, 39]
        assert [len(sim.peer._live[round].payloads) for round in kept] == [3] * 4


def test_an_initial_state_is_never_taken_over_whatever_its_hash() -> None:
    fragment = min((0, 1), key=lambda p: make(A).tips()[p].head)  # the one that is easier to beat
    start, tried = START[fragment], 0
    for seed in range(200):
        peer = make(A)
        random = np.random.default_rng(seed)
        reduced = seal(random.normal(size=start.size).astype(np.float32), np.zeros(start.size, np.float32))
        tip = genesis(peer.run, fragment, reduced.digest)
        tried += tip.beats(peer.tips()[fragment])
        nbytes = 8 * start.size
        state = m.State(fragment, tip, None, Clock(9, 90.0, 10.0), reduced.digest, nbytes, nbytes, (reduced.digest,))
        assert not peer.adopt(state, reduced)
        assert peer.diloco.fragments[fragment].anchor.tobytes() == start.tobytes()
    assert tried > 3  # some of these would have won by their hash


def test_who_offers_an_initial_state_is_not_asked_twice_for_it() -> None:
    peer = make(A)
    reduced = seal(np.full(5, 3.0, np.float32), np.zeros(5, np.float32))
    state = m.State(
        0, genesis(peer.run, 0, reduced.digest), None, Clock(0, 0.0, 10.0), reduced.digest, 40, 40, (reduced.digest,)
    )
    assert peer.hear(A, None, [(0, 40, 4), (0, 0, 0)]) == [Repair(0, A, "version 0 here, 4 there")]
    assert not peer.adopt(state, reduced)
    assert peer.hear(A, None, [(0, 40, 4), (0, 0, 0)]) == []
    # what it says next, and what others say, is new
    assert peer.hear(A, None, [(0, 50, 5), (0, 0, 0)]) == [Repair(0, A, "version 0 here, 5 there")]
    peer.repair_failed(0)
    assert peer.hear(B, None, [(0, 40, 4), (0, 0, 0)]) == [Repair(0, B, "version 0 here, 4 there")]


def test_a_clock_that_does_not_follow_is_not_heard() -> None:
    peer = make(A)
    before = peer.clock
    for lie in (Clock(2**39, 1e10, 10.0), Clock(1, 10.0, 0.001), Clock(3, 5e5, 10.0)):
        peer.hear(A, lie, [(0, 0, 0)] * 2)
        assert peer.clock == before
    peer.hear(A, Clock(3, 31.0, 11.0), [(0, 0, 0)] * 2)
    assert peer.clock == Clock(3, 31.0, 11.0)
    peer.hear(A, Clock(2, 20.0, 10.0), [(0, 0, 0)] * 2)
    assert peer.clock == Clock(3, 31.0, 11.0)  # others may be behind


def test_without_a_clock_a_single_peers_word_is_not_enough() -> None:
    peer = make()
    peer._clock.now = None
    peer.hear(A, Clock(3, 31.0, 11.0), [(0, 0, 0)] * 2)
    assert peer.clock is None


@pytest.mark.parametrize("factor", [0.3, 3.5])
def test_many_small_lies_do_not_lead_a_clock_further_than_one(factor: float) -> None:
    peer = make(A)
    clock = Clock(0, 0.0, 10.0)
    for number in range(1, 6):
        clock = Clock(number, clock.at + factor * clock.interval, factor * clock.interval)
        peer.hear(A, clock, [(0, 0, 0)] * 2)
    assert peer.clock == Clock(1, 10.0 * factor, 10.0 * factor)


def test_a_heard_clock_follows_the_present_one_not_only_the_last_record() -> None:
    peer = make(A)
    peer.hear(A, Clock(1, 3.0, 3.0), [(0, 0, 0)] * 2)
    peer.hear(B, Clock(2, 20.0, 35.0), [(0, 0, 0)] * 2)  # 3.5 times the record's interval, but 12 times the present
    assert peer.clock == Clock(1, 3.0, 3.0)


def test_clocks_that_records_set_may_go_far_in_the_end() -> None:
    peer = make(A)
    clock = Clock(0, 0.0, 10.0)
    for number in range(1, 9):
        clock = Clock(number, clock.at + clock.interval, 0.8 * clock.interval)
        peer.hear(A, clock, [(0, 0, 0)] * 2)  # the others have the record a little earlier
        assert peer.clock == clock
        assert not peer.adopt_clock(clock)
    assert clock.interval < 10.0 / 4


def test_the_first_clock_is_the_one_that_most_others_fit_and_of_these_the_furthest() -> None:
    honest = [Clock(4, 40.0, 10.0), Clock(5, 50.5, 10.5), Clock(5, 50.2, 10.2)]
    for lie in (Clock(2**39, 1e10, 10.0), Clock(6, 60.0, 500.0)):
        peer = make()
        peer._clock.now = None
        peer.adopt_first_clock([lie, *honest])
        assert peer.clock == Clock(5, 50.2, 10.2)
    peer.adopt_first_clock([Clock(9, 90.0, 10.0)])
    assert peer.clock == Clock(5, 50.2, 10.2)  # only where there is none
