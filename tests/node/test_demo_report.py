"""The demo's report: how the nodes' own reports are added up, and what people are told."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.node.demo import Child, DemoConfig, Swarm, make_report, render, tail
from stretto.protocol.errors import ConfigError, StrettoError

HEADS = ["aa", "bb"]


def node_report(**changed: Any) -> dict[str, Any]:
    """A node's report: two fragments of 100 and 60 parameters, three rounds of a group of three."""
    return {
        "rounds_begun": [0, 1, 2],
        "committed": [0, 1, 2],
        "aborted": {},
        "heads": HEADS,
        "loss_first": 5.0,
        "loss_last": 3.0,
        "eval_loss": 3.5,
        "bytes_up": 350,
        "bytes_up_contributions": 320,
        "bytes_up_control": 30,
        "bytes_due": 320.0,
        "bytes_due_fp32": 2080.0,
        "payload_bytes": [60, 40],
        "fragment_parameters": [100, 60],
        "step_seconds": 0.1,
        "blocked_seconds": 0.02,
        "compute_utilization": 0.99,
        "tau": 2,
        "emulated_device_time": False,
        **changed,
    }


class Ended:
    """What is left of a process that has ended."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode


def swarm(folder: Path, *reports: dict[str, Any] | None, codes: tuple[int, ...] = ()) -> Swarm:
    """An ended demo whose nodes left these reports (None: none) and exit codes (0 unless given)."""
    config = DemoConfig(
        peers=len(reports), rounds=3, report=folder / "report.json", folder=folder, inner_steps=8, fragments=2, seed=0
    )
    found = Swarm(config, folder)
    for index, report in enumerate([None, *reports]):
        name = "bootstrap" if index == 0 else f"node{index - 1}"
        place = folder / name / "runs" / "0123"
        place.mkdir(parents=True)
        if report is not None:
            (place / "report.json").write_text(json.dumps(report), encoding="utf-8")
        code = codes[index - 1] if index and codes else 0
        log = folder / f"{name}.log"
        log.write_text(f"first\nsecond\nthird\n{name} says why\n", encoding="utf-8")
        process: Any = Ended(code)
        found.children.append(Child(name, process, folder / name, log))
    return found


def test_the_nodes_reports_are_added_up(tmp_path: Path) -> None:
    first = node_report()
    # The second one was away for a round of the first fragment, which counts 2 * 60 bytes and 2 * 100 values.
    away = {"bytes_due": 200.0, "bytes_due_fp32": 1280.0}
    second = node_report(loss_first=6.0, loss_last=4.0, bytes_up=450, bytes_up_contributions=400, tau=3, **away)
    report = make_report(swarm(tmp_path, first, second), 12.5)
    assert report["peers"] == 2
    assert (report["rounds_begun"], report["rounds_committed"], report["rounds_aborted"]) == (3, 3, 0)
    assert report["heads_equal"] is True
    assert (report["loss_first"], report["loss_last"], report["eval_loss"]) == (5.5, 3.5, 3.5)
    assert report["bytes_up_per_peer"] == 400
    assert report["bytes_up_payload_per_peer"] == 360
    assert report["bytes_up_control_per_peer"] == 30
    assert report["bytes_up_group_payload"] == (320 + 200) / 2
    assert report["bytes_up_fp32_equivalent"] == (2080 + 1280) / 2
    assert report["tau"] == {"node0": 2, "node1": 3}
    assert report["wall_seconds"] == 12.5
    assert report["lost"] == report["failed"] == report["abort_reasons"] == []
    assert report["nodes"] == {"node0": first, "node1": second}
    assert json.loads(json.dumps(report)) == report


def test_a_round_counts_once_whoever_committed_it(tmp_path: Path) -> None:
    first = node_report(rounds_begun=[0, 1, 2, 3], committed=[0, 2], aborted={"1": "no quorum", "3": "alone"})
    second = node_report(rounds_begun=[1, 2, 4], committed=[2, 4], aborted={"1": "no quorum"})
    report = make_report(swarm(tmp_path, first, second), 1.0)
    assert (report["rounds_begun"], report["rounds_committed"], report["rounds_aborted"]) == (5, 3, 2)
    assert report["abort_reasons"] == ["alone", "no quorum"]


def test_a_padded_step_is_said_to_be_one(tmp_path: Path) -> None:
    report = make_report(swarm(tmp_path, node_report(), node_report(emulated_device_time=True)), 1.0)
    assert report["emulated_device_time"] is True
    assert "emulated device time" in render(report, tmp_path)
    (tmp_path / "real").mkdir()
    report = make_report(swarm(tmp_path / "real", node_report()), 1.0)
    assert report["emulated_device_time"] is False
    assert "emulated" not in render(report, tmp_path)


def test_other_heads_are_seen(tmp_path: Path) -> None:
    report = make_report(swarm(tmp_path, node_report(), node_report(heads=["aa", "cc"])), 1.0)
    assert report["heads_equal"] is False
    assert "anchors DIFFER on all" in render(report, tmp_path)


def test_a_killed_node_is_lost_and_one_that_failed_has_failed(tmp_path: Path) -> None:
    report = make_report(swarm(tmp_path, node_report(), None, None, codes=(0, -9, 1)), 1.0)
    assert report["lost"] == ["node1"]
    assert report["failed"] == ["node2"]
    assert report["peers"] == 3
    assert list(report["nodes"]) == ["node0"]
    text = render(report, tmp_path)
    assert "WARNING node1 was killed by signal 9 (SIGKILL), by hand or because memory ran out" in text
    assert "FAILED: node2 ended with exit code 1; see its log" in text


def test_without_any_report_the_logs_speak(tmp_path: Path) -> None:
    with pytest.raises(StrettoError) as caught:
        make_report(swarm(tmp_path, None, None, codes=(0, 2)), 1.0)
    assert str(caught.value) == (
        "no peer came to the end: node0 done: second | third | node0 says why; "
        "node1 ended with exit code 2: second | third | node1 says why"
    )


def test_the_summary_for_people(tmp_path: Path) -> None:
    report = make_report(swarm(tmp_path, node_report(), node_report()), 61.4)
    lines = render(report, tmp_path / "report.json").splitlines()
    assert lines == [
        "3 of 3 rounds committed by 2 peer(s) in 61 s; anchors bit-identical on all",
        "training loss 5.000 -> 3.000, held-out 3.500 nats per byte",
        "0.00 MB sent per peer, 5.9 times less than FP32",
        "100 ms per step, compute utilization 99.0%, tau node0 2, node1 2",
        f"report: {tmp_path / 'report.json'}",
    ]


def test_a_lone_peer_sends_nothing_and_saves_nothing(tmp_path: Path) -> None:
    alone = node_report(bytes_due=0.0, bytes_due_fp32=0.0, bytes_up=0, bytes_up_contributions=0, bytes_up_control=0)
    report = make_report(swarm(tmp_path, alone), 1.0)
    assert report["bytes_up_per_peer"] == report["bytes_up_group_payload"] == report["bytes_up_fp32_equivalent"] == 0
    assert "0.00 MB sent per peer\n" in render(report, tmp_path)


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == "no log"
    log.write_bytes(b"")
    assert tail(log) == "it said nothing"
    log.write_bytes(b"a\nb\nc\nd\xff\n")
    assert tail(log, 2) == "c | d\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("name", ["peers", "rounds", "inner_steps", "fragments"])
def test_a_demo_of_nothing_is_refused(tmp_path: Path, name: str) -> None:
    fields = {"peers": 2, "rounds": 2, "inner_steps": 8, "fragments": 2, "seed": 0, name: 0}
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 0, it must be at least 1"):
        DemoConfig(report=tmp_path / "r", folder=None, **fields)
    with pytest.raises(ConfigError, match="--peers is 65"):
        DemoConfig(report=tmp_path / "r", folder=None, **{**fields, name: 1, "peers": 65})


def test_overlaps_are_for_lockstep_once_or_one_for_each(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "peers": 3, "rounds": 1, "inner_steps": 8, "fragments": 2, "seed": 0, "report": tmp_path / "r", "folder": None
    }  # fmt: skip
    assert DemoConfig(**fields, lockstep=True).taus == (1, 1, 1)
    assert DemoConfig(**fields, lockstep=True, tau=(2,)).taus == (2, 2, 2)
    assert DemoConfig(**fields, lockstep=True, tau=(0, 1, 3)).taus == (0, 1, 3)
    with pytest.raises(ConfigError, match="--tau is given 2 times"):
        DemoConfig(**fields, lockstep=True, tau=(1, 2))
    with pytest.raises(ConfigError, match="--tau of a demo is for --lockstep"):
        DemoConfig(**fields, tau=(1,))


def test_what_the_simulation_came_to_is_said(tmp_path: Path) -> None:
    report = make_report(swarm(tmp_path, node_report()), 1.0)
    assert report["simulation_equal"] is None
    assert "simulation of" not in render(report, tmp_path)
    equal = render(report | {"simulation_equal": True}, tmp_path)
    assert "simulation of the same run: anchors, momenta and local weights bit-identical on all peers" in equal
    other = {"simulation_equal": False, "simulation_differences": ["node0: local weights of fragment 1"]}
    assert "simulation of" not in render(report | other, tmp_path)
    assert "DIFFERS FROM ITS SIMULATION: node0: local weights of fragment 1" in render(report | other, tmp_path)


def test_a_child_gets_no_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_MICRO_BATCH", "77")
    monkeypatch.setenv("STRETTO_DEBUG", "1")
    seen: dict[str, Any] = {}

    class Popen(Ended):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(0)
            seen.update(options, command=command)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    found = swarm(tmp_path, node_report())
    child = found.spawn("extra", "join", "INVITE")
    assert found.children[-1] is child
    assert seen["command"] == [sys.executable, "-m", "stretto.node.cli", "join", "INVITE", "--exit-with-stdin"]
    assert seen["start_new_session"] is True
    assert seen["stdin"] == subprocess.PIPE
    assert "STRETTO_MICRO_BATCH" not in seen["env"]
    assert seen["env"]["STRETTO_DEBUG"] == "1"
    assert math.isnan(child.loss)


def test_a_node_that_was_stopped_on_the_way_has_no_final_figures_and_spoils_nobodys(tmp_path: Path) -> None:
    stopped = node_report(eval_loss=None, loss_first=None, loss_last=None)
    report = make_report(swarm(tmp_path / "some", node_report(), stopped), 1.0)
    assert report["eval_loss"] == 3.5
    alone = make_report(swarm(tmp_path / "none", stopped), 1.0)
    assert alone["eval_loss"] is None
    assert "held-out unknown" in render(alone, tmp_path / "report.json")
