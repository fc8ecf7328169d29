"""Home internet lines on one machine: each peer in a network namespace of its own, behind a line of a given speed.

    namespace of a peer            namespace "hub"
    eth0 (tbf: upload) ---veth--- line0 (tbf: download) --- bridge side0
                                  line1 (tbf: download) --- bridge side0, or side1 while the network is split

A token bucket (tbf) at each end of a veth pair limits one direction: 64 kB may pass at once, and what would wait
longer than 100 ms is dropped, as in a home router. A line that is *cut* is set down at the hub, like a pulled cable at
the provider's end; a *split* moves lines to another bridge, so that both sides stay up and see nothing but silence
(the neighbour tables are fixed, since on the internet no ARP tells that somebody is away).

Everything lies in namespaces with a name of this run; the machine's own network is not touched. Needs root, ``ip`` and
``tc`` (iproute2), and neither iptables nor netem. What a run leaves behind that was killed, the next one removes.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from stretto.protocol.errors import StrettoError

PREFIX = "chaos"
NETWORK = "10.77.0"
"""Addresses in the namespaces; they can be those of the machine's own network without harm."""


class LinksError(StrettoError):
    """Namespaces or lines cannot be made here; the message says what is missing and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One peer's line in Mbit/s, as its provider would name it."""

    up: float = 10.0
    down: float = 20.0
    burst_kb: int = 64
    latency_ms: int = 100
    """Longest wait in the queue before the line."""


def check_machine() -> None:
    """LinksError, with the cure, unless this process may make namespaces with limited lines."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinksError(
            f"the chaos runs need {' and '.join(missing)}, which this machine lacks. On Debian or Ubuntu run, as "
            "root: apt-get install -y iproute2"
        )
    if os.geteuid() != 0:
        raise LinksError(
            "the chaos runs make network namespaces, which only root may. Run them with sudo, for example "
            "`sudo make chaos-short`, or as root in a container that was started with --privileged"
        )
    trial = Links(f"{PREFIX}-{os.getpid()}t")
    try:
        trial.open()
        trial.add("trial", Line())
    except LinksError as error:
        raise LinksError(
            f"this machine does not let root make network namespaces with limited lines ({error}). In a container it "
            "takes --privileged (or the capabilities NET_ADMIN and SYS_ADMIN); the kernel needs veth, bridge and "
            "sch_tbf: try `modprobe -a veth bridge sch_tbf`"
        ) from None
    finally:
        trial.close()


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinksError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def remove_leftovers() -> list[str]:
    """Remove namespaces of earlier runs whose process is gone and in which nothing runs; their names."""
    removed = []
    for name in _call("ip", "netns", "list").split("\n"):
        match = re.match(rf"({PREFIX}-(\d+)\S*)", name)
        if match is None or os.path.exists(f"/proc/{match.group(2)}"):
            continue
        with contextlib.suppress(LinksError):
            if not _call("ip", "netns", "pids", match.group(1)).strip():
                _call("ip", "netns", "del", match.group(1))
                removed.append(match.group(1))
    return removed


class Links:
    """The lines of one run. ``name`` is unique on this machine; ``close`` removes everything, whatever happened."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"{PREFIX}-{os.getpid()}"
        self.hub = f"{self.name}-hub"
        self.peers: dict[str, int] = {}
        self._sides: set[int] = set()
        self._namespaces: list[str] = []

    def open(self) -> None:
        """Make the hub."""
        self._add_namespace(self.hub)
        self._bridge(0)

    def add(self, peer: str, line: Line) -> str:
        """Give ``peer`` a namespace and a line; the address that it has there."""
        index = len(self.peers)
        namespace, port = f"{self.name}-{peer}", f"line{index}"
        self._add_namespace(namespace)
        self.peers[peer] = index
        end = ("eth0", "address", self._mac(index), "netns", namespace)
        _call("ip", "-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", *end)
        _call("ip", "-n", self.hub, "link", "set", port, "master", "side0", "up")
        _call("ip", "-n", namespace, "link", "set", "lo", "up")
        _call("ip", "-n", namespace, "addr", "add", f"{self.address(peer)}/24", "dev", "eth0")
        _call("ip", "-n", namespace, "link", "set", "eth0", "up")
        for where, device, rate in ((namespace, "eth0", line.up), (self.hub, port, line.down)):
            bucket = ("rate", f"{rate:g}mbit", "burst", f"{line.burst_kb}kb", "latency", f"{line.latency_ms}ms")
            _call("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        for other in self.peers:
            if other != peer:
                self._introduce(peer, other)
                self._introduce(other, peer)
        return self.address(peer)

    def address(self, peer: str) -> str:
        """The IPv4 address of ``peer``."""
        return f"{NETWORK}.{self.peers[peer] + 1}"

    def inside(self, peer: str) -> list[str]:
        """The words before a command that runs in the namespace of ``peer``."""
        return ["ip", "netns", "exec", f"{self.name}-{peer}"]

    def cut(self, peer: str) -> None:
        """Take the line down."""
        _call("ip", "-n", self.hub, "link", "set", f"line{self.peers[peer]}", "down")

    def mend(self, peer: str) -> None:
        """Take the line up again."""
        _call("ip", "-n", self.hub, "link", "set", f"line{self.peers[peer]}", "up")

    def move(self, peer: str, side: int) -> None:
        """Put ``peer`` on a side of the split; all begin on side 0."""
        self._bridge(side)
        _call("ip", "-n", self.hub, "link", "set", f"line{self.peers[peer]}", "master", f"side{side}")

    def bytes_up(self, peer: str) -> int:
        """Bytes that ``peer`` has put on its line since the beginning, headers and all."""
        answer = json.loads(_call("ip", "-n", f"{self.name}-{peer}", "-s", "-j", "link", "show", "dev", "eth0"))
        return int(answer[0]["stats64"]["tx"]["bytes"])

    def bytes_down(self, peer: str) -> int:
        """Bytes that have come to ``peer`` through its line since the beginning, headers and all."""
        answer = json.loads(_call("ip", "-n", f"{self.name}-{peer}", "-s", "-j", "link", "show", "dev", "eth0"))
        return int(answer[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """Remove all namespaces, and with them all that is in them. LinksError names those that would not go."""
        left = []
        for name in reversed(self._namespaces):
            try:
                _call("ip", "netns", "del", name)
            except LinksError as error:
                left.append(str(error))
        self._namespaces.clear()
        self.peers.clear()
        self._sides.clear()
        if left:
            raise LinksError("; ".join(left))

    # ------------------------------------------------------------------ inside

    def _add_namespace(self, name: str) -> None:
        _call("ip", "netns", "add", name)
        self._namespaces.append(name)
        for key in ("all", "default"):
            # No addresses of its own making, no router solicitations: what is on the line is the node's.
            with contextlib.suppress(LinksError):
                _call("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv6.conf.{key}.disable_ipv6=1")

    def _bridge(self, side: int) -> None:
        if side not in self._sides:
            _call("ip", "-n", self.hub, "link", "add", f"side{side}", "type", "bridge")
            _call("ip", "-n", self.hub, "link", "set", f"side{side}", "up")
            self._sides.add(side)

    def _introduce(self, peer: str, other: str) -> None:
        neighbour = (self.address(other), "lladdr", self._mac(self.peers[other]), "dev", "eth0", "nud", "permanent")
        _call("ip", "-n", f"{self.name}-{peer}", "neigh", "replace", *neighbour)

    @staticmethod
    def _mac(index: int) -> str:
        return f"02:00:00:00:00:{index + 1:02x}"
