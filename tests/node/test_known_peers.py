"""The peers that a node remembers: written whole, bounded, and not believed without a look."""

import json
from pathlib import Path

import pytest

from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.known_peers import DIALLED, MAX_FILE, MAX_PEERS, KnownPeers
from stretto.protocol.roster import PeerRecord


def peer_id(number: int) -> bytes:
    """An Ed25519 peer id of the right form."""
    return b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")


def record(peer: bytes, *ports: int, client_mode: bool = False) -> PeerRecord:
    return PeerRecord(
        version="1",
        state="training",
        addresses=tuple(address(peer, port) for port in ports),
        client_mode=client_mode,
        rate=1.0,
        step=1,
        loss=1.0,
        tau=1,
        tokens=1,
        clock=None,
        versions=(),
        chain_tokens=(),
        last_tokens=(),
        heads=bytes(32),
    )


def address(peer: bytes, port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(peer)}"


ME = format_peer_id(peer_id(0))
A, B, C = (peer_id(i) for i in (1, 2, 3))


def open_file(path: Path, told: list[str] | None = None) -> KnownPeers:
    return KnownPeers(path, ME, (told if told is not None else []).append)


def test_what_was_met_is_there_after_a_restart_the_latest_first(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x" / "peers.json"
    known = open_file(path)
    assert known.addresses() == []
    known.meet({A: record(A, 1, 2)})
    known.meet({B: record(B, 3)})
    known.meet({})
    told: list[str] = []
    again = open_file(path, told)
    assert again.addresses() == [address(B, 3), address(A, 1), address(A, 2)]
    assert again.addresses(besides=[B]) == [address(A, 1), address(A, 2)]
    assert told == []
    again.meet({A: record(A, 9)})
    assert open_file(path).addresses() == [address(A, 9), address(B, 3)]
    assert [entry.name for entry in path.parent.iterdir()] == ["peers.json"]


def test_peers_that_cannot_be_dialled_are_not_remembered(tmp_path: Path) -> None:
    known = open_file(tmp_path / "peers.json")
    bad = record(C, 5)
    object.__setattr__(bad, "addresses", (address(A, 5), "nonsense", "/ip4/127.0.0.1/tcp/0/p2p/" + format_peer_id(C)))
    known.meet({A: record(A, 1, client_mode=True), B: record(B), C: bad, peer_id(0): record(peer_id(0), 1)})
    assert known.addresses() == []


def test_a_quiet_look_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    known = open_file(path)
    known.meet({A: record(A, 1), B: record(B, 2)})
    path.unlink()
    known.meet({A: record(A, 1), B: record(B, 2)})
    assert not path.exists()


def test_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    known = open_file(path)
    for i in range(1, 2 * MAX_PEERS):
        known.meet({peer_id(i): record(peer_id(i), *range(1, 17))})
    rows = json.loads(path.read_text(encoding="utf-8"))["peers"]
    assert len(rows) == MAX_PEERS
    assert rows[0]["id"] == format_peer_id(peer_id(2 * MAX_PEERS - 1))
    assert {len(row["addresses"]) for row in rows} == {8}
    assert path.stat().st_size < MAX_FILE
    assert len(open_file(path).addresses()) == DIALLED


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"peers": 3}',
        b'{"peers": [3]}',
        b'{"peers": [{"id": "x", "addresses": ["/ip4/1.2.3.4/tcp/1/p2p/x"]}]}',
        b'{"peers": [{"id": "x", "addresses": [7]}]}',
        json.dumps({"peers": [{"id": format_peer_id(A), "addresses": [address(B, 1)]}]}).encode(),
        json.dumps({"peers": [{"id": format_peer_id(A), "addresses": []}] * (MAX_PEERS + 1)}).encode(),
        b"[" * 100_000,
        b" " * (MAX_FILE + 1),
    ],
)
def test_a_bad_file_is_ignored_in_one_line_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    told: list[str] = []
    known = open_file(path, told)
    assert known.addresses() == []
    (line,) = told
    assert str(path) in line
    assert "is ignored" in line
    assert "\n" not in line
    assert len(line) < 500
    known.meet({A: record(A, 1)})
    assert open_file(path).addresses() == [address(A, 1)]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    told: list[str] = []
    known = KnownPeers(tmp_path / "run" / "peers.json", ME, told.append)
    told.clear()
    known.meet({A: record(A, 1)})
    known.meet({A: record(A, 2)})
    assert len(told) == 1
    assert "cannot be remembered" in told[0]
    assert known.addresses() == [address(A, 2)]
