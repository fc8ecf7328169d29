"""One process of ``stretto bench round``: carries out requests, a peer of Stretto or of hivemind at a time.

    {"do": "open", "system": "stretto" or "hivemind", ...}   makes a peer, ``close`` ends it
    {"do": NAME, ...}                                         calls that method of the peer

A method's result is the reply. Requests are read by a thread with ``os.read``: the main thread may wait for a round
meanwhile, and hivemind's processes are forked from here and close ``sys.stdin``, whose lock that thread must not hold.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

GRACE = 6.0
"""Seconds that the main thread has to end in an orderly way when the parent is gone or done."""


class BenchPeer(Protocol):
    """What both kinds of peers have in common; requests name their other methods."""

    def close(self) -> dict[str, Any]:
        """End the peer and all that it started."""


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print belongs into the log
    requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer).encode() + b"\n")

    quiet_libraries()
    reply({"ready": os.getpid()})
    peer: BenchPeer | None = None
    try:
        while (request := requests.get()) is not None:
            action = request.pop("do")
            if action == "open":
                peer = _open(request.pop("system"), request, reply)
            answer = getattr(peer, "opened" if action == "open" else action)(**({} if action == "open" else request))
            if action == "close":
                peer = None
            reply(answer)
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to the parent, which ends everything
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        if peer is not None:
            peer.close()
        sys.stderr.flush()
        os._exit(0)  # threads of libraries do not hold it up


def quiet_libraries() -> None:
    """As the command line does it, before hivemind is imported."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "error")


def _open(system: str, arguments: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> Any:
    if system == "stretto":
        from stretto.node.bench.light import LightPeer

        return LightPeer(**arguments, reply=reply)
    from stretto.node.bench.hivemind_peer import HivemindPeer

    return HivemindPeer(**arguments)


def _read(requests: "queue.Queue[dict[str, Any] | None]") -> None:
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)
    # The main thread may be inside a library that waits for ever; children of this process are in its session.
    threading.Event().wait(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
