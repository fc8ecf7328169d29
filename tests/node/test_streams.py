"""Frames and raw bytes over real asyncio streams: a pair of connected unix sockets, no daemon."""

import asyncio
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from stretto.node.swarm import streams
from stretto.node.swarm.line import Line
from stretto.node.swarm.streams import (
    Reader,
    Writer,
    bulk_name,
    control_name,
    read_bytes,
    read_message,
    write_bytes,
    write_message,
)
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.wire import MAX_MESSAGE

T = TypeVar("T")
ASK = m.Ask(fragment=1, round=5)


def over_a_pair(
    write: Callable[[Writer], Awaitable[None]], read: Callable[[Reader], Awaitable[T]], *, close: bool = False
) -> T:
    """``write`` on one end and ``read`` on the other at the same time; with ``close`` the writer hangs up then."""

    async def both() -> T:
        left, right = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=left)
        reader, back = await asyncio.open_connection(sock=right)

        async def send() -> None:
            await write(writer)
            if close:
                writer.close()

        try:
            _, result = await asyncio.gather(send(), read(reader))
        finally:
            for end in (writer, back):
                end.close()
        return result

    return asyncio.run(both())


def raw(data: bytes) -> Callable[[Writer], Awaitable[None]]:
    async def write(writer: Writer) -> None:
        writer.write(data)
        await writer.drain()

    return write


def test_the_handlers_are_named_by_version_and_run() -> None:
    assert control_name(b"\xab" * 32) == f"/stretto/4/{'ab' * 32}/control"
    assert bulk_name(b"\xab" * 32) == f"/stretto/4/{'ab' * 32}/bulk"


def test_messages_arrive_whole_and_in_order() -> None:
    sent = [ASK, m.Abort(0, 7, "why"), m.FetchRun(), m.Missing("x" * 300)]

    async def write(writer: Writer) -> None:
        for message in sent:
            await write_message(writer, message)

    async def read(reader: Reader) -> list[object]:
        return [await read_message(reader) for _ in sent]

    assert over_a_pair(write, read) == sent


def test_a_frame_is_a_length_and_msgpack() -> None:
    async def read(reader: Reader) -> bytes:
        return await reader.read()

    async def write(writer: Writer) -> None:
        await write_message(writer, ASK)

    data = over_a_pair(write, read, close=True)
    assert data[:4] == len(data[4:]).to_bytes(4, "big")
    assert data[4:] == m.encode(ASK)


def test_a_frame_may_come_in_pieces() -> None:
    data = m.encode(ASK)
    frame = len(data).to_bytes(4, "big") + data

    async def write(writer: Writer) -> None:
        for place in range(len(frame)):
            writer.write(frame[place : place + 1])
            await writer.drain()

    assert over_a_pair(write, read_message) == ASK


@pytest.mark.parametrize("size", [MAX_MESSAGE + 1, 0xFFFF_FFFF])
def test_a_frame_that_is_too_long_is_refused_before_memory_is_taken(size: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=f"frame of {size} bytes, the limit is {MAX_MESSAGE}"):
            over_a_pair(raw(size.to_bytes(4, "big") + b"begin"), read_message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("data", [b"", b"\x00\x00", b"\x00\x00\x00\x09half"])
def test_a_frame_that_is_cut_short_is_a_broken_stream(data: bytes) -> None:
    with pytest.raises(streams.BROKEN):
        over_a_pair(raw(data), read_message, close=True)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xc1", "not a msgpack message"),
        (b"", "not a msgpack message"),
        (b"\x01", "not a message of this protocol version"),
        (m.encode(ASK) + b"\x00", "not a msgpack message"),
    ],
)
def test_a_frame_that_is_no_message_is_the_senders_fault(body: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        over_a_pair(raw(len(body).to_bytes(4, "big") + body), read_message)


def test_a_message_of_another_kind_is_the_senders_fault() -> None:
    async def write(writer: Writer) -> None:
        await write_message(writer, ASK)

    with pytest.raises(RemoteProtocolError, match="Ask where Done or Missing was expected"):
        over_a_pair(write, lambda reader: read_message(reader, m.Done, m.Missing))


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_TIMEOUT", 0.01)
    with pytest.raises(asyncio.TimeoutError):
        over_a_pair(raw(b"\x00\x00\x00\x05"), read_message)
    with pytest.raises(asyncio.TimeoutError):
        over_a_pair(raw(b""), lambda reader: read_message(reader, timeout=0.01))


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 65_537, 300_000])
def test_raw_bytes_arrive_and_a_last_frame_marks_the_end(count: int) -> None:
    payload = bytes(i * 7 % 251 for i in range(count))

    async def run() -> tuple[bytes, object]:
        left, right = socket.socketpair()
        here, there = await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)

        async def write() -> None:
            await write_bytes(*here, memoryview(payload), Line().to(b"there"))
            await write_message(here[1], m.Done())

        writing = asyncio.ensure_future(write())
        data = bytes(await read_bytes(*there, count, Line().to(b"here")))
        done = await read_message(there[0], m.Done)
        await writing
        here[1].close()
        there[1].close()
        return data, done

    assert asyncio.run(run()) == (payload, m.Done())
