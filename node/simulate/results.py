"""The results file: one JSON object per line, one line per finished run, so that an interrupted command can go on.

A line is written whole, then fsynced. What a kill left of a line is cut off when the file is opened again.
"""

import json
import os
from pathlib import Path
from typing import Any

from stretto.protocol.errors import ConfigError

Result = dict[str, Any]


class Results:
    """All finished runs of a folder, by their keys."""

    def __init__(self, path: Path) -> None:
        """Read what is there; ConfigError if it cannot be read, or holds something else."""
        self.path = path
        self.by_key: dict[str, Result] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
        except OSError as error:
            raise ConfigError(f"the results file {path} cannot be used: {error.strerror or error}") from None
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                result = json.loads(line)
                self.by_key[result["key"]] = result
            except (ValueError, TypeError, KeyError):
                raise ConfigError(
                    f"line {number} of {path} is not a result of stretto simulate; remove it, or choose another "
                    "folder with --out"
                ) from None

    def add(self, result: Result) -> None:
        """Append a finished run."""
        line = json.dumps(result, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"the results file {self.path} cannot be written: {error.strerror or error}") from None
        self.by_key[result["key"]] = result
