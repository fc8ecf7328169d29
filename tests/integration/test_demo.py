"""``stretto demo``: a whole swarm from start to report, with two peers and with one."""

import json
import math
from pathlib import Path
from typing import Any

from tests.integration.processes import Lab, Process, no_traceback

FIELDS = {
    "peers", "rounds_committed", "rounds_aborted", "heads_equal", "loss_first", "loss_last", "eval_loss",
    "bytes_up_per_peer", "bytes_up_fp32_equivalent", "step_seconds", "blocked_seconds", "compute_utilization", "tau",
    "wall_seconds", "bytes_up_group_payload",
}  # fmt: skip


def run_demo(lab: Lab, peers: int, rounds: int) -> tuple[Process, dict[str, Any]]:
    """The ended demo and its report."""
    report = lab.folder / "report.json"
    demo = lab.run(
        "demo", "--peers", str(peers), "--rounds", str(rounds), "--report", report
    )  # fmt: skip
    assert demo.popen.returncode == 0, demo.tail()
    no_traceback(demo)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found.keys() >= FIELDS
    assert found["peers"] == peers == len(found["nodes"])
    assert found["heads_equal"] is True
    assert found["lost"] == found["failed"] == []
    assert found["rounds_begun"] == found["rounds_committed"] + found["rounds_aborted"]
    assert 0 < found["compute_utilization"] <= 1
    assert 0 <= found["blocked_seconds"] < found["wall_seconds"]
    assert 0 < found["step_seconds"] < found["wall_seconds"]
    assert found["tau"].keys() == {f"node{index}" for index in range(peers)}
    assert all(0 <= tau <= 5 for tau in found["tau"].values())
    assert found["loss_last"] < found["loss_first"] - 0.5
    assert 0 < found["eval_loss"] < math.log(272)
    return demo, found


def test_two_peers_train_one_model_and_send_little(lab: Lab) -> None:
    demo, report = run_demo(lab, peers=2, rounds=8)
    # The first round may come before all know the clock, and a busy machine may skip one.
    assert report["rounds_committed"] >= 6, report["abort_reasons"]
    assert 0 < report["bytes_up_per_peer"] <= 1.1 * report["bytes_up_group_payload"]
    assert 5 < report["bytes_up_fp32_equivalent"] / report["bytes_up_group_payload"] < 8.1
    heads = [node["heads"] for node in report["nodes"].values()]
    assert heads[0] == heads[1]
    assert len(set(heads[0])) == 4, "each fragment has a chain of its own"
    assert f"{report['rounds_committed']} of {report['rounds_begun']} rounds committed by 2 peer(s)" in demo.text
    assert not list(Path(lab.temp).glob("stretto-demo-*")), "the temporary folder is removed after success"


def test_a_lone_peer_learns_too(lab: Lab) -> None:
    demo, report = run_demo(lab, peers=1, rounds=8)
    # The first round may come before all know the clock, and a busy machine may skip one.
    assert report["rounds_committed"] >= 6, report["abort_reasons"]
    assert report["bytes_up_per_peer"] == report["bytes_up_group_payload"] == 0
    assert "did not change" not in demo.text
