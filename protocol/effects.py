"""What a peer asks its driver to do: bytes to move, arithmetic to carry out, a round that is over, a state to get.

``stretto.protocol.peer`` returns them; ``stretto.node.swarm.exchange`` carries them out with sockets and threads,
``stretto.protocol.simulation`` in virtual time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stretto.protocol import messages as m
from stretto.protocol.actions import Basis, Outcome, ReducePart, Send
from stretto.protocol.streaming import Contribution


@dataclass(frozen=True)
class PushTo:
    """Send parts of the own contribution to a member: ``Peer.outgoing`` makes the headers and bytes."""

    to: bytes
    round: int
    group: bytes
    contribution: Contribution
    parts: tuple[tuple[int, int, int], ...]
    """Number, first value and last value + 1 of each."""
    numel: int


@dataclass(frozen=True)
class PushAverageTo:
    """Send an averaged part to a member."""

    to: bytes
    header: m.Average
    data: bytes


@dataclass(frozen=True)
class FetchFrom:
    """Get the bytes with digest ``payload`` from ``source``; report ``fetched`` or ``fetch_failed``.

    They are a contribution, or an averaged part of ``numel`` values.
    """

    source: bytes
    round: int
    payload: bytes
    numel: int | None


@dataclass(frozen=True)
class Work:
    """Arithmetic of a round: call ``Peer.reduce(work)``, in any thread, then ``Peer.reduced(work, result, now)``.

    It takes the outer step from ``basis``.
    """

    round: int
    fragment: int
    basis: Basis
    payloads: Mapping[bytes, bytes]


@dataclass(frozen=True)
class PartWork:
    """Arithmetic, as ``Work``: the average of ``slices``, of values start..stop, in the order of ``members``."""

    round: int
    fragment: int
    group: bytes
    part: ReducePart
    slices: tuple[bytes, ...]
    numel: int


@dataclass(frozen=True)
class Averaged:
    """What ``PartWork`` comes to: the encoded average and its digest."""

    data: bytes
    digest: bytes


@dataclass(frozen=True)
class Over:
    """A round is over for this peer; ``counted`` says whether its own contribution is in the record."""

    round: int
    fragment: int
    outcome: Outcome
    counted: bool
    seconds: float
    """From the departure to now."""


@dataclass(frozen=True)
class Repair:
    """Download the state of ``fragment`` from ``source``; report ``adopt`` or ``repair_failed``."""

    fragment: int
    source: bytes
    reason: str


Effect: TypeAlias = Send | PushTo | PushAverageTo | FetchFrom | Work | PartWork | Over | Repair
