"""What a process takes from its machine, read from /proc."""

import asyncio
import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

from stretto.node import allocator
from stretto.node.resources import entry, usage, watch


def test_this_process_is_told_as_it_is() -> None:
    before = usage(os.getpid())
    assert before is not None
    assert before.rss > 10_000_000
    assert 0 < before.sockets + 1 <= before.fds + 1
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    pairs = [socket.socketpair() for _ in range(4)]
    with open("/dev/null", "rb"):
        for thread in threads:
            thread.start()
        try:
            now = usage(os.getpid())
            assert now is not None
            assert now.threads == before.threads + 3
            assert now.sockets == before.sockets + 8
            assert now.fds == before.fds + 9
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for pair in pairs:
                for end in pair:
                    end.close()


def test_a_process_that_is_gone_and_a_zombie_are_no_process(tmp_path: Path) -> None:
    assert usage(1 << 22) is None
    place = tmp_path / "7"
    (place / "fd").mkdir(parents=True)
    (place / "status").write_text("Name:\tx\nState:\tZ (zombie)\nThreads:\t1\n")
    assert usage(7, proc=tmp_path) is None
    (place / "status").write_text("Name:\tx\nVmRSS:\t   12 kB\nThreads:\t3\n")
    found = usage(7, proc=tmp_path)
    assert found is not None
    assert (found.rss, found.fds, found.sockets, found.threads) == (12288, 0, 0, 3)


def test_an_entry_holds_the_daemon_where_there_is_one() -> None:
    alone = entry(5, None)
    heap = {"heap_used", "heap_free"} if allocator.held() else set()
    assert alone.keys() == {"event", "tasks", "rss", "fds", "sockets", "threads"} | heap
    assert all(0 < alone[key] < alone["rss"] for key in heap)
    both = entry(5, os.getppid())
    assert both["tasks"] == 5
    assert both["daemon_rss"] > 0


def test_entries_come_again_and_again_and_count_the_loops_tasks() -> None:
    told: list[dict[str, Any]] = []
    enough = asyncio.Event()

    def say(event: dict[str, Any]) -> None:
        told.append(event)
        if len(told) == 3:
            enough.set()

    class Loop:
        def __init__(self) -> None:
            self.me = self

    cycle = weakref.ref(Loop())

    async def scene() -> None:
        idle = [asyncio.ensure_future(asyncio.sleep(60)) for _ in range(3)]
        watching = asyncio.ensure_future(watch(say, None, every=0.01))
        await enough.wait()
        for task in (*idle, watching):
            task.cancel()
        await asyncio.gather(*idle, watching, return_exceptions=True)

    asyncio.run(scene())
    assert [event["tasks"] for event in told[:3]] == [5, 5, 5]
    assert cycle() is None  # freed before the first of them
