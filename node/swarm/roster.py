"""The roster: who is in the run, read and renewed in the background through the DHT.

Each peer stores one signed ``PeerRecord`` under the run's roster key, renewed every few seconds with a short expiry,
so a dead peer is gone soon and a leaving one at once. Rounds only look at what was read last.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from stretto.node.swarm.host import Host
from stretto.node.swarm.records import roster_key
from stretto.protocol import wire
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.roster import MAX_RECORD, PeerRecord, fitted

logger = logging.getLogger(__name__)

RENEW = 4.0
"""Seconds between two renewals."""

NUDGED = 0.7
"""Seconds between two renewals at the least, however often it is nudged: each costs every peer some work."""

EXPIRY = 20.0
"""Seconds after which a record that was not renewed is gone."""

DHT_TIMEOUT = 10.0

CALM, CALM_EXPIRY, CALM_NUDGED = 100.0, 240.0, 5.0
"""The same for a peer that pauses to save traffic: reading the roster costs the record of every peer each time."""


class Roster:
    """The other peers' records, as of the last reading.

    ``own`` makes this peer's record, None if it has none; ``now`` is the DHT's time. After each reading that ``keep``
    makes, ``heard`` is called with this peer's own record, and the DHT time at which it ends, if it had been stored
    before the reading began and the reading shows it; else with None. So whoever reads later sees that record.
    """

    def __init__(
        self, host: Host, run: bytes, own: Callable[[], PeerRecord | None], now: Callable[[], float] = time.time
    ) -> None:
        self._host, self._key, self._own, self._now = host, roster_key(run), own, now
        self.peers: dict[bytes, PeerRecord] = {}
        self.expires: dict[bytes, float] = {}
        """When each record ends, in the DHT's time: its renewal plus its lifetime."""
        self.read_at = 0.0
        self.twin: tuple[str, ...] | None = None
        """Addresses in a record that carries this peer's id but was not stored here."""
        self._born = time.monotonic()
        self.heard: Callable[[PeerRecord | None, float], None] = lambda _record, _ends: None
        self.changed = asyncio.Event()
        self.first_read = asyncio.Event()
        self._own_ends = 0.0
        """When this peer's own record ends, as the last reading has it."""
        self._connected: dict[bytes, float] = {}
        self._nudged = asyncio.Event()
        self._ends = 0.0
        """When the record that was stored last ends."""
        self.calm = False
        """Renew and read rarely."""
        self.silent = False
        """Neither renew nor read."""

    def nudge(self) -> None:
        """Renew and read now rather than at the next turn."""
        self._nudged.set()

    async def keep(self) -> None:
        """Renew and read until cancelled."""
        while True:
            if self.silent:
                await asyncio.sleep(NUDGED)
                continue
            began = time.monotonic()
            self._nudged.clear()
            stored, ends = await self.renew()
            self._own_ends, read_before = 0.0, self.read_at
            await self.read()
            if self.read_at > read_before:
                self.heard(stored if self._own_ends >= ends else None, ends)
            calm = self.calm
            await asyncio.sleep(CALM_NUDGED if calm else NUDGED)
            pause = max(0.0, (CALM if calm else RENEW) - (time.monotonic() - began))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), pause)

    async def renew(self) -> tuple[PeerRecord | None, float]:
        """Store this peer's record. Returns it, None if the DHT did not take it, and when it ends (DHT's time)."""
        record = self._own()
        if record is None:
            return None, 0.0
        record, ends = fitted(record), self._now() + (CALM_EXPIRY if self.calm else EXPIRY)
        # The DHT takes no record that ends before the one it has, such as one of a calm time that is over.
        ends = self._ends = max(ends, self._ends + 0.001)
        store = self._host.node.store(self._key, wire.encode(record), ends, subkey=self._host.identity.peer_id_bytes)
        try:
            taken = await asyncio.wait_for(store, DHT_TIMEOUT)
        except asyncio.TimeoutError:
            logger.warning("the DHT did not take this peer's record within %.0f s", DHT_TIMEOUT)
            taken = False
        return (record if taken else None), ends

    async def read(self) -> dict[bytes, PeerRecord]:
        """Read all records; keeps the old ones if the DHT does not answer."""
        try:
            found = await asyncio.wait_for(self._host.node.get(self._key, latest=True), DHT_TIMEOUT)
        except asyncio.TimeoutError:
            logger.warning("the DHT did not answer within %.0f s; using the roster of before", DHT_TIMEOUT)
            self._drop_expired()
            return self.peers
        peers: dict[bytes, PeerRecord] = {}
        expires: dict[bytes, float] = {}
        if found is not None and isinstance(found.value, dict):
            for subkey, item in found.value.items():
                if not isinstance(subkey, bytes):
                    continue
                with contextlib.suppress(RemoteProtocolError):
                    if isinstance(item.value, bytes) and len(item.value) <= MAX_RECORD:
                        peers[subkey] = wire.decode(PeerRecord, item.value)
                        expires[subkey] = item.expiration_time
        self._own_ends = expires.get(self._host.identity.peer_id_bytes, 0.0)
        self._notice_twin(peers.pop(self._host.identity.peer_id_bytes, None))
        self.peers, self.expires, self.read_at = peers, expires, time.monotonic()
        self.changed.set()
        self.first_read.set()
        await self._connect_new()
        return peers

    def _drop_expired(self) -> None:
        """Nobody is taken for present because the DHT is silent."""
        now = self._now()
        self.peers = {peer: record for peer, record in self.peers.items() if self.expires.get(peer, now) > now}
        self.changed.set()

    def _notice_twin(self, record: PeerRecord | None) -> None:
        """A record of this peer with other addresses: a second process uses its key. A restart does not count."""
        if record is None or time.monotonic() - self._born < 1.5 * EXPIRY:
            return
        if not set(record.addresses) & set(self._host.addresses):
            self.twin = record.addresses

    def forget(self, peer: bytes) -> None:
        """The connection to ``peer`` broke: connect anew at the next reading."""
        self._connected.pop(peer, None)

    async def _connect_new(self) -> None:
        """Tell the daemon the addresses of new peers, so that streams open by peer id; repeated every minute."""
        now = time.monotonic()
        due = [peer for peer in self.peers if now - self._connected.get(peer, -60.0) >= 60.0]
        self._host.known = {peer: record.addresses for peer, record in self.peers.items()}
        # Who pauses wants to be left alone.
        due = self._host.room([peer for peer in due if self.peers[peer].state != "paused"])
        results = await asyncio.gather(*(self._host.connect(peer, self.peers[peer].addresses) for peer in due))
        for peer, connected in zip(due, results, strict=True):
            if connected:
                self._connected[peer] = now


def online(record: PeerRecord) -> bool:
    """Whether a peer takes part in rounds."""
    return record.state in ("ready", "training")


def gives(record: PeerRecord) -> bool:
    """Whether a peer has the run's state and gives it to others."""
    return record.state not in ("joining", "paused")
