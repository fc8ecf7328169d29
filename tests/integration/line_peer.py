"""A peer that only sends and receives: the real host, streams, links and line, told what to do by a test.

    python -m tests.integration.line_peer FOLDER HOST MAX_UPLOAD MAX_DOWNLOAD

One JSON object per line: commands on stdin, answers on stdout, the peer's address first. It ends when stdin ends. With
``plain`` a transfer goes the way it went before there was a ``Line``: chunks of 256 KiB, as fast as the buffers take
them. Times are those of the machine's monotonic clock, which all network namespaces share.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from stretto.node.swarm.host import Host, HostConfig
from stretto.node.swarm.identity import load_or_create, parse_peer_id
from stretto.node.swarm.line import Line
from stretto.node.swarm.links import Links
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.streams import (
    CHUNK_TIMEOUT,
    Reader,
    Writer,
    bulk_name,
    control_name,
    open_stream,
    read_bytes,
    read_message,
    serve,
    write_bytes,
)
from stretto.node.swarm.thread import NetworkThread
from stretto.protocol import messages as m

RUN = bytes(32)
PLAIN_CHUNK = 256 * 1024


class LinePeer:
    def __init__(self, host: Host, line: Line) -> None:
        self.host, self.line = host, line
        self.links = Links(host.p2p, RUN, line, lambda _peer: None)
        self.heard: dict[int, float] = {}

    async def start(self) -> None:
        await serve(self.host.p2p, control_name(RUN), self.on_control)
        await serve(self.host.p2p, bulk_name(RUN), self.on_bulk)

    async def on_control(self, sender: bytes, reader: Reader, _writer: Writer) -> None:
        while True:
            message: Any = await read_message(reader, m.Ask, timeout=None, lane=self.line.to(sender))
            self.heard[message.round] = time.monotonic()

    async def on_bulk(self, sender: bytes, reader: Reader, writer: Writer) -> None:
        head = await reader.readexactly(9)
        count = int.from_bytes(head[1:], "big")
        if head[0]:
            view, filled = memoryview(bytearray(count)), 0
            while filled < count:
                part = await asyncio.wait_for(reader.read(min(PLAIN_CHUNK, count - filled)), CHUNK_TIMEOUT)
                view[filled : filled + len(part)] = part
                filled += len(part)
        else:
            await read_bytes(reader, writer, count, self.line.to(sender))
        writer.write(b"k")
        await reader.read(1)

    async def upload(self, to: bytes, nbytes: int, plain: bool) -> None:
        data = memoryview(bytes(nbytes))
        async with open_stream(self.host.p2p, to, bulk_name(RUN)) as (reader, writer):
            writer.write(bytes([plain]) + nbytes.to_bytes(8, "big"))
            if plain:
                for start in range(0, nbytes, PLAIN_CHUNK):
                    writer.write(data[start : start + PLAIN_CHUNK])
                    await asyncio.wait_for(writer.drain(), CHUNK_TIMEOUT)
            else:
                await write_bytes(reader, writer, data, self.line.to(to))
            assert await reader.readexactly(1) == b"k"

    async def talk(self, to: bytes, every: float, spoken: dict[int, float]) -> None:
        while True:
            number = len(spoken)
            spoken[number] = time.monotonic()
            self.links.send(to, m.Ask(0, number))
            await asyncio.sleep(every)

    async def send(self, to: bytes, streams: int, nbytes: int, plain: bool, every: float) -> dict[str, Any]:
        """``streams`` transfers of ``nbytes`` at once and meanwhile, every so many seconds, a control message."""
        spoken: dict[int, float] = {}
        talking = asyncio.ensure_future(self.talk(to, every, spoken)) if every else None
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(self.upload(to, nbytes, plain) for _ in range(streams)))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        if talking is not None:
            talking.cancel()
        return {"seconds": seconds, "cpu": cpu, "spoken": spoken}

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        do = command.pop("do")
        if do == "dial":
            await self.host.dial(command["address"])
            return {}
        if do == "send":
            return await self.send(parse_peer_id(command.pop("to")), **command)
        heard, self.heard = self.heard, {}
        line = self.line
        return {
            "heard": heard,
            "totals": vars(line.totals),
            "uplink": line.uplink,
            "window": line.window.size,
            "cpu": time.process_time(),
        }


def main() -> None:
    folder, host, up, down = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    thread = NetworkThread()
    identity = load_or_create(folder / "key")
    config = HostConfig(host=host, port=0, announce=(), socket_dir=folder / "s")

    async def start() -> LinePeer:
        at = await Host.start(identity, config, SignedRecords(identity, [roster_key(RUN)]))
        peer = LinePeer(at, Line(max_upload=up, max_download=down))
        await peer.start()
        return peer

    peer = thread.call(start())
    try:
        print(json.dumps({"address": next(a for a in peer.host.addresses if f"/{host}/" in a)}), flush=True)
        for line in sys.stdin:
            print(json.dumps(thread.call(peer.obey(json.loads(line)))), flush=True)
    finally:
        thread.call(peer.links.close())
        thread.call(peer.host.close())
        thread.close()


if __name__ == "__main__":
    main()
