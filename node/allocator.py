"""What the C library's malloc holds, and giving back what it does not need.

A node's many threads take and free blocks of all sizes. Freed ones stay with malloc, between blocks that are in use,
so that the process seems to grow by tens of megabytes in hours although it uses no more. ``give_back`` returns
every whole page of them to the system, in milliseconds; ``held`` tells use from hoard, which ``/proc`` cannot: a leak
shows in the former. Both are glibc's (``malloc_trim``, ``mallinfo2``); where it is not the C library they do nothing.
"""

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of malloc, over all threads. Python's small objects and memory maps are not among them."""

    used: int
    """In blocks that somebody has."""
    free: int
    """In blocks that were freed; pages of them that were given back to the system are counted still."""


class _Mallinfo2(ctypes.Structure):
    """The C library's answer, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def held() -> Held | None:
    """What malloc holds now; None without glibc 2.33 or newer."""
    ask = _function("mallinfo2")
    if ask is None:
        return None
    ask.restype = _Mallinfo2
    found = ask()
    return Held(used=found.uordblks + found.hblkhd, free=found.fordblks)


def give_back() -> bool:
    """Return free pages to the system; whether there were any."""
    trim = _function("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no C library under no name: Windows
        return None
