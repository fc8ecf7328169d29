"""What a node says to the person in front of it: lines with a time, never silence, never the same line in a flood."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

REPEATS = 3
"""An identical message is printed at most this often in a row; after that only its count is."""


class Console:
    """Prints lines.

    ``status`` makes the line that is printed regularly; at first that is the last message again, since a long phase
    says nothing of its own.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._lock = threading.Lock()
        self._last, self._count = "", 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.status: Callable[[], str] = self._still

    def _still(self) -> str:
        return self._last if self._last.startswith("still: ") else f"still: {self._last}"

    def say(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            if text == self._last:
                self._count += 1
                if self._count > REPEATS and self._count & (self._count - 1):
                    return
                suffix = f" (said {self._count} times)" if self._count > REPEATS else ""
            else:
                self._last, self._count, suffix = text, 1, ""
            print(f"{time.strftime('%H:%M:%S')} {text}{suffix}", file=self._stream, flush=True)

    def start_status(self, seconds: float) -> None:
        """Print ``status()`` every ``seconds`` until ``close``."""

        def run() -> None:
            while not self._stop.wait(seconds):
                self.say(self.status())

        self._thread = threading.Thread(target=run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the status lines."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
