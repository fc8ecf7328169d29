"""A real swarm in lockstep and the simulation of the same run end with the same bits; a lost peer ends it in words."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Lab, micro_run, no_traceback

# Processes that wait for each other on a machine that is busy: the limits are generous, the work is small.
SLOW = 900.0


def lockstep_demo(lab: Lab, *taus: int, rounds: int) -> dict[str, Any]:
    report = lab.folder / "report.json"
    flags = [flag for tau in taus for flag in ("--tau", str(tau))]
    demo = lab.run(
        "demo", "--peers", "4", "--rounds", str(rounds), "--inner-steps", "8", "--fragments", "4", "--seed", "3",
        "--lockstep", *flags, "--report", report, "--folder", lab.folder / "demo", limit=SLOW,
    )  # fmt: skip
    assert demo.popen.returncode == 0, demo.tail()
    no_traceback(demo)
    assert "bit-identical on all peers" in demo.text
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_four_real_peers_and_the_simulation_end_with_the_same_bits(lab: Lab) -> None:
    # tau 0 merges at the departure; with tau 3 the next round departs before the result of the last one is merged
    taus, rounds = [0, 1, 3, 3], 8
    report = lockstep_demo(lab, *taus, rounds=rounds)
    assert report["simulation_equal"] is True
    assert report["simulation_differences"] == []
    nodes = [report["nodes"][f"node{index}"] for index in range(4)]
    for node, tau in zip(nodes, taus, strict=True):
        assert node["committed"] == node["rounds_begun"] == list(range(rounds))
        assert node["aborted"] == {}
        assert node["taus"] == [tau] * rounds
        # H = 8, P = 4: the last round departs after step 8 + 7 * 2, and nobody trains beyond its merge
        assert node["steps"] == 22 + tau
        assert node["states"] == nodes[0]["states"]
    assert len(set(nodes[0]["states"])) == 4, "each fragment has a state of its own"
    assert len({tuple(node["lockstep"]["weights"]) for node in nodes}) == 4, "between merges replicas are their own"
    _no_sample_was_read_twice(lab.folder / "demo")


def _no_sample_was_read_twice(folder: Path) -> None:
    seen: set[tuple[int, int]] = set()
    for path in folder.glob("node*/runs/*/metrics.jsonl"):
        for event in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            for unit, first, last in event.get("samples", []) if event["event"] == "step" else []:
                samples = {(unit, position) for position in range(first, last)}
                assert not samples & seen
                seen |= samples
    assert seen


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_when_a_peer_dies_the_others_end_and_say_why(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    nodes = lab.found(invite, 3, "--lockstep", "3", "--tau", "1")
    nodes[0].commits(2, limit=SLOW)
    nodes[2].signal(signal.SIGKILL)
    for node in nodes[:2]:
        assert node.exit_code(limit=SLOW) == 1, node.tail()
        assert "can no longer equal the simulation" in node.text, node.tail()
        assert "lockstep: round" in node.text
        no_traceback(node)
    # Started again they would not be in lockstep with anybody.
    again = lab.join(invite, "node0", "--lockstep", "3", "--tau", "1")
    assert again.exit_code(limit=SLOW) == 1
    assert "an earlier life of this peer in this run" in again.text, again.tail()
