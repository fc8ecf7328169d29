"""What the doctor looks at on this machine: platform, libp2p daemon, versions, device, disk, open files, port.

Each function answers one question with a `Check`: a name, a status and one line for a person. ``fail`` means that a
node cannot run here as asked, ``warn`` that it can, with a drawback. hivemind is found but never imported, which would
take seconds and start threads; torch is imported only to list the devices.
"""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stretto.node.ports import probe_port
from stretto.protocol.errors import ConfigError

Status = Literal["ok", "warn", "fail"]

# Machine names as platform.machine() spells them, and the CPU field of the two executable formats: e_machine at byte
# 18 of an ELF file (2 bytes), cputype at byte 4 of a Mach-O file (4 bytes), both little-endian on these machines.
_CPUS = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "arm64", "aarch64": "arm64"}
_ELF = {0x3E: "x86_64", 0xB7: "arm64"}
_MACH_O = {0x01000007: "x86_64", 0x0100000C: "arm64"}

MIN_DISK_BYTES = 1 << 30
GOOD_DISK_BYTES = 10 << 30
MIN_OPEN_FILES = 256
GOOD_OPEN_FILES = 1024
DAEMON_SECONDS = 10.0  # "p2pd -help" takes some 10 ms


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    text: str


def check_platform(system: str | None = None, machine: str | None = None) -> Check:
    """Check that the daemon and torch exist for this system and CPU. The arguments replace what `platform` says."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system in ("Linux", "Darwin") and machine.lower() in _CPUS:
        return Check(name="platform", status="ok", text=f"{system} on {machine} is supported")
    text = f"{system} on {machine} is not supported; Stretto runs on Linux and macOS, on x86_64 and arm64"
    return Check(name="platform", status="fail", text=text)


def daemon_path() -> Path | None:
    """Return where the installed hivemind keeps its libp2p daemon, or None where hivemind is not installed."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"


def check_daemon(path: Path | None) -> Check:
    """Check that the libp2p daemon is there, is a program for this machine, and starts."""
    cure = "reinstall it: pip install --force-reinstall --no-deps hivemind"
    if path is None:
        why = "hivemind is not installed, and the libp2p daemon comes with it; run: pip install stretto-swarm"
    elif not path.is_file():
        why = f"the libp2p daemon is missing at {path}; {cure}"
    elif not os.access(path, os.X_OK):
        why = f"the libp2p daemon {path} is not executable; run: chmod +x {path}"
    else:
        why = _wrong_kind(path, platform.system(), platform.machine()) or _does_not_start(path)
        why = f"the libp2p daemon {path} {why}; {cure}" if why else ""
    if why:
        return Check(name="p2pd", status="fail", text=why)
    return Check(name="p2pd", status="ok", text=f"the libp2p daemon starts ({path})")


def _wrong_kind(path: Path, system: str, machine: str) -> str:
    """Return what is wrong with the file's format, or nothing."""
    with path.open("rb") as file:
        head = file.read(20)
    if head[:2] == b"#!":  # a wrapper script: whether it works is for the start to show
        return ""
    if head[:4] == b"\x7fELF":
        kind, cpu = "Linux", _ELF.get(int.from_bytes(head[18:20], "little"), "another CPU")
    elif head[:4] == b"\xcf\xfa\xed\xfe":
        kind, cpu = "Darwin", _MACH_O.get(int.from_bytes(head[4:8], "little"), "another CPU")
    elif head[:4] == b"\xca\xfe\xba\xbe":  # a universal binary, for both CPUs
        kind, cpu = "Darwin", _CPUS.get(machine.lower(), machine)
    else:
        return "is not a program (neither ELF nor Mach-O)"
    if (kind, cpu) != (system, _CPUS.get(machine.lower())):
        return f"was built for {kind} on {cpu}, this is {system} on {machine}"
    return ""


def _does_not_start(path: Path) -> str:
    """Start the daemon only to print its help. Return what went wrong, with its last words, or nothing."""
    try:
        done = subprocess.run(
            [path, "-help"], stdin=subprocess.DEVNULL, capture_output=True, timeout=DAEMON_SECONDS, check=False
        )
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not answer within {DAEMON_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    end = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    lines = done.stderr[-1000:].decode("utf-8", "replace").strip().splitlines()[-3:]
    words = " / ".join("".join(c for c in line if c.isprintable()) for line in lines)
    return f"ended at once with {end} and said: {words or 'nothing'}"


def check_versions() -> Check:
    """Report the versions of Python, torch and hivemind, without importing the two."""
    found, missing = [f"Python {platform.python_version()}"], []
    for name in ("torch", "hivemind"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        text = f"{' and '.join(missing)} not installed; run: pip install stretto-swarm"
        return Check(name="versions", status="fail", text=text)
    return Check(name="versions", status="ok", text=", ".join(found))


def available_devices() -> list[str]:
    """Return the torch devices of this machine, best first; ``cpu`` is always among them."""
    import torch  # slow to import, and a doctor without it can still report the rest

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        devices.append("mps")
    return [*devices, "cpu"]


def check_device(device: str, devices: list[str]) -> Check:
    """Check that ``device`` is one of ``devices``. Only ``auto`` may end on the CPU unasked, and says so."""
    listed = ", ".join(devices)
    if device == "auto":
        if devices[0] == "cpu":
            text = "auto takes the cpu: torch finds no accelerator here, training will be slow"
            return Check(name="device", status="warn", text=text)
        return Check(name="device", status="ok", text=f"auto takes {devices[0]} (this machine has: {listed})")
    if device in devices or (device == "cuda" and "cuda:0" in devices):
        return Check(name="device", status="ok", text=f"{device} (this machine has: {listed})")
    return Check(name="device", status="fail", text=f"there is no device {device!r}; this machine has: {listed}")


def check_disk(data_dir: Path) -> Check:
    """Check that the data folder, or the nearest folder above it, is writable and has room."""
    folder = data_dir.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return Check(
            name="disk", status="fail", text=f"{folder} is a file; the data folder {data_dir} cannot be there"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        text = (
            f"{folder} belongs to user id {folder.stat().st_uid} and is not writable for this process "
            f"(user id {os.geteuid()}); chown it, or choose another data folder"
        )
        return Check(name="disk", status="fail", text=text)
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < MIN_DISK_BYTES:
        return Check(name="disk", status="fail", text=f"{text}; at least {MIN_DISK_BYTES >> 30} GiB is needed")
    if free < GOOD_DISK_BYTES:
        text = f"{text}; a large model's checkpoints may not fit, {GOOD_DISK_BYTES >> 30} GiB are comfortable"
        return Check(name="disk", status="warn", text=text)
    return Check(name="disk", status="ok", text=text)


def check_open_files(soft: int | None = None) -> Check:
    """Check the limit on open files, RLIMIT_NOFILE: every peer costs a socket. ``soft`` replaces the system's."""
    if soft is None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return Check(name="open files", status="ok", text="no limit")
    if soft >= GOOD_OPEN_FILES:
        return Check(name="open files", status="ok", text=f"{soft} allowed")
    text = f"only {soft} allowed, every peer costs one; run: ulimit -n {GOOD_OPEN_FILES}"
    return Check(name="open files", status="fail" if soft < MIN_OPEN_FILES else "warn", text=text)


def check_port(port: int | None) -> Check:
    """Check that the port to listen on is free. None and 0 mean any free one."""
    if not port:
        return Check(name="port", status="ok", text="any free port")
    try:
        probe_port("0.0.0.0", port)
    except ConfigError as error:
        return Check(name="port", status="fail", text=str(error))
    return Check(name="port", status="ok", text=f"{port} is free")
