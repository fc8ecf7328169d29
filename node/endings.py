"""How a process ended, in words: what a person needs who finds it gone."""

import signal
from pathlib import Path

from stretto.node.resources import PROC


def peak_rss(pid: int, *, proc: Path = PROC) -> int:
    """The most bytes of RAM that process ``pid`` has held so far; 0 where the system does not tell."""
    try:
        text = (proc / str(pid) / "status").read_text()
    except OSError:
        return 0
    found = [line.split() for line in text.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(found[0][1]) if found else 0


def ending(status: int, peak: int = 0) -> str:
    """In words: the ``status`` that ``subprocess`` gives, below 0 for a signal, and the ``peak`` of bytes held."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        name = ""
    text = f"was killed by signal {-status}{name}"
    if -status == signal.SIGKILL:
        text += ", by hand or because memory ran out (dmesg tells)"
    return f"{text}; it held up to {peak / 1e6:,.0f} MB" if peak else text
