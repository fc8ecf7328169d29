"""The identity of a peer: an Ed25519 key pair, its file, its peer id, and the lock that keeps the file to one process.

Key file: the libp2p private key message (``crypto.pb.PrivateKey``), as the go-libp2p daemon reads it::

    08 01        field 1, key type 1 = Ed25519
    12 40        field 2, 64 bytes follow
    seed[32] public[32]

Peer id: the identity multihash of the public key message, 38 bytes, written in base58 as ``12D3KooW...``::

    00 24        multihash "identity", 36 bytes follow
    08 01 12 20  key type Ed25519, 32 bytes follow
    public[32]

The public key is inside the peer id, so a signature is checked from the id alone, with no look-up (RFC 8032; libp2p
peer id specification, https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).

A key file is never overwritten: a new key is written to a temporary file of mode 0600 and linked into place, which
fails when the name is taken. Beside ``KEY`` lie ``KEY.lock`` (see `IdentityLock`) and ``KEY.peer-id``, the public id
that this place had last, so that a lost key is noticed. This file is the only home of ``cryptography`` and ``base58``.
"""

import errno
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stretto.node.swarm.folders import flush
from stretto.node.swarm.locks import ProcessLock
from stretto.protocol.errors import ConfigError, RemoteProtocolError

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 64
PEER_ID_BYTES = 38

_KEY_PREFIX = b"\x08\x01\x12\x40"
_KEY_BYTES = len(_KEY_PREFIX) + 64
_RSA_PREFIX = b"\x08\x00"
_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"
_ALPHABET = base58.BITCOIN_ALPHABET.decode("ascii")
_MAX_FILE_BYTES = 8192  # an RSA-4096 key is 2.4 KB; nothing larger is read
_MAX_ID_CHARS = 128  # base58 decoding is quadratic in the length; an Ed25519 id has 52 characters


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One peer's key pair. The private half stays inside; `sign` is the only use of it.

    ``peer_id`` is base58 text, ``peer_id_bytes`` the same as 38 bytes, ``path`` the absolute path of the key file.
    """

    peer_id: str
    peer_id_bytes: bytes
    path: Path
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature (RFC 8032) over ``message``."""
        return self._key.sign(message)


# --- peer ids -------------------------------------------------------------------------------------------------------


def format_peer_id(peer_id_bytes: bytes) -> str:
    """Return the base58 text of a peer id given as bytes. The bytes are not checked."""
    return base58.b58encode(peer_id_bytes).decode("ascii")


def parse_peer_id(text: str) -> bytes:
    """Return the 38 bytes of an Ed25519 peer id that came from the network.

    Raises RemoteProtocolError that quotes what is wrong.
    """
    decoded = _decode_peer_id(text)
    if isinstance(decoded, str):
        raise RemoteProtocolError(decoded)
    return decoded


def ensure_peer_id(text: str) -> str:
    """Return ``text`` if it is an Ed25519 peer id that a person may use in a flag, a file or an invite.

    Raises ConfigError that quotes what is wrong.
    """
    decoded = _decode_peer_id(text)
    if isinstance(decoded, str):
        raise ConfigError(decoded)
    return text


def verify(peer_id_bytes: bytes, message: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` (64 bytes) over ``message`` was made by the peer with this id (38 bytes).

    Arguments of any other shape are simply not valid: the answer is False, never an error.
    """
    if not _is_peer_id(peer_id_bytes) or len(signature) != SIGNATURE_BYTES:
        return False
    public = Ed25519PublicKey.from_public_bytes(peer_id_bytes[len(_PEER_ID_PREFIX) :])
    try:
        public.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _is_peer_id(raw: bytes) -> bool:
    return len(raw) == PEER_ID_BYTES and raw.startswith(_PEER_ID_PREFIX)


def _decode_peer_id(text: str) -> bytes | str:
    """Return the bytes of a peer id, or one sentence that says why ``text`` is none."""
    if len(text) > _MAX_ID_CHARS:
        return f"peer id {text[:24]!r}... has {len(text)} characters; an Ed25519 peer id has 52"
    strange = next((character for character in text if character not in _ALPHABET), None)
    if strange is not None:
        return (
            f"peer id {text!r} contains {strange!r}, which is not a base58 character; copy the id again, "
            "it looks like 12D3KooW..."
        )
    raw = base58.b58decode(text)
    if _is_peer_id(raw):
        return raw
    if text.startswith("Qm"):
        return f"peer id {text!r} belongs to an RSA key; Stretto takes Ed25519 ids only, which look like 12D3KooW..."
    return (
        f"peer id {text!r} is not an Ed25519 peer id ({len(raw)} bytes after base58 decoding, {PEER_ID_BYTES} are "
        "needed); copy the whole id, it looks like 12D3KooW... and has 52 characters"
    )


# --- the key file ---------------------------------------------------------------------------------------------------


def load_or_create(path: Path, *, create: bool = True, make_parent: bool = False) -> Identity:
    """Read the key file at ``path``; where there is none, make a new key there if ``create`` is set.

    ``make_parent`` also makes the folder, which is right only for the default data folder: a folder that a person
    named and that does not exist is most likely a typing error. Raises ConfigError with the path and the cure for
    whatever stands in the way. An existing file is never changed.
    """
    path = path.expanduser().absolute()
    raw = _read(path)
    if raw is None:
        if not create:
            raise ConfigError(f"There is no identity key at {path}. Name an existing key file.")
        if make_parent:
            _make_folder(path.parent)
        _write_new(path, _fresh_key())
        # Read it back: of two processes that create the same file at once, both then hold the one that won.
        raw = _read(path)
        if raw is None:
            raise ConfigError(f"The identity key {path} disappeared while it was being created; is it a broken link?")
    identity = _parse(path, raw)
    _note_peer_id(identity)
    return identity


def _fresh_key() -> bytes:
    key = Ed25519PrivateKey.generate()
    return _KEY_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()


def _read(path: Path) -> bytes | None:
    """Return the file's bytes (at most a few KB), or None where there is no such file."""
    try:
        status = path.stat()
        # A named pipe would block the open, and root may open what has no permission bits at all: look first.
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"The identity key {path} is a directory. Name a file inside it, e.g. {path / 'key'}.")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"The identity key {path} is not a regular file. Name a file.")
        if not status.st_mode & stat.S_IRUSR:
            raise ConfigError(_unreadable(path))
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(_unreadable(path)) from error
    except OSError as error:
        raise ConfigError(f"The identity key {path} cannot be read: {error.strerror}.") from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        logger.warning("The identity key %s is open to other users (mode %03o); run: chmod 600 %s", path, mode, path)
    return raw


def _unreadable(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:  # the folder hides even the file's owner
        return f"The identity key {path} is not readable by user id {os.geteuid()}: its folder is closed to this user."
    return (
        f"The identity key {path} is not readable: it belongs to user id {status.st_uid} with mode "
        f"{stat.S_IMODE(status.st_mode):03o}, and this process runs as user id {os.geteuid()}. "
        f"Run: chmod 600 {path} (and chown it where the owner is another)."
    )


def _parse(path: Path, raw: bytes) -> Identity:
    if not raw:
        raise ConfigError(
            f"The identity key {path} is empty. Restore it from a backup, or delete it to get a new identity."
        )
    if raw.startswith(_RSA_PREFIX):
        raise ConfigError(
            f"The identity key {path} is an RSA key (hivemind's default). Stretto needs an Ed25519 key: name another "
            "file, and a new identity is made there."
        )
    if not raw.startswith(_KEY_PREFIX) and not _KEY_PREFIX.startswith(raw):
        raise ConfigError(
            f"The identity key {path} is not a libp2p key file. Restore it from a backup, or name another file."
        )
    if len(raw) != _KEY_BYTES:
        raise ConfigError(
            f"The identity key {path} is damaged: {len(raw)} bytes where {_KEY_BYTES} are needed. Restore it from a "
            "backup, or delete it to get a new identity."
        )
    seed, public = raw[len(_KEY_PREFIX) : -32], raw[-32:]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public:
        raise ConfigError(
            f"The identity key {path} is damaged: its public half does not belong to its private half. Restore it "
            "from a backup, or delete it to get a new identity."
        )
    peer_id = _PEER_ID_PREFIX + public
    return Identity(peer_id=format_peer_id(peer_id), peer_id_bytes=peer_id, path=path, _key=key)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"The data folder {folder} cannot be made: {error.strerror}.") from error


def _write_new(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` whole or not at all. A file that is there already stays as it is."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"The folder {path.parent} of the identity key {path} does not exist. Make it first, or correct the path."
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            _write_exclusive(temporary, content)
            _link(temporary, path, content)
        finally:
            temporary.unlink(missing_ok=True)
        flush(path.parent)
    except FileExistsError:
        return  # another process was faster; its key counts
    except OSError as error:
        owner = path.parent.stat().st_uid
        raise ConfigError(
            f"The identity key {path} cannot be written: {error.strerror}. The folder {path.parent} belongs to user "
            f"id {owner}; this process runs as user id {os.geteuid()}. Make it writable, or name another path."
        ) from error


def _write_exclusive(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, path: Path, content: bytes) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # No hard links here (FAT, some network shares): write in place, still never over another file. A crash in
        # between leaves a short file, which the next start refuses by name.
        _write_exclusive(path, content)


def _note_peer_id(identity: Identity) -> None:
    """Warn when this key file held another identity before, and remember the present one beside it."""
    note = _beside(identity.path, ".peer-id")
    try:
        with note.open("r", encoding="ascii", errors="replace") as file:
            previous = file.read(_MAX_ID_CHARS).strip()
    except FileNotFoundError:
        previous = ""
    except OSError as error:
        logger.debug("cannot read %s: %s", note, error)
        return
    if previous == identity.peer_id:
        return
    if previous:
        logger.warning(
            "The identity at %s is new: this peer is now %s, the previous one here was %r. Whatever was credited to "
            "the old identity stays there; restore the old key from a backup to be that peer again.",
            identity.path,
            identity.peer_id,
            previous,
        )
    try:
        note.write_text(identity.peer_id + "\n", encoding="ascii")
    except OSError as error:  # a key mounted read-only is fine; the note is a courtesy
        logger.debug("cannot write %s: %s", note, error)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


# --- the lock -------------------------------------------------------------------------------------------------------


class IdentityLock(ProcessLock):
    """Keeps one identity to one process on this machine: two peers with one id break each other's connections.

    The lock lies beside the key; links are resolved first, so every path to one key meets the same lock.
    """

    def __init__(self, key_path: Path) -> None:
        """Take the lock of the key at ``key_path``, or raise ConfigError that names the file and its holder."""
        self.key_path = key_path.expanduser().resolve()
        super().__init__(
            _beside(self.key_path, ".lock"),
            of="of the identity key",
            where="The key's folder must be writable for user id {uid}; move the key into such a folder.",
            busy=f"The identity key {self.key_path} is in use by {{holder}} on this machine. One identity is one "
            "peer: stop that process, or start this one with another identity file.",
        )
