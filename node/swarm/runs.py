"""The signed run config: published by the operator's bootstrap peer, fetched and checked by everyone who joins."""

import asyncio
from collections.abc import Sequence

from stretto.node.swarm.host import Host, HostError
from stretto.node.swarm.identity import Identity, verify
from stretto.node.swarm.streams import BROKEN, Reader, Writer, bulk_name, open_stream, read_message, write_message
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.invite import Invite


def sign_run(config: RunConfig, operator: Identity) -> m.SignedRun:
    """``config`` under the operator's signature."""
    canonical = config.canonical()
    unsigned = m.SignedRun(canonical, operator.peer_id_bytes, bytes(64))
    return m.SignedRun(canonical, operator.peer_id_bytes, operator.sign(unsigned.signed_bytes()))


def check_run(signed: m.SignedRun, invite: Invite) -> RunConfig:
    """The config in ``signed`` if it is the one that ``invite`` names, signed by its operator."""
    if digest("run", [signed.config]) != invite.run:
        raise RemoteProtocolError("this run config is not the one that the invite names")
    if signed.operator != invite.operator or not verify(signed.operator, signed.signed_bytes(), signed.signature):
        raise RemoteProtocolError("the run config is not signed by the operator that the invite names")
    return RunConfig.from_canonical(signed.config)


async def fetch_run(host: Host, invite: Invite, reached: Sequence[str] = ()) -> m.SignedRun:
    """The signed run config from whichever peer has a good one: those at ``reached``, then the bootstrap peers.

    HostError if none has.
    """
    faults: list[str] = []
    for address in dict.fromkeys([*reached, *invite.addresses]):
        peer = address.rsplit("/p2p/", 1)[1]
        try:
            signed = await _fetch(host, peer, invite.run)
            check_run(signed, invite)
            return signed
        except (*BROKEN, RemoteProtocolError) as error:
            faults.append(f"{address}: {error or type(error).__name__}")
    raise HostError(
        f"fetching the run config: no bootstrap peer has run {invite.run.hex()[:16]} ({'; '.join(faults)}). "
        "Is the invite of this run, and does its bootstrap still serve it?"
    )


async def _fetch(host: Host, peer: str, run: bytes) -> m.SignedRun:
    from hivemind.p2p import PeerID

    async with open_stream(host.p2p, PeerID.from_base58(peer).to_bytes(), bulk_name(run)) as (reader, writer):
        await write_message(writer, m.FetchRun())
        answer = await read_message(reader, m.SignedRun, m.Missing)
        if isinstance(answer, m.Missing):
            raise RemoteProtocolError(answer.reason, peer)
        assert isinstance(answer, m.SignedRun)
        return answer


async def answer_run(signed: m.SignedRun, reader: Reader, writer: Writer) -> None:
    """Serve the run config on a bulk stream whose request was read already; waits for the client to close."""
    await write_message(writer, signed)
    await wait_closed_by_client(reader)


async def wait_closed_by_client(reader: Reader, seconds: float = 10.0) -> None:
    """The side that opened a stream closes it first; wait for that, within a limit."""
    try:
        await asyncio.wait_for(reader.read(1), seconds)
    except asyncio.TimeoutError:
        return
