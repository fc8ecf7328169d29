"""Host memory for whole fragments: anchors, momenta and snapshots.

A fragment's arrays are replaced in every round. malloc keeps blocks of such sizes after they are freed, and between
the trainer's own blocks they leave holes, so that a node would grow by hundreds of megabytes. Each array here is a
memory map of its own, which the system takes back as soon as nobody looks at it any more.
"""

import mmap
from collections.abc import Callable

import numpy as np
import torch

from stretto.protocol.outer import Vector


def mapped(numel: int) -> Vector:
    """(numel,) float32, all zeros, in a private anonymous memory map that ends with the array."""
    if numel == 0:
        return np.empty(0, dtype=np.float32)
    return np.frombuffer(mmap.mmap(-1, 4 * numel), dtype=np.float32)


def page_locked(numel: int) -> Vector:
    """(numel,) float32 in page-locked host memory, which a GPU reads and writes without a copy in between."""
    tensor = torch.empty(numel, dtype=torch.float32, pin_memory=True)
    return tensor.numpy()  # keeps the tensor, and torch's allocator takes the memory back when both are gone


def empty_for(device: torch.device) -> Callable[[int], Vector]:
    """What makes the arrays of a replica on ``device``."""
    return page_locked if device.type == "cuda" else mapped
