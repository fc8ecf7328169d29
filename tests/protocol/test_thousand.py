"""A thousand peers: rounds, clock, quorum and repair hold as among four, and a peer's cost does not grow."""

import random
import time

import numpy as np

from stretto.protocol.actions import Committed
from stretto.protocol.outer import Vector
from stretto.protocol.simnet import Network
from stretto.protocol.simulation import Simulation, peer_id
from tests.fakes import toy_config

GROUP = 16
HEARS = 16


class TinyReplica:
    """Four values per fragment that walk towards a target of their own."""

    def __init__(self, index: int) -> None:
        self.weights = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
        self.target = np.random.default_rng(index).normal(size=4).astype(np.float32)

    def step(self) -> int:
        for weights in self.weights:
            weights += np.float32(0.05) * (self.target - weights)
        return 100

    def get(self, fragment: int) -> Vector:
        return self.weights[fragment].copy()

    def set(self, fragment: int, weights: Vector) -> None:
        self.weights[fragment] = weights.copy()


def swarm(count: int) -> Simulation:
    return Simulation(
        toy_config(inner_steps=4, fragments=2, tau_max=2, max_size=GROUP),
        [TinyReplica(index) for index in range(count)],
        tau=[1] * count,
        network=Network(delay=0.01, encoded=False),
        window=0.5,
        hears=HEARS,
    )


def commits(simulation: Simulation) -> dict[int, set[bytes]]:
    """By round: the heads of all records that anybody saw."""
    found: dict[int, set[bytes]] = {}
    for _, over in simulation.over:
        if isinstance(over.outcome, Committed):
            record = over.outcome.signed.record
            found.setdefault(record.round, set()).add(record.head())
    return found


def cost(simulation: Simulation, rounds: int) -> float:
    """Seconds of CPU per peer and round of playing on to round ``rounds``."""
    before, began = len(simulation.committed()), time.process_time()
    simulation.run(rounds)
    return (time.process_time() - began) / (rounds - before) / len(simulation.peers)


def test_a_thousand_peers_commit_every_round_lose_twenty_and_take_five_back() -> None:
    simulation = swarm(1000)
    simulation.run(3)
    victims = random.Random(1).sample(range(1000), 20)
    for index in victims:
        simulation.crash(index)
    simulation.run(5)
    for index in victims[:5]:
        simulation.restart(index, TinyReplica(index))
    simulation.run(8)
    simulation.settle()

    # every round was decided, once
    assert {round: len(heads) for round, heads in commits(simulation).items()} == dict.fromkeys(range(8), 1)
    assert not simulation.refused

    # every living peer has every fragment's end, those that came back and those that no round had room for too
    living = [sim for sim in simulation.peers if sim.alive]
    assert len(living) == 985
    assert not any(sim.joining for sim in living)
    assert len({tuple(tip.head for tip in sim.peer.tips()) for sim in living}) == 1
    assert [tip.version for tip in living[0].peer.tips()] == [4, 4]
    assert len({state.anchor.tobytes() for sim in living for state in sim.peer.diloco.fragments}) == 2

    # one clock, and it is the schedule's: a round every H / P = 2 steps
    clocks = {sim.peer.clock for sim in living}
    assert len(clocks) == 1
    assert simulation.clock().interval == 2.0

    # groups were full, and nobody is counted who was gone
    gone = {peer_id(index) for index in victims[5:]}
    records = {
        over.outcome.signed.record.round: over.outcome.signed.record
        for _, over in simulation.over
        if isinstance(over.outcome, Committed)
    }
    assert all(len(record.members) == GROUP for record in records.values())
    assert not any(member.peer in gone for round in (5, 6, 7) for member in records[round].members)


def test_without_a_quorum_of_the_last_group_nothing_is_decided() -> None:
    simulation = swarm(200)
    simulation.run(4)
    before = simulation.committed()
    state = simulation.peers[0].peer.diloco.fragments[0]
    assert state.record is not None
    electors = [member.peer for member in state.record.record.members]
    numbers = {peer_id(index): index for index in range(200)}
    for peer in electors[: GROUP // 2 + 1]:
        simulation.crash(numbers[peer])
    simulation.run(8)
    decided = simulation.committed() - before
    assert all(round % 2 == 1 for round in decided), "a minority of the electors went on with their fragment"


def test_the_cost_of_a_peer_does_not_grow_with_the_swarm() -> None:
    small, large = swarm(125), swarm(1000)
    costs = [(cost(small, 2 * part), cost(large, 2 * part)) for part in (1, 2)]
    assert min(b for _, b in costs) < 3 * min(a for a, _ in costs), costs
