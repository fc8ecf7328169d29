"""Can a node run on this machine, and does the swarm answer? One report, before anything is downloaded or started.

The machine's own checks are in `stretto.node.doctor_machine`. The bootstrap peers are probed by a child process,
`stretto.node.doctor_probe`, because libp2p and hivemind cannot be imported together. Nothing here prints: the command
line prints `render`, or `DoctorReport.to_json` for a machine.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.node.doctor_machine import (
    Check,
    Status,
    available_devices,
    check_daemon,
    check_device,
    check_disk,
    check_open_files,
    check_platform,
    check_port,
    check_versions,
    daemon_path,
)
from stretto.node.swarm.time_votes import Sample, compare_walls, walls_in_words
from stretto.protocol.errors import ConfigError

MAX_BOOTSTRAP_PEERS = 64
START_SECONDS = 60.0  # to start Python and import libp2p: 3 s on an idle machine, many times that on a busy one
CLEANUP_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """All checks, in the order in which a person should read them."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True where nothing failed; warnings are allowed."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> str:
        """Return one JSON object: ``ok`` and ``checks``, each with ``name``, ``status`` and ``text``."""
        return json.dumps({"ok": self.ok, "checks": [asdict(check) for check in self.checks]})


def run_doctor(
    addresses: Sequence[str],
    *,
    data_dir: Path,
    port: int | None,
    device: str,
    timeout: float,
    daemon: Path | None = None,
    run: bytes | None = None,
) -> DoctorReport:
    """Check the machine and every bootstrap address.

    ``addresses`` are multiaddresses with a peer id (none: only the machine is checked), ``timeout`` is in seconds per
    address (all at once), ``daemon`` replaces the libp2p daemon that comes with hivemind, ``run`` is the run
    whose peers are asked for the time. What is wrong with the
    machine or the swarm is in the report; ConfigError is raised only for arguments that cannot be used.
    """
    if not 0 < timeout <= 300:
        raise ConfigError(f"A time limit of {timeout:g} s cannot be used. Give a number of seconds up to 300.")
    if len(addresses) > MAX_BOOTSTRAP_PEERS:
        raise ConfigError(f"{len(addresses)} bootstrap addresses are too many. Give at most {MAX_BOOTSTRAP_PEERS}.")
    checks = [check_platform(), check_daemon(daemon or daemon_path()), check_versions(), _device(device)]
    checks += [check_disk(data_dir), check_open_files(), check_port(port)]
    if addresses:
        checks += _check_bootstrap(addresses, timeout, run)
    return DoctorReport(checks=tuple(checks))


def _device(device: str) -> Check:
    try:
        devices = available_devices()
    except ImportError as error:
        return Check(name="device", status="fail", text=f"torch cannot be imported: {error}")
    return check_device(device, devices)


def _check_bootstrap(addresses: Sequence[str], timeout: float, run: bytes | None) -> list[Check]:
    """Return one line for all bootstrap peers together, one for each, and one for the clock if a run is given."""
    try:
        answers = probe(addresses, timeout) if run is None else probe(addresses, timeout, run)
    except ProbeError as error:
        return [Check(name="bootstrap", status="fail", text=str(error))]
    reached = sum(answer["ok"] for answer in answers)
    status: Status = "ok" if reached == len(answers) else "warn" if reached else "fail"
    text = f"{reached} of {len(answers)} bootstrap peers reachable"
    if reached < len(answers):
        reasons = dict.fromkeys(answer["error"] for answer in answers if not answer["ok"])
        text += f" ({'; '.join(reasons)})"
    checks = [Check(name="bootstrap", status=status, text=text), *(_one_peer(answer, status) for answer in answers)]
    return checks + ([check_clock(answers)] if run is not None and reached else [])


def check_clock(answers: Sequence[Mapping[str, Any]]) -> Check:
    """Compare this machine's clock with those of the peers that told the time; ``answers`` are those of `probe`."""
    samples = {
        answer["peer_id"]: Sample(
            peer=str(answer["peer_id"]).encode(),
            offset=answer["time_offset"],
            error=answer["time_error"],
            correction=answer["time_correction"],
        )
        for answer in answers
        if answer["time_offset"] is not None
    }
    if not samples:
        text = "no peer told the time, so this machine's clock could not be compared"
        return Check(name="clock", status="warn", text=text)
    walls = compare_walls(list(samples.values()), correction=0.0)
    odd = ", ".join(peer.decode()[-8:] for peer, _ in walls.odd)
    warning = walls_in_words(walls, odd)
    if warning is not None:
        return Check(name="clock", status="warn", text=warning.removeprefix("WARNING "))
    text = f"this machine's clock agrees with {walls.asked} of {walls.asked} peers ({walls.ahead:+.3f} s)"
    return Check(name="clock", status="ok", text=text)


def _one_peer(answer: dict[str, Any], overall: Status) -> Check:
    if answer["ok"]:
        seen = f", sees this machine as {answer['observed']}" if answer["observed"] else ""
        text = f"{answer['address']} answers in {answer['rtt_ms']:.1f} ms ({answer['agent']}{seen})"
        return Check(name="bootstrap peer", status="ok", text=text)
    # One dead peer is no obstacle while another one answers.
    text = f"{answer['address']} failed in phase {answer['phase']}: {answer['error']}"
    return Check(name="bootstrap peer", status="fail" if overall == "fail" else "warn", text=text)


class ProbeError(Exception):
    """The probe process itself did not work; the text is one line."""


def probe(addresses: Sequence[str], timeout: float, run: bytes | None = None) -> list[dict[str, Any]]:
    """Probe libp2p addresses in a child process and return its answers, one per address and in their order.

    ``timeout`` is in seconds per address, all are probed at once, and asked for the time of ``run``. The keys are
    those of `stretto.node.doctor_probe.ProbeResult`. Raises ProbeError where the child fails.
    """
    request = json.dumps({"addresses": list(addresses), "timeout": timeout, "run": run.hex() if run else None})
    # "python -m" puts the working folder first on the path: the folder that holds the stretto package, not whatever
    # folder the person happens to be in.
    root = Path(__file__).absolute().parents[2]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stretto.node.doctor_probe"],
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout + CLEANUP_SECONDS + START_SECONDS,
            cwd=root,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"the probe process did not end within {error.timeout:g} s and was stopped") from error
    except OSError as error:
        raise ProbeError(f"the probe process could not be started: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ProbeError(f"the probe process failed with code {done.returncode}: {last[:300]}")
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError as error:
        raise ProbeError(f"the probe process gave no answer that can be read: {done.stdout[:200]!r}") from error
    return answers


def render(report: DoctorReport) -> str:
    """Return the report as a plain text table: status, name, text; long texts are left to the terminal to wrap."""
    width = max(len(check.name) for check in report.checks)
    shown = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    lines = [f"{shown[check.status]}  {check.name:<{width}}  {check.text}" for check in report.checks]
    failed = sum(check.status == "fail" for check in report.checks)
    warned = sum(check.status == "warn" for check in report.checks)
    lines.append(f"{failed} failed, {warned} with a warning, {len(report.checks) - failed - warned} in order")
    return "\n".join(lines)
