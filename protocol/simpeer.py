"""One played peer of a simulation: its replica, its protocol, and what has become of it; with made-up identities.

Identities and signatures are digests: they are well-formed and can be checked, and anybody could make them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from stretto.protocol.digest import digest
from stretto.protocol.effects import Effect
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer


class Replica(Protocol):
    """The local weights of one peer and the inner optimizer on them."""

    def step(self) -> int:
        """One inner step; returns the tokens it trained on."""

    def get(self, fragment: int) -> Vector:
        """The local weights of a fragment, (n,) float32."""

    def set(self, fragment: int, weights: Vector) -> None:
        """Replace the local weights of a fragment."""


def peer_id(index: int) -> bytes:
    """A well-formed peer id for peer number ``index``, from a made-up public key."""
    return b"\x00\x24\x08\x01\x12\x20" + digest("sim peer", [index.to_bytes(4, "big")])


def signature(peer: bytes, message: bytes) -> bytes:
    """The made-up signature (64 bytes) of ``peer``."""
    return digest("sim sign", [peer, message]) * 2


def verify(peer: bytes, message: bytes, signed: bytes) -> bool:
    """Whether ``signed`` is the signature of ``peer`` under ``message``."""
    return signature(peer, message) == signed


@dataclass
class SimPeer:
    """One played peer."""

    index: int
    replica: Replica
    peer: Peer
    step_time: float
    tau: int
    steps: int = 0
    alive: bool = True
    joining: bool = False
    """Started again, and not yet in possession of the state that the others had then."""
    frozen: bool = False
    life: int = 0
    """Counts the crashes: what an earlier life has begun comes to nothing."""
    skew: float = 0.0
    """How far its clock is ahead."""
    slow: float = 1.0
    """Factor on the time that its arithmetic takes."""
    next_round: int = 0
    waits: int = 0
    """Counts the waits for a departure: only the last one is in force."""
    tick_at: float | None = None
    """For which deadline, by its own clock, a tick is on its way."""
    backlog: deque[Callable[[], None]] = field(default_factory=deque)
    """What has happened to it while it was frozen."""
    left_at: dict[int, int] = field(default_factory=dict)
    """Step at which each fragment's last contribution left."""
    seen: dict[bytes, float] = field(default_factory=dict)
    """When each other peer's roster record was renewed last."""
    roster: frozenset[bytes] | None = None
    """Who is there, as it was told last."""
    asked: list[Effect] = field(default_factory=list)
    """Requests to other peers that are still open."""
    overlaps: list[int] = field(default_factory=list)
    """Inner steps between snapshot and merge, for each merged round."""
