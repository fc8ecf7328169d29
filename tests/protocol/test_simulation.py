"""Whole swarms in virtual time: equal bits, no lost work, the paper's numbers, and every way of losing peers."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.protocol import outer
from stretto.protocol.actions import Aborted, Committed, Outrun
from stretto.protocol.digest import digest, state_digest
from stretto.protocol.effects import FetchFrom
from stretto.protocol.errors import ConfigError
from stretto.protocol.outer import Vector
from stretto.protocol.rounds import rendezvous_order
from stretto.protocol.simnet import Arrival, Network
from stretto.protocol.simulation import Header, Replica, SimPeer, Simulation, peer_id
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
    """Where a chain forks, at most one branch grows; and equal heads mean equal bits.

    A coordinator whose decision nobody hears makes a branch of one record: its quorum then goes on without it. The
    founding record has no electors, so peers that cannot hear each other at the founding may found side by side.
    """
    seen = [o.signed.record for o in records(simulation).values()]
    extended = Counter(record.prev for record in seen if record.head() in {child.prev for child in seen})
    founded = {record.prev for record in seen if record.version == 1}
    assert all(count == 1 for prev, count in extended.items() if prev not in founded), "both branches of a fork grew"
    bits: dict[bytes, tuple[bytes, bytes]] = {}
    for sim in simulation.peers:
        for state in sim.peer.diloco.fragments:
            mine = state.anchor.tobytes(), state.momentum.tobytes()
            assert bits.setdefault(state.tip.head, mine) == mine


def assert_no_fork(simulation: Simulation) -> None:
    """No two records extend the same head."""
    seen = [o.signed.record for o in records(simulation).values()]
    assert len({record.prev for record in seen}) == len(seen)


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
    if lost != "drop" and not late:
        assert_no_fork(simulation)
    if lost == "cut" and not late:  # late, the electors may have shrunk to one peer, which goes on alone
        assert not set(range(4, 16)) <= simulation.committed()
        assert any(reason.startswith("no quorum: 1 of") for reason in reasons(simulation))
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
    start = simulation.peers[0].peer.diloco.fragments[0].anchor
    simulation.run(1)
    alone = swarm(fragments=1)
    for replica in alone:
        for _ in range(20):
            replica.step()
    first = min((o.signed.record for o in records(simulation).values()), key=lambda record: record.version)
    order = sorted(range(4), key=peer_id)
    assert [x.tokens for x in first.members] == [20 * TOKENS[index] for index in order]
    # 400 is bounded to 4 x the median of (30, 90, 100, 400), 380
    weights = [min(TOKENS[index], 380) for index in order]
    gradient = np.zeros_like(start)
    for index, weight in zip(order, weights, strict=True):
        gradient += np.float32(weight / sum(weights)) * (start - alone[index].get(0))
    anchor, momentum = outer.nesterov(start, np.zeros_like(start), gradient, lr=0.4, momentum_factor=0.9)
    assert first.state == state_digest(anchor, momentum)


# ---------------------------------------------------------------------- (3) a lost round loses no work


def test_an_aborted_round_loses_no_work() -> None:
    config = toy_config(codec="fp32", fragments=1, min_size=2, alpha=0.0)
    network = Network(cut={(0, 1)})
    simulation = Simulation(config, swarm(2, fragments=1), network=network)
    before = outer_states(simulation)
    start = simulation.peers[0].peer.diloco.fragments[0].anchor
    simulation.run(1)  # round 0 departs after step 20; round 1 would be next
    assert reasons(simulation) == {"waiting for 1 more peer(s): 1 of 2 are here"}
    assert simulation.committed() == set()
    assert outer_states(simulation) == before
    for sim in simulation.peers:
        contribution = sim.peer.diloco.leave(0, sim.replica.get(0))
        gradient = np.frombuffer(contribution.payload, "<f4")
        # the work of both cycles, and the tokens of both
        assert sim.steps == 39
        np.testing.assert_allclose(gradient, -_quadratic(sim).work[0], rtol=0, atol=1e-6)
        assert contribution.tokens == 39 * TOKENS[sim.index]
    network.cut.clear()
    simulation.run(2)
    assert simulation.committed() == {1}
    record = next(iter(records(simulation).values())).signed.record
    assert sorted(x.tokens for x in record.members) == sorted(40 * tokens for tokens in TOKENS[:2])
    assert np.abs(simulation.peers[0].peer.diloco.fragments[0].anchor - start).max() > 0.01


class _LosesPushes(Simulation):
    """From round 4 on, what peer 2 contributes never reaches the others, though all its messages do."""

    def _pushed(self, sim: SimPeer, target: SimPeer, header: Header, data: bytes, tries: int = 16) -> None:
        if sim.index != 2 or header.round < 4:
            super()._pushed(sim, target, header, data, tries)


def _quadratic(sim: SimPeer) -> QuadraticReplica:
    assert isinstance(sim.replica, QuadraticReplica)
    return sim.replica


def _gradient(sim: SimPeer) -> Vector:
    return outer.outer_gradient(sim.peer.diloco.fragments[0].anchor, sim.replica.get(0))


@pytest.mark.parametrize("tau", [0, 5])
@pytest.mark.parametrize("way", ["late", "download"])
def test_a_peer_that_was_not_counted_keeps_its_uncounted_work(way: str, tau: int) -> None:
    network = Network()
    kind = _LosesPushes if way == "late" else Simulation
    # alpha 0 would throw local weights away, if the result were merged as usual
    config = toy_config(codec="fp32", alpha=0.0)
    simulation = kind(config, swarm(3), tau=[tau] * 3, network=network, window=1.0)
    simulation.run(4)  # fragment 0 has left at step 20 and come back; round 4 will be its second
    sim = simulation.peers[2]
    before, work = _gradient(sim), _quadratic(sim).work[0].copy()
    anchor = sim.peer.diloco.fragments[0].anchor
    assert sim.peer.tips()[0].version == 1
    if way == "download":
        network.cut = {(2, 0), (2, 1)}
        simulation.run(5)
        network.cut = set()
    simulation.run(8)

    assert [tip.version for tip in (simulation.peers[0].peer.tips()[0], sim.peer.tips()[0])] == [2, 2]
    assert [over.counted for index, over in simulation.over if index == 2 and over.round == 4] == [False]
    assert np.abs(sim.peer.diloco.fragments[0].anchor - anchor).max() > 0.01
    # anchor_new - local_new = anchor_old - local_old, less the inner updates made since then
    expected = before - (_quadratic(sim).work[0] - work)
    np.testing.assert_allclose(_gradient(sim), expected, rtol=0, atol=1e-5)
    # the next contribution weighs as many tokens as it holds: all since round 0 left
    assert sim.steps == 59
    assert sim.peer.diloco.leave(0, sim.replica.get(0)).tokens == (59 - 20) * TOKENS[2]


class _LosesFetches(Simulation):
    """The last in line to coordinate round 4 misses the others' contributions to it, and cannot fetch them either."""

    @property
    def victim(self) -> int:
        order = rendezvous_order(self.config.digest(), 0, 4, [sim.peer.me for sim in self.peers])
        return [sim.peer.me for sim in self.peers].index(order[-1])

    def _pushed(self, sim: SimPeer, target: SimPeer, header: Header, data: bytes, tries: int = 16) -> None:
        if target.index != self.victim or header.round != 4:
            super()._pushed(sim, target, header, data, tries)

    def _fetch(self, sim: SimPeer, source: SimPeer, effect: FetchFrom) -> None:
        self._carry_out(sim, sim.peer.fetch_failed(source.peer.me, effect.round, self.now))


def test_work_that_was_counted_is_not_contributed_again_after_a_download() -> None:
    simulation = _LosesFetches(toy_config(codec="fp32", alpha=0.0), swarm(3), window=1.0)
    simulation.run(8)
    victim = simulation.victim
    sim, other = simulation.peers[victim], simulation.peers[victim - 1]
    record = other.peer.diloco.fragments[0].record
    assert record is not None
    assert sim.peer.me in {x.peer for x in record.record.members}
    (outcome,) = [over.outcome for index, over in simulation.over if index == victim and over.round == 4]
    assert isinstance(outcome, Outrun)
    assert heads_equal(simulation)
    # only what was trained after the contribution left (step 40) is still owed
    assert sim.peer.diloco.leave(0, sim.replica.get(0)).tokens == (59 - 40) * TOKENS[victim]


# ---------------------------------------------------------------------- (4) references


class Recorder:
    """A replica that notes at which inner step it was read and written."""

    def __init__(self, inner: Replica) -> None:
        self.inner, self.steps = inner, 0
        self.gets: list[tuple[int, int]] = []
        self.sets: list[tuple[int, int]] = []
        self.written: list[tuple[Vector, Vector]] = []
        """Local weights before and after each merge."""

    def step(self) -> int:
        self.steps += 1
        return self.inner.step()

    def get(self, fragment: int) -> Vector:
        self.gets.append((fragment, self.steps))
        return self.inner.get(fragment)

    def set(self, fragment: int, weights: Vector) -> None:
        self.sets.append((fragment, self.steps))
        self.written.append((self.inner.get(fragment).copy(), weights.copy()))
        self.inner.set(fragment, weights)

    def departures(self) -> list[tuple[int, int]]:
        """(fragment, step) of each read that was not for a merge."""
        reads = Counter(self.gets) - Counter(self.sets)
        return sorted(reads.elements(), key=lambda read: (read[1], read[0]))


@pytest.mark.parametrize("tau", [0, 1, 5, 9])
def test_departures_and_merges_follow_the_papers_schedule(tau: int) -> None:
    h, p = 20, 4
    recorders = [Recorder(replica) for replica in swarm(3)]
    simulation = Simulation(toy_config(), recorders, tau=[tau] * 3)
    simulation.run(3 * p)
    simulation.settle()
    # Algorithm 2: fragment q leaves when t - q H / P is a multiple of H, for the first time after H steps
    paper = [(q, h + q * h // p + cycle * h) for cycle in range(3) for q in range(p)]
    for sim, recorder in zip(simulation.peers, recorders, strict=True):
        initial = [(q, 0) for q in range(p)]
        assert recorder.departures() == initial + paper
        assert recorder.sets == [(q, step + tau) for q, step in paper]
        assert sim.overlaps == [tau] * (3 * p)


def test_sums_run_in_the_order_of_the_ids_that_are_given() -> None:
    def states(ids: list[bytes] | None) -> list[bytes]:
        simulation = Simulation(toy_config(codec="fp32"), swarm(3), tau=[1] * 3, ids=ids)
        simulation.run(4)
        simulation.settle()
        assert [sim.peer.me for sim in simulation.peers] == (ids or [peer_id(index) for index in range(3)])
        return [state_digest(state.anchor, state.momentum) for state in simulation.peers[0].peer.diloco.fragments]

    made_up = [peer_id(index) for index in range(3)]
    other = [peer_id(index) for index in range(10, 30)]
    same_order = [sorted(other)[sorted(made_up).index(me)] for me in made_up]
    assert states(None) == states(made_up) == states(same_order)
    # Three terms: the sum of the first two is another one if the last one comes first.
    rotated = [same_order[1], same_order[2], same_order[0]]
    assert states(rotated) != states(made_up)
    with pytest.raises(ConfigError, match="3 replicas need as many different peer ids, 2 are given"):
        states([made_up[0], made_up[1], made_up[1]])


def test_it_settles_up_to_a_chosen_time() -> None:
    simulation = Simulation(toy_config(), swarm(2), tau=[3, 3])
    simulation.play(20.5)  # the first departure, after H = 20 steps
    simulation.settle(23.5)
    assert [sim.steps for sim in simulation.peers] == [23, 23]
    assert [sim.overlaps for sim in simulation.peers] == [[3], [3]]
    simulation.settle(60.0)
    assert simulation.committed() == {0}, "nothing departs any more"


def test_a_peer_twice_as_fast_does_twice_the_steps_between_departures() -> None:
    recorders = [Recorder(replica) for replica in swarm(2)]
    # rates 2 and 1, mean 1.5: H = 18 mean steps take 12 units of time
    simulation = Simulation(
        toy_config(inner_steps=18, fragments=2, tau_max=5), recorders, step_times=[0.5, 1.0], tau=[2, 2]
    )
    simulation.run(6)
    steps = [[step for q, step in recorder.departures() if q == 0 and step] for recorder in recorders]
    assert steps == [[24, 48, 72], [12, 24, 36]]
    assert [set(sim.overlaps) for sim in simulation.peers] == [{2}, {2}]


def test_without_overlap_and_fragments_it_is_textbook_diloco() -> None:
    h, rounds = 10, 6
    order = sorted(range(3), key=peer_id)  # sums run in the order of peer ids

    replicas = [TorchReplica(seed) for seed in range(3)]
    theta, velocity = replicas[0].get(0), np.zeros_like(replicas[0].get(0))
    lr, mu, third = np.float32(0.4), np.float32(0.9), np.float32(1 / 3)
    textbook: list[Vector] = []
    for _ in range(rounds):
        for replica in replicas:
            for _ in range(h):
                replica.step()
        delta = np.zeros_like(theta)
        for index in order:
            delta = delta + third * (theta - replicas[index].get(0))
        velocity = mu * velocity + delta
        theta = theta - lr * (delta + mu * velocity)
        for replica in replicas:
            replica.set(0, theta)
        textbook.append(theta)

    recorders = [Recorder(TorchReplica(seed)) for seed in range(3)]
    config = toy_config(codec="fp32", inner_steps=h, fragments=1, tau_max=0, alpha=0.0)
    simulation = Simulation(config, recorders)
    simulation.run(rounds)
    assert simulation.committed() == set(range(rounds))
    for recorder in recorders:
        assert [after.tobytes() for _, after in recorder.written] == [theta.tobytes() for theta in textbook]
    assert np.abs(textbook[-1] - textbook[0]).max() > 0.1


def test_one_peer_with_outer_rate_one_and_no_momentum_ends_at_its_own_weights() -> None:
    config = toy_config(codec="fp32", fragments=1, lr=1.0, momentum=0.0, alpha=0.0)
    recorder = Recorder(TorchReplica(3))
    simulation = Simulation(config, [recorder])
    anchors = []
    for rounds in range(1, 6):
        anchors.append(simulation.peers[0].peer.diloco.fragments[0].anchor)
        simulation.run(rounds)
    assert len(recorder.written) == 5
    for anchor, (local, merged) in zip(anchors, recorder.written, strict=True):
        unit = np.spacing(np.maximum(np.abs(anchor), np.abs(local)))
        assert (np.abs(merged - local) <= unit).all()
        assert np.abs(anchor - local).max() > 0.05


@pytest.mark.parametrize(("count", "codec"), [(2, "fp32"), (4, "fp32"), (2, "e3m0"), (3, "e3m0"), (4, "e3m0")])
def test_identical_peers_are_one_peer(count: int, codec: str) -> None:
    # shares of 1/2 and 1/4 are exact in any codec, a third only where values have few bits
    results = []
    for peers in (1, count):
        replicas = [QuadraticReplica(7) for _ in range(peers)]
        simulation = Simulation(toy_config(codec=codec, down=codec), replicas, tau=[2] * peers)
        simulation.run(12)
        simulation.settle()
        assert simulation.committed() == set(range(12))
        for sim, replica in zip(simulation.peers, replicas, strict=True):
            fragments = sim.peer.diloco.fragments
            results.append(
                [state.anchor.tobytes() + state.momentum.tobytes() for state in fragments]
                + [weights.tobytes() for weights in replica.weights]
            )
    assert len(results) == count + 1
    assert all(result == results[0] for result in results)


def test_alpha_one_never_touches_the_local_weights() -> None:
    alone = QuadraticReplica(0, tokens=TOKENS[0])
    simulation = Simulation(toy_config(alpha=1.0), swarm(3), tau=[1] * 3)
    simulation.run(8)
    for _ in range(simulation.peers[0].steps):
        alone.step()
    together = _quadratic(simulation.peers[0])
    assert [w.tobytes() for w in together.weights] == [w.tobytes() for w in alone.weights]


@pytest.mark.parametrize(("codec", "error"), [("fp32", 1e-6), ("bf16", 2e-3), ("e3m0", 0.15)])
def test_streaming_training_reaches_the_mean_of_the_targets(codec: str, error: float) -> None:
    # the sum of the peers' losses is least at the mean of their targets, as all have equal tokens
    replicas = [QuadraticReplica(seed, tokens=100) for seed in range(4)]
    simulation = Simulation(toy_config(codec=codec, alpha=0.0, momentum=0.5), replicas, tau=[3] * 4)
    simulation.run(4 * 40)
    for p, state in enumerate(simulation.peers[0].peer.diloco.fragments):
        mean = np.mean([replica.targets[p] for replica in replicas], axis=0)
        # the targets have a spread of 1; what stays is the codec's noise
        assert np.sqrt(np.mean((state.anchor - mean) ** 2)) < error


@pytest.mark.parametrize("tau", [[11], [0, 11, 0]])
def test_an_overlap_above_the_runs_limit_is_refused_at_start(tau: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"tau is 11, it must be at most outer\.tau_max \(10\)"):
        Simulation(toy_config(tau_max=10), swarm(len(tau)), tau=tau)


def test_fragments_that_do_not_divide_h_and_an_overlap_of_h_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"outer\.fragments \(P = 3\) does not divide outer\.inner_steps \(H = 20\)"):
        Simulation(toy_config(fragments=3), swarm(fragments=3))
    with pytest.raises(ConfigError, match=r"outer\.tau_max is 20, it must be at least 0 and less than"):
        Simulation(toy_config(tau_max=20), swarm())
    with pytest.raises(ConfigError, match=r"a simulation needs outer\.fragments"):
        Simulation(toy_config(fragments=0, fragment_bytes=64), swarm())


# ---------------------------------------------------------------------- the same again


def _noisy(seed: int) -> Simulation:
    network = Network(delay=0.1, jitter=2.0, drop=0.1)
    simulation = Simulation(
        toy_config(),
        swarm(),
        tau=[0, 1, 5, 9],
        step_times=[1.0, 1.3, 0.7, 2.0],
        network=network,
        window=2.0,
        seed=seed,
    )
    simulation.run(16)
    return simulation


def fingerprint(simulation: Simulation) -> str:
    """One digest over all states, local weights and outcomes."""
    parts = [part for state in outer_states(simulation) for part in state]
    parts += [weights.tobytes() for sim in simulation.peers for weights in _quadratic(sim).weights]
    parts += [repr((index, over)).encode() for index, over in simulation.over]
    return digest("fingerprint", parts).hex()


def test_two_identical_simulations_are_identical() -> None:
    first = fingerprint(_noisy(1))
    assert fingerprint(_noisy(1)) == first
    assert fingerprint(_noisy(2)) != first


def test_results_do_not_depend_on_pythons_hash_seed() -> None:
    code = "from tests.protocol.test_simulation import _noisy, fingerprint; print(fingerprint(_noisy(1)))"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed}, cwd=root, capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert prints == {fingerprint(_noisy(1))}


# ---------------------------------------------------------------------- peers that vanish


@pytest.mark.parametrize("victim", range(4))
def test_when_one_of_four_crashes_the_others_commit_the_next_rounds(victim: int) -> None:
    simulation = Simulation(toy_config(), swarm(), tau=[1] * 4, window=1.0)
    simulation.run(8)
    simulation.crash(victim)
    simulation.run(20)
    simulation.settle()
    assert simulation.committed() == set(range(20))
    assert heads_equal(simulation)
    last = [sim.peer.diloco.fragments[3].record for sim in simulation.peers if sim.alive]
    gone = peer_id(victim)
    assert all(record and gone not in {x.peer for x in record.record.members} for record in last)


class _CrashesAt(QuadraticReplica):
    """Takes its peer down at a given inner step."""

    crash: Callable[[], None]
    at = 41

    def step(self) -> int:
        self.at -= 1
        if self.at == 0:
            self.crash()
        return super().step()


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (3,), (0, 1), (2, 3)])
def test_a_crash_in_the_middle_of_an_exchange(victims: tuple[int, ...]) -> None:
    replicas = [(_CrashesAt if index in victims else QuadraticReplica)(index) for index in range(4)]
    # round 4 leaves at step 40; with this delay it is under way for more than two steps
    simulation = Simulation(toy_config(), replicas, tau=[3] * 4, network=Network(delay=0.6), window=2.0)
    for index, replica in enumerate(replicas):
        if isinstance(replica, _CrashesAt):
            replica.crash = partial(simulation.crash, index)
    simulation.run(5)
    assert all(not simulation.peers[index].alive for index in victims)
    simulation.run(24)
    simulation.settle()
    assert_one_history(simulation)
    assert heads_equal(simulation)
    survivors = {peer_id(index) for index in range(4)} - {peer_id(index) for index in victims}
    first = min(peer_id(index) for index in range(4))
    if len(victims) == 1 or first in survivors:
        assert set(range(8, 24)) <= simulation.committed()
    else:
        # two of four without the first: they cannot know that the others are not going on without them
        assert max(simulation.committed()) < 8


def test_crashes_one_after_the_other_shrink_the_electorate_down_to_one() -> None:
    simulation = Simulation(toy_config(), swarm(), tau=[1] * 4, window=1.0)
    for count, victim in enumerate((1, 3, 0)):
        simulation.run(8 * (count + 1))
        simulation.crash(victim)
    simulation.run(40)
    # the last two were electors both; of two exactly the first may go on alone
    first = min(peer_id(0), peer_id(2)) == peer_id(2)
    assert (max(simulation.committed()) == 39) is first


# ---------------------------------------------------------------------- partitions and loss


def _half_with_quorum() -> tuple[set[int], set[int]]:
    order = sorted(range(4), key=peer_id)
    return {order[0], order[2]}, {order[1], order[3]}


def _between(left: set[int], right: set[int]) -> set[tuple[int, int]]:
    return {(a, b) for a in left for b in right}


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("split", ["2+2", "3+1"])
def test_in_a_partition_at_most_one_side_goes_on_and_healing_unites_them(split: str, jitter: float) -> None:
    network = Network(jitter=jitter)
    going, standing = _half_with_quorum() if split == "2+2" else ({0, 1, 3}, {2})
    simulation = Simulation(toy_config(), swarm(), tau=[2] * 4, network=network, window=1.0)
    simulation.run(8)
    network.cut = _between(going, standing)
    simulation.run(9)
    before = {index: simulation.peers[index].peer.tips() for index in standing}
    simulation.run(20)
    assert {index: simulation.peers[index].peer.tips() for index in standing} == before
    assert len({tuple(tip.head for tip in simulation.peers[index].peer.tips()) for index in going}) == 1
    versions = [tip.version for tip in simulation.peers[min(going)].peer.tips()]
    assert sum(versions) == 20
    assert_one_history(simulation)
    network.cut = set()
    simulation.run(32)
    simulation.settle()
    assert heads_equal(simulation)
    assert_no_fork(simulation)
    states = outer_states(simulation)
    assert states[1:] == states[:-1]
    assert [tip.version for tip in simulation.peers[0].peer.tips()] == [8] * 4
    record = simulation.peers[0].peer.diloco.fragments[0].record
    assert record is not None
    assert len(record.record.members) == 4


def test_four_lonely_peers_do_nothing_and_lose_nothing() -> None:
    network = Network()
    simulation = Simulation(toy_config(), swarm(), tau=[2] * 4, network=network, window=1.0)
    simulation.run(8)
    network.cut = {(a, b) for a in range(4) for b in range(a)}
    simulation.run(20)
    assert max(simulation.committed()) < 9
    network.cut = set()
    simulation.run(28)
    simulation.settle()
    assert set(range(20, 28)) <= simulation.committed()
    assert heads_equal(simulation)
    assert_no_fork(simulation)
    first = {o.signed.record.round: o.signed.record for o in records(simulation).values()}[20]
    assert sorted(x.tokens for x in first.members) == sorted(4 * 20 * tokens for tokens in TOKENS)


@pytest.mark.parametrize("jitter", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_after_ten_percent_loss_all_heads_are_equal_within_three_cycles(seed: int, jitter: float) -> None:
    network = Network(delay=0.1, jitter=jitter, drop=0.1)
    simulation = Simulation(
        toy_config(), swarm(), tau=[1] * 4, step_times=[1.0, 1.3, 0.7, 2.0], network=network, window=1.0, seed=seed
    )
    simulation.run(24)
    assert_one_history(simulation)
    lossy = len(simulation.committed())
    network.drop, network.jitter = 0.0, min(jitter, 0.3)
    simulation.run(36)
    simulation.settle()
    assert heads_equal(simulation)
    assert_one_history(simulation)
    states = outer_states(simulation)
    assert states[1:] == states[:-1]
    assert 0 < lossy < len(simulation.committed())


def test_a_swarm_larger_than_the_group_goes_on() -> None:
    simulation = Simulation(toy_config(max_size=3), swarm(5), tau=[2] * 5, window=1.0)
    simulation.run(24)
    simulation.settle()
    assert simulation.committed() == set(range(24))
    assert heads_equal(simulation)
    seen = [o.signed.record for o in records(simulation).values()]
    assert {len(record.members) for record in seen} == {3}
    assert {x.peer for record in seen for x in record.members} == {peer_id(index) for index in range(5)}


# ---------------------------------------------------------------------- peers in trouble


def _members(simulation: Simulation, round: int) -> set[int]:
    """Numbers of the peers that were counted in a round."""
    (record,) = {o.signed.record for o in records(simulation).values() if o.signed.record.round == round}
    numbers = {peer_id(index): index for index in range(len(simulation.peers))}
    return {numbers[member.peer] for member in record.members}


def test_a_crashed_peer_starts_again_with_nothing_and_comes_back_by_repair() -> None:
    simulation = Simulation(toy_config(), swarm(), network=Network(delay=0.1), window=1.0)
    simulation.run(8)
    simulation.crash(1)
    simulation.run(12)
    before = simulation.peers[1].peer
    simulation.restart(1, QuadraticReplica(101, tokens=TOKENS[1]))
    sim = simulation.peers[1]
    assert sim.peer is not before
    assert [tip.version for tip in sim.peer.tips()] == [0] * 4
    assert sim.joining
    simulation.run(20)
    simulation.settle()
    assert not sim.joining
    assert heads_equal(simulation)
    assert simulation.committed() == set(range(20))
    assert [1 in _members(simulation, round) for round in (7, 11, 19)] == [True, False, True]


def test_a_peer_that_starts_again_where_nobody_is_waits() -> None:
    simulation = Simulation(toy_config(), swarm(2))
    simulation.run(8)
    simulation.crash(0)
    simulation.crash(1)
    simulation.restart(0, QuadraticReplica(0))
    simulation.play(simulation.now + 100)
    assert simulation.peers[0].joining
    assert simulation.peers[0].steps == 0
    assert max(simulation.committed()) == 7


def test_a_frozen_peer_goes_on_with_all_that_has_queued_up() -> None:
    simulation = Simulation(toy_config(), swarm(), network=Network(delay=0.1), window=1.0)
    simulation.run(8)
    simulation.freeze(2)
    steps, tips = simulation.peers[2].steps, simulation.peers[2].peer.tips()
    simulation.run(13)
    sim = simulation.peers[2]
    assert (sim.steps, sim.peer.tips()) == (steps, tips)
    assert sim.backlog
    assert set(range(8, 13)) <= simulation.committed()
    assert 2 not in _members(simulation, 11)
    simulation.thaw(2)
    assert not sim.backlog
    simulation.run(20)
    simulation.settle()
    assert heads_equal(simulation)
    assert 2 in _members(simulation, 19)
    assert 0 < sim.steps - steps < simulation.peers[0].steps - steps - 20


def test_a_clock_that_is_ahead_makes_its_peer_depart_early() -> None:
    recorders = [Recorder(replica) for replica in swarm(3)]
    simulation = Simulation(toy_config(), recorders, window=2.0)
    simulation.set_skew(1, 3.0)
    simulation.run(3)
    departures = [{q: step for q, step in recorder.departures() if step} for recorder in recorders]
    assert departures[0] == departures[2] == {0: 20, 1: 25, 2: 30}
    # 3 of 5 steps early; round 3, at 35, is due to it at 32
    assert departures[1] == {0: 17, 1: 22, 2: 27, 3: 32}
    simulation.set_skew(1, 0.0)
    simulation.run(12)
    simulation.settle()
    assert heads_equal(simulation)
    assert _members(simulation, 11) == {0, 1, 2}


class _SpoilsPayloads(Simulation):
    """What peer 0 contributes to round 4 arrives with a flipped bit."""

    def _push(self, sim: SimPeer, to: bytes, header: Header, data: bytes) -> None:
        spoiled = Arrival(0.0, flip=77).apply(data) if sim.index == 0 and header.round == 4 else data
        super()._push(sim, to, header, spoiled)


def test_a_payload_with_a_flipped_bit_is_refused() -> None:
    simulation = _SpoilsPayloads(toy_config(codec="fp32"), swarm(3), window=1.0)
    simulation.run(12)
    simulation.settle()
    assert simulation.refused == [(0, "bytes do not match their digest")] * 2
    assert heads_equal(simulation)
    assert _members(simulation, 4) == {1, 2}
    assert _members(simulation, 8) == {0, 1, 2}


def test_a_message_with_a_flipped_bit_does_no_harm() -> None:
    refused = 0
    for seed in range(8):
        network = Network(delay=0.1, encoded=False)
        simulation = Simulation(toy_config(), swarm(3), network=network, window=1.0, seed=seed)
        simulation.run(4)
        network.troubles[seed % 3].corrupt_next = 20
        simulation.run(24)
        simulation.settle()
        assert heads_equal(simulation)
        assert_one_history(simulation)
        refused += len(simulation.refused)
    assert refused > 8


def test_a_roster_record_holds_until_it_expires() -> None:
    simulation = Simulation(toy_config(), swarm(), network=Network(delay=0.1), window=1.0, expiry=12.0)
    simulation.run(8)
    simulation.crash(3)
    simulation.run(16)
    seconds = [min(over.seconds for _, over in simulation.over if over.round == round) for round in range(7, 16)]
    # A round takes four messages, in parts five. Whoever is listed is waited for, one window, or one message more
    # where it should have coordinated: in three rounds of 5. After that nobody waits for it.
    assert seconds[0] == pytest.approx(0.5)
    assert all(wait == pytest.approx(0.5) or wait == pytest.approx(1.3) for wait in seconds[1:4])
    assert seconds[1] == pytest.approx(1.3)
    assert seconds[4:] == pytest.approx([0.4] * 5)
    assert simulation.committed() == set(range(16))


def test_clients_are_members_and_never_coordinate() -> None:
    simulation = Simulation(toy_config(), swarm(), network=Network(delay=0.1), window=1.0, clients=(1,))
    simulation.run(16)
    simulation.settle()
    assert simulation.committed() == set(range(16))
    coordinators = {o.signed.record.coordinator for o in records(simulation).values()}
    assert coordinators == {peer_id(0), peer_id(2), peer_id(3)}
    assert all(1 in _members(simulation, round) for round in range(16))


# ---------------------------------------------------------------------- the played network


def test_a_line_in_trouble_delays_doubles_loses_and_spoils_what_its_peer_sends() -> None:
    chance, network = random.Random(0), Network(delay=0.5)
    assert network.arrivals(0, 1, chance) == [Arrival(0.5)]
    trouble = network.troubles[0]
    trouble.slow = 10.0
    assert [network.arrivals(a, b, chance)[0].delay for a, b in ((0, 1), (1, 0), (1, 2))] == [5.0, 5.0, 0.5]
    trouble.slow, trouble.duplicate = 1.0, True
    assert network.arrivals(0, 1, chance) == [Arrival(0.5), Arrival(0.5)]
    trouble.duplicate, trouble.drop_next = False, 2
    assert [len(network.arrivals(0, 1, chance)) for _ in range(3)] == [0, 0, 1]
    trouble.corrupt_next = 1
    spoiled, whole = (network.arrivals(0, 1, chance)[0].apply(bytes(8)) for _ in range(2))
    assert bin(int.from_bytes(spoiled, "big")).count("1") == 1
    assert whole == bytes(8)
    trouble.reorder = 2.0
    delays = [network.arrivals(0, 1, chance)[0].delay for _ in range(50)]
    assert 0.5 <= min(delays) < 1.0 < 2.0 < max(delays) < 2.5


def test_sides_are_cut_and_healed() -> None:
    network = Network(cut={(5, 6)})
    pairs = network.isolate({0, 1}, {2, 3})
    assert len(pairs) == 4
    assert not network.connected(3, 0)
    assert network.connected(0, 1)
    network.heal(pairs)
    assert network.connected(3, 0)
    assert not network.connected(6, 5)
