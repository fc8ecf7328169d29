"""Counting a month's traffic: from the kernel or the line, on disk, and what people are told."""

import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from stretto.node.swarm.budget import Used
from stretto.node.swarm.line import Line
from stretto.node.swarm.sockets import HEADER, Connection, Reading, SocketMeter, parse
from stretto.node.swarm.traffic import SAVE_EVERY, Costs, TrafficWatch, in_words, read_used
from tests.node.test_budget import at

MB = 10**6


class FakeMeter(SocketMeter):
    """Says what it is told to."""

    def __init__(self) -> None:
        self.reading: Reading | None = Reading(0, 0, 0)

    def look(self) -> Reading | None:
        return self.reading


class Scene:
    """A watch whose clock and meter stand still until they are moved."""

    def __init__(self, folder: Path, cap: int = 30 * MB, now: float = at("2026-11-10T00:00:00")) -> None:
        self.now, self.path, self.meter, self.line = now, folder / "traffic.json", FakeMeter(), Line()
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.watch = TrafficWatch(
            cap=cap, path=self.path, line=self.line, meter=self.meter, say=self.events.append, tell=self.lines.append,
            now=lambda: self.now,
        )  # fmt: skip

    def saved(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content


def test_what_the_kernel_says_counts_and_not_what_the_line_says_if_that_is_less(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.line.control_up(100)
    scene.line.bulk_down(200)
    scene.meter.reading = Reading(7, 1000, 150)
    scene.watch.count()
    assert scene.watch.budget.used == Used("2026-11", 1000, 200)
    assert scene.watch.connections == 7
    scene.watch.count()
    assert scene.watch.budget.used == Used("2026-11", 1000, 200)


def test_without_the_kernel_the_line_counts_with_a_margin(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.meter.reading = None
    scene.line.control_up(1000)
    scene.watch.count()
    assert scene.watch.budget.used == Used("2026-11", 1100, 0)
    assert scene.watch.connections is None


def test_it_pauses_says_so_with_numbers_and_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path)  # 21 days are left: 1.43 MB a day
    costs = Costs(round=0.2 * MB, cycle=0.4 * MB)
    assert scene.watch.look(costs) == ""
    scene.meter.reading = Reading(3, MB, MB // 4)
    assert scene.watch.look(costs) == "paused by the monthly cap"
    (line,) = scene.lines
    assert line.startswith(
        "paused by the monthly cap: 1.25 MB of 30.00 MB used this month (1.00 MB up, 250.0 kB down)"
    )
    assert "a round costs about 220.0 kB, of the 28.75 MB left, 178.6 kB may be used now" in line
    until = scene.events[-1]["until"]
    assert scene.events[-1] == {
        "event": "traffic", "month": "2026-11", "month_up": MB, "month_down": MB // 4, "monthly_cap": 30 * MB,
        "allowance": 178571, "round_bytes": 220000, "paused": True, "silent": False, "until": until,
    }  # fmt: skip
    assert scene.now < until < scene.now + 86400
    assert scene.saved() == {"month": "2026-11", "up": MB, "down": MB // 4}
    assert scene.watch.look(costs) == "paused by the monthly cap"
    assert len(scene.lines) == 1
    scene.now = scene.events[-1]["until"] + 60
    assert scene.watch.look(costs) == ""
    assert "the monthly cap allows rounds again" in scene.lines[-1]
    assert scene.events[-1]["paused"] is False


def test_what_rounds_cost_is_measured(tmp_path: Path) -> None:
    scene = Scene(tmp_path, cap=10**12)
    scene.watch.look(Costs(round=1000.0, rounds=1))
    scene.meter.reading = Reading(3, 30_000, 10_000)
    scene.watch.look(Costs(round=1000.0, rounds=5))
    assert scene.watch.round_bytes(Costs(round=1000.0, rounds=5)) == pytest.approx(8000, rel=0.3)
    assert scene.watch.round_bytes(Costs(round=1e6, rounds=5)) == pytest.approx(1.1e6)


def test_a_node_that_has_nothing_left_says_that_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text('{"month": "2026-11", "up": 20000000, "down": 10000001}')
    scene = Scene(tmp_path)
    assert scene.watch.look(Costs(round=100.0))
    assert scene.watch.exhausted
    assert "nothing is left, so this node also leaves the network" in scene.lines[0]
    assert scene.watch.silent
    assert not scene.watch.may_fetch(1)
    scene.now = at("2026-12-01T00:00:01")
    assert not scene.watch.look(Costs(round=100.0))
    assert not scene.watch.exhausted
    assert not scene.watch.silent


def test_a_pause_that_costs_more_than_flows_in_becomes_silence(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    costs = Costs(round=0.1 * MB, cycle=0.2 * MB)
    scene.meter.reading = Reading(3, 1_400_000, 0)
    assert scene.watch.look(costs)
    assert not scene.watch.silent
    scene.meter.reading = Reading(3, 1_400_000, 100_000)
    scene.watch.look(costs)
    assert scene.watch.silent
    assert "in debt by 71.4 kB: this node leaves the network for a while" in scene.lines[-1]
    silent_until = scene.now + (71_429 + 0.5 * 4 * 110_000) / scene.watch.budget.inflow
    scene.now = silent_until - 60
    assert scene.watch.look(costs)
    assert scene.watch.silent
    scene.now = silent_until + 60
    assert scene.watch.look(costs)  # still paused, but in the roster again
    assert not scene.watch.silent


def test_a_cap_that_is_too_small_for_a_cycle_a_day_is_named_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.watch.warn_if_small(Costs(round=MB, cycle=1.2 * MB))
    assert scene.lines == []
    scene = Scene(tmp_path)
    for _ in range(2):
        scene.watch.warn_if_small(Costs(round=MB, cycle=4 * MB))
    (line,) = scene.lines
    assert "a cycle of rounds costs about 4.40 MB, and 1.43 MB a day are left" in line
    assert "Raise --monthly-cap to about 136.40 MB" in line


def test_the_file_is_written_once_a_minute(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.watch.look(Costs(round=1.0))
    assert not scene.path.exists()
    scene.now += SAVE_EVERY
    scene.watch.look(Costs(round=1.0))
    assert scene.saved() == {"month": "2026-11", "up": 0, "down": 0}
    again = Scene(tmp_path)
    assert again.watch.budget.used == Used("2026-11", 0, 0)


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "nosuch")
    scene.watch.save()
    scene.watch.save()
    assert len(scene.lines) == 1
    assert "this month's traffic cannot be remembered" in scene.lines[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"month": "2026-11"}', b'{"month": 11, "up": 1, "down": 1}', b"\xff\xfe",
     b'{"month": "2026-11", "up": -1, "down": 1}', b'{"month": "2026-11", "up": true, "down": 1}',
     b'{"month": "2026-11", "up": 1e300, "down": 1}', b"[" * 4096],
)  # fmt: skip
def test_a_damaged_file_is_left_out_with_a_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "traffic.json"
    path.write_bytes(content)
    lines: list[str] = []
    assert read_used(path, lines.append) is None
    assert len(lines) == 1
    assert lines[0].startswith(f"WARNING {path} cannot be used: ")
    assert "counted from 0" in lines[0]


def test_no_file_is_no_fault(tmp_path: Path) -> None:
    lines: list[str] = []
    assert read_used(tmp_path / "traffic.json", lines.append) is None
    assert lines == []


def test_bytes_for_people() -> None:
    assert [in_words(n) for n in (999, 1_250_000, 3.2e9, -2e6)] == ["1.0 kB", "1.25 MB", "3.20 GB", "-2.00 MB"]


# ---------------------------------------------------------------------- the kernel's counts


def test_the_meter_counts_what_passes_through_a_socket() -> None:
    meter = SocketMeter(os.getpid())
    before = meter.look()
    if before is None:
        pytest.fail("this Linux does not answer sock_diag")
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        thread = threading.Thread(target=here.sendall, args=(bytes(1_000_000),))
        thread.start()
        left = 1_000_000
        while left:
            left -= len(there.recv(left))
        thread.join()
        after = meter.look()
        assert after is not None
        assert after.connections == before.connections + 2
        # Both ends are ours. Segments of loopback are large.
        assert 1_000_000 <= after.up - before.up < 1_100_000
        assert 1_000_000 <= after.down - before.down < 1_100_000
        here.close()
        there.close()
    closed = meter.look()
    assert closed is not None
    assert (closed.connections, closed.up >= after.up) == (before.connections, True)


def test_a_process_that_is_gone_has_no_reading() -> None:
    assert SocketMeter(2**22 + 1).look() is None


def test_a_message_of_the_kernel() -> None:
    info = bytearray(280)
    struct.pack_into("=QQII", info, 120, 500, 300, 7, 5)
    struct.pack_into("=Q", info, 200, 520)
    head = bytearray(72)
    head[1] = 1
    struct.pack_into("=I", head, 68, 4711)
    attribute = struct.pack("=HH", 4 + len(info), 2) + info
    other = struct.pack("=HH", 5, 9) + b"x\0\0\0"
    wanted = (4711, Connection(True, 520 + 7 * HEADER, 300 + 5 * HEADER))
    assert parse(bytes(head) + attribute) == wanted
    assert parse(bytes(head) + other + attribute) == wanted
    # An older kernel tells no bytes sent, but those that were acknowledged.
    assert parse(bytes(head) + struct.pack("=HH", 164, 2) + info[:160]) == (
        4711,
        Connection(True, 500 + 7 * HEADER, 300 + 5 * HEADER),
    )
    assert parse(bytes(head)) is None
    assert parse(bytes(head) + struct.pack("=HH", 0, 2)) is None
