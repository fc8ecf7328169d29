"""Messages and tensors over libp2p binary streams.

Two handlers per peer, named by protocol version and run, so that different settings never meet:

    control   small messages of rounds, one long-lived stream from each peer to each other
    bulk      one request per stream: a message, perhaps raw bytes, a message back

A frame is a big-endian uint32 length and that many bytes of msgpack. Raw bytes follow a message that announces their
number and digest; a last frame (``Done`` or ``Missing``) marks the end, since a broken stream looks like a clean one.
Sizes are checked before memory is taken, every wait has a limit, and the side that opened a stream closes it first:
replies get lost when the answering side closes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.wire import MAX_MESSAGE

CHUNK = 256 * 1024
"""Bytes written at once; larger writes only fill buffers."""

OPEN_TIMEOUT = 10.0
CHUNK_TIMEOUT = 20.0
"""Seconds without a byte after which a transfer is given up."""

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


async def write_message(writer: Writer, message: object) -> None:
    """One frame."""
    data = m.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT)


async def read_message(reader: Reader, *kinds: type, timeout: float | None = CHUNK_TIMEOUT) -> object:
    """One frame as a message of one of ``kinds``. RemoteProtocolError if it is none."""
    head = await asyncio.wait_for(reader.readexactly(4), timeout)
    size = int.from_bytes(head, "big")
    if size > MAX_MESSAGE:
        raise RemoteProtocolError(f"frame of {size} bytes, the limit is {MAX_MESSAGE}")
    data = await asyncio.wait_for(reader.readexactly(size), CHUNK_TIMEOUT)
    return m.decode(data, *kinds)


async def write_bytes(writer: Writer, data: memoryview) -> None:
    """Raw bytes in chunks, each with a limit; back-pressure keeps the buffers small."""
    for start in range(0, len(data), CHUNK):
        writer.write(data[start : start + CHUNK])
        await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT)


async def read_bytes(reader: Reader, count: int) -> bytearray:
    """Exactly ``count`` raw bytes; the caller has checked that it wants so many."""
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        part = await asyncio.wait_for(reader.read(min(CHUNK, count - filled)), CHUNK_TIMEOUT)
        if not part:
            raise EOFError(f"stream ended after {filled} of {count} bytes")
        view[filled : filled + len(part)] = part
        filled += len(part)
    return data
