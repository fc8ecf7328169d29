"""The roster record: its golden bytes, and that it fits."""

from typing import Any

import pytest

from stretto.protocol import wire
from stretto.protocol.roster import MAX_RECORD, PeerRecord, fitted
from stretto.protocol.schedule import Clock
from stretto.protocol.units import MASK_BYTES, MAX_UNIT, Claim, DataWord, Trace

DATA = DataWord((Claim(7, 2, 5, 3.0, True),), 6, b"\x04", (Trace(9, 1, False),))
FULL = DataWord(
    tuple(Claim(MAX_UNIT - i, 1 << 20, 1 << 20, 1.7e9, False) for i in range(4)),
    MAX_UNIT,
    b"\xff" * MASK_BYTES,
    tuple(Trace(MAX_UNIT - i, 1 << 20, True) for i in range(4)),
)


def record(**changed: Any) -> PeerRecord:
    fields: dict[str, Any] = {
        "version": "0.1.0", "state": "training", "addresses": ("/ip4/10.0.0.1/tcp/4001",), "client_mode": False,
        "rate": 2.0, "step": 40, "loss": 3.25, "tau": 2, "tokens": 640, "clock": Clock(7, 100.0, 5.0),
        "versions": (2, 1), "chain_tokens": (20, 10), "last_tokens": (10, 10), "heads": bytes(32),
        "uncounted": 30, "lost": 200, "data": DATA, **changed,
    }  # fmt: skip
    return PeerRecord(**fields)


def test_golden_bytes() -> None:
    golden = (
        "dc0011 a5302e312e30 a8747261696e696e67 91b6 2f6970342f31302e302e302e312f7463702f34303031 c2"
        "cb4000000000000000 28 cb400a000000000000 02 cd0280 93 07 cb4059000000000000 cb4014000000000000 920201"
        "92140a 920a0a c420" + "00" * 32 + "1e ccc8 94 91 95 07 02 05 cb4008000000000000 c3 06 c40104 91 93 09 01 c2"
    )  # fmt: skip
    assert wire.encode(record()) == bytes.fromhex(golden)
    assert wire.decode(PeerRecord, bytes.fromhex(golden)) == record()


def test_a_record_without_work_units_says_so_in_six_bytes() -> None:
    assert wire.encode(record(data=DataWord()))[-6:] == bytes.fromhex("94 90 00 c400 90")


@pytest.mark.parametrize(
    ("fragments", "version", "tokens", "addresses"), [(170, 1 << 62, 1 << 62, 3), (256, 65_535, 2**32 - 1, 7)]
)
def test_addresses_give_way_when_everything_is_at_its_limit(
    fragments: int, version: int, tokens: int, addresses: int
) -> None:
    large = record(
        version="x" * 32,
        state="finished",
        addresses=("a" * 300,) * 16,
        step=1 << 62,
        tau=1 << 40,
        tokens=1 << 62,
        clock=Clock(1 << 40, 1e10, 1.0),
        versions=(version,) * fragments,
        chain_tokens=(tokens,) * fragments,
        last_tokens=(tokens,) * fragments,
        data=FULL,
    )
    assert len(wire.encode(large)) > MAX_RECORD
    found = fitted(large)
    assert len(wire.encode(found)) <= MAX_RECORD
    assert len(found.addresses) == addresses
    assert found.data == FULL


def test_a_small_record_is_left_as_it_is() -> None:
    assert fitted(record()) is not None
    assert fitted(record()) == record()
