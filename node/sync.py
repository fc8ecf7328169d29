"""Between the trainer and the rounds: how weights leave and come back.

Weights change only inside ``optimizer.step()`` and at a merge, both on the training thread and both under
``step_lock``. So the network thread may copy a fragment at any other moment, in the middle of a forward pass too, and
a peer with slow steps does not delay the start of a round. A merge happens only between two steps.

``outer_lock`` guards the protocol state (``Peer`` and its anchors); whoever needs both takes ``step_lock`` first.
"""

import threading
import time
from dataclasses import dataclass

import torch

from stretto.protocol import fp4_torch
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.fragments import FragmentedModel, first_not_finite
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer
from stretto.protocol.streaming import Contribution
from stretto.protocol.tau import TauEstimate


@dataclass(frozen=True)
class Merged:
    """A result that met the local weights: ``tau`` inner steps after its snapshot; not ``counted``, it was rebased.

    ``late`` says that tau is above the run's ``outer.tau_max``: meanwhile this peer went on with its local weights.
    """

    fragment: int
    tau: int
    counted: bool
    late: bool = False


def encode_difference(anchor: Vector, weights: torch.Tensor) -> tuple[bytes, float]:
    """The E3M0 payload of anchor - weights and its norm, made on the device of ``weights``, (n,) float32."""
    gradient = torch.from_numpy(anchor).to(weights.device, non_blocking=True)
    # Not in place: on a CPU the tensor above is the anchor itself.
    difference = gradient - weights
    return fp4_torch.encode(difference), float(torch.linalg.vector_norm(difference))


class Sync:
    """Snapshots and merges of one replica.

    ``fixed_tau`` holds every result back until so many inner steps have passed since its snapshot (for experiments);
    None merges it at the first step boundary after it is there. ``encode_on_device`` is for weights on a GPU and the
    codec e3m0 without error feedback.
    """

    def __init__(
        self,
        model: FragmentedModel,
        peer: Peer,
        *,
        tau_max: int,
        fixed_tau: int | None = None,
        encode_on_device: bool = False,
    ) -> None:
        self.model, self.peer, self.fixed_tau = model, peer, fixed_tau
        self.encode_on_device = encode_on_device
        self.step_lock, self.outer_lock = threading.Lock(), threading.Lock()
        self.step = 0
        self.estimate = TauEstimate(tau_max=tau_max)
        self.blocked_seconds = 0.0
        self._alpha = peer.config.outer.alpha
        self._latest = tau_max
        self._left_at: dict[int, int] = {}
        self._reload = False

    # ------------------------------------------------------------------ training thread

    def acquire_step(self) -> None:
        """Before ``optimizer.step()``; a snapshot that is being copied is waited for and counted as blocked time."""
        began = time.perf_counter()
        self.step_lock.acquire()
        self.blocked_seconds += time.perf_counter() - began

    def release_step(self, tokens: int, seconds: float) -> None:
        """After ``optimizer.step()``: ``tokens`` were trained on in ``seconds``."""
        self.step += 1
        self.step_lock.release()
        began = time.perf_counter()
        with self.outer_lock:
            self.peer.diloco.trained(tokens)
            self.estimate = self.estimate.with_step(seconds)
        self.blocked_seconds += time.perf_counter() - began

    def come_back(self) -> list[Merged]:
        """Between two steps: let every result that is due meet the local weights."""
        merged: list[Merged] = []
        for fragment, state in enumerate(self.peer.diloco.fragments):
            if not state.pending:
                continue
            counted = state.merge_with is not None
            tau = self.step - self._left_at.get(fragment, self.step)
            if counted and self.fixed_tau is not None and tau < self.fixed_tau:
                continue
            began = time.perf_counter()
            with self.step_lock:
                with self.outer_lock:
                    result = self.peer.diloco.take_result(fragment)
                self.model.meet(fragment, result.anchor, result.shift, self._alpha)
            self.blocked_seconds += time.perf_counter() - began
            merged.append(Merged(fragment, tau, counted, late=counted and tau > max(self._latest, 1)))
        return merged

    def reload_if_asked(self) -> bool:
        """Between two steps: put the anchors in place of local weights that are no longer finite."""
        if not self._reload:
            return False
        with self.step_lock, self.outer_lock:
            for fragment in range(len(self.model.specs)):
                self.model.scatter(fragment, self.peer.diloco.reload(fragment))
            self._reload = False
        return True

    # ------------------------------------------------------------------ network thread

    def leave(self, fragment: int) -> Contribution:
        """The contribution of the local weights as they are now. LocalProtocolError if they are not finite.

        The weights are copied under the lock, which waits for a running optimizer step only; the rest does not hold
        anybody up. With ``encode_on_device`` the copy stays on the weights' device, the anchor is paged in, and only
        the encoded contribution comes to the host, an eighth of the bytes.
        """
        if self.encode_on_device:
            with self.step_lock:
                self._left_at[fragment] = self.step
                weights = self.model.gather_on_device(fragment)
            try:
                return self.peer.diloco.leave_with(fragment, lambda anchor: encode_difference(anchor, weights))
            except LocalProtocolError as error:
                raise self._named(fragment, weights.cpu().numpy(), error) from None
        local = self.peer.diloco.empty(self.model.specs[fragment].numel)
        with self.step_lock:
            self._left_at[fragment] = self.step
            self.model.gather(fragment, local)
        try:
            return self.peer.diloco.leave(fragment, local, consume=True)
        except LocalProtocolError as error:
            # The gradient took the place of the weights, and is as little finite as they were.
            raise self._named(fragment, local, error) from None

    def _named(self, fragment: int, weights: Vector, error: LocalProtocolError) -> LocalProtocolError:
        where = first_not_finite(self.model.specs[fragment], weights)
        return LocalProtocolError(f"not finite in {where}") if where else error

    def ask_reload(self) -> None:
        """The local weights are not finite: the training thread is to reload the anchors."""
        self._reload = True
