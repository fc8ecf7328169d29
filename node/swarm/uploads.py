"""What a peer sends to others in rounds: slices of its contribution and averages, one queue and one stream per peer.

Sending never waits. A task per peer opens a bulk stream when there is something to send, keeps it while more comes,
and closes it when nothing does. What could not be sent after some tries is dropped: the round has ways to go on.
"""

import asyncio
from collections.abc import Callable, Sequence

from hivemind.p2p import P2P

from stretto.node.swarm import transfer
from stretto.node.swarm.line import Line
from stretto.node.swarm.streams import BROKEN, bulk_name, open_stream
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError

TRIES = 3
IDLE = 2.0
"""Seconds without work after which a stream is closed; the other side waits much longer for the next request."""

Item = tuple[m.Push | m.Average, bytes]


class Uploads:
    """Outgoing bulk streams of one peer. Use from the event loop."""

    def __init__(
        self,
        p2p: P2P,
        run: bytes,
        traffic: transfer.Traffic,
        line: Line,
        on_fault: Callable[[bytes, RemoteProtocolError], None],
    ) -> None:
        self._p2p, self._name, self._traffic, self._on_fault = p2p, bulk_name(run), traffic, on_fault
        self._line = line
        self._queues: dict[bytes, asyncio.Queue[Item]] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}

    def send(self, peer: bytes, items: Sequence[Item]) -> None:
        """Queue ``items`` for ``peer``. The queue holds references to bytes that the round keeps anyway."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = asyncio.Queue()
            self._tasks[peer] = asyncio.get_running_loop().create_task(self._run(peer, queue))
        for item in items:
            queue.put_nowait(item)

    async def _run(self, peer: bytes, queue: "asyncio.Queue[Item]") -> None:
        failures = 0
        item: Item | None = None
        try:
            while failures < TRIES:
                try:
                    async with open_stream(self._p2p, peer, self._name) as (reader, writer):
                        while True:
                            if item is None:
                                item = await asyncio.wait_for(queue.get(), IDLE)
                            await transfer.upload(reader, writer, *item, self._traffic, self._line.to(peer))
                            item, failures = None, 0
                except BROKEN:  # a time-out of the queue too
                    if item is None and queue.empty():
                        return
                    failures += 1
                    await asyncio.sleep(0.3 * 3**failures)
        except RemoteProtocolError as error:
            self._on_fault(peer, error)
        finally:
            del self._queues[peer], self._tasks[peer]

    async def close(self) -> None:
        """Close all streams; what still waits is dropped."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
