"""Timing a line as a visitor: a bounded download from a run's peers, over the way that a joining node takes.

Peers serve a fragment's state in chunks to whoever asks; so a visitor can time its downlink against real donors, with
the same streams and acknowledgements that rounds use. What comes is thrown away. The result is a lower bound: donors
have lines of their own, and put their own rounds first. There is no such way for the uplink, since no peer takes bytes
that it did not ask for. The round trip is that of a small request on an open stream.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from stretto.node.swarm.download import Session, Silent, in_words
from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.line import Line
from stretto.node.swarm.roster import online
from stretto.node.swarm.streams import BROKEN
from stretto.node.swarm.summary import Visit, visiting
from stretto.node.swarm.transfer import Traffic
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.invite import Invite
from stretto.protocol.snapshot import chunk_sizes

DONORS = 3
"""Peers that are asked at once, at most."""
SECONDS = 5.0
BYTES = 32_000_000
"""Limits of the download in all: long enough for a window to grow, small enough for a metered line."""
TRIPS = 5


@dataclass(frozen=True)
class Download:
    """What came: bytes in seconds from some peers, and the least round trip in seconds."""

    nbytes: int
    seconds: float
    peers: int
    rtt: float

    @property
    def bits_per_second(self) -> float:
        """Rate of the payload."""
        return 8 * self.nbytes / self.seconds


async def try_line(
    invite: Invite, *, timeout: float, say: Callable[[str], None]
) -> tuple[RunConfig, Download | None, str]:
    """The run's config, and a timed download or None and why there is none. HostError if no bootstrap peer answers."""
    async with visiting(invite, timeout=timeout, say=say) as visit:
        return visit.run, *await download(visit, invite.run)


async def download(visit: Visit, run: bytes) -> tuple[Download | None, str]:
    """Fetch chunks from up to ``DONORS`` peers at once until a limit is reached. The text says who gave nothing."""
    donors = [peer for peer, record in sorted(visit.peers.items()) if online(record) and not record.client_mode]
    if not donors:
        return None, "no peer of the run is training and can be reached"
    taster = _Taster(visit, run)
    reasons = await asyncio.gather(*(taster.taste(peer) for peer in donors[:DONORS]))
    refusals = [
        f"{format_peer_id(peer)[-8:]}: {reason}" for peer, reason in zip(donors, reasons, strict=False) if reason
    ]
    why = "; ".join(refusals)
    nbytes = sum(taster.came.values())
    if not nbytes:
        return None, f"no peer gave bytes to time ({why})"
    return Download(nbytes, taster.ended - taster.began, len(taster.came), taster.rtt), why


class _Taster:
    """Downloads that share one clock and one limit."""

    def __init__(self, visit: Visit, run: bytes) -> None:
        self._visit, self._run, self._line = visit, run, Line()
        self.came: dict[bytes, int] = {}
        """Bytes by peer, of those that gave some."""
        self.began = self.ended = 0.0
        self.rtt = float("inf")

    async def taste(self, peer: bytes) -> str:
        """Fetch from one peer until a limit is reached. Why nothing more came, or nothing."""
        await self._visit.host.connect(peer, self._visit.peers[peer].addresses)
        session = Session(self._visit.host.p2p, self._run, peer, Traffic(), self._line)
        try:
            manifest = await session.ask(m.FetchState(0), m.State, m.Missing, m.Busy)
            if isinstance(manifest, m.Busy):
                return "it serves others now"
            if isinstance(manifest, m.Missing):
                return manifest.reason
            await self._time_trips(session, manifest)
            await self._fetch(session, manifest, peer)
        except RemoteProtocolError as error:
            return error.why
        except (Silent, *BROKEN) as error:
            return in_words(error)
        finally:
            await session.close()
        return ""

    async def _time_trips(self, session: Session, manifest: m.State) -> None:
        for _ in range(TRIPS):
            began = time.perf_counter()
            await session.ask(m.FetchRecords(0, manifest.tip.head), m.Records, m.Missing)
            self.rtt = min(self.rtt, time.perf_counter() - began)

    async def _fetch(self, session: Session, manifest: m.State, peer: bytes) -> None:
        """Chunk after chunk, from the first again after the last."""
        sizes = chunk_sizes(manifest.nbytes)
        index = 0
        self.began = self.began or time.perf_counter()
        while sum(self.came.values()) < BYTES and time.perf_counter() - self.began < SECONDS:
            data = await session.fetch(m.FetchChunk(0, manifest.tip.head, index), sizes[index])
            if not isinstance(data, bytearray):
                return
            self.came[peer] = self.came.get(peer, 0) + len(data)
            self.ended = time.perf_counter()
            index = (index + 1) % len(sizes)
