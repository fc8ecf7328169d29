"""A visitor's timed download, from real donors over streams of one event loop."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from stretto.node.swarm import try_line
from stretto.node.swarm.summary import Visit
from stretto.node.swarm.try_line import Download, download
from stretto.protocol import snapshot
from tests.node.repair_scene import CONFIG, NUMEL, Net, history, play


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(try_line, "BYTES", 200_000)


@dataclass
class Host:
    """As much of a host as a visit needs."""

    p2p: Net

    async def connect(self, peer: bytes, addresses: Any) -> bool:
        return self.p2p.places[peer].reachable


@dataclass
class Record:
    state: str = "training"
    client_mode: bool = False
    addresses: tuple[str, ...] = ()


async def visit(net: Net, **records: Record) -> tuple[Download | None, str]:
    peers = {name: records.get(f"peer{index}", Record()) for index, name in enumerate(net.places)}
    return await download(Visit(cast(Any, Host(net)), CONFIG, cast(Any, peers)), CONFIG.digest())


def test_bytes_come_from_all_donors_until_the_limit_and_the_rate_follows(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        donors = [net.add(index, history(2)) for index in (1, 2)]
        found, why = await visit(net)
        assert found is not None
        assert why == ""
        assert found.peers == 2
        assert 200_000 <= found.nbytes <= 200_000 + 2 * 4000
        assert found.nbytes > 8 * NUMEL, "a small state is fetched more than once"
        assert 0 < found.rtt < found.seconds < 60
        assert found.bits_per_second == 8 * found.nbytes / found.seconds
        assert found.nbytes == 4000 * sum(len(donor.donor.chunks()) for donor in donors)

    play(tmp_path, scene)


def test_a_slow_donor_ends_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_line, "SECONDS", 0.3)

    async def scene(net: Net) -> None:
        async def slow(_: Any) -> None:
            await asyncio.sleep(0.05)

        net.add(1, history(2)).donor.hook = slow
        found, _ = await visit(net)
        assert found is not None
        assert found.nbytes < 200_000
        assert found.rtt >= 0.05

    play(tmp_path, scene)


def test_who_gives_nothing_is_told_and_the_others_count(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        net.add(1, history(2)).reachable = False
        net.add(2, history(2))
        found, why = await visit(net)
        assert found is not None
        assert found.peers == 1
        assert "connection refused" in why

    play(tmp_path, scene)


def test_nobody_to_ask_and_nobody_who_gives(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        net.add(1, history(2), uploads=0)
        assert await visit(net, peer0=Record(client_mode=True)) == (
            None,
            "no peer of the run is training and can be reached",
        )
        assert (await visit(net, peer0=Record(state="joining")))[0] is None
        found, why = await visit(net)
        assert found is None
        assert "it serves others now" in why

    play(tmp_path, scene)
