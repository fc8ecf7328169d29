"""Ports: a busy one is an error that names port, option and holder. Announced addresses: can they be dialled?"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.node.ports import PortOwner, check_announce, doubt_reach, free_port, port_owner, probe_port
from stretto.protocol.errors import ConfigError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


def test_a_free_port_and_port_zero_pass() -> None:
    probe_port("127.0.0.1", free_port())
    probe_port("0.0.0.0", 0)
    probe_port("", free_port())


def test_free_port_can_be_bound_at_once() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert port_of(server) == port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_busy_port_names_port_option_and_holder(listener: socket.socket, host: str) -> None:
    port = port_of(listener)
    with pytest.raises(ConfigError) as caught:
        probe_port(host, port, "--metrics-port")
    message = str(caught.value)
    assert message.startswith(f"Port {port} is already in use by process {os.getpid()} (")
    assert message.endswith("choose another port with --metrics-port.")


def test_a_port_that_its_holder_would_share_is_busy_too() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("0.0.0.0", 0))
        server.listen()
        with pytest.raises(ConfigError, match=f"Port {port_of(server)} is already in use"):
            probe_port("127.0.0.1", port_of(server))


def test_an_ipv6_port_is_probed_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        with pytest.raises(ConfigError, match=f"already in use by process {os.getpid()} "):
            probe_port("::1", port_of(server))
        probe_port("::1", free_port("::1"))


def test_connections_of_an_earlier_life_do_not_count(listener: socket.socket) -> None:
    port = port_of(listener)
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = listener.accept()
    accepted.close()  # the side that closes first is left in TIME_WAIT
    assert client.recv(1) == b""
    client.close()
    listener.close()
    probe_port("127.0.0.1", port)


@pytest.mark.integration
def test_the_holder_is_found_in_another_process() -> None:
    script = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with pytest.raises(ConfigError) as caught:
            probe_port("127.0.0.1", port)
        child.communicate("\n")
    message = str(caught.value)
    assert f"in use by process {child.pid} ({sys.executable} -c import socket"[:100] in message
    assert "--port" in message


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"Port {port} does not exist. Give --p2p"):
        probe_port("127.0.0.1", port, "--p2p")


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 is no address of this machine"):
        probe_port("203.0.113.7", free_port())
    with pytest.raises(ConfigError, match=r"no\.such\.name\.invalid"):
        probe_port("no.such.name.invalid", free_port())


def fake_proc(root: Path, cmdline: bytes) -> Path:
    """Write a /proc with one listener on port 8080 (inode 77, process 42) and a lingering connection of no one."""
    (root / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 00000000:1F90 00000000:0000 {st} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
    (root / "net" / "tcp").write_text(head + row.format(st="06", inode=0) + row.format(st="01", inode=66))
    (root / "net" / "tcp6").write_text(head + row.format(st="0A", inode=77))
    for pid, inode in ((41, 66), (42, 77)):
        (root / str(pid) / "fd").mkdir(parents=True)
        (root / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (root / str(pid) / "cmdline").write_bytes(cmdline)
    (root / "self").mkdir()
    return root


def test_the_listening_process_is_preferred(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, b"python\0-m\0http.server\0")
    assert port_owner(8080, proc) == PortOwner(pid=42, command="python -m http.server")
    assert port_owner(8081, proc) is None


def test_a_command_line_is_made_safe_to_print(tmp_path: Path) -> None:
    owner = port_owner(8080, fake_proc(tmp_path, b"evil\x1b[2J\n\0" + b"a" * 5000))
    assert owner is not None
    assert owner.command.startswith("evil?[2J? aaa")
    assert len(owner.command) == 80


def test_without_proc_the_holder_stays_unknown(tmp_path: Path) -> None:
    assert port_owner(8080, tmp_path) is None


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.5/tcp/4001",
        "/ip4/172.18.0.3/tcp/14001",
        "/ip6/2001:db8::5/tcp/4001",
        "/dns4/bootstrap/tcp/4001",
        "/dns/node.example.org/tcp/65535",
        "/ip4/203.0.113.5/udp/4001/quic",
    ],
)
def test_an_address_that_others_can_dial_may_be_announced(address: str) -> None:
    assert check_announce(address) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/ip4/203.0.113.5/tcp/0", "with a port that is not 0"),
        ("/ip4/203.0.113.5/tcp/65536", "with a port that is not 0"),
        ("/ip4/203.0.113.5/tcp/http", "is not of the form"),
        ("/ip4/203.0.113.5", "is not of the form"),
        ("/dns4//tcp/4001", "is not of the form"),
        ("203.0.113.5:4001", "is not of the form"),
        ("", "is not of the form"),
        ("/ip4/0.0.0.0/tcp/4001", "0.0.0.0 means any address of this machine"),
        ("/ip6/::/tcp/4001", ":: means any address of this machine"),
        ("/ip4/203.0.113.500/tcp/4001", "'203.0.113.500' is not an ip4 address"),
        ("/ip6/203.0.113.5/tcp/4001", "'203.0.113.5' is not an ip6 address"),
        ("/ip/203.0.113.5/tcp/4001", "begins with 'ip', it must be"),
    ],
)
def test_an_address_that_nobody_can_dial_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_announce(address)
    assert message in str(caught.value)


def test_addresses_that_others_will_hardly_reach_are_doubted() -> None:
    inner = ["/ip4/127.0.0.1/tcp/4001/p2p/x", "/ip4/172.18.0.3/tcp/4001/p2p/x"]
    public = ["/ip4/203.0.113.5/tcp/14001"]
    assert doubt_reach(4001, [], inner, container=False) is None
    assert doubt_reach(0, [], inner, container=False) is None
    assert doubt_reach(4001, public, public, container=True) is None
    assert doubt_reach(4001, [], ["/ip4/127.0.0.1/tcp/4001/p2p/x"], container=True) is None
    alone = doubt_reach(4001, [], inner, container=True)
    assert alone is not None
    assert "announces 172.18.0.3, which only containers" in alone
    assert "STRETTO_ANNOUNCE" in alone
    moving = doubt_reach(0, public, public, container=False)
    assert moving is not None
    assert "/ip4/203.0.113.5/tcp/14001 is announced, but with --port 0" in moving
