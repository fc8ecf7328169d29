"""What the test needs of the machine: packages of Debian, and a docker daemon.

A daemon that runs already is used as it is. Where none runs, one is started by hand, with all that it keeps in a
folder of its own, in networks that this machine does not use yet, and is ended again. Niceness does not tame it: all
containers together weigh as much as one process of niceness 0, whatever theirs is (the control group's cpu.shares).
"""

import contextlib
import ipaddress
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docker.shell import Failed, run, say

PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}
"""Program -> the package of Debian that has it. iptables comes with docker.io where recommended packages do."""

BRIDGE = Path("/sys/class/net/docker0")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
START = 90.0

ATTEMPTS: tuple[tuple[str, ...], ...] = ((), ("--storage-driver=vfs",), ("--storage-driver=vfs", "--iptables=false"))
"""More and more modest: kernels of sandboxes may lack overlayfs, or netfilter."""


def install() -> list[str]:
    """Install what is missing with apt; the packages' names. Failed if it cannot be installed."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if missing and shutil.which("iptables") is None:
        missing.add("iptables")
    if not missing:
        return []
    names = sorted(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Failed(
            f"as root, on Debian, this is missing: apt-get install -y --no-install-recommends {' '.join(names)}"
        )
    say(f"installing {', '.join(names)}")
    # RUNLEVEL=1: no service is started by the packages; the test starts a daemon of its own.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    run(["apt-get", "update", "-qq"], limit=300, env=env)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names], limit=600, env=env)
    return names


class CannotStart(Failed):
    """Docker is installed, and its daemon does not run on this machine."""


@dataclass(frozen=True)
class Daemon:
    """A docker daemon that answers. ``flags`` are those beyond the usual ones, if it was started here."""

    started: bool
    flags: tuple[str, ...]
    version: str
    storage: str


@contextlib.contextmanager
def daemon() -> Iterator[Daemon]:
    """A docker daemon for the time of the block; DOCKER_HOST points to it. Failed if none can be started."""
    os.environ["DOCKER_BUILDKIT"] = "0"  # Debian's docker.io has no buildx
    os.environ["COMPOSE_DOCKER_CLI_BUILD"] = "0"
    os.environ["COMPOSE_HTTP_TIMEOUT"] = "600"  # version 1 gives up on a slow daemon after a minute
    if _answers():
        say("using the docker daemon that runs here")
        yield Daemon(False, (), *_about())
        return
    if os.geteuid() != 0:
        raise Failed("no docker daemon answers, and starting one needs root")
    folder = Path(tempfile.mkdtemp(prefix="docker-test-"))
    before, network = os.environ.get("DOCKER_HOST"), Network.now()
    try:
        process, flags = _start(folder)
        try:
            yield Daemon(True, flags, *_about())
        finally:
            _stop(process)
    finally:
        network.restore()
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Network:
    """What dockerd changes in this machine's network and leaves behind: a bridge, rules, forwarding."""

    bridge: bool
    rules: str
    forwarding: str

    @classmethod
    def now(cls) -> "Network":
        """As it is before dockerd starts."""
        return cls(BRIDGE.exists(), run(["iptables-save"]), FORWARDING.read_text(encoding="ascii"))

    def restore(self) -> None:
        """Take back what was changed since then."""
        if not self.bridge and BRIDGE.exists():
            run(["ip", "link", "delete", BRIDGE.name])
        if run(["iptables-save"]) != self.rules:
            # Tables that nobody used before are in no save file: they are emptied first.
            for table in ("filter", "nat"):
                run(["iptables", "-t", table, "-F"])
                run(["iptables", "-t", table, "-X"])
            run(["iptables", "-P", "FORWARD", "ACCEPT"])
            subprocess.run(["iptables-restore"], input=self.rules.encode(), check=True)
        if FORWARDING.read_text(encoding="ascii") != self.forwarding:
            FORWARDING.write_text(self.forwarding, encoding="ascii")


def _start(folder: Path) -> tuple["subprocess.Popen[bytes]", tuple[str, ...]]:
    bridge, pool = free_networks(used_networks())
    os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    why = ""
    for number, flags in enumerate(ATTEMPTS):
        log = folder / f"dockerd-{number}.log"
        command = [
            "dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid",
            f"--host=unix://{folder}/docker.sock", f"--bip={bridge}", f"--default-address-pool=base={pool},size=24",
            *flags,
        ]  # fmt: skip
        say(f"starting {' '.join(command)}")
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        end = time.monotonic() + START
        while process.poll() is None and time.monotonic() < end:
            if _answers():
                return process, flags
            time.sleep(0.5)
        _stop(process)
        why = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        say(f"dockerd {' '.join(flags)} does not come up:\n{why}")
    raise CannotStart(f"dockerd is installed but cannot be started on this machine:\n{why}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _unmount(folder: Path) -> None:
    """What a daemon that was killed left mounted would keep its folder from being removed."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), reverse=True):
        run(["umount", "-l", mount], code=None)


def _answers() -> bool:
    with contextlib.suppress(Failed):
        run(["docker", "version", "--format", "{{.Server.Version}}"], limit=20)
        return True
    return False


def _about() -> tuple[str, str]:
    found = json.loads(run(["docker", "info", "--format", "{{json .}}"]).splitlines()[-1])
    return found["ServerVersion"], found["Driver"]


def used_networks() -> list[ipaddress.IPv4Network]:
    """The IPv4 networks that this machine has an address in, or a route to."""
    found = []
    for line in run(["ip", "-4", "-o", "addr"]).splitlines() + run(["ip", "-4", "route"]).splitlines():
        for word in line.split():
            if "/" in word and word[0].isdigit():
                found.append(ipaddress.IPv4Network(word, strict=False))
    return found


def free_networks(used: Sequence[ipaddress.IPv4Network]) -> tuple[str, str]:
    """An address for docker's bridge and a pool for the networks of compose, apart from the networks in use."""
    for number in range(29, 16, -1):
        block = ipaddress.IPv4Network(f"172.{number}.0.0/16")
        if not any(block.overlaps(other) for other in used):
            return f"172.{number}.0.1/24", f"172.{number}.128.0/17"
    raise Failed("172.17.0.0 to 172.29.255.255 are all in use on this machine; docker has no room")
