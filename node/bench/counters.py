"""What processes cost, read from outside and for every program alike: CPU seconds and bytes on TCP connections.

CPU is that of a process and all its descendants, ended children included, from ``/proc/PID/stat`` (10 ms ticks).

On loopback the counters of the network interface cannot tell peers apart, but each TCP socket has counters of its own:
the kernel's socket diagnosis (netlink, sock_diag(7), the source of ``ss -ti``) names, for every connection, the inode
of its socket and how many payload bytes were acknowledged by and received from the other side. Encryption, stream
headers, DHT traffic and everything else inside the connection is in there; TCP and IP headers and repeats are not.
Which process holds a socket is read from ``/proc/PID/fd``. Linux only.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
INFO = 2
"""The attribute that holds a ``tcp_info``; as a bit in a request it is 1 << (INFO - 1)."""
NOT_LISTENING = 0xFFF & ~(1 << 10)
REQUEST = struct.Struct("=IHHII BBBBI 48x")
HEADER = struct.Struct("=IHHII")
ANSWER_INODE, ANSWER_BYTES = 68, 72
"""Where an ``inet_diag_msg`` keeps the socket's inode, and where it ends."""
ACKED_RECEIVED = struct.Struct("=QQ")
ACKED_AT = 120
"""Where a ``tcp_info`` keeps the bytes acknowledged, followed by the bytes received (Linux 4.1 and later)."""


@dataclass(frozen=True)
class Cost:
    """Counters of a process and its descendants at one moment; subtract two for what happened between them.

    ``cpu`` in seconds, ``sockets`` maps a TCP socket's inode to (bytes up, bytes down). A connection that closed
    between two readings is not counted.
    """

    cpu: float
    sockets: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def since(self, before: "Cost") -> tuple[float, int, int]:
        """CPU seconds, bytes up and bytes down since ``before``."""
        up = sum(now[0] - before.sockets.get(inode, (0, 0))[0] for inode, now in self.sockets.items())
        down = sum(now[1] - before.sockets.get(inode, (0, 0))[1] for inode, now in self.sockets.items())
        return self.cpu - before.cpu, up, down


def available() -> bool:
    """Whether this system has what is read here."""
    return (PROC / "self" / "stat").exists() and hasattr(socket, "AF_NETLINK")


def read_costs(roots: Iterable[int]) -> list[Cost]:
    """The present counters of each process in ``roots`` with its descendants."""
    table, sockets = _processes(), _tcp_bytes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    costs = []
    for root in roots:
        family = [root]
        for pid in family:  # grows while it is walked
            family += children.get(pid, [])
        inodes = {inode for pid in family for inode in _socket_inodes(pid)}
        cpu = sum(table[pid][1] for pid in family if pid in table)
        costs.append(Cost(cpu, {inode: sockets[inode] for inode in inodes if inode in sockets}))
    return costs


def marked(name: str, value: str) -> list[int]:
    """Processes whose environment holds ``name=value``: what was started with it, and all that those started."""
    wanted = f"{name}={value}".encode()
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _processes() -> dict[int, tuple[int, float]]:
    """Process id -> parent's id, CPU seconds with those of children that ended."""
    found: dict[int, tuple[int, float]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name is in brackets and may hold anything; fields are counted from behind it.
                fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                found[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return found


def _socket_inodes(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for handle in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(handle)
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _tcp_bytes() -> dict[int, tuple[int, int]]:
    """Inode -> (bytes acknowledged, bytes received) of every TCP connection of this machine."""
    found: dict[int, tuple[int, int]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as link:
        link.settimeout(5.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            link.send(
                REQUEST.pack(
                    REQUEST.size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0,
                    family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, NOT_LISTENING,
                )
            )  # fmt: skip
            for answer in _answers(link):
                (inode,) = struct.unpack_from("=I", answer, ANSWER_INODE)
                info = _attribute(answer, INFO)
                if inode and len(info) >= ACKED_AT + ACKED_RECEIVED.size:
                    found[inode] = ACKED_RECEIVED.unpack_from(info, ACKED_AT)
    return found


def _answers(link: socket.socket) -> Iterator[bytes]:
    """The bodies of all messages that answer a dump request."""
    while True:
        data = link.recv(1 << 18)
        at = 0
        while at < len(data):
            size, kind, _, _, _ = HEADER.unpack_from(data, at)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, at + HEADER.size)[0]
                raise OSError(code, f"the kernel does not show its TCP connections: {os.strerror(code)}")
            yield data[at + HEADER.size : at + size]
            at += (size + 3) & ~3


def _attribute(answer: bytes, wanted: int) -> bytes:
    at = ANSWER_BYTES
    while at + 4 <= len(answer):
        size, kind = struct.unpack_from("=HH", answer, at)
        if kind == wanted:
            return answer[at + 4 : at + size]
        at += max(4, (size + 3) & ~3)
    return b""
