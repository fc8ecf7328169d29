"""`stretto bench round`: a real swarm of light peers, its bytes against the formula, and what it leaves behind."""

import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from stretto.node.bench import crew, hivemind_peer
from stretto.node.bench.counters import marked, read_costs
from stretto.node.bench.round import RoundBench, bench_round, formula_bytes, render
from stretto.protocol.codecs import get_codec
from stretto.protocol.errors import ConfigError, StrettoError


def marks_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The marks of all crews that are made from now on."""
    made: list[str] = []

    class Noted(crew.Crew):
        def __init__(self) -> None:
            super().__init__()
            made.append(self.mark)

    monkeypatch.setattr("stretto.node.bench.round.Crew", Noted)
    return made


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_two_light_peers_need_the_bytes_of_the_formula_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = marks_made(monkeypatch)
    asked = RoundBench(numel=200_000, peers=(2,), rounds=3, passes=1, hivemind=False)
    report = json.loads(json.dumps(bench_round(asked)))
    assert (report["parameters"], list(report["peers"])) == (200_000, ["2"])
    assert list(report["peers"]["2"]) == ["stretto"]  # two peers need no codec for averages
    found = report["peers"]["2"]["stretto"]
    payload = get_codec(report["up"]).nbytes(200_000)
    assert report["payload_bytes"][report["up"]] == payload == found["formula_bytes"]
    assert found["rounds_committed"] == [3]
    assert found["rounds_missed"] == [0]
    assert found["heads_equal"] == [True]
    assert found["faults"] == [[]]
    assert found["payload_up"] == payload
    assert 0 < found["control_share"] < 0.01
    # On the connection there is more than the payload: control, the DHT, encryption. How much depends on the time.
    assert 1 < found["ratio_to_formula"] < 1.5
    assert found["bytes_down"] == pytest.approx(found["bytes_up"], rel=0.01)
    assert 0 < found["installed"] <= found["wall"]
    assert found["cpu"] > 0
    assert report["sizes"]["2"]["wall"] == found["wall"]
    assert "stretto" in render(report)
    assert len(made) == 1
    assert marked(crew.MARK, made[0]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_worker_that_fails_says_why_and_takes_everything_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with crew.Crew() as team:
        (worker,) = team.grow(1)
        assert marked(crew.MARK, team.mark) == [worker.process.pid]
        broken = {"numel": 1000, "run": "=", "rounds": 1, "seed": 0, "folder": team.new_folder()}
        with pytest.raises(StrettoError, match=r"worker 0: ConfigError: not valid TOML"):
            team.ask([worker], {"do": "open", "system": "stretto", **broken})
    assert marked(crew.MARK, team.mark) == []
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_a_connection_are_those_that_were_sent() -> None:
    before = read_costs([os.getpid()])[0]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
        with sender, receiver:
            writing = threading.Thread(target=sender.sendall, args=(bytes(1_000_000),))
            writing.start()
            received = 0
            while received < 1_000_000:
                received += len(receiver.recv(1 << 16))
            writing.join()
            receiver.sendall(b"x")  # an answer carries the acknowledgement of all before it
            assert sender.recv(1) == b"x"
            _, up, down = read_costs([os.getpid()])[0].since(before)
    assert 1_000_001 <= up <= 1_000_010
    assert down == 1_000_001


def test_hiveminds_8_bit_codec_works_once_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is mended here is put back afterwards.
    monkeypatch.setattr(hivemind_peer.Uniform8BitQuantization, "extract", hivemind_peer._extract)
    assert hivemind_peer.mend_extract()
    codec, values = hivemind_peer.Uniform8BitQuantization(), torch.linspace(-1, 1, 1000).reshape(10, 100)
    found = codec.extract(codec.compress(values, hivemind_peer.CompressionInfo.from_tensor(values)))
    assert found.shape == values.shape
    assert found.dtype == torch.float32
    # 256 buckets over six standard deviations, each decoded to its mean.
    assert float((found - values).abs().max()) <= 6 * float(values.std()) / 256


@pytest.mark.parametrize(("peers", "up", "down", "factor"), [(2, "fp32", "int8", 1), (3, "fp32", "int8", 2)])
def test_small_groups_send_their_contribution_to_everybody(peers: int, up: str, down: str, factor: float) -> None:
    assert formula_bytes(1024, peers, up, down) == factor * 4096


def test_large_groups_send_parts_of_contributions_and_of_averages() -> None:
    assert formula_bytes(1024, 4, "fp32", "bf16") == 0.75 * (4096 + 2048)
    assert formula_bytes(1024, 16, "bf16", "fp32") == 15 / 16 * (2048 + 4096)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peers": ()}, "--peers"),
        ({"peers": (1,)}, "--peers"),
        ({"numel": 10}, "--millions"),
        ({"rounds": 0}, "--rounds"),
        ({"passes": 0}, "--passes"),
        ({"down": "zip"}, "wire.down"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoundBench(**wrong)  # type: ignore[arg-type]
