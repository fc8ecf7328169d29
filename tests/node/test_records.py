"""Signed DHT records: what a node stores for others, and everything that it refuses."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.node import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from stretto.node.swarm.identity import Identity, load_or_create
from stretto.node.swarm.records import MAX_TTL, SignedRecords, roster_key
from stretto.protocol.roster import MAX_RECORD

RUN = bytes(range(32))
KEY = roster_key(RUN)


@pytest.fixture
def me(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "me")


@pytest.fixture
def other(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "other")


def record(owner: Identity, value: bytes = b"value", *, key: str = KEY, ttl: float = 20.0) -> DHTRecord:
    """An unsigned record of ``owner`` in the form in which hivemind's DHT hands it to the validator."""
    subkey = MSGPackSerializer.dumps(owner.peer_id_bytes)
    return DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, value, time.time() + ttl)


def signed(owner: Identity, plain: DHTRecord) -> DHTRecord:
    return dataclasses.replace(plain, value=SignedRecords(owner, [KEY]).sign_value(plain))


def accepts(identity: Identity, candidate: DHTRecord) -> bool:
    return SignedRecords(identity, [KEY]).validate(candidate)


def test_each_run_has_a_key_of_its_own() -> None:
    assert roster_key(RUN) == f"stretto/4/{RUN.hex()}/roster"
    assert roster_key(bytes(32)) != KEY


def test_what_a_peer_signs_everybody_accepts_and_reads(me: Identity, other: Identity) -> None:
    plain = record(me)
    whole = signed(me, plain)
    assert whole.value.startswith(b"value")
    assert len(whole.value) == len(b"value") + 64
    for reader in (me, other):
        assert accepts(reader, whole)
        assert SignedRecords(reader, [KEY]).strip_value(whole) == b"value"


def test_a_record_without_a_signature_is_refused(me: Identity) -> None:
    assert not accepts(me, record(me))
    assert not accepts(me, record(me, bytes(65)))
    assert not accepts(me, record(me, bytes(64)))
    assert not accepts(me, record(me, b""))


def test_nobody_signs_under_anothers_name(me: Identity, other: Identity) -> None:
    plain = record(other)
    assert SignedRecords(me, [KEY]).sign_value(plain) == plain.value
    forged = dataclasses.replace(plain, value=signed(me, record(me)).value)
    assert not accepts(me, forged)


@pytest.mark.parametrize("place", [0, 5, -64, -1])
def test_one_wrong_bit_is_refused(me: Identity, place: int) -> None:
    whole = signed(me, record(me, b"0123456789"))
    value = bytearray(whole.value)
    value[place] ^= 1
    assert not accepts(me, dataclasses.replace(whole, value=bytes(value)))


def test_a_record_cannot_be_moved(me: Identity, other: Identity) -> None:
    """Not to another expiration (replay), subkey or key, and not to another run whose key the reader knows."""
    whole = signed(me, record(me))
    assert not accepts(me, dataclasses.replace(whole, expiration_time=whole.expiration_time + 1))
    assert not accepts(me, dataclasses.replace(whole, expiration_time=whole.expiration_time - 1))
    assert not accepts(me, dataclasses.replace(whole, subkey=MSGPackSerializer.dumps(other.peer_id_bytes)))
    second = roster_key(bytes(32))
    moved = dataclasses.replace(whole, key=DHTID.generate(source=second).to_bytes())
    assert not SignedRecords(me, [KEY, second]).validate(moved)


def test_unknown_keys_are_refused(me: Identity) -> None:
    whole = signed(me, record(me, key="stretto/1/something/else"))
    assert not accepts(me, whole)
    assert SignedRecords(me, ["stretto/1/something/else"]).validate(whole)


def test_sizes_are_bounded(me: Identity) -> None:
    assert accepts(me, signed(me, record(me, bytes(MAX_RECORD))))
    assert not accepts(me, signed(me, record(me, bytes(MAX_RECORD + 1))))


def test_lifetimes_are_bounded(me: Identity) -> None:
    assert accepts(me, signed(me, record(me, ttl=MAX_TTL - 1)))
    assert not accepts(me, signed(me, record(me, ttl=MAX_TTL + 60)))
    assert not accepts(me, signed(me, record(me, ttl=1e12)))


@pytest.mark.parametrize(
    "subkey",
    [
        None,
        b"",
        MSGPackSerializer.dumps(b"short"),
        MSGPackSerializer.dumps("a text as long as an id would be in it"),
        MSGPackSerializer.dumps(bytes(39)),
        MSGPackSerializer.dumps(17),
    ],
)
def test_subkeys_that_are_no_peer_id_are_refused(me: Identity, subkey: Any) -> None:
    plain = dataclasses.replace(record(me), subkey=subkey)
    # Even with a signature over exactly these bytes.
    value = plain.value + me.sign(MSGPackSerializer.dumps([plain.key, subkey, plain.value, plain.expiration_time]))
    assert not accepts(me, dataclasses.replace(plain, value=value))


def test_a_plain_value_under_a_known_key_is_refused(me: Identity) -> None:
    """hivemind marks a value without subkey by an empty one; such a value would replace the whole dictionary."""
    plain = DHTRecord(DHTID.generate(source=KEY).to_bytes(), b"", b"everything", time.time() + 20)
    assert not accepts(me, plain)
    assert SignedRecords(me, [KEY]).sign_value(plain) == plain.value
