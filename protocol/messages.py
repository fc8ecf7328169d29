"""What peers say to each other in a round, and what they put on a bulk stream. Values only; sizes are checked here.

A round's conversation (every message names its fragment and round):

    member -> coordinator   Join       here I am, with this contribution
    coordinator -> member   Group      these are the members; exchange now
                            Redirect   somebody else coordinates this round
                            Behind     your chain and mine end differently, here is my end
    member -> coordinator   Have       contributions that I hold
    coordinator -> member   Commit     the signed decision
                            Abort      nothing changes, and why
    anyone -> anyone        Ask        tell me the outcome of this round, if you know it

Bulk streams carry one request each: Push and Payload are followed by raw bytes, see ``stretto.node.swarm.streams``.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from stretto.protocol import wire
from stretto.protocol.chain import MAX_MEMBERS, Member, SignedRecord, Tip, check_count, check_members
from stretto.protocol.digest import check_digest, check_peer
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock

PROTOCOL_VERSION = 1

MAX_TEXT = 300
"""Longest reason or name in characters that is read from a peer."""


def _check_round(message: Any) -> None:
    check_count("fragment", message.fragment)
    check_count("round", message.round)


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1e6):
        raise ValueError(f"{name} {value} is not a duration")


def _check_rate(value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= 1e6):
        raise ValueError(f"step rate {value} is not positive and finite")


@dataclass(frozen=True)
class Join:
    """A member enters a round: its chain's end, its contribution, its speed (inner steps per second) and patience.

    ``patience`` is the seconds until its deadline; ``tried`` names coordinators that did not answer it.
    """

    fragment: int
    round: int
    head: bytes
    version: int
    member: Member
    rate: float
    patience: float
    tried: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("head", self.head)
        check_count("version", self.version)
        _check_rate(self.rate)
        _check_seconds("patience", self.patience)
        if len(self.tried) > MAX_MEMBERS:
            raise ValueError("too many peers tried")
        for peer in self.tried:
            check_peer("tried", peer)


@dataclass(frozen=True)
class Group:
    """The group of a round is closed; ``seconds`` is how long the exchange may take."""

    fragment: int
    round: int
    members: tuple[Member, ...]
    seconds: float

    def __post_init__(self) -> None:
        _check_round(self)
        check_members(self.members)
        _check_seconds("seconds", self.seconds)


@dataclass(frozen=True)
class Redirect:
    """Another peer coordinates."""

    fragment: int
    round: int
    to: bytes

    def __post_init__(self) -> None:
        _check_round(self)
        check_peer("to", self.to)


@dataclass(frozen=True)
class Behind:
    """The sender's chain ends at ``tip``, the receiver's elsewhere. Whoever is worse repairs."""

    fragment: int
    round: int
    tip: Tip

    def __post_init__(self) -> None:
        _check_round(self)
        for peer in self.tip.electors:
            check_peer("elector", peer)


@dataclass(frozen=True)
class Have:
    """Members (by peer id) whose contribution the sender holds and has checked."""

    fragment: int
    round: int
    peers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_round(self)
        if len(self.peers) > MAX_MEMBERS:
            raise ValueError("too many peers")
        for peer in self.peers:
            check_peer("peer", peer)


@dataclass(frozen=True)
class Commit:
    """The decision of a round."""

    fragment: int
    round: int
    signed: SignedRecord

    def __post_init__(self) -> None:
        _check_round(self)
        if (self.signed.record.fragment, self.signed.record.round) != (self.fragment, self.round):
            raise ValueError("commit of another round inside")


@dataclass(frozen=True)
class Abort:
    """The round changes nothing; ``reason`` is for people."""

    fragment: int
    round: int
    reason: str

    def __post_init__(self) -> None:
        _check_round(self)
        if len(self.reason) > MAX_TEXT:
            raise ValueError("reason too long")


@dataclass(frozen=True)
class Ask:
    """What came out of this round?"""

    fragment: int
    round: int

    def __post_init__(self) -> None:
        _check_round(self)


Message: TypeAlias = Join | Group | Redirect | Behind | Have | Commit | Abort | Ask


@dataclass(frozen=True)
class Push:
    """Head of a bulk stream: the sender's contribution follows, ``nbytes`` long."""

    fragment: int
    round: int
    payload: bytes
    nbytes: int

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("payload", self.payload)
        check_count("nbytes", self.nbytes)


@dataclass(frozen=True)
class Fetch:
    """Request on a bulk stream: the contribution with this digest."""

    fragment: int
    round: int
    payload: bytes

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("payload", self.payload)


@dataclass(frozen=True)
class FetchState:
    """Request on a bulk stream: anchor and momentum of a fragment, with the record that led there."""

    fragment: int

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)


@dataclass(frozen=True)
class Payload:
    """Answer on a bulk stream: ``nbytes`` raw bytes with this digest follow."""

    digest: bytes
    nbytes: int

    def __post_init__(self) -> None:
        check_digest("digest", self.digest)
        check_count("nbytes", self.nbytes)


@dataclass(frozen=True)
class State:
    """Answer on a bulk stream: anchor then momentum follow, float32 little-endian, ``nbytes`` in all.

    ``record`` is the last commit of the fragment, None where the state is the initial one.
    """

    fragment: int
    tip: Tip
    record: SignedRecord | None
    clock: Clock
    digest: bytes
    nbytes: int

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)
        check_digest("digest", self.digest)
        check_count("nbytes", self.nbytes)


@dataclass(frozen=True)
class FetchRun:
    """Request on a bulk stream: the signed run config."""


@dataclass(frozen=True)
class SignedRun:
    """Answer: the canonical bytes of a run config, signed by the run's operator."""

    config: bytes
    operator: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_peer("operator", self.operator)
        if len(self.signature) != 64:
            raise ValueError("signature has the wrong length")

    def signed_bytes(self) -> bytes:
        """What the operator signs."""
        return b"stretto run\x00" + self.config


@dataclass(frozen=True)
class Missing:
    """Answer on a bulk stream: not here, and why."""

    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_TEXT:
            raise ValueError("reason too long")


@dataclass(frozen=True)
class Done:
    """Acknowledges a transfer that arrived whole; the client closes the stream after it."""


_KINDS: tuple[type, ...] = (
    Join, Group, Redirect, Behind, Have, Commit, Abort, Ask,
    Push, Fetch, FetchState, Payload, State, FetchRun, SignedRun, Missing, Done,
)  # fmt: skip
_TAGS = {kind: tag for tag, kind in enumerate(_KINDS)}


def encode(message: object) -> bytes:
    """msgpack bytes of any message of this file: its number, then its fields in order."""
    return wire.pack([_TAGS[type(message)], wire.to_plain(message)])


def decode(data: bytes | memoryview, *kinds: type) -> Any:
    """The message in ``data``; RemoteProtocolError unless it is whole, known and one of ``kinds`` (if any given)."""
    plain = wire.unpack(data)
    if not (isinstance(plain, list) and len(plain) == 2 and type(plain[0]) is int and 0 <= plain[0] < len(_KINDS)):
        raise RemoteProtocolError("not a message of this protocol version")
    kind = _KINDS[plain[0]]
    if kinds and kind not in kinds:
        wanted = " or ".join(k.__name__ for k in kinds)
        raise RemoteProtocolError(f"{kind.__name__} where {wanted} was expected")
    return wire.from_plain(kind, plain[1])
