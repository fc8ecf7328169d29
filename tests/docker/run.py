"""``python -m tests.docker.run``: the images and compose files of docker/, for real. `make docker-test`.

Installs what it needs from Debian, starts a docker daemon where none runs, builds the image, lets swarms run in it,
and removes all that it made, also after a failure. One JSON object goes to ``--report``; the exit code is 1 if a check
failed or this machine cannot do it, never 0 with something left out.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.docker import image, quick, scenes, users
from tests.docker.machine import CannotStart, daemon, install
from tests.docker.project import inspect
from tests.docker.shell import PATIENCE, Failed, say

TAG, LINE_TAG = "stretto:docker-test", "stretto-line:docker-test"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("docker-report.json"))
    parser.add_argument("--only", choices=("quick", "image", *scenes.SCENES), action="append", default=[])
    parser.add_argument("--image", help="an image that is there already, instead of building one")
    parser.add_argument("--keep", type=Path, help="folder for the unpacked Debian, to be quick the next time")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    report: dict[str, Any] = {"passed": False, "only": options.only, "patience": PATIENCE}
    began = time.monotonic()
    try:
        report["installed"] = install()
        with daemon() as found, tempfile.TemporaryDirectory(prefix="docker-test-") as folder:
            report["daemon"] = vars(found)
            check(report, options.only, options.keep or Path(folder), options.image)
        report["passed"] = True
    except Failed as error:
        report |= {"error": str(error), "dockerd_cannot_start": isinstance(error, CannotStart)}
        say(f"FAILED: {error}")
    report["wall_seconds"] = round(time.monotonic() - began, 1)
    options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(f"{'passed' if report['passed'] else 'FAILED'} in {report['wall_seconds']:.0f} s; report in {options.report}")
    return 0 if report["passed"] else 1


def check(report: dict[str, Any], only: list[str], keep: Path, given: str | None) -> None:
    """All checks, or those named in ``only``; each adds to ``report``."""
    report["parsed"] = quick.parse()
    report["container"] = quick.container()
    say("containers run, and docker-compose reads the files")
    if only == ["quick"]:
        return
    tag = given or TAG
    report["image"] = {"given": given} if given else image.build(TAG, LINE_TAG, keep)
    report["image"] |= {"bytes": inspect(tag)["Size"], "layers": image.layers(tag)}
    say(f"the image has {report['image']['bytes'] / 1e6:.0f} MB")
    if not only or "image" in only:
        report["image"]["search"] = image.search(tag)
        report["image"]["first_words"] = users.first_words(tag)
        with tempfile.TemporaryDirectory(prefix="docker-test-") as folder:
            users.new_run(tag, Path(folder))
            report["refusals"] = users.refusals(tag, Path(folder))
            report["users"] = users.users(tag, Path(folder))
        say("the image runs as any user and holds nothing of this machine")
    for name, scene in scenes.SCENES.items():
        if not only or name in only:
            report[name] = scene({"IMAGE": tag, "LINE_IMAGE": LINE_TAG})


if __name__ == "__main__":
    sys.exit(main())
