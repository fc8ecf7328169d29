"""A node's line to the internet: every bulk byte asks here first, and every byte is counted here.

Three rules decide who sends next: the windows (``stretto.node.swarm.window``), which keep the queues before control
messages short; the cap on uploads; and the order in which the streams asked, one chunk each, so that many streams
share the line alike. A stream whose own path is full lets those behind it pass. Downloads have a cap too: the receiver
waits before it reads on and acknowledges, which slows the senders down. Control messages never wait, but count in the
caps.

What goes to a peer that repairs or joins has time (``Lane.patient``): a donor's own rounds come first. While one of
its other transfers lasts, patient streams come after those, and fill a part of the line's window only (REST), since
whoever keeps the queue long keeps the others' windows small. One that has waited for PATIENCE seconds is served like
all others, so that nobody who downloads is cut off.

``uplink`` is the rate for planning: what acknowledged chunks have shown of late.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stretto.node.swarm.buckets import TokenBucket
from stretto.node.swarm.window import LEAST_PATH, STALL, Window
from stretto.protocol.errors import RemoteProtocolError

DEFAULT_UPLINK = 1.25e6
"""Bytes per second (10 Mbit/s) while nothing has been measured."""

LEAST_CAPPED = 4096
"""Smallest piece in bytes under a cap."""

SAMPLE_SECONDS = 1.0
SAMPLE_BYTES = 64 * 1024
"""A measurement of the rate takes so much time with bytes on their way, or ends with a transfer of so many bytes."""

FASTER, SLOWER = 0.5, 0.1
"""Weights of a new measurement in the mean. A slow receiver makes a transfer slower than the line, nothing makes it
faster; so the mean rises quickly and falls slowly."""

PATIENCE = 1.0
"""Seconds for which a patient stream lets others pass."""

REST = 0.5
"""Share of the line's window that patient streams fill, all in flight counted, while others send: enough for a line
that the others leave idle, since a window holds more than the way does."""

RETRY = 1.0
"""Seconds after which those who wait are looked at again although nothing happened: a path may have stalled."""


@dataclass
class Totals:
    """Bytes handed to and taken from the network daemon: messages and acknowledgements, and bulk data."""

    control_up: int = 0
    control_down: int = 0
    bulk_up: int = 0
    bulk_down: int = 0


class Line:
    """One per node; use from the event loop. Caps in bytes per second, 0 for none; ``clock`` in seconds."""

    def __init__(
        self, *, max_upload: float = 0.0, max_download: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.window = Window()
        self.totals = Totals()
        self.used_at: dict[bytes, float] = {}
        """When a message or a chunk passed to or from each peer last."""
        self._upload, self._download = TokenBucket(max_upload), TokenBucket(max_download)
        self._meter = Meter()
        self._waiting: deque[Upload] = deque()
        self._urgent: set[Upload] = set()
        """Transfers that have begun, but for the patient ones."""
        self._timer: asyncio.TimerHandle | None = None

    def to(self, peer: bytes, *, patient: bool = False) -> "Lane":
        """The line on the way to ``peer``, for one stream or many. ``patient`` ones let the others pass."""
        return Lane(self, peer, patient)

    @property
    def uplink(self) -> float:
        """Bytes per second that this node can send: what was measured, at most the cap; the cap before that."""
        cap, measured = self._upload.rate, self._meter.rate
        if not measured:
            return cap or DEFAULT_UPLINK
        return min(cap, measured) if cap else measured

    def used(self, peer: bytes) -> None:
        """Something passes to or from ``peer`` now."""
        self.used_at[peer] = self.clock()

    def control_up(self, nbytes: int) -> None:
        """A control message was sent."""
        self.totals.control_up += nbytes
        self._upload.take(nbytes, self.clock())

    def control_down(self, nbytes: int) -> None:
        """A control message arrived."""
        self.totals.control_down += nbytes
        self._download.take(nbytes, self.clock())

    def bulk_down(self, nbytes: int) -> None:
        """Raw bytes arrived."""
        self.totals.bulk_down += nbytes
        self._download.take(nbytes, self.clock())

    async def may_read(self) -> int:
        """Wait until the cap on downloads lets more in; returns how many bytes to read at most."""
        while (seconds := self._download.wait(self.clock())) > 0:  # noqa: ASYNC110 - no event tells of new tokens
            await asyncio.sleep(seconds)
        return max(LEAST_CAPPED, int(self._download.burst)) if self._download.rate else 1 << 30

    # ------------------------------------------------------------------ who sends next

    def ask(self, upload: "Upload") -> None:
        """``upload`` wants to send; it is granted a chunk in its turn."""
        upload.since = self.clock()
        self._waiting.append(upload)
        if not upload.patient:
            self._urgent.add(upload)
        self.look()

    def forget(self, upload: "Upload") -> None:
        """``upload`` has ended, with or without success."""
        self._urgent.discard(upload)
        if upload in self._waiting:
            self._waiting.remove(upload)
        unacknowledged = upload.granted - upload.acknowledged
        if unacknowledged:
            self.window.give_back(upload.to, unacknowledged)
            self._meter.idle_if(self.window.in_flight == 0)
        if unacknowledged or (self._waiting and not upload.patient):
            self.look()

    def look(self) -> None:
        """Grant chunks to those who wait, first come first served but for the patient, as far as windows and cap
        allow."""
        now = self.clock()
        wait = RETRY

        def steps_back(upload: Upload) -> bool:
            return bool(self._urgent) and upload.patient and now - upload.since < PATIENCE

        for upload in sorted(self._waiting, key=steps_back):
            nbytes = self._chunk(upload)
            if (debt := self._upload.wait(now)) > 0:
                wait = min(wait, debt)
                break
            if not self.window.line_has_room(nbytes, now, REST if steps_back(upload) else 1.0):
                break
            if self.window.path_has_room(upload.to, nbytes):
                self._waiting.remove(upload)
                self._grant(upload, nbytes, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(wait, self.look)

    def _chunk(self, upload: "Upload") -> int:
        size = self.window.chunk(upload.to)
        if self._upload.rate:
            size = min(size, max(LEAST_CAPPED, int(self._upload.burst)))
        return min(size, upload.total - upload.granted)

    def _grant(self, upload: "Upload", nbytes: int, now: float) -> None:
        self._meter.busy(now)
        self._upload.take(nbytes, now)
        self.window.take(upload.to, nbytes, now)
        self.totals.bulk_up += nbytes
        upload.grant(nbytes)

    def arrived(self, upload: "Upload", nbytes: int, sent: float, stamp: float, alone: bool) -> None:
        """``nbytes`` of ``upload`` were acknowledged; the last chunk was ``alone`` on the line when it was sent."""
        now = self.clock()
        self.window.acknowledged(upload.to, nbytes, sent, stamp, now, idle=alone)
        self._meter.acknowledged(nbytes, now, last=self.window.in_flight == 0)
        self.look()


@dataclass(frozen=True)
class Lane:
    """A node's line and the peer at the other end: what a stream needs to know."""

    line: Line
    peer: bytes
    patient: bool = False


class Upload:
    """One transfer of ``total`` raw bytes. ``close`` it, whatever happens."""

    def __init__(self, lane: Lane, total: int) -> None:
        self.line, self.to, self.total, self.patient = lane.line, lane.peer, total, lane.patient
        self.since = 0.0
        """When it asked for its next chunk."""
        self.granted = 0
        self.acknowledged = 0
        self.in_flight = asyncio.Event()
        """Set while sent bytes wait for their acknowledgement."""
        self._turn: asyncio.Future[int] | None = None
        self._chunks: deque[tuple[int, float, bool]] = deque()
        """Where each unacknowledged chunk ends, when it was sent, and whether it was alone on the line."""

    async def turn(self, timeout: float) -> int:
        """Wait until the next chunk may be sent; returns its size. asyncio.TimeoutError after ``timeout`` seconds."""
        self._turn = asyncio.get_running_loop().create_future()
        self.line.ask(self)
        # A grant is entered in ``granted`` at once, so nothing is lost if this task ends before it hears of it.
        return self._turn.result() if self._turn.done() else await asyncio.wait_for(self._turn, timeout)

    def grant(self, nbytes: int) -> None:
        """The line lets ``nbytes`` more through."""
        self.granted += nbytes
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(nbytes)

    def sent(self) -> None:
        """The chunk that was granted last is being written now."""
        last = self._chunks[-1][0] if self._chunks else self.acknowledged
        alone = self.line.window.in_flight == self.granted - last
        self._chunks.append((self.granted, self.line.clock(), alone))
        self.in_flight.set()

    def acknowledge(self, count: int, stamp: float) -> None:
        """The receiver has the first ``count`` bytes since ``stamp`` of its clock (seconds).

        RemoteProtocolError if no chunk that is on its way ends there.
        """
        end, sent, alone = self.acknowledged, 0.0, False
        while end < count and self._chunks:
            end, sent, alone = self._chunks.popleft()
        if end != count or count == self.acknowledged:
            raise RemoteProtocolError(
                f"acknowledges {count} bytes of a transfer, but no chunk of those on their way "
                f"({self.acknowledged} to {self.granted}) ends there"
            )
        nbytes, self.acknowledged = count - self.acknowledged, count
        if not self._chunks:
            self.in_flight.clear()
        self.line.arrived(self, nbytes, sent, stamp, alone)

    def stalled(self) -> None:
        """Nothing was acknowledged for too long: the next transfer to this peer begins carefully."""
        self.line.window.path(self.to).size = LEAST_PATH

    @property
    def done(self) -> bool:
        """All bytes were acknowledged."""
        return self.acknowledged == self.total

    def close(self) -> None:
        """Give unacknowledged bytes back to the window at once."""
        self.line.forget(self)
        self.granted = self.acknowledged


class Meter:
    """The rate of uploads: bytes per second of the time with bytes on their way; 0 before the first measurement."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: float | None = None
        """Last acknowledgement, or begin of the busy time; None while idle."""
        self._bytes, self._seconds = 0, 0.0

    def busy(self, now: float) -> None:
        """Something is sent."""
        if self._since is None:
            self._since = now
            self._bytes, self._seconds = 0, 0.0

    def idle_if(self, idle: bool) -> None:
        """Nothing is on its way any more, if ``idle``."""
        if idle:
            self._since = None

    def acknowledged(self, nbytes: int, now: float, *, last: bool) -> None:
        """``nbytes`` arrived, and with ``last`` nothing else is on its way."""
        if self._since is not None:
            # A peer that stopped says nothing about the line.
            self._seconds += min(now - self._since, STALL)
            self._bytes += nbytes
            self._since = now
        if (last or self._seconds >= SAMPLE_SECONDS) and self._bytes >= SAMPLE_BYTES and self._seconds > 0:
            sample = self._bytes / self._seconds
            weight = FASTER if sample > self.rate else SLOWER
            self.rate = sample if not self.rate else self.rate + weight * (sample - self.rate)
            self._bytes, self._seconds = 0, 0.0
        self.idle_if(last)
