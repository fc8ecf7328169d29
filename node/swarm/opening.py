"""Streams to peers that cannot be reached leave nothing open.

hivemind's client opens a socket to the daemon for each stream and forgets to close it when the daemon cannot reach the
peer, or when nobody waits for the stream any more. Every try to reach a dead peer would then cost a descriptor here
and one in the daemon for good, and the event loop could not be closed at the end.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2


def close_failed_streams(p2p: P2P) -> None:
    """Let the client of ``p2p`` close the socket of every stream that could not be opened."""
    control = p2p._client.control

    async def stream_open(peer_id: PeerID, protocols: Sequence[str]) -> tuple[StreamInfo, Any, Any]:
        reader, writer = await control.daemon_connector.open_connection()
        try:
            wanted = p2pd_pb2.StreamOpenRequest(peer=peer_id.to_bytes(), proto=list(protocols))
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted))
            answer = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:
            writer.close()
            raise
        return StreamInfo.from_protobuf(answer.streamInfo), reader, writer

    control.stream_open = stream_open


def connect_first(p2p: P2P, reach: Callable[[bytes], Awaitable[None]]) -> None:
    """Let the client of ``p2p`` call ``reach(peer id)`` before it opens a stream to a peer."""
    control = p2p._client.control
    opened = control.stream_open

    async def stream_open(peer_id: PeerID, protocols: Sequence[str]) -> Any:
        await reach(peer_id.to_bytes())
        return await opened(peer_id, protocols)

    control.stream_open = stream_open
