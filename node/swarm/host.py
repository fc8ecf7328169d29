"""A peer's place on the network: one p2pd child, one DHT node, both in this process's event loop.

hivemind is used without ``hivemind.DHT`` and ``DecentralizedAverager``: those fork, leave orphans when the trainer is
killed, take SIGINT and use shared memory. In the process itself, p2pd is the only child and ends by itself within
seconds of the trainer's death, however that dies.

p2pd starts without bootstrap peers, so that "the daemon does not start" and "the bootstrap does not answer" are two
errors with two causes. Bootstrap peers are dialled afterwards, again and again: that also heals a DHT that was split
when a bootstrap peer restarted.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.proto.dht_pb2 import NodeInfo
from hivemind.utils.auth import AuthRole, AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from stretto.node.endings import ending, peak_rss
from stretto.node.swarm.crowd import superfluous, target
from stretto.node.swarm.identity import Identity
from stretto.node.swarm.opening import close_failed_streams, connect_first
from stretto.protocol.errors import StrettoError
from stretto.protocol.invite import check_address

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 2.0

SECONDS_PER_LOOK = 10.0
"""Between two looks at the memory that the daemon holds: when it has been killed nobody can tell any more."""

FEW = 6
"""Peers that a frugal node's lookups visit. A record is stored at five."""

LONGEST_SOCKET_PATH = 100
"""A unix socket's path may have about 107 bytes on Linux, 103 on macOS."""


class HostError(StrettoError):
    """The network side could not be started or has died; the message names the phase."""


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """Where to listen and what to announce. ``socket_dir`` keeps the daemon's sockets, cleaned at every start."""

    host: str
    port: int
    announce: tuple[str, ...]
    socket_dir: Path
    startup_timeout: float = 30.0
    dial_timeout: float = 10.0
    max_connections: int = 0
    """Connections that are kept at most (``stretto.node.swarm.crowd``); 0 for no limit."""


def socket_dir(data_dir: Path, temp: Path | None = None) -> Path:
    """A folder for unix sockets: in the data dir where its path is short enough, else one in the temp dir.

    ``temp`` is the temp dir of another process. What a killed process leaves there its next start removes.
    """
    folder = data_dir / "run"
    if len(str(folder.resolve() / "p2pclient-0123456789a.sock")) <= LONGEST_SOCKET_PATH:
        return folder
    key = os.stat(data_dir)
    return (temp or Path(tempfile.gettempdir())) / f"stretto-{os.getuid()}-{key.st_dev:x}-{key.st_ino:x}"


class Host:
    """P2P and DHT of one peer. Use from the event loop that ``start`` runs in."""

    def __init__(self, identity: Identity, config: HostConfig, p2p: P2P, node: DHTNode) -> None:
        self.identity, self.config, self.p2p, self.node = identity, config, p2p, node
        self.addresses: tuple[str, ...] = ()
        self.known: dict[bytes, tuple[str, ...]] = {}
        """Addresses of the roster's peers."""
        self.linked: set[bytes] = set()
        """Whom the daemon was connected to at the last look; kept only under a limit of connections."""
        self._node_id, self._bucket_size = node.node_id, node.protocol.bucket_size
        self._why: dict[str, str] = {}
        """Why an address could not be reached last, in words."""

    @classmethod
    async def start(cls, identity: Identity, config: HostConfig, validator: RecordValidatorBase) -> "Host":
        """Launch p2pd and the DHT node. HostError names the phase in which it failed.

        A start that fails or is given up leaves neither a daemon nor sockets nor their folder.
        """
        made: list[P2P] = []
        _clean(config.socket_dir)
        try:
            return await cls._start(identity, config, validator, made)
        except BaseException:
            cleanup = asyncio.ensure_future(_end([p2p.shutdown for p2p in made], config.socket_dir))
            while not cleanup.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(cleanup)
            raise

    @classmethod
    async def _start(
        cls, identity: Identity, config: HostConfig, validator: RecordValidatorBase, made: list[P2P]
    ) -> "Host":
        def remember(p2p: P2P) -> None:
            # create() hands nothing out before the daemon is ready.
            P2P.__init__(p2p)
            made.append(p2p)

        folder = config.socket_dir
        own = {
            "__init__": remember,
            "_UNIX_SOCKET_PREFIX": f"/unix{folder.resolve()}/",
            "DHT_MODE_MAPPING": {**P2P.DHT_MODE_MAPPING, "server": {"dhtServer": 1, "relayService": 0}},
        }
        local = cast(type[P2P], type("LocalP2P", (P2P,), own))
        try:
            p2p = await local.create(
                identity_path=str(identity.path),
                host_maddrs=[f"/ip4/{config.host}/tcp/{config.port}"],
                announce_maddrs=list(config.announce) or None,
                check_if_identity_free=False,
                startup_timeout=config.startup_timeout,
                nat_port_map=False,
                auto_nat=False,
                dht_mode="server",
                force_reachability="public",
                # This daemon cuts every relayed connection after 128 KiB, whatever -relayDataLimit says: no tensor
                # would pass, and who cannot be reached does better without.
                use_relay=False,
                idle_timeout=60,
            )
        except (P2PDaemonError, OSError, ValueError) as error:
            raise HostError(f"starting the network daemon (p2pd): {error}") from None
        if p2p.peer_id.to_base58() != identity.peer_id:
            raise HostError(f"the network daemon runs as {p2p.peer_id}, not as {identity.peer_id}")
        close_failed_streams(p2p)
        node = await DHTNode.create(p2p=p2p, record_validator=validator, wait_timeout=5)
        host = cls(identity, config, p2p, node)
        await host.refresh_addresses()
        if config.max_connections:
            connect_first(p2p, host.reach)
        return host

    async def refresh_addresses(self) -> None:
        """Ask the daemon under which addresses this peer can be reached."""
        found = await self.p2p.get_visible_maddrs(latest=True)
        suffix = f"/p2p/{self.identity.peer_id}"
        self.addresses = tuple(str(address).removesuffix(suffix) + suffix for address in found)

    async def dial(self, address: str) -> None:
        """Connect to a peer at /.../p2p/ID and make it part of the DHT. HostError if it cannot be reached."""
        check_address(address)
        name = address.rsplit("/p2p/", 1)[1]
        if name == self.identity.peer_id:
            raise HostError(f"{address} is this peer itself")
        peer = PeerID.from_base58(name)
        if address in self._why:
            await self._knock(address)
        try:
            place = [Multiaddr(address.rsplit("/p2p/", 1)[0])]
            await asyncio.wait_for(self.p2p._client.connect(peer, place), self.config.dial_timeout)
            pong = await asyncio.wait_for(self.node.protocol.call_ping(peer), self.config.dial_timeout)
        except asyncio.TimeoutError:
            raise HostError(f"{address}: no answer in {self.config.dial_timeout:.0f} s") from None
        except (ControlFailure, P2PDaemonError, OSError) as error:
            raise HostError(f"{address}: {self._reason(address, error)}") from None
        if pong is None:
            raise HostError(f"{address}: connected, but its DHT does not answer")
        self._why.pop(address, None)

    async def _knock(self, address: str) -> None:
        """HostError unless a TCP port that could not be dialled last time accepts a connection now.

        After each failed dial the daemon refuses to try again for a time that grows to minutes; asked only when
        somebody listens, it connects at once after an outage of any length.
        """
        family, host, kind, port = address.split("/")[1:5]
        if kind != "tcp":
            return
        versions = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
        opening = asyncio.open_connection(host, int(port), family=versions.get(family, socket.AF_UNSPEC))
        try:
            _, writer = await asyncio.wait_for(opening, self.config.dial_timeout)
        except asyncio.TimeoutError:
            raise HostError(f"{address}: no answer in {self.config.dial_timeout:.0f} s") from None
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
            raise HostError(f"{address}: {why}") from None
        writer.close()

    async def connected(self) -> list[bytes]:
        """Ids of the peers that the daemon is connected to, whoever dialled; empty if it does not say."""
        with contextlib.suppress(ControlFailure, P2PDaemonError, OSError, asyncio.TimeoutError):
            found = await asyncio.wait_for(self.p2p.list_peers(), self.config.dial_timeout)
            return [info.peer_id.to_bytes() for info in found]
        return []

    def _reason(self, address: str, error: Exception) -> str:
        """What failed; while the daemon holds off ("dial backoff") that is what failed before."""
        reason = _reason(error)
        if reason == "dial backoff":
            return self._why.get(address, "no connection a moment ago")
        self._why[address] = reason
        return reason

    async def connect(self, peer: bytes, addresses: Sequence[str]) -> bool:
        """Let the daemon know a peer of the roster; False if it cannot be reached now."""
        with contextlib.suppress(ControlFailure, P2PDaemonError, OSError, ValueError, asyncio.TimeoutError):
            known = [Multiaddr(a.split("/p2p/")[0]) for a in addresses if a.startswith("/")]
            await asyncio.wait_for(self.p2p._client.connect(PeerID(peer), known), self.config.dial_timeout)
            return True
        return False

    async def reach(self, peer: bytes) -> None:
        """Before a stream is opened: dial ``peer`` again if it was let go, or never dialled for want of room."""
        if peer not in self.linked and peer in self.known and await self.connect(peer, self.known[peer]):
            self.linked.add(peer)

    def room(self, wanted: Sequence[bytes]) -> list[bytes]:
        """Those of ``wanted`` to whom a connection may be opened although there is nothing to say to them yet."""
        if not self.config.max_connections:
            return list(wanted)
        return list(wanted)[: max(0, target(self.config.max_connections) - len(self.linked))]

    async def thin_out(self, used_at: Mapping[bytes, float], needed: Collection[bytes]) -> None:
        """Let go of the connections above the limit that are needed least (``crowd.superfluous``)."""
        connected = await self.connected()
        self.linked = set(connected)
        for peer in superfluous(connected, self.config.max_connections, used_at=used_at, needed=needed):
            await self.let_go(peer)

    async def let_go(self, peer: bytes) -> None:
        """Close the connection to ``peer``, and with it all streams."""
        self.linked.discard(peer)
        with contextlib.suppress(ControlFailure, P2PDaemonError, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self.p2p._client.disconnect(PeerID(peer)), self.config.dial_timeout)

    async def be_frugal(self, frugal: bool) -> None:
        """Whether this peer is a mere client of the DHT: others ask it nothing, and it asks few of them.

        Its requests then carry no node id, so nobody takes it into a routing table, and those who have it in theirs
        drop it when a call fails. There must be others that serve the DHT, a bootstrap peer for one.
        """
        protocol = self.node.protocol
        if frugal == protocol.client_mode:
            return
        protocol.client_mode = frugal
        protocol.bucket_size = min(FEW, self._bucket_size) if frugal else self._bucket_size
        # The others still name the id that they know for a while; hivemind takes it for a fault to be named its own.
        self.node.node_id = protocol.node_id = DHTID.generate() if frugal else self._node_id
        protocol.node_info = NodeInfo() if frugal else NodeInfo(node_id=self._node_id.to_bytes())
        if frugal:
            await protocol.remove_p2p_handlers(self.p2p)
        else:
            await protocol.add_p2p_handlers(self.p2p, AuthRPCWrapper(protocol, AuthRole.SERVICER, None))

    @property
    def daemon(self) -> int:
        """The process id of p2pd."""
        return int(self.p2p._child.pid)

    async def died(self) -> str:
        """Wait until p2pd ends, which nothing else notices; how it ended, in words."""
        peak, waiting = 0, asyncio.ensure_future(self.p2p._child.wait())
        try:
            while not waiting.done():
                peak = peak_rss(self.daemon) or peak
                await asyncio.wait([waiting], timeout=SECONDS_PER_LOOK)
        finally:
            waiting.cancel()
        return ending(int(waiting.result()), peak)

    async def close(self) -> None:
        """Stop the DHT node and the daemon, remove the sockets. A daemon that is dead already is not waited for."""
        await _end([self.node.shutdown, self.p2p.shutdown], self.config.socket_dir)


async def _end(shutdowns: Sequence[Callable[[], Awaitable[None]]], folder: Path) -> None:
    """Stop what has been started, or half started, and remove the sockets and their folder."""
    for shutdown in shutdowns:
        with contextlib.suppress(asyncio.TimeoutError, P2PDaemonError, OSError):
            await asyncio.wait_for(shutdown(), CLOSE_TIMEOUT)
    _remove(folder)


async def dial_any(
    host: Host,
    addresses: Sequence[str],
    *,
    say: Callable[[str], None],
    stop: asyncio.Event,
    patience: float | None,
    remembered: Sequence[str] = (),
) -> list[str]:
    """Dial bootstrap peers, and peers that this node met before, until at least one answers; returns those that did.

    Retries with back-off, saying each time what failed and when it tries again. After ``patience`` seconds (None: for
    ever) it gives up with HostError. Returns nothing when ``stop`` is set meanwhile.
    """
    loop = asyncio.get_running_loop()
    began, pause = loop.time(), 2.0
    while not stop.is_set():
        reached, errors = await dial_all(host, [*addresses, *remembered])
        failed = [errors[address] for address in addresses if address in errors]
        why = f"{len(addresses) - len(failed)} of {len(addresses)} bootstrap peers reachable ({'; '.join(failed)})"
        if remembered:
            met = sum(address in reached for address in remembered)
            why += f", {met} of {len(remembered)} addresses of peers met earlier"
        if reached:
            if failed:
                say(why)
            return reached
        if patience is not None and loop.time() - began + pause > patience:
            raise HostError(
                f"dialling the bootstrap: {why}. Check that the bootstrap runs and that the invite is current; "
                "--join-timeout waits longer"
            )
        say(f"{why}, next try in {pause:.0f} s")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
        pause = min(60.0, pause * 1.6)
    return []


async def dial_all(host: Host, addresses: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Dial all ``addresses`` at once. Those that answered, in their order, and what went wrong with each other one."""
    results = await asyncio.gather(*(host.dial(address) for address in addresses), return_exceptions=True)
    reached: list[str] = []
    errors: dict[str, str] = {}
    for address, result in zip(addresses, results, strict=True):
        if isinstance(result, HostError):
            errors[address] = str(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            reached.append(address)
    return reached, errors


def _reason(error: Exception) -> str:
    text = str(error)
    for known in ("connection refused", "no route to host", "network is unreachable", "i/o timeout", "dial backoff"):
        if known in text.lower():
            return known
    return text.splitlines()[0][:200] if text else type(error).__name__


def _clean(folder: Path) -> None:
    """An empty private folder. Sockets in it are left-overs of a killed process: the identity lock is ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise HostError(f"{folder} belongs to another user; remove it or choose another --data-dir")
    for entry in folder.iterdir():
        if stat.S_ISSOCK(entry.lstat().st_mode):
            entry.unlink()


def _remove(folder: Path) -> None:
    """The sockets, and the folder where nothing else lies in it."""
    _clean(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()
