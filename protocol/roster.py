"""What a peer tells the swarm about itself: one small record, signed and stored in the DHT under its peer id.

The roster is read in the background, never in a round's path. A record is the sender's word and nothing more: clocks
are adopted from it and repairs begun because of it, but no state is.
"""

import math
from dataclasses import dataclass

from stretto.protocol.chain import check_count
from stretto.protocol.digest import check_digest
from stretto.protocol.schedule import Clock

MAX_RECORD = 4096
"""Largest record in bytes."""

STATES = ("joining", "ready", "training", "finished", "leaving")


@dataclass(frozen=True)
class PeerRecord:
    """One peer: where it is, what it does, how far it is.

    ``rate`` is in inner steps per second (0 before it is known), ``versions`` counts commits per fragment and
    ``chain_tokens`` the tokens in their chains, ``heads`` is one digest over all chain heads, ``tau`` the overlap in
    inner steps, ``loss`` the latest training loss.
    """

    version: str
    state: str
    addresses: tuple[str, ...]
    client_mode: bool
    rate: float
    step: int
    loss: float
    tau: int
    tokens: int
    clock: Clock | None
    versions: tuple[int, ...]
    chain_tokens: tuple[int, ...]
    heads: bytes

    def __post_init__(self) -> None:
        if len(self.version) > 32 or self.state not in STATES:
            raise ValueError(f"unknown state {self.state!r} or odd version")
        if len(self.addresses) > 16 or any(len(address) > 300 for address in self.addresses):
            raise ValueError("too many or too long addresses")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError("rate is not a rate")
        if len(self.versions) > 256 or len(self.chain_tokens) != len(self.versions):
            raise ValueError("too many fragments, or not as many token counts as versions")
        for value in (self.step, self.tau, self.tokens, *self.versions, *self.chain_tokens):
            check_count("counter", value)
        check_digest("heads", self.heads)
