"""Error feedback: sums stay right, and a residual is in force only when its contribution was counted."""

import dataclasses

import numpy as np
import pytest

from stretto.protocol import feedback, outer
from stretto.protocol.chain import CommitRecord, Member, SignedRecord, after
from stretto.protocol.codecs import get_codec
from stretto.protocol.config import RunConfig, WireConfig
from stretto.protocol.digest import payload_digest, state_digest
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.outer import Vector
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import Network, Simulation, peer_id
from stretto.protocol.streaming import Contribution, Reduced, StreamingDiLoCo
from tests.fakes import QuadraticReplica, outer_states, toy_config

A, B = sorted(peer_id(index) for index in range(2))
N = 700
ROUNDS = 12


def normal(seed: int, n: int = N) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def config(codec: str = "e1m0", *, on: bool = True, **fields: float) -> RunConfig:
    return dataclasses.replace(toy_config(**fields), wire=WireConfig(up=codec, error_feedback=on))  # type: ignore[arg-type]


def make(*, on: bool = True) -> StreamingDiLoCo:
    return StreamingDiLoCo(config(on=on, fragments=1), [normal(0)])


def contribute(diloco: StreamingDiLoCo, local: Vector) -> Contribution:
    contribution = diloco.leave(0, local)
    diloco.left(contribution)
    return contribution


def commit(diloco: StreamingDiLoCo, contribution: Contribution, *, counted: bool) -> None:
    """A round with this contribution alone: the own one if ``counted``."""
    member = Member(A if counted else B, 1, contribution.digest)
    reduced = diloco.reduce(0, [member], {contribution.digest: contribution.payload})
    tip = diloco.fragments[0].tip
    record = CommitRecord(
        run=diloco.config.digest(), fragment=0, round=0, version=tip.version + 1, prev=tip.head, members=(member,),
        electors=(member.peer,), state=reduced.digest, tokens_total=tip.tokens_total + 1, clock=Clock(1, 0.0, 1.0),
        coordinator=member.peer,
    )  # fmt: skip
    assert diloco.install(0, SignedRecord(record, bytes(64)), reduced, me=A) == counted


def foreign(diloco: StreamingDiLoCo) -> Contribution:
    payload = diloco.codec.encode(normal(9))
    return Contribution(0, diloco.fragments[0].tip.head, payload, payload_digest(payload), 1)


def accumulated_error(codec: str, *, on: bool, peers: int = 4) -> float:
    """Relative error of the sum of 12 averages, whose gradients share a direction, as those of a real run do."""
    wire = get_codec(codec)
    residuals: list[Vector | None] = [None] * peers
    right, sent = np.zeros(N), np.zeros(N)
    for round in range(ROUNDS):
        for peer in range(peers):
            gradient = normal(1000) + normal(peer + peers * round)
            right += gradient
            payload, left = feedback.encode(gradient, residuals[peer], wire)
            sent += wire.decode(payload, N)
            residuals[peer] = left if on else None
    return float(np.linalg.norm(sent - right) / np.linalg.norm(right))


@pytest.mark.parametrize(("codec", "without", "with_"), [("e1m0", 0.19, 0.095), ("e3m0", 0.05, 0.015)])
def test_the_error_of_the_sum_of_many_averages_falls(codec: str, without: float, with_: float) -> None:
    plain, fed = accumulated_error(codec, on=False), accumulated_error(codec, on=True)
    assert plain > without
    assert fed < with_
    assert fed < plain / 2


@pytest.mark.parametrize("codec", ["e1m0", "e2m1", "e3m0", "int8"])
def test_what_was_sent_and_the_residual_sum_to_the_gradients(codec: str) -> None:
    wire, residual = get_codec(codec), None
    right, sent = np.zeros(N), np.zeros(N)
    for round in range(ROUNDS):
        right += normal(round)
        payload, residual = feedback.encode(normal(round), residual, wire)
        sent += wire.decode(payload, N)
    assert residual is not None
    np.testing.assert_allclose(sent + residual, right, rtol=0, atol=1e-5)
    assert np.linalg.norm(residual) < np.linalg.norm(normal(0))


def test_the_first_round_is_the_plain_codec_and_the_old_residual_is_only_read() -> None:
    wire, x = get_codec("e1m0"), normal(1)
    payload, first = feedback.encode(x.copy(), None, wire)
    assert payload == wire.encode(x)
    assert first.tobytes() == (x - wire.decode(payload, N)).tobytes()
    kept = first.copy()
    payload, second = feedback.encode(normal(2), first, wire)
    assert payload == wire.encode(normal(2) + kept)
    assert first.tobytes() == kept.tobytes()
    assert second is not first


def test_without_it_nothing_is_kept() -> None:
    diloco = make(on=False)
    mine = contribute(diloco, normal(1))
    assert mine.residual is None
    commit(diloco, mine, counted=True)
    assert diloco.fragments[0].residual is None


def test_a_counted_contribution_leaves_its_residual_to_the_next() -> None:
    diloco, local = make(), normal(1)
    state = diloco.fragments[0]
    gradient = outer.outer_gradient(state.anchor, local)
    mine = contribute(diloco, local)
    assert state.residual is None  # not before the commit
    expected = gradient - diloco.codec.decode(mine.payload, N)
    commit(diloco, mine, counted=True)
    assert state.residual is not None
    assert state.residual.tobytes() == expected.tobytes()
    local = diloco.come_back(0, local)
    later = diloco.leave(0, local)
    assert later.payload == diloco.codec.encode(outer.outer_gradient(state.anchor, local) + expected)
    assert state.residual.tobytes() == expected.tobytes()


def counted_once(diloco: StreamingDiLoCo) -> tuple[Vector, Vector]:
    """Local weights, and a residual that is in force."""
    local = normal(1)
    commit(diloco, contribute(diloco, local), counted=True)
    residual = diloco.fragments[0].residual
    assert residual is not None
    assert residual.any()
    return diloco.come_back(0, local), residual


def test_an_aborted_round_leaves_the_residual_as_it_was() -> None:
    diloco = make()
    local, residual = counted_once(diloco)
    state, before = diloco.fragments[0], residual.tobytes()
    aborted = contribute(diloco, local)
    assert state.residual is residual
    # nothing is installed: the next one is made of the same residual, and only it is counted
    local = local - np.float32(0.1)
    mine = contribute(diloco, local)
    x = outer.outer_gradient(state.anchor, local) + residual
    assert mine.payload == diloco.codec.encode(x) != aborted.payload
    commit(diloco, mine, counted=True)
    assert state.residual is not None
    assert state.residual.tobytes() == (x - diloco.codec.decode(mine.payload, N)).tobytes()
    assert residual.tobytes() == before


def test_a_round_that_did_not_count_this_peer_leaves_the_residual_as_it_was() -> None:
    diloco = make()
    local, residual = counted_once(diloco)
    state = diloco.fragments[0]
    contribute(diloco, local)
    commit(diloco, foreign(diloco), counted=False)
    assert state.residual is residual
    # the dropped candidate cannot come into force later, by a commit that this peer took no part in
    assert state.residual_left is None


@pytest.mark.parametrize("counted", [False, True])
def test_a_downloaded_state_begins_with_no_residual(counted: bool) -> None:
    diloco, ahead = make(), make()
    local, _ = counted_once(diloco)
    mine = contribute(diloco, local)
    commit(ahead, mine if counted else foreign(ahead), counted=False)
    theirs = ahead.fragments[0]
    copy = Reduced(theirs.anchor, theirs.momentum, state_digest(theirs.anchor, theirs.momentum))
    assert theirs.record is not None
    members = (Member(A if counted else B, 1, mine.digest if counted else theirs.record.record.members[0].payload),)
    electors = tuple(member.peer for member in members)
    record = dataclasses.replace(theirs.record.record, members=members, electors=electors)
    diloco.replace(0, copy, SignedRecord(record, bytes(64)), me=A)
    assert (diloco.fragments[0].merge_with is not None) == counted
    assert (diloco.fragments[0].residual, diloco.fragments[0].residual_left) == (None, None)


def test_reloading_the_anchor_forgets_what_hung_on_the_local_weights() -> None:
    diloco = make()
    diloco.trained(100)
    local, _ = counted_once(diloco)
    state = diloco.fragments[0]
    mine = contribute(diloco, local)
    commit(diloco, foreign(diloco), counted=False)
    assert state.pending
    assert diloco.reload(0) is state.anchor
    assert (state.residual, state.residual_left, state.pending, state.tokens) == (None, None, False, 0)
    # a contribution that is under way still counts, but neither its tokens nor its residual come back
    diloco.trained(10)
    mine = contribute(diloco, local)
    diloco.reload(0)
    commit(diloco, mine, counted=True)
    assert (state.residual, state.tokens) == (None, 0)
    assert state.tip == after(state.record.record)  # type: ignore[union-attr]


def test_weights_that_are_not_finite_leave_the_residual_alone() -> None:
    diloco = make()
    local, residual = counted_once(diloco)
    local[3] = np.nan
    with pytest.raises(LocalProtocolError, match="value 3 is nan, which e1m0 cannot hold"):
        diloco.leave(0, local)
    assert diloco.fragments[0].residual is residual


@pytest.mark.parametrize("codec", ["e1m0", "e3m0"])
def test_anchors_stay_bit_identical_while_rounds_are_lost(codec: str) -> None:
    network = Network(delay=0.1, jitter=0.3)
    replicas = [QuadraticReplica(index) for index in range(4)]
    simulation = Simulation(config(codec), replicas, tau=[0, 1, 3, 3], network=network, window=1.0)
    simulation.run(8)
    network.drop = 0.15
    simulation.run(16)
    network.drop = 0.0
    simulation.run(28)
    simulation.settle()
    states = outer_states(simulation)
    assert states[1:] == states[:-1]
    assert any(not over.counted for _, over in simulation.over)  # rounds were really lost
    assert len(simulation.committed()) >= 20
    residuals = [sim.peer.diloco.fragments[0].residual for sim in simulation.peers]
    assert all(residual is not None and residual.any() for residual in residuals)
