"""The monitor's line: how many train, how far they are, whether they agree, who came and who left."""

from pathlib import Path
from typing import Any

import pytest

from stretto.bootstrap.monitor import Monitor
from stretto.bootstrap.server import is_loopback
from stretto.node.swarm.identity import Identity, load_or_create
from stretto.node.swarm.summary import render, summarize
from stretto.protocol.roster import PeerRecord
from stretto.protocol.schedule import Clock
from stretto.protocol.units import Claim, DataWord
from tests.fakes import toy_config

RUN = toy_config()


def record(**changed: Any) -> PeerRecord:
    fields: dict[str, Any] = {
        "version": "0.1.0", "state": "training", "addresses": ("/ip4/10.0.0.1/tcp/4001",), "client_mode": False,
        "rate": 2.0, "step": 40, "loss": 3.25, "tau": 2, "tokens": 640, "clock": Clock(7, 100.0, 5.0),
        "versions": (2, 2, 1, 1), "chain_tokens": (20, 20, 10, 10), "last_tokens": (10, 10, 10, 10),
        "heads": bytes(32), **changed,
    }  # fmt: skip
    return PeerRecord(**fields)


@pytest.fixture
def peers(tmp_path: Path) -> list[Identity]:
    """Three identities in the order of their ids."""
    made = [load_or_create(tmp_path / str(index)) for index in range(3)]
    return sorted(made, key=lambda identity: identity.peer_id_bytes)


def test_nobody_is_there() -> None:
    monitor = Monitor(RUN)
    assert monitor.line({}) == "serving the run config; no peer is in the run"


def test_who_came_and_who_left_is_said_once(peers: list[Identity]) -> None:
    a, b, c = (identity.peer_id_bytes for identity in peers)
    names = [identity.peer_id[-8:] for identity in peers]
    monitor = Monitor(RUN)
    base = "peer(s) training, round 7, 6 commits, chains agree"
    assert monitor.line({a: record(), b: record()}) == f"2 {base}, new: {names[0]}, {names[1]}"
    assert monitor.line({a: record(), b: record()}) == f"2 {base}"
    assert monitor.line({c: record(), b: record()}) == f"2 {base}, new: {names[2]}, left: {names[0]}"
    gone = ", ".join(sorted(names[1:], key=names.index))
    assert monitor.line({}) == f"serving the run config; no peer is in the run, left: {gone}"
    assert monitor.line({}) == "serving the run config; no peer is in the run"


def test_other_heads_at_the_same_versions_are_a_fork(peers: list[Identity]) -> None:
    a, b, c = (identity.peer_id_bytes for identity in peers)
    monitor = Monitor(RUN)
    fork = {a: record(), b: record(heads=bytes([1]) * 32)}
    assert "chains differ" in monitor.line(fork)
    # Whoever is merely behind has other heads too, and that is no fork.
    behind = {a: record(), c: record(versions=(1, 1, 1, 1), heads=bytes([2]) * 32)}
    assert "chains agree" in monitor.line(behind)


def test_only_peers_that_train_count(peers: list[Identity]) -> None:
    a, b, c = (identity.peer_id_bytes for identity in peers)
    crowd = {a: record(), b: record(state="joining", versions=(9, 9, 9, 9)), c: record(state="leaving")}
    line = Monitor(RUN).line(crowd)
    assert line.startswith("1 peer(s) training, round 7, 6 commits, chains agree")


def test_a_summary_has_plain_values_for_machines_and_lines_for_people(peers: list[Identity]) -> None:
    a, b, _ = (identity.peer_id_bytes for identity in peers)
    summary = summarize(RUN, RUN.digest(), {b: record(rate=3.0, clock=Clock(8, 105.0, 6.0)), a: record()})
    assert summary["run"] == RUN.digest().hex()
    assert summary["peers"] == 2
    assert (summary["round"], summary["interval_seconds"], summary["commits"]) == (8, 6.0, 6)
    assert summary["tokens_per_second"] == 5.0 * RUN.inner.tokens_per_step
    assert [member["peer"] for member in summary["members"]] == [identity.peer_id for identity in peers[:2]]
    assert summary["members"][0]["commits"] == 6
    lines = render(summary).splitlines()
    assert lines[0].startswith(f"run toy ({RUN.digest().hex()[:16]}): 2 peer(s) training, next round 8, 6 commits")
    assert len(lines) == 3
    assert peers[0].peer_id[-8:] in lines[1]
    assert "2.00 steps/s" in lines[1]


def test_the_units_done_are_those_of_the_median_peer(peers: list[Identity]) -> None:
    words = (DataWord(done_below=4, done_mask=b"\x06"), DataWord(done_below=1 << 40), DataWord(done_below=5))
    crowd = {peer.peer_id_bytes: record(data=word) for peer, word in zip(peers, words, strict=True)}
    assert summarize(RUN, RUN.digest(), crowd)["units_done"] == 6
    assert "chains agree, 6 units of data done, new: " in Monitor(RUN).line(crowd)


def test_what_was_lost_is_the_word_of_the_median_peer_and_status_shows_it(peers: list[Identity]) -> None:
    words = (0, 160, 1 << 60)
    crowd = {peer.peer_id_bytes: record(lost=word) for peer, word in zip(peers, words, strict=True)}
    summary = summarize(RUN, RUN.digest(), crowd)
    samples = 160 // RUN.data.sequence_length
    assert (summary["tokens_lost"], summary["samples_lost"]) == (160, samples)
    assert f"160 tokens ({samples} samples) lost with peers that vanished" in render(summary)


def test_the_units_that_a_member_holds_are_listed(peers: list[Identity]) -> None:
    claims = (Claim(3, 0, 1, 0.0, True), Claim(4, 0, 0, 0.0, False))
    summary = summarize(RUN, RUN.digest(), {peers[0].peer_id_bytes: record(data=DataWord(claims))})
    assert summary["members"][0]["units"] == [3]


def test_an_empty_swarm_has_a_summary_too() -> None:
    summary = summarize(None, RUN.digest(), {})
    assert summary["peers"] == summary["commits"] == 0
    assert summary["round"] is None
    assert summary["tokens_per_second"] is None
    assert "not begun" in render(summary)
    assert "0 tokens lost" in render(summary)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("/ip4/127.0.0.1/tcp/4001/p2p/x", True),
        ("/ip4/127.9.9.9/tcp/4001", True),
        ("/ip6/::1/tcp/4001", True),
        ("/ip4/10.0.0.1/tcp/4001", False),
        ("/ip6/::11/tcp/4001", False),
        ("/dns4/bootstrap/tcp/4001", False),
    ],
)
def test_loopback_addresses_are_known(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
