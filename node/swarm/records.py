"""DHT records: signed by the peer they speak of, small, short-lived, and only under keys that this run knows.

hivemind's DHT stores anything that arrives. This validator, run by every node, lets through only dictionary entries
whose subkey is an Ed25519 peer id and whose value ends with that peer's signature over key, subkey, value and
expiry. So nobody overwrites, wipes, replays with another expiry, or floods what is not its own.
"""

import time
from collections.abc import Callable, Iterable

from hivemind.dht.node import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from stretto.node.swarm.identity import PEER_ID_BYTES, SIGNATURE_BYTES, Identity, verify
from stretto.protocol.messages import PROTOCOL_VERSION
from stretto.protocol.roster import MAX_RECORD

MAX_TTL = 600.0
"""Seconds. No record may claim to live longer."""


def roster_key(run: bytes) -> str:
    """The DHT key of a run's roster."""
    return f"stretto/{PROTOCOL_VERSION}/{run.hex()}/roster"


def _key_id(key: str) -> bytes:
    return bytes(DHTID.generate(source=key).to_bytes())


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Validator and signer for the records under ``keys``. ``now`` is the DHT's time."""

    def __init__(self, identity: Identity, keys: Iterable[str], now: Callable[[], float] = time.time) -> None:
        self._identity, self._now = identity, now
        self._keys = {_key_id(key) for key in keys}

    def validate(self, record: DHTRecord) -> bool:
        """Whether ``record`` may be stored or believed."""
        if record.key not in self._keys or not SIGNATURE_BYTES < len(record.value) <= MAX_RECORD + SIGNATURE_BYTES:
            return False
        if record.expiration_time > self._now() + MAX_TTL:
            return False
        peer = _peer_of(record.subkey)
        if peer is None:
            return False
        value, signature = record.value[:-SIGNATURE_BYTES], record.value[-SIGNATURE_BYTES:]
        return verify(peer, _signed_bytes(record, value), signature)

    def sign_value(self, record: DHTRecord) -> bytes:
        """``record.value`` with this peer's signature, where the record is this peer's."""
        if _peer_of(record.subkey) != self._identity.peer_id_bytes:
            return bytes(record.value)
        return bytes(record.value) + self._identity.sign(_signed_bytes(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without its signature."""
        return bytes(record.value[:-SIGNATURE_BYTES])


def _peer_of(subkey: bytes | None) -> bytes | None:
    """The peer id in a serialized subkey. Its msgpack form is fixed: bin8, length 38."""
    if not isinstance(subkey, bytes) or len(subkey) != PEER_ID_BYTES + 2 or subkey[:2] != b"\xc4\x26":
        return None
    return subkey[2:]


def _signed_bytes(record: DHTRecord, value: bytes) -> bytes:
    return bytes(MSGPackSerializer.dumps([record.key, record.subkey, value, record.expiration_time]))
