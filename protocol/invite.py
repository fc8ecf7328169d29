"""The invite: one string with which a volunteer joins a run.

``stretto:`` + base32 (RFC 4648, lower case, no padding) of the canonical bytes of ``Invite`` and a four-byte checksum:
run id, the operator's peer id, the bootstrap peers' addresses. It holds no secret; whoever has it can check the run
config against the run id and the operator's signature.
"""

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass

from stretto.protocol import wire
from stretto.protocol.digest import PEER_ID_BYTES, check_digest, check_peer, digest
from stretto.protocol.errors import ConfigError, RemoteProtocolError

PREFIX = "stretto:"
MAX_ADDRESSES = 16
MAX_ADDRESS = 300
_ADDRESS = re.compile(r"/(ip4|ip6|dns4|dns6|dns)/[^/\s]+/(tcp|udp)/[0-9]{1,5}(/[^\s]*)?/p2p/[^/\s]+")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def check_address(address: str) -> str:
    """``address`` if it is a bootstrap multiaddr, such as /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...

    Raises ConfigError that quotes what is wrong.
    """
    if re.search(r"\s", address):
        raise ConfigError(f"address {address!r} contains a blank")
    if len(address) > MAX_ADDRESS or not _ADDRESS.fullmatch(address):
        raise ConfigError(
            f"address {address[:MAX_ADDRESS]!r} is not of the form /ip4/HOST/tcp/PORT/p2p/PEER_ID "
            f"(ip6 and dns4 work too): {_what_is_wrong(address)}"
        )
    family, host, _, port = address.split("/")[1:5]
    if not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r}: port {port} is not in 1..65535")
    if family in ("ip4", "ip6"):
        try:
            (ipaddress.IPv4Address if family == "ip4" else ipaddress.IPv6Address)(host)
        except ValueError:
            raise ConfigError(f"address {address!r}: {host!r} is not an {family} address") from None
    peer = address.rsplit("/", 1)[1]
    if not _is_peer_id(peer):
        raise ConfigError(
            f"address {address!r}: {peer!r} is not a whole peer id; one has 52 characters and begins with 12D3KooW"
        )
    return address


def _is_peer_id(text: str) -> bool:
    """Whether ``text`` is the base58 form of an Ed25519 peer id. Its first byte is 0, which base58 writes as a 1."""
    if len(text) != 52 or text[0] != "1" or not set(text) <= set(_BASE58):
        return False
    number = 0
    for character in text:
        number = 58 * number + _BASE58.index(character)
    try:
        check_peer("peer id", number.to_bytes(PEER_ID_BYTES, "big"))
    except (ValueError, OverflowError):
        return False
    return True


def _what_is_wrong(address: str) -> str:
    if not address:
        return "it is empty"
    parts = address.split("/")
    if parts[0] != "":
        return f"it starts with {parts[0]!r} instead of a slash"
    if parts[1] not in ("ip4", "ip6", "dns4", "dns6", "dns"):
        return f"{'/' + parts[1]!r} is no address family"
    if "p2p" not in parts:
        return "the part /p2p/PEER_ID is missing"
    return f"{'/'.join(parts[3:])!r} is not a port followed by a peer id"


@dataclass(frozen=True)
class Invite:
    """Which run, whose, and where to enter."""

    run: bytes
    operator: bytes
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        check_digest("run id", self.run)
        check_peer("operator", self.operator)
        if not 0 < len(self.addresses) <= MAX_ADDRESSES:
            raise ValueError(f"an invite has 1 to {MAX_ADDRESSES} addresses, not {len(self.addresses)}")
        for address in self.addresses:
            check_address(address)

    def __str__(self) -> str:
        body = wire.encode(self)
        text = base64.b32encode(body + digest("invite", [body])[:4]).decode("ascii")
        return PREFIX + text.rstrip("=").lower()

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """The invite in ``text``. ConfigError quotes what is wrong with it."""
        text = text.strip()
        if not text.startswith(PREFIX):
            raise ConfigError(f"invite {_short(text)!r} does not start with {PREFIX!r}; paste the whole line")
        body = text.removeprefix(PREFIX)
        bad = re.search(r"[^a-zA-Z2-7]", body)
        if bad:
            raise ConfigError(f"invite has {bad.group()!r} at position {len(PREFIX) + bad.start() + 1}: copy it again")
        try:
            data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
        except binascii.Error:
            raise ConfigError(f"invite {_short(text)!r} is cut short or too long: copy it again") from None
        if digest("invite", [data[:-4]])[:4] != data[-4:]:
            raise ConfigError(f"invite {_short(text)!r} has a typing error or is cut short: copy it again")
        try:
            return wire.decode(cls, data[:-4])
        except RemoteProtocolError as error:
            raise ConfigError(f"invite {_short(text)!r} cannot be used: {error}") from None


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:30] + "..." + text[-7:]
