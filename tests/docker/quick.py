"""What can be checked within a minute, before an image is built, and in CI: do containers run, do the files parse?"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.docker.project import Project
from tests.docker.shell import Failed, need, run

COMBINATIONS = (
    ("compose.yaml",),
    ("compose.yaml", "compose.public.yaml"),
    ("compose.yaml", "compose.chaos.yaml"),
    ("compose.yaml", "compose.public.yaml", "compose.chaos.yaml"),
    ("volunteer.yaml",),
    ("volunteer.yaml", "volunteer.gpu.yaml"),
)
WANTED = {"PUBLIC_IP": "203.0.113.5", "INVITE": "stretto:x"}

PROGRAM = Path("/usr/bin/tini-static")
"""A program without libraries, which Debian's docker.io brings along: enough for an image of one file."""


def parse() -> list[str]:
    """docker-compose reads every combination of files; what a person must set is asked for by name."""
    for files in COMBINATIONS:
        Project("stretto-parse", files, WANTED).compose("config", "-q")
    for files, variable in ((COMBINATIONS[1], "PUBLIC_IP"), (COMBINATIONS[4], "INVITE")):
        told = Project("stretto-parse", files, {variable: ""}).compose("config", "-q", code=None)
        need(variable in told, f"without {variable} docker-compose says {told!r}")
    return [" + ".join(files) for files in COMBINATIONS]


def container() -> dict[str, Any]:
    """One container, with a network of its own, bounds on memory and CPU, and nothing writable."""
    if not PROGRAM.exists():
        raise Failed(f"{PROGRAM} is missing; on Debian the package tini has it")
    tag, network = f"stretto-quick:{os.getpid()}", f"stretto-quick-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="docker-test-") as folder:
        shutil.copy(PROGRAM, Path(folder) / "tini")
        archive = Path(folder) / "image.tar"
        run(["tar", "-C", folder, "-cf", str(archive), "tini"])
        run(["docker", "import", str(archive), tag])
    run(["docker", "network", "create", network])
    try:
        bounds = ["--memory", "64m", "--cpus", "0.5", "--read-only", "--user", "1001:1001", "--shm-size", "64k"]
        told = run(["docker", "run", "--rm", "--network", network, *bounds, tag, "/tini", "--version"])
        need("tini version" in told, f"a container that should print its version says {told!r}")
    finally:
        run(["docker", "network", "rm", network])
        run(["docker", "rmi", tag])
    return {"said": told.strip()}
