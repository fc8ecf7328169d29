"""When a node may rely on it that others see its record: stored first, read afterwards, and found in what was read."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.node.swarm.roster import EXPIRY, Roster
from stretto.protocol import wire
from stretto.protocol.roster import PeerRecord
from stretto.protocol.simulation import peer_id
from tests.virtual import run

ME, OTHER = peer_id(0), peer_id(1)
RECORD = PeerRecord("1", "training", (), False, 1.0, 0, float("nan"), 0, 0, None, (), (), (), bytes(32))


class Dht:
    """One node's view of a DHT that may refuse a store or forget it."""

    def __init__(self) -> None:
        self.entries: dict[bytes, SimpleNamespace] = {}
        self.takes = self.answers = self.shows = True

    async def store(self, _key: str, value: bytes, ends: float, *, subkey: bytes) -> bool:
        if self.takes and self.shows:
            self.entries[subkey] = SimpleNamespace(value=value, expiration_time=ends)
        return self.takes

    async def get(self, _key: str, *, latest: bool) -> Any:
        if not self.answers:
            await asyncio.sleep(1000)
        return SimpleNamespace(value=dict(self.entries))


def roster(dht: Dht) -> Roster:
    host: Any = SimpleNamespace(
        room=lambda due: due,
        node=dht,
        identity=SimpleNamespace(peer_id_bytes=ME),
        addresses=(),
        connect=lambda *_: connected(),
    )
    return Roster(host, bytes(32), lambda: RECORD, lambda: asyncio.get_running_loop().time())


async def connected() -> bool:
    return True


def heard(change: Callable[[Dht], None], seconds: float = 10.0) -> list[tuple[PeerRecord | None, float]]:
    """What ``keep`` reports within so many seconds."""
    found: list[tuple[PeerRecord | None, float]] = []

    async def work() -> None:
        dht = Dht()
        dht.entries[OTHER] = SimpleNamespace(value=wire.encode(RECORD), expiration_time=50.0)
        change(dht)
        kept = roster(dht)
        kept.heard = lambda record, ends: found.append((record, ends))
        task = asyncio.ensure_future(kept.keep())
        await asyncio.sleep(seconds)
        task.cancel()
        assert list(kept.peers) == ([OTHER] if dht.answers else [])

    coroutine: Coroutine[Any, Any, None] = work()
    run(coroutine)
    return found


def test_a_record_that_was_stored_and_is_seen_is_reported_with_its_end() -> None:
    found = heard(lambda _: None)
    assert len(found) == 3  # at 0, 4 and 8 s
    assert all(record is not None for record, _ in found)
    assert [ends for _, ends in found] == pytest.approx([EXPIRY, EXPIRY + 4, EXPIRY + 8], abs=1.5)


@pytest.mark.parametrize("what", ["takes", "shows"])
def test_a_record_that_was_not_taken_or_is_not_seen_is_not_relied_on(what: str) -> None:
    found = heard(lambda dht: setattr(dht, what, False))
    assert [record for record, _ in found] == [None] * 3


def test_a_silent_dht_reports_nothing() -> None:
    assert heard(lambda dht: setattr(dht, "answers", False), 30.0) == []
