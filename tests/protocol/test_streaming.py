"""What a round does to one peer's numbers: leave, reduce, install, come back."""

import dataclasses

import numpy as np
import pytest

from stretto.protocol import outer
from stretto.protocol.chain import MAX_NORM, CommitRecord, Member, Part, SignedRecord, after
from stretto.protocol.codecs import CODECS, get_codec
from stretto.protocol.config import WireConfig
from stretto.protocol.digest import digest, payload_digest, state_digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.outer import Vector
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import MAX_ATTEMPTS, Contribution, Reduced, StreamingDiLoCo, seal
from tests.fakes import toy_config

A, B = sorted(peer_id(index) for index in range(2))
SIZES = (5, 64, 0, 33)


def vectors(seed: int) -> list[Vector]:
    random = np.random.default_rng(seed)
    return [random.normal(size=size).astype(np.float32) for size in SIZES]


def make(codec: str = "fp32", *, alpha: float = 0.5) -> StreamingDiLoCo:
    return StreamingDiLoCo(toy_config(codec=codec, alpha=alpha), vectors(0))


def signed(diloco: StreamingDiLoCo, fragment: int, members: list[Member], reduced: Reduced) -> SignedRecord:
    tip = diloco.fragments[fragment].tip
    record = CommitRecord(
        run=diloco.config.digest(), fragment=fragment, round=fragment, version=tip.version + 1, prev=tip.head,
        members=tuple(members), electors=tuple(x.peer for x in members), state=reduced.digest,
        tokens_total=tip.tokens_total + sum(x.tokens for x in members), clock=Clock(fragment + 1, 0.0, 1.0),
        coordinator=members[0].peer,
    )  # fmt: skip
    return SignedRecord(record, bytes(64))


def contribute(diloco: StreamingDiLoCo, fragment: int, local: Vector) -> Contribution:
    contribution = diloco.leave(fragment, local)
    diloco.left(contribution)
    return contribution


def commit(diloco: StreamingDiLoCo, fragment: int, by: dict[bytes, Contribution]) -> Reduced:
    members = [Member(peer, c.tokens, c.digest) for peer, c in sorted(by.items())]
    reduced = diloco.reduce(fragment, members, {c.digest: c.payload for c in by.values()})
    diloco.install(fragment, signed(diloco, fragment, members, reduced), reduced, me=A)
    return reduced


def foreign(diloco: StreamingDiLoCo, fragment: int, seed: int, tokens: int = 100) -> Contribution:
    """Somebody else's contribution to the fragment."""
    payload = diloco.codec.encode(np.float32(0.1) * vectors(seed)[fragment])
    return Contribution(fragment, diloco.fragments[fragment].tip.head, payload, payload_digest(payload), tokens)


def test_in_the_beginning_the_anchors_are_the_initial_weights() -> None:
    diloco = StreamingDiLoCo(toy_config(), vectors(0))
    for state, weights in zip(diloco.fragments, vectors(0), strict=True):
        assert state.anchor.tobytes() == weights.tobytes()
        assert not state.momentum.any()
        assert (state.tip.version, state.tokens, state.pending) == (0, 0, False)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_contribution_is_the_encoded_outer_gradient(codec: str) -> None:
    diloco, local = make(codec), vectors(1)
    diloco.trained(700)
    for fragment, weights in enumerate(local):
        contribution = contribute(diloco, fragment, weights)
        state = diloco.fragments[fragment]
        expected = get_codec(codec).encode(state.anchor - weights)
        size = outer.norm(state.anchor - weights)
        assert contribution == Contribution(fragment, state.tip.head, expected, payload_digest(expected), 700, size)


def test_a_committed_round_is_the_average_and_a_nesterov_step() -> None:
    diloco, local = make(alpha=0.25), vectors(1)[1]
    diloco.trained(300)
    mine, other = contribute(diloco, 1, local), foreign(diloco, 1, 2)
    start = diloco.fragments[1].anchor
    commit(diloco, 1, {A: mine, B: other})
    gradient = np.zeros(64, np.float32)
    gradient += np.float32(0.75) * (start - local)
    gradient += np.float32(0.25) * np.frombuffer(other.payload, "<f4")
    anchor, momentum = outer.nesterov(start, np.zeros(64, np.float32), gradient, lr=0.4, momentum_factor=0.9)
    state = diloco.fragments[1]
    assert state.anchor.tobytes() == anchor.tobytes()
    assert state.momentum.tobytes() == momentum.tobytes()
    assert state.tip.version == 1
    assert state.pending
    later = local + np.float32(0.5)  # it trained on while the round was under way
    assert diloco.come_back(1, later).tobytes() == outer.merge(later, anchor, 0.25).tobytes()
    assert not state.pending
    assert diloco.come_back(1, later).tobytes() == later.tobytes()  # only once


def test_an_uncounted_peer_keeps_its_uncounted_work() -> None:
    diloco, local = make(alpha=0.0), vectors(1)[1]
    diloco.trained(300)
    contribute(diloco, 1, local)
    old = diloco.fragments[1].anchor
    commit(diloco, 1, {B: foreign(diloco, 1, 2)})
    new = diloco.fragments[1].anchor
    assert np.abs(new - old).max() > 0.01
    rebased = diloco.come_back(1, local)
    np.testing.assert_allclose(new - rebased, old - local, rtol=0, atol=1e-6)
    diloco.trained(50)
    assert contribute(diloco, 1, rebased).tokens == 350


def test_a_download_keeps_uncounted_work_too() -> None:
    diloco, local = make(alpha=0.0), vectors(1)[1]
    diloco.trained(300)
    ahead = make(alpha=0.0)
    for seed in (2, 3, 4):
        commit(ahead, 1, {B: foreign(ahead, 1, seed)})
        ahead.come_back(1, local)
    theirs, mine = ahead.fragments[1], diloco.fragments[1]
    old = mine.anchor
    copy = seal(theirs.anchor, theirs.momentum)
    assert theirs.record is not None
    diloco.replace(1, copy, theirs.record, me=A)
    assert (mine.tip, mine.anchor.tobytes()) == (theirs.tip, theirs.anchor.tobytes())
    rebased = diloco.come_back(1, local)
    np.testing.assert_allclose(mine.anchor - rebased, old - local, rtol=0, atol=1e-6)
    assert mine.tokens == 300


def test_two_moves_before_the_local_weights_meet_them_add_up() -> None:
    diloco, local = make(), vectors(1)[3]
    old = diloco.fragments[3].anchor
    for seed in (2, 3):
        commit(diloco, 3, {B: foreign(diloco, 3, seed)})
    new = diloco.fragments[3].anchor
    np.testing.assert_allclose(new - diloco.come_back(3, local), old - local, rtol=0, atol=1e-6)


def test_a_merge_and_a_later_move_before_the_local_weights_meet_them() -> None:
    diloco, local = make(alpha=0.5), vectors(1)[3]
    first = contribute(diloco, 3, local)
    commit(diloco, 3, {A: first})
    middle = diloco.fragments[3].anchor
    commit(diloco, 3, {B: foreign(diloco, 3, 2)})
    new = diloco.fragments[3].anchor
    expected = outer.merge(local, middle, 0.5) + (new - middle)
    assert diloco.come_back(3, local).tobytes() == expected.tobytes()


def test_an_aborted_round_changes_nothing_and_the_next_contribution_holds_both_cycles() -> None:
    diloco, local = make(), vectors(1)[1]
    state = diloco.fragments[1]
    before = state.anchor, state.momentum, state.tip
    diloco.trained(300)
    contribute(diloco, 1, local)
    # nothing is installed: the round was aborted
    assert (state.anchor, state.momentum, state.tip) == before
    assert diloco.come_back(1, local) is local
    later = local - np.float32(0.125)
    diloco.trained(200)
    second = contribute(diloco, 1, later)
    assert second.tokens == 500
    assert second.payload == (before[0] - later).astype("<f4").tobytes()


def test_tokens_trained_during_the_round_stay_for_the_next_one() -> None:
    diloco, local = make(), vectors(1)[1]
    diloco.trained(300)
    mine = contribute(diloco, 1, local)
    diloco.trained(20)
    commit(diloco, 1, {A: mine})
    assert diloco.fragments[1].tokens == 20
    assert [diloco.fragments[other].tokens for other in (0, 2, 3)] == [320] * 3


def test_arrays_are_replaced_and_never_changed() -> None:
    diloco, local = make(), vectors(1)[1]
    anchor, momentum = diloco.fragments[1].anchor, diloco.fragments[1].momentum
    kept = anchor.copy(), momentum.copy()
    mine = contribute(diloco, 1, local)
    commit(diloco, 1, {A: mine})
    assert (anchor.tobytes(), momentum.tobytes()) == (kept[0].tobytes(), kept[1].tobytes())
    assert diloco.fragments[1].anchor is not anchor


def test_the_order_of_payloads_in_memory_does_not_matter() -> None:
    diloco = make("e3m0")
    parts = [foreign(diloco, 1, seed, tokens=10 + seed) for seed in range(5)]
    members = [Member(peer_id(i), part.tokens, part.digest) for i, part in enumerate(parts)]
    forward = {part.digest: part.payload for part in parts}
    backward = dict(reversed(forward.items()))
    assert diloco.reduce(1, members, forward).digest == diloco.reduce(1, members, backward).digest


def test_a_pending_result_must_be_merged_before_the_fragment_leaves_again() -> None:
    diloco, local = make(), vectors(1)[1]
    commit(diloco, 1, {A: contribute(diloco, 1, local)})
    with pytest.raises(LocalProtocolError, match="fragment 1: the last result has not been merged yet"):
        diloco.leave(1, local)
    diloco.leave(3, vectors(1)[3])  # the others may


def test_a_record_that_does_not_extend_the_chain_is_a_bug_here() -> None:
    diloco, local = make(), vectors(1)[1]
    mine = contribute(diloco, 1, local)
    members = [Member(A, mine.tokens, mine.digest)]
    reduced = diloco.reduce(1, members, {mine.digest: mine.payload})
    record = signed(diloco, 1, members, reduced)
    diloco.install(1, record, reduced, me=A)
    with pytest.raises(LocalProtocolError, match="fragment 1: record does not extend this chain"):
        diloco.install(1, record, reduced, me=A)


def test_other_bits_than_the_records_are_refused_and_change_nothing() -> None:
    diloco, local = make(), vectors(1)[1]
    mine = contribute(diloco, 1, local)
    members = [Member(A, mine.tokens, mine.digest)]
    reduced = diloco.reduce(1, members, {mine.digest: mine.payload})
    record = signed(diloco, 1, members, dataclasses.replace(reduced, digest=digest("state", [b"other bits"])))
    state = diloco.fragments[1]
    before = state.anchor, state.momentum, state.tip, state.tokens
    with pytest.raises(RemoteProtocolError, match="the record's state differs from the one computed here"):
        diloco.install(1, record, reduced, me=A)
    assert (state.anchor, state.momentum, state.tip, state.tokens, state.pending) == (*before, False)


def test_a_payload_that_does_not_decode_is_the_senders_fault() -> None:
    diloco = make()
    short = b"\x00" * 4
    member = Member(A, 1, payload_digest(short))
    with pytest.raises(RemoteProtocolError):
        diloco.reduce(1, [member], {member.payload: short})


def test_after_a_commit_the_tip_is_the_records() -> None:
    diloco, local = make(), vectors(1)[1]
    diloco.trained(10)
    reduced = commit(diloco, 1, {A: contribute(diloco, 1, local)})
    state = diloco.fragments[1]
    assert state.record is not None
    assert state.tip == after(state.record.record)
    assert state.record.record.state == reduced.digest == state_digest(state.anchor, state.momentum)
    assert (state.tip.tokens_total, state.tip.electors) == (10, (A,))


def test_a_fragment_without_weights_works() -> None:
    diloco = make("e3m0")
    commit(diloco, 2, {A: contribute(diloco, 2, vectors(1)[2])})
    assert diloco.come_back(2, vectors(1)[2]).size == 0


def test_an_earlier_attempt_that_was_counted_after_all_is_merged_and_only_its_tokens_are_taken_off() -> None:
    diloco = make()
    local = [weights + 1 for weights in vectors(0)]
    diloco.trained(100)
    first = contribute(diloco, 1, local[1])
    diloco.trained(30)
    second = contribute(diloco, 1, local[1] + 1)
    assert (first.tokens, second.tokens) == (100, 130)
    commit(diloco, 1, {A: first})
    state = diloco.fragments[1]
    assert state.tokens == 30
    assert state.merge_with is state.anchor
    assert state.shift is None
    assert state.attempts == {}


@pytest.mark.parametrize("way", ["record", "download"])
def test_nothing_of_an_earlier_attempt_is_contributed_twice(way: str) -> None:
    diloco, elsewhere = make(alpha=0.0), make(alpha=0.0)
    local = vectors(1)[1]
    diloco.trained(100)
    first = contribute(diloco, 1, local)  # its round looks aborted here
    diloco.trained(30)
    local = local - np.float32(0.125)
    contribute(diloco, 1, local)
    commit(elsewhere, 1, {A: first, B: foreign(elsewhere, 1, 2)})
    theirs, state = elsewhere.fragments[1], diloco.fragments[1]
    reduced, record = seal(theirs.anchor, theirs.momentum), theirs.record
    assert record is not None
    if way == "record":
        assert diloco.install(1, record, reduced, me=A)
    else:
        diloco.replace(1, reduced, record, me=A)
    assert (state.tip, state.tokens, state.attempts) == (theirs.tip, 30, {})
    merged = diloco.come_back(1, local)
    assert merged.tobytes() == state.anchor.tobytes()  # alpha 0: the work in the anchor is here once, not twice
    diloco.trained(5)
    third = contribute(diloco, 1, merged)
    assert third.tokens == 35
    assert not np.frombuffer(third.payload, "<f4").any()


@pytest.mark.parametrize("way", ["record", "download"])
def test_the_same_bytes_in_another_peers_name_are_not_this_peers(way: str) -> None:
    diloco, elsewhere = make(alpha=0.0), make(alpha=0.0)
    diloco.trained(100)
    mine = contribute(diloco, 1, vectors(1)[1])
    commit(elsewhere, 1, {B: mine})
    theirs, state = elsewhere.fragments[1], diloco.fragments[1]
    reduced, record = seal(theirs.anchor, theirs.momentum), theirs.record
    assert record is not None
    if way == "record":
        assert not diloco.install(1, record, reduced, me=A)
    else:
        diloco.replace(1, reduced, record, me=A)
    assert state.tokens == 100
    assert state.merge_with is None
    assert state.shift is not None


def test_a_record_that_counts_what_never_left_here_is_no_reason_to_merge() -> None:
    diloco = make()
    diloco.trained(100)
    contribute(diloco, 1, vectors(1)[1])
    commit(diloco, 1, {A: foreign(diloco, 1, 5)})
    state = diloco.fragments[1]
    assert state.tokens == 100
    assert state.merge_with is None
    assert state.shift is not None


def test_after_a_resume_a_contribution_of_the_time_since_the_checkpoint_counts_all_the_work_there_is() -> None:
    diloco = make()
    diloco.trained(100)
    state = diloco.fragments[1]
    state.resumed = True
    commit(diloco, 1, {A: foreign(diloco, 1, 5)})
    assert (state.tokens, state.shift) == (0, None)
    assert state.merge_with is state.anchor
    # once something has left in this life, what is not known was not this peer's
    diloco.come_back(1, vectors(1)[1])
    diloco.trained(50)
    contribute(diloco, 1, vectors(2)[1])
    commit(diloco, 1, {A: foreign(diloco, 1, 5)})
    assert state.tokens == 50
    assert state.shift is not None


def test_after_a_resume_the_second_record_may_be_the_one_that_counts_the_rest() -> None:
    diloco = make()
    diloco.trained(100)
    state = diloco.fragments[1]
    first = contribute(diloco, 1, vectors(1)[1])
    diloco.trained(30)
    state.resumed = True  # as restored from a checkpoint of now
    commit(diloco, 1, {A: first})
    assert state.tokens == 30
    commit(diloco, 1, {A: foreign(diloco, 1, 5)})  # left in the life before, with those 30
    assert state.tokens == 0


@pytest.mark.parametrize(("clean", "skipped", "left"), [(False, 1, 0), (False, 0, 100), (True, 1, 100)])
def test_commits_that_a_download_skips_may_have_counted_the_work_of_a_life_that_was_cut_off(
    clean: bool, skipped: int, left: int
) -> None:
    ahead, diloco = make(), make()
    diloco.trained(100)
    state = diloco.fragments[1]
    state.resumed, state.clean = True, clean
    for _ in range(1 + skipped):
        commit(ahead, 1, {B: foreign(ahead, 1, 5)})
    there = ahead.fragments[1]
    assert there.record is not None
    diloco.replace(1, seal(there.anchor, there.momentum), there.record, me=A)
    assert state.tokens == left
    assert (state.merge_with is None) == bool(left)


def test_attempts_from_one_anchor_are_bounded() -> None:
    diloco = make()
    for number in range(MAX_ATTEMPTS + 5):
        diloco.trained(1)
        latest = contribute(diloco, 1, vectors(number)[1])
    assert list(diloco.fragments[1].attempts.values()) == list(range(6, MAX_ATTEMPTS + 6))  # the oldest are dropped
    assert diloco.fragments[1].attempts[latest.digest] == MAX_ATTEMPTS + 5


def test_encoding_elsewhere_gives_the_same_contribution() -> None:
    diloco = make("e3m0")
    diloco.trained(7)
    local = vectors(3)[3]
    elsewhere = diloco.leave_with(3, lambda anchor: (diloco.codec.encode(anchor - local), outer.norm(anchor - local)))
    assert elsewhere == diloco.leave(3, local.copy(), consume=True)


# ---------------------------------------------------------------------- in parts


def in_parts(diloco: StreamingDiLoCo, members: list[Member], payloads: dict[bytes, bytes]) -> Reduced:
    """The step that a group takes which reduces 600 values of fragment 0 in two parts."""
    averages, found, start = {}, [], 0
    for stop in (256, 600):
        cuts = [diloco.codec.cut(payloads[x.payload], 600, start, stop) for x in members]
        data = diloco.reduce_part(members, cuts, stop - start)
        assert len(data) == diloco.down.nbytes(stop - start)
        averages[payload_digest(data)] = data
        found.append(Part(stop, payload_digest(data)))
        start = stop
    return diloco.apply(0, found, averages)


def five(codec: str, down: str, *norms: float) -> tuple[StreamingDiLoCo, list[Member], dict[bytes, bytes]]:
    """A fragment of 600 values and five contributions to it."""
    random = np.random.default_rng(9)
    diloco = StreamingDiLoCo(toy_config(codec=codec, down=down), [random.normal(size=600).astype(np.float32)])
    given = [diloco.codec.encode(np.float32(0.1) * random.normal(size=600).astype(np.float32)) for _ in range(5)]
    members = [
        Member(peer, 100 + index, payload_digest(payload), norms[index] if norms else 1.0)
        for index, (peer, payload) in enumerate(zip(sorted(map(peer_id, range(5))), given, strict=True))
    ]
    return diloco, members, {payload_digest(payload): payload for payload in given}


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("norms", [(), (1.0, 1.0, 100.0, 1.0, 1.0)])
def test_in_parts_the_step_has_the_same_bits_as_from_whole_contributions(codec: str, norms: tuple[float, ...]) -> None:
    diloco, members, payloads = five(codec, "fp32", *norms)
    whole, parts = diloco.reduce(0, members, payloads), in_parts(diloco, members, payloads)
    assert parts.digest == whole.digest
    assert parts.anchor.tobytes() == whole.anchor.tobytes()
    assert parts.momentum.tobytes() == whole.momentum.tobytes()


@pytest.mark.parametrize(("down", "error"), [("int8", 0.012), ("e3m0", 0.21)])
def test_in_parts_only_the_average_is_encoded_once_more(down: str, error: float) -> None:
    diloco, members, payloads = five("fp32", down)
    # from zero momentum the new momentum is the average
    exact, got = diloco.reduce(0, members, payloads).momentum, in_parts(diloco, members, payloads).momentum
    assert 0 < np.linalg.norm(got - exact) <= error * np.linalg.norm(exact)


def test_a_slice_or_an_average_that_does_not_decode_is_the_senders_fault() -> None:
    diloco, members, _ = five("fp32", "int8")
    with pytest.raises(RemoteProtocolError):
        diloco.reduce_part(members[:1], [bytes(1020)], 256)
    short = Part(600, payload_digest(b""))
    with pytest.raises(RemoteProtocolError):
        diloco.apply(0, [short], {short.payload: b""})


def test_a_contribution_that_is_not_finite_or_far_too_large_does_not_leave() -> None:
    diloco = make()
    before = dict(diloco.fragments[1].attempts)
    for size in (float("inf"), float("nan"), 1.1 * MAX_NORM):
        with pytest.raises(LocalProtocolError, match="fragment 1: the outer gradient's norm is"):
            diloco.leave_with(1, lambda anchor, size=size: (bytes(256), size))  # type: ignore[misc]
    assert diloco.fragments[1].attempts == before


def test_with_error_feedback_the_announced_norm_covers_what_is_added() -> None:
    config = dataclasses.replace(toy_config(), wire=WireConfig(up="e3m0", down="int8", error_feedback=True))
    diloco, local = StreamingDiLoCo(config, vectors(0)), vectors(1)[1]
    first = contribute(diloco, 1, local)
    commit(diloco, 1, {A: first})
    local = diloco.come_back(1, local)
    state = diloco.fragments[1]
    assert state.residual is not None
    second = contribute(diloco, 1, local)
    assert second.norm == outer.norm(state.anchor - local) + outer.norm(state.residual)
    sent = diloco.codec.decode(second.payload, 64)
    assert outer.norm(sent) <= 1.5 * second.norm
