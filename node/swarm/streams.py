"""Messages and tensors over libp2p binary streams.

Two handlers per peer, named by protocol version and run, so that different settings never meet:

    control   small messages of rounds, one long-lived stream from each peer to each other
    bulk      one request per stream: a message, perhaps raw bytes, a message back

A frame is a big-endian uint32 length and that many bytes of msgpack. Raw bytes follow a message that announces their
number and digest. They travel in chunks, each a big-endian uint32 length and that many bytes; the receiver
acknowledges each chunk on the same stream with two big-endian uint64: the bytes that it has of this transfer, and
its clock in microseconds since an arbitrary time. So a sender knows what arrived and how long it took; how much it may
send is the ``Line``'s business. Sizes are checked before memory is taken, every wait has a limit, and the side that
opened a stream closes it first: replies get lost when the answering side closes.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from stretto.node.swarm.line import LEAST_CAPPED, Lane, Line, Upload
from stretto.node.swarm.window import MOST_CHUNK
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.wire import MAX_MESSAGE

OPEN_TIMEOUT = 10.0
CHUNK_TIMEOUT = 20.0
"""Seconds without a message, a whole chunk, an acknowledgement or a turn after which a transfer is given up."""

PIECE = 256 * 1024
"""Bytes written at once; larger writes only fill buffers."""

BUFFER = 64 * 1024
"""Bytes that may wait in a socket's buffer."""

_HEAD = struct.Struct(">I")
_ACKNOWLEDGEMENT = struct.Struct(">QQ")

BROKEN = (ControlFailure, P2PDaemonError, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, EOFError)
"""How a peer that cannot be reached, or a stream that broke, shows itself."""

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Handler: TypeAlias = Callable[[bytes, Reader, Writer], Awaitable[None]]


def control_name(run: bytes) -> str:
    """Name of the control handler."""
    return f"/stretto/{m.PROTOCOL_VERSION}/{run.hex()}/control"


def bulk_name(run: bytes) -> str:
    """Name of the bulk handler."""
    return f"/stretto/{m.PROTOCOL_VERSION}/{run.hex()}/bulk"


async def serve(p2p: P2P, name: str, handler: Handler) -> None:
    """Let ``handler(peer id, reader, writer)`` answer streams under ``name``. The stream is closed after it."""

    async def on_stream(info: StreamInfo, reader: Reader, writer: Writer) -> None:
        try:
            await handler(info.peer_id.to_bytes(), reader, writer)
        except BROKEN:
            pass  # the other side is gone; whoever waits for it has its own limit
        finally:
            writer.close()

    await p2p.add_binary_stream_handler(name, on_stream)


@contextlib.asynccontextmanager
async def open_stream(p2p: P2P, peer: bytes, name: str) -> AsyncIterator[tuple[Reader, Writer]]:
    """A stream (reader, writer) to ``peer``'s handler ``name``; closed at the end. Raises one of ``BROKEN``."""
    _, reader, writer = await asyncio.wait_for(p2p.call_binary_stream_handler(PeerID(peer), name), OPEN_TIMEOUT)
    try:
        yield reader, writer
    finally:
        writer.close()


async def write_message(writer: Writer, message: object, *, lane: Lane | None = None) -> None:
    """One frame, at once; it counts as control traffic of ``lane``'s line."""
    data = m.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    if lane is not None:
        lane.line.control_up(4 + len(data))
        lane.line.used(lane.peer)
    await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT)


async def read_message(
    reader: Reader, *kinds: type, timeout: float | None = CHUNK_TIMEOUT, lane: Lane | None = None
) -> object:
    """One frame as a message of one of ``kinds``. RemoteProtocolError if it is none.

    It must begin within ``timeout`` seconds (None: whenever it likes) and then go on within CHUNK_TIMEOUT.
    """
    head = await asyncio.wait_for(reader.readexactly(4), timeout)
    size = int.from_bytes(head, "big")
    if size > MAX_MESSAGE:
        raise RemoteProtocolError(f"frame of {size} bytes, the limit is {MAX_MESSAGE}")
    data = await asyncio.wait_for(reader.readexactly(size), CHUNK_TIMEOUT)
    if lane is not None:
        lane.line.control_down(4 + size)
        lane.line.used(lane.peer)
    return m.decode(data, *kinds)


async def write_bytes(
    reader: Reader, writer: Writer, data: memoryview, lane: Lane, *, timeout: float | None = None
) -> None:
    """Raw bytes, as fast as the line allows; returns when all of them were acknowledged.

    The other side calls ``read_bytes`` with exactly their number. The whole may take ``timeout`` seconds; with 0 it
    fails at once, with None it may go on while each chunk takes less than CHUNK_TIMEOUT. Raises one of ``BROKEN``, or
    RemoteProtocolError for an acknowledgement of what was not sent.
    """
    await asyncio.wait_for(_write_bytes(reader, writer, data, lane), timeout)


async def _write_bytes(reader: Reader, writer: Writer, data: memoryview, lane: Lane) -> None:
    upload = Upload(lane, len(data))
    both = [asyncio.ensure_future(_write_chunks(writer, data, upload)), asyncio.ensure_future(_hear(reader, upload))]
    try:
        await asyncio.gather(*both)
    finally:
        upload.close()
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _write_chunks(writer: Writer, data: memoryview, upload: Upload) -> None:
    start = 0
    while start < len(data):
        size = await upload.turn(CHUNK_TIMEOUT)
        upload.sent()
        upload.line.control_up(_HEAD.size)
        upload.line.used(upload.to)
        writer.write(_HEAD.pack(size))
        for place in range(start, start + size, PIECE):
            writer.write(data[place : min(place + PIECE, start + size)])
            await _drain(writer)
        start += size


async def _hear(reader: Reader, upload: Upload) -> None:
    """Take acknowledgements until all was acknowledged."""
    while not upload.done:
        await upload.in_flight.wait()  # while it waits for its turn, which has a limit, there is nothing to hear
        try:
            frame = await asyncio.wait_for(reader.readexactly(_ACKNOWLEDGEMENT.size), CHUNK_TIMEOUT)
        except asyncio.TimeoutError:
            upload.stalled()
            raise
        count, stamp = _ACKNOWLEDGEMENT.unpack(frame)
        upload.line.control_down(len(frame))
        upload.acknowledge(count, stamp * 1e-6)


async def read_bytes(
    reader: Reader, writer: Writer, count: int, lane: Lane, *, timeout: float | None = None
) -> bytearray:
    """Exactly ``count`` raw bytes, acknowledged chunk by chunk; the caller has checked that it wants so many.

    ``timeout`` as in ``write_bytes``. Raises one of ``BROKEN``, or RemoteProtocolError for a chunk that cannot be.
    """
    return await asyncio.wait_for(_read_bytes(reader, writer, count, lane), timeout)


async def _read_bytes(reader: Reader, writer: Writer, count: int, lane: Lane) -> bytearray:
    line, data = lane.line, bytearray(count)
    filled = 0
    while filled < count:
        filled = await asyncio.wait_for(_read_chunk(reader, memoryview(data), filled, line), CHUNK_TIMEOUT)
        await line.may_read()  # a late acknowledgement slows the sender down
        line.used(lane.peer)
        writer.write(_ACKNOWLEDGEMENT.pack(filled, int(line.clock() * 1e6)))
        line.control_up(_ACKNOWLEDGEMENT.size)
        await _drain(writer)
    return data


async def _read_chunk(reader: Reader, data: memoryview, filled: int, line: Line) -> int:
    """Read one chunk into ``data`` from ``filled`` on; returns where it ends."""
    left = len(data) - filled
    try:
        (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    except asyncio.IncompleteReadError:
        size = 0
    else:
        line.control_down(_HEAD.size)
        if not min(LEAST_CAPPED, left) <= size <= min(MOST_CHUNK, left):
            raise RemoteProtocolError(f"chunk of {size} bytes where {left} are due")
    end = filled + size
    while size and filled < end:
        part = await reader.read(min(await line.may_read(), end - filled))
        if not part:
            size = 0
        line.bulk_down(len(part))
        data[filled : filled + len(part)] = part
        filled += len(part)
    if not size:
        raise EOFError(f"stream ended after {filled} of {len(data)} bytes")
    return filled


async def _drain(writer: Writer) -> None:
    """Back-pressure. The check saves a task where there is none."""
    if writer.transport.get_write_buffer_size() >= BUFFER:
        await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT)
