"""Bytes of rounds on bulk streams: contributions, slices and averages, pushed by their owner or fetched by digest.

Every size is known before a byte of memory is taken: it follows from the codec and the own fragment. Digests are
checked by the caller, in a worker thread. States and logged commits travel in ``donor`` and ``download``.
"""

from dataclasses import dataclass

from hivemind.p2p import P2P

from stretto.node.swarm.line import Lane, Line
from stretto.node.swarm.runs import wait_closed_by_client
from stretto.node.swarm.streams import (
    Reader,
    Writer,
    bulk_name,
    open_stream,
    read_bytes,
    read_message,
    write_bytes,
    write_message,
)
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.peer import Peer

ANSWER_TIMEOUT = 30.0
"""Seconds until a receiver has said whether it wants what is offered; it may wait for word of the group meanwhile."""


@dataclass
class Traffic:
    """Bytes handed to and taken from the daemon in bulk streams, by kind."""

    contributions_up: int = 0
    contributions_down: int = 0
    state_up: int = 0
    state_down: int = 0


async def upload(
    reader: Reader, writer: Writer, header: m.Push | m.Average, data: bytes, traffic: Traffic, lane: Lane
) -> str | None:
    """Send bytes of a round. Returns why they were not wanted, None if they were taken; may raise ``BROKEN``."""
    await write_message(writer, header, lane=lane)
    # The answer comes before the bytes, so that what is not wanted costs nothing.
    answer = await read_message(reader, m.Done, m.Missing, timeout=ANSWER_TIMEOUT, lane=lane)
    if isinstance(answer, m.Missing):
        return answer.reason
    await write_bytes(reader, writer, memoryview(data), lane)
    traffic.contributions_up += len(data)
    await read_message(reader, m.Done, m.Missing, lane=lane)
    return None


async def take_upload(
    unwanted: str | None, header: m.Push | m.Average, reader: Reader, writer: Writer, traffic: Traffic, lane: Lane
) -> bytes | None:
    """The other end of ``upload``: the bytes, None if they are ``unwanted``. The last Done is left to the caller."""
    if unwanted is not None:
        await write_message(writer, m.Missing(unwanted), lane=lane)
        return None
    await write_message(writer, m.Done(), lane=lane)
    data = bytes(await read_bytes(reader, writer, header.nbytes, lane))
    traffic.contributions_down += len(data)
    return data


async def fetch(
    p2p: P2P, run: bytes, source: bytes, request: m.Fetch, nbytes: int, traffic: Traffic, line: Line
) -> bytes:
    """Bytes of a round, not yet checked. RemoteProtocolError if ``source`` does not offer them."""
    lane = line.to(source)
    async with open_stream(p2p, source, bulk_name(run)) as (reader, writer):
        await write_message(writer, request, lane=lane)
        answer = await read_message(reader, m.Payload, m.Missing, lane=lane)
        if isinstance(answer, m.Missing):
            raise RemoteProtocolError(answer.reason)
        assert isinstance(answer, m.Payload)
        if answer.nbytes != nbytes:
            raise RemoteProtocolError(f"{answer.nbytes} bytes offered where {nbytes} are due")
        payload = bytes(await read_bytes(reader, writer, nbytes, lane))
        traffic.contributions_down += nbytes
        return payload


async def answer_fetch(
    peer: Peer, request: m.Fetch, reader: Reader, writer: Writer, traffic: Traffic, lane: Lane
) -> None:
    """Serve a contribution or an average that this peer holds."""
    payload = peer.payload(request.round, request.payload)
    if payload is None:
        await write_message(writer, m.Missing(f"no such bytes of round {request.round} here"), lane=lane)
    else:
        await write_message(writer, m.Payload(request.payload, len(payload)), lane=lane)
        await write_bytes(reader, writer, memoryview(payload), lane)
        traffic.contributions_up += len(payload)
    await wait_closed_by_client(reader)
