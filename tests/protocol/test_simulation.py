"""Whole swarms in virtual time: equal bits, no lost work, the paper's numbers, and every way of losing peers."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stretto.protocol import outer
from stretto.protocol.errors import ConfigError
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Over
from stretto.protocol.rounds import Aborted, Committed
from stretto.protocol.simulation import Network, SimPeer, Simulation, peer_id
from tests.fakes import QuadraticReplica, TorchReplica, outer_states, toy_config

torch.set_num_threads(1)

TOKENS = (100, 30, 400, 90)


def swarm(count: int = 4, **fields: float) -> list[QuadraticReplica]:
    """Replicas with targets of their own and unequal token counts."""
    return [QuadraticReplica(index, tokens=TOKENS[index % 4], **fields) for index in range(count)]  # type: ignore[arg-type]


def heads_equal(simulation: Simulation) -> bool:
    living = [sim.peer.tips() for sim in simulation.peers if sim.alive]
    return all([tip.head for tip in tips] == [tip.head for tip in living[0]] for tips in living)


def records(simulation: Simulation) -> dict[bytes, Committed]:
    """All decisions that any peer saw, by the head of the chain that ends with them."""
    outcomes = [over.outcome for _, over in simulation.over]
    return {o.signed.record.head(): o for o in outcomes if isinstance(o, Committed)}


def assert_one_history(simulation: Simulation) -> None:
    """No two records extend the same head, and equal heads mean equal bits."""
    seen = [o.signed.record for o in records(simulation).values()]
    assert len({record.prev for record in seen}) == len(seen), "a chain was forked"
    bits: dict[bytes, tuple[bytes, bytes]] = {}
    for sim in simulation.peers:
        for state in sim.peer.diloco.fragments:
            mine = state.anchor.tobytes(), state.momentum.tobytes()
            assert bits.setdefault(state.tip.head, mine) == mine


def reasons(simulation: Simulation) -> set[str]:
    return {over.outcome.reason for _, over in simulation.over if isinstance(over.outcome, Aborted)}


# ---------------------------------------------------------------------- (3) equal bits


@pytest.mark.parametrize("late", [False, True], ids=["in_time", "late"])
@pytest.mark.parametrize("lost", ["none", "drop", "cut"])
@pytest.mark.parametrize("tau", [0, 1, 5, 9])
def test_anchors_and_momentum_are_bit_identical(tau: int, lost: str, late: bool) -> None:
    network = Network(delay=0.1, jitter=tau + 1.5 if late else 0.3)
    simulation = Simulation(
        toy_config(inner_steps=80, tau_max=20), swarm(), tau=[tau] * 4, step_times=[1.0, 1.3, 0.7, 2.0],
        network=network, window=network.jitter + 0.5, seed=tau,
    )  # fmt: skip
    for cycle in range(4):
        network.drop = 0.1 if lost == "drop" and cycle in (1, 2) else 0.0
        # cycle 1: one peer alone; cycle 2: nobody has a quorum
        cuts = {1: {(0, 1), (0, 2), (0, 3)}, 2: {(a, b) for a in range(4) for b in range(a)}}
        network.cut = cuts.get(cycle, set()) if lost == "cut" else set()
        simulation.run(4 * (cycle + 1))
        assert_one_history(simulation)
    noisy = len(simulation.committed())
    network.jitter = 0.3
    simulation.run(32)
    simulation.settle()

    states = outer_states(simulation)
    assert states[1:] == states[:-1]
    assert all(sim.peer.diloco.fragments[0].momentum.any() for sim in simulation.peers)
    assert_one_history(simulation)
    # the faults were really there, and the rounds too
    assert noisy >= 4
    assert len(simulation.committed()) > noisy
    if lost == "cut":
        assert simulation.committed().isdisjoint(range(8, 12))
    if lost == "drop":
        assert any(isinstance(over.outcome, Aborted) or not over.counted for _, over in simulation.over)
    overlaps = [overlap for sim in simulation.peers for overlap in sim.overlaps]
    assert min(overlaps) >= tau
    assert (max(overlaps) > tau) if late else True


def test_peers_of_different_tau_meet_in_the_same_bits() -> None:
    taus = [0, 1, 5, 9]
    simulation = Simulation(toy_config(), swarm(), tau=taus)
    simulation.run(20)
    simulation.settle()
    states = outer_states(simulation)
    assert states[1:] == states[:-1]
    assert simulation.committed() == set(range(20))
    assert [set(sim.overlaps) for sim in simulation.peers] == [{tau} for tau in taus]
    assert [len(sim.overlaps) for sim in simulation.peers] == [20] * 4


def test_contributions_are_weighted_by_tokens() -> None:
    simulation = Simulation(toy_config(codec="fp32", fragments=1), swarm(fragments=1))
    simulation.run(1)
    replicas = [sim.replica.get(0) for sim in simulation.peers]
    start = simulation.peers[0].peer.diloco.fragments[0].anchor
    simulation.run(2)
    simulation.settle()
    first = min((o.signed.record for o in records(simulation).values()), key=lambda record: record.version)
    order = sorted(range(4), key=peer_id)
    assert [x.tokens for x in first.members] == [20 * TOKENS[index] for index in order]
    # 400 is bounded to 4 x the median of (30, 90, 100, 400), 380
    weights = [min(TOKENS[index], 380) for index in order]
    gradient = np.zeros_like(start)
    for index, weight in zip(order, weights, strict=True):
        gradient += np.float32(weight / sum(weights)) * (start - replicas[index])
    anchor, momentum = outer.nesterov(start, np.zeros_like(start), gradient, lr=0.4, momentum_factor=0.9)
    from stretto.protocol.digest import state_digest

    assert first.state == state_digest(anchor, momentum)


# ---------------------------------------------------------------------- (3) a lost round loses no work


def test_an_aborted_round_loses_no_work() -> None:
    config = toy_config(codec="fp32", fragments=1, min_size=2, alpha=0.0)
    network = Network(cut={(0, 1)})
    simulation = Simulation(config, swarm(2, fragments=1), network=network)
    before = outer_states(simulation)
    start = simulation.peers[0].peer.diloco.fragments[0].anchor
    simulation.run(1)
    simulation.settle_results = None  # type: ignore[attr-defined]
    simulation.run(2)  # round 0 departs and is aborted; just before round 1
    assert simulation.committed() == set()
    assert reasons(simulation) == {"waiting for 1 more peer(s): 1 of 2 are here"}
    assert outer_states(simulation) == before
    gradients = []
    for sim in simulation.peers:
        assert sim.steps == 39
        replica = sim.replica
        assert isinstance(replica, QuadraticReplica)
        contribution = sim.peer.diloco.leave(0, replica.get(0))
        gradient = np.frombuffer(contribution.payload, "<f4")
        gradients.append(gradient)
        # the work of both cycles, and the tokens of both
        np.testing.assert_allclose(gradient, -replica.work[0], rtol=0, atol=1e-6)
        assert contribution.tokens == 39 * TOKENS[sim.index]
    network.cut.clear()
    simulation.run(3)
    assert simulation.committed() == {1}
    record = next(iter(records(simulation).values())).signed.record
    assert sorted(x.tokens for x in record.members) == sorted(40 * t for t in TOKENS[:2])
    assert np.abs(simulation.peers[0].peer.diloco.fragments[0].anchor - start).max() > 0.01


class _LosesPushes(Simulation):
    """The contributions of one peer never reach the others, though all messages do."""

    victim = 2
    rounds = range(4, 8)

    def _pushed(self, sim: SimPeer, target: SimPeer, round: int, payload: bytes) -> None:
        if sim.index != self.victim or round not in self.rounds:
            super()._pushed(sim, target, round, payload)


def _gradient(sim: SimPeer, fragment: int) -> Vector:
    return sim.peer.diloco.fragments[fragment].anchor - sim.replica.get(fragment)


@pytest.mark.parametrize("tau", [0, 5])
@pytest.mark.parametrize("way", ["late", "download"])
def test_a_peer_that_was_not_counted_keeps_its_uncounted_work(way: str, tau: int) -> None:
    config = toy_config(codec="fp32", alpha=0.0)
    network = Network()
    kind = _LosesPushes if way == "late" else Simulation
    simulation = kind(config, swarm(3), tau=[tau] * 3, network=network, window=1.0)
    simulation.run(4)
    victim = simulation.peers[2]
    replica = victim.replica
    assert isinstance(replica, QuadraticReplica)
    simulation.run(5)  # round 4 is fragment 0's second departure; without settling nothing of it shows yet
    del simulation.over[:]

    simulation2 = kind(config, swarm(3), tau=[tau] * 3, network=network, window=1.0)
    simulation2.run(4)
    sim = simulation2.peers[2]
    replica = sim.replica
    assert isinstance(replica, QuadraticReplica)
    # all results of the first cycle but fragment 3's are merged; look at fragment 0
    gradient, work, steps = _gradient(sim, 0), replica.work[0].copy(), sim.steps
    version = sim.peer.tips()[0].version
    anchor = sim.peer.diloco.fragments[0].anchor
    if way == "download":
        network.cut = {(2, 0), (2, 1)}
        simulation2.run(5)
        network.cut = set()
    simulation2.run(8)
    assert (version, sim.peer.tips()[0].version) == (1, 2)
    outcomes = [over for index, over in simulation2.over if index == 2 and over.round == 4]
    assert [over.counted for over in outcomes] == [False]
    assert np.abs(sim.peer.diloco.fragments[0].anchor - anchor).max() > 0.01
    # anchor_new - local_new = anchor_old - local_old - the work done since
    np.testing.assert_allclose(_gradient(sim, 0), gradient - (replica.work[0] - work), rtol=0, atol=1e-5)
    # and the next contribution weighs as many tokens as it holds: from the merge of round 0 on, none is forgotten
    tokens = sim.peer.diloco.leave(0, replica.get(0)).tokens
    assert tokens == (sim.steps - 20) * TOKENS[2]
    assert sim.steps > steps
