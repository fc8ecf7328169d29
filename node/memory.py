"""Host memory for whole fragments: anchors, momenta and snapshots.

A fragment's arrays are replaced in every round. malloc keeps blocks of such sizes after they are freed, and between
the trainer's own blocks they leave holes, so that a node would grow by hundreds of megabytes. Each array here is a
memory map of its own, which the system takes back as soon as nobody looks at it any more.
"""

import contextlib
import mmap
from collections.abc import Callable

import numpy as np
import torch

from stretto.protocol.outer import Vector

HUGE = 1 << 20
"""Values from which on huge pages are asked for: they cost a third of the time to be touched first."""


def mapped(numel: int) -> Vector:
    """(numel,) float32, all zeros, in a private anonymous memory map that ends with the array."""
    if numel == 0:
        return np.empty(0, dtype=np.float32)
    memory = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if numel >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32)


def page_locked(numel: int) -> Vector:
    """(numel,) float32 in page-locked host memory, which a GPU reads and writes without a copy in between."""
    tensor = torch.empty(numel, dtype=torch.float32, pin_memory=True)
    return tensor.numpy()  # keeps the tensor, and torch's allocator takes the memory back when both are gone


def empty_for(device: torch.device) -> Callable[[int], Vector]:
    """What makes the arrays of a replica on ``device``."""
    return page_locked if device.type == "cuda" else mapped
