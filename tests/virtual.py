"""A link between two peers in virtual time: streams without sockets, seconds that pass in microseconds.

``run`` drives a coroutine in a loop whose clock jumps to the next timer whenever nothing else is to be done: results
are exact and the same on any machine. A ``Wire`` is one direction of a line: bytes of all streams leave one after the
other at ``rate``, as through a modem with a deep queue, and arrive ``latency`` later.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from stretto.node.swarm.streams import Reader, Writer

T = TypeVar("T")

LONGEST = 100_000.0
"""Virtual seconds after which a test is taken to hang."""


class _Jump(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Sleeps no time; the loop's clock is moved on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        assert timeout is not None, "nothing will ever happen: the test hangs"
        self.now += timeout
        assert self.now < LONGEST
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work`` in virtual time."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Wire:
    """One direction of a line. ``rate`` in bytes per second, ``latency`` in seconds; may be ``cut``."""

    def __init__(self, rate: float, latency: float) -> None:
        self.rate, self.latency, self.cut = rate, latency, False
        self.free_at = 0.0
        self.carried = 0

    @property
    def queue(self) -> float:
        """Seconds that a byte written now waits before it leaves."""
        return max(0.0, self.free_at - asyncio.get_running_loop().time())

    def carry(self, data: bytes, reader: Reader) -> None:
        loop = asyncio.get_running_loop()
        # In packets, so that streams mix as they do on a line.
        for start in range(0, len(data), 1500):
            part = data[start : start + 1500]
            self.free_at = max(self.free_at, loop.time()) + len(part) / self.rate
            self.carried += len(part)
            loop.call_at(self.free_at + self.latency, self._arrive, part, reader)

    def _arrive(self, part: bytes, reader: Reader) -> None:
        if not self.cut:
            reader.feed_data(part)


class _WireWriter:
    """As much of a StreamWriter as streams use."""

    def __init__(self, wire: Wire, reader: Reader) -> None:
        self._wire, self._reader = wire, reader
        self.transport = self

    def write(self, data: bytes) -> None:
        self._wire.carry(bytes(data), self._reader)

    def get_write_buffer_size(self) -> int:
        return 0

    async def drain(self) -> None: ...

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(max(self._wire.free_at, loop.time()) + self._wire.latency, self._reader.feed_eof)


End = tuple[Reader, Writer]


def stream(out: Wire, back: Wire) -> tuple[End, End]:
    """Both ends of a stream over two wires."""
    here, there = asyncio.StreamReader(limit=1 << 30), asyncio.StreamReader(limit=1 << 30)
    return (here, cast(Writer, _WireWriter(out, there))), (there, cast(Writer, _WireWriter(back, here)))
