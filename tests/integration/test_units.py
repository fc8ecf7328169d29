"""The data is shared out among real nodes: nothing is read by two at a time, hardly anything twice after deaths."""

import dataclasses
import json
import signal
import time
from collections import Counter
from typing import Any

import pytest

from tests.integration.processes import Lab, Process, micro_run, no_traceback, until

UNIT = 150
PACE = 0.05
"""Seconds per step of two sequences: a unit takes about four seconds."""


def events(node: Process) -> list[dict[str, Any]]:
    """All events of a node's lives in order."""
    (path,) = node.folder.glob("runs/*/metrics.jsonl")
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def units(node: Process, what: str) -> list[int]:
    return [event["unit"] for event in node.events("unit") if event["what"] == what]


def kill(node: Process) -> float:
    """Kill -9; the wall-clock time at which it was surely dead."""
    node.signal(signal.SIGKILL)
    node.exit_code(limit=30)
    return time.time()


def held(node: Process, ends: list[float]) -> list[tuple[int, float, float]]:
    """(unit, from, until) for all that a node held; ``ends`` are the times at which its lives ended."""
    found: list[tuple[int, float, float]] = []
    since: dict[int, float] = {}
    lives = sorted(ends)
    for event in events(node):
        while lives and event["time"] > lives[0]:
            found += [(unit, start, lives[0]) for unit, start in since.items()]
            since, lives = {}, lives[1:]
        if event["event"] != "unit":
            continue
        if event["what"] == "held":
            since.setdefault(event["unit"], event["time"])
        elif event["what"] in ("done", "given up", "done elsewhere") and event["unit"] in since:
            found.append((event["unit"], since.pop(event["unit"]), event["time"]))
    return found + [(unit, start, lives[0] if lives else time.time()) for unit, start in since.items()]


def check_nothing_held_twice(intervals: list[tuple[str, tuple[int, float, float]]]) -> None:
    for index, (name, (unit, start, end)) in enumerate(intervals):
        for other, (their_unit, their_start, their_end) in intervals[index + 1 :]:
            apart = unit != their_unit or name == other or end <= their_start or their_end <= start
            assert apart, f"unit {unit} held by {name} {start}..{end} and by {other} {their_start}..{their_end}"


@pytest.mark.slow
def test_units_of_dead_peers_go_on_and_hardly_anything_is_read_twice(lab: Lab) -> None:
    run = micro_run(lab.corpus)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, unit_sequences=UNIT))
    _, invite = lab.bootstrap(lab.write_run(run))
    nodes = lab.found(invite, 4, "--pace", str(PACE))
    for node in nodes:
        until(lambda node=node: units(node, "done"), f"{node.name} finishes a unit", logs=lab.logs)  # type: ignore[misc]

    ends: dict[str, list[float]] = {node.name: [] for node in nodes}
    ends["node3"].append(kill(nodes[3]))
    again = lab.join(invite, "node3-again", "--pace", str(PACE), folder=nodes[3].folder)
    ends["node2"].append(kill(nodes[2]))
    left = set(units(nodes[2], "held")) - set(units(nodes[2], "done"))
    replacement = lab.join(invite, "node4", "--pace", str(PACE))
    ends["node4"] = []
    again.see(r"the data goes on after [\d,]+ samples: unit \d+ at sample \d+")
    begun = len(units(again, "done"))
    living = [nodes[0], nodes[1], again, replacement]
    until(lambda: len(units(again, "done")) > begun, "the restarted node finishes a unit", logs=lab.logs)
    until(lambda: units(replacement, "done"), "the new node finishes a unit", logs=lab.logs)
    until(
        lambda: left <= {unit for node in living for unit in units(node, "done")},
        f"the dead node's units {left} are finished by others",
        logs=lab.logs,
    )
    until(lambda: min(map(done_below, living)) >= 4, "all know that four units are done", logs=lab.logs)
    for node in living:
        node.signal(signal.SIGTERM)
    for node in living:
        assert node.exit_code(limit=60) == 0, node.tail()
        no_traceback(node)
    now = time.time()

    files = {node.name: node for node in (*nodes, replacement)}
    reports = [node.report() for node in living]
    trained = Counter(
        (unit, position)
        for node in files.values()
        for event in node.events("step")
        for unit, first, last in event["samples"]
        for position in range(first, last)
    )
    repeated = sum(times - 1 for times in trained.values())
    bound = sum(report["samples_repeated_at_most"] for report in reports)
    print(f"{len(trained)} samples, {repeated} repeated, bound {bound}, two deaths, units of {UNIT}")
    assert repeated <= 2 * UNIT
    assert repeated <= bound
    assert sum(report["samples_overlapping"] for report in reports) == 0
    assert sum(report["units_taken_over"] for report in reports) >= 2
    for report in reports:
        assert report["samples"] > 0
        assert report["units_done"] > 0
        assert report["data_wait_seconds"] < 20

    check_nothing_held_twice(
        [(name, interval) for name, node in files.items() for interval in held(node, [*ends[name], now])]
    )
    # A killed node may have lost the line of its last step, nothing else.
    done = min(map(done_below, living))
    per_epoch = -(-(windows := trained_windows(again)) // UNIT)
    sizes = {unit: min(UNIT, windows - unit % per_epoch * UNIT) for unit in range(done)}
    missing = [(unit, at) for unit, size in sizes.items() for at in range(size) if not trained[unit, at]]
    assert len(missing) <= 2 * 2


def done_below(node: Process) -> int:
    """All units below this one are done, as far as the node knew when it wrote its journal."""
    (path,) = node.folder.glob("runs/*/data.json")
    count: int = json.loads(path.read_text())["done_below"]
    return count


def trained_windows(node: Process) -> int:
    """Windows in an epoch, as the journal has them."""
    (path,) = node.folder.glob("runs/*/data.json")
    count: int = json.loads(path.read_text())["windows"]
    return count
