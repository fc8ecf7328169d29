"""Serving peers that repair: a fragment's state in chunks, the records of its last commits, the bytes behind them.

A state is served as of one commit (``Snapshot``). Its fragment moves on while a download lasts, so whoever was given a
manifest is served that state for as long as it keeps asking. Arrays are never changed in place, so an old state costs
memory but no copy; there is at most one per fragment, dropped ``KEEP`` seconds after the last request, and while it is
in use newcomers are given it too, if the log reaches from there to the present.

Few peers are served at a time, each with all that the line allows: two that share a line finish later than one after
the other. The others hear ``Busy``, as everybody does from a peer that rests. Records are small and always answered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.line import Lane
from stretto.node.swarm.streams import Reader, Writer, read_message, write_bytes, write_message
from stretto.node.swarm.transfer import Traffic
from stretto.protocol import messages as m
from stretto.protocol.digest import payload_digest
from stretto.protocol.peer import Peer
from stretto.protocol.snapshot import Snapshot

UPLOADS = 2
"""Peers that are served at a time."""

KEEP = 60.0
"""Seconds after the last request for which a state that the fragment has left behind is kept."""

IDLE = 15.0
"""Seconds without a request after which a peer's place is free for another, and its stream is closed."""

BUSY = 5.0
"""Seconds after which a peer that was not served may ask again."""

REQUESTS = (m.FetchState, m.FetchChunk, m.FetchRecords, m.FetchLogged)
"""What ``Donor.serve`` answers."""

Request: TypeAlias = m.FetchState | m.FetchChunk | m.FetchRecords | m.FetchLogged
InThread: TypeAlias = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Stream:
    """The two ends of a stream, and the line on the way to its other side."""

    reader: Reader
    writer: Writer
    lane: Lane


@dataclass(eq=False)
class _Offer:
    """A snapshot that somebody fetches."""

    snapshot: Snapshot
    used: float
    manifest: m.State | None = None
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class Donor:
    """Answers requests of repairing peers. Use from the event loop; ``in_thread`` runs a function in a worker thread.

    ``now`` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        peer: Peer,
        log: ChainLog,
        traffic: Traffic,
        in_thread: InThread,
        *,
        uploads: int = UPLOADS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer, self._log, self._traffic, self._in_thread = peer, log, traffic, in_thread
        self._uploads, self._now = uploads, now
        self._offers: dict[int, list[_Offer]] = {}
        self._served: dict[bytes, float] = {}

    async def serve(self, sender: bytes, first: Request, to: Stream) -> None:
        """Answer ``first`` and what follows it on the stream, until the client closes it or is idle for too long."""
        request: Any = first
        try:
            while True:
                await self.answer(sender, request, to)
                request = await read_message(to.reader, *REQUESTS, timeout=IDLE, lane=to.lane)
        finally:
            self._served.pop(sender, None)

    async def answer(self, sender: bytes, request: Request, to: Stream) -> None:
        """Answer one request. May raise ``BROKEN``."""
        if request.fragment >= self._peer.fragments:
            await write_message(to.writer, m.Missing("no such fragment"))
        elif isinstance(request, m.FetchRecords):
            await self._records(request, to)
        elif not self._has_place(sender):
            await write_message(to.writer, m.Busy(BUSY))
        elif isinstance(request, m.FetchState):
            await self._state(request, to)
        elif isinstance(request, m.FetchChunk):
            await self._chunk(request, to)
        else:
            await self._logged(request, to)

    def _has_place(self, sender: bytes) -> bool:
        if self._peer.resting is not None:
            return False
        now = self._now()
        self._served = {peer: used for peer, used in self._served.items() if now - used < IDLE}
        if sender not in self._served and len(self._served) >= self._uploads:
            return False
        self._served[sender] = now
        return True

    async def _send(self, data: bytes, digest: bytes, to: Stream) -> None:
        await write_message(to.writer, m.Payload(digest, len(data)))
        await write_bytes(to.reader, to.writer, memoryview(data), to.lane)
        self._traffic.state_up += len(data)

    # ------------------------------------------------------------------ states

    def _present(self, fragment: int) -> Snapshot | None:
        """The state as of now; the network thread is the only one that changes it."""
        state = self._peer.diloco.fragments[fragment]
        return Snapshot(state.anchor, state.momentum, state.tip, state.record) if state.record else None

    async def _state(self, request: m.FetchState, to: Stream) -> None:
        clock, present = self._peer.clock, self._present(request.fragment)
        if present is None or clock is None:
            await write_message(to.writer, m.Missing("nothing of this fragment was committed here yet"))
            return
        offer = await self._offer(request.fragment, present)
        async with offer.making:
            if offer.manifest is None:
                offer.manifest = await self._in_thread(offer.snapshot.manifest, clock)
        self._use(offer, request.fragment)
        await write_message(to.writer, offer.manifest)

    async def _offer(self, fragment: int, present: Snapshot) -> _Offer:
        """The older state while somebody fetches it and the log leads on from there, else the present one."""
        for offer in self._offers.get(fragment, []):
            head = offer.snapshot.tip.head
            if head == present.tip.head or await self._in_thread(self._log.after, fragment, head):
                return offer
        return self._add(fragment, present)

    def _add(self, fragment: int, present: Snapshot) -> _Offer:
        self._forget_unused(fragment)
        offer = _Offer(present, self._now())
        self._offers.setdefault(fragment, []).append(offer)
        return offer

    def _use(self, offer: _Offer, fragment: int) -> None:
        offer.used = self._now()
        asyncio.get_running_loop().call_later(KEEP + 1, self._forget_unused, fragment)

    def _forget_unused(self, fragment: int) -> None:
        now, head = self._now(), self._peer.diloco.fragments[fragment].tip.head
        kept = [offer for offer in self._offers.get(fragment, []) if now - offer.used < KEEP]
        older = sorted((o for o in kept if o.snapshot.tip.head != head), key=lambda offer: offer.used)
        kept = [offer for offer in kept if offer not in older[:-1]]
        if kept:
            self._offers[fragment] = kept
        else:
            self._offers.pop(fragment, None)

    async def _chunk(self, request: m.FetchChunk, to: Stream) -> None:
        offers = self._offers.get(request.fragment, [])
        offer = next((offer for offer in offers if offer.snapshot.tip.head == request.head), None)
        present = self._present(request.fragment)
        if offer is None and present is not None and present.tip.head == request.head:
            offer = self._add(request.fragment, present)
        if offer is None:
            await write_message(to.writer, m.Missing("this state is not kept here any more"))
            return
        self._use(offer, request.fragment)
        try:
            data = await self._in_thread(offer.snapshot.chunk, request.index)
        except IndexError:
            await write_message(to.writer, m.Missing("this state has no such chunk"))
            return
        digest = offer.manifest.chunks[request.index] if offer.manifest else payload_digest(data)
        await self._send(data, digest, to)

    # ------------------------------------------------------------------ commits

    async def _records(self, request: m.FetchRecords, to: Stream) -> None:
        tip = self._peer.diloco.fragments[request.fragment].tip
        records = await self._in_thread(self._log.after, request.fragment, request.head)
        if request.head == tip.head:
            await write_message(to.writer, m.Records(()))
        elif records:
            await write_message(to.writer, m.Records(tuple(records)))
        else:
            await write_message(to.writer, m.Missing("the log here does not reach back to this commit"))

    async def _logged(self, request: m.FetchLogged, to: Stream) -> None:
        data = await self._in_thread(self._log.payload, request.fragment, request.version, request.payload)
        if data is None:
            await write_message(to.writer, m.Missing("these bytes are not in the log here any more"))
        else:
            await self._send(data, request.payload, to)
