"""The simulation of a lockstep run, to be compared with what its real nodes ended with.

``stretto.protocol.simulation`` plays the peers in one thread with virtual time, all step times 1 and an ideal network;
the replicas here are real models with the trainer's own loop. Equal to the real run, bit for bit: model, initial
weights and data (by rank in peer-id order), the inner optimizer's arithmetic, schedule and tau, codecs, the order of
sums, outer step and merge. Different: signatures, clocks, who coordinates, how a group cuts a fragment into parts.
These are in the commit records, hence in the chains' heads, and in no weight; so states and weights are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.node.data.corpus import Corpus
from stretto.node.data.fixed_units import FixedUnits
from stretto.node.data.stream import TokenStream, count_windows
from stretto.node.lockstep import LockstepSchedule, check_lockstep
from stretto.node.model import build_model
from stretto.node.parts import cut_model, open_data
from stretto.node.swarm.identity import parse_peer_id
from stretto.node.sync import Merged
from stretto.node.trainer import Trainer, make_optimizer
from stretto.protocol.actions import Committed
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import state_digest, weights_digest
from stretto.protocol.errors import ConfigError, StrettoError
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer
from stretto.protocol.simulation import Simulation
from stretto.protocol.units import UnitCut


@dataclass(frozen=True)
class PeerEnd:
    """What a peer ended with, per fragment: digests of anchor and momentum, and of the local weights; its losses."""

    states: tuple[bytes, ...]
    weights: tuple[bytes, ...]
    losses: tuple[float, ...]


class _NoSync:
    """The trainer's ``StepSync`` of a replica whose snapshots and merges somebody else makes, between two steps."""

    def __init__(self) -> None:
        self.step, self.blocked_seconds = 0, 0.0

    def acquire_step(self) -> None:
        """Nobody else is there."""

    def release_step(self, _tokens: int, _seconds: float) -> None:
        """Count the step."""
        self.step += 1

    def come_back(self) -> list[Merged]:
        """The simulation does it."""
        return []

    def reload_if_asked(self) -> bool:
        """Never."""
        return False


class TrainerReplica:
    """A replica for the simulation (``protocol.simpeer.Replica``): peer ``rank`` of ``peers``, on the CPU."""

    def __init__(self, run: RunConfig, corpus: Corpus, rank: int, peers: int, micro_batch: int) -> None:
        device = torch.device("cpu")
        model = build_model(run.model, run.seed, device=device)
        self.model = cut_model(run, model)
        data, sync = run.data, _NoSync()
        units = FixedUnits(UnitCut(count_windows(corpus.train, data.sequence_length, "training"), data.unit_sequences))
        units.sit(rank, peers)
        trainer = Trainer(
            model=model,
            optimizer=make_optimizer(model, run.inner),
            stream=TokenStream(
                corpus.train, data.sequence_length, data.seed, unit_sequences=data.unit_sequences, units=units
            ),
            config=run.inner,
            sync=sync,
            sequence_length=data.sequence_length,
            micro_batch=micro_batch,
            device=device,
        )
        self.losses: list[float] = []
        self._steps = trainer.steps(lambda: float(sync.step))

    def step(self) -> int:
        """One inner step; the tokens that it trained on."""
        report = next(self._steps)
        self.losses.append(report.loss)
        return report.tokens

    def get(self, fragment: int) -> Vector:
        """A copy of the local weights, (n,) float32."""
        return self.model.gather(fragment)

    def set(self, fragment: int, weights: Vector) -> None:
        """Replace the local weights."""
        self.model.scatter(fragment, weights)


def simulate_lockstep(
    run: RunConfig, corpus: Corpus, ids: Sequence[bytes], taus: Sequence[int], *, rounds: int, micro_batch: int
) -> list[PeerEnd]:
    """What peers with these ids, in order, and taus end with after ``rounds`` rounds in lockstep, at their last steps.

    Uses the threads that torch is set to: for the same bits as many as the nodes use. ConfigError if the run cannot be
    in lockstep, StrettoError if a round failed, which cannot be.
    """
    for tau in taus:
        check_lockstep(run, len(ids), tau)
    if list(ids) != sorted(ids):
        raise ConfigError("the peers of a lockstep run are numbered in the order of their ids")
    replicas = [TrainerReplica(run, corpus, rank, len(ids), micro_batch) for rank in range(len(ids))]
    fragments = len(replicas[0].model.specs)
    simulation = Simulation(run, replicas, tau=taus, ids=ids)
    schedules = [LockstepSchedule(run.outer.inner_steps, fragments, rounds, tau) for tau in taus]
    ends: dict[int, PeerEnd] = {}
    # Half a step later all that belongs to a step has happened.
    simulation.play(schedules[0].departure(rounds - 1) + 0.5)
    for index in sorted(range(len(ids)), key=lambda index: taus[index]):
        simulation.settle(schedules[index].last_step + 0.5)
        ends[index] = _end(simulation.peers[index].peer, replicas[index])
    _check_rounds(simulation, rounds)
    return [ends[index] for index in range(len(ids))]


def _end(peer: Peer, replica: TrainerReplica) -> PeerEnd:
    model = replica.model
    return PeerEnd(
        states=tuple(state_digest(state.anchor, state.momentum) for state in peer.diloco.fragments),
        weights=tuple(weights_digest(model.gather(fragment)) for fragment in range(len(model.specs))),
        losses=tuple(replica.losses),
    )


def _check_rounds(simulation: Simulation, rounds: int) -> None:
    whole = [over.round for _, over in simulation.over if isinstance(over.outcome, Committed) and over.counted]
    wanted = sorted(list(range(rounds)) * len(simulation.peers))
    if sorted(whole) != wanted:
        others = sorted({f"round {over.round}: {over.outcome}" for _, over in simulation.over if not over.counted})
        raise StrettoError(f"the simulation did not commit all its rounds with all peers: {'; '.join(others)}")


def compare_with_simulation(
    run: RunConfig, reports: Mapping[str, Mapping[str, Any]], data_dir: Path
) -> dict[str, Any]:
    """Simulate the lockstep run whose nodes left these reports, by name, and tell whether all bits are equal.

    ``data_dir`` is where the corpus may be cached. Returns ``equal`` and, in words, the ``differences``.
    ConfigError if the reports are not those of one whole lockstep run.
    """
    nodes = sorted((parse_peer_id(report["peer"]), name) for name, report in reports.items())
    locks = [reports[name]["lockstep"] for _, name in nodes]
    if None in locks or any(lock["peers"] != len(nodes) for lock in locks):
        raise ConfigError(f"{len(nodes)} reports are here, and not those of all peers of one lockstep run")
    if len({(lock["micro_batch"], lock["rounds"]) for lock in locks}) > 1:
        raise ConfigError("the peers of this lockstep run had different --micro-batch or --rounds: nothing to compare")
    ends = simulate_lockstep(
        run,
        open_data(run, data_dir),
        [peer for peer, _ in nodes],
        [lock["tau"] for lock in locks],
        rounds=locks[0]["rounds"],
        micro_batch=locks[0]["micro_batch"],
    )
    differences = []
    for (_, name), lock, end in zip(nodes, locks, ends, strict=True):
        pairs = (
            ("anchor and momentum", reports[name]["states"], end.states),
            ("local weights", lock["weights"], end.weights),
        )
        for what, real, simulated in pairs:
            for fragment, (a, b) in enumerate(zip(real, simulated, strict=True)):
                if a != b.hex():
                    differences.append(f"{name}: {what} of fragment {fragment}")
    return {"equal": not differences, "differences": differences}
