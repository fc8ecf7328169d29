"""A swarm of replicas with real models, driven by the product's protocol in virtual time.

One unit of virtual time is one swarm step: the replicas' speeds are scaled to mean 1, so after time t the swarm has
seen t batches. That is also the axis of the learning rate, as ``Clock.swarm_step`` is in a node.

The protocol is ``protocol.simulation``; this file overrides a few of its small methods where an experiment asks for
it (codec, outer optimizer, alpha, rarer rounds) and looks on where something is to be measured.
"""

import math
from collections.abc import Sequence

import numpy as np

from stretto.node.simulate.cosine import CosineLog
from stretto.node.simulate.diloco import make_diloco
from stretto.node.simulate.replicas import ModelReplica, Workshop, due_fragment, inner_learning_rate
from stretto.protocol.outer import Vector, outer_gradient
from stretto.protocol.simnet import Network
from stretto.protocol.simpeer import SimPeer
from stretto.protocol.simulation import Header, Simulation
from stretto.protocol.streaming import Contribution, StreamingDiLoCo

MAX_GROWTH = 8.0
"""Rounds grow rarer by this factor at most."""


class LearningSimulation(Simulation):
    """All replicas of one run. ``play(t)`` trains until the swarm has done t steps."""

    def __init__(self, shop: Workshop) -> None:
        config = self.settings = shop.config
        self.shop = shop
        self.sent = 0
        """Bytes of contributions and averages that all peers have pushed."""
        self.cosines = CosineLog(config.replicas)
        replicas = [self._make_replica(time) for time in config.step_times]
        super().__init__(
            config.run_config(shop.vocab_size),
            replicas,
            tau=config.taus,
            step_times=config.step_times,
            network=Network(delay=config.delay, jitter=config.jitter, drop=config.drop),
            seed=config.seed,
            window=config.delay + config.jitter,
        )
        for index, down, up in config.crashes:
            self._at(down, 3, lambda index=index: self.crash(index))  # type: ignore[misc]
            self._at(up, 3, lambda index=index: self._come_again(index))  # type: ignore[misc]

    @property
    def replicas(self) -> list[ModelReplica]:
        """Those of the peers, in their order."""
        found = [sim.replica for sim in self.peers]
        assert all(isinstance(replica, ModelReplica) for replica in found)
        return found  # type: ignore[return-value]

    def anchors(self) -> list[Vector]:
        """The outer parameters by fragment, of the peer that is furthest in each, (n,) float32."""
        living = [sim.peer.diloco for sim in self.peers if sim.alive]
        states = zip(*(diloco.fragments for diloco in living), strict=True)
        return [max(group, key=lambda state: state.tip.version).anchor for group in states]

    def average(self) -> list[Vector]:
        """The mean of the living replicas' local weights by fragment, (n,) float32."""
        living = [sim.replica for sim in self.peers if sim.alive]
        fragments = range(self.settings.fragments)
        return [np.stack([replica.get(p) for replica in living]).mean(axis=0, dtype=np.float32) for p in fragments]

    def _make_replica(self, step_time: float) -> ModelReplica:
        replica = ModelReplica(self.shop)
        replica.progress = lambda: max(0.0, self.now - step_time)
        if self.settings.frozen:
            replica.trains = lambda step: due_fragment(self.settings, step)
        return replica

    def _come_again(self, index: int) -> None:
        self.restart(index, self._make_replica(self.peers[index].step_time))

    # ------------------------------------------------------------------ where experiments differ

    def _make_diloco(self, initial: Sequence[Vector]) -> StreamingDiLoCo:
        return make_diloco(self.config, initial, self.settings)

    def _merge(self, sim: SimPeer, fragment: int) -> None:
        c = self.settings
        progress = min(1.0, self.now / c.steps)
        alpha = c.alpha if c.alpha_end < 0 else c.alpha + (c.alpha_end - c.alpha) * progress
        sim.replica.set(fragment, sim.peer.diloco.come_back(fragment, sim.replica.get(fragment), alpha))

    def _rate(self, sim: SimPeer) -> float:
        """Rounds become rarer when peers claim to be slower."""
        inner = self.config.inner
        ratio = inner.lr / inner_learning_rate(inner, max(self.now, inner.warmup_steps))
        return super()._rate(sim) / min(MAX_GROWTH, math.pow(ratio, self.settings.growth))

    # ------------------------------------------------------------------ what is measured

    def _leave(self, sim: SimPeer, fragment: int) -> Contribution:
        if self.settings.cosine:
            gradient = outer_gradient(sim.peer.diloco.fragments[fragment].anchor, sim.replica.get(fragment))
            spec = self.replicas[sim.index].fragments.specs[fragment]
            self.cosines.add(sim.index, sim.next_round - 1, self.now, spec, gradient)
        return super()._leave(sim, fragment)

    def _push(self, sim: SimPeer, to: bytes, header: Header, data: bytes) -> None:
        self.sent += len(data)
        super()._push(sim, to, header, data)
