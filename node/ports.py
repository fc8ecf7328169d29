"""Is a TCP port free, and if not, who holds it? And may an address be announced?

The libp2p daemon listens with SO_REUSEPORT: on a busy port it starts without any error and then shares the incoming
connections with the other program, so some joins reach the wrong one. Hence the port is tried first, with a bind that
does not share. On Linux the holder is found in ``/proc``: ``net/tcp`` and ``net/tcp6`` give the socket's inode (field
10) for a local port, and ``PID/fd`` tells which process has ``socket:[inode]`` open (proc(5)).

A busy port is an error, never a reason to take another one: nobody has opened that other one in the router.

An announced address is where others dial, so it names a real host and a real port. Behind a router, or in a container
whose port is published, both differ from what the process itself sees, and nobody but its owner can know them.
"""

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.protocol.errors import ConfigError

_LISTEN = "0A"
_MAX_COMMAND_CHARS = 80


@dataclass(frozen=True, kw_only=True)
class PortOwner:
    """The process that holds a port: its id and its command line, cut to one short printable line."""

    pid: int
    command: str


def probe_port(host: str, port: int, option: str = "--port") -> None:
    """Check that this process could listen on TCP ``host:port``; port 0 (any free one) always can.

    ``option`` is the setting that a person would change. Raises ConfigError that names the port, the option and,
    where the system tells, the process that holds the port.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"Port {port} does not exist. Give {option} a port from 1 to 65535, or 0 for any free one.")
    if port == 0:
        return
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is no address of this machine ({error.strerror}). Correct {option}.") from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                _bind(probe, address)
        except OSError as error:
            raise ConfigError(_why(host, port, option, error)) from error


def _bind(probe: socket.socket, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> None:
    # With SO_REUSEADDR connections of an earlier life that linger in TIME_WAIT do not count as busy on Linux, while a
    # listening socket still does, even one that has SO_REUSEPORT set.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if probe.family == socket.AF_INET6:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    probe.bind(address)


def _why(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        if owner is not None:
            by = f"by process {owner.pid} ({owner.command})"
        elif sys.platform == "linux":
            by = "by a process that this user may not look at (another user's, or one in a container)"
        else:
            by = f"by another process (lsof -i :{port} shows it)"
        return f"Port {port} is already in use {by}. Stop it, or choose another port with {option}."
    if error.errno == errno.EACCES:
        return f"Port {port} may not be used by user id {os.geteuid()}. Choose a port above 1023 with {option}."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine, so port {port} cannot be opened on it. Correct --host."
    return f"Port {port} on {host} cannot be opened: {error.strerror}. Choose another one with {option}."


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of ``host`` that was free a moment ago. Another process may take it before the caller does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def port_owner(port: int, proc: Path = Path("/proc")) -> PortOwner | None:
    """Return the process that holds local TCP ``port``, or None where ``/proc`` does not tell."""
    inodes = _inodes(port, proc)
    if not inodes:
        return None
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder, inodes):
            return PortOwner(pid=int(folder.name), command=_command(folder))
    return None


def _inodes(port: int, proc: Path) -> set[str]:
    """Return the inodes of the sockets on ``port``: of the listening ones where there are any, else of all."""
    listening: set[str] = set()
    others: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # not Linux, or no IPv6
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                (listening if fields[3] == _LISTEN else others).add(f"socket:[{fields[9]}]")
    return listening or others


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        handles = list((folder / "fd").iterdir())
    except OSError:  # gone meanwhile, or another user's
        return False
    for handle in handles:
        try:
            if os.readlink(handle) in inodes:
                return True
        except OSError:
            continue
    return False


def _command(folder: Path) -> str:
    try:
        raw = (folder / "cmdline").read_bytes()[:4096]
    except OSError:
        return "command unknown"
    text = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    text = "".join(character if character.isprintable() else "?" for character in text)
    if not text:
        return "command unknown"
    return text if len(text) <= _MAX_COMMAND_CHARS else text[: _MAX_COMMAND_CHARS - 3] + "..."


def check_announce(address: str) -> str:
    """``address`` if others could dial it, such as /ip4/203.0.113.5/tcp/4001 or /dns4/node.example.org/tcp/4001.

    Raises ConfigError that says what is wrong: the form, port 0, or a host that means "any" (0.0.0.0).
    """
    parts = address.split("/")
    if not (len(parts) >= 5 and parts[0] == "" and parts[2] and parts[3] in ("tcp", "udp") and _is_port(parts[4])):
        raise ConfigError(
            f"announce address {address!r} is not of the form /ip4/HOST/tcp/PORT with a port that is not 0"
        )
    family, host = parts[1:3]
    if family in ("ip4", "ip6"):
        try:
            found = (ipaddress.IPv4Address if family == "ip4" else ipaddress.IPv6Address)(host)
        except ValueError:
            raise ConfigError(f"announce address {address!r}: {host!r} is not an {family} address") from None
        if found.is_unspecified:
            raise ConfigError(
                f"announce address {address!r} cannot be dialled: {host} means any address of this machine. Announce "
                "the one that others use; --host is where to listen"
            )
    elif family not in ("dns", "dns4", "dns6"):
        raise ConfigError(
            f"announce address {address!r} begins with {family!r}, it must be ip4, ip6, dns, dns4 or dns6"
        )
    return address


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def in_container() -> bool:
    """Whether this process runs in a container of docker or podman."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def doubt_reach(port: int, announce: Sequence[str], listening: Sequence[str], *, container: bool) -> str | None:
    """A warning if others will hardly reach what this process tells them, else None.

    ``port`` is the one in the config, 0 for any; ``listening`` are the addresses that the process sees of itself.
    """
    if announce and not port:
        return (
            f"WARNING {', '.join(announce)} is announced, but with --port 0 this process listens on a port that "
            "changes at every start: nothing can be forwarded to it. Choose a fixed --port"
        )
    # Loopback alone is meant to stay on this machine, as in the demo.
    seen = sorted({address.split("/")[2] for address in listening if "/127.0.0.1/" not in address})
    if container and not announce and seen:
        return (
            f"WARNING this process runs in a container and announces {', '.join(seen)}, which only "
            "containers of the same network can reach. Publish the port, and announce the address that others dial, "
            "with --announce or STRETTO_ANNOUNCE; without a published port use --client-mode"
        )
    return None
