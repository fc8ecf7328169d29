"""Ctrl-C, SIGTERM and SIGKILL in every phase: quick, quiet, and nothing stays behind."""

import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Lab, Process, micro_run, no_traceback, until

QUICK = 10.0
"""Seconds in which everything is gone."""


def importing(process: Process) -> None:
    """Wait until the process is in the middle of its imports."""
    maps = Path(f"/proc/{process.popen.pid}/maps")
    until(lambda: "numpy" in maps.read_text(encoding="utf-8"), "the import of numpy", logs=process.tail)


DEMO_PHASES: dict[str, Callable[[Process], object]] = {
    "imports": importing,
    "bootstrap starts": lambda demo: demo.see("starting the bootstrap peer"),
    "nodes start": lambda demo: demo.see("processes: "),
    "training": lambda demo: demo.see(r"node\d step \d"),
}


@pytest.mark.parametrize("phase", DEMO_PHASES)
def test_ctrl_c_ends_a_demo(lab: Lab, phase: str) -> None:
    folder = lab.folder / "demo"
    demo = lab.start("demo", "demo", "--peers", "2", "--rounds", "500", "--folder", folder, folder=folder)
    DEMO_PHASES[phase](demo)
    began = time.monotonic()
    demo.signal(signal.SIGINT)
    assert demo.exit_code(limit=QUICK) == 130
    demo.all_gone(limit=began + QUICK - time.monotonic())
    no_traceback(demo)
    logs = list(folder.glob("*.log"))
    assert bool(logs) == (phase != "imports")
    for log in logs:
        assert "Traceback" not in log.read_text(encoding="utf-8", errors="replace"), log.name


def test_a_killed_demo_takes_all_along(lab: Lab) -> None:
    folder = lab.folder / "demo"
    demo = lab.start("demo", "demo", "--peers", "2", "--rounds", "500", "--folder", folder, folder=folder)
    demo.see(r"node\d step \d")
    assert len(demo.family()) == 7  # the demo; bootstrap peer and nodes with a p2pd each
    demo.signal(signal.SIGKILL)
    demo.all_gone(limit=QUICK)
    for log in folder.glob("*.log"):
        assert "Traceback" not in log.read_text(encoding="utf-8", errors="replace"), log.name


JOIN_PHASES = {
    "starting": r"starting the network daemon",
    "dialled": r"bootstrap peers reached",
    "waiting": r"waiting for other peers|waiting for the run to begin",
    "training": r"committed by \d",
}


@pytest.mark.parametrize("phase", JOIN_PHASES)
def test_signals_end_a_node(lab: Lab, phase: str) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    flags = ["--new-run"] if phase == "training" else []
    one, two = lab.join(invite, "one", *flags), lab.join(invite, "two")
    if phase == "training":
        two.see(JOIN_PHASES[phase])  # before the other one leaves, since it has the state that is to be downloaded
    for node, number, code in ((one, signal.SIGINT, 130), (two, signal.SIGTERM, 0)):
        node.see(JOIN_PHASES[phase])
        began = time.monotonic()
        node.signal(number)
        assert node.exit_code(limit=QUICK) == code, node.tail()
        node.all_gone(limit=began + QUICK - time.monotonic())
        no_traceback(node)
        assert not node.errors, node.errors
        left = [entry for entry in node.folder.rglob("*") if stat.S_ISSOCK(entry.lstat().st_mode)]
        assert not left
    if phase == "training":
        assert "leaving the swarm" in one.text
        assert one.report()["rounds_committed"] > 0


def test_a_second_ctrl_c_does_not_wait(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    node = lab.join(invite, "node", "--new-run")
    node.see(r"committed by 1")
    daemon = node.daemon()
    os.kill(daemon, signal.SIGSTOP)  # so that leaving takes long
    try:
        node.signal(signal.SIGINT)
        node.see("leaving the swarm")
        node.signal(signal.SIGINT)
        assert node.exit_code(limit=2) == 130
    finally:
        os.kill(daemon, signal.SIGCONT)
    node.all_gone(limit=QUICK)
    no_traceback(node)
