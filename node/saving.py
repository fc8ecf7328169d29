"""When checkpoints are written, and what is said of them.

A checkpoint is due every so many seconds, at a step boundary; later if writing takes long, so that it costs training
2 % at most. The training thread writes the local side, which is all that it waits for; a thread of its own writes the
rest, flushes it and lets the checkpoint appear. A disk that is full or fails costs the checkpoint, not the node.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from stretto.node.checkpoint import Captured, Contents, capture, read_contents, restore
from stretto.node.checkpoint_files import CheckpointFiles, Damaged, NoRoom, Unfinished
from stretto.node.sync import Sync

SHARE = 0.02
"""Largest share of the time that writing may take from training."""


class Saver:
    """Checkpoints of one replica. ``every`` is in seconds, 0 writes only the last one; ``say`` takes events."""

    def __init__(
        self,
        files: CheckpointFiles,
        *,
        every: float,
        run: bytes,
        peer: bytes,
        sync: Sync,
        optimizer: torch.optim.Optimizer,
        reader: Callable[[], bytes],
        tokens: Callable[[], int],
        say: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._every, self._run, self._peer = files, every, run, peer
        self._sync, self._optimizer, self._reader, self._tokens = sync, optimizer, reader, tokens
        self._say, self._clock = say, clock
        self._writer: threading.Thread | None = None
        self._last, self._cost, self._saved_step = clock(), 0.0, -1

    # ------------------------------------------------------------------ writing, in the training thread

    def save_if_due(self) -> None:
        """After an inner step."""
        wait = max(self._every, self._cost / SHARE)
        if self._every and self._clock() - self._last >= wait and not self._busy():
            self.save()

    def save(self, *, last: bool = False) -> None:
        """Write one now; the ``last`` one is on the disk when this returns, unless it failed, which is said."""
        if last and self._writer is not None:
            self._writer.join()
        if self._sync.step == self._saved_step:
            return
        began = self._last = self._clock()
        captured = capture(
            self._sync,
            self._optimizer,
            run=self._run,
            peer=self._peer,
            tokens=self._tokens(),
            reader=self._reader(),
            clean=last,
        )
        try:
            unfinished = self._files.write(captured.step, captured.nbytes, captured.local)
        except (NoRoom, OSError) as error:
            self._failed(error)
            return
        blocked = self._cost = self._clock() - began
        self._sync.blocked_seconds += blocked
        self._writer = threading.Thread(
            target=self._finish, args=(captured, unfinished, began, blocked), name="checkpoint", daemon=True
        )
        self._writer.start()
        if last:
            self._writer.join()

    def _busy(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _finish(self, captured: Captured, unfinished: Unfinished, began: float, blocked: float) -> None:
        try:
            unfinished.add(captured.shared)
            nbytes = unfinished.finish(captured.contents)
        except OSError as error:
            self._failed(error)
            return
        self._saved_step = captured.step
        seconds = round(self._clock() - began, 3)
        self._say(
            {
                "event": "checkpoint",
                "step": captured.step,
                "bytes": nbytes,
                "seconds": seconds,
                "blocked_seconds": round(blocked, 3),
            }
        )

    def _failed(self, error: Exception) -> None:
        why = str(error) if isinstance(error, NoRoom) else f"{self._files.folder}: {error}"
        self._say(
            {
                "event": "fault",
                "what": f"the checkpoint could not be written: {why}. The older ones are as they were, and training "
                "goes on; make room on that disk or choose another --data-dir",
            }
        )

    # ------------------------------------------------------------------ reading, before training

    def resume(self) -> Contents | None:
        """Go on from the newest checkpoint that is whole; None if there is none. Damaged ones are named and left."""
        self._files.clean()
        for step in self._files.steps():
            try:
                folder, data = self._files.read(step)
                contents = read_contents(data, run=self._run, fragments=len(self._sync.model.specs))
                restore(folder, contents, self._sync, self._optimizer)
            except Damaged as error:
                self._say(
                    {
                        "event": "fault",
                        "what": f"the checkpoint of step {step} is left out: {error}; trying an older one",
                    }
                )
                self._files.set_aside(step)
                continue
            self._saved_step = step
            return contents
        return None
