"""How a fragment is cut into parts, and one member's book of an exchange in parts."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.protocol import messages as m
from stretto.protocol.chain import MAX_MEMBERS, MAX_PARTS, Part
from stretto.protocol.digest import digest
from stretto.protocol.reduce import (
    ALL_GATHER,
    MIN_PART,
    PARTS_PER_SHARE,
    UPLINK_BOUND,
    Parts,
    cut_shares,
    group_digest,
    mean_bytes,
)
from stretto.protocol.simulation import peer_id
from tests.protocol.table import PEERS, member

A, B, C, D, E = PEERS[:5]
BLOCK = 256
MANY = sorted(peer_id(index) for index in range(MAX_MEMBERS))


def sizes(shares: tuple[m.Share, ...]) -> dict[bytes, int]:
    """Values that each reducer has in all."""
    found: dict[bytes, int] = {}
    for start, share in zip([0, *(share.stop for share in shares)], shares, strict=False):
        found[share.reducer] = found.get(share.reducer, 0) + share.stop - start
    return found


# ---------------------------------------------------------------------- cutting


def test_equal_uplinks_make_equal_shares_of_a_few_parts_in_peer_id_order() -> None:
    shares = cut_shares(4 * MIN_PART, dict.fromkeys((C, A, D, B), 1e6))
    assert shares == tuple(m.Share(peer, (i + 1) * MIN_PART) for i, peer in enumerate((A, B, C, D)))
    twice = cut_shares(8 * MIN_PART, dict.fromkeys((A, B, C, D), 1e6))
    assert [share.stop for share in twice] == [(i + 1) * MIN_PART for i in range(8)]
    assert [share.reducer for share in twice] == [A, A, B, B, C, C, D, D]
    # a share has no more parts than that, however large it is, and none that is smaller than the least
    huge = cut_shares(400 * MIN_PART, dict.fromkeys((A, B, C, D), 1e6))
    assert [share.reducer for share in huge] == [peer for peer in (A, B, C, D) for _ in range(PARTS_PER_SHARE)]
    assert len(cut_shares(8 * MIN_PART - BLOCK, dict.fromkeys((A, B, C, D), 1e6))) < 8


def test_shares_are_in_proportion_to_uplinks() -> None:
    found = sizes(cut_shares(1000 * BLOCK, {A: 1e6, B: 2e6, C: 3e6, D: 4e6}))
    assert found == {A: 100 * BLOCK, B: 200 * BLOCK, C: 300 * BLOCK, D: 400 * BLOCK}


def test_who_announces_no_uplink_reduces_nothing() -> None:
    shares = cut_shares(1000 * BLOCK, {A: 0.0, B: 1e6, C: 0.0, D: 1e6})
    assert sizes(shares) == {B: 500 * BLOCK, D: 500 * BLOCK}
    assert cut_shares(1000, {A: 0.0, B: 0.0}) == ()
    assert cut_shares(1000, {}) == ()


def test_a_liars_share_is_bounded_whatever_it_claims() -> None:
    for claim in (1e9, 1e12):
        found = sizes(cut_shares(19_000 * BLOCK, {A: claim, B: 1e6, C: 1e6, D: 1e6}))
        assert found == {A: UPLINK_BOUND * 1000 * BLOCK, B: 1000 * BLOCK, C: 1000 * BLOCK, D: 1000 * BLOCK}


def test_vectors_of_less_than_a_block_for_each_have_fewer_reducers() -> None:
    uplinks = dict.fromkeys((A, B, C, D), 1e6)
    for numel in (1, 255, 256):
        (share,) = cut_shares(numel, uplinks)
        assert share.stop == numel
    two = cut_shares(257, uplinks)
    assert [share.stop for share in two] == [256, 257]
    assert len({share.reducer for share in two}) == 2
    assert cut_shares(0, uplinks) == ()


def test_the_largest_group_stays_within_the_bound_of_parts() -> None:
    shares = cut_shares(MAX_MEMBERS * 100 * MIN_PART, dict.fromkeys(MANY, 1e6))
    assert len(shares) == MAX_PARTS == MAX_MEMBERS * PARTS_PER_SHARE
    group = m.Group(0, 8, tuple(map(member, MANY)), shares, 10.0)
    assert m.decode(m.encode(group)) == group  # and a message holds it


@settings(deadline=None)
@given(
    st.integers(1, 3_000_000),
    st.dictionaries(st.sampled_from(MANY[:40]), st.just(0.0) | st.floats(1e-300, 1e12), min_size=1, max_size=40),
)
def test_shares_cover_every_value_once_in_whole_blocks(numel: int, uplinks: dict[bytes, float]) -> None:
    shares = cut_shares(numel, uplinks)
    able = [uplink for uplink in uplinks.values() if uplink > 0]
    assert bool(shares) == bool(able)
    if not able:
        return
    stops = [0, *(share.stop for share in shares)]
    assert stops[-1] == numel
    assert all(a < b for a, b in itertools.pairwise(stops))
    assert all(stop % BLOCK == 0 for stop in stops[:-1])
    reducers = [share.reducer for share in shares]
    assert reducers == sorted(reducers)
    assert all(uplinks[reducer] > 0 for reducer in reducers)
    # whatever order they came in
    assert cut_shares(numel, dict(reversed(uplinks.items()))) == shares
    bound = UPLINK_BOUND * sorted(able)[(len(able) - 1) // 2]
    counted = {peer: min(uplink, bound) for peer, uplink in uplinks.items()}
    for peer, size in sizes(shares).items():
        assert abs(size - numel * counted[peer] / sum(counted.values())) <= 2 * BLOCK


def test_bytes_of_a_round_in_the_mean() -> None:
    assert [mean_bytes(members, 100, 200) for members in (1, 2, ALL_GATHER)] == [0, 100, 200]
    assert mean_bytes(4, 100, 200) == 0.75 * 300
    assert mean_bytes(100, 100, 200) == pytest.approx(297)


def test_groups_are_named_by_all_that_they_are() -> None:
    group = m.Group(0, 8, tuple(map(member, (A, B))), (), 10.0)
    others = [
        dataclasses.replace(group, round=12),
        dataclasses.replace(group, members=(member(A), member(C))),
        dataclasses.replace(group, members=(member(A), dataclasses.replace(member(B), payload=bytes(32)))),
        dataclasses.replace(group, shares=(m.Share(A, 256),)),
        dataclasses.replace(group, shares=(m.Share(A, 512),)),
        dataclasses.replace(group, seconds=11.0),
    ]
    assert len({group_digest(x) for x in (group, *others)}) == 1 + len(others)


# ---------------------------------------------------------------------- the book


SHARES = (m.Share(A, 256), m.Share(B, 512), m.Share(C, 768), m.Share(C, 1024), m.Share(D, 1100))


def parts_of(me: bytes) -> Parts:
    """The book of ``me`` in a group of A to D, C with two parts."""
    return Parts(me, m.Group(0, 8, tuple(map(member, (A, B, C, D))), SHARES, 10.0))


def test_at_first_the_book_says_what_the_group_does() -> None:
    parts = parts_of(C)
    assert (parts.attempt, parts.counted, parts.reducers) == (0, (A, B, C, D), (A, B, C, C, D))
    assert parts.mine == [2, 3]
    assert [parts.of(peer) for peer in (A, B, C, D, E)] == [(0,), (1,), (2, 3), (4,), ()]
    assert [parts.bounds(part) for part in range(5)] == [(0, 256), (256, 512), (512, 768), (768, 1024), (1024, 1100)]


def test_a_part_is_ready_once_when_all_counted_slices_are_here() -> None:
    parts = parts_of(C)
    for part in range(5):
        parts.slice_here(C, part)
    assert parts.ready() == []
    assert parts.held() == (C,)
    for owner in (A, B):
        parts.slice_here(owner, 2)
    assert parts.ready() == []
    parts.slice_here(D, 2)
    assert parts.ready() == [2]
    assert parts.ready() == []  # it has begun
    assert parts.held() == (C,)  # of part 3 nothing is here
    for owner in (A, D):
        parts.slice_here(owner, 3)
    assert parts.held() == (A, C, D)
    assert parts.ready() == []
    parts.slice_here(B, 3)
    assert parts.ready() == [3]


def test_slices_of_parts_that_others_reduce_are_no_work_here() -> None:
    parts = parts_of(C)
    for owner in (A, B, C, D):
        parts.slice_here(owner, 0)
    assert parts.ready() == []
    assert parts_of(E).held() == (A, B, C, D)  # who reduces nothing lacks nothing


def test_complete_when_every_average_of_the_attempt_is_here() -> None:
    parts = parts_of(A)
    names = [digest("average", [bytes([part])]) for part in range(5)]
    for part in (0, 1, 3, 4):
        parts.averages[0, part] = names[part]
    assert parts.complete() is None
    assert parts.missing_reducers() == {C}
    parts.averages[1, 2] = names[2]  # of another attempt
    assert parts.complete() is None
    parts.averages[0, 2] = names[2]
    found = parts.complete()
    assert found == tuple(names)
    assert parts.missing_reducers() == set()
    assert parts.as_parts(found) == tuple(Part(share.stop, name) for share, name in zip(SHARES, names, strict=True))


def test_a_plan_moves_slices_to_the_new_reducers_only() -> None:
    parts = parts_of(A)
    plan = m.Plan(0, 8, 1, (A, B, D), (A, B, D, A, D))
    assert parts.adopt(plan) == {D: (2,)}  # part 3 is now its own, it needs no message to itself
    assert (parts.attempt, parts.counted, parts.reducers) == (1, (A, B, D), (A, B, D, A, D))
    assert parts.mine == [0, 3]


def test_in_the_next_attempt_a_part_that_was_reduced_is_reduced_again_from_the_counted() -> None:
    parts = parts_of(B)
    for owner in (A, B, C, D):
        parts.slice_here(owner, 1)
    assert parts.ready() == [1]
    parts.averages[0, 1] = bytes(32)
    parts.adopt(m.Plan(0, 8, 1, (A, B, D), (A, B, D, B, D)))
    assert parts.ready() == [1]
    assert parts.complete() is None
    for owner in (A, B):
        parts.slice_here(owner, 3)
    assert parts.ready() == []
    assert parts.held() == (A, B)
    parts.slice_here(D, 3)
    assert parts.ready() == [3]


def test_a_lost_reducers_parts_go_to_the_next_in_line() -> None:
    parts = parts_of(A)
    assert parts.replan([A, B, D], {A, B, D}) == m.Plan(0, 8, 1, (A, B, D), (A, B, D, D, D))
    # behind the last one comes the first; many parts of one reducer are spread
    assert parts.replan([A, B, C], {A, B, C}) == m.Plan(0, 8, 1, (A, B, C), (A, B, C, C, B))
    assert parts.replan([B, D], {B, D}) == m.Plan(0, 8, 1, (B, D), (B, B, D, D, D))
    # who can not reduce still counts
    assert parts.replan([D], {A, B, C, D}) == m.Plan(0, 8, 1, (A, B, C, D), (D,) * 5)


def test_a_plan_that_changes_nothing_or_counts_nobody_is_none() -> None:
    parts = parts_of(A)
    assert parts.replan([D, C, B, A], {A, B, C, D, E}) is None
    assert parts.replan([A, B, C, D], {E}) is None
    assert parts.replan([A, B, C, D], set()) is None
    less = parts.replan([A, B, C, D], {A, B, C})
    assert less is not None
    assert (less.counted, less.reducers) == ((A, B, C), parts.reducers)
    # nobody who was left out comes back
    parts.adopt(less)
    assert parts.replan([A, B, C, D], {A, B, C, D}) is None
    again = parts.replan([A, B, C], {A, B, C, D})
    assert again is not None
    assert (again.attempt, again.counted) == (2, (A, B, C))


@given(st.lists(st.sets(st.sampled_from([A, B, C, D]), min_size=1), min_size=1, max_size=4))
def test_whatever_falls_out_every_plan_fits_its_group(able: list[set[bytes]]) -> None:
    parts, before = parts_of(A), {A, B, C, D}
    for peers in able:
        plan = parts.replan(sorted(peers), peers)
        if plan is None:
            continue
        assert set(plan.reducers) <= peers
        assert set(plan.counted) == set(parts.counted) & peers <= before
        assert [new for new, old in zip(plan.reducers, parts.reducers, strict=True) if old in peers] == [
            old for old in parts.reducers if old in peers
        ]
        moved = parts.adopt(plan)
        assert A not in moved
        assert m.decode(m.encode(plan)) == plan
        before = set(plan.counted)
