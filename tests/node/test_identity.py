"""Identity: the key file that go-libp2p reads, peer ids, signatures, every way a file can be broken, and the lock."""

import asyncio
import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stretto.node.swarm import identity as module
from stretto.node.swarm.identity import (
    IdentityLock,
    ensure_peer_id,
    format_peer_id,
    load_or_create,
    parse_peer_id,
    verify,
)
from stretto.protocol.errors import ConfigError, RemoteProtocolError

# RFC 8032, section 7.1, test 1: seed, public key, and the signature of the empty message.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)
KEY_FILE = b"\x08\x01\x12\x40" + SEED + PUBLIC
PEER_ID_BYTES = b"\x00\x24\x08\x01\x12\x20" + PUBLIC
RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def write_key(path: Path, content: bytes = KEY_FILE, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_known_key_file_gives_the_known_identity_and_signature(tmp_path: Path) -> None:
    identity = load_or_create(write_key(tmp_path / "key"), create=False)
    assert identity.peer_id_bytes == PEER_ID_BYTES
    assert identity.peer_id.startswith("12D3KooW")
    assert len(identity.peer_id) == 52
    assert identity.sign(b"") == SIGNATURE
    assert verify(PEER_ID_BYTES, b"", SIGNATURE)
    assert SEED.hex() not in repr(identity)


def test_a_new_key_has_the_libp2p_layout_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    identity = load_or_create(path)
    raw = path.read_bytes()
    assert len(raw) == 68
    assert raw[:4] == b"\x08\x01\x12\x40"
    assert raw[36:] == identity.peer_id_bytes[6:]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "key.peer-id"]
    again = load_or_create(path)
    assert again == identity
    assert path.read_bytes() == raw


def test_two_new_keys_differ(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a").peer_id != load_or_create(tmp_path / "b").peer_id


def test_the_path_is_absolute_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    identity = load_or_create(Path("key"))
    assert identity.path == tmp_path / "key"
    monkeypatch.chdir("/")
    assert load_or_create(identity.path).peer_id == identity.peer_id


def test_signatures_hold_for_one_key_and_one_message(tmp_path: Path) -> None:
    one, other = load_or_create(tmp_path / "a"), load_or_create(tmp_path / "b")
    signature = one.sign(b"round 7")
    assert len(signature) == 64
    assert verify(one.peer_id_bytes, b"round 7", signature)
    assert not verify(one.peer_id_bytes, b"round 8", signature)
    assert not verify(other.peer_id_bytes, b"round 7", signature)
    assert not verify(one.peer_id_bytes, b"round 7", signature[:-1])
    assert not verify(one.peer_id_bytes, b"round 7", b"")
    assert not verify(one.peer_id_bytes[:-1], b"round 7", signature)
    assert not verify(b"\x12\x20" + one.peer_id_bytes[2:], b"round 7", signature)


def test_peer_ids_survive_text(tmp_path: Path) -> None:
    identity = load_or_create(tmp_path / "key")
    assert parse_peer_id(identity.peer_id) == identity.peer_id_bytes
    assert ensure_peer_id(identity.peer_id) == identity.peer_id
    assert format_peer_id(identity.peer_id_bytes) == identity.peer_id


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "''"),
        ("12D3KooW0", "'0'"),
        (format_peer_id(PEER_ID_BYTES) + " ", "' '"),
        (format_peer_id(PEER_ID_BYTES)[:-1], "bytes after base58"),
        (RSA_ID, "RSA"),
        ("1" * 1_000_000, "1000000 characters"),
        ("12D3KooW\ud800", "base58"),
    ],
)
def test_bad_peer_ids_are_quoted(text: str, quoted: str) -> None:
    with pytest.raises(ConfigError) as person:
        ensure_peer_id(text)
    with pytest.raises(RemoteProtocolError) as peer:
        parse_peer_id(text)
    assert quoted in str(person.value)
    assert str(person.value) == str(peer.value)
    assert len(str(person.value)) < 400


BROKEN = {
    "empty": (b"", 0o600, "is empty"),
    "junk": (b"junk\n", 0o600, "is not a libp2p key file"),
    "half": (KEY_FILE[:40], 0o600, "40 bytes where 68"),
    "prefix only": (KEY_FILE[:3], 0o600, "3 bytes where 68"),
    "long": (KEY_FILE + b"x", 0o600, "69 bytes where 68"),
    "other public half": (KEY_FILE[:-1] + b"\x00", 0o600, "its public half"),
    "libp2p 32-byte form": (b"\x08\x01\x12\x20" + SEED, 0o600, "is not a libp2p key file"),
    "rsa": (b"\x08\x00\x12\xa8\x09" + bytes(1192), 0o400, "RSA key (hivemind's default)"),
    "no permission": (KEY_FILE, 0o000, "mode 000"),
    "huge": (bytes(1 << 20), 0o600, "is not a libp2p key file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gives_one_paragraph_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    content, mode, words = BROKEN[name]
    path = write_key(tmp_path / "key", content, mode)
    with pytest.raises(ConfigError) as caught:
        load_or_create(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_the_messages_for_broken_files_are_distinct(tmp_path: Path) -> None:
    messages = set()
    for content, mode, _ in BROKEN.values():
        path = write_key(tmp_path / "key", content, mode)
        with pytest.raises(ConfigError) as caught:
            load_or_create(path)
        path.unlink()
        messages.add(str(caught.value))
    assert len(messages) == len(BROKEN) - 2  # junk, a seed-only key and a huge file are all "not a libp2p key file"


def test_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_or_create(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_or_create(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="broken link"):
        load_or_create(tmp_path / "link")


def test_a_missing_folder_is_made_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "typo" / "data" / "key"
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load_or_create(path)
    assert str(path.parent) in str(caught.value)
    assert not (tmp_path / "typo").exists()
    identity = load_or_create(path, make_parent=True)
    assert load_or_create(path).peer_id == identity.peer_id
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


def test_a_missing_key_is_an_error_where_none_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no identity key"):
        load_or_create(tmp_path / "key", create=False)
    assert list(tmp_path.iterdir()) == []


def test_an_open_key_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_key(tmp_path / "key", mode=0o644)
    with caplog.at_level(logging.WARNING):
        load_or_create(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"The identity key {path} is open to other users (mode 644); run: chmod 600 {path}"
    ]


def test_a_lost_key_is_noticed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    with caplog.at_level(logging.WARNING):
        first = load_or_create(path)
        assert caplog.records == []
        path.unlink()
        second = load_or_create(path)
        assert len(caplog.records) == 1
        assert first.peer_id in caplog.text
        assert second.peer_id in caplog.text
        load_or_create(path)
        assert len(caplog.records) == 1


def test_a_key_that_appears_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"

    def slower(temporary: Path, target: Path, content: bytes) -> None:
        write_key(target)
        os.link(temporary, target)

    monkeypatch.setattr(module, "_link", slower)
    assert load_or_create(path).peer_id_bytes == PEER_ID_BYTES
    assert path.read_bytes() == KEY_FILE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "key.peer-id"]


def test_a_file_system_without_links_still_gets_a_private_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    identity = load_or_create(tmp_path / "key")
    assert stat.S_IMODE(identity.path.stat().st_mode) == 0o600
    assert load_or_create(tmp_path / "key") == identity


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        load_or_create(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_keeps_a_second_process_out(tmp_path: Path) -> None:
    path = write_key(tmp_path / "key")
    (tmp_path / "alias").symlink_to(path)
    script = (
        "import sys, pathlib\n"
        "from stretto.node.swarm.identity import IdentityLock\n"
        "from stretto.protocol.errors import ConfigError\n"
        "try:\n"
        "    IdentityLock(pathlib.Path(sys.argv[1]))\n"
        "    print('taken')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )

    def other_process() -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script, str(tmp_path / "alias")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    with IdentityLock(path) as lock:
        message = other_process()
        assert f"{path} is in use by process {os.getpid()} " in message
        assert lock.path == tmp_path / "key.lock"
    # That process ended without a word of goodbye; the lock is free all the same.
    assert other_process() == "taken\n"
    with IdentityLock(path):
        pass


def test_the_lock_keeps_a_second_holder_in_one_process_out(tmp_path: Path) -> None:
    path = write_key(tmp_path / "key")
    lock = IdentityLock(path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
        IdentityLock(path)
    lock.close()
    lock.close()
    IdentityLock(path).close()


def test_a_lock_that_cannot_be_opened_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key\.lock of the identity key cannot be opened: No such file"):
        IdentityLock(tmp_path / "missing" / "key")


@pytest.mark.integration
def test_the_libp2p_daemon_reads_the_key_and_has_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.p2p import P2P

    identity = load_or_create(tmp_path / "key")

    async def start_and_ask() -> str:
        p2p = await P2P.create(
            identity_path=str(identity.path), check_if_identity_free=False, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
        )
        try:
            return str(p2p.peer_id.to_base58())
        finally:
            await p2p.shutdown()

    # Not in /tmp itself, where sockets of tests that were killed would lie for ever; tmp_path is too long for sockets.
    with tempfile.TemporaryDirectory(prefix="p2pd-") as sockets:
        monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", f"/unix{sockets}/")
        assert asyncio.run(start_and_ask()) == identity.peer_id
