"""What guards a peer in an exchange in parts, with real bytes: unwanted slices and averages, norms, memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from stretto.protocol import messages as m
from stretto.protocol import outer
from stretto.protocol.actions import Rules, Send
from stretto.protocol.chain import Member, Part
from stretto.protocol.codecs import CODECS, get_codec
from stretto.protocol.digest import digest, payload_digest
from stretto.protocol.effects import Averaged, FetchFrom, PartWork, PushAverageTo, PushTo, Work
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.live import decoded_norm
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer
from stretto.protocol.reduce import MAX_ATTEMPTS, cut_shares, group_digest
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo
from tests.fakes import toy_config

IDS = sorted(peer_id(index) for index in range(5))
A, ME, B, C, STRANGER = IDS
"""In peer-id order: A coordinates, the four make a group."""
SIZE = 1000
START = [np.zeros(SIZE, np.float32), np.zeros(3, np.float32)]
RULES = Rules(inner_steps=20, fragments=2, min_group=1, max_group=8, window=3.0)
CUTS = {A: (0, 256), ME: (256, 512), B: (512, 768), C: (768, 1000)}
"""Values that each reduces: one part for each, in this order."""


def gradient(peer: bytes) -> Vector:
    """The outer gradient of a peer."""
    return np.random.default_rng(IDS.index(peer)).normal(size=SIZE).astype(np.float32)


def make(me: bytes = ME, codec: str = "fp32", down: str = "fp32") -> Peer:
    config = toy_config(codec=codec, down=down, fragments=2, max_size=8)
    peer = Peer(
        me=me, config=config, diloco=StreamingDiLoCo(config, START), rules=RULES,
        sign=lambda message: digest("test sign", [me, message]) * 2,
        verify=lambda who, message, s: s == digest("test sign", [who, message]) * 2,
        can_coordinate=False,
    )  # fmt: skip
    peer.adopt_clock(Clock(0, 0.0, 10.0))
    peer.set_roster([A], [])
    return peer


def grouped(codec: str = "fp32", down: str = "fp32", **norms: float) -> tuple[Peer, m.Group, list[Any]]:
    """ME in a group of four that A has closed, and what it wants done; ``norms`` are announced by C, say."""
    peer = make(codec=codec, down=down)
    peer.diloco.trained(100)
    contribution = peer.diloco.leave(0, -gradient(ME))
    (send,) = peer.depart(0, contribution, rate=1.0, patience=5.0, uplink=1.0, now=0.0)
    assert isinstance(send, Send)
    assert send.to == A
    mine = Member(ME, 100, contribution.digest, contribution.norm)
    members = [mine]
    for name, owner in (("a", A), ("b", B), ("c", C)):
        payload = payload_digest(peer.diloco.codec.encode(gradient(owner)))
        members.append(Member(owner, 100, payload, norms.get(name, outer.norm(gradient(owner)))))
    members.sort(key=lambda x: x.peer)
    shares = cut_shares(SIZE, dict.fromkeys((A, ME, B, C), 1.0))
    assert [share.stop for share in shares] == [stop for _, stop in CUTS.values()]
    group = m.Group(0, 0, tuple(members), shares, 10.0)
    return peer, group, peer.received(A, group, 0.0)


def slice_of(peer: Peer, owner: bytes, part: int = 1) -> bytes:
    start, stop = list(CUTS.values())[part]
    whole = peer.diloco.codec.encode(gradient(owner))
    return peer.diloco.codec.cut(whole, SIZE, start, stop)


def push(of: m.Group, data: bytes, **fields: Any) -> m.Push:
    return dataclasses.replace(m.Push(0, 0, group_digest(of), 1, payload_digest(data), len(data)), **fields)


def average(of: m.Group, data: bytes, **fields: Any) -> m.Average:
    header = m.Average(0, 0, group_digest(of), 0, 0, payload_digest(data), len(data))
    return dataclasses.replace(header, **fields)


def arrive(peer: Peer, sender: bytes, header: m.Push | m.Average, data: bytes) -> list[Any]:
    assert peer.wants(sender, header) is None
    peer.check(sender, header, data)
    return peer.payload_arrived(sender, header, data, 1.0)


def average_bytes(peer: Peer, part: int, owners: tuple[bytes, ...] = (A, ME, B, C)) -> bytes:
    """What the reducer of a part must come to: all have the same tokens."""
    start, stop = list(CUTS.values())[part]
    total = np.zeros(stop - start, np.float32)
    for owner in owners:
        peer.diloco.codec.decode_add(slice_of(peer, owner, part), 1 / len(owners), total)
    return peer.diloco.down.encode(total)


# ---------------------------------------------------------------------- what goes out


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_member_sends_each_reducer_the_slice_of_its_own_encoded_contribution(codec: str) -> None:
    peer, group, effects = grouped(codec)
    pushes = [effect for effect in effects if isinstance(effect, PushTo)]
    assert [effect.to for effect in pushes] == [B, C, A]
    for effect in pushes:
        ((header, data),) = peer.outgoing(effect)
        part, (start, stop) = list(CUTS).index(effect.to), CUTS[effect.to]
        assert data == get_codec(codec).encode(gradient(ME)[start:stop])
        assert header == push(group, data, part=part)
        assert header.payload == payload_digest(data)


def test_a_whole_contribution_is_sent_under_its_own_digest() -> None:
    peer = make()
    contribution = peer.diloco.leave(0, -gradient(ME))
    effect = PushTo(A, 0, bytes(32), contribution, ((0, 0, SIZE),), SIZE)
    assert peer.outgoing(effect) == [(m.Push(0, 0, bytes(32), 0, contribution.digest, 4 * SIZE), contribution.payload)]


# ---------------------------------------------------------------------- slices


def test_slices_are_wanted_once_by_whoever_reduces_them_and_from_members_only() -> None:
    peer, group, _ = grouped()
    data = slice_of(peer, B)
    header = push(group, data)
    assert peer.wants(B, header) is None
    assert peer.wants(STRANGER, header) == "not a member of the group"
    assert peer.wants(B, push(group, data, group=bytes(32))) == "another group"
    assert peer.wants(B, push(group, data, part=0)) == "part 0 is not reduced here"
    assert peer.wants(B, push(group, data, part=4)) == "part 4 is not reduced here"
    assert peer.wants(B, push(group, data, part=2**40)) == f"part {2**40} is not reduced here"
    assert peer.wants(B, push(group, data, nbytes=1023)) == "1023 bytes where 1024 are due"
    assert peer.wants(B, push(group, data, nbytes=2**40)) == f"{2**40} bytes where 1024 are due"
    assert peer.wants(B, push(group, data, round=2)) == "round 2 is not going on here"
    assert peer.wants(B, push(group, data, fragment=1)) == "round 0 is not going on here"
    arrive(peer, B, header, data)
    assert peer.wants(B, header) == "already here"
    assert peer.wants(B, push(group, bytes(1024))) == "already here"  # nor with other bytes
    assert peer.wants(C, push(group, bytes(1024))) is None  # each member has its own
    assert peer.wants(ME, push(group, data)) == "already here"


def test_a_slice_that_is_not_what_was_announced_is_the_senders_fault() -> None:
    peer, group, _ = grouped()
    data = slice_of(peer, B)
    with pytest.raises(RemoteProtocolError, match="do not match their digest"):
        peer.check(B, push(group, data), data[:-1] + b"\x01")
    bad = np.full(256, np.nan, "<f4").tobytes()
    with pytest.raises(RemoteProtocolError, match="not finite"):
        peer.check(B, push(group, bad), bad)
    with pytest.raises(RemoteProtocolError, match="1020 bytes where 1024 are due"):
        peer.check(B, push(group, data[4:]), data[4:])


def test_a_slice_larger_in_norm_than_the_whole_contribution_was_said_to_be_is_refused() -> None:
    peer, group, _ = grouped(c=16.0)
    for norm, good in ((16.0, True), (23.9, True), (24.1, False), (1e6, False)):  # a codec may add half
        data = np.full(256, norm / 16, "<f4").tobytes()
        assert decoded_norm(peer.diloco.codec, data, 256) == pytest.approx(norm)
        if good:
            peer.check(C, push(group, data), data)
            continue
        with pytest.raises(RemoteProtocolError, match="announced were 16"):
            peer.check(C, push(group, data), data)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_no_codec_makes_an_honest_contribution_exceed_what_it_announced(codec: str) -> None:
    peer, group, _ = grouped(codec)
    for owner in (A, B, C):
        data = slice_of(peer, owner)
        peer.check(owner, push(group, data), data)
        whole = peer.diloco.codec.encode(gradient(owner))
        assert decoded_norm(peer.diloco.codec, whole, SIZE) <= 1.5 * outer.norm(gradient(owner))


@pytest.mark.parametrize("down", ["fp32", "int8", "e3m0"])
def test_when_all_slices_are_here_they_are_averaged_and_go_to_everybody(down: str) -> None:
    peer, group, _ = grouped("e3m0", down)
    effects: list[Any] = []
    for owner in (C, A, B):  # in whichever order they come
        assert effects == []
        data = slice_of(peer, owner)
        effects = arrive(peer, owner, push(group, data), data)
    (work,) = effects
    assert isinstance(work, PartWork)
    assert (work.part.attempt, work.part.part, work.numel) == (0, 1, 256)
    assert [x.peer for x in work.part.members] == [A, ME, B, C]
    assert work.slices == tuple(slice_of(peer, owner) for owner in (A, ME, B, C))
    result = peer.reduce(work)
    assert isinstance(result, Averaged)
    assert result == Averaged(average_bytes(peer, 1), payload_digest(average_bytes(peer, 1)))
    sent = peer.reduced(work, result, 2.0)
    header = m.Average(0, 0, group_digest(group), 0, 1, result.digest, len(result.data))
    assert sent == [PushAverageTo(to, header, result.data) for to in (B, C, A)]
    assert peer.payload(0, result.digest) == result.data


def test_a_reduction_for_a_group_that_is_gone_goes_nowhere() -> None:
    peer, group, _ = grouped()
    effects: list[Any] = []
    for owner in (A, B, C):
        data = slice_of(peer, owner)
        effects = arrive(peer, owner, push(group, data), data)
    (work,) = effects
    result = peer.reduce(work)
    assert peer.reduced(dataclasses.replace(work, group=bytes(32)), result, 2.0) == []
    peer.received(A, m.Abort(0, 0, "no"), 2.0)
    assert peer.reduced(work, result, 2.0) == []


def test_a_clipped_member_counts_with_its_bounded_norm_in_parts_too() -> None:
    peer, group, _ = grouped(c=1e6)
    effects: list[Any] = []
    for owner in (A, B, C):
        data = slice_of(peer, owner)
        effects = arrive(peer, owner, push(group, data), data)
    (work,) = effects
    result = peer.reduce(work)
    assert isinstance(result, Averaged)
    norms = [x.norm for x in group.members]
    slices = [slice_of(peer, x.peer) for x in group.members]
    expected = outer.weighted_average(slices, [100] * 4, peer.diloco.codec, 256, norms=norms)
    assert result.data == expected.tobytes()
    assert result.data != average_bytes(peer, 1)


# ---------------------------------------------------------------------- averages


def test_averages_are_wanted_once_and_from_their_reducer_only() -> None:
    peer, group, _ = grouped(down="int8")
    data = average_bytes(peer, 0)
    header = average(group, data)
    due = len(data)
    assert peer.wants(A, header) is None
    assert peer.wants(B, header) == "part 0 is reduced by another peer"
    assert peer.wants(STRANGER, header) == "not a member of the group"
    assert peer.wants(A, average(group, data, group=bytes(32))) == "another group"
    assert peer.wants(A, average(group, data, part=4)) == "no such part"
    assert peer.wants(A, average(group, data, part=2)) is None  # the coordinator passes on what others reduced
    assert peer.wants(A, average(group, data, attempt=2)) == "attempt 2 while 0 is going on"
    assert peer.wants(A, average(group, data, nbytes=due + 1)) == f"{due + 1} bytes where {due} are due"
    assert peer.wants(A, average(group, data, round=2)) == "round 2 is not going on here"
    arrive(peer, A, header, data)
    assert peer.wants(A, header) == "already here"
    assert peer.wants(A, average(group, bytes(due))) == "already here"
    # the last part is shorter
    last = average_bytes(peer, 3)
    assert len(last) < due
    assert peer.wants(C, average(group, last, part=3)) is None
    assert peer.wants(C, average(group, data, part=3)) == f"{due} bytes where {len(last)} are due"


def test_of_an_earlier_attempt_nothing_is_wanted_any_more() -> None:
    peer, group, _ = grouped()
    data = average_bytes(peer, 2)
    assert peer.wants(B, average(group, data, part=2)) is None
    # B takes C's part over, ME takes nothing: part 3 comes from B now
    peer.received(A, m.Plan(0, 0, 1, (A, ME, B), (A, ME, B, B)), 2.0)
    assert peer.wants(B, average(group, data, part=2)) == "attempt 0 while 1 is going on"
    assert peer.wants(B, average(group, data, part=2, attempt=1)) is None
    last = average_bytes(peer, 3)
    assert peer.wants(B, average(group, last, part=3, attempt=1)) is None
    assert peer.wants(C, average(group, last, part=3, attempt=1)) == "part 3 is reduced by another peer"


def test_an_average_that_does_not_decode_is_the_senders_fault() -> None:
    peer, group, _ = grouped(down="int8")
    good = average_bytes(peer, 0)
    bad = b"\xff\xff" + good[2:]
    with pytest.raises(RemoteProtocolError, match="int8 payload must be"):
        peer.check(A, average(group, bad), bad)
    with pytest.raises(RemoteProtocolError, match="bytes long"):
        peer.check(A, average(group, good[1:]), good[1:])
    with pytest.raises(RemoteProtocolError, match="do not match their digest"):
        peer.check(A, average(group, good), bad)


def test_with_all_averages_a_member_votes_and_takes_the_step_as_if_it_had_all_contributions() -> None:
    peer, group, _ = grouped()
    effects: list[Any] = []
    for owner in (A, B, C):
        data = slice_of(peer, owner)
        effects = arrive(peer, owner, push(group, data), data)
    (part_work,) = effects
    peer.reduced(part_work, peer.reduce(part_work), 2.0)
    for part, reducer in ((0, A), (2, B), (3, C)):
        data = average_bytes(peer, part)
        effects = arrive(peer, reducer, average(group, data, part=part), data)
    names = tuple(payload_digest(average_bytes(peer, part)) for part in range(4))
    vote, work = effects
    assert vote == Send(A, m.Averaged(0, 0, 0, names))
    assert isinstance(work, Work)
    stops = [stop for _, stop in CUTS.values()]
    assert work.basis.parts == tuple(Part(stop, name) for stop, name in zip(stops, names, strict=True))
    assert work.basis.members == group.members
    # fp32 both ways: the same bits as from whole contributions
    whole = {payload_digest(x): x for x in (peer.diloco.codec.encode(gradient(p)) for p in (A, ME, B, C))}
    reduced = peer.reduce(work)
    assert reduced.digest == peer.diloco.reduce(0, group.members, whole).digest


def test_fetched_averages_are_checked_for_size_digest_and_content() -> None:
    peer, _, _ = grouped(down="int8")
    good = average_bytes(peer, 0)
    effect = FetchFrom(A, 0, payload_digest(good), 256)
    assert peer.fetch_size(effect) == len(good)
    assert peer.fetch_size(FetchFrom(A, 0, bytes(32), None)) == 4 * SIZE
    peer.check_fetched(effect, good)
    with pytest.raises(RemoteProtocolError, match="fetched bytes do not match their digest"):
        peer.check_fetched(effect, good[:-1] + b"\x7f")
    bad = b"\xff\xff" + good[2:]
    with pytest.raises(RemoteProtocolError, match="int8 payload must be"):
        peer.check_fetched(FetchFrom(A, 0, payload_digest(bad), 256), bad)


# ---------------------------------------------------------------------- memory


def test_no_member_can_fill_the_memory() -> None:
    peer, group, _ = grouped()
    owners = (A, B, C)
    taken = 0
    for attempt in range(MAX_ATTEMPTS + 3):
        for sender in owners:
            for part in range(6):
                for kind in range(3):
                    data = np.full(256 if part != 3 else 232, kind / 1000, "<f4").tobytes()
                    for header in (push(group, data, part=part), average(group, data, part=part, attempt=attempt)):
                        if peer.wants(sender, header) is None:
                            peer.check(sender, header, data)
                            peer.payload_arrived(sender, header, data, 1.0)
                            taken += len(data)
    # a slice from each of three; each part's average of this attempt and of the next
    assert taken <= 3 * 1024 + 2 * 4 * SIZE


def test_when_the_round_is_over_slices_are_dropped_and_the_next_round_drops_the_rest() -> None:
    peer, group, _ = grouped()
    data = slice_of(peer, B)
    arrive(peer, B, push(group, data), data)
    assert list(peer._live[0].slices) == [(B, 1)]
    peer.received(A, m.Abort(0, 0, "no"), 2.0)
    assert peer._live[0].slices == {}
    assert peer.wants(B, push(group, data)) == "round 0 is not going on here"
    contribution = peer.diloco.leave(0, -gradient(ME))
    peer.depart(2, contribution, rate=1.0, patience=5.0, uplink=1.0, now=20.0)
    assert set(peer._live) == {2}


@pytest.mark.parametrize(("up", "down"), [("e3m0", "int8"), ("e3m0", "e3m0"), ("int8", "e2m1"), ("fp32", "fp32")])
def test_where_a_fragment_is_cut_into_parts_changes_no_bit(up: str, down: str) -> None:
    # So the state after a round does not depend on the uplinks that the members measured.
    config = toy_config(codec=up, down=down, fragments=2, max_size=8)
    diloco = StreamingDiLoCo(config, START)
    payloads = [diloco.codec.encode(gradient(peer)) for peer in IDS[:4]]
    members = [Member(peer, 100, payload_digest(data)) for peer, data in zip(IDS, payloads, strict=False)]

    def state(*stops: int) -> bytes:
        averages, parts, start = {}, [], 0
        for stop in stops:
            slices = [diloco.codec.cut(data, SIZE, start, stop) for data in payloads]
            average = diloco.reduce_part(members, slices, stop - start)
            parts.append(Part(stop, payload_digest(average)))
            averages[parts[-1].payload] = average
            start = stop
        return diloco.apply(0, parts, averages).digest

    assert state(SIZE) == state(256, SIZE) == state(512, 768, SIZE) == state(256, 512, 768, SIZE)
