"""Voting, fork choice and the checks of a commit record."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from stretto.protocol.chain import (
    MAX_COUNT,
    MAX_MEMBERS,
    MAX_PARTS,
    CommitRecord,
    Member,
    Part,
    Tip,
    after,
    check_extends,
    genesis,
)
from stretto.protocol.digest import digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id

PEERS = sorted(peer_id(index) for index in range(6))
A, B, C, D, E, F = PEERS
RUN, STATE = digest("run", [b"x"]), digest("state", [b"y"])
CLOCK = Clock(round=4, at=40.0, interval=10.0)


def tip(*electors: bytes, version: int = 1, tokens: int = 100) -> Tip:
    return Tip(fragment=0, version=version, head=STATE, tokens_total=tokens, electors=electors)


def member(peer: bytes, tokens: int = 10) -> Member:
    return Member(peer, tokens, digest("payload", [peer]))


def record_after(base: Tip, peers: Sequence[bytes], **fields: Any) -> CommitRecord:
    members = tuple(member(peer) for peer in sorted(peers))
    record = CommitRecord(
        run=RUN, fragment=base.fragment, round=4, version=base.version + 1, prev=base.head, members=members,
        electors=tuple(member.peer for member in members), state=STATE,
        tokens_total=base.tokens_total + 10 * len(members), clock=Clock(5, 50.0, 10.0), coordinator=members[0].peer,
    )  # fmt: skip
    return dataclasses.replace(record, **fields)


QUORUMS: list[tuple[list[bytes], list[bytes], bool]] = [
    # electors, who is there, may they commit
    ([], [], False),
    ([], [F], True),
    ([A], [A], True),
    ([A], [B, C, D, E, F], False),
    ([A, B], [A], True),  # half, with the first
    ([A, B], [B], False),  # half, without it
    ([A, B], [B, C, D], False),
    ([A, B, C], [A], False),
    ([A, B, C], [B, C], True),
    ([A, B, C, D], [A, B], True),  # 2 + 2: the half with the first
    ([A, B, C, D], [C, D], False),
    ([A, B, C, D], [B, C], False),
    ([A, B, C, D], [A, D], True),
    ([A, B, C, D], [C, D, E, F], False),  # newcomers do not vote
    ([A, B, C, D], [B, C, D], True),  # 3 + 1
    ([A, B, C, D], [A], False),
    ([A, B, C, D, E], [A, B], False),
    ([A, B, C, D, E], [C, D, E], True),
]


@pytest.mark.parametrize(("electors", "there", "may"), QUORUMS)
def test_dynamic_voting(electors: list[bytes], there: list[bytes], may: bool) -> None:
    assert tip(*electors).quorum(there) is may


@pytest.mark.parametrize("count", range(1, 7))
def test_of_two_parts_of_the_electors_exactly_one_may_commit(count: int) -> None:
    electors = PEERS[:count]
    for size in range(count + 1):
        for part in itertools.combinations(electors, size):
            rest = [peer for peer in electors if peer not in part]
            assert tip(*electors).quorum(part) is not tip(*electors).quorum(rest)


def test_fork_choice_is_tokens_before_the_last_commit_then_tokens_then_version_then_hash() -> None:
    low, high = sorted([digest("a", [b"1"]), digest("a", [b"2"])])
    best = [
        Tip(0, 9, low, 100),
        Tip(0, 2, low, 200),
        Tip(0, 3, low, 200),
        Tip(0, 3, high, 200),
        Tip(0, 1, low, 201),
        Tip(0, 2, low, 150, tokens_before=110),
    ]
    for i, j in itertools.product(range(len(best)), repeat=2):
        assert best[i].beats(best[j]) is (i > j)


def test_the_first_tip_depends_on_run_fragment_and_initial_state() -> None:
    tips = [genesis(RUN, 0, STATE), genesis(RUN, 1, STATE), genesis(STATE, 0, STATE), genesis(RUN, 0, RUN)]
    assert len({t.head for t in tips}) == 4
    assert (tips[0].version, tips[0].tokens_total, tips[0].electors) == (0, 0, ())
    assert tips[0].head.hex() == "ef7659e8ca8f54e91093ea78905f78c58fc3d6edd6677a501fee0ed243af4804"


def test_the_head_depends_on_every_field_of_the_record() -> None:
    base = genesis(RUN, 0, STATE)
    record = record_after(base, [A, B])
    changed: dict[str, Any] = {
        "run": STATE, "fragment": 1, "round": 5, "version": 2, "prev": RUN, "members": (member(A),),
        "electors": (A, B, C), "state": RUN, "tokens_total": 21, "clock": Clock(5, 50.0, 11.0), "coordinator": B,
        "parts": (Part(7, RUN),),
    }  # fmt: skip
    assert set(changed) == {field.name for field in dataclasses.fields(CommitRecord)}
    heads = {dataclasses.replace(record, **{name: value}).head() for name, value in changed.items()}
    assert len(heads | {record.head()}) == len(changed) + 1


def test_after_a_record_its_electors_vote() -> None:
    base = tip(A, B, C, D)
    record = record_after(base, [A, B, C], electors=(A, B, C, D))
    assert after(record) == Tip(0, 2, record.head(), 130, (A, B, C, D), tokens_before=100)


def test_a_chain_of_lawful_records() -> None:
    end = genesis(RUN, 0, STATE)
    for peers in ([A, B, C, D], [A, B, C], [B, C], [B, E], [B, E, F]):
        record = record_after(end, peers)
        check_extends(record, end, CLOCK)
        end = after(record)
    assert (end.version, end.tokens_total, end.electors) == (5, 140, (B, E, F))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fragment": 1}, "does not extend version 1"),
        ({"prev": RUN}, "does not extend version 1"),
        ({"version": 3}, "record of version 3 does not extend version 1"),
        ({"version": 1}, "record of version 1 does not extend version 1"),
        ({"tokens_total": 131}, "miscounts the tokens"),
        ({"members": (member(C),), "electors": (C,), "tokens_total": 110}, "no quorum"),
        ({"electors": (A, B, C, E)}, "neither counted nor electors before"),
        ({"clock": Clock(6, 60.0, 10.0)}, "sets the clock"),
        ({"clock": Clock(5, 50.0, 100.0)}, "sets the clock"),
        ({"clock": Clock(5, 5000.0, 10.0)}, "sets the clock"),
    ],
)
def test_unlawful_records_are_refused(change: dict[str, Any], why: str) -> None:
    base = tip(A, B, C, D)
    lawful = record_after(base, [A, B, C])
    check_extends(lawful, base, CLOCK)
    with pytest.raises(RemoteProtocolError, match=why):
        check_extends(dataclasses.replace(lawful, **change), base, CLOCK)


def test_a_record_may_keep_electors_that_were_not_counted() -> None:
    base = tip(A, B, C, D)
    check_extends(record_after(base, [A, B, E], electors=(A, B, D, E)), tip(A, B, D), CLOCK)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run": b"short"}, "run must have 32 bytes, has 5"),
        ({"prev": b""}, "prev must have 32 bytes, has 0"),
        ({"state": bytes(33)}, "state must have 32 bytes, has 33"),
        ({"round": -1}, "round -1 is not a count"),
        ({"tokens_total": MAX_COUNT + 1}, "tokens_total 4611686018427387905 is not a count"),
        ({"members": ()}, "0 members, allowed are 1 to 256"),
        ({"members": (member(B), member(A))}, "members are not in peer-id order or named twice"),
        ({"electors": (B, A)}, "electors are not in peer-id order or named twice"),
        ({"electors": (A, A, B)}, "electors are not in peer-id order or named twice"),
        ({"electors": (A,)}, "a counted member is no elector"),
        ({"electors": (A, B, b"\xff")}, "elector is not an Ed25519 peer id"),
        ({"coordinator": b"me"}, "coordinator is not an Ed25519 peer id"),
    ],
)
def test_impossible_records_cannot_be_made(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(record_after(genesis(RUN, 0, STATE), [A, B]), **change)


@pytest.mark.parametrize(
    ("stops", "why"),
    [
        ((0,), "parts are empty or not in order"),
        ((256, 256), "parts are empty or not in order"),
        ((512, 256), "parts are empty or not in order"),
        ((-1,), "parts are empty or not in order"),
        (range(1, MAX_PARTS + 2), "1025 parts, allowed are 1024"),
    ],
)
def test_impossible_parts_cannot_be_made(stops: Sequence[int], why: str) -> None:
    base = record_after(genesis(RUN, 0, STATE), [A, B])
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(base, parts=tuple(Part(stop, STATE) for stop in stops))
    dataclasses.replace(base, parts=tuple(Part(stop, STATE) for stop in range(1, MAX_PARTS + 1)))


def test_a_record_names_the_bytes_that_the_next_state_is_made_from() -> None:
    whole = record_after(genesis(RUN, 0, STATE), [A, B])
    assert whole.payloads() == (member(A).payload, member(B).payload)
    parts = dataclasses.replace(whole, parts=(Part(256, RUN), Part(300, STATE)))
    assert parts.payloads() == (RUN, STATE)  # the contributions themselves are not needed


def test_norms_and_parts_are_part_of_the_head() -> None:
    record = record_after(genesis(RUN, 0, STATE), [A])
    louder = dataclasses.replace(record, members=(dataclasses.replace(member(A), norm=1.0),))
    cuts = [dataclasses.replace(record, parts=(Part(stop, RUN),)) for stop in (256, 257)]
    assert len({x.head() for x in (record, louder, *cuts)}) == 4
    assert len({x.signed_bytes() for x in (record, louder, *cuts)}) == 4


def test_groups_are_bounded() -> None:
    many = sorted(peer_id(index) for index in range(MAX_MEMBERS + 1))
    record_after(genesis(RUN, 0, STATE), many[:MAX_MEMBERS])
    with pytest.raises(ValueError, match="257 members, allowed are 1 to 256"):
        record_after(genesis(RUN, 0, STATE), many)


def test_what_is_signed_differs_from_what_is_hashed() -> None:
    record = record_after(genesis(RUN, 0, STATE), [A])
    assert record.signed_bytes().startswith(b"stretto commit\x00")
    assert digest("chain", [record.prev, record.signed_bytes()]) != record.head()
