"""A round that reduces in parts, driven by hand: every fault at the moment it is meant to come.

Four peers and 2^21 values make eight parts, two for each reducer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.protocol import messages as m
from stretto.protocol.actions import (
    Action,
    Basis,
    Committed,
    Fetch,
    Outrun,
    Push,
    PushAverage,
    Reduce,
    ReducePart,
    Send,
)
from stretto.protocol.chain import CommitRecord, SignedRecord, after
from stretto.protocol.digest import digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.reduce import cut_shares
from stretto.protocol.rounds import Phase, Round
from tests.protocol.table import (
    DEPARTS,
    GENESIS,
    NUMEL,
    PEERS,
    RULES,
    Table,
    aborted,
    average_of,
    is_message,
    join_of,
    make,
    member,
    members,
    outcome_of,
    payload_of,
    sign,
    state_after,
    table,
    voted,
)

A, B, C, D, E, F, G, H = PEERS
FOUR = (A, B, C, D)
ALL_FOUR = voted(*FOUR)
PARTS = 8
OF_C = (4, 5)
"""The parts that C reduces."""


def seated(*seats: bytes, **fields: Any) -> Table:
    """Peers that all can reduce, on a chain whose electors they are."""
    return table(*seats, **{"tip": voted(*seats), "uplink": 1e6, **fields})


def agree(t: Table, *peers: bytes) -> CommitRecord:
    """The record that all of ``peers`` committed."""
    records = {t.record(peer).head(): t.record(peer) for peer in peers}
    assert len(records) == 1
    (record,) = records.values()
    # whoever committed holds all bytes that the state is made from
    assert all(set(record.payloads()) <= t.store[peer] for peer in peers)
    return record


def averages_of(record: CommitRecord) -> list[bytes]:
    return [part.payload for part in record.parts]


def is_average(action: Action, *to: bytes) -> bool:
    return isinstance(action, PushAverage) and (not to or action.to in to)


# ---------------------------------------------------------------------- the good case


@pytest.mark.parametrize("count", [4, 5, 8])
def test_all_are_in_and_commit_the_same_averages(count: int) -> None:
    seats = PEERS[:count]
    t = seated(*seats)
    t.contribute(*reversed(seats))
    record = agree(t, *seats)
    assert members(record) == seats
    assert record.coordinator == A
    assert len(record.parts) == len(cut_shares(NUMEL, dict.fromkeys(seats, 1.0)))
    assert averages_of(record) == [average_of(part, seats) for part in range(len(record.parts))]
    assert record.parts[-1].stop == NUMEL
    assert record.state == state_after(Basis(record.members, record.parts))
    assert (record.tokens_total, record.version) == (400 + 100 * count, 2)
    assert all(round.deadline() is None and round.over for round in t.rounds.values())
    for kind in (m.Plan, m.Have, m.Ask, m.Abort):
        assert t.sent(kind) == []
    # nobody got a whole contribution, nobody fetched, each part was averaged once
    assert all(t.held(peer) == {peer} for peer in seats)
    kinds = [type(action) for _, action in t.log]
    assert kinds.count(Fetch) == 0
    assert kinds.count(ReducePart) == len(record.parts)
    assert kinds.count(PushAverage) == len(record.parts) * (count - 1)
    assert kinds.count(Push) == count * (count - 1)


def test_each_reducer_gets_its_slices_of_all_and_begins_with_the_peer_after_itself() -> None:
    t = seated(*FOUR)
    t.contribute(*FOUR)
    pushes = [action for peer, action in t.log if peer == B and isinstance(action, Push)]
    assert pushes == [Push(C, (4, 5)), Push(D, (6, 7)), Push(A, (0, 1))]
    averages = [action for peer, action in t.log if peer == B and isinstance(action, PushAverage)]
    assert averages == [PushAverage(to, 0, part) for part in (2, 3) for to in (C, D, A)]


def test_a_group_of_three_exchanges_whole_contributions() -> None:
    t = seated(A, B, C)
    t.contribute(A, B, C)
    record = agree(t, A, B, C)
    assert record.parts == ()
    assert all(t.held(peer) == {A, B, C} for peer in (A, B, C))


def test_a_peer_in_client_mode_reduces_nothing_and_counts() -> None:
    t = seated(*FOUR)
    t.uplinks[B] = 0.0
    t.contribute(*FOUR)
    record = agree(t, *FOUR)
    assert members(record) == list(FOUR)
    assert B not in {peer for peer, action in t.log if isinstance(action, ReducePart)}
    assert all(action.to != B for _, action in t.log if isinstance(action, Push))


def test_when_nobody_can_reduce_whole_contributions_are_exchanged() -> None:
    t = seated(*FOUR, uplink=0.0)
    t.contribute(*FOUR)
    assert agree(t, *FOUR).parts == ()


def test_a_fragment_without_values_needs_no_parts() -> None:
    t = seated(*FOUR, numel=0)
    t.contribute(*FOUR)
    assert agree(t, *FOUR).parts == ()


def test_what_comes_before_the_groups_message_waits_for_it() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: is_message(action, m.Group) and action.to == D
    t.contribute(*FOUR)
    assert t.outcomes == {}
    assert t.rounds[D].group is None
    group = t.rounds[A].group
    assert group is not None
    t.drop = lambda peer, action: False
    t.take(A, [Send(D, group)], DEPARTS + 1)
    assert members(agree(t, *FOUR)) == list(FOUR)


def test_a_round_in_parts_says_how_far_it_is() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: is_average(action)
    t.contribute(*FOUR)
    assert t.rounds[B].waiting_for() == "reducing in parts (2 of 8 averages)"


def test_two_rounds_in_a_row_make_a_chain() -> None:
    t = seated(*FOUR)
    t.contribute(*FOUR)
    tip = after(agree(t, *FOUR))
    t = seated(*FOUR, tip=tip)
    t.contribute(*FOUR)
    record = agree(t, *FOUR)
    assert (record.prev, record.version, record.tokens_total) == (tip.head, 3, 1200)


# ---------------------------------------------------------------------- a member falls out


def test_a_reducer_lost_before_its_averages_went_out_is_replaced() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == C and is_average(action)
    t.contribute(*FOUR)
    assert t.outcomes == {}
    t.lose(C, DEPARTS + 1)
    record = agree(t, A, B, D)
    assert members(record) == [A, B, D]
    assert averages_of(record) == [average_of(part, (A, B, D)) for part in range(PARTS)]
    # one plan: the same parts, the next reducer in line for those of the lost one
    (plan,) = t.plans()
    assert plan == m.Plan(0, 8, 1, (A, B, D), (A, A, B, B, D, D, D, D))
    # the slices that had gone to C go to D, nothing else is sent again
    again = [(p, a) for p, a in t.log if isinstance(a, Push) and a.parts == OF_C and a.to == D]
    assert again == [(A, Push(D, OF_C)), (B, Push(D, OF_C))]
    assert len([a for _, a in t.log if isinstance(a, Push)]) == 12 + 2
    # waiting for a lost peer is no measure of the exchange: the clock stays as it was
    assert record.clock.interval == 10.0


def test_a_reducer_lost_after_its_averages_went_out_is_counted() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == C and is_message(action, m.Averaged)
    t.contribute(*FOUR)
    assert t.outcomes == {}  # C's own vote is missing
    t.lose(C, DEPARTS + 1)
    record = agree(t, A, B, D)
    assert members(record) == list(FOUR)
    assert t.plans() == []


def test_a_reducer_lost_when_only_the_coordinator_had_not_its_averages() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == C and is_average(action, A)
    t.contribute(*FOUR)
    t.lose(C, DEPARTS + 1)
    record = agree(t, A, B, D)
    # the votes of B and D name averages that A cannot see: it begins again rather than believe them
    assert members(record) == [A, B, D]
    assert len(t.plans()) == 1


def test_a_member_lost_before_its_slices_went_out_is_left_out() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == D and isinstance(action, Push)
    t.contribute(*FOUR)
    assert t.outcomes == {}
    assert not any(isinstance(action, PushAverage) for peer, action in t.log if peer != D)
    t.lose(D, DEPARTS + 1)
    record = agree(t, A, B, C)
    assert members(record) == [A, B, C]
    (plan,) = t.plans()
    # behind the last reducer in line comes the first
    assert plan.reducers == (A, A, B, B, C, C, A, B)


def test_a_member_lost_after_some_slices_went_out_is_left_out_everywhere() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == D and isinstance(action, Push) and action.to == C
    t.contribute(*FOUR)
    # A and B have averaged D's contribution already
    assert {peer for peer, action in t.log if isinstance(action, PushAverage)} == {A, B, D}
    t.lose(D, DEPARTS + 1)
    record = agree(t, A, B, C)
    assert averages_of(record) == [average_of(part, (A, B, C)) for part in range(PARTS)]


def test_a_contribution_that_never_arrives_is_left_out_although_its_owner_lives() -> None:
    t = seated(*FOUR)
    # D's line carries control messages and averages, but its slices reach nobody
    t.drop = lambda peer, action: peer == D and isinstance(action, Push)
    t.contribute(*FOUR)
    end = t.run(DEPARTS, DEPARTS + 60)
    record = agree(t, *FOUR)
    assert members(record) == [A, B, C]
    assert end < DEPARTS + 12
    assert t.sent(m.Ask) == []


def test_two_reducers_lost_one_after_the_other_take_two_plans() -> None:
    seats = PEERS[:6]
    t = seated(*seats)
    t.drop = lambda peer, action: peer in (C, E) and is_average(action)
    t.contribute(*seats)
    t.lose(C, DEPARTS + 1)
    assert t.outcomes == {}
    t.lose(E, DEPARTS + 2)
    record = agree(t, A, B, D, F)
    assert members(record) == [A, B, D, F]
    assert [plan.attempt for plan in t.plans()] == [1, 2]
    assert t.plans()[1].counted == (A, B, D, F)
    assert averages_of(record) == [average_of(part, (A, B, D, F)) for part in range(len(record.parts))]


def test_whoever_takes_over_parts_can_be_lost_too() -> None:
    seats = PEERS[:6]
    t = seated(*seats)
    t.drop = lambda peer, action: (
        (peer == C and is_average(action)) or (peer == D and isinstance(action, PushAverage) and action.attempt > 0)
    )
    t.contribute(*seats)
    t.lose(C, DEPARTS + 1)  # D is next in line
    t.lose(D, DEPARTS + 2)
    assert members(agree(t, A, B, E, F)) == [A, B, E, F]


def test_losing_so_many_that_no_quorum_is_left_commits_nothing() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer in (B, C, D) and is_average(action)
    t.contribute(*FOUR)
    for peer in (D, C, B):
        t.lose(peer, DEPARTS + 1)
    t.run(DEPARTS + 1, DEPARTS + 100)
    assert set(t.outcomes) == {A}
    assert aborted(t.outcomes[A]) == "not all averages arrived in time"


def test_too_few_members_left_for_the_run_commit_nothing() -> None:
    t = seated(*FOUR, rules=dataclasses.replace(RULES, min_group=4))
    t.drop = lambda peer, action: peer == C and is_average(action)
    t.contribute(*FOUR)
    t.lose(C, DEPARTS + 1)
    assert t.plans() == []
    t.run(DEPARTS + 1, DEPARTS + 100)
    assert {aborted(t.outcomes[peer]) for peer in (A, B, D)} == {"not all averages arrived in time"}


@settings(deadline=None)
@given(st.integers(4, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=1, max_size=3))
def test_whoever_dies_wherever_the_living_agree_and_nobody_waits_for_ever(
    count: int, deaths: list[tuple[int, int]]
) -> None:
    seats = PEERS[:count]
    left = dict.fromkeys(seats, 10**6) | {seats[index % count]: actions for index, actions in deaths}

    def dead(peer: bytes, action: Action) -> bool:
        left[peer] -= 1  # after so many actions nothing comes from it any more
        return left[peer] < 0

    t = seated(*seats)
    t.drop = dead
    t.contribute(*seats)
    # a death shows when the line breaks, here a second later; whoever dies after that is silent for good
    for peer in [peer for peer in seats if left[peer] < 0]:
        t.lose(peer, DEPARTS + 1)
    end = t.run(DEPARTS + 1, DEPARTS + 1000)
    assert end < DEPARTS + 200
    living = [peer for peer in seats if left[peer] >= 0]
    assert all(t.rounds[peer].over for peer in living)
    committed = [peer for peer in living if isinstance(t.outcomes[peer], Committed)]
    if committed:
        assert len(agree(t, *committed).members) * 2 >= count


# ---------------------------------------------------------------------- somebody is silent


def test_a_reducer_silent_at_half_time_is_replaced_and_learns_the_outcome() -> None:
    t = seated(*FOUR)
    # C is there, takes everything in, and says nothing
    t.drop = lambda peer, action: peer == C and (is_average(action) or is_message(action, m.Have, m.Averaged))
    t.contribute(*FOUR)
    assert t.rounds[A].deadline() == DEPARTS + 5.0
    t.tick(DEPARTS + 5.0)
    assert t.plans() == []  # what others say of half time must have the time to arrive
    t.tick(DEPARTS + 5.5)
    (plan,) = t.plans()
    assert C not in plan.reducers
    t.run(DEPARTS + 5.5, DEPARTS + 60)
    record = agree(t, *FOUR)
    assert C not in members(record)
    assert C not in [peer for peer, _ in t.sent(m.Join)[4:]]  # it began no group of its own
    assert t.sent(m.Abort) == []


def test_a_reducer_that_says_what_it_holds_at_half_time_is_not_silent() -> None:
    t = seated(*FOUR)
    held_back: list[Action] = []

    def slow(peer: bytes, action: Action) -> bool:
        if peer == C and is_average(action):
            held_back.append(action)
            return True
        return False

    t.drop = slow
    t.contribute(*FOUR)
    t.tick(DEPARTS + 5.0)
    t.tick(DEPARTS + 5.5)
    assert (C, A) in t.sent(m.Have)
    assert t.plans() == []
    t.drop = lambda peer, action: False
    t.take(C, held_back, DEPARTS + 8)
    assert members(agree(t, *FOUR)) == list(FOUR)


def test_a_reducer_that_never_delivers_is_replaced_when_time_is_up() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: peer == C and is_average(action) and t.plans() == []
    t.contribute(*FOUR)
    t.tick(DEPARTS + 5.0)
    t.tick(DEPARTS + 5.5)
    t.tick(DEPARTS + 10.0)
    (plan,) = t.plans()
    assert plan.counted == FOUR  # it counts, it only reduces nothing any more
    assert C not in plan.reducers
    assert members(agree(t, *FOUR)) == list(FOUR)


def test_an_average_with_other_bytes_for_one_member_is_fetched_as_it_should_be() -> None:
    t = seated(*FOUR)
    wrong = digest("average", [b"wrong"])
    t.alter = lambda peer, action: wrong if (peer, action.to, action.part) == (C, D, 4) else None
    t.contribute(*FOUR)
    assert t.outcomes == {}  # D's vote differs from the others'
    t.tick(DEPARTS + 5.0)
    t.tick(DEPARTS + 5.5)
    t.tick(DEPARTS + 10.0)
    record = agree(t, *FOUR)
    assert members(record) == list(FOUR)
    assert wrong not in averages_of(record)
    fetches = [(peer, action) for peer, action in t.log if isinstance(action, Fetch)]
    assert fetches == [(D, Fetch(A, average_of(4, FOUR), NUMEL // PARTS))]
    assert t.plans() == []


def test_an_average_with_other_bytes_for_the_coordinator_is_replaced_by_what_the_others_hold() -> None:
    t = seated(*FOUR)
    wrong = digest("average", [b"wrong"])
    t.alter = lambda peer, action: wrong if (peer, action.to, action.part) == (C, A, 4) else None
    t.contribute(*FOUR)
    record = agree(t, *FOUR)
    assert wrong not in record.payloads()


# ---------------------------------------------------------------------- the coordinator falls out


def test_the_coordinator_lost_before_the_group_is_replaced_at_once() -> None:
    t = seated(*PEERS[:5])
    t.drop = lambda peer, action: peer == A
    t.contribute(*PEERS[:5])
    assert t.outcomes == {}
    t.lose(A, DEPARTS + 1)
    record = agree(t, B, C, D, E)
    assert (record.coordinator, members(record)) == (B, [B, C, D, E])
    assert record.parts


def test_the_coordinator_lost_after_the_group_is_replaced_and_the_parts_are_cut_anew() -> None:
    t = seated(*PEERS[:5])
    t.drop = lambda peer, action: peer == A and not is_message(action, m.Group)
    t.contribute(*PEERS[:5])
    assert t.outcomes == {}
    t.lose(A, DEPARTS + 1)
    assert set(t.sent(m.Ask)) >= {(B, C), (C, B), (D, B), (E, B)}
    end = t.run(DEPARTS + 1, DEPARTS + 60)
    record = agree(t, B, C, D, E)
    assert (record.coordinator, members(record)) == (B, [B, C, D, E])
    assert end == DEPARTS + 3.0  # one question
    assert averages_of(record) == [average_of(part, (B, C, D, E)) for part in range(PARTS)]


def test_the_coordinator_and_the_next_one_lost_after_the_group() -> None:
    t = seated(*PEERS[:7])
    t.drop = lambda peer, action: peer == A and not is_message(action, m.Group)
    t.contribute(*PEERS[:7])
    t.lose(A, DEPARTS + 1)
    t.lose(B, DEPARTS + 2)
    t.run(DEPARTS + 2, DEPARTS + 60)
    record = agree(t, C, D, E, F, G)
    assert (record.coordinator, members(record)) == (C, [C, D, E, F, G])


def test_the_coordinator_lost_when_it_had_decided_and_nobody_heard() -> None:
    t = seated(*PEERS[:5])
    t.drop = lambda peer, action: peer == A and is_message(action, m.Commit)
    t.contribute(*PEERS[:5])
    assert set(t.outcomes) == {A}
    t.lose(A, DEPARTS + 1)
    t.run(DEPARTS + 1, DEPARTS + 60)
    # it may have decided with their votes, and it has: they do not decide the round a second time
    reason = "the coordinator fell silent and nobody knows a decision"
    assert [aborted(t.outcomes[peer]) for peer in (B, C, D, E)] == [reason] * 4


@pytest.mark.parametrize("knows", [B, E])
def test_the_coordinator_lost_when_it_had_decided_and_somebody_heard(knows: bytes) -> None:
    t = seated(*PEERS[:5])
    t.drop = lambda peer, action: peer == A and is_message(action, m.Commit) and action.to != knows
    t.contribute(*PEERS[:5])
    assert set(t.outcomes) == {A, knows}
    t.lose(A, DEPARTS + 1)
    record = agree(t, *PEERS[:5])  # at once: all ask, one knows
    assert record.coordinator == A
    assert members(record) == PEERS[:5]


def test_a_silent_coordinator_is_replaced_after_its_time() -> None:
    t = seated(*PEERS[:5])
    t.drop = lambda peer, action: peer == A and not is_message(action, m.Group)
    t.contribute(*PEERS[:5])
    t.run(DEPARTS, DEPARTS + 10.0 + 2.0 + 2 * 2.0)  # the exchange's time and a margin, then two questions
    record = agree(t, B, C, D, E)
    assert (record.coordinator, members(record)) == (B, [B, C, D, E])
    assert [t.sent(m.Ask).count(pair) for pair in ((B, A), (B, C), (E, D))] == [2, 2, 2]


def test_a_coordinator_lost_after_a_plan_is_replaced() -> None:
    seats = PEERS[:6]
    t = seated(*seats)
    t.drop = lambda peer, action: (
        (peer == C and is_average(action)) or (peer == A and isinstance(action, PushAverage) and action.attempt > 0)
    )
    t.contribute(*seats)
    t.lose(C, DEPARTS + 1)
    assert len(t.plans()) == 1
    t.lose(A, DEPARTS + 2)
    t.run(DEPARTS + 2, DEPARTS + 60)
    record = agree(t, B, D, E, F)
    assert (record.coordinator, members(record)) == (B, [B, D, E, F])


# ---------------------------------------------------------------------- a coordinator that was away


def _all_but_the_votes() -> Table:
    t = seated(*FOUR)
    t.drop = lambda peer, action: is_message(action, m.Averaged)
    t.contribute(*FOUR)
    assert t.outcomes == {}
    return t


@pytest.mark.parametrize(("late", "commits"), [(1.0, True), (11.0, True), (11.1, False), (3600.0, False)])
def test_a_coordinator_that_wakes_up_too_late_aborts_rather_than_commits(late: float, commits: bool) -> None:
    t = _all_but_the_votes()
    # the votes were in its socket all the while; time was up at 10, others go on from 12
    vote = m.Averaged(0, 8, 0, tuple(average_of(part, FOUR) for part in range(PARTS)))
    a, actions = t.rounds[A], []
    for peer in (B, C, D):
        actions += a.received(peer, vote, DEPARTS + late)
    if commits:
        t.take(A, actions, DEPARTS + late)
        assert members(agree(t, *FOUR)) == list(FOUR)
    else:
        assert aborted(outcome_of(actions)) == "this peer was away when the round was to be decided"
        assert [action.to for action in actions if is_message(action, m.Abort)] == [
            B, C, D
        ]  # fmt: skip


def test_a_coordinator_whose_clock_wakes_first_aborts_too() -> None:
    t = _all_but_the_votes()
    t.drop = lambda peer, action: False
    assert aborted(outcome_of(t.rounds[A].tick(DEPARTS + 3600))) == (
        "this peer was away when the round was to be decided"
    )


# ---------------------------------------------------------------------- plans and groups that are refused


def _member(me: bytes = B) -> Round:
    """A member in the parts exchange of A to D that A coordinates."""
    round = make(me, ALL_FOUR)
    round.contribute(join_of(me, ALL_FOUR), DEPARTS)
    shares = cut_shares(NUMEL, dict.fromkeys(FOUR, 1.0))
    round.received(A, m.Group(0, 8, tuple(map(member, FOUR)), shares, 10.0), DEPARTS)
    assert round.parts is not None
    return round


PLAN = m.Plan(0, 8, 1, (A, B, D), (A, A, B, B, D, D, D, D))


def test_a_plan_from_somebody_who_is_not_the_coordinator_is_ignored() -> None:
    b = _member()
    for stranger in (C, D, E):
        assert b.received(stranger, PLAN, DEPARTS + 1) == []
    assert b.parts is not None
    assert b.parts.attempt == 0
    assert b.received(A, PLAN, DEPARTS + 1) == [Push(D, OF_C)]
    assert (b.parts.attempt, b.parts.counted) == (1, (A, B, D))


@pytest.mark.parametrize(
    "fields",
    [
        {"reducers": (A,) * 7},
        {"reducers": (A,) * 9},
        {"reducers": (A, A, B, B, E, E, D, D)},
        {"counted": tuple(sorted((A, B, E)))},
    ],
)
def test_a_plan_that_does_not_fit_its_group_is_refused_and_changes_nothing(fields: dict[str, Any]) -> None:
    b = _member()
    with pytest.raises(RemoteProtocolError, match="a plan that does not fit its group"):
        b.received(A, dataclasses.replace(PLAN, **fields), DEPARTS + 1)
    assert b.parts is not None
    assert (b.parts.attempt, b.parts.counted, b.parts.reducers) == (0, FOUR, (A, A, B, B, C, C, D, D))
    assert b.received(A, PLAN, DEPARTS + 1) == [Push(D, OF_C)]


def test_a_plan_that_is_not_later_than_the_present_one_is_ignored() -> None:
    b = _member()
    later = dataclasses.replace(PLAN, attempt=2)
    assert b.received(A, later, DEPARTS + 1) != []
    for attempt in (1, 2):
        other = m.Plan(0, 8, attempt, FOUR, (B,) * PARTS)
        assert b.received(A, other, DEPARTS + 2) == []
    assert b.parts is not None
    assert b.parts.reducers == PLAN.reducers


def test_a_plan_gives_the_round_its_time_again() -> None:
    b = _member()
    assert b.deadline() == DEPARTS + 5.0
    b.received(A, PLAN, DEPARTS + 4)
    assert b.deadline() == DEPARTS + 9.0
    b.tick(DEPARTS + 9.0)
    assert b.deadline() == DEPARTS + 16.0


def test_a_member_that_a_plan_leaves_out_sends_nothing_more_and_still_votes() -> None:
    c = _member(C)
    left_out = m.Plan(0, 8, 1, (A, B, D), (A, A, B, B, D, D, D, D))
    assert c.received(A, left_out, DEPARTS + 1) == []
    assert c.parts is not None
    assert c.parts.mine == []
    names = tuple(average_of(part, (A, B, D)) for part in range(PARTS))
    actions = [action for part, name in enumerate(names) for action in c.average_arrived(1, part, name, DEPARTS + 2)]
    assert Send(A, m.Averaged(0, 8, 1, names)) in actions


def test_a_reduction_of_an_attempt_that_is_over_goes_nowhere() -> None:
    b = _member()
    for owner in (A, C, D):
        b.slice_arrived(owner, 2)
    b.received(A, PLAN, DEPARTS + 1)
    assert b.part_reduced(0, 2, average_of(2, FOUR), DEPARTS + 2) == []
    pushes = b.part_reduced(1, 2, average_of(2, (A, B, D)), DEPARTS + 2)
    assert pushes == [PushAverage(to, 1, 2) for to in (C, D, A)]


def test_the_next_attempts_average_may_come_before_its_plan() -> None:
    b = _member()
    b.average_arrived(1, 4, average_of(4, (A, B, D)), DEPARTS + 1)
    b.received(A, PLAN, DEPARTS + 2)
    assert b.parts is not None
    assert b.parts.averages == {(1, 4): average_of(4, (A, B, D))}
    assert b.waiting_for() == "reducing in parts (1 of 8 averages)"


@pytest.mark.parametrize("numel", [NUMEL - 1, NUMEL + 256])
def test_a_group_that_cuts_another_number_of_values_is_refused(numel: int) -> None:
    b = make(B, ALL_FOUR)
    b.contribute(join_of(B, ALL_FOUR), DEPARTS)
    shares = cut_shares(numel, dict.fromkeys(FOUR, 1.0))
    with pytest.raises(RemoteProtocolError, match=f"shares of {numel} values where the fragment has {NUMEL}"):
        b.received(A, m.Group(0, 8, tuple(map(member, FOUR)), shares, 10.0), DEPARTS)
    assert (b.phase, b.parts) == (Phase.OPEN, None)


def test_a_group_whose_parts_are_no_whole_blocks_is_refused() -> None:
    b = make(B, ALL_FOUR)
    b.contribute(join_of(B, ALL_FOUR), DEPARTS)
    first, *others = cut_shares(NUMEL, dict.fromkeys(FOUR, 1.0))
    shares = (m.Share(first.reducer, first.stop + 32), *others)  # one bit of the message was flipped
    with pytest.raises(RemoteProtocolError, match=f"a part ends at value {first.stop + 32}, which is not the end"):
        b.received(A, m.Group(0, 8, tuple(map(member, FOUR)), shares, 10.0), DEPARTS)
    assert (b.phase, b.parts) == (Phase.OPEN, None)


# ---------------------------------------------------------------------- decisions


def _commit(edit: Callable[[CommitRecord], CommitRecord] = lambda record: record) -> m.Commit:
    t = seated(*FOUR)
    t.contribute(*FOUR)
    record = edit(t.record(A))
    return m.Commit(0, 8, SignedRecord(record, sign(record.coordinator)(record.signed_bytes())))


def _recut(*stops: int) -> Callable[[CommitRecord], CommitRecord]:
    def edit(record: CommitRecord) -> CommitRecord:
        return dataclasses.replace(
            record, parts=tuple(dataclasses.replace(record.parts[0], stop=stop) for stop in stops)
        )

    return edit


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_recut(256, NUMEL), "commit cuts the fragment differently than the group"),
        (_recut(NUMEL - 256), "commit averages another number of values than the fragment has"),
        (_recut(), "commit cuts the fragment differently than the group"),
    ],
)
def test_a_commit_that_cuts_the_fragment_otherwise_is_refused(
    edit: Callable[[CommitRecord], CommitRecord], why: str
) -> None:
    b = _member()
    with pytest.raises(RemoteProtocolError, match=why):
        b.received(A, _commit(edit), DEPARTS + 1)
    assert (b.phase, b.outcome) == (Phase.EXCHANGE, None)
    b.received(A, _commit(), DEPARTS + 1)
    assert b.phase is Phase.DECIDED


def test_a_commit_in_parts_of_a_coordinator_that_is_not_ones_own_is_checked_for_its_size() -> None:
    b = _member()

    def by_c(record: CommitRecord) -> CommitRecord:
        return dataclasses.replace(_recut(NUMEL + 1)(record), coordinator=C)

    with pytest.raises(RemoteProtocolError, match="another number of values"):
        b.received(C, _commit(by_c), DEPARTS + 1)


def test_missing_averages_are_fetched_from_one_holder_after_the_other() -> None:
    b = _member()
    for part in range(1, PARTS):
        b.average_arrived(0, part, average_of(part, FOUR), DEPARTS + 1)
    name, size = average_of(0, FOUR), NUMEL // PARTS
    assert b.received(A, _commit(), DEPARTS + 2) == [Fetch(A, name, size)]
    assert b.waiting_for() == "fetching what is missing"
    assert b.fetch_failed(D, DEPARTS + 3) == []  # nothing was asked of it
    assert b.fetch_failed(A, DEPARTS + 3) == [Fetch(C, name, size)]
    assert b.lost(C, DEPARTS + 3) == [Fetch(D, name, size)]
    assert b.fetched(digest("average", [b"other"]), DEPARTS + 4) == []
    assert isinstance(outcome_of(b.fetched(name, DEPARTS + 4)), Committed)


def test_an_average_that_arrives_by_itself_ends_the_fetch() -> None:
    b = _member()
    for part in range(1, PARTS):
        b.average_arrived(0, part, average_of(part, FOUR), DEPARTS + 1)
    b.received(A, _commit(), DEPARTS + 2)
    assert isinstance(outcome_of(b.average_arrived(0, 0, average_of(0, FOUR), DEPARTS + 3)), Committed)


def test_averages_that_nobody_has_any_more_mean_repair() -> None:
    b = _member()
    for part in range(1, PARTS):
        b.average_arrived(0, part, average_of(part, FOUR), DEPARTS + 1)
    b.received(A, _commit(), DEPARTS + 2)
    b.fetch_failed(A, DEPARTS + 3)
    b.fetch_failed(C, DEPARTS + 3)
    outcome = outcome_of(b.fetch_failed(D, DEPARTS + 3))
    assert outcome == Outrun(A, "what was averaged could not be fetched")


def test_a_late_join_gets_the_averages_and_takes_the_same_step() -> None:
    t = seated(*FOUR, E, tip=ALL_FOUR)
    t.drop = lambda peer, action: peer == A and isinstance(action, Reduce)
    t.contribute(*FOUR)
    t.tick(DEPARTS + 3.0, A)
    t.contribute(E, now=DEPARTS + 4)
    assert t.rounds[E].phase is Phase.EXCHANGE
    assert t.rounds[E].parts is None  # it is no member
    (basis,) = {action.basis for peer, action in t.log if peer == A and isinstance(action, Reduce)}
    t.take(A, t.rounds[A].reduced(basis, state_after(basis), DEPARTS + 5), DEPARTS + 5)
    record = agree(t, *FOUR, E)
    assert members(record) == list(FOUR)
    assert payload_of(A) not in t.store[E]


def test_votes_of_strangers_and_of_other_attempts_count_nothing() -> None:
    t = seated(*FOUR)
    t.drop = lambda peer, action: is_message(action, m.Averaged)
    t.contribute(*FOUR)
    names = tuple(average_of(part, FOUR) for part in range(PARTS))
    a = t.rounds[A]
    for peer, vote in (
        (E, m.Averaged(0, 8, 0, names)),
        (B, m.Averaged(0, 8, 1, names)),
        (C, m.Averaged(0, 8, 0, names[:-1])),
        (D, m.Averaged(0, 8, 0, names[::-1])),
    ):
        assert a.received(peer, vote, DEPARTS + 1) == []
    assert a.phase is Phase.EXCHANGE
    for peer in (B, C):
        assert a.received(peer, m.Averaged(0, 8, 0, names), DEPARTS + 1) == []
    t.drop = lambda peer, action: False
    t.take(A, a.received(D, m.Averaged(0, 8, 0, names), DEPARTS + 1), DEPARTS + 1)
    assert members(agree(t, *FOUR)) == list(FOUR)


def test_a_group_at_the_beginning_of_a_run_needs_no_electors() -> None:
    t = table(*FOUR, uplink=1e6)
    t.contribute(*FOUR)
    record = agree(t, *FOUR)
    assert (record.prev, record.electors) == (GENESIS.head, FOUR)
