"""Fetching from donors: one stream to each, one request at a time, several donors at once.

A request fails as soon as no byte has come for ``silence`` seconds, however long the whole takes: a slow line is not a
dead one. Streams stay open between requests; the side that asks closes them.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from hivemind.p2p import P2P

from stretto.node.swarm.line import Line
from stretto.node.swarm.streams import (
    BROKEN,
    CHUNK_TIMEOUT,
    Reader,
    Writer,
    bulk_name,
    open_stream,
    read_bytes,
    read_message,
    write_message,
)
from stretto.node.swarm.transfer import Traffic
from stretto.protocol import messages as m
from stretto.protocol.digest import payload_digest
from stretto.protocol.errors import ConfigError, RemoteProtocolError, StrettoError
from stretto.protocol.repair import Pieces

T = TypeVar("T")
Refusal: TypeAlias = m.Missing | m.Busy

SILENCE = 15.0
"""Seconds without a byte after which a donor is given up, where the caller names no other limit."""

LOOK = 0.5
"""Seconds after which a donor without work looks for some at the latest."""


class Silent(StrettoError):
    """No byte came within the limit."""


def silence_limit(timeout: float | None) -> float:
    """``timeout`` seconds, None stands for ``SILENCE``. ConfigError if it is negative or above a stream's own limit.

    To open a stream may take at most ``OPEN_TIMEOUT`` of it.
    """
    if timeout is None:
        return SILENCE
    if not 0 <= timeout <= CHUNK_TIMEOUT:
        raise ConfigError(f"a timeout of {timeout} s is not in 0..{CHUNK_TIMEOUT:g}, the limit of every stream")
    return timeout


class _Watched:
    """A reader that remembers when the last byte came; everything else is the reader's own."""

    def __init__(self, reader: Reader, touch: Callable[[], None]) -> None:
        self._reader, self._touch = reader, touch

    async def read(self, n: int = -1) -> bytes:
        data = await self._reader.read(n)
        self._touch()
        return data

    async def readexactly(self, n: int) -> bytes:
        data = await self._reader.readexactly(n)
        self._touch()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class Session:
    """Requests to one donor, one after the other. ``timeout`` is the ``silence_limit`` of each.

    All of its methods raise ``Silent``, one of ``BROKEN``, or RemoteProtocolError for an answer that breaks the rules.
    """

    def __init__(
        self, p2p: P2P, run: bytes, donor: bytes, traffic: Traffic, line: Line, *, timeout: float | None = None
    ) -> None:
        self.donor = donor
        self._p2p, self._run, self._traffic, self._lane = p2p, run, traffic, line.to(donor)
        self._silence = silence_limit(timeout)
        self._stack = contextlib.AsyncExitStack()
        self._ends: tuple[Reader, Writer] | None = None
        self._last = 0.0

    async def ask(self, request: object, *kinds: type) -> Any:
        """The answer to ``request``, a message of one of ``kinds``."""
        return await self._watched(self._ask(request, *kinds))

    async def fetch(self, request: object, nbytes: int) -> bytearray | Refusal:
        """The ``nbytes`` raw bytes that answer ``request``, not yet checked, or why there are none."""
        data = await self._watched(self._fetch(request, nbytes))
        if isinstance(data, bytearray):
            self._traffic.state_down += nbytes
        return data

    async def close(self) -> None:
        """Close the stream; the next request opens another one."""
        self._ends = None
        await self._stack.aclose()

    async def _ask(self, request: object, *kinds: type) -> Any:
        reader, writer = await self._open()
        await write_message(writer, request, lane=self._lane)
        return await read_message(reader, *kinds, lane=self._lane)

    async def _fetch(self, request: object, nbytes: int) -> bytearray | Refusal:
        answer = await self._ask(request, m.Payload, m.Missing, m.Busy)
        if isinstance(answer, (m.Missing, m.Busy)):
            return answer
        if answer.nbytes != nbytes:
            raise RemoteProtocolError(f"{answer.nbytes} bytes are offered where {nbytes} are due")
        assert self._ends is not None
        return await read_bytes(*self._ends, nbytes, self._lane)

    async def _open(self) -> tuple[Reader, Writer]:
        if self._ends is None:
            stream = open_stream(self._p2p, self.donor, bulk_name(self._run))
            reader, writer = await self._stack.enter_async_context(stream)
            self._ends = cast(Reader, _Watched(reader, self._touch)), writer
            self._touch()
        return self._ends

    def _touch(self) -> None:
        self._last = time.monotonic()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``, ended when no byte has come for too long. After any failure the stream is closed."""
        self._touch()
        task = asyncio.ensure_future(work)
        try:
            while True:
                left = self._last + self._silence - time.monotonic()
                if left <= 0:
                    raise Silent(f"no byte for {self._silence:g} s")
                done, _ = await asyncio.wait({task}, timeout=left)
                if done:
                    return task.result()
        except asyncio.TimeoutError:
            await self.close()
            raise Silent("no answer within a stream's own limits") from None
        except BaseException:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await self.close()
            raise


class Fetching:
    """Fills ``pieces`` from several donors at once.

    ``open`` makes a session with a donor; ``request(i)`` is what is asked for piece i, and ``digests[i]`` what its
    bytes must hash to. ``store(i, bytes)`` keeps them. ``lied(donor, why)`` hears of a donor that sent something
    false, and ``progress()`` is called after every piece and at least every second. A donor that is not sure to have
    the very same state (``doubtful``) is not blamed for other bytes, only asked no more.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        open: Callable[[bytes], Session],
        request: Callable[[int], object],
        digests: Sequence[bytes],
        store: Callable[[int, bytearray], None],
        lied: Callable[[bytes, str], None],
        progress: Callable[[], None],
        in_thread: Callable[..., Awaitable[Any]],
        doubtful: Sequence[bytes] = (),
    ) -> None:
        self._pieces, self._open, self._request, self._digests = pieces, open, request, digests
        self._store, self._lied, self._progress, self._in_thread = store, lied, progress, in_thread
        self._doubtful = frozenset(doubtful)
        self._changed = asyncio.Condition()

    async def run(self, donors: Sequence[bytes]) -> str | None:
        """Until every piece is here (None) or there is no hope: why. A later ``run`` goes on where this one ended."""
        for donor in donors:
            self._pieces.add(donor, time.monotonic())
        workers = [asyncio.ensure_future(self._work(donor)) for donor in donors]
        try:
            while not self._pieces.done:
                why = self._pieces.hopeless(time.monotonic())
                if why is not None:
                    return why
                for worker in workers:
                    if worker.done():
                        worker.result()  # an error that nobody expected ends the repair, not only one donor
                await self._wait(1.0)
                self._progress()
            return None
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._pieces.rest()

    async def _wait(self, seconds: float) -> None:
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)

    async def _work(self, donor: bytes) -> None:
        session = self._open(donor)
        try:
            while self._pieces.waits_until(donor) is not None and not self._pieces.done:
                index = self._pieces.take(donor, time.monotonic())
                if index is None:
                    await self._wait(LOOK)
                    continue
                await self._fetch(session, donor, index)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            await session.close()

    async def _fetch(self, session: Session, donor: bytes, index: int) -> None:
        pieces = self._pieces
        try:
            data = await session.fetch(self._request(index), pieces.sizes[index])
            if isinstance(data, m.Busy):
                pieces.busy(donor, data.seconds, time.monotonic())
            elif isinstance(data, m.Missing):
                pieces.missing(donor, data.reason, time.monotonic())
            elif await self._in_thread(payload_digest, data) != self._digests[index]:
                raise RemoteProtocolError(f"piece {index} of {len(self._digests)} does not match its digest")
            elif pieces.arrived(donor, time.monotonic()):
                self._store(index, data)
        except Silent as error:
            pieces.drop(donor, str(error))
        except BROKEN as error:
            pieces.broken(donor, in_words(error), time.monotonic())
        except RemoteProtocolError as error:
            pieces.drop(donor, error.why)
            if donor not in self._doubtful:
                self._lied(donor, error.why)


def in_words(error: BaseException) -> str:
    """The first line of what a broken connection says of itself."""
    return next(iter(str(error).strip().splitlines()), "")[:120] or type(error).__name__
