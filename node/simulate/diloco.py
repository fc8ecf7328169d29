"""The outer side of a simulated replica where an experiment differs from the product.

``ExperimentDiLoCo`` is ``StreamingDiLoCo`` with another codec. ``AdamDiLoCo`` also has another outer optimizer, Adam
(FedAdam: Reddi et al. 2021, arXiv 2003.00295, Algorithm 2), on the average outer gradient g, without bias correction:

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2,   anchor = anchor - lr m / (sqrt(v) + epsilon)

The first moment takes the momentum's place in a fragment's state. A state has no room for the second one, so each peer
keeps it beside, under the digest of the state that it belongs to: a step that is computed twice or never committed
then does no harm. It is not part of what peers compare, and a downloaded state begins with none: for experiments only.
"""

from collections.abc import Iterable

import numpy as np

from stretto.node.simulate.codecs import make_codec
from stretto.node.simulate.config import SimConfig
from stretto.protocol.config import RunConfig
from stretto.protocol.outer import Vector
from stretto.protocol.streaming import Reduced, StreamingDiLoCo, seal

BETA2 = 0.99
EPSILON = 1e-3
"""tau in Reddi et al., and their usual value; v begins at its square."""


class ExperimentDiLoCo(StreamingDiLoCo):
    """One replica's outer side with the run's own codec of contributions, which the wire may not know."""

    def __init__(self, run: RunConfig, initial: Iterable[Vector], config: SimConfig) -> None:
        super().__init__(run, initial)
        self.codec = make_codec(config.codec, config.keep)


class AdamDiLoCo(ExperimentDiLoCo):
    """The same with Adam; beta1 is the run's momentum."""

    def __init__(self, run: RunConfig, initial: Iterable[Vector], config: SimConfig) -> None:
        super().__init__(run, initial, config)
        self._second: list[dict[bytes, Vector]] = [{} for _ in self.fragments]

    def outer_step(self, fragment: int, average: Vector) -> Reduced:
        """One step of Adam from an average, (n,) float32; on copies."""
        state = self.fragments[fragment]
        beta1, lr = np.float32(self.config.outer.momentum), np.float32(self.config.outer.lr)
        beta2, epsilon = np.float32(BETA2), np.float32(EPSILON)
        known = state.record.record.state if state.record is not None else b""
        second = self._second[fragment].get(known)
        if second is None:
            second = np.full_like(average, epsilon * epsilon)
        momentum = beta1 * state.momentum + (1 - beta1) * average
        second = beta2 * second + (1 - beta2) * average * average
        reduced = seal(state.anchor - lr * momentum / (np.sqrt(second) + epsilon), momentum)
        # The state that it started from stays, in case this step is never committed.
        self._second[fragment] = {k: v for k, v in self._second[fragment].items() if k == known}
        self._second[fragment][reduced.digest] = second
        return reduced


def make_diloco(run: RunConfig, initial: Iterable[Vector], config: SimConfig) -> StreamingDiLoCo:
    """The outer side that these settings ask for."""
    return (AdamDiLoCo if config.outer == "adam" else ExperimentDiLoCo)(run, initial, config)
