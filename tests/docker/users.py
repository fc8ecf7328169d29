"""The image as any user, with every kind of volume, without a network; and what it refuses, in words."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.docker.project import inspect, status, stop
from tests.docker.shell import PATIENCE, SLOW, Failed, need, run, until

ALONE = ("docker", "run", "--rm", "--network", "none")

SERVE = ("bootstrap", "/config/run.toml")


def new_run(tag: str, folder: Path) -> None:
    """Write a run.toml in ``folder``, with the image: its Python's sources are the data."""
    folder.chmod(0o755)
    run([*ALONE, "--user", "0", "-v", f"{folder}:/config", tag, "new", "/config/run.toml"], limit=SLOW)


def first_words(tag: str) -> dict[str, Any]:
    """`--version` without a network, as any uid, with nothing writable; `doctor` finds nothing missing."""
    told = run([*ALONE, "--read-only", "--user", "1001:1001", tag, "--version"], limit=SLOW)
    need(told.startswith("stretto "), f"--version says {told!r}")
    lines = run([*ALONE, tag, "doctor", "--device", "cpu", "--json"], limit=SLOW, code=None).splitlines()
    checks = json.loads(lines[-1])["checks"]
    failed = [check for check in checks if check["status"] == "fail"]
    need(not failed, f"doctor finds in the image: {failed}")
    # fastecdsa is compiled, and wants a library that the final image must have.
    run([*ALONE, "--entrypoint", "python3", tag, "-c", "import fastecdsa.curve, stretto.protocol._fp4"], limit=SLOW)
    return {"version": told.strip(), "doctor": {check["name"]: check["status"] for check in checks}}


def refusals(tag: str, config: Path) -> dict[str, str]:
    """What cannot work is refused with a paragraph that says what to do (cases R1 and R3)."""
    folder = Path(f"/tmp/docker-test-root-{os.getpid()}")
    folder.mkdir(mode=0o755)
    serve = ["-v", f"{config}:/config:ro", tag, *SERVE]
    cases: Mapping[str, tuple[list[str], tuple[str, ...]]] = {
        "announce port 0": (
            ["-e", "STRETTO_ANNOUNCE=/ip4/1.2.3.4/tcp/0", tag, "join"],
            ("/ip4/1.2.3.4/tcp/0", "a port that is not 0"),
        ),
        "announce any address": (
            ["-e", "STRETTO_ANNOUNCE=/ip4/0.0.0.0/tcp/4001", tag, "join"],
            ("cannot be dialled", "0.0.0.0 means any address"),
        ),
        "no invite": ([tag, "join"], ("no invite", "STRETTO_INVITE")),
        "unknown variable": (["-e", "STRETTO_PROT=1", tag, "join"], ("STRETTO_PROT is unknown", "STRETTO_PORT")),
        "folder of another user": (
            ["-v", f"{folder}:/data", "--user", "1001:1001", *serve],
            ("data dir /data", "belongs to uid 0", "by uid 1001", "chown -R 1001:1001 /data"),
        ),
        "read-only volume": (["-v", f"{folder}:/data:ro", *serve], ("data dir /data", "mounted read-only")),
    }
    said = {}
    try:
        for name, (words, wanted) in cases.items():
            said[name] = " ".join(run([*ALONE, *words], code=1, limit=SLOW).split())
            for part in wanted:
                need(part in said[name], f"{name}: {part!r} is not in {said[name]!r}")
    finally:
        shutil.rmtree(folder)
    return said


def users(tag: str, config: Path) -> dict[str, Any]:
    """A bootstrap peer with several kinds of volumes, as several users. It ends by SIGTERM, as process 1 (case R3)."""
    mine = Path(f"/tmp/docker-test-1001-{os.getpid()}")
    mine.mkdir(mode=0o700)
    os.chown(mine, 1001, 1001)
    volumes = [f"stretto-test-{os.getpid()}-{number}" for number in range(3)]
    cases: Mapping[str, list[str]] = {
        "image's user, fresh volume": ["-v", f"{volumes[0]}:/data"],
        "uid 1001, fresh volume, read-only root": [
            "--user", "1001:1001", "--read-only", "-v", f"{volumes[1]}:/data"
        ],
        "uid 1001, its own folder": ["--user", "1001:1001", "-v", f"{mine}:/data"],
        "root, fresh volume": ["--user", "0", "-v", f"{volumes[2]}:/data"],
    }  # fmt: skip
    try:
        rows = {
            name: _serve([*flags, "-v", f"{config}:/config:ro", tag, *SERVE], name) for name, flags in cases.items()
        }
        owners = {path.name: path.stat().st_uid for path in mine.iterdir()}
        need(set(owners.values()) == {1001}, f"files of uid 1001 belong to {owners}")
    finally:
        shutil.rmtree(mine)
        run(["docker", "volume", "rm", "-f", *volumes], code=None)
    return rows


def _serve(words: list[str], name: str) -> dict[str, Any]:
    """Start a bootstrap peer, wait until it serves, ask it to end."""
    container = run(["docker", "run", "-d", "--network", "none", *words]).split()[-1]

    def logs() -> str:
        return run(["docker", "logs", container], code=None)

    def serving() -> dict[str, Any] | None:
        if not inspect(container)["State"]["Running"]:
            raise Failed(f"{name}: the container has ended\n{logs()}")
        found = status(container)
        return found if found.get("state") == "serving" else None

    try:
        found = until(serving, f"{name}: serving", limit=SLOW, logs=logs) or {}
        need(found["pid"] == 1, f"{name}: the program is process {found['pid']}, not 1")
        seconds, code = stop(container, grace=int(30 * PATIENCE))
        need(code == 0, f"{name}: ended with {code} after SIGTERM\n{logs()}")
        need(seconds < 10 * PATIENCE, f"{name}: took {seconds} s to end after SIGTERM")
        return {"stop_seconds": seconds, "exit_code": code}
    finally:
        run(["docker", "rm", "-f", container])
