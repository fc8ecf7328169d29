"""Streaming DiLoCo for one peer: what leaves, what comes back (arXiv 2501.18512, Algorithm 2).

A peer keeps, per fragment, the anchor that all peers share bit for bit and its outer momentum. A round is four steps,
each a method here:

    leave(p, local), left()    outer gradient = anchor - local, encoded            Algorithm 2, line 8
    reduce(p, members, ...)    FP32 average of the contributions, Nesterov step    lines 10-11, on copies
    install(p, record, ...)    the copies become anchor and momentum               only after the commit
    come_back(p, local)        the new local weights                               line 12

``come_back`` knows two cases. A peer whose contribution was counted merges: alpha local + (1 - alpha) anchor. A peer
that was not counted (it came late, or repaired its state by download) *rebases*: it adds the anchor's own move,
new - old, to its local weights. Then its next outer gradient, new - (local + new - old) = old - local, still holds
all the work that nobody has counted yet; a merge with a small alpha would throw it away.

With ``wire.error_feedback`` each contribution also carries what earlier ones lost to the codec, see ``feedback``.

Arrays are never changed in place once they are here: anchors are replaced, so other threads may read them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stretto.protocol import feedback, outer
from stretto.protocol.chain import MAX_NORM, Member, Part, SignedRecord, Tip, after, genesis
from stretto.protocol.codecs import Codec, get_codec
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import payload_digest, state_digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.outer import Vector

MAX_ATTEMPTS = 64
"""How many contributions from one anchor are remembered. More would be as many aborted rounds in a row."""


@dataclass(frozen=True)
class Contribution:
    """A peer's encoded outer gradient: payload bytes, their digest, the tokens behind it, its L2 norm.

    ``head`` is the chain whose anchor it was taken from.
    """

    fragment: int
    head: bytes
    payload: bytes
    digest: bytes
    tokens: int
    norm: float = 0.0
    residual: Vector | None = field(default=None, compare=False, repr=False)
    """With error feedback: what the codec loses of it, (n,) float32; in force once the contribution was counted."""


@dataclass(frozen=True)
class Reduced:
    """Outer state after a round that is not yet installed: anchor and momentum (n,) float32, and their digest."""

    anchor: Vector
    momentum: Vector
    digest: bytes


@dataclass(frozen=True)
class Result:
    """What comes back to the local weights: mix them with ``anchor``, then add ``shift``; each may be absent."""

    anchor: Vector | None
    shift: Vector | None


def seal(anchor: Vector, momentum: Vector) -> Reduced:
    """A state with its digest, taken from the very arrays."""
    return Reduced(anchor, momentum, state_digest(anchor, momentum))


@dataclass
class FragmentState:
    """Everything a peer holds of one fragment besides its local weights."""

    anchor: Vector
    momentum: Vector
    tip: Tip
    record: SignedRecord | None = None
    tokens: int = 0
    """Trained on since this peer's last counted contribution."""
    attempts: dict[bytes, int] = field(default_factory=dict)
    """Contributions that left since the anchor last moved, by digest, with the tokens behind each. A round that
    looked aborted here may have been committed elsewhere, so an earlier one may turn out to be counted."""
    merge_with: Vector | None = None
    """A counted round's anchor that the local weights have not met yet."""
    shift: Vector | None = None
    """The anchor's move in rounds that did not count this peer, not yet added to the local weights."""
    residual: Vector | None = None
    """With error feedback: what the counted contributions lost to the codec, (n,) float32; None stands for zeros."""
    resumed: bool = False
    """Whether this is as a checkpoint had it and nothing has left since. Contributions that left after the checkpoint
    was made, in the life before, are not remembered here."""
    clean: bool = True
    """Whether the life before ended in order: nothing left after that checkpoint."""
    residual_left: Vector | None = None
    """What ``residual`` becomes if the contribution that left last is counted."""

    @property
    def pending(self) -> bool:
        """Whether a result waits for the local weights."""
        return self.merge_with is not None or self.shift is not None


def empty(numel: int) -> Vector:
    """(numel,) float32 on the host, not initialized."""
    return np.empty(numel, dtype=np.float32)


@dataclass
class StreamingDiLoCo:
    """The outer side of one replica.

    ``initial`` yields the initial weights per fragment, (n,) float32 each; the anchors are copies of them, made one by
    one.
    """

    config: RunConfig
    initial: Iterable[Vector]
    empty: Callable[[int], Vector] = empty
    """Makes the arrays that will be anchors and momenta; a node with a GPU hands in one for page-locked memory."""
    fragments: list[FragmentState] = field(init=False)
    codec: Codec = field(init=False)
    """That of contributions."""
    down: Codec = field(init=False)
    """That of averages, where a group reduces in parts."""

    def __post_init__(self) -> None:
        self.codec, self.down = get_codec(self.config.wire.up), get_codec(self.config.wire.down)
        run = self.config.digest()
        self.fragments = []
        for index, weights in enumerate(self.initial):
            anchor, momentum = self.empty(len(weights)), self.empty(len(weights))
            anchor[:] = weights
            momentum.fill(0.0)
            tip = genesis(run, index, state_digest(anchor, momentum))
            self.fragments.append(FragmentState(anchor, momentum, tip))
        self.initial = ()

    def trained(self, tokens: int) -> None:
        """One inner step on ``tokens`` tokens was done: it touched every fragment."""
        for state in self.fragments:
            state.tokens += tokens

    def uncounted(self) -> int:
        """Tokens trained on that no round has counted yet, the fragments' mean by size: lost with this peer."""
        weights = sum(state.anchor.size for state in self.fragments)
        return sum(max(0, state.tokens) * state.anchor.size for state in self.fragments) // max(1, weights)

    def leave(self, fragment: int, local: Vector, *, consume: bool = False) -> Contribution:
        """The contribution of the present local weights, (n,) float32. LocalProtocolError if a result is pending.

        With ``consume`` the array ``local`` is used as scratch and lost, which saves as much memory. Heavy; it only
        reads the state, so any thread may run it. ``left`` makes it the one that counts.
        """
        residuals: list[Vector] = []

        def encode(anchor: Vector) -> tuple[bytes, float]:
            gradient = outer.outer_gradient(anchor, local, out=local if consume else None)
            size = outer.norm(gradient)
            if not self.config.wire.error_feedback:
                return self.codec.encode(gradient), size
            before = self.fragments[fragment].residual
            payload, residual = feedback.encode(gradient, before, self.codec)
            residuals.append(residual)
            return payload, size + (outer.norm(before) if before is not None else 0.0)

        contribution = self.leave_with(fragment, encode)
        return replace(contribution, residual=residuals[0]) if residuals else contribution

    def leave_with(self, fragment: int, encode: Callable[[Vector], tuple[bytes, float]]) -> Contribution:
        """Like ``leave``, where the local weights are elsewhere: ``encode`` makes payload and norm from the anchor."""
        state = self.fragments[fragment]
        if state.pending:
            raise LocalProtocolError(f"fragment {fragment}: the last result has not been merged yet")
        head, anchor, tokens = state.tip.head, state.anchor, state.tokens
        payload, norm = encode(anchor)
        if not norm <= MAX_NORM:
            raise LocalProtocolError(f"fragment {fragment}: the outer gradient's norm is {norm:g}")
        return Contribution(fragment, head, payload, payload_digest(payload), tokens, norm)

    def left(self, contribution: Contribution) -> None:
        """``contribution`` enters its round."""
        state = self.fragments[contribution.fragment]
        while len(state.attempts) >= MAX_ATTEMPTS:
            del state.attempts[next(iter(state.attempts))]
        state.attempts[contribution.digest] = contribution.tokens
        state.resumed = False
        state.residual_left = contribution.residual

    def reduce(
        self, fragment: int, members: Sequence[Member], payloads: Mapping[bytes, bytes | memoryview]
    ) -> Reduced:
        """Average and outer step on copies. ``payloads`` by digest; RemoteProtocolError if one does not decode."""
        size = self.fragments[fragment].anchor.size
        average = outer.weighted_average(
            [payloads[member.payload] for member in members],
            [member.tokens for member in members],
            self.codec,
            size,
            out=self.empty(size),
            norms=[member.norm for member in members],
        )
        return self.outer_step(fragment, average)

    def reduce_part(self, members: Sequence[Member], slices: Sequence[bytes | memoryview], numel: int) -> bytes:
        """The encoded average of ``numel`` values, from the members' slices in peer-id order; reads no state.

        RemoteProtocolError if a slice does not decode.
        """
        average = outer.weighted_average(
            slices,
            [member.tokens for member in members],
            self.codec,
            numel,
            norms=[member.norm for member in members],
        )
        return self.down.encode(average)

    def apply(self, fragment: int, parts: Sequence[Part], payloads: Mapping[bytes, bytes | memoryview]) -> Reduced:
        """Outer step on copies from encoded averages; ``payloads`` by digest. RemoteProtocolError as ``reduce``."""
        average = self.empty(self.fragments[fragment].anchor.size)
        average.fill(0.0)
        start = 0
        for part in parts:
            self.down.decode_add(payloads[part.payload], 1.0, average[start : part.stop])
            start = part.stop
        return self.outer_step(fragment, average)

    def outer_step(self, fragment: int, average: Vector) -> Reduced:
        """The outer step from an average, (n,) float32, whose memory becomes the new momentum's; on copies."""
        state = self.fragments[fragment]
        anchor, momentum = outer.nesterov(
            state.anchor,
            state.momentum,
            average,
            lr=self.config.outer.lr,
            momentum_factor=self.config.outer.momentum,
            anchor_out=self.empty(state.anchor.size),
            momentum_out=average,
        )
        return seal(anchor, momentum)

    def install(self, fragment: int, signed: SignedRecord, reduced: Reduced, *, me: bytes) -> bool:
        """Make ``reduced`` the fragment's state, as ``signed`` decided; whether a contribution of ``me`` is counted.

        RemoteProtocolError if the state here has other bits than the record says.
        """
        state = self.fragments[fragment]
        if signed.record.prev != state.tip.head:
            raise LocalProtocolError(f"fragment {fragment}: record does not extend this chain")
        if signed.record.state != reduced.digest:
            raise RemoteProtocolError(f"fragment {fragment}: the record's state differs from the one computed here")
        old, state.anchor, state.momentum = state.anchor, reduced.anchor, reduced.momentum
        counted = self._counted(state, signed, me)
        latest = next(reversed(state.attempts), None)
        if counted is not None and any(member.payload == latest for member in signed.record.members):
            state.residual = state.residual_left
        self._wait_for_local(state, old, counted)
        # The tip last: a contribution that saw the new one, in another thread, saw all the rest of it too.
        state.tip, state.record = after(signed.record), signed
        return counted is not None

    def replace(self, fragment: int, reduced: Reduced, signed: SignedRecord, *, me: bytes) -> None:
        """Take over a downloaded state whose digest was checked; the local weights will be rebased.

        Where ``signed`` counts a contribution of ``me`` they are merged instead: work that is in the anchor must not
        be contributed again.
        """
        state = self.fragments[fragment]
        counted = self._counted(state, signed, me)
        if counted is None and state.resumed and not state.clean and signed.record.version > state.tip.version + 1:
            # Whom the commits in between counted is not known. Work must not be in the anchor twice, so it is taken
            # for counted: at worst what was trained between two departures is lost.
            counted = state.tokens or None
        old, state.anchor, state.momentum = state.anchor, reduced.anchor, reduced.momentum
        state.residual = None
        self._wait_for_local(state, old, counted)
        state.tip, state.record = after(signed.record), signed

    def reload(self, fragment: int) -> Vector:
        """The anchor, (n,) float32, to take the place of local weights that are no longer finite.

        All that hung on those is forgotten: a pending result, the tokens behind them, the residual. A contribution
        that is under way may still be counted.
        """
        state = self.fragments[fragment]
        state.merge_with = state.shift = state.residual = state.residual_left = None
        state.tokens = 0
        state.attempts = dict.fromkeys(state.attempts, 0)
        return state.anchor

    def take_result(self, fragment: int) -> "Result":
        """The pending result, for a driver that applies it to tensors itself; it is pending no more."""
        state = self.fragments[fragment]
        result = Result(state.merge_with, state.shift)
        state.merge_with = state.shift = None
        return result

    def come_back(self, fragment: int, local: Vector, alpha: float | None = None) -> Vector:
        """New local weights, (n,) float32, from the present ones and the pending result; clears it.

        ``alpha`` takes the place of the run's, for experiments.
        """
        result = self.take_result(fragment)
        if result.anchor is not None:
            local = outer.merge(local, result.anchor, self.config.outer.alpha if alpha is None else alpha)
        if result.shift is not None:
            local = local + result.shift
        return local

    @staticmethod
    def _counted(state: FragmentState, signed: SignedRecord, me: bytes) -> int | None:
        """The tokens behind this peer's contribution in a record, None if it counts none.

        In a state that was just resumed a contribution that is not known left after the checkpoint. It held all the
        work that is in the local weights, so all of that is counted.
        """
        mine = [member.payload for member in signed.record.members if member.peer == me]
        unknown = state.tokens if state.resumed and state.tokens else None
        return state.attempts.get(mine[0], unknown) if mine else None

    @staticmethod
    def _wait_for_local(state: FragmentState, old: Vector, counted: int | None) -> None:
        """Keep what ``come_back`` will need: the new anchor to merge with, or its move away from ``old``."""
        if counted is not None:
            state.merge_with, state.shift = state.anchor, None
            state.tokens -= counted
        else:
            move = state.anchor - old
            state.shift = move if state.shift is None else state.shift + move
        state.attempts, state.residual_left = {}, None
