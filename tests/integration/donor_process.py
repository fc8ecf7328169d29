"""A process that serves one fragment's state and log to peers that repair, with a network daemon of its own.

    python -m tests.integration.donor_process FOLDER COMMITS SECONDS

It prints one line of JSON with its peer id and addresses, then one line for each request, answered SECONDS later:
that makes a small state a long download. It ends with its standard input.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from stretto.node.swarm.donor import Stream
from stretto.node.swarm.host import Host, HostConfig, socket_dir
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.line import Line
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.streams import Reader, Writer, bulk_name, read_message, serve
from stretto.node.swarm.thread import NetworkThread
from stretto.protocol import snapshot
from tests.node.repair_scene import CONFIG, REQUESTS, Net, history

CHUNK_BYTES = 4000


async def start(folder: Path, commits: int, seconds: float) -> Host:
    """Daemon and handler; the peer of ``Net.add`` stands behind it."""
    snapshot.CHUNK_BYTES = CHUNK_BYTES
    identity = load_or_create(folder / "identity.key")
    place = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=socket_dir(folder))
    host = await Host.start(identity, place, SignedRecords(identity, [roster_key(CONFIG.digest())]))
    line = Line()
    donor = Net(folder).add(1, history(commits)).donor

    async def hook(request: Any) -> None:
        print(type(request).__name__, flush=True)
        await asyncio.sleep(seconds)

    async def on_bulk(sender: bytes, reader: Reader, writer: Writer) -> None:
        request: Any = await read_message(reader, *REQUESTS)
        await donor.serve(sender, request, Stream(reader, writer, line.to(sender)))

    donor.hook = hook
    await serve(host.p2p, bulk_name(CONFIG.digest()), on_bulk)
    return host


def main() -> None:
    thread = NetworkThread()
    host = thread.call(start(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
    print(json.dumps({"peer": host.identity.peer_id, "addresses": list(host.addresses)}), flush=True)
    sys.stdin.read()
    thread.call(host.close())
    thread.close()


if __name__ == "__main__":
    main()
