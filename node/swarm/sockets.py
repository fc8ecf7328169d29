"""The TCP sockets of the network daemon, as the kernel counts them: how many, and the bytes through each.

What Stretto hands to the daemon is not all that goes over the line: DHT, encryption, keep-alive and packet headers
come on top, and with a small model they are the larger part. Linux tells the bytes of each socket over netlink
(sock_diag(7), ``struct tcp_info`` in linux/tcp.h), to any user for the network namespace that he is in;
``/proc/PID/fd`` says which of them are the daemon's. Where that cannot be had, ``SocketMeter.look`` returns None and
the caller estimates.

Bytes are the payload with what was sent again, and HEADER for each segment. What passed in a socket between the last
look and its end is missed, so look every few seconds.
"""

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

HEADER = 66
"""Bytes around a segment: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12."""

SOCK_DIAG = 4
"""NETLINK_SOCK_DIAG in linux/netlink.h."""

BY_FAMILY = 20
"""SOCK_DIAG_BY_FAMILY in linux/sock_diag.h."""

REQUEST_DUMP = 0x301
"""NLM_F_REQUEST and NLM_F_DUMP."""

ERROR, DONE = 2, 3
INFO = 2
"""INET_DIAG_INFO: the attribute that holds a ``struct tcp_info``."""

ESTABLISHED = 1
TIMEOUT = 2.0

_HEAD = struct.Struct("=IHHII")
_MESSAGE = 72
"""Bytes of ``struct inet_diag_msg``: the state is its second byte, the inode its last four."""


@dataclass(frozen=True)
class Connection:
    """One TCP socket: whether it is established, and its bytes up and down so far, headers included."""

    established: bool
    up: int
    down: int


@dataclass(frozen=True)
class Reading:
    """Connections that are established now, and bytes up and down so far."""

    connections: int
    up: int
    down: int


class SocketMeter:
    """Counts for the process ``pid``, from its beginning on."""

    def __init__(self, pid: int, *, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._last: dict[int, Connection] = {}
        self._up = self._down = 0

    def look(self) -> Reading | None:
        """What the kernel says now; None if it does not, or the process is gone."""
        try:
            mine = inodes(self._pid, self._proc)
            now = {inode: found for inode, found in connections() if inode in mine}
        except (OSError, struct.error):
            return None
        for inode, found in now.items():
            before = self._last.get(inode, Connection(False, 0, 0))
            if found.up < before.up or found.down < before.down:
                before = Connection(False, 0, 0)  # the number of a closed socket was given to a new one
            self._up += found.up - before.up
            self._down += found.down - before.down
        self._last = now
        return Reading(sum(found.established for found in now.values()), self._up, self._down)


def inodes(pid: int, proc: Path = PROC) -> set[int]:
    """The numbers of the sockets that process ``pid`` holds. OSError if it is gone or somebody else's."""
    found: set[int] = set()
    for entry in (proc / str(pid) / "fd").iterdir():
        try:
            link = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed in between
        if link.startswith("socket:["):
            found.add(int(link[8:-1]))
    return found


def connections() -> Iterator[tuple[int, Connection]]:
    """Every TCP socket of this network namespace by its inode. OSError where there is no sock_diag."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("this system has no netlink")
    for family in (socket.AF_INET, socket.AF_INET6):
        yield from _dump(family)


def _dump(family: int) -> Iterator[tuple[int, Connection]]:
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, 0xFFFFFFFF) + bytes(48)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as netlink:
        netlink.settimeout(TIMEOUT)
        netlink.send(_HEAD.pack(_HEAD.size + len(body), BY_FAMILY, REQUEST_DUMP, 1, 0) + body)
        while True:
            data = netlink.recv(1 << 20)
            for kind, message in _messages(data):
                if kind == DONE:
                    return
                if kind == ERROR:
                    raise OSError("sock_diag refused")
                found = parse(message)
                if found is not None:
                    yield found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + _HEAD.size <= len(data):
        length, kind, _, _, _ = _HEAD.unpack_from(data, place)
        if length < _HEAD.size:
            raise OSError("sock_diag sent nonsense")
        yield kind, data[place + _HEAD.size : place + length]
        place += (length + 3) & ~3


def parse(message: bytes) -> tuple[int, Connection] | None:
    """Inode and counts of one ``struct inet_diag_msg`` and its attributes; None if it counts no bytes."""
    (inode,) = struct.unpack_from("=I", message, _MESSAGE - 4)
    place = _MESSAGE
    while place + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, place)
        if length < 4:
            return None
        info = message[place + 4 : place + length]
        if kind == INFO and len(info) >= 144:
            # tcpi_bytes_acked, tcpi_bytes_received, tcpi_segs_out, tcpi_segs_in; tcpi_bytes_sent since Linux 4.19.
            acked, received, out, into = struct.unpack_from("=QQII", info, 120)
            sent = struct.unpack_from("=Q", info, 200)[0] if len(info) >= 208 else acked
            connection = Connection(message[1] == ESTABLISHED, sent + HEADER * out, received + HEADER * into)
            return inode, connection
        place += (length + 3) & ~3
    return None
