"""The peers that this node has met, on disk: a run must survive the death of all its bootstrap peers.

``peers.json`` in the run's folder holds ids and addresses, the latest met first::

    {"peers": [{"id": "12D3KooW...", "addresses": ["/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW..."]}]}

What is read from it is only dialled, and whoever answers must prove its id; still the file is not trusted: it is
bounded, every address is checked, and a file that cannot be used is ignored as a whole, with one line.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.node.swarm.folders import write_whole
from stretto.node.swarm.identity import format_peer_id
from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import check_address
from stretto.protocol.roster import PeerRecord

MAX_PEERS, MAX_ADDRESSES = 64, 8
MAX_FILE = 256 * 1024
"""Bytes; more is not a file of ours."""

DIALLED = 24
"""Addresses that are dialled at once, of the peers met last."""


class KnownPeers:
    """Addresses by peer id, for the node ``me``. ``tell`` takes lines for people."""

    def __init__(self, path: Path, me: str, tell: Callable[[str], None]) -> None:
        self._path, self._me, self._tell = path, me, tell
        self._saved: dict[str, tuple[str, ...]] = {}
        self._failed = ""
        try:
            self._saved = _read(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ConfigError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            tell(f"WARNING {path} cannot be used and is ignored, this node remembers no peers: {why}")
        self._peers = {peer: addresses for peer, addresses in self._saved.items() if peer != me}

    def addresses(self, *, besides: Sequence[bytes] = ()) -> list[str]:
        """Addresses to dial, at most ``DIALLED``, of the peers met last; none of the peers ``besides``."""
        skipped = {format_peer_id(peer) for peer in besides}
        found = [a for peer, addresses in self._peers.items() if peer not in skipped for a in addresses]
        return found[:DIALLED]

    def meet(self, peers: Mapping[bytes, PeerRecord]) -> None:
        """Remember the peers of a roster, and write the file if that is news. Who takes no connections is left out."""
        met: dict[str, tuple[str, ...]] = {}
        for peer, record in sorted(peers.items()):
            name = format_peer_id(peer)
            addresses = tuple(a for a in record.addresses if _usable(a, name))[:MAX_ADDRESSES]
            if addresses and not record.client_mode and name != self._me:
                met[name] = addresses
        merged = {**met, **{peer: a for peer, a in self._peers.items() if peer not in met}}
        self._peers = dict(list(merged.items())[:MAX_PEERS])
        if self._peers != self._saved:
            self._save()

    def _save(self) -> None:
        rows = [{"id": peer, "addresses": list(addresses)} for peer, addresses in self._peers.items()]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps({"peers": rows}, indent=1) + "\n", "--data-dir")
        except (OSError, ConfigError) as error:
            if str(error) != self._failed:
                self._tell(f"WARNING the peers that this node meets cannot be remembered: {error}")
            self._failed = str(error)
        else:
            self._saved, self._failed = dict(self._peers), ""


def _usable(address: str, name: str) -> bool:
    with contextlib.suppress(ConfigError):
        return check_address(address).endswith(f"/p2p/{name}")
    return False


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    """The peers in the file; ValueError or ConfigError says what is wrong with it."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"it is longer than {MAX_FILE} bytes")
    content = json.loads(data)
    rows = content.get("peers") if isinstance(content, dict) else None
    if not isinstance(rows, list) or len(rows) > MAX_PEERS:
        raise ValueError(f"it holds no list of at most {MAX_PEERS} peers")
    peers: dict[str, tuple[str, ...]] = {}
    for row in rows:
        name, addresses = (row.get("id"), row.get("addresses")) if isinstance(row, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
            raise ValueError("an entry is not an id with some addresses")
        for address in addresses:
            if not isinstance(address, str):
                raise ValueError("an address is not a text")
            if not check_address(address).endswith(f"/p2p/{name}"):
                raise ValueError(f"address {address[:100]!r} is not one of the peer it stands under")
        peers[name] = tuple(addresses)
    return peers
