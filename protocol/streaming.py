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

Arrays are never changed in place once they are here: anchors are replaced, so other threads may read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.protocol import outer
from stretto.protocol.chain import Member, SignedRecord, Tip, after, genesis
from stretto.protocol.codecs import Codec, get_codec
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import payload_digest, state_digest
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.outer import Vector


@dataclass(frozen=True)
class Contribution:
    """A peer's encoded outer gradient: payload bytes, their digest, the tokens behind it.

    ``head`` is the chain whose anchor it was taken from.
    """

    fragment: int
    head: bytes
    payload: bytes
    digest: bytes
    tokens: int


@dataclass(frozen=True)
class Reduced:
    """Outer state after a round that is not yet installed: anchor and momentum (n,) float32, and their digest."""

    anchor: Vector
    momentum: Vector
    digest: bytes


@dataclass
class FragmentState:
    """Everything a peer holds of one fragment besides its local weights."""

    anchor: Vector
    momentum: Vector
    tip: Tip
    record: SignedRecord | None = None
    tokens: int = 0
    """Trained on since this peer's last counted contribution."""
    tokens_left: int = 0
    """Of these, how many stand behind the contribution that left last."""
    digest_left: bytes = b""
    """Digest of the contribution that left last, as long as nothing has come back."""
    merge_with: Vector | None = None
    """A counted round's anchor that the local weights have not met yet."""
    shift: Vector | None = None
    """The anchor's move in rounds that did not count this peer, not yet added to the local weights."""

    @property
    def pending(self) -> bool:
        """Whether a result waits for the local weights."""
        return self.merge_with is not None or self.shift is not None


@dataclass
class StreamingDiLoCo:
    """The outer side of one replica. ``initial`` holds the initial weights per fragment, (n,) float32 each."""

    config: RunConfig
    initial: Sequence[Vector]
    fragments: list[FragmentState] = field(init=False)
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = get_codec(self.config.wire.up)
        run = self.config.digest()
        self.fragments = []
        for index, weights in enumerate(self.initial):
            anchor = np.array(weights, dtype=np.float32)
            momentum = np.zeros_like(anchor)
            tip = genesis(run, index, state_digest(anchor, momentum))
            self.fragments.append(FragmentState(anchor, momentum, tip))
        self.initial = ()

    def trained(self, tokens: int) -> None:
        """One inner step on ``tokens`` tokens was done: it touched every fragment."""
        for state in self.fragments:
            state.tokens += tokens

    def leave(self, fragment: int, local: Vector) -> Contribution:
        """The contribution of the present local weights, (n,) float32. LocalProtocolError if a result is pending.

        Heavy; it only reads, so any thread may run it. ``left`` makes it the one that counts.
        """
        state = self.fragments[fragment]
        if state.pending:
            raise LocalProtocolError(f"fragment {fragment}: the last result has not been merged yet")
        head, anchor, tokens = state.tip.head, state.anchor, state.tokens
        payload = self.codec.encode(outer.outer_gradient(anchor, local))
        return Contribution(fragment, head, payload, payload_digest(payload), tokens)

    def left(self, contribution: Contribution) -> None:
        """``contribution`` enters its round."""
        state = self.fragments[contribution.fragment]
        state.tokens_left, state.digest_left = contribution.tokens, contribution.digest

    def reduce(
        self, fragment: int, members: Sequence[Member], payloads: Mapping[bytes, bytes | memoryview]
    ) -> Reduced:
        """Average and outer step on copies. ``payloads`` by digest; RemoteProtocolError if one does not decode."""
        state = self.fragments[fragment]
        average = outer.weighted_average(
            [payloads[member.payload] for member in members],
            [member.tokens for member in members],
            self.codec,
            state.anchor.size,
        )
        anchor, momentum = outer.nesterov(
            state.anchor,
            state.momentum,
            average,
            lr=self.config.outer.lr,
            momentum_factor=self.config.outer.momentum,
        )
        return Reduced(anchor, momentum, state_digest(anchor, momentum))

    def install(self, fragment: int, signed: SignedRecord, reduced: Reduced, *, counted: bool) -> None:
        """Make ``reduced`` the fragment's state, as ``signed`` decided. Raises RemoteProtocolError if bits differ."""
        state = self.fragments[fragment]
        if signed.record.prev != state.tip.head:
            raise LocalProtocolError(f"fragment {fragment}: record does not extend this chain")
        if signed.record.state != reduced.digest:
            raise RemoteProtocolError(f"fragment {fragment}: the record's state differs from the one computed here")
        old, state.anchor, state.momentum = state.anchor, reduced.anchor, reduced.momentum
        state.tip, state.record = after(signed.record), signed
        self._wait_for_local(state, old, counted)

    def replace(
        self, fragment: int, reduced: Reduced, tip: Tip, record: SignedRecord | None, *, counted: bool = False
    ) -> None:
        """Take over a downloaded state whose digest was checked; the local weights will be rebased.

        ``counted`` says that ``record`` counts the contribution that left last: then they are merged, since work that
        is in the anchor must not be contributed again.
        """
        state = self.fragments[fragment]
        old, state.anchor, state.momentum = state.anchor, reduced.anchor, reduced.momentum
        state.tip, state.record = tip, record
        self._wait_for_local(state, old, counted)

    def come_back(self, fragment: int, local: Vector) -> Vector:
        """New local weights, (n,) float32, from the present ones and the pending result; clears it."""
        state = self.fragments[fragment]
        if state.merge_with is not None:
            local = outer.merge(local, state.merge_with, self.config.outer.alpha)
        if state.shift is not None:
            local = local + state.shift
        state.merge_with = state.shift = None
        return local

    @staticmethod
    def _wait_for_local(state: FragmentState, old: Vector, counted: bool) -> None:
        """Keep what ``come_back`` will need: the new anchor to merge with, or its move away from ``old``."""
        if counted:
            state.merge_with, state.shift = state.anchor, None
            state.tokens -= state.tokens_left
        else:
            move = state.anchor - old
            state.shift = move if state.shift is None else state.shift + move
        state.tokens_left, state.digest_left = 0, b""
