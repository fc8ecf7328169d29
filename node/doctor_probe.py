"""Is a libp2p peer reachable? A program of its own, ``python -m stretto.node.doctor_probe``: JSON in, JSON out.

It is never imported by the node: py-libp2p is built on trio and registers the same protobuf names as hivemind, so the
two cannot live in one process. This file is the only home of ``libp2p`` and ``trio``. On stdin::

    {"addresses": ["/ip4/1.2.3.4/tcp/4001/p2p/12D3KooW..."], "timeout": 10}

with ``"run": "RUN ID IN HEX"`` if the time is wanted.

On stdout: a list with one object per address, in the same order, see `ProbeResult`. Each address goes through four
phases, and a failure names the one it happened in:

    parse      the text is a TCP address with a peer id
    dial       the name resolves, the TCP port answers, the encrypted handshake proves the peer id
    identify   the peer says what it runs and under which address it sees us (libp2p identify, /ipfs/id/1.0.0)
    ping       three round trips (/ipfs/ping/1.0.0)

A peer that answers is also asked for the time, if the request names the ``run``: a peer of Stretto tells it on its
bulk stream. Whether it does is no part of whether it can be reached.

py-libp2p has no time limit of its own against an address that swallows packets, so every address has one here, and a
watchdog ends the process with what is known should the library refuse to be cancelled.
"""

import json
import logging
import os
import re
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import MultiError
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.utils import read_exactly
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from stretto.node.swarm.time_votes import Sample, round_trip
from stretto.protocol import messages as m

IDENTIFY = TProtocol("/ipfs/id/1.0.0")
PING = TProtocol("/ipfs/ping/1.0.0")
PINGS = 3
MAX_ADDRESSES = 64
MAX_TIMEOUT = 300.0  # seconds
MAX_INPUT_BYTES = 1 << 18
MAX_IDENTIFY_BYTES = 1 << 16
MAX_PROTOCOLS = 100
MAX_TEXT_CHARS = 200
MAX_TIME_BYTES = 1024
CLEANUP_SECONDS = 1.0  # after the time limit, for closing connections; then the watchdog ends the process

_FAMILIES = {
    "ip4": trio.socket.AF_INET,
    "ip6": trio.socket.AF_INET6,
    "dns4": trio.socket.AF_INET,
    "dns6": trio.socket.AF_INET6,
    "dns": trio.socket.AF_UNSPEC,
}


@dataclass(kw_only=True)
class ProbeResult:
    """What became of one address. Filled in while the probe goes on, so that it is true at any moment.

    ``phase`` is the phase reached (on success: ping), ``error`` one line or None, ``observed`` the address under which
    the peer sees us, ``rtt_ms`` the median round trip in milliseconds. ``time_offset`` is the swarm time that the peer
    tells minus this machine's clock, known to ``time_error``, and ``time_correction`` what the peer adds to its own
    machine's clock to get it, all in seconds; None where it was not asked or did not say.
    """

    address: str
    ok: bool = False
    peer_id: str | None = None
    agent: str | None = None
    observed: str | None = None
    protocols: list[str] = field(default_factory=list)
    rtt_ms: float | None = None
    time_offset: float | None = None
    time_error: float | None = None
    time_correction: float | None = None
    phase: str = "parse"
    error: str | None = None
    connected: bool = field(default=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parsed address: where to dial, and whom to expect there."""

    host: str
    kind: str
    port: int
    peer: ID


class ProbeFailure(Exception):
    """A step failed; the text is the one line to report."""


def parse_target(address: str) -> Target:
    """Split ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/ID``. Raises ProbeFailure that says what else it is."""
    if len(address) > MAX_TEXT_CHARS:
        raise ProbeFailure(f"an address of {len(address)} characters; {MAX_TEXT_CHARS} are allowed")
    try:
        maddr = Multiaddr(address)
        names = [protocol.name for protocol in maddr.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise ProbeFailure(f"not a multiaddress: {_line(error)}") from error
    if "p2p" not in names:
        raise ProbeFailure("the peer id is missing; the address must end in /p2p/12D3KooW...")
    if len(names) != 3 or names[0] not in _FAMILIES or names[1:] != ["tcp", "p2p"]:
        raise ProbeFailure(f"only direct TCP addresses can be probed, this one is /{'/'.join(names)}")
    values = list(maddr.values())
    return Target(host=values[0], kind=names[0], port=int(values[1]), peer=ID.from_string(values[2]))


async def probe_one(result: ProbeResult, timeout: float, run: str | None = None) -> None:
    """Probe ``result.address`` and write everything learned into ``result``. Returns within ``timeout`` seconds.

    ``run`` is a run id in hex, of which the peer is asked the time.
    """
    with trio.move_on_after(timeout) as scope:
        try:
            await _walk_phases(result, run)
        except ProbeFailure as failure:
            result.error = str(failure)
        except Exception as error:  # noqa: BLE001 - the library's errors are an open set, in groups: each is the answer
            result.error = explain(error, result.phase)
    if result.ok or result.error is not None:
        return
    if scope.cancelled_caught:
        result.error = silence(result, timeout)


async def _walk_phases(result: ProbeResult, run: str | None) -> None:
    target = parse_target(result.address)
    result.peer_id = str(target.peer)
    result.phase = "dial"
    place = await _connect_tcp(target)
    result.connected = True
    # One host per address: a shared one would reuse the first connection to a peer for all of its addresses.
    host = new_host()
    async with host.run(listen_addrs=[]):
        await host.connect(PeerInfo(target.peer, [place]))
        result.phase = "identify"
        _take_identify(result, await _identify(host, target.peer))
        result.phase = "ping"
        result.rtt_ms = round(await _ping(host, target.peer), 3)
        result.ok = True
        if run is not None:
            await _take_time(result, host, target.peer, run)


async def _connect_tcp(target: Target) -> Multiaddr:
    """Resolve the name, open and close a TCP connection, and return the numeric address that answered.

    The library neither resolves names nor says why a dial failed; the plain socket does both.
    """
    try:
        found = await trio.socket.getaddrinfo(
            target.host, target.port, family=_FAMILIES[target.kind], type=trio.socket.SOCK_STREAM
        )
    except OSError as error:  # gaierror
        raise ProbeFailure(f"the name {target.host} does not resolve ({_line(error)})") from error
    why = "no address"
    for family, kind, protocol, _, address in found[:4]:
        try:
            with trio.socket.socket(family, kind, protocol) as connection:
                await connection.connect(address)
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else _line(error)
            continue
        version = "ip6" if family == trio.socket.AF_INET6 else "ip4"
        return Multiaddr(f"/{version}/{address[0]}/tcp/{target.port}")
    raise ProbeFailure(why)


async def _identify(host: IHost, peer: ID) -> Identify:
    stream = await host.new_stream(peer, [IDENTIFY])
    buffer = b""
    while len(buffer) < MAX_IDENTIFY_BYTES:
        part = await stream.read(MAX_IDENTIFY_BYTES - len(buffer))
        if not part:
            break
        buffer += part
        if _is_whole(buffer):
            break
    message: Identify = parse_identify_response(buffer)
    return message


def _is_whole(buffer: bytes) -> bool:
    """Tell whether ``buffer`` is one whole message: a protobuf varint with the length, then as many bytes."""
    length = 0
    for position, byte in enumerate(buffer[:3]):  # 3 bytes of 7 bits exceed the limit on the message
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return len(buffer) == position + 1 + length
    return False


def _take_identify(result: ProbeResult, message: Identify) -> None:
    result.agent = _clean(message.agent_version)
    result.protocols = sorted(_clean(name) for name in message.protocols[:MAX_PROTOCOLS])
    try:
        result.observed = _clean(str(Multiaddr(message.observed_addr))) if message.observed_addr else None
    except (MultiaddrError, ValueError):
        result.observed = None  # nonsense from the peer; it is still reachable


async def _ping(host: IHost, peer: ID) -> float:
    """Return the median of three round trips in milliseconds, without the opening of the stream."""
    stream = await host.new_stream(peer, [PING])
    times = []
    for _ in range(PINGS):
        sent = secrets.token_bytes(32)
        start = trio.current_time()
        await stream.write(sent)
        if await read_exactly(stream, len(sent)) != sent:
            raise ProbeFailure("the answer to a ping is not what was sent")
        times.append(1000 * (trio.current_time() - start))
    return statistics.median(times)


async def _take_time(result: ProbeResult, host: IHost, peer: ID, run: str) -> None:
    """Ask for the swarm's time over the peer's bulk stream; frames are a 4-byte length and a message."""
    try:
        stream = await host.new_stream(peer, [TProtocol(f"/stretto/{m.PROTOCOL_VERSION}/{run}/bulk")])
        samples = [await _ask_time(stream) for _ in range(PINGS)]
        await stream.close()
    except Exception:  # noqa: BLE001 - an open set, as above; the peer was reached, and its time is an extra
        return
    best = min(samples, key=lambda sample: sample.error)
    result.time_offset, result.time_error, result.time_correction = best.offset, best.error, best.correction


async def _ask_time(stream: INetStream) -> Sample:
    sent, began = time.time(), time.monotonic()
    frame = m.encode(m.FetchTime(sent))
    await stream.write(len(frame).to_bytes(4, "big") + frame)
    size = int.from_bytes(await read_exactly(stream, 4), "big")
    if size > MAX_TIME_BYTES:
        raise ProbeFailure(f"an answer of {size} bytes to the question for the time")
    answer = m.decode(await read_exactly(stream, size), m.Time)
    back = sent + time.monotonic() - began
    sample = round_trip(
        b"", sent=sent, received=answer.received, answered=answer.answered, back=back, correction=answer.correction
    )
    if sample is None:
        raise ProbeFailure("the answer to the question for the time cannot be true")
    return sample


def silence(result: ProbeResult, timeout: float) -> str:
    """Return the line for a peer that did not answer in ``timeout`` seconds."""
    if result.phase in ("identify", "ping"):
        return f"the peer stopped answering ({timeout:g} s)"
    if result.connected:
        return f"the port is open, but no libp2p peer answered within {timeout:g} s"
    return f"no answer within {timeout:g} s (machine off, wrong address, or a firewall drops the packets)"


def explain(error: BaseException, phase: str) -> str:
    """Return one line for a failure inside the library: its innermost cause, and for a wrong peer who answered."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ProbeFailure):
            return str(cause)
        if isinstance(cause, PeerIDMismatchesPubkey):
            actual = str(cause).rpartition("=")[2]
            return f"another peer answers at this address: {_clean(actual)}"
    texts = [_line(cause) for cause in causes if not hasattr(cause, "exceptions")]
    if phase == "dial" and any("negotiate" in text for text in texts):
        return "the port is open, but what listens there does not speak libp2p"
    return texts[-1] if texts else _line(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and everything it was raised from or groups, outermost first, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        inner: list[BaseException | None] = [*getattr(current, "exceptions", ())]
        if isinstance(current, MultiError):
            inner += current.errors
        inner += [current.__cause__, current.__context__]
        waiting += [cause for cause in inner if cause is not None]


def _line(error: BaseException) -> str:
    return _clean(" ".join(str(error).split()) or type(error).__name__)


def _clean(text: str) -> str:
    """Make text from a peer safe for a terminal: printable and short."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT_CHARS])


async def probe_all(results: Sequence[ProbeResult], timeout: float, run: str | None = None) -> None:
    """Probe all addresses at once."""
    async with trio.open_nursery() as nursery:
        for result in results:
            nursery.start_soon(probe_one, result, timeout, run)


def read_request(text: str) -> tuple[list[str], float, str | None]:
    """Return the addresses, the time limit in seconds and the run id. Raises ValueError for anything else."""
    request = json.loads(text)
    if not isinstance(request, dict):
        raise ValueError("the request must be a JSON object")
    addresses, timeout = request.get("addresses"), request.get("timeout", 10)
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise ValueError("'addresses' must be a list of strings")
    if len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"{len(addresses)} addresses; at most {MAX_ADDRESSES} at once")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(f"'timeout' must be a number of seconds up to {MAX_TIMEOUT:g}")
    run = request.get("run")
    if run is not None and not (isinstance(run, str) and re.fullmatch("[0-9a-f]{64}", run)):
        raise ValueError("'run' must be a run id of 64 hexadecimal digits")
    return addresses, float(timeout), run


def _answer(results: Sequence[ProbeResult]) -> None:
    rows = [{key: value for key, value in asdict(result).items() if key != "connected"} for result in results]
    print(json.dumps(rows), flush=True)


def main() -> None:
    """Read the request, probe, answer, and end: at the latest ``timeout`` + 1 second later, whatever happens."""
    logging.disable(logging.CRITICAL)  # the library reports each failed try on stderr; the answer has it once
    try:
        addresses, timeout, run = read_request(sys.stdin.read(MAX_INPUT_BYTES))
    except ValueError as error:
        sys.exit(f"The request on stdin cannot be used: {_line(error)}.")
    results = [ProbeResult(address=address) for address in addresses]
    once = threading.Lock()  # taken for good by whoever answers first

    def out_of_time() -> None:
        if once.acquire(blocking=False):
            for result in results:
                if not result.ok and result.error is None:
                    result.error = silence(result, timeout)
            _answer(results)
            os._exit(0)

    watchdog = threading.Timer(timeout + CLEANUP_SECONDS, out_of_time)
    watchdog.daemon = True
    watchdog.start()
    try:
        trio.run(probe_all, results, timeout, run)
    except trio.TrioInternalError as error:  # a background task of the library died and took the loop with it
        for result in results:
            if not result.ok and result.error is None:
                result.error = explain(error, result.phase)
    if once.acquire(blocking=False):
        _answer(results)
    else:
        watchdog.join()
    # A name look-up that hangs lives on in a thread of trio's; do not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
