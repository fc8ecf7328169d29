"""Missed commits, followed and computed anew: the same bits, and nothing unlawful is let in."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from stretto.protocol import outer
from stretto.protocol.actions import Rules
from stretto.protocol.chain import CommitRecord, Member, Part, SignedRecord, Tip
from stretto.protocol.codecs import get_codec
from stretto.protocol.config import WireConfig
from stretto.protocol.digest import digest, payload_digest
from stretto.protocol.effects import Work
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.peer import Peer
from stretto.protocol.replay import Unproven, recompute, sizes
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo, seal
from tests.fakes import toy_config

A, B = sorted((peer_id(1), peer_id(2)))  # of two electors the first is a quorum
CONFIG = dataclasses.replace(toy_config(fragments=2), wire=WireConfig(up="e3m0", down="int8"))
START = [np.linspace(-1, 1, 300, dtype=np.float32), np.ones(7, np.float32)]
RULES = Rules(inner_steps=20, fragments=2, min_group=1, max_group=3, window=3.0)


def sign(peer: bytes, message: bytes) -> bytes:
    return digest("test sign", [peer, message]) * 2


def make(me: bytes) -> Peer:
    peer = Peer(
        me=me, config=CONFIG, diloco=StreamingDiLoCo(CONFIG, START), rules=RULES, sign=lambda text: sign(me, text),
        verify=lambda who, text, signature: signature == sign(who, text),
    )  # fmt: skip
    peer.adopt_clock(Clock(0, 0.0, 10.0))
    peer.set_roster((), ())
    return peer


def commit(peer: Peer, round: int, seed: int) -> tuple[SignedRecord, dict[bytes, bytes]]:
    """A round of fragment 0 that ``peer`` commits alone, and the bytes behind it."""
    state = peer.diloco.fragments[0]
    peer.diloco.trained(100)
    noise = np.random.default_rng(seed).normal(scale=0.1, size=300).astype(np.float32)
    contribution = peer.diloco.leave(0, state.anchor - noise)
    (work,) = peer.depart(round, contribution, rate=1.0, patience=5.0, now=10.0 * round)
    assert isinstance(work, Work)
    peer.reduced(work, peer.reduce(work), 10.0 * round)
    peer.diloco.take_result(0)
    signed = peer.diloco.fragments[0].record
    assert signed is not None
    return signed, {contribution.digest: contribution.payload}


def history(count: int) -> tuple[Peer, list[tuple[SignedRecord, dict[bytes, bytes]]]]:
    donor = make(A)
    return donor, [commit(donor, 2 * index, index) for index in range(count)]


def resigned(record: CommitRecord, **changes: Any) -> SignedRecord:
    changed = dataclasses.replace(record, **changes)
    return SignedRecord(changed, sign(changed.coordinator, changed.signed_bytes()))


def outer_bits(peer: Peer) -> tuple[bytes, bytes, Tip]:
    state = peer.diloco.fragments[0]
    return state.anchor.tobytes(), state.momentum.tobytes(), state.tip


def test_replay_gives_the_bits_and_the_head_of_whoever_was_there() -> None:
    donor, commits = history(5)
    late = make(B)
    late.follow(0, [signed for signed, _ in commits])
    for signed, payloads in commits:
        assert not late.replayed(signed, recompute(late.diloco, signed.record, payloads))
    assert outer_bits(late) == outer_bits(donor)
    assert late.clock == donor.clock
    # the local weights move with the anchor: what this peer has learnt is still to be contributed
    local = START[0] - np.float32(0.5)
    moved = late.diloco.come_back(0, local)
    state = late.diloco.fragments[0]
    np.testing.assert_allclose(state.anchor - moved, np.full(300, 0.5), atol=1e-5)


def test_a_contribution_that_a_missed_round_counted_is_merged_and_not_sent_again() -> None:
    """Two commits were missed; the first counts this peer, the second does not. A download could not tell."""
    late = make(B)
    late.diloco.trained(60)
    local = START[0] - np.float32(0.25)
    mine = late.diloco.leave(0, local)
    late.diloco.left(mine)
    others = make(A)
    foreign = others.diloco.leave(0, START[0] - np.float32(0.1))
    members = tuple(sorted([Member(A, 40, foreign.digest), Member(B, mine.tokens, mine.digest)], key=lambda x: x.peer))
    payloads = {mine.digest: mine.payload, foreign.digest: foreign.payload}
    tip = late.tips()[0]
    reduced = others.diloco.reduce(0, members, payloads)
    first = resigned(_record(tip, members, reduced.digest, round=0))
    others.diloco.install(0, first, reduced, me=A)
    others.diloco.take_result(0)
    second, more = commit(others, 2, 1)
    late.follow(0, [first, second])
    assert late.replayed(first, recompute(late.diloco, first.record, payloads))
    assert not late.replayed(second, recompute(late.diloco, second.record, more))
    assert outer_bits(late) == outer_bits(others)
    state = late.diloco.fragments[0]
    assert state.tokens == 0
    new = late.diloco.come_back(0, local)
    expected = outer.merge(local, reduced.anchor, CONFIG.outer.alpha) + (state.anchor - reduced.anchor)
    assert new.tobytes() == expected.tobytes()


def _record(tip: Tip, members: tuple[Member, ...], state: bytes, *, round: int, parts: tuple[Part, ...] = ()) -> Any:
    return CommitRecord(
        run=CONFIG.digest(), fragment=0, round=round, version=tip.version + 1, prev=tip.head, members=members,
        electors=tuple(member.peer for member in members), state=state,
        tokens_total=tip.tokens_total + sum(member.tokens for member in members),
        clock=Clock(round + 1, 10.0 * (round + 1), 10.0), coordinator=A, parts=parts,
    )  # fmt: skip


def test_averages_in_parts_are_decoded_and_stepped_once() -> None:
    late = make(B)
    gradient = np.random.default_rng(3).normal(size=300).astype(np.float32)
    int8 = get_codec("int8")
    payloads = [int8.encode(gradient[:120]), int8.encode(gradient[120:])]
    parts = tuple(Part(stop, payload_digest(data)) for stop, data in zip((120, 300), payloads, strict=True))
    average = np.concatenate([int8.decode(payloads[0], 120), int8.decode(payloads[1], 180)])
    lr, mu = CONFIG.outer.lr, CONFIG.outer.momentum
    expected = seal(*outer.nesterov(START[0], START[0] * 0, average, lr=lr, momentum_factor=mu))
    members = (Member(A, 40, bytes(32)),)  # contributions are not needed
    record = _record(late.tips()[0], members, expected.digest, round=0, parts=parts)
    by_digest = {payload_digest(data): data for data in payloads}
    assert sizes(record, 300, get_codec("e3m0"), int8) == {
        parts[0].payload: int8.nbytes(120), parts[1].payload: int8.nbytes(180)
    }  # fmt: skip
    signed = resigned(record)
    late.follow(0, [signed])
    late.replayed(signed, recompute(late.diloco, record, by_digest))
    assert late.diloco.fragments[0].anchor.tobytes() == expected.anchor.tobytes()


def test_the_cost_of_a_commit_is_known_before_a_byte_comes() -> None:
    _, ((signed, payloads),) = history(1)
    e3m0, int8 = get_codec("e3m0"), get_codec("int8")
    assert sizes(signed.record, 300, e3m0, int8) == {name: len(data) for name, data in payloads.items()}
    short = dataclasses.replace(signed.record, parts=(Part(299, bytes(32)),))
    with pytest.raises(RemoteProtocolError, match="the parts of a commit hold 299 values, not 300"):
        sizes(short, 300, e3m0, int8)
    twice = dataclasses.replace(signed.record, parts=(Part(100, bytes(32)), Part(300, bytes(32))))
    with pytest.raises(RemoteProtocolError, match="one digest and two sizes"):
        sizes(twice, 300, e3m0, int8)


def test_bytes_that_are_not_what_the_record_names_change_nothing() -> None:
    _, ((signed, payloads),) = history(1)
    late = make(B)
    ((name, data),) = payloads.items()
    with pytest.raises(RemoteProtocolError, match="do not match their digest"):
        recompute(late.diloco, signed.record, {name: data[:-1] + bytes([data[-1] ^ 1])})
    lie = resigned(signed.record, state=bytes(32))
    before = outer_bits(late)
    with pytest.raises(RemoteProtocolError, match="the record's state differs"):
        late.replayed(lie, recompute(late.diloco, lie.record, payloads))
    assert outer_bits(late) == before


def test_only_lawful_continuations_are_followed() -> None:
    _, commits = history(3)
    first, second, third = (signed for signed, _ in commits)
    late = make(B)
    late.follow(0, [])
    late.follow(0, [first, second, third])
    r = second.record
    other = digest("run", [b"other"])
    cases: list[tuple[list[SignedRecord], str]] = [
        ([second], "does not extend"),
        ([first, third], "does not extend"),
        ([first, first], "does not extend"),
        ([SignedRecord(first.record, bytes(64))], "wrong signature"),
        ([resigned(first.record, run=other)], "another run"),
        ([resigned(first.record, fragment=1)], "does not extend"),
        ([first, resigned(r, tokens_total=r.tokens_total + 1)], "miscounts the tokens"),
        ([first, resigned(r, round=0, clock=Clock(1, 10.0, 10.0))], "older than the one before it"),
        ([first, resigned(r, clock=Clock(r.round + 1, -500.0, 10.0))], "older than the one before it"),
        ([first, resigned(r, clock=Clock(r.round + 2, 50.0, 10.0))], "sets the clock"),
    ]
    for records, why in cases:
        with pytest.raises(RemoteProtocolError, match=why) as caught:
            late.follow(0, records)
        assert not isinstance(caught.value, Unproven)
    # the interval may have changed by any factor: many rounds of other fragments lie between
    late.follow(0, [first, resigned(r, clock=Clock(r.round + 1, 3000.0, 1000.0))])


def test_a_commit_without_a_quorum_is_not_a_lie_but_cannot_be_followed() -> None:
    _, commits = history(2)
    first, second = (signed for signed, _ in commits)
    late = make(B)
    by_b = (Member(B, 100, second.record.members[0].payload),)
    taken_over = resigned(second.record, members=by_b, electors=(B,), tokens_total=200)
    with pytest.raises(Unproven, match="version 2 has no quorum"):
        late.follow(0, [first, taken_over])
    late.set_roster((), (), [A])  # A has resigned, as everybody knows
    late.follow(0, [first, taken_over])
