"""The journal of a node's place in the data, on disk: from it a killed node goes on where it was last heard of.

``data.json`` in the run's folder is replaced whole before each publication of the roster record::

    {"windows": 234112, "unit_sequences": 512, "claims": [[unit, first, position, in_use], ...],
     "done_below": 41, "done_mask": "0a", "samples": 20992, "clean": false, "counted": 17}

So what the others know of this node's positions is never ahead of the file. The file is not synced to the disk: after
a power failure it may be missing or old, and then samples are read twice. What is read from it is checked; a file that
cannot be used is ignored, with one line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.node.swarm.folders import write_whole
from stretto.protocol.errors import ConfigError
from stretto.protocol.unitbook import Bookmark
from stretto.protocol.units import MASK_BYTES, MAX_CLAIMS, Claim, UnitCut

MAX_FILE = 16 * 1024
"""Bytes; more is not a file of ours."""


class Journal:
    """The file at ``path`` for a corpus cut in this way. ``tell`` takes lines for people."""

    def __init__(self, path: Path, cut: UnitCut, tell: Callable[[str], None]) -> None:
        self._path, self._cut, self._tell = path, cut, tell
        self._failed, self._written = "", ""

    def read(self) -> Bookmark | None:
        """What was written last; None if there is nothing that can be used."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise ValueError(f"it is longer than {MAX_FILE} bytes")
            return _parse(json.loads(data), self._cut)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            self._tell(f"WARNING {self._path} cannot be used and is ignored, some data may be read twice: {why}")
            return None

    def write(self, bookmark: Bookmark) -> None:
        """Replace the file if there is news. A failure is told once and does not stop the node."""
        content = {
            "windows": self._cut.windows,
            "unit_sequences": self._cut.length,
            "claims": [[claim.unit, claim.first, claim.position, claim.held] for claim in bookmark.claims],
            "done_below": bookmark.done_below,
            "done_mask": bookmark.done_mask.hex(),
            "samples": bookmark.samples,
            "clean": bookmark.clean,
            "counted": bookmark.counted,
        }
        text = json.dumps(content) + "\n"
        if text == self._written:
            return
        try:
            write_whole(self._path, text, "--data-dir")
        except ConfigError as error:
            if str(error) != self._failed:
                self._tell(f"WARNING after a crash this node will read some data twice: {error}")
            self._failed = str(error)
        else:
            self._failed, self._written = "", text


def latest(*bookmarks: Bookmark | None) -> Bookmark | None:
    """Of several bookmarks of one peer the one furthest on; None if there is none."""
    return max((b for b in bookmarks if b is not None), key=lambda b: (b.samples, b.clean), default=None)


def place(checkpoint: Bookmark | None, journal: Bookmark | None) -> Bookmark | None:
    """Where a node goes on that has the weights of a checkpoint (None: of no checkpoint).

    What it trained on after the checkpoint is lost with the weights, and comes again, unless a round has counted it:
    then the swarm has that work, and the journal tells how far it goes.
    """
    if checkpoint is not None and journal is not None and checkpoint.samples < journal.samples:
        return journal if journal.counted > checkpoint.counted else checkpoint
    return latest(checkpoint, journal)


def _parse(content: Any, cut: UnitCut) -> Bookmark:
    """The bookmark in a file. ValueError, TypeError or KeyError say what is wrong."""
    if not isinstance(content, dict):
        raise TypeError("it holds no table")
    if (content["windows"], content["unit_sequences"]) != (cut.windows, cut.length):
        raise ValueError("it was written for other data")
    rows, mask = content["claims"], bytes.fromhex(content["done_mask"])
    if not isinstance(rows, list) or len(rows) > MAX_CLAIMS or len(mask) > MASK_BYTES:
        raise ValueError(f"it does not hold at most {MAX_CLAIMS} claims")
    claims = []
    for row in rows:
        unit, first, position, in_use = row
        claims.append(Claim(_count(unit), _count(first), _count(position), 0.0, bool(in_use)))
    return Bookmark(
        claims=tuple(claims),
        done_below=_count(content["done_below"]),
        done_mask=mask,
        samples=_count(content["samples"]),
        clean=content["clean"] is True,
        counted=_count(content["counted"]),
    )


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value
