"""The image: built with a stand-in base where no image registry answers, measured, and searched for the build machine.

What must not be in it: settings of pip, package indexes, certificates that only this machine trusts.
"""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.docker.project import inspect
from tests.docker.shell import SLOW, need, run, say

ROOT = Path(__file__).resolve().parents[2]
BASE = "python:3.11-slim-bookworm"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OWN_AUTHORITIES = Path("/usr/local/share/ca-certificates")


def build(tag: str, line_tag: str, keep: Path) -> dict[str, Any]:
    """Build the image, and that of the slow line; what was built from what, and how large it is."""
    began = time.monotonic()
    pulled = _can_pull()
    if pulled:
        arguments: dict[str, str] = {}
    else:
        say(f"no image registry gives {BASE}: making stand-in bases with debootstrap")
        run([str(ROOT / "docker" / "base.sh"), str(keep)], limit=900)
        arguments = {"BASE": "stretto-base:clean", "BUILD_BASE": "stretto-base:build"}
    if not _reachable(f"{TORCH_INDEX}/torch/"):
        say(f"{TORCH_INDEX} does not answer: torch comes from where pip's settings say")
        arguments["TORCH_INDEX"] = ""
    based = time.monotonic()
    say("building the image: some minutes")
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    run(
        [
            "docker",
            "build",
            "--network",
            "host",
            *words,
            "-f",
            str(ROOT / "docker" / "node.Dockerfile"),
            "-t",
            tag,
            str(ROOT),
        ],
        limit=3600,
    )
    built = time.monotonic()
    line = ["--build-arg", f"BASE={arguments['BASE']}"] if "BASE" in arguments else []
    run(
        ["docker", "build", "--network", "host", *line, "-f", str(ROOT / "docker" / "line.Dockerfile"), "-t", line_tag,
         str(ROOT / "docker")],
        limit=900,
    )  # fmt: skip
    return {
        "base": BASE if pulled else "stand-in by debootstrap",
        "arguments": arguments,
        "base_seconds": round(based - began, 1),
        "build_seconds": round(built - based, 1),
        "line_bytes": inspect(line_tag)["Size"],
    }


def layers(tag: str) -> list[dict[str, str]]:
    """Size and origin of each layer that is not empty, the lowest first."""
    lines = run(["docker", "history", "--no-trunc", "--format", "{{json .}}", tag]).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [{"size": row["Size"], "by": row["CreatedBy"][:120]} for row in reversed(rows) if row["Size"] != "0B"]


def _can_pull() -> bool:
    return run(["docker", "pull", "-q", BASE], code=None, limit=600).strip().endswith(BASE)


def _reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20):
            return True
    except (urllib.error.URLError, OSError):
        return False


def search(tag: str) -> dict[str, Any]:
    """Look for the build machine in the image: its files, environment and history. Failed if something is there."""
    environment = inspect(tag)["Config"]["Env"]
    foreign = ("PIP_", "SSL_", "REQUESTS_", "CURL_", "http_", "https_", "HTTP_", "HTTPS_")
    bad = [line for line in environment if line.startswith(foreign)]
    need(not bad, f"the image's environment has settings of the build machine: {bad}")
    marks, history = sorted(_marks()), run(["docker", "history", "--no-trunc", tag])
    for mark in marks:
        need(mark not in history, f"the image's history names {mark}")
    # All text of the file system but Python's sources: what the dependencies ship knows nothing of this machine.
    words = [word for mark in marks for word in ("-e", mark)]
    grep = [
        "grep",
        "-rlIF",
        "--exclude=*.py",
        *(f"--exclude-dir={name}" for name in ("proc", "sys", "dev")),
        *words,
        "/",
    ]
    if marks:
        found = run([*_inside("0"), grep[0], tag, *grep[1:]], limit=SLOW, code=None).split()
        need(not found, f"files of the image hold settings of the build machine: {found}")
    places = ["/etc/pip.conf", "/etc/xdg/pip", "/root/.config", "/root/.cache", "/opt/wheels", "/opt/pypi", "/src"]
    script = f"for f in {' '.join(places)}; do test ! -e $f || echo $f; done"
    there = run([*_inside("0"), "sh", tag, "-c", script], limit=SLOW).split()
    need(not there, f"files of the build machine are in the image: {there}")
    return {"looked_for": len(marks), "found": 0}


def _inside(user: str) -> list[str]:
    return ["docker", "run", "--rm", "--network", "none", "--user", user, "--entrypoint"]


def _marks() -> set[str]:
    """Texts that only this machine's settings have: package indexes, folders of wheels, certificate authorities."""
    settings = [value for name, value in os.environ.items() if name.startswith("PIP_") and "/" in value]
    for file in ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"):
        path = Path(file).expanduser()
        if path.exists():
            settings += [word for word in path.read_text(encoding="utf-8").split() if "/" in word]
    # Every image has certificates in the standard place; which ones is asked with their own text.
    marks = {word.removeprefix("file://") for word in settings if not word.startswith("/etc/ssl/")}
    for certificate in OWN_AUTHORITIES.glob("*.crt"):
        lines = certificate.read_text(encoding="utf-8").splitlines()
        marks.add(lines[len(lines) // 2])
    return marks
