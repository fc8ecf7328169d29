"""The signed run config: published by the operator's bootstrap peer, fetched and checked by everyone who joins."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from stretto.node.swarm.host import Host, HostError
from stretto.node.swarm.identity import Identity, format_peer_id, parse_peer_id, verify
from stretto.node.swarm.streams import BROKEN, Reader, Writer, bulk_name, open_stream, read_message, write_message
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.invite import Invite

OTHERS_WAIT, OTHERS_PAUSE = 60.0, 3.0
"""Seconds for which, and after which again, the run's peers are asked for what no bootstrap peer has. They dial their
bootstrap peers every half minute, and are found only then."""


def sign_run(config: RunConfig, operator: Identity) -> m.SignedRun:
    """``config`` under the operator's signature."""
    canonical = config.canonical()
    unsigned = m.SignedRun(canonical, operator.peer_id_bytes, bytes(64))
    return m.SignedRun(canonical, operator.peer_id_bytes, operator.sign(unsigned.signed_bytes()))


class OtherOperator(RemoteProtocolError):
    """The config is the right one, and signed by somebody else than the operator that the invite names."""


def check_run(signed: m.SignedRun, invite: Invite) -> RunConfig:
    """The config in ``signed`` if it is the one that ``invite`` names, signed by its operator."""
    if digest("run", [signed.config]) != invite.run:
        raise RemoteProtocolError("this run config is not the one that the invite names")
    if signed.operator != invite.operator:
        raise OtherOperator("the run config is not signed by the operator that the invite names")
    if not verify(signed.operator, signed.signed_bytes(), signed.signature):
        raise RemoteProtocolError("the run config is not signed by the operator that the invite names: forged")
    return RunConfig.from_canonical(signed.config)


async def fetch_run(
    host: Host,
    invite: Invite,
    reached: Sequence[str] = (),
    *,
    others: Callable[[], Awaitable[Iterable[bytes]]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> m.SignedRun:
    """The signed run config from whichever peer has a good one: those at ``reached``, then the bootstrap peers.

    Of several bootstrap peers each signs with a key of its own, and an invite names one of them as the operator. If
    only others of them are there, the peers of the run have what the operator signed: ``others`` finds them, and is
    asked until they have found the bootstrap peer too. HostError if nobody has the config.
    """
    faults: list[str] = []
    same_run = False
    for address in dict.fromkeys([*reached, *invite.addresses]):
        try:
            return await _fetch(host, parse_peer_id(address.rsplit("/p2p/", 1)[1]), invite)
        except (*BROKEN, RemoteProtocolError) as error:
            faults.append(f"{address}: {error or type(error).__name__}")
            same_run = same_run or isinstance(error, OtherOperator)
    end = time.monotonic() + OTHERS_WAIT
    if same_run and others is not None:
        say("the bootstrap peers that answer serve this run under another key; asking the run's peers for its config")
    while same_run and others is not None and time.monotonic() < end:
        for peer in await others():
            with contextlib.suppress(*BROKEN, RemoteProtocolError):
                return await _fetch(host, peer, invite)
        await asyncio.sleep(OTHERS_PAUSE)
    raise HostError(
        f"fetching the run config: no bootstrap peer has run {invite.run.hex()[:16]} ({'; '.join(faults)}). "
        "Is the invite of this run, and does its bootstrap still serve it?"
    )


async def _fetch(host: Host, peer: bytes, invite: Invite) -> m.SignedRun:
    """What ``peer`` has, checked against the invite."""
    async with open_stream(host.p2p, peer, bulk_name(invite.run)) as (reader, writer):
        await write_message(writer, m.FetchRun())
        answer = await read_message(reader, m.SignedRun, m.Missing)
        if isinstance(answer, m.Missing):
            raise RemoteProtocolError(answer.reason, format_peer_id(peer))
        assert isinstance(answer, m.SignedRun)
        check_run(answer, invite)
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
