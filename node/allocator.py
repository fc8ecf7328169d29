"""What the C library's malloc holds, and giving back what it does not need.

A node's many threads take and free blocks of all sizes. Freed ones stay with malloc, between blocks that are in use,
so that the process seems to grow by tens of megabytes in hours although it uses no more. ``give_back`` returns
every whole page of them to the system, in milliseconds; ``held`` tells use from hoard, which ``/proc`` cannot: a leak
shows in the former. And glibc gives threads arenas of their own, up to eight for each core, of which each hoards for
itself; ``few_arenas`` lets them share. All this is glibc's; where it is not the C library nothing is done.
"""

import ctypes
import os
from dataclasses import dataclass

ARENAS = 2
"""One more than the main one: the trainer and the network's thread, which take most blocks, rarely wait."""

_M_ARENA_MAX = -8  # mallopt(3)


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


def few_arenas() -> bool:
    """Let all threads that are yet to come share ARENAS arenas, unless MALLOC_ARENA_MAX says how many."""
    tune = _function("mallopt")
    if tune is None or "MALLOC_ARENA_MAX" in os.environ:
        return False
    return bool(tune(_M_ARENA_MAX, ARENAS))


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # no C library under no name: Windows
        return None
