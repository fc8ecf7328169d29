"""What peers say to each other in a round, and what they put on a bulk stream. Values only; sizes are checked here.

A round's conversation (every message names its fragment and round):

    member -> coordinator   Join       here I am, with this contribution
    coordinator -> member   Group      these are the members, and who reduces which part; exchange now
                            Redirect   somebody else coordinates this round
                            Behind     your chain and mine end differently, here is my end
                            Plan       somebody fell out: these count now, and these reduce
    member -> coordinator   Have       contributions that I hold
                            Averaged   averages that I hold, all of an attempt
    coordinator -> member   Commit     the signed decision
                            Abort      nothing changes, and why
    anyone -> anyone        Ask        tell me the outcome of this round, if you know it

Bulk streams carry requests one after the other. Push, Average and Payload are followed by raw bytes, see
``stretto.node.swarm.streams``.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from stretto.protocol import wire
from stretto.protocol.chain import (
    MAX_MEMBERS,
    MAX_PARTS,
    Member,
    SignedRecord,
    Tip,
    check_count,
    check_members,
    check_order,
    check_stops,
)
from stretto.protocol.digest import check_digest, check_peer
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import MAX_TIME, Clock

PROTOCOL_VERSION = 4

MAX_TEXT = 300
"""Longest reason or name in characters that is read from a peer."""

MAX_CHUNKS = 4096
"""Most pieces in which a fragment's state is offered."""

MAX_RECORDS = 64
"""Most commit records in one answer."""


def _check_round(message: Any) -> None:
    check_count("fragment", message.fragment)
    check_count("round", message.round)


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1e6):
        raise ValueError(f"{name} {value} is not a duration")


def _check_time(value: float) -> None:
    if not (math.isfinite(value) and abs(value) <= MAX_TIME):
        raise ValueError(f"time {value} is not a time")


def _check_rate(value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= 1e6):
        raise ValueError(f"step rate {value} is not positive and finite")


@dataclass(frozen=True)
class Join:
    """A member enters a round: its chain's end, its contribution, its speed (inner steps per second) and patience.

    ``patience`` is the seconds until its deadline, ``uplink`` the bytes per second that it can send (0: it reduces
    nothing for others); ``tried`` names coordinators that did not answer it.
    """

    fragment: int
    round: int
    head: bytes
    version: int
    member: Member
    rate: float
    patience: float
    tried: tuple[bytes, ...] = ()
    uplink: float = 0.0

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("head", self.head)
        check_count("version", self.version)
        _check_rate(self.rate)
        _check_seconds("patience", self.patience)
        if not (math.isfinite(self.uplink) and 0 <= self.uplink <= 1e12):
            raise ValueError(f"uplink {self.uplink} is not a rate")
        if len(self.tried) > MAX_MEMBERS:
            raise ValueError("too many peers tried")
        for peer in self.tried:
            check_peer("tried", peer)


@dataclass(frozen=True)
class Share:
    """A part of the fragment, values up to ``stop`` from where the one before ends, and the peer that reduces it."""

    reducer: bytes
    stop: int

    def __post_init__(self) -> None:
        check_peer("reducer", self.reducer)


@dataclass(frozen=True)
class Group:
    """The group of a round is closed; ``seconds`` is how long the exchange may take.

    With ``shares`` it reduces in parts; without any, members exchange their contributions all to all.
    """

    fragment: int
    round: int
    members: tuple[Member, ...]
    shares: tuple[Share, ...]
    seconds: float

    def __post_init__(self) -> None:
        _check_round(self)
        check_members(self.members)
        _check_seconds("seconds", self.seconds)
        check_stops([share.stop for share in self.shares])
        if not {share.reducer for share in self.shares} <= {member.peer for member in self.members}:
            raise ValueError("a reducer is no member of the group")


@dataclass(frozen=True)
class Plan:
    """A further attempt of an exchange in parts: these members count, and part i is reduced by ``reducers[i]``."""

    fragment: int
    round: int
    attempt: int
    counted: tuple[bytes, ...]
    reducers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_round(self)
        if not 0 < self.attempt < 100:
            raise ValueError(f"attempt {self.attempt} is not in 1..99")
        check_order("counted members", self.counted)
        if not 0 < len(self.reducers) <= MAX_PARTS:
            raise ValueError(f"{len(self.reducers)} parts, allowed are 1 to {MAX_PARTS}")
        for peer in (*self.counted, *self.reducers):
            check_peer("peer", peer)


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
    """Members (by peer id) whose contribution the sender holds and has checked.

    In an exchange in parts: whose slices of all parts that the sender reduces in ``attempt``.
    """

    fragment: int
    round: int
    attempt: int
    peers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_round(self)
        if len(self.peers) > MAX_MEMBERS:
            raise ValueError("too many peers")
        for peer in self.peers:
            check_peer("peer", peer)


@dataclass(frozen=True)
class Averaged:
    """The sender holds all averaged parts of ``attempt``; ``parts`` are the digests of their encoded bytes."""

    fragment: int
    round: int
    attempt: int
    parts: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_round(self)
        if not 0 < len(self.parts) <= MAX_PARTS:
            raise ValueError(f"{len(self.parts)} parts, allowed are 1 to {MAX_PARTS}")
        for part in self.parts:
            check_digest("part", part)


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


Message: TypeAlias = Join | Group | Redirect | Behind | Have | Commit | Abort | Ask | Plan | Averaged


@dataclass(frozen=True)
class Push:
    """On a bulk stream: the slice of the sender's contribution that makes part ``part`` follows, ``nbytes`` long.

    Without shares the whole contribution is part 0. ``payload`` is the digest of the bytes that follow, ``group`` that
    of the Group message: a round may have more than one, and each cuts the fragment in its own way.
    """

    fragment: int
    round: int
    group: bytes
    part: int
    payload: bytes
    nbytes: int

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("group", self.group)
        check_count("part", self.part)
        check_digest("payload", self.payload)
        check_count("nbytes", self.nbytes)


@dataclass(frozen=True)
class Average:
    """On a bulk stream: the encoded average of part ``part`` in ``attempt`` follows, ``nbytes`` long."""

    fragment: int
    round: int
    group: bytes
    attempt: int
    part: int
    payload: bytes
    nbytes: int

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("group", self.group)
        check_count("attempt", self.attempt)
        check_count("part", self.part)
        check_digest("payload", self.payload)
        check_count("nbytes", self.nbytes)


@dataclass(frozen=True)
class Fetch:
    """Request on a bulk stream: the contribution or the average of a round with this digest."""

    fragment: int
    round: int
    payload: bytes

    def __post_init__(self) -> None:
        _check_round(self)
        check_digest("payload", self.payload)


@dataclass(frozen=True)
class FetchState:
    """Request on a bulk stream: what the sender's state of a fragment is, and the digests of its chunks."""

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
    """Answer on a bulk stream: anchor then momentum, float32 little-endian, ``nbytes`` in all, wait to be fetched.

    They come in chunks of ``chunk_bytes`` (the last may be shorter) with these digests. ``record`` is the last commit
    of the fragment, None where the state is the initial one; ``digest`` is the state's own.
    """

    fragment: int
    tip: Tip
    record: SignedRecord | None
    clock: Clock
    digest: bytes
    nbytes: int
    chunk_bytes: int
    chunks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)
        check_digest("digest", self.digest)
        check_count("nbytes", self.nbytes)
        check_count("chunk_bytes", self.chunk_bytes)
        for chunk in self.chunks:
            check_digest("chunk", chunk)
        if self.chunk_bytes == 0 or len(self.chunks) != -(-self.nbytes // self.chunk_bytes):
            raise ValueError(f"{len(self.chunks)} chunks of {self.chunk_bytes} bytes do not make {self.nbytes}")
        if len(self.chunks) > MAX_CHUNKS:
            raise ValueError(f"{len(self.chunks)} chunks, allowed are {MAX_CHUNKS}")


@dataclass(frozen=True)
class FetchChunk:
    """Request on a bulk stream: chunk ``index`` of the state of a fragment whose chain ends at ``head``."""

    fragment: int
    head: bytes
    index: int

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)
        check_digest("head", self.head)
        check_count("index", self.index)


@dataclass(frozen=True)
class FetchRecords:
    """Request on a bulk stream: the commits that follow ``head``, as far as the sender still has their averages."""

    fragment: int
    head: bytes

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)
        check_digest("head", self.head)


@dataclass(frozen=True)
class Records:
    """Answer on a bulk stream: commit records in the order of their versions, none if there is nothing after."""

    records: tuple[SignedRecord, ...]

    def __post_init__(self) -> None:
        if len(self.records) > MAX_RECORDS:
            raise ValueError(f"{len(self.records)} records, allowed are {MAX_RECORDS}")


@dataclass(frozen=True)
class FetchLogged:
    """Request on a bulk stream: the bytes with this digest that the commit of ``version`` was made from."""

    fragment: int
    version: int
    payload: bytes

    def __post_init__(self) -> None:
        check_count("fragment", self.fragment)
        check_count("version", self.version)
        check_digest("payload", self.payload)


@dataclass(frozen=True)
class FetchTime:
    """Request on a bulk stream: what time is it? ``sent`` is the asker's own, swarm time in seconds."""

    sent: float

    def __post_init__(self) -> None:
        _check_time(self.sent)


@dataclass(frozen=True)
class Time:
    """Answer: ``sent`` as it was, and the answering peer's swarm time when the question came and when this left.

    ``correction`` is its swarm time minus its machine's clock: whose machine is wrong shows only there, since swarm
    times agree. Nothing is corrected by it.
    """

    sent: float
    received: float
    answered: float
    correction: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.sent, self.received, self.answered, self.correction):
            _check_time(value)


@dataclass(frozen=True)
class Busy:
    """Answer on a bulk stream: not now, perhaps in ``seconds``."""

    seconds: float

    def __post_init__(self) -> None:
        _check_seconds("seconds", self.seconds)


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
    Join, Group, Redirect, Behind, Have, Commit, Abort, Ask, Plan, Averaged,
    Push, Average, Fetch, Payload, FetchState, State, FetchChunk, FetchRecords, Records, FetchLogged,
    FetchTime, Time, FetchRun, SignedRun, Busy, Missing, Done,
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
