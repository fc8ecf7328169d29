"""A node goes on from its checkpoint as if it had never stopped: after kill -9, after SIGTERM, from a damaged one."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Lab, Process, heads_equal, micro_run, no_traceback, until

LONG = 1_000_000
"""Inner steps between two rounds of a fragment: no round falls into the test, so the steps alone make the losses."""


def losses(node: Process, life: int) -> dict[int, float]:
    """Loss by step of one life of a data dir: the steps start anew, or go back, where a life begins."""
    lives: list[dict[int, float]] = [{}]
    for event in node.events("step"):
        if event["step"] <= max(lives[-1], default=0):
            lives.append({})
        lives[-1][event["step"]] = event["loss"]
    return lives[life] if life < len(lives) else {}


def compare(one: dict[int, float], other: dict[int, float], first: int) -> None:
    """Ten steps from ``first`` on have the same losses (the metrics round to five digits)."""
    steps = range(first, first + 10)
    assert [one[step] for step in steps] == pytest.approx([other[step] for step in steps], abs=2e-5)


def saved(node: Process) -> list[int]:
    """Steps of the checkpoints in the node's data dir."""
    return sorted(int(path.name.removeprefix("step-")) for path in node.folder.glob("runs/*/checkpoints/step-*"))


def reach(node: Process, life: int, step: int) -> None:
    """Wait until a life has come to ``step``."""
    until(lambda: max(losses(node, life), default=0) >= step, f"step {step} of life {life}", logs=node.tail)


def life_of(lab: Lab, invite: str, life: int, folder: Path) -> Process:
    """Start the node again; steps of 50 ms keep the test short."""
    flags = ("--new-run", "--checkpoint-every", "0.5", "--checkpoints", "3", "--pace", "0.05")
    return lab.join(invite, f"life{life}", *flags, folder=folder)


def test_losses_after_a_resume_are_those_of_a_run_without_a_stop(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=LONG)))
    folder = lab.folder / "node"

    # kill -9, some steps after a checkpoint: those steps come again, with the same losses
    node = life_of(lab, invite, 0, folder)
    node.see(r"checkpoint of step \d+ written", count=2)
    reach(node, 0, saved(node)[-1] + 12)
    node.signal(signal.SIGKILL)
    newest = saved(node)[-1]
    before = losses(node, 0)
    node = life_of(lab, invite, 1, folder)
    node.see(f"going on from the checkpoint of step {newest}:")
    reach(node, 1, newest + 10)
    assert min(losses(node, 1)) == newest + 1
    if max(before) >= newest + 10:
        compare(before, losses(node, 1), newest + 1)

    # SIGTERM, ten steps after the last checkpoint or more: the end is saved
    node.see(r"checkpoint of step \d+ written", count=2)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    end = saved(node)[-1]
    assert end == max(losses(node, 1))
    node = life_of(lab, invite, 2, folder)
    reach(node, 2, end + 10)
    assert min(losses(node, 2)) == end + 1
    after_stop = losses(node, 2)
    node.signal(signal.SIGKILL)

    # One byte short: the one before is taken, and the run without a stop that follows passes the same losses
    newer = [step for step in saved(node) if step > end]
    for step in [*newer, end]:
        (path,) = folder.glob(f"runs/*/checkpoints/step-{step:012}/local-0000.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    older = [step for step in saved(node) if step < end]
    for journal in folder.glob("runs/*/data.json"):
        journal.unlink()
    node = life_of(lab, invite, 3, folder)
    node.see(f"the checkpoint of step {end} is left out: .* bytes instead of")
    node.see(f"going on from the checkpoint of step {older[-1]}:")
    reach(node, 3, end + 10)
    compare(after_stop, losses(node, 3), end + 1)
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 0
    no_traceback(node)


def test_a_swarm_that_was_stopped_goes_on_where_it_was_with_another_number_of_peers(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, min_size=2)))
    nodes = lab.found(invite, 3)
    for node in nodes:
        node.commits(5)
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        assert node.exit_code() == 0
    versions = [tips(node) for node in nodes]
    steps = [max(event["step"] for event in node.events("step")) for node in nodes]
    last = max(round for node in nodes for round in node.committed())

    again = [lab.join(invite, f"again{index}", folder=lab.folder / f"node{index}") for index in range(2)]
    for node, step in zip(again, steps, strict=False):
        node.see(f"going on from the checkpoint of step {step}:")
        node.commits(last + 4)
    for node in again:
        node.signal(signal.SIGTERM)
        assert node.exit_code() == 0
        no_traceback(node)
    for node, version in zip(again, versions, strict=False):
        assert all(now > then for now, then in zip(tips(node), version, strict=True))
    assert heads_equal(again)


def tips(node: Process) -> list[int]:
    """Versions of the fragments' chains as the node left them."""
    report: dict[str, Any] = node.report()
    versions: list[int] = report["versions"]
    return versions


def test_two_nodes_do_not_share_the_state_of_a_run(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    first = lab.join(invite, "first", "--new-run", folder=lab.folder / "node")
    first.see(r"founding the run")
    second = lab.join(invite, "second", "--identity", lab.folder / "other.key", folder=lab.folder / "node")
    assert second.exit_code() == 1
    assert f"is in use by process {first.popen.pid}" in second.errors
    assert "--data-dir" in second.errors
    no_traceback(second)
