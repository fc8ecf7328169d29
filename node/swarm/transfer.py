"""Bulk transfers, one stream each: contributions pushed or fetched, and a fragment's outer state for repair.

Every size is known before a byte of memory is taken: a contribution's from the codec and the own fragment, a state's
from the own fragment. Digests are checked before anybody else sees the bytes: a state's here, a contribution's by the
caller, in a worker thread.
"""

from dataclasses import dataclass

import numpy as np
from hivemind.p2p import P2P

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
from stretto.protocol.digest import state_digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.peer import Peer
from stretto.protocol.streaming import Reduced

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
    reader: Reader, writer: Writer, header: m.Push | m.Average, data: bytes, traffic: Traffic
) -> str | None:
    """Send bytes of a round. Returns why they were not wanted, None if they were taken; may raise ``BROKEN``."""
    await write_message(writer, header)
    # The answer comes before the bytes, so that what is not wanted costs nothing.
    answer = await read_message(reader, m.Done, m.Missing, timeout=ANSWER_TIMEOUT)
    if isinstance(answer, m.Missing):
        return answer.reason
    await write_bytes(writer, memoryview(data))
    traffic.contributions_up += len(data)
    await read_message(reader, m.Done, m.Missing)
    return None


async def take_upload(
    unwanted: str | None, header: m.Push | m.Average, reader: Reader, writer: Writer, traffic: Traffic
) -> bytes | None:
    """The other end of ``upload``: the bytes, None if they are ``unwanted``. The last Done is left to the caller."""
    if unwanted is not None:
        await write_message(writer, m.Missing(unwanted))
        return None
    await write_message(writer, m.Done())
    data = bytes(await read_bytes(reader, header.nbytes))
    traffic.contributions_down += len(data)
    return data


async def fetch(p2p: P2P, run: bytes, source: bytes, request: m.Fetch, nbytes: int, traffic: Traffic) -> bytes:
    """Bytes of a round, not yet checked. RemoteProtocolError if ``source`` does not offer them."""
    async with open_stream(p2p, source, bulk_name(run)) as (reader, writer):
        await write_message(writer, request)
        answer = await read_message(reader, m.Payload, m.Missing)
        if isinstance(answer, m.Missing):
            raise RemoteProtocolError(answer.reason)
        assert isinstance(answer, m.Payload)
        if answer.nbytes != nbytes:
            raise RemoteProtocolError(f"{answer.nbytes} bytes offered where {nbytes} are due")
        payload = bytes(await read_bytes(reader, nbytes))
        traffic.contributions_down += nbytes
        return payload


async def answer_fetch(peer: Peer, request: m.Fetch, reader: Reader, writer: Writer, traffic: Traffic) -> None:
    """Serve a contribution or an average that this peer holds."""
    payload = peer.payload(request.round, request.payload)
    if payload is None:
        await write_message(writer, m.Missing(f"no such bytes of round {request.round} here"))
    else:
        await write_message(writer, m.Payload(request.payload, len(payload)))
        await write_bytes(writer, memoryview(payload))
        traffic.contributions_up += len(payload)
    await wait_closed_by_client(reader)


async def fetch_state(
    p2p: P2P, run: bytes, source: bytes, fragment: int, numel: int, traffic: Traffic
) -> tuple[m.State, Reduced]:
    """Anchor and momentum of a fragment with ``numel`` weights, checked against the digest that came with them.

    Whether that digest is the one that the fragment's record names is checked by ``Peer.adopt``.
    """
    async with open_stream(p2p, source, bulk_name(run)) as (reader, writer):
        await write_message(writer, m.FetchState(fragment))
        answer = await read_message(reader, m.State, m.Missing)
        if isinstance(answer, m.Missing):
            raise RemoteProtocolError(answer.reason)
        assert isinstance(answer, m.State)
        if answer.fragment != fragment or answer.nbytes != 8 * numel:
            raise RemoteProtocolError(f"state of {answer.nbytes} bytes offered where {8 * numel} are due")
        both = np.frombuffer(await read_bytes(reader, answer.nbytes), dtype="<f4").astype(np.float32, copy=False)
    traffic.state_down += answer.nbytes
    anchor, momentum = both[:numel], both[numel:]
    found = state_digest(anchor, momentum)
    if found != answer.digest:
        raise RemoteProtocolError("downloaded state does not match its digest")
    return answer, Reduced(anchor, momentum, found)


async def answer_fetch_state(
    peer: Peer, request: m.FetchState, reader: Reader, writer: Writer, traffic: Traffic
) -> None:
    """Serve a fragment's outer state. The arrays are immutable, so no lock is held while they travel."""
    fragments = peer.diloco.fragments
    if request.fragment >= len(fragments) or peer.clock is None:
        await write_message(writer, m.Missing("no such fragment, or the run has not begun here"))
        await wait_closed_by_client(reader)
        return
    state = fragments[request.fragment]
    anchor, momentum, tip, record = state.anchor, state.momentum, state.tip, state.record
    digest = record.record.state if record else state_digest(anchor, momentum)
    nbytes = 8 * anchor.size
    await write_message(
        writer, m.State(request.fragment, tip, record, peer.clock, digest, nbytes, max(nbytes, 1), (digest,))
    )
    for part in (anchor, momentum):
        await write_bytes(writer, part.astype("<f4", copy=False).data.cast("B"))
    traffic.state_up += nbytes
    await wait_closed_by_client(reader)
