"""Faults that were found in the state machine once, the smallest case of each."""

import dataclasses

import numpy as np
import pytest

from stretto.protocol import messages as m
from stretto.protocol import outer
from stretto.protocol.actions import Push, PushAverage, Reduce
from stretto.protocol.digest import digest
from stretto.protocol.reduce import Parts
from tests.protocol import test_peer_parts as tp
from tests.protocol.table import DEPARTS, PEERS, RULES, aborted, is_message, join_of, make, outcome_of, state_after
from tests.protocol.test_butterfly import FOUR, A, B, C, D, agree, is_average, seated


def test_a_slice_that_a_plan_moved_may_come_before_the_plan() -> None:
    peer, group, _ = tp.grouped()
    data = tp.slice_of(peer, tp.B, 3)  # ME is about to hear that it reduces part 3
    header = tp.push(group, data, part=3)
    assert peer.wants(tp.B, header) is None or peer.early(header)


def test_a_coordinator_that_lost_most_electors_does_not_decide_alone_on_their_old_votes() -> None:
    seats = PEERS[:5]  # of four, two that count as living are a quorum with the first of them
    t = seated(*seats)
    t.drop = lambda p, a: p in seats[3:] and is_message(a, m.Averaged)
    t.contribute(*seats)
    t.cut = set(seats[1:])
    for p in seats[1:]:
        t.take(A, t.rounds[A].lost(p, DEPARTS + 1), DEPARTS + 1)
    assert A not in t.outcomes or aborted(t.outcomes[A]).startswith("no quorum")


def test_a_silent_reducer_that_was_planned_out_does_not_hold_up_the_others_nor_give_up() -> None:
    t = seated(*FOUR, rules=dataclasses.replace(RULES, min_exchange=60.0))
    t.drop = lambda p, a: p == B and (is_average(a) or is_message(a, m.Have, m.Averaged))
    t.contribute(*FOUR)
    end = t.run(DEPARTS, DEPARTS + 400)
    agree(t, *FOUR)
    assert end < DEPARTS + 35


def test_a_coordinator_that_slept_over_the_step_does_not_commit() -> None:
    t = seated(*FOUR)
    t.drop = lambda p, a: p == A and isinstance(a, Reduce)
    t.contribute(*FOUR)
    (basis,) = {a.basis for p, a in t.log if p == A and isinstance(a, Reduce)}
    t.cut = {A}
    t.run(DEPARTS, DEPARTS + 60)
    assert all(aborted(t.outcomes[peer]) for peer in (B, C, D))  # they have voted
    actions = t.rounds[A].reduced(basis, state_after(basis), DEPARTS + 3600)
    aborted(outcome_of(actions))


def test_bytes_of_a_group_that_was_replaced_meanwhile_are_nobodys_fault() -> None:
    peer, group, _ = tp.grouped()
    data = tp.slice_of(peer, tp.B)
    header = tp.push(group, data)
    assert peer.wants(tp.B, header) is None
    round = peer._live[0].round  # a takeover: another group, with fewer parts
    other = dataclasses.replace(group, shares=(m.Share(tp.B, tp.SIZE),))
    round.group, round.group_id, round.parts = other, tp.group_digest(other), Parts(tp.ME, other)
    peer.check(tp.B, header, data)
    assert peer.payload_arrived(tp.B, header, data, 1.0) == []


def test_nobody_can_take_the_place_of_another_reducers_next_average() -> None:
    peer, group, _ = tp.grouped()
    junk = bytes(1024)
    header = tp.average(group, junk, attempt=1, part=0)
    if peer.wants(tp.C, header) is None:
        tp.arrive(peer, tp.C, header, junk)
    peer.received(tp.A, m.Plan(0, 0, 1, (tp.A, tp.ME, tp.B), (tp.A, tp.ME, tp.B, tp.B)), 2.0)
    data = tp.average_bytes(peer, 0, (tp.A, tp.ME, tp.B))
    assert peer.wants(tp.A, tp.average(group, data, attempt=1, part=0)) is None


def test_a_reducer_lost_when_only_the_coordinator_has_its_averages() -> None:
    seats = PEERS[:5]
    t = seated(*seats)
    t.drop = lambda p, a: p == C and isinstance(a, PushAverage) and a.to != A
    t.contribute(*seats)
    t.lose(C, DEPARTS + 1)
    t.run(DEPARTS + 1, DEPARTS + 100)
    agree(t, *[p for p in seats if p != C])


def test_at_half_time_what_is_still_on_the_way_is_not_given_up() -> None:
    seats = PEERS[:6]
    t = seated(*seats)
    t.drop = lambda p, a: p in (A, B) and isinstance(a, Push) and a.to == seats[seats.index(p) + 1]
    t.contribute(*seats)
    t.tick(DEPARTS + 5.0)
    t.tick(DEPARTS + 5.5)
    assert t.plans() == []


def test_norms_up_to_the_bound_can_be_taken() -> None:
    assert outer.norm(np.full(4, 1e20, np.float32)) == pytest.approx(2e20)


def test_one_wrong_average_to_the_coordinator_does_not_end_the_round() -> None:
    t = seated(*FOUR)
    t.alter = lambda p, a: digest("average", [b"wrong"]) if (p, a.to, a.part) == (C, A, 4) else None
    t.contribute(*FOUR)
    t.run(DEPARTS, DEPARTS + 100)
    agree(t, A, B, D)


def test_at_the_beginning_of_a_run_a_member_without_a_way_to_its_group_does_not_commit_alone() -> None:
    d = make(D, seats=(C, D))
    d.contribute(join_of(D), DEPARTS)
    d.received(C, m.Redirect(0, 8, A), DEPARTS)
    actions = [a for now in (10.0, 12.0, 14.0) for a in d.tick(DEPARTS + now)]
    assert not any(isinstance(a, Reduce) for a in actions)
