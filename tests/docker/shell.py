"""Commands of other programs, with a limit on their time and an error that shows what they printed."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE = float(os.environ.get("DOCKER_TEST_PATIENCE", "1"))
"""All limits of time are multiplied by this, for machines that do much else."""

SLOW = 900.0
"""Seconds for what takes half a minute on an idle machine: a busy one needs minutes to load torch."""


class Failed(Exception):
    """A step or a check failed; the message says which, and shows what was printed."""


def say(text: str) -> None:
    """A line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run(
    command: Sequence[str], *, limit: float = 120.0, env: Mapping[str, str] | None = None, code: int | None = 0
) -> str:
    """Run a command; its standard output and error as one text. Failed unless it ends with ``code`` (None: any)."""
    try:
        done = subprocess.run(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit * PATIENCE,
            env=env,
            check=False,
        )
    except FileNotFoundError:
        raise Failed(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not within {limit * PATIENCE:.0f} s: {' '.join(command)}\n{_end(error.stdout)}") from None
    text = done.stdout.decode("utf-8", "replace")
    if code is not None and done.returncode != code:
        raise Failed(f"ended with {done.returncode}, not {code}: {' '.join(command)}\n{_end(done.stdout)}")
    return text


def until(condition: Callable[[], T], what: str, *, limit: float, logs: Callable[[], str] = str) -> T:
    """The first true value of ``condition()``, asked every second. After ``limit`` seconds Failed, with ``logs()``."""
    limit *= PATIENCE
    began, told = time.monotonic(), time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now - began > limit:
            raise Failed(f"{what}: not within {limit:.0f} s\n{logs()}")
        if now - told > 60:
            say(f"still waiting after {now - began:.0f} s: {what}")
            told = now
        time.sleep(1.0)


def need(condition: bool, text: str) -> None:
    """Failed with ``text`` unless ``condition`` holds."""
    if not condition:
        raise Failed(text)


def _end(output: bytes | None) -> str:
    return "\n".join((output or b"").decode("utf-8", "replace").splitlines()[-40:])
