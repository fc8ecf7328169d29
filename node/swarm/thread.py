"""The network thread: one uvloop event loop beside the training thread, for everything that talks to peers."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class Stopped(Exception):
    """Somebody asked this process to stop while it waited."""


class _Loop(uvloop.Loop):
    """Children get a session of their own: Ctrl-C in a terminal must reach this process, not its network daemon."""

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("start_new_session", True)
        return await super().subprocess_exec(*args, **kwargs)


class NetworkThread:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self.loop = _Loop()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run ``work`` in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], *, stopping: Callable[[], bool] = lambda: False) -> T:
        """Run ``work`` and wait for its result. When ``stopping()`` turns true, cancel it and raise ``Stopped``."""
        future = self.start(work)
        while True:
            try:
                return future.result(timeout=0.1)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                if stopping():
                    future.cancel()
                    raise Stopped from None

    def close(self) -> None:
        """Cancel what still runs and end the loop."""
        self.start(_cancel_all()).result(timeout=5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
