"""Doctor: what it says about the machine, a broken daemon, and peers that are up, down, silent or someone else."""

import contextlib
import json
import os
import platform
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.node import doctor
from stretto.node.doctor import DoctorReport, ProbeError, check_clock, probe, render, run_doctor
from stretto.node.doctor_machine import (
    Check,
    check_daemon,
    check_device,
    check_disk,
    check_open_files,
    check_platform,
    check_port,
    check_versions,
    daemon_path,
)
from stretto.node.ports import free_port
from stretto.protocol.errors import ConfigError

OTHER_ID = "12D3KooWGRUVuBAkRV8jGUtsDWQmJ9Bq5ZHXJXMFQTYcSAGRf7jM"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


# --- the machine


@pytest.mark.parametrize(
    ("system", "machine", "status"),
    [
        ("Linux", "x86_64", "ok"),
        ("Linux", "aarch64", "ok"),
        ("Darwin", "arm64", "ok"),
        ("Linux", "riscv64", "fail"),
        ("Windows", "AMD64", "fail"),
    ],
)
def test_the_platform_is_judged_by_name(system: str, machine: str, status: str) -> None:
    check = check_platform(system, machine)
    assert check.status == status
    assert f"{system} on {machine} is {'supported' if status == 'ok' else 'not supported'}" in check.text


def test_the_installed_daemon_starts() -> None:
    imported = "hivemind" in sys.modules
    path = daemon_path()
    assert path is not None
    assert check_daemon(path) == Check(name="p2pd", status="ok", text=f"the libp2p daemon starts ({path})")
    assert ("hivemind" in sys.modules) == imported


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01\x01" + bytes(11) + machine.to_bytes(2, "little") + bytes(44)


FOREIGN = 0xB7 if platform.machine() == "x86_64" else 0x3E
BROKEN_DAEMONS: dict[str, tuple[bytes | None, int, str]] = {
    "missing": (None, 0, "is missing at"),
    "not executable": (elf(0x3E), 0o644, "is not executable; run: chmod +x"),
    "text": (b"this is not a program\n", 0o755, "is not a program (neither ELF nor Mach-O)"),
    "empty": (b"", 0o755, "is not a program"),
    "other cpu": (elf(FOREIGN), 0o755, f"was built for Linux on {'arm64' if FOREIGN == 0xB7 else 'x86_64'}, this is"),
    "macOS build": (b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01" + bytes(60), 0o755, "was built for Darwin on arm64"),
    "dies": (
        b"#!/bin/sh\necho first >&2\necho no luck today >&2\nexit 1\n",
        0o755,
        "exit code 1 and said: first / no",
    ),
    "killed": (b"#!/bin/sh\nkill -ABRT $$\n", 0o755, "ended at once with signal 6 and said: nothing"),
}


@pytest.mark.parametrize("name", BROKEN_DAEMONS)
def test_a_broken_daemon_is_explained(tmp_path: Path, name: str) -> None:
    content, mode, words = BROKEN_DAEMONS[name]
    path = tmp_path / "p2pd"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    check = check_daemon(path)
    assert check.status == "fail"
    assert words in check.text
    assert str(path) in check.text
    assert "\n" not in check.text


def test_no_hivemind_at_all_is_explained() -> None:
    assert "hivemind is not installed" in check_daemon(None).text


def test_versions_are_reported() -> None:
    check = check_versions()
    assert check.status == "ok"
    assert f"Python {platform.python_version()}, torch 2." in check.text
    assert "hivemind 1.1.12" in check.text


@pytest.mark.parametrize(
    ("device", "devices", "status", "words"),
    [
        ("cpu", ["cpu"], "ok", "cpu"),
        ("cuda", ["cuda:0", "cpu"], "ok", "cuda"),
        ("cuda:1", ["cuda:0", "cuda:1", "cpu"], "ok", "cuda:1"),
        ("auto", ["mps", "cpu"], "ok", "auto takes mps"),
        ("auto", ["cpu"], "warn", "auto takes the cpu"),
        ("cuda:1", ["cpu"], "fail", "there is no device 'cuda:1'; this machine has: cpu"),
        ("cuda:1", ["cuda:0", "cpu"], "fail", "this machine has: cuda:0, cpu"),
        ("mps", ["cuda:0", "cpu"], "fail", "this machine has: cuda:0, cpu"),
        ("gpu", ["cpu"], "fail", "'gpu'"),
    ],
)
def test_a_device_is_there_or_the_others_are_listed(device: str, devices: list[str], status: str, words: str) -> None:
    check = check_device(device, devices)
    assert check.status == status
    assert words in check.text


def disk_with(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, free))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("gib", "status"), [(0.5, "fail"), (2.0, "warn"), (20.0, "ok")])
def test_free_disk_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, status: str) -> None:
    disk_with(int(gib * 2**30), monkeypatch)
    check = check_disk(tmp_path / "not" / "there" / "yet")
    assert check.status == status
    assert check.text.startswith(f"{gib} GiB free at {tmp_path}")


def test_a_data_folder_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_disk(tmp_path / "file" / "data")
    assert check.status == "fail"
    assert f"{tmp_path / 'file'} is a file" in check.text


def test_a_data_folder_without_permission_names_owner_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere, and tests may run as root
    check = check_disk(tmp_path)
    assert check.status == "fail"
    assert f"{tmp_path} belongs to user id {tmp_path.stat().st_uid}" in check.text


@pytest.mark.parametrize(("soft", "status"), [(100, "fail"), (256, "warn"), (1024, "ok"), (-1, "ok")])
def test_the_limit_on_open_files_is_judged(soft: int, status: str) -> None:
    assert check_open_files(soft).status == status


def test_a_busy_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = check_port(port)
    assert check.status == "fail"
    assert f"Port {port} is already in use by process {os.getpid()}" in check.text
    assert check_port(free_port()).status == "ok"
    assert check_port(None).status == "ok"


# --- the report


def answer(address: str, **fields: Any) -> dict[str, Any]:
    base = {"ok": False, "peer_id": None, "agent": None, "observed": None, "protocols": [], "rtt_ms": None}
    return {"address": address, "phase": "dial", "error": None} | base | fields


def bootstrap_lines(answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Check]:
    monkeypatch.setattr(doctor, "probe", lambda addresses, timeout: answers)
    report = run_doctor([a["address"] for a in answers], data_dir=tmp_path, port=None, device="cpu", timeout=5)
    return [check for check in report.checks if check.name.startswith("bootstrap")]


def test_no_bootstrap_peer_reachable_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = bootstrap_lines([answer("/a", error="connection refused")], monkeypatch, tmp_path)
    assert [check.status for check in checks] == ["fail", "fail"]
    assert checks[0].text == "0 of 1 bootstrap peers reachable (connection refused)"
    assert checks[1].text == "/a failed in phase dial: connection refused"


def test_one_reachable_bootstrap_peer_of_two_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    up = answer("/a", ok=True, agent="p2pd/0.1", observed="/ip4/9.9.9.9/tcp/5", rtt_ms=12.34, phase="ping")
    checks = bootstrap_lines([up, answer("/b", error="no answer")], monkeypatch, tmp_path)
    assert [check.status for check in checks] == ["warn", "ok", "warn"]
    assert checks[0].text == "1 of 2 bootstrap peers reachable (no answer)"
    assert checks[1].text == "/a answers in 12.3 ms (p2pd/0.1, sees this machine as /ip4/9.9.9.9/tcp/5)"


def timed(offset: float | None, correction: float = 0.0, name: str = "12D3KooWa") -> dict[str, Any]:
    told = offset is not None
    return answer("/a", ok=True, peer_id=name, time_offset=offset, time_error=0.01 if told else None) | {
        "time_correction": correction if told else None
    }


def test_the_clock_is_compared_with_the_peers_clocks() -> None:
    assert check_clock([timed(0.25)]).text == "this machine's clock agrees with 1 of 1 peers (-0.250 s)"
    ahead = check_clock([timed(-10.0), timed(-10.0, name="12D3KooWb")])
    assert ahead.status == "warn"
    assert ahead.text.startswith("your clock is 10.0 s ahead of 2 of 2 peers; Stretto corrects for it")
    # Its swarm time is right, since it corrects its own clock, which is as wrong as this machine's is right.
    corrected = check_clock([timed(0.0), timed(0.0, 25.0, "12D3KooWb"), timed(0.0, 0.0, "12D3KooWc")])
    assert corrected.status == "warn"
    assert corrected.text.startswith("the clocks of 1 of 3 peers (12D3KooWb"[:28])
    assert "25.0 s (behind)" in corrected.text
    silent = check_clock([timed(None)])
    assert (silent.status, silent.name) == ("warn", "clock")
    assert "could not be compared" in silent.text


def test_a_probe_that_fails_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    report = run_doctor(["/a"], data_dir=tmp_path, port=None, device="cpu", timeout=5)
    assert not report.ok
    assert report.checks[-1].status == "fail"
    assert report.checks[-1].text == "the probe process could not be started: No such file or directory"


def test_a_dead_probe_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))
    for script, words in (("echo ModuleNotFoundError: libp2p >&2; exit 1", "code 1: ModuleNot"), ("echo hm", "'hm")):
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        with pytest.raises(ProbeError, match=words):
            probe(["/a"], 5)


def test_a_report_without_addresses_covers_the_machine(tmp_path: Path) -> None:
    report = run_doctor([], data_dir=tmp_path, port=free_port(), device="cpu", timeout=5)
    names = [check.name for check in report.checks]
    assert names == ["platform", "p2pd", "versions", "device", "disk", "open files", "port"]
    assert json.loads(report.to_json())["checks"][3] == {
        "name": "device",
        "status": "ok",
        "text": report.checks[3].text,
    }


def test_a_replaced_daemon_fails_the_report(tmp_path: Path) -> None:
    report = run_doctor([], data_dir=tmp_path, port=None, device="cpu", timeout=5, daemon=tmp_path / "p2pd")
    assert not report.ok
    assert json.loads(report.to_json())["ok"] is False


@pytest.mark.parametrize("timeout", [0.0, -1.0, 301.0, float("nan")])
def test_a_time_limit_that_cannot_be_used_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ConfigError, match="time limit"):
        run_doctor([], data_dir=tmp_path, port=None, device="cpu", timeout=timeout)


def test_too_many_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="65 bootstrap addresses"):
        run_doctor(["/a"] * 65, data_dir=tmp_path, port=None, device="cpu", timeout=5)


def test_the_table_is_aligned_and_ends_with_a_count() -> None:
    checks = (
        Check(name="disk", status="ok", text="fine"),
        Check(name="open files", status="warn", text="few"),
        Check(name="port", status="fail", text="busy"),
    )
    assert render(DoctorReport(checks=checks)).splitlines() == [
        "ok    disk        fine",
        "warn  open files  few",
        "FAIL  port        busy",
        "1 failed, 1 with a warning, 1 in order",
    ]


# --- the probe, for real


@pytest.fixture(scope="module")
def peer() -> Iterator[str]:
    """Run a real libp2p daemon in a process of its own, and give its address."""
    script = (
        "import asyncio, sys\n"
        "from hivemind.p2p import P2P\n"
        "async def main():\n"
        "    P2P._UNIX_SOCKET_PREFIX = f'/unix{sys.argv[1]}/'\n"
        "    p2p = await P2P.create(host_maddrs=['/ip4/127.0.0.1/tcp/0'])\n"
        "    print('ADDRESS', (await p2p.get_visible_maddrs())[0], flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.read)\n"
        "    await p2p.shutdown()\n"
        "asyncio.run(main())\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="p2pd-") as sockets,
        subprocess.Popen(
            [sys.executable, "-c", script, sockets], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("ADDRESS"):
                yield line.split()[1]
                break
        else:
            pytest.fail("the daemon did not start")
        child.communicate("")


@pytest.fixture
def black_hole() -> Iterator[int]:
    """Listen, and never accept nor answer; give the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def swallower() -> Iterator[int]:
    """Swallow every packet of a new connection, as a firewall does: on Linux a full queue of connections does so."""
    with socket.socket() as server, contextlib.ExitStack() as clients:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


class BadRequest(socketserver.BaseRequestHandler):
    """Answers every connection with an HTTP error, as a web server would."""

    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def web_server() -> Iterator[int]:
    with socketserver.TCPServer(("127.0.0.1", 0), BadRequest) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.integration
def test_the_probe_tells_good_addresses_from_every_kind_of_bad_one(
    peer: str, black_hole: int, web_server: int, tmp_path: Path
) -> None:
    peer_id = peer.rpartition("/")[2]
    port = peer.split("/")[4]
    closed = free_port()
    cases: dict[str, tuple[str, str | None]] = {
        peer: ("ping", None),
        f"/dns4/localhost/tcp/{port}/p2p/{peer_id}": ("ping", None),
        f"/ip4/127.0.0.1/tcp/{closed}/p2p/{peer_id}": ("dial", "connection refused"),
        f"/ip4/127.0.0.1/tcp/{black_hole}/p2p/{peer_id}": ("dial", "the port is open, but no libp2p peer answered"),
        f"/ip4/127.0.0.1/tcp/{web_server}/p2p/{peer_id}": ("dial", "does not speak libp2p"),
        f"/ip4/127.0.0.1/tcp/{port}/p2p/{OTHER_ID}": ("dial", f"another peer answers at this address: {peer_id}"),
        f"/dns4/no-such-name.invalid/tcp/1/p2p/{peer_id}": ("dial", "the name no-such-name.invalid does not resolve"),
        f"/ip4/127.0.0.1/tcp/{port}": ("parse", "the peer id is missing"),
        f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{peer_id}": ("parse", "only direct TCP addresses"),
        f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}/p2p-circuit/p2p/{OTHER_ID}": ("parse", "only direct TCP addresses"),
        "garbage": ("parse", "not a multiaddress"),
        "": ("parse", ""),
        f"/ip4/127.0.0.1/tcp/99999/p2p/{peer_id}": ("parse", "not a multiaddress"),
        "x" * 5000: ("parse", "an address of 5000 characters"),
    }
    results = probe(list(cases), 4)
    assert [result["address"] for result in results] == list(cases)
    for result, (phase, words) in zip(results, cases.values(), strict=True):
        assert result["phase"] == phase, result
        assert result["ok"] is (words is None), result
        if words is not None:
            assert words in result["error"]
            assert "\n" not in result["error"]
            assert len(result["error"]) < 300
    good = results[0]
    assert good["error"] is None
    assert good["peer_id"] == peer_id
    assert good["agent"] == "p2pd/0.1"
    assert good["observed"].startswith("/ip4/127.0.0.1/tcp/")
    assert "/ipfs/ping/1.0.0" in good["protocols"]
    assert 0 < good["rtt_ms"] < 1000

    report = run_doctor([peer], data_dir=tmp_path, port=None, device="cpu", timeout=10)
    assert report.ok
    assert report.checks[-2].text == "1 of 1 bootstrap peers reachable"


def timed_probe(setup: str, addresses: list[str], timeout: float) -> tuple[list[dict[str, Any]], float]:
    """Return the probe's answers and the seconds it took, without the loading of its libraries, which depends on load.

    ``setup`` is a statement that may change the probe (``d``) before it runs.
    """
    start = "print('ready', flush=True); d.main()"
    script = f"import time; from stretto.node import doctor_probe as d; {setup}; {start}"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        began = time.monotonic()
        out, _ = child.communicate(json.dumps({"addresses": addresses, "timeout": timeout}))
        return json.loads(out), time.monotonic() - began


@pytest.mark.integration
def test_the_probe_ends_in_time_when_nothing_answers(black_hole: int, swallower: int) -> None:
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{OTHER_ID}" for port in (black_hole, black_hole, swallower)]
    answers, seconds = timed_probe("pass", addresses, 2)
    silent = "the port is open, but no libp2p peer answered within 2 s"
    dropped = "no answer within 2 s (machine off, wrong address, or a firewall drops the packets)"
    assert [a["error"] for a in answers] == [silent, silent, dropped]
    assert {a["phase"] for a in answers} == {"dial"}
    assert 1.9 < seconds < 4


@pytest.mark.integration
def test_the_watchdog_answers_for_a_library_that_hangs() -> None:
    answers, seconds = timed_probe("d.trio.run = lambda *_: time.sleep(60)", ["/ip4/127.0.0.1/tcp/1"], 0.5)
    assert [a["ok"] for a in answers] == [False]
    assert answers[0]["error"].startswith("no answer within 0.5 s")
    assert seconds < 2.5


@pytest.mark.integration
@pytest.mark.parametrize(
    ("request_text", "words"),
    [
        ("junk", "cannot be used"),
        ("[]", "must be a JSON object"),
        ('{"addresses": [1]}', "list of strings"),
        ('{"addresses": [], "timeout": -1}', "number of seconds"),
    ],
)
def test_a_bad_request_is_one_line(request_text: str, words: str) -> None:
    command = [sys.executable, "-m", "stretto.node.doctor_probe"]
    done = subprocess.run(command, input=request_text, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
