"""malloc's own figures, and giving back."""

import ctypes
import os
import platform

import pytest

from stretto.node import allocator
from stretto.node.resources import usage

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such figures")
SIZE = 60_000  # below malloc's threshold for memory maps of their own
COUNT = 1000


def take(count: int) -> list[int]:
    """Addresses of so many blocks of SIZE bytes, every page touched."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    found = [libc.malloc(ctypes.c_size_t(SIZE)) for _ in range(count)]
    for address in found:
        ctypes.memset(address, 1, SIZE)
    return found


def free(addresses: list[int]) -> None:
    for address in addresses:
        ctypes.CDLL(None).free(ctypes.c_void_p(address))


@glibc
def test_what_is_used_is_told_from_what_is_hoarded_and_the_hoard_is_given_back() -> None:
    before = allocator.held()
    assert before is not None
    blocks = take(COUNT)
    # Every tenth stays, as a block of somebody else would: without that malloc could give the rest back by itself.
    kept, freed = blocks[::10], [block for number, block in enumerate(blocks) if number % 10]
    during = allocator.held()
    assert during is not None
    assert during.used - before.used == pytest.approx(COUNT * SIZE, rel=0.05)
    free(freed)
    hoarding, hoarded = usage(os.getpid()), allocator.held()
    assert hoarding is not None
    assert hoarded is not None
    assert hoarded.used - before.used == pytest.approx(COUNT * SIZE / 10, rel=0.2)
    assert hoarded.free >= 0.8 * 0.9 * COUNT * SIZE
    assert allocator.give_back()
    after = usage(os.getpid())
    assert after is not None
    assert hoarding.rss - after.rss >= 0.7 * 0.9 * COUNT * SIZE
    free(kept)


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocator.held() is None
    assert not allocator.give_back()
