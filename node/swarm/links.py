"""Control links: one long-lived stream to each peer for the small messages of rounds.

Sending never waits: a message is queued, and a task per peer opens the stream when there is something to say. The
other side only reads; so the end of its half says at once that it is gone, which is reported through ``on_lost``.

These messages pass the bulk data: they wait for no window and no cap of the ``Line``, which only counts them.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from hivemind.p2p import P2P

from stretto.node.swarm.line import Line
from stretto.node.swarm.streams import BROKEN, control_name, open_stream, write_message
from stretto.protocol import messages as m

QUEUE = 256
"""Messages that may wait for one peer; more means that it does not read."""


class Links:
    """Outgoing control streams of one peer. Use from the event loop."""

    def __init__(self, p2p: P2P, run: bytes, line: Line, on_lost: Callable[[bytes], None]) -> None:
        self._p2p, self._name, self._line, self._on_lost = p2p, control_name(run), line, on_lost
        self._queues: dict[bytes, asyncio.Queue[m.Message]] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self.bytes_up = 0

    def send(self, peer: bytes, message: m.Message) -> None:
        """Queue ``message`` for ``peer``."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = asyncio.Queue(QUEUE)
            self._tasks[peer] = asyncio.get_running_loop().create_task(self._run(peer, queue))
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            # It does not read: as good as gone, and its queue must not grow.
            self._tasks[peer].cancel()
            asyncio.get_running_loop().call_soon(self._on_lost, peer)

    async def _run(self, peer: bytes, queue: "asyncio.Queue[m.Message]") -> None:
        try:
            async with open_stream(self._p2p, peer, self._name) as (reader, writer):
                ended = asyncio.ensure_future(reader.read(1))
                try:
                    await self._write(peer, queue, writer, ended)
                finally:
                    ended.cancel()
        except BROKEN:
            pass
        finally:
            if self._queues.get(peer) is queue:
                del self._queues[peer], self._tasks[peer]
        self._on_lost(peer)

    async def _write(
        self,
        peer: bytes,
        queue: "asyncio.Queue[m.Message]",
        writer: asyncio.StreamWriter,
        ended: "asyncio.Future[bytes]",
    ) -> None:
        lane = self._line.to(peer)
        while True:
            waiting = asyncio.ensure_future(queue.get())
            both: set[asyncio.Future[Any]] = {waiting, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                return
            message = waiting.result()
            self.bytes_up += 4 + len(m.encode(message))
            await write_message(writer, message, lane=lane)

    async def close(self) -> None:
        """Send what is queued, within a second, and close all streams."""
        for _ in range(20):
            if all(queue.empty() for queue in self._queues.values()):
                break
            await asyncio.sleep(0.05)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
