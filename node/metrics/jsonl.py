"""Metrics as JSON lines: one object per event, with the time, in a file that other programs can follow."""

import json
import threading
import time
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends events to ``path``. Any thread may write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, event: dict[str, Any]) -> None:
        """One line: ``event`` and the wall-clock time in seconds."""
        line = json.dumps({"time": round(time.time(), 3), **event}, separators=(",", ":"))
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._file.close()
