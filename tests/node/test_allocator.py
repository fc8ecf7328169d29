"""malloc's own figures, and giving back."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

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


ARENAS_OF_TEN_THREADS = """
import ctypes, sys, threading
from stretto.node.allocator import few_arenas
print(few_arenas())
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
all_there = threading.Barrier(10)
def work():
    libc.malloc(ctypes.c_size_t(5000))
    all_there.wait()
threads = [threading.Thread(target=work) for _ in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@glibc
@pytest.mark.parametrize(
    ("environment", "set_here", "at_most"), [({}, True, 2), ({"MALLOC_ARENA_MAX": "3"}, False, 3)]
)
def test_threads_share_arenas(
    environment: dict[str, str], set_here: bool, at_most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    told = subprocess.run(
        [sys.executable, "-c", ARENAS_OF_TEN_THREADS, str(tmp_path / "info.xml")],
        env={**os.environ, **environment}, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert told.strip() == str(set_here)
    assert 1 <= (tmp_path / "info.xml").read_text().count("<heap nr=") <= at_most


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert allocator.held() is None
    assert not allocator.give_back()
    assert not allocator.few_arenas()
