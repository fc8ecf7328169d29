"""The history of a fragment: commit records in a hash chain.

    head_0 = H(run, fragment, digest of the initial state)        head_v = H(head_(v-1), record_v)

The anchor is a pure function of the initial weights and the chain, since the outer step gives the same bits
everywhere; so equal heads mean equal anchors, and a record also carries the digest of the state after it, so that a
peer sees at once when its own bits differ and a download can be checked.

Who may extend the chain is *dynamic voting* (Jajodia and Mutchler, 1990): each record names the *electors* of the
next one, and the members counted in a commit must be more than half of the electors; exactly half is enough only with
the first of them in peer-id order. So of two halves of a network at most one goes on, however often the membership
changes. Electors are the counted members and those earlier electors that the coordinator still sees alive: were it the
counted members alone, a few late contributions would shrink the electorate to one or two peers, and the run would
stand still when they leave. Of two lineages the one with more committed tokens wins, ties by hash.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stretto.protocol import wire
from stretto.protocol.digest import check_digest, check_peer, digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock, follows

MAX_MEMBERS = 256
"""Upper bound of a group, whatever the run config says."""

MAX_PARTS = 1024
"""Most parts into which a fragment is cut for one reduction."""

MAX_NORM = 1e30
"""Largest norm of a contribution: above the values that training gives, below those whose squares overflow."""

MAX_COUNT = 1 << 62
"""Upper bound of any counter that a peer sends."""

MAX_TOKENS = 1 << 40
"""Upper bound of the tokens behind one contribution, so that no peer can make a chain's total overflow."""


def check_count(name: str, value: int) -> None:
    """ValueError unless 0 <= value <= MAX_COUNT."""
    if not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} {value} is not a count")


@dataclass(frozen=True)
class Member:
    """A contribution counted in a round: whose, how many tokens behind it, digest of its encoded outer gradient.

    ``norm`` is the L2 norm of the outer gradient, as its owner says; see ``outer.coefficients``.
    """

    peer: bytes
    tokens: int
    payload: bytes
    norm: float = 0.0

    def __post_init__(self) -> None:
        check_peer("member", self.peer)
        if not 0 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"tokens {self.tokens} is not in 0..2^40")
        check_digest("payload", self.payload)
        if not 0 <= self.norm <= MAX_NORM:
            raise ValueError(f"norm {self.norm} is not in 0..{MAX_NORM:g}")


def check_order(what: str, peers: Sequence[bytes]) -> None:
    """ValueError unless there are 1 to ``MAX_MEMBERS`` peer ids, in order, each once."""
    if not 0 < len(peers) <= MAX_MEMBERS:
        raise ValueError(f"{len(peers)} {what}, allowed are 1 to {MAX_MEMBERS}")
    if any(a >= b for a, b in itertools.pairwise(peers)):
        raise ValueError(f"{what} are not in peer-id order or named twice")


def check_members(members: tuple[Member, ...]) -> None:
    """ValueError unless there is at least one member and they are in peer-id order, each once."""
    check_order("members", [member.peer for member in members])


def check_stops(stops: Sequence[int]) -> None:
    """ValueError unless these are the ends of consecutive parts, none empty, at most ``MAX_PARTS``."""
    if len(stops) > MAX_PARTS:
        raise ValueError(f"{len(stops)} parts, allowed are {MAX_PARTS}")
    if any(a >= b for a, b in itertools.pairwise([0, *stops])):
        raise ValueError("parts are empty or not in order")


@dataclass(frozen=True)
class Part:
    """The encoded average of the fragment's values up to ``stop``, from where the part before ends."""

    stop: int
    payload: bytes

    def __post_init__(self) -> None:
        check_digest("payload", self.payload)


@dataclass(frozen=True)
class CommitRecord:
    """The decision of a round: these contributions count, this is the state after them, this is the clock.

    ``version`` counts the commits of the fragment from 1, ``tokens_total`` the tokens in the chain up to here.
    ``parts`` are the encoded averages of an exchange in parts; without any, the members' contributions were averaged.
    """

    run: bytes
    fragment: int
    round: int
    version: int
    prev: bytes
    members: tuple[Member, ...]
    electors: tuple[bytes, ...]
    state: bytes
    tokens_total: int
    clock: Clock
    coordinator: bytes
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        for name in ("run", "prev", "state"):
            check_digest(name, getattr(self, name))
        for name in ("fragment", "round", "version", "tokens_total"):
            check_count(name, getattr(self, name))
        check_peer("coordinator", self.coordinator)
        check_members(self.members)
        check_stops([part.stop for part in self.parts])
        check_order("electors", self.electors)
        for peer in self.electors:
            check_peer("elector", peer)
        if not {member.peer for member in self.members} <= set(self.electors):
            raise ValueError("a counted member is no elector")

    def payloads(self) -> tuple[bytes, ...]:
        """Digests of all bytes that the state after this record is made from, given the one before."""
        return tuple(x.payload for x in (self.parts or self.members))

    def head(self) -> bytes:
        """The head of the chain that ends with this record."""
        return digest("chain", [self.prev, wire.encode(self)])

    def signed_bytes(self) -> bytes:
        """What the coordinator signs."""
        return b"stretto commit\x00" + wire.encode(self)


@dataclass(frozen=True)
class SignedRecord:
    """A commit record with its coordinator's Ed25519 signature (64 bytes)."""

    record: CommitRecord
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.signature) != 64:
            raise ValueError(f"signature has {len(self.signature)} bytes, not 64")


@dataclass(frozen=True)
class Tip:
    """The end of a fragment's chain, all that voting and fork choice need."""

    fragment: int
    version: int
    head: bytes
    tokens_total: int
    electors: tuple[bytes, ...] = field(default=())
    """Peers of whom a quorum must be counted in the next commit, in peer-id order; empty before the first."""
    tokens_before: int = 0
    """``tokens_total`` without the last commit."""

    def __post_init__(self) -> None:
        check_digest("head", self.head)
        for name in ("fragment", "version", "tokens_total", "tokens_before"):
            check_count(name, getattr(self, name))
        if self.electors:
            check_order("electors", self.electors)

    def beats(self, other: "Tip") -> bool:
        """Fork choice: ``weight``, then the larger hash."""
        return (self.weight, self.head) > (other.weight, other.head)

    @property
    def weight(self) -> tuple[int, int, int]:
        """More committed tokens before the last commit, then more in all, then more commits.

        A commit is beyond doubt once another one was built on it. The last one may be a decision that nobody but its
        coordinator heard, which was cut off or frozen just then; however many tokens it counts, it must not outweigh
        what all others have built meanwhile.
        """
        return self.tokens_before, self.tokens_total, self.version

    def quorum(self, peers: Collection[bytes], resigned: Collection[bytes] = ()) -> bool:
        """Dynamic voting: whether ``peers`` may commit the next record.

        Electors in ``resigned`` are left out of the reckoning: they have said that they vote no more. That is safe
        even where not everybody has heard it, since whoever resigned votes on no side.
        """
        electors = [peer for peer in self.electors if peer not in resigned or peer in peers]
        if not electors:
            return bool(peers)
        present = [peer for peer in electors if peer in peers]
        if 2 * len(present) == len(electors):
            return electors[0] in peers
        return 2 * len(present) > len(electors)


def genesis(run: bytes, fragment: int, initial_state: bytes) -> Tip:
    """The tip before any commit; ``initial_state`` is the digest of the initial anchor and zero momentum."""
    head = digest("genesis", [run, fragment.to_bytes(4, "big"), initial_state])
    return Tip(fragment=fragment, version=0, head=head, tokens_total=0)


def after(record: CommitRecord) -> Tip:
    """The tip of a chain that ends with ``record``."""
    return Tip(
        fragment=record.fragment,
        version=record.version,
        head=record.head(),
        tokens_total=record.tokens_total,
        electors=record.electors,
        tokens_before=max(0, record.tokens_total - sum(member.tokens for member in record.members)),
    )


def check_extends(record: CommitRecord, tip: Tip, clock: Clock, resigned: Collection[bytes] = ()) -> None:
    """RemoteProtocolError unless ``record`` is a lawful next record of the chain that ends at ``tip``.

    Signature and membership of the group are checked by the round, which knows them.
    """
    if record.fragment != tip.fragment or record.prev != tip.head or record.version != tip.version + 1:
        raise RemoteProtocolError(f"record of version {record.version} does not extend version {tip.version}")
    if record.tokens_total != tip.tokens_total + sum(member.tokens for member in record.members):
        raise RemoteProtocolError("record miscounts the tokens of its chain")
    if not tip.quorum({member.peer for member in record.members}, resigned):
        raise RemoteProtocolError("record counts too few electors: no quorum")
    if not set(record.electors) <= {member.peer for member in record.members} | set(tip.electors):
        raise RemoteProtocolError("record names electors that were neither counted nor electors before")
    if record.clock.round != record.round + 1 or not follows(clock, record.clock):
        raise RemoteProtocolError(f"record sets the clock to {record.clock}, which does not follow {clock}")
