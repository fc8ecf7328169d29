"""The state machine of a round that exchanges whole contributions; ``test_butterfly`` has the one in parts.

Most tests seat all peers at a ``Table``; those that need a message at an exact moment talk to a single ``Round``.
"""

import dataclasses
from typing import Any

import pytest

from stretto.protocol import messages as m
from stretto.protocol.actions import (
    Basis,
    Committed,
    Fetch,
    Outrun,
    Push,
    Reduce,
    Rules,
    Send,
)
from stretto.protocol.chain import CommitRecord, SignedRecord, after
from stretto.protocol.digest import digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.rounds import Phase, Round, rendezvous_order
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from tests.protocol.table import (
    DEPARTS,
    GENESIS,
    PEERS,
    RULES,
    RUN,
    Table,
    aborted,
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
    verify,
    voted,
)

A, B, C, D, E = PEERS[:5]
BASIS_AB = Basis((member(A), member(B)))


# ---------------------------------------------------------------------- the good case


def test_all_are_in_and_commit_at_once() -> None:
    t = table(A, B, C, D)
    t.contribute(B, C, A, D)
    record = t.record(A)
    assert [t.record(peer) for peer in (B, C, D)] == [record] * 3
    assert record == CommitRecord(
        run=RUN, fragment=0, round=8, version=1, prev=GENESIS.head, members=tuple(map(member, (A, B, C, D))),
        electors=(A, B, C, D), state=state_after(Basis(tuple(map(member, (A, B, C, D))))), tokens_total=400,
        clock=Clock(9, 110.0, 10.0), coordinator=A,
    )  # fmt: skip
    assert all(t.held(peer) == {A, B, C, D} for peer in (A, B, C, D))
    assert all(round.deadline() is None and round.over for round in t.rounds.values())
    assert t.sent(m.Ask) == t.sent(m.Redirect) == t.sent(m.Abort) == []


def test_a_commit_is_signed_by_its_coordinator() -> None:
    t = table(A, B)
    t.contribute(A, B)
    outcome = t.outcomes[B]
    assert isinstance(outcome, Committed)
    assert verify(A, outcome.signed.record.signed_bytes(), outcome.signed.signature)


def test_a_peer_alone_commits_when_the_run_allows_it() -> None:
    t = table(A)
    t.contribute(A)
    assert members(t.record(A)) == [A]
    t = table(A, rules=dataclasses.replace(RULES, min_group=2))
    t.contribute(A)
    assert aborted(t.outcomes[A]) == "waiting for 1 more peer(s): 1 of 2 are here"


def test_members_that_come_before_the_coordinator_are_served_when_it_comes() -> None:
    t = table(A, B, C)
    t.contribute(B, C)
    assert t.outcomes == {}
    t.contribute(A)
    assert members(t.record(C)) == [A, B, C]


def test_the_clock_in_the_record_follows_the_members_rates() -> None:
    rounds = {peer: make(peer, seats=(A, B)) for peer in (A, B)}
    t = Table(rounds)
    t.take(B, rounds[B].contribute(join_of(B, rate=2.0), DEPARTS), DEPARTS)
    t.take(A, rounds[A].contribute(join_of(A, rate=4.0), DEPARTS), DEPARTS)
    assert t.record(B).clock == Clock(9, 110.0, 25 / 3.0)


# ---------------------------------------------------------------------- somebody is missing


def test_when_the_window_ends_the_round_goes_on_without_the_missing() -> None:
    t = table(A, B, C, D)
    t.contribute(A, B, C)
    assert t.rounds[A].deadline() == DEPARTS + 3.0
    assert t.rounds[A].waiting_for() == "gathering peers (3 of 4)"
    t.tick(DEPARTS + 2.9)
    assert t.outcomes == {}
    t.tick(DEPARTS + 3.0)
    assert [members(t.record(peer)) for peer in (A, B, C)] == [[A, B, C]] * 3


def test_too_few_contributions_abort_and_say_how_many_are_missing() -> None:
    t = table(A, B, C, D, rules=dataclasses.replace(RULES, min_group=3))
    t.contribute(A, B)
    t.tick(DEPARTS + 3.0, A)
    assert aborted(t.outcomes[A]) == aborted(t.outcomes[B]) == "waiting for 1 more peer(s): 2 of 3 are here"


@pytest.mark.parametrize(
    ("electors", "there", "commits"),
    [
        ((A, B, C, D), (A, B), True),
        ((A, B, C, D), (C, D), False),
        ((A, B, C, D), (B, C, D), True),
        ((A, B, C), (A, D, E), False),
        ((B,), (A, C), False),
    ],
)
def test_without_a_quorum_of_the_electors_nothing_is_committed(
    electors: tuple[bytes, ...], there: tuple[bytes, ...], commits: bool
) -> None:
    t = table(*there, tip=voted(*electors))
    t.contribute(*there)
    if commits:
        assert {t.record(peer).version for peer in there} == {2}
    else:
        assert t.outcomes == {}  # others may still wait for a candidate that does not answer
        t.run(DEPARTS, DEPARTS + 10.0)  # two windows and one and a half margins
        here = len(set(there) & set(electors))
        reason = f"no quorum: {here} of {len(electors)} electors are here"
        assert [aborted(t.outcomes[peer]) for peer in there] == [reason] * len(there)


def test_electors_that_are_alive_stay_electors_although_they_were_not_counted() -> None:
    # D answers nobody this time but is in the roster; E has left it
    t = table(A, B, C, D, tip=voted(A, B, C, D, E))
    t.contribute(A, B, C)
    t.tick(DEPARTS + 3.0, A)
    assert members(t.record(A)) == [A, B, C]
    assert t.record(A).electors == (A, B, C, D)


def test_a_group_has_the_size_that_the_run_allows_and_the_rest_hear_the_outcome() -> None:
    rules = dataclasses.replace(RULES, max_group=2)
    t = table(A, B, C, D, rules=rules)
    t.contribute(C, B, D)  # all are here before the coordinator's own contribution
    t.contribute(A)
    assert members(t.record(A)) == [A, C]
    # B and D were not counted, but hold the same record and what it counts
    assert t.record(B) == t.record(C) == t.record(D) == t.record(A)
    assert {A, C} <= t.held(B) & t.held(D)


def test_a_full_group_keeps_a_quorum_of_electors() -> None:
    t = table(A, B, C, D, E, tip=voted(A, D, E), rules=dataclasses.replace(RULES, max_group=2))
    t.contribute(B, C, E, D)
    t.contribute(A)
    assert members(t.record(A)) == [A, E]


def test_more_joins_than_a_record_can_name_do_no_harm() -> None:
    rules = dataclasses.replace(RULES, max_group=256)
    crowd = sorted(peer_id(index) for index in range(300))
    coordinator = make(crowd[0], seats=crowd, rules=rules)
    for peer in crowd[1:]:
        coordinator.received(peer, join_of(peer), DEPARTS)
    actions = coordinator.contribute(join_of(crowd[0]), DEPARTS)
    assert coordinator.group is not None
    assert len(coordinator.group.members) == 256
    assert len([a for a in actions if isinstance(a, Send) and isinstance(a.message, m.Group)]) == 299


# ---------------------------------------------------------------------- finding the coordinator


def test_coordinators_are_ordered_by_a_hash_of_round_and_peer() -> None:
    orders = [rendezvous_order(RUN, 0, round, PEERS[:5]) for round in range(40)]
    assert all(sorted(order) == PEERS[:5] for order in orders)
    assert {order[0] for order in orders} == set(PEERS[:5])  # everyone gets a turn
    assert rendezvous_order(RUN, 0, 3, PEERS[4::-1]) == orders[3]
    # who is absent changes nothing for the others
    assert rendezvous_order(RUN, 0, 3, orders[3][1:]) == orders[3][1:]


def test_a_member_is_sent_on_to_the_coordinator_of_its_group() -> None:
    # C and D do not know A; C is already in A's group when D asks it
    t = Table({A: make(A, seats=(A, B, C, D)), B: make(B, seats=(A, B, C, D))})
    t.rounds |= {C: make(C, seats=(A, B, C)), D: make(D, seats=(C, A, D), expected=frozenset())}
    t.store |= {C: {payload_of(C)}, D: {payload_of(D)}}
    t.contribute(A, B, C)
    t.tick(DEPARTS + 3.0, A)
    # C is done by now; a fresh C that still exchanges redirects
    c = make(C, seats=(A, B, C))
    c.contribute(join_of(C), DEPARTS)
    c.received(A, m.Group(0, 8, tuple(map(member, (A, B, C))), (), 10.0), DEPARTS)
    assert c.received(D, join_of(D), DEPARTS) == [Send(D, m.Redirect(0, 8, A))]
    d = t.rounds[D]
    assert d.contribute(join_of(D), DEPARTS) == [Send(C, join_of(D))]
    assert d.received(C, m.Redirect(0, 8, A), DEPARTS) == [Send(A, join_of(D, tried=(C,)))]
    assert d.coordinator == A


def test_a_member_that_cannot_reach_the_coordinator_waits_for_the_outcome() -> None:
    tip = voted(A, C, D)
    d = make(D, tip, (C, D))
    join = join_of(D, tip)
    d.contribute(join, DEPARTS)
    assert d.received(C, m.Redirect(0, 8, A), DEPARTS) == []
    assert (d.phase, d.deadline()) == (Phase.EXCHANGE, DEPARTS + 10.0)
    # it asks, and never begins anything of its own: the others may well be going on without it
    assert d.tick(DEPARTS + 10.0) == [Send(C, m.Ask(0, 8))]
    assert d.tick(DEPARTS + 12.0) == [Send(C, m.Ask(0, 8))]
    assert aborted(outcome_of(d.tick(DEPARTS + 14.0))) == "the coordinator fell silent and nobody knows a decision"


def test_a_member_that_cannot_reach_the_coordinator_hears_the_outcome_when_it_asks() -> None:
    t = table(A, B, C)
    t.contribute(A, B, C)
    outcome = t.outcomes[C]
    assert isinstance(outcome, Committed)
    d = make(D, seats=(C, D))
    d.contribute(join_of(D), DEPARTS)
    d.received(C, m.Redirect(0, 8, A), DEPARTS)
    (answer,) = t.rounds[C].received(D, m.Ask(0, 8), DEPARTS + 10.0)
    assert answer == Send(D, m.Commit(0, 8, outcome.signed))
    d.received(C, m.Commit(0, 8, outcome.signed), DEPARTS + 10.0)
    assert d.phase is Phase.DECIDED


def test_a_coordinator_that_refuses_connections_is_skipped_at_once() -> None:
    t = table(A, B, C)
    t.cut = {A}
    t.contribute(B, C)
    t.tick(DEPARTS + 3.0, B)
    assert members(t.record(B)) == [B, C]
    assert t.record(C).coordinator == B
    assert (C, A) in t.sent(m.Join)
    assert (C, B) in t.sent(m.Join)


def test_a_coordinator_that_says_nothing_is_skipped_after_window_and_margin() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: isinstance(action, Send) and action.to == A
    t.contribute(B, C)
    assert t.rounds[C].deadline() == DEPARTS + 5.0
    t.tick(DEPARTS + 4.9)
    assert t.outcomes == {}
    t.tick(DEPARTS + 5.0)  # both turn to B, which waits for A once more
    t.tick(DEPARTS + 8.0)
    assert members(t.record(C)) == members(t.record(B)) == [B, C]


def test_when_nobody_else_answers_a_peer_that_cannot_serve_gives_up() -> None:
    c = make(C, seats=(A, B))  # not a candidate itself
    c.contribute(join_of(C), DEPARTS)
    assert c.lost(A, DEPARTS) == [Send(B, join_of(C, tried=(A,)))]
    assert aborted(outcome_of(c.lost(B, DEPARTS))) == "no coordinator answered"


def test_a_peer_that_is_asked_as_second_serves_only_if_the_first_was_tried() -> None:
    b = make(B, seats=(A, B, C))
    assert b.received(C, join_of(C), DEPARTS) == []
    assert b.deadline() is None  # not its turn: A may be alive
    b.received(C, join_of(C, tried=(A,)), DEPARTS)
    assert b.deadline() == DEPARTS + 3.0  # it has a desk now


def test_a_coordinator_that_never_contributes_hands_its_guests_over() -> None:
    a = make(A, seats=(A, B))
    a.received(B, join_of(B), DEPARTS)
    assert a.tick(DEPARTS + 3.0) == []  # one more window for its own contribution
    actions = a.tick(DEPARTS + 6.0)
    reason = "the coordinator had no contribution of its own"
    assert actions[0] == Send(B, m.Redirect(0, 8, B))
    assert aborted(outcome_of(actions)) == reason
    b = make(B, seats=(A, B))
    b.contribute(join_of(B), DEPARTS)
    b.received(A, m.Redirect(0, 8, B), DEPARTS + 6.0)
    assert b.coordinator == B


# ---------------------------------------------------------------------- chains that differ


def test_a_member_behind_learns_it_and_must_repair() -> None:
    tip = voted(A, B, C)
    t = Table({A: make(A, tip, (A, B, C)), B: make(B, GENESIS, (A, B, C)), C: make(C, tip, (A, B, C))})
    t.contribute(A, B, C)
    t.tick(DEPARTS + 3.0, A)
    assert t.outcomes[B] == Outrun(A, "version 0 here, 1 there")
    assert members(t.record(A)) == [A, C]
    assert t.sent(m.Behind) == [(A, B)]


def test_a_coordinator_behind_is_left_alone_and_learns_who_is_ahead() -> None:
    tip = voted(A, B, C)
    rules = dataclasses.replace(RULES, min_group=2)
    t = Table({A: make(A, GENESIS, (A, B, C), rules)} | {p: make(p, tip, (A, B, C), rules) for p in (B, C)})
    t.contribute(A, B, C)
    t.tick(DEPARTS + 3.0)
    assert t.outcomes[A] == Outrun(C, "others are ahead")
    assert members(t.record(B)) == members(t.record(C)) == [B, C]


def test_a_decision_on_another_chain_means_repair() -> None:
    t = table(A, B, tip=voted(A, B))
    t.contribute(A, B)
    signed = t.outcomes[A]
    assert isinstance(signed, Committed)
    stray = make(C, GENESIS, (A, B, C))
    stray.contribute(join_of(C), DEPARTS)
    outcome = outcome_of(stray.received(A, m.Commit(0, 8, signed.signed), DEPARTS))
    assert outcome == Outrun(A, "round 8 was committed on another chain")


# ---------------------------------------------------------------------- the coordinator dies


def test_coordinator_dead_before_the_decision_is_replaced_by_the_next_one() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: peer == A and isinstance(action, (Reduce, Push))  # A dies in the exchange
    t.contribute(A, B, C)
    assert t.outcomes == {}
    t.lose(A, DEPARTS + 1)
    assert {(B, C), (C, B)} <= set(t.sent(m.Ask))
    t.tick(DEPARTS + 2.9)
    assert (C, B) not in t.sent(m.Join)  # first it asks
    t.tick(DEPARTS + 3.0)
    assert t.record(B) == t.record(C)
    assert (t.record(C).coordinator, members(t.record(C))) == (B, [B, C])


def test_of_three_electors_two_go_on_without_the_coordinator_and_one_does_not() -> None:
    for lost, commits in (((A,), True), ((A, B), False)):
        t = table(A, B, C, tip=voted(A, B, C))
        t.drop = lambda peer, action: peer == A and isinstance(action, (Reduce, Push))
        t.contribute(A, B, C)
        for peer in lost:
            t.lose(peer, DEPARTS + 1)
        t.run(DEPARTS + 1, DEPARTS + 60)
        if commits:
            assert members(t.record(B)) == members(t.record(C)) == [B, C]
        else:
            assert aborted(t.outcomes[C]) == "no quorum: 1 of 3 electors are here"


def test_who_has_voted_waits_for_a_silent_coordinator_and_joins_no_other() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: peer == A and isinstance(action, Reduce)
    t.contribute(A, B, C)
    assert t.rounds[B].deadline() == DEPARTS + 10.0 + 2.0  # what the group was told, and a margin
    assert t.rounds[B].waiting_for() == "exchanging contributions (3 of 3)"
    for now in (112.0, 114.0):
        t.tick(now, B, C)
        assert t.outcomes == {}
    # asked twice, two more seconds each
    assert [t.sent(m.Ask).count(pair) for pair in ((B, A), (B, C), (C, A), (C, B))] == [2] * 4
    t.tick(116.0, B, C)
    # A may have decided with their votes, so they do not begin again without it
    reason = "the coordinator fell silent and nobody knows a decision"
    assert [aborted(t.outcomes[peer]) for peer in (B, C)] == [reason] * 2


def test_whoever_takes_over_serves_those_that_gave_up_the_coordinator_before() -> None:
    t = table(A, B, C, D)
    t.drop = lambda peer, action: peer == A and isinstance(action, (Reduce, Push))
    t.contribute(A, B, C, D)
    t.cut = {A}
    # C and D lose A and turn to B, which still waits for it
    for peer in (C, D):
        t.take(peer, t.rounds[peer].lost(A, DEPARTS + 1), DEPARTS + 1)
    t.tick(DEPARTS + 3.0, C, D)
    assert {(C, B), (D, B)} <= set(t.sent(m.Join))
    assert t.sent(m.Redirect) == []
    assert t.outcomes == {}
    t.take(B, t.rounds[B].lost(A, DEPARTS + 4), DEPARTS + 4)
    t.tick(DEPARTS + 6.0, B)
    assert [members(t.record(peer)) for peer in (B, C, D)] == [[B, C, D]] * 3


def test_a_coordinator_that_was_away_aborts_rather_than_decides() -> None:
    # all answers are there when it wakes up, but the others have gone to the next one
    t = table(A, B, C)
    t.drop = lambda peer, action: is_message(action, m.Have)
    t.contribute(A, B, C)
    a = t.rounds[A]
    have = m.Have(0, 8, 0, (A, B, C))
    assert a.received(B, have, DEPARTS + 11.0) == []
    actions = a.received(C, have, DEPARTS + 11.1)
    assert aborted(outcome_of(actions)) == "this peer was away when the round was to be decided"
    assert [action.to for action in actions if is_message(action, m.Abort)] == [B, C]


def test_coordinator_dead_in_the_decision_and_one_member_knows_it() -> None:
    t = table(A, B, C, D)
    commit_to = (B,)
    t.drop = lambda peer, action: is_message(action, m.Commit) and peer == A and action.to not in commit_to
    t.contribute(A, B, C, D)
    assert set(t.outcomes) == {A, B}
    t.cut = {A}
    for peer in (C, D):
        t.take(peer, t.rounds[peer].lost(A, DEPARTS + 1), DEPARTS + 1)
    assert t.record(C) == t.record(D) == t.record(B) == t.record(A)


def test_coordinator_dead_after_the_decision_nobody_notices() -> None:
    t = table(A, B, C)
    t.contribute(A, B, C)
    t.cut = {A}
    assert [t.rounds[peer].lost(A, DEPARTS + 1) for peer in (B, C)] == [[], []]
    assert t.record(B) == t.record(C)


# ---------------------------------------------------------------------- a member dies or misses something


def test_a_member_lost_before_the_group_is_not_waited_for() -> None:
    t = table(A, B, C)
    t.contribute(A, B)
    t.take(A, t.rounds[A].lost(C, DEPARTS), DEPARTS)
    assert members(t.record(B)) == [A, B]


def test_a_member_lost_in_the_exchange_is_not_counted_unless_all_hold_its_contribution() -> None:
    for arrived, counted in ((False, [A, B]), (True, [A, B, C])):
        t = table(A, B, C)
        t.drop = lambda peer, action, arrived=arrived: (
            peer == C
            and not (  # type: ignore[misc]
                isinstance(action, Send) and isinstance(action.message, m.Join)
            )
            and not (arrived and isinstance(action, Push))
        )
        t.contribute(A, B, C)
        assert t.outcomes == {}
        t.cut = {C}
        t.take(A, t.rounds[A].lost(C, DEPARTS + 1), DEPARTS + 1)
        if not arrived:
            t.tick(DEPARTS + 5.0, A, B)  # half time: report what is here
            t.tick(DEPARTS + 10.0, A)
        assert members(t.record(A)) == members(t.record(B)) == counted


def test_at_half_time_members_report_what_they_hold_and_the_majority_counts() -> None:
    t = table(A, B, C, D)
    # D's contribution reaches A only, C's reaches A and B
    lost = {(D, B), (D, C), (C, D)}
    t.drop = lambda peer, action: isinstance(action, Push) and (peer, action.to) in lost
    t.contribute(A, B, C, D)
    assert t.outcomes == {}
    t.tick(DEPARTS + 5.0)
    assert (C, A) in t.sent(m.Have)
    t.tick(DEPARTS + 10.0, A)
    assert [members(t.record(peer)) for peer in (A, B, C, D)] == [[A, B, C]] * 4
    assert C in t.held(D)  # fetched after the decision


def test_a_coordinator_that_wakes_late_still_decides() -> None:
    t = table(A, B)
    t.drop = lambda peer, action: isinstance(action, Push) and peer == B
    t.contribute(A, B)
    t.tick(DEPARTS + 5.0, B)
    t.tick(DEPARTS + 10.0, A)  # A slept through half time
    assert members(t.record(A)) == members(t.record(B)) == [A]


def test_a_coordinator_that_loses_most_electors_does_not_decide_alone() -> None:
    # all contributions are here, but if A died now too, nobody could say what was decided
    t = table(A, B, C, tip=voted(A, B, C))
    t.drop = lambda peer, action: isinstance(action, Send) and isinstance(action.message, m.Have)
    t.contribute(A, B, C)
    t.cut = {B, C}
    t.take(A, t.rounds[A].lost(B, DEPARTS + 1), DEPARTS + 1)
    assert A not in t.outcomes
    t.take(A, t.rounds[A].lost(C, DEPARTS + 1), DEPARTS + 1)
    assert aborted(t.outcomes[A]) == "no quorum: 3 contributions held by 1 peers"


def test_a_contribution_that_only_its_owner_holds_is_not_counted_not_even_the_coordinators() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: isinstance(action, Push) and action.to != A
    t.contribute(A, B, C)
    t.tick(DEPARTS + 5.0)
    t.tick(DEPARTS + 10.0, A)
    # B's and C's are held by themselves and A, two of three
    assert [members(t.record(peer)) for peer in (A, B, C)] == [[B, C]] * 3


def test_a_member_that_misses_the_commit_asks_and_fetches() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: (
        (peer == A and is_message(action, m.Commit) and action.to == C)
        or (isinstance(action, Push) and action.to == C and peer == B)
    )
    t.contribute(A, B, C)
    t.tick(DEPARTS + 5.0)  # half time: C reports that it lacks B's contribution
    t.tick(DEPARTS + 10.0, A)
    assert members(t.record(A)) == members(t.record(B)) == [A, B, C]
    assert C not in t.outcomes
    t.drop = lambda peer, action: False
    t.tick(DEPARTS + 12.0, C)
    assert t.record(C) == t.record(A)
    assert (C, Fetch(B, payload_of(B))) in t.log
    assert t.held(C) == {A, B, C}


def _decided_without(owner: bytes) -> tuple[Round, SignedRecord]:
    """C's round after a commit that counts A, B and C, while one contribution has not reached C."""
    t = table(A, B, C)
    t.contribute(A, B, C)
    outcome = t.outcomes[A]
    assert isinstance(outcome, Committed)
    c = make(C, seats=(A, B, C))
    c.contribute(join_of(C), DEPARTS)
    for peer in {A, B} - {owner}:
        c.arrived(peer, payload_of(peer), DEPARTS)
    return c, outcome.signed


def test_a_missing_contribution_is_fetched_from_one_holder_after_the_other() -> None:
    c, signed = _decided_without(B)
    assert c.received(A, m.Commit(0, 8, signed), DEPARTS) == [Fetch(B, payload_of(B))]
    assert c.waiting_for() == "fetching what is missing"
    assert c.fetch_failed(B, DEPARTS + 1) == [Fetch(A, payload_of(B))]
    assert c.arrived(B, digest("payload", [b"something else"]), DEPARTS + 2) == []
    assert outcome_of(c.arrived(B, payload_of(B), DEPARTS + 2)) == Committed(signed)


def test_a_fetch_that_hangs_is_tried_elsewhere_and_given_up_in_the_end() -> None:
    c, signed = _decided_without(B)
    c.received(A, m.Commit(0, 8, signed), DEPARTS)
    assert c.deadline() == DEPARTS + 10.0
    assert c.tick(DEPARTS + 10.0) == [Fetch(A, payload_of(B))]
    outcome = outcome_of(c.tick(DEPARTS + 20.0))
    assert outcome == Outrun(A, "what was averaged could not be fetched")


def test_losing_another_peer_does_not_end_a_fetch_that_is_under_way() -> None:
    c, signed = _decided_without(B)
    assert c.received(A, m.Commit(0, 8, signed), DEPARTS) == [Fetch(B, payload_of(B))]
    for stranger in (D, A, E, A):  # A is the next holder, but nothing was asked of it yet
        assert c.lost(stranger, DEPARTS + 1) == []
        assert c.fetch_failed(stranger, DEPARTS + 1) == []
    assert c.phase is Phase.DECIDED
    assert outcome_of(c.arrived(B, payload_of(B), DEPARTS + 2)) == Committed(signed)


def test_losing_the_peer_that_was_asked_moves_on_to_the_next_holder() -> None:
    c, signed = _decided_without(B)
    c.received(A, m.Commit(0, 8, signed), DEPARTS)
    assert c.lost(B, DEPARTS + 1) == [Fetch(A, payload_of(B))]
    assert c.lost(B, DEPARTS + 2) == []  # nothing is awaited from it any more
    outcome = outcome_of(c.lost(A, DEPARTS + 3))
    assert outcome == Outrun(A, "what was averaged could not be fetched")


def test_of_two_fetches_only_the_one_from_the_lost_peer_is_tried_elsewhere() -> None:
    _, signed = _decided_without(B)
    c = make(C, seats=(A, B, C))
    c.contribute(join_of(C), DEPARTS)
    assert c.received(A, m.Commit(0, 8, signed), DEPARTS) == [Fetch(A, payload_of(A)), Fetch(B, payload_of(B))]
    assert c.lost(B, DEPARTS + 1) == [Fetch(A, payload_of(B))]
    assert c.arrived(A, payload_of(A), DEPARTS + 2) == []
    assert outcome_of(c.arrived(B, payload_of(B), DEPARTS + 2)) == Committed(signed)


# ---------------------------------------------------------------------- decisions that are refused


def _forged(**fields: Any) -> m.Commit:
    """A commit for A, B and C, changed and signed by its coordinator."""
    t = table(A, B, C)
    t.contribute(A, B, C)
    record = dataclasses.replace(t.record(A), **fields)
    return m.Commit(0, 8, SignedRecord(record, sign(record.coordinator)(record.signed_bytes())))


def _exchanging(me: bytes = C) -> Round:
    """A member in a group of A, B and C that A coordinates."""
    c = make(me, seats=(A, B, C))
    c.contribute(join_of(me), DEPARTS)
    c.received(A, m.Group(0, 8, tuple(map(member, (A, B, C))), (), 10.0), DEPARTS)
    return c


ANOTHER_COUNT = dataclasses.replace(member(C), tokens=99)
ALTERED = dataclasses.replace(member(C), payload=digest("payload", [b"not what C sent"]))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"run": digest("run", [b"other"])}, "commit of another run"),
        ({"members": (member(A), member(B), ALTERED)}, "was not offered to the group"),
        (
            {"members": (member(A), member(B), ANOTHER_COUNT), "tokens_total": 299},
            "not offered",
        ),
        (
            {"members": (member(A), member(B), member(D)), "electors": (A, B, D)},
            "commit counts a contribution that was not offered to the group",
        ),
        (
            {"members": (member(A), member(B), ALTERED), "coordinator": B},
            "commit counts a contribution that this peer did not make",
        ),
        ({"version": 2}, "record of version 2 does not extend version 0"),
        ({"tokens_total": 1}, "miscounts the tokens"),
        ({"electors": tuple(PEERS)}, "neither counted nor electors before"),
        ({"clock": Clock(9, 110.0, 1000.0)}, "sets the clock"),
    ],
)
def test_an_unlawful_commit_is_refused_and_changes_nothing(fields: dict[str, Any], why: str) -> None:
    c = _exchanging()
    with pytest.raises(RemoteProtocolError, match=why):
        c.received(A, _forged(**fields), DEPARTS)
    assert (c.phase, c.outcome) == (Phase.EXCHANGE, None)
    # the lawful one still counts
    c.received(A, _forged(), DEPARTS)
    assert c.phase is Phase.DECIDED


def test_a_commit_with_a_wrong_signature_is_refused() -> None:
    c = _exchanging()
    commit = _forged()
    for signature in (bytes(64), sign(B)(commit.signed.record.signed_bytes())):
        with pytest.raises(RemoteProtocolError, match="commit with a wrong signature"):
            c.received(A, m.Commit(0, 8, SignedRecord(commit.signed.record, signature)), DEPARTS)
    assert c.outcome is None


def test_a_commit_without_quorum_is_refused() -> None:
    tip = voted(A, B, C, D)
    c = make(C, tip, (A, B, C))
    c.contribute(join_of(C, tip), DEPARTS)
    record = dataclasses.replace(
        _forged().signed.record, prev=tip.head, version=2, members=(member(B), member(C)), electors=(B, C),
        tokens_total=600,
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="too few electors: no quorum"):
        c.received(A, m.Commit(0, 8, SignedRecord(record, sign(A)(record.signed_bytes()))), DEPARTS)


def test_an_own_contribution_that_was_never_made_is_not_accepted() -> None:
    c = make(C, seats=(A, B, C))  # C has not contributed
    with pytest.raises(RemoteProtocolError, match="a contribution that this peer did not make"):
        c.received(A, _forged(), DEPARTS)


def test_only_the_coordinator_may_close_or_abort() -> None:
    c = make(C, seats=(A, B, C))
    c.contribute(join_of(C), DEPARTS)
    group = m.Group(0, 8, tuple(map(member, (A, B, C))), (), 10.0)
    for message in (group, m.Abort(0, 8, "no"), m.Redirect(0, 8, B), m.Behind(0, 8, voted(A, B))):
        assert c.received(B, message, DEPARTS) == []
    assert (c.phase, c.coordinator) == (Phase.OPEN, A)
    assert c.received(A, group, DEPARTS)[0] == Push(A)


def test_nobody_may_join_in_another_peers_name() -> None:
    with pytest.raises(RemoteProtocolError, match="joined in another peer's name"):
        make(A).received(B, join_of(C), DEPARTS)


def test_a_group_larger_than_the_run_allows_is_refused() -> None:
    c = make(C, seats=(A, B, C), rules=dataclasses.replace(RULES, max_group=2))
    c.contribute(join_of(C), DEPARTS)
    with pytest.raises(RemoteProtocolError, match="group of 3, the run allows 2"):
        c.received(A, m.Group(0, 8, tuple(map(member, (A, B, C))), (), 10.0), DEPARTS)


def test_a_have_from_outside_the_group_or_about_strangers_counts_nothing() -> None:
    a = make(A, seats=(A, B))
    a.received(B, join_of(B), DEPARTS)
    a.contribute(join_of(A), DEPARTS)
    assert a.received(E, m.Have(0, 8, 0, (A, B)), DEPARTS) == []
    assert a.received(B, m.Have(0, 8, 0, (A, B, E)), DEPARTS) == []
    assert a.arrived(B, payload_of(B), DEPARTS) == [Reduce(Basis((member(A), member(B))))]


def test_a_second_contribution_is_a_bug_here() -> None:
    a = make(A, seats=(A, B))
    a.contribute(join_of(A), DEPARTS)
    with pytest.raises(LocalProtocolError, match="second contribution to round 8"):
        a.contribute(join_of(A), DEPARTS)


# ---------------------------------------------------------------------- late


def test_a_late_join_gets_the_group_and_then_the_outcome() -> None:
    t = table(A, B, C)
    t.drop = lambda peer, action: isinstance(action, Reduce)
    t.contribute(A, B)
    t.tick(DEPARTS + 3.0, A)
    assert t.rounds[A].group is not None
    t.contribute(C, now=DEPARTS + 4)
    assert t.rounds[C].phase is Phase.EXCHANGE
    assert (A, Push(C)) not in t.log  # it is no member
    t.take(A, t.rounds[A].reduced(BASIS_AB, state_after(BASIS_AB), DEPARTS + 5), DEPARTS + 5)
    assert members(t.record(C)) == [A, B]
    assert t.held(C) == {A, B, C}  # fetched what it needs to take the same step


def test_a_join_after_the_decision_gets_the_outcome() -> None:
    t = table(A, B, C)
    t.contribute(A, B)
    t.tick(DEPARTS + 3.0, A)
    t.contribute(C, now=DEPARTS + 30)
    assert t.record(C) == t.record(A)


def test_a_join_after_an_abort_gets_the_reason() -> None:
    t = table(A, B, C, rules=dataclasses.replace(RULES, min_group=3))
    t.contribute(A, B)
    t.tick(DEPARTS + 3.0, A)
    t.contribute(C, now=DEPARTS + 30)
    assert aborted(t.outcomes[C]) == aborted(t.outcomes[A])


def test_whoever_joined_a_second_coordinator_gets_the_first_ones_outcome() -> None:
    # C could not reach A and turned to B, which is in A's group all the while
    t = table(A, B, C)
    t.drop = lambda peer, action: (
        isinstance(action, Reduce) or (peer == C and isinstance(action, Send) and action.to == A)
    )
    t.contribute(A, B)
    t.take(C, t.rounds[C].contribute(join_of(C), DEPARTS), DEPARTS)
    t.take(C, t.rounds[C].lost(A, DEPARTS), DEPARTS)
    t.tick(DEPARTS + 3.0, A)
    assert t.rounds[B].phase is Phase.EXCHANGE
    t.take(A, t.rounds[A].reduced(BASIS_AB, state_after(BASIS_AB), DEPARTS + 5), DEPARTS + 5)
    assert t.record(C) == t.record(B) == t.record(A)
    assert members(t.record(C)) == [A, B]


def test_after_the_end_nothing_happens_any_more() -> None:
    t = table(A, B)
    t.contribute(A, B)
    before = dict(t.outcomes)
    for peer in (A, B):
        round = t.rounds[peer]
        other = B if peer == A else A
        assert round.tick(1e6) == []
        assert round.lost(other, 1e6) == []
        assert round.fetch_failed(other, 1e6) == []
        assert round.arrived(other, payload_of(other), 1e6) == []
        assert round.reduced(BASIS_AB, state_after(BASIS_AB), 1e6) == []
        assert round.received(other, m.Abort(0, 8, "no"), 1e6) == []
        assert round.received(other, _forged(), 1e6) == []
        assert round.outcome == before[peer]


def test_two_rounds_in_a_row_make_a_chain() -> None:
    t = table(A, B, C)
    t.contribute(A, B, C)
    tip = after(t.record(A))
    t = table(A, B, C, tip=tip)
    t.contribute(A, B, C)
    record = t.record(C)
    assert (record.prev, record.version, record.tokens_total) == (tip.head, 2, 600)


def test_no_wait_outlasts_a_short_cycle_but_messages_get_their_time() -> None:
    rules = Rules(inner_steps=20, fragments=2, min_group=1, max_group=4, window=3.0)
    assert rules.within(600.0) == rules
    short = rules.within(10.0)
    assert (short.window, short.margin, short.min_exchange, short.ask_wait) == (2.5, 2.5, 5.0, 1.25)
    shortest = rules.within(0.5)
    assert (shortest.window, shortest.margin, shortest.min_exchange, shortest.ask_wait) == (2.0, 1.0, 4.0, 0.5)
    assert dataclasses.replace(rules, window=0.1).within(0.5).window == 0.1
