"""A node goes on from its checkpoint as if it had never stopped: after kill -9, after SIGTERM, from a damaged one."""

import dataclasses
import shutil
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from stretto.node.ports import free_port
from tests.integration.processes import Lab, Process, micro_run, no_traceback, until

LONG = 1_000_000
"""Inner steps between two rounds of a fragment: no round falls into the test, so the steps alone make the losses."""


@dataclass
class Life:
    """One start of a node in a data dir that has seen others: its steps are those after the first ``skip``."""

    node: Process
    skip: int

    def losses(self) -> dict[int, float]:
        """Loss by step so far."""
        return {event["step"]: event["loss"] for event in self.node.events("step")[self.skip :]}

    def reach(self, step: int) -> dict[int, float]:
        """Wait until this life has come to ``step``; its losses."""
        until(lambda: max(self.losses(), default=0) >= step, f"step {step}", logs=self.node.tail)
        return self.losses()

    def end(self, number: signal.Signals) -> dict[int, float]:
        """End it; its losses."""
        self.node.signal(number)
        self.node.exit_code()
        return self.losses()


def compare(one: dict[int, float], other: dict[int, float], steps: Iterable[int]) -> None:
    """The losses of ``steps`` are the same, but for matrix products that round by where their memory lies."""
    chosen = list(steps)
    assert chosen
    assert [one[step] for step in chosen] == pytest.approx([other[step] for step in chosen], abs=5e-4)


def saved(node: Process) -> list[int]:
    """Steps of the checkpoints in the node's data dir."""
    return sorted(int(path.name.removeprefix("step-")) for path in node.folder.glob("runs/*/checkpoints/step-*"))


def begin(lab: Lab, invite: str, number: int) -> Life:
    """Start the node again; steps of 50 ms keep the test short."""
    flags = ("--new-run", "--checkpoint-every", "1.5", "--checkpoints", "6", "--pace", "0.05")
    node = lab.join(invite, f"life{number}", *flags, folder=lab.folder / "node")
    return Life(node, len(node.events("step")))


def test_losses_after_a_resume_are_those_of_a_run_without_a_stop(lab: Lab) -> None:
    run = micro_run(lab.corpus, inner_steps=LONG)
    # The learning rate follows the swarm's clock, which goes on while a node is away: no warm-up in this run.
    run = dataclasses.replace(run, inner=dataclasses.replace(run.inner, warmup_steps=0))
    _, invite = lab.bootstrap(lab.write_run(run))

    # kill -9, ten steps after a checkpoint: those steps come again, with the same losses
    life = begin(lab, invite, 0)
    life.node.see(r"checkpoint of step \d+ written")
    first = saved(life.node)[0]
    life.reach(first + 10)
    uninterrupted = life.end(signal.SIGKILL)
    for step in saved(life.node)[1:]:
        shutil.rmtree(next(life.node.folder.glob(f"runs/*/checkpoints/step-{step:012}")))
    life = begin(lab, invite, 1)
    life.node.see(f"going on from the checkpoint of step {first}:")
    resumed = life.reach(first + 10)
    assert min(resumed) == first + 1
    compare(resumed, uninterrupted, range(first + 1, first + 11))

    # SIGTERM: the last step is saved, the next life begins after it
    life.node.see(r"checkpoint of step \d+ written", count=2)
    life.end(signal.SIGTERM)
    assert life.node.popen.returncode == 0
    end = saved(life.node)[-1]
    assert end == max(life.losses())
    life = begin(lab, invite, 2)
    resumed = life.reach(end + 10)
    assert min(resumed) == end + 1
    life.end(signal.SIGKILL)

    # One byte short: the one before is taken, and the run without a stop that follows passes the same losses
    older = [step for step in saved(life.node) if step < end]
    for step in [step for step in saved(life.node) if step >= end]:
        (path,) = life.node.folder.glob(f"runs/*/checkpoints/step-{step:012}/local-0000.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    life = begin(lab, invite, 3)
    life.node.see(f"the checkpoint of step {end} is left out: .* bytes instead of")
    life.node.see(f"going on from the checkpoint of step {older[-1]}:")
    compare(resumed, life.reach(end + 10), range(end + 1, end + 11))
    life.end(signal.SIGTERM)
    no_traceback(life.node)


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
    for node in again:
        until(lambda node=node: fragments_after(node, last) == {0, 1}, "both fragments commit", logs=node.tail)
    for node in again:
        node.signal(signal.SIGTERM)
    for node, version in zip(again, versions, strict=False):
        assert node.exit_code() == 0
        no_traceback(node)
        assert all(now > then for now, then in zip(tips(node), version, strict=True)), (tips(node), versions)


def fragments_after(node: Process, round: int) -> set[int]:
    """The fragments that the node has committed in later rounds."""
    events = node.events("round")
    return {event["fragment"] for event in events if event["outcome"] == "committed" and event["round"] > round}


def tips(node: Process) -> list[int]:
    """Versions of the fragments' chains as the node left them."""
    report: dict[str, Any] = node.report()
    versions: list[int] = report["versions"]
    return versions


@pytest.mark.slow
def test_new_peers_end_on_the_lineage_of_a_restored_one(lab: Lab) -> None:
    run, port = lab.write_run(micro_run(lab.corpus)), free_port()
    bootstrap, invite = lab.bootstrap(run, port=port)
    old = lab.join(invite, "old", "--new-run", "--pace", "0.02")
    until(lambda: len(old.committed()) >= 6, "some commits", logs=old.tail)
    old.signal(signal.SIGTERM)
    assert old.exit_code() == 0
    before, last = tips(old), max(old.committed())
    # While anybody remembers that the run was further on, nobody founds it: here nobody does.
    bootstrap.signal(signal.SIGTERM)
    assert bootstrap.exit_code() == 0
    assert lab.bootstrap(run, port=port)[1] == invite

    # Told to found the run, and alone: it does. Then the old one comes back, then another new one.
    early = lab.join(invite, "early", "--new-run", "--pace", "0.02")
    until(early.committed, "the new peer commits alone", logs=early.tail)
    restored = lab.join(invite, "restored", "--pace", "0.02", folder=old.folder)
    until(lambda: shared_after([early, restored], last), "both commit the same rounds", logs=lab.logs)
    late = lab.join(invite, "late", "--new-run", "--pace", "0.02")
    nodes = [early, restored, late]
    until(lambda: shared_after(nodes, last), "all three commit the same rounds", logs=lab.logs)
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        assert node.exit_code() == 0
        no_traceback(node)
        assert all(now > then for now, then in zip(tips(node), before, strict=True)), (tips(node), before)


def shared_after(nodes: list[Process], round: int) -> set[tuple[int, str]]:
    """Fragment and head of commits after ``round`` that all nodes have, once there are some of both fragments."""
    heads = [
        {
            (event["fragment"], event["head"])
            for event in node.events("round")
            if event["outcome"] == "committed" and event["round"] > round and "head" in event
        }
        for node in nodes
    ]
    common = set.intersection(*heads)
    return common if {fragment for fragment, _ in common} == {0, 1} else set()
