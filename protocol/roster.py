"""What a peer tells the swarm about itself: one small record, signed and stored in the DHT under its peer id.

The roster is read in the background, never in a round's path. A record is the sender's word and nothing more: clocks
are adopted from it and repairs begun because of it, but no state is.
"""

import math
from dataclasses import dataclass, field, replace

from stretto.protocol import wire
from stretto.protocol.chain import check_count
from stretto.protocol.digest import check_digest
from stretto.protocol.schedule import Clock
from stretto.protocol.units import DataWord

MAX_RECORD = 6144
"""Largest record in bytes. Every field at its limit at once would be more; ``fitted`` says what gives way."""

STATES = ("joining", "ready", "training", "paused", "finished", "leaving")


@dataclass(frozen=True)
class PeerRecord:
    """One peer: where it is, what it does, how far it is.

    ``rate`` is in inner steps per second (0 before it is known), ``versions`` counts commits per fragment,
    ``chain_tokens`` the tokens in their chains and ``last_tokens`` those of the last commits, ``heads`` is one digest
    over all chain heads, ``tau`` the overlap in inner steps, ``loss`` the latest training loss, ``data`` the work
    units that it has and those that it knows of. ``tokens`` is what it has trained on, ``uncounted`` how many of these
    no round has counted yet, ``lost`` what it has seen lost with peers that vanished.
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
    last_tokens: tuple[int, ...]
    heads: bytes
    uncounted: int = 0
    lost: int = 0
    data: DataWord = field(default_factory=DataWord)

    def __post_init__(self) -> None:
        if len(self.version) > 32 or self.state not in STATES:
            raise ValueError(f"unknown state {self.state!r} or odd version")
        if len(self.addresses) > 16 or any(len(address) > 300 for address in self.addresses):
            raise ValueError("too many or too long addresses")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError("rate is not a rate")
        if len(self.versions) > 256 or {len(self.chain_tokens), len(self.last_tokens)} != {len(self.versions)}:
            raise ValueError("too many fragments, or not as many token counts as versions")
        counters = (self.step, self.tau, self.tokens, self.uncounted, self.lost)
        for value in (*counters, *self.versions, *self.chain_tokens, *self.last_tokens):
            check_count("counter", value)
        if any(last > total for last, total in zip(self.last_tokens, self.chain_tokens, strict=True)):
            raise ValueError("a last commit of more tokens than its chain")
        check_digest("heads", self.heads)

    def weights(self) -> list[tuple[int, int, int]]:
        """The ``Tip.weight`` of each fragment's chain, as this peer says."""
        rows = zip(self.versions, self.chain_tokens, self.last_tokens, strict=True)
        return [(tokens - last, tokens, version) for version, tokens, last in rows]


def fitted(record: PeerRecord) -> PeerRecord:
    """``record``, with as many of its addresses as fit into ``MAX_RECORD``, the first ones.

    What a peer says of the data takes at most 455 bytes, a fragment 3 to 27 for its version and tokens, an address up
    to 303, all else 160. So there is room for three addresses of any length with 170 fragments of any age, and for
    seven with 256 fragments whose chains have fewer than 65,536 commits and 2^32 tokens each.
    """
    while record.addresses and len(wire.encode(record)) > MAX_RECORD:
        record = replace(record, addresses=record.addresses[:-1])
    return record
