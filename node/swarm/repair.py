"""Repair: a fragment that is behind gets as far as the others, beside training.

    1. replay what this peer's own log has (after a restart), without a byte from the network
    2. ask for the commits that follow; replay them if that costs fewer bytes than the state
    3. else download the state as of one commit, then go on with 2 for what was committed meanwhile

Every step only moves forwards: replay extends the chain that is here, and a state is taken over only if its chain
beats this one (``Tip.beats``). What is asked for goes to several donors at once; which donor is asked for what, and
for how long one that failed is left alone, is decided by ``stretto.protocol.repair``. If nothing helps, the fragment
stays as it is, and the next attempt begins after a pause.
"""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hivemind.p2p import P2P

from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.download import Fetching, Session, Silent, in_words
from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.inflow import Amount
from stretto.node.swarm.line import Line
from stretto.node.swarm.streams import BROKEN
from stretto.node.swarm.transfer import Traffic
from stretto.protocol import messages as m
from stretto.protocol.chain import SignedRecord, Tip
from stretto.protocol.codecs import get_codec
from stretto.protocol.effects import Repair
from stretto.protocol.errors import RemoteProtocolError, StrettoError
from stretto.protocol.peer import Peer
from stretto.protocol.repair import Ledger, Pieces
from stretto.protocol.replay import Unproven, recompute, sizes
from stretto.protocol.snapshot import Assembly, chunk_sizes

T = TypeVar("T")

IN_HAND = 4
"""Fragments that are repaired at a time: it bounds the memory for what was fetched and is not computed yet."""

AT_ONCE = 2
"""Of these, how many fetch: one fills a line, the second fills its pauses. The others compute meanwhile, so that the
line is not idle then; on a slow machine computing takes longer than fetching."""

ASK_PAUSES = (0.5, 1.0)
"""Seconds after which a donor that could not be reached is asked again: its address may have become known just now."""

SAY_EVERY = 3.0
"""Seconds between two progress events."""

HEDGE = 2.0
"""Seconds for which one donor is waited for, until another one is asked too."""

BATCH = 64 << 20
"""Bytes of missed commits that are fetched before they are computed."""

KEEP_PART = 600.0
"""Seconds for which a download that broke off is kept, to go on with if its state is still served."""


class RepairFailed(StrettoError):
    """This attempt came to nothing; the next one may succeed."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a peer says of its chain of a fragment in the roster."""

    peer: bytes
    weight: tuple[int, int, int]
    """``Tip.weight``."""


@dataclass
class _Part:
    """A download of a state, whole or not."""

    manifest: m.State
    tip: Tip
    pieces: Pieces
    assembly: Assembly
    vouchers: list[bytes]
    """Who gave this manifest."""
    doubtful: list[bytes]
    """Who may have the same state and gave no manifest of it."""
    used: float


@dataclass
class _Job:
    """One repair of one fragment."""

    fragment: int
    source: bytes
    began: float
    start: Tip
    spent: set[bytes] = field(default_factory=set)
    """Donors that have nothing for this peer."""
    failures: dict[bytes, str] = field(default_factory=dict)
    """Donors that could not be used in this attempt, and why."""
    too_short: dict[bytes, str] = field(default_factory=dict)
    """Donors whose log does not lead on from here."""
    giver: bytes | None = None
    """Who gave something last: it is asked for more."""
    versions: int = 0
    own_versions: int = 0
    replayed_bytes: int = 0
    state_bytes: int = 0
    said: float = 0.0


class Repairer:
    """All repairs of one node. Use from the event loop.

    ``words(fragment)`` are the other peers' words in the roster, ``lock`` guards ``peer``, ``timeout`` is the
    ``silence_limit`` of every request, ``settled()`` is called when a repair is over.
    """

    def __init__(
        self,
        *,
        p2p: P2P,
        peer: Peer,
        lock: threading.Lock,
        log: ChainLog,
        words: Callable[[int], Sequence[Word]],
        say: Callable[[dict[str, Any]], None],
        settled: Callable[[], None],
        traffic: Traffic,
        line: Line,
        swarm_time: Callable[[], float] = time.time,
        timeout: float | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        self._p2p, self._peer, self._lock, self._log, self._words = p2p, peer, lock, log, words
        self._say, self._settled, self._traffic, self._line = say, settled, traffic, line
        self._swarm_time, self._timeout = swarm_time, timeout
        self._ledger = Ledger(randomness or random.Random())
        self._parts: dict[int, _Part] = {}
        self._fetched: dict[int, list[Pieces]] | None = {}
        """While this peer joins: what is being fetched of each fragment, and what has been."""
        self._turns: list[_Job] = []
        self._free = asyncio.Condition()
        self._running = 0
        self._lines = asyncio.Semaphore(AT_ONCE)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="repair")
        # Of its own, so that a donor's next piece does not wait for the outer steps of another fragment.
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="repair-check")

    def close(self) -> None:
        """After the last repair was cancelled."""
        for pool in (self._pool, self._checks):
            pool.shutdown(wait=False, cancel_futures=True)

    def amount(self, behind: Collection[int]) -> Amount:
        """What has been fetched since the start, and what is missing of the fragments in ``behind``."""
        have = total = 0
        donors: set[bytes] = set()
        fetched = self._fetched or {}
        for pieces in itertools.chain.from_iterable(fetched.values()):
            have += pieces.have_bytes
            total += pieces.total_bytes
            donors.update(pieces.at_work())
        # Unless a replay turns out to cost less.
        total += sum(self._state_bytes(fragment) for fragment in behind if not fetched.get(fragment))
        return Amount(have, total, len(donors))

    def donors(self) -> set[bytes]:
        """From whom something has come since the start."""
        fetched = itertools.chain.from_iterable((self._fetched or {}).values())
        return {donor for pieces in fetched for donor in pieces.givers()}

    def joined(self) -> None:
        """This peer has the run's state: from now on amounts are not of interest."""
        self._fetched = None

    def _count(self, fragment: int, pieces: Pieces) -> None:
        """What broke off and is not gone on with does not count."""
        if self._fetched is not None:
            known = self._fetched.get(fragment, [])
            self._fetched[fragment] = [other for other in known if other.done and other is not pieces] + [pieces]

    def put_off(self, fragment: int, why: str | None) -> None:
        """No repair for now; ``why`` is told if it is given. It is wanted again at the next word of a peer."""
        if why is not None:
            self._say({"event": "repair", "fragment": fragment, "state": "put off", "why": why})
        self._over(fragment)

    async def repair(self, effect: Repair) -> None:
        """One attempt to bring a fragment forward; does nothing while the pause after a failure lasts."""
        fragment = effect.fragment
        if not self._ledger.may_begin(fragment, time.monotonic()):
            self._over(fragment)
            return
        state = self._peer.diloco.fragments[fragment]
        job = _Job(fragment, effect.source, time.monotonic(), state.tip)
        self._tell(job, "begun", why=effect.reason)
        try:
            async with self._turn(job):
                await self._catch_up(job)
        except RepairFailed as error:
            self._failed(job, str(error))
        else:
            self._succeeded(job)
        finally:
            self._over(fragment)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def _check(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._checks, function, *args)

    # ------------------------------------------------------------------ turns and words

    @asynccontextmanager
    async def _turn(self, job: _Job) -> AsyncIterator[None]:
        """A few at a time, the fragment that departs next first: its round is the next one that can be entered."""
        self._turns.append(job)
        try:
            async with self._free:
                await self._free.wait_for(lambda: self._running < IN_HAND and self._next_turn() is job)
                self._running += 1
        finally:
            self._turns.remove(job)
            await self._look_again()
        try:
            yield
        finally:
            self._running -= 1
            await self._look_again()

    async def _look_again(self) -> None:
        async with self._free:
            self._free.notify_all()

    def _next_turn(self) -> _Job:
        clock, count = self._peer.clock, self._peer.fragments
        following = clock.next_round(self._swarm_time()) if clock else 0
        return min(self._turns, key=lambda job: (job.fragment - following) % count)

    def _over(self, fragment: int) -> None:
        with self._lock:
            self._peer.repair_failed(fragment)  # a no-op where it is over already
        self._settled()

    def _failed(self, job: _Job, why: str) -> None:
        pause = self._ledger.failed(job.fragment, time.monotonic())
        self._tell(job, "failed", why=f"{why}; next attempt in {pause:.0f} s at the earliest")

    def _succeeded(self, job: _Job) -> None:
        self._ledger.succeeded(job.fragment)
        self._parts.pop(job.fragment, None)
        tip = self._peer.diloco.fragments[job.fragment].tip
        better = tip.head != job.start.head
        with self._lock:
            self._peer.repaired(job.fragment, better=better)
        seconds = round(time.monotonic() - job.began, 3)
        if not better:
            self._tell(job, "not needed", seconds=seconds)
            return
        ways = [f"version {job.start.version} to {tip.version}"]
        if job.own_versions:
            ways.append(f"{job.own_versions} version(s) replayed from the own log")
        if job.state_bytes:
            ways.append(f"a state of {_mb(job.state_bytes)} MB downloaded")
        if job.versions:
            ways.append(f"{job.versions} version(s) replayed from {_mb(job.replayed_bytes)} MB")
        self._tell(
            job, "done", why=", ".join(ways) + f", in {seconds:.1f} s", seconds=seconds, version=tip.version,
            versions=job.versions, own_versions=job.own_versions, replayed_bytes=job.replayed_bytes,
            downloaded_bytes=job.state_bytes, state_bytes=self._state_bytes(job.fragment),
        )  # fmt: skip

    def _tell(self, job: _Job, state: str, **fields: Any) -> None:
        self._say({"event": "repair", "fragment": job.fragment, "state": state, **fields})

    def _progress(self, job: _Job, pieces: Pieces, what: str) -> Callable[[], None]:
        job.said = time.monotonic()

        def say() -> None:
            now = time.monotonic()
            if now - job.said < SAY_EVERY or pieces.done:
                return
            job.said = now
            have, total, peers = pieces.have_bytes, pieces.total_bytes, pieces.active()
            text = f"{_mb(have)}/{_mb(total)} MB of {what} from {peers} peer(s)"
            self._tell(job, "progress", why=text, what=what, bytes=have, of_bytes=total, peers=peers)

        return say

    def _lied(self, job: _Job) -> Callable[[bytes, str], None]:
        def lied(donor: bytes, why: str) -> None:
            self._ledger.ban(job.fragment, donor, why, time.monotonic())
            job.spent.add(donor)
            self._say(
                {"event": "fault", "peer": format_peer_id(donor), "what": f"repair of fragment {job.fragment}: {why}"}
            )

        return lied

    def _state_bytes(self, fragment: int) -> int:
        return 8 * self._peer.diloco.fragments[fragment].anchor.size

    # ------------------------------------------------------------------ the plan

    def _donors(self, job: _Job) -> list[bytes]:
        """Whom to ask: whoever says that it is further, whoever began this, and whoever gave something last."""
        tip = self._tip(job)
        further = {w.peer for w in self._words(job.fragment) if w.weight > tip.weight}
        first = job.giver or job.source
        usable = (further | {job.source, first}) - job.spent - job.failures.keys() - {self._peer.me}
        return self._ledger.order(job.fragment, usable, first, time.monotonic())

    def _tip(self, job: _Job) -> Tip:
        return self._peer.diloco.fragments[job.fragment].tip

    async def _catch_up(self, job: _Job) -> None:
        await self._replay_own(job)
        while True:
            donors = self._donors(job)
            if not donors:
                break
            job.too_short.clear()
            records = await self._ask_records(job, donors)
            if records and self._worth_replaying(job, records):
                try:
                    await self._replay(job, records, donors)
                    continue
                except RepairFailed as error:
                    if job.state_bytes:
                        raise  # downloaded a moment ago: the rest has to be replayed
                    job.too_short.update(dict.fromkeys(donors, str(error)))
            elif not records and not job.too_short:
                continue  # everybody who answered has nothing more, and is not asked again
            await self._download(job, donors)
        if job.failures and self._tip(job).head == job.start.head:
            reasons = "; ".join(sorted(set(job.failures.values())))
            raise RepairFailed(f"none of {len(job.failures)} peer(s) that are further could be used ({reasons})")

    async def _ask_records(self, job: _Job, donors: Sequence[bytes]) -> list[SignedRecord]:
        """The commits that follow, from the first donor that has them; empty if none does."""
        request = m.FetchRecords(job.fragment, self._tip(job).head)
        answers = self._answers(job, donors, request, m.Records, m.Missing, apart=HEDGE)
        async with aclosing(answers):
            async for donor, answer in answers:
                if isinstance(answer, m.Records) and await self._can_follow(job, donor, answer):
                    job.giver = donor
                    return list(answer.records)
                if isinstance(answer, m.Missing):
                    job.too_short[donor] = answer.reason
        return []

    async def _can_follow(self, job: _Job, donor: bytes, answer: m.Records) -> bool:
        """Whether there are records and they continue the chain here; if not, what that says of ``donor``."""
        if not answer.records:
            job.spent.add(donor)
            return False
        try:
            await self._in_thread(self._peer.follow, job.fragment, answer.records)
            self._sizes(answer.records)
        except Unproven as error:
            job.too_short[donor] = error.why
        except RemoteProtocolError as error:
            self._lied(job)(donor, error.why)
        else:
            return True
        return False

    async def _answers(
        self, job: _Job, donors: Sequence[bytes], request: object, *kinds: type, apart: float
    ) -> AsyncGenerator[tuple[bytes, Any], None]:
        """Answers as they come; each donor is asked ``apart`` seconds after the one before at the latest."""
        waiting = list(donors)
        running: dict[asyncio.Future[Any], bytes] = {}
        try:
            while waiting or running:
                if waiting:
                    donor = waiting.pop(0)
                    running[asyncio.ensure_future(self._ask(job, donor, request, *kinds))] = donor
                limit = apart if waiting else None
                done, _ = await asyncio.wait(running, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _ask(self, job: _Job, donor: bytes, request: object, *kinds: type) -> Any:
        """One answer of one donor, None if it cannot be had; the job remembers why."""
        session = self._session(donor)
        try:
            for pause in ASK_PAUSES:
                with suppress(*BROKEN):
                    return await session.ask(request, *kinds)
                await asyncio.sleep(pause)
            return await session.ask(request, *kinds)
        except (Silent, *BROKEN) as error:
            job.failures[donor] = in_words(error)
            self._ledger.avoid(donor, time.monotonic())
        except RemoteProtocolError as error:
            self._lied(job)(donor, error.why)
        finally:
            await session.close()
        return None

    def _session(self, donor: bytes) -> Session:
        return Session(self._p2p, self._peer.run, donor, self._traffic, self._line, timeout=self._timeout)

    def _sizes(self, records: Sequence[SignedRecord]) -> list[dict[bytes, int]]:
        diloco = self._peer.diloco
        down = get_codec(diloco.config.wire.down)
        return [sizes(s.record, diloco.fragments[s.record.fragment].anchor.size, diloco.codec, down) for s in records]

    def _worth_replaying(self, job: _Job, records: Sequence[SignedRecord]) -> bool:
        """Whether replay costs fewer bytes than the state; after a download it is the only way that ends."""
        if job.state_bytes or self._wait_for_download(job.fragment) > 0:
            return True
        cost = sum(sum(found.values()) for found in self._sizes(records))
        said = [word.weight[-1] for word in self._words(job.fragment) if word.peer == job.giver]
        missing = max([*said, records[-1].record.version]) - self._tip(job).version
        return cost * missing / len(records) < self._state_bytes(job.fragment)

    # ------------------------------------------------------------------ replay

    async def _replay_own(self, job: _Job) -> None:
        """What this peer computed in an earlier life. It is not trusted any more than the network."""
        while True:
            records = await self._in_thread(self._log.after, job.fragment, self._tip(job).head)
            if not records:
                return
            try:
                await self._in_thread(self._peer.follow, job.fragment, records)
                for signed in records:
                    payloads: dict[bytes, bytes] = {}
                    for wanted in signed.record.payloads():
                        found = await self._in_thread(self._log.payload, job.fragment, signed.record.version, wanted)
                        if found is None:
                            return
                        payloads[wanted] = found
                    await self._install(signed, payloads)
                    job.own_versions += 1
            except RemoteProtocolError as error:
                self._tell(job, "own log left", why=f"the own log leads no further: {error.why}")
                return

    async def _replay(self, job: _Job, records: Sequence[SignedRecord], donors: Sequence[bytes]) -> None:
        """Fetch what the commits were made from and repeat them, some at a time. RepairFailed if that fails."""
        left = list(records)
        while left:
            batch: list[SignedRecord] = []
            nbytes = 0
            while left and (not batch or nbytes < BATCH):
                batch.append(left.pop(0))
                nbytes += sum(self._sizes(batch[-1:])[0].values())
            payloads = await self._fetch_logged(job, batch, donors)
            for signed in batch:
                try:
                    await self._install(signed, payloads)
                except RemoteProtocolError as error:
                    raise RepairFailed(f"version {signed.record.version} cannot be replayed: {error.why}") from None
                job.versions += 1
                self._log.append(
                    job.fragment, signed, {wanted: payloads[wanted] for wanted in signed.record.payloads()}
                )

    async def _fetch_logged(
        self, job: _Job, batch: Sequence[SignedRecord], donors: Sequence[bytes]
    ) -> dict[bytes, bytes]:
        wanted: dict[bytes, tuple[int, int]] = {}
        for signed, found in zip(batch, self._sizes(batch), strict=True):
            for digest, nbytes in found.items():
                wanted.setdefault(digest, (signed.record.version, nbytes))
        digests = list(wanted)
        pieces = Pieces([wanted[digest][1] for digest in digests], time.monotonic())
        self._count(job.fragment, pieces)
        payloads: dict[bytes, bytes] = {}

        def store(index: int, data: bytearray) -> None:
            payloads[digests[index]] = bytes(data)
            job.replayed_bytes += len(data)

        fetching = Fetching(
            pieces,
            open=self._session,
            request=lambda index: m.FetchLogged(job.fragment, wanted[digests[index]][0], digests[index]),
            digests=digests,
            store=store,
            lied=self._lied(job),
            progress=self._progress(job, pieces, "missed rounds"),
            in_thread=self._check,
        )
        async with self._lines:
            why = await fetching.run(donors)
        if why is not None:
            raise RepairFailed(f"missed rounds could not be fetched: {why}")
        return payloads

    async def _install(self, signed: SignedRecord, payloads: Mapping[bytes, bytes]) -> None:
        reduced = await self._in_thread(recompute, self._peer.diloco, signed.record, payloads)
        with self._lock:
            if self._peer.diloco.fragments[signed.record.fragment].tip.head != signed.record.prev:
                raise RepairFailed("a round was faster than its replay")
            self._peer.replayed(signed, reduced)

    # ------------------------------------------------------------------ state

    def _wait_for_download(self, fragment: int) -> float:
        clock = self._peer.clock
        cycle = self._peer.fragments * clock.interval if clock else 0.0
        return self._ledger.wait_for_download(fragment, cycle, time.monotonic())

    async def _download(self, job: _Job, donors: Sequence[bytes]) -> None:
        """Take over the state of whoever is furthest. RepairFailed if nobody's can be had."""
        # Donors keep a state that they have offered for a while only: it is asked for when it can be fetched.
        async with self._lines:
            part = await self._fetch_state(job, donors)
        if part is not None:
            await self._take_over(job, part)

    async def _fetch_state(self, job: _Job, donors: Sequence[bytes]) -> _Part | None:
        """All of a better state than the one here; None if nobody has one. RepairFailed if it cannot be had."""
        donors = [donor for donor in donors if donor not in job.spent and donor not in job.failures]
        part = await self._part(job, donors) if donors else None
        if part is None:
            return None  # those that were asked are spent, or the job knows why they failed
        wait = self._wait_for_download(job.fragment)
        if wait > 0:
            short = "; ".join(sorted(set(job.too_short.values())))
            raise RepairFailed(
                f"this fragment was downloaded whole a moment ago and may be again in {wait:.0f} s, and what was "
                f"missed since cannot be replayed ({short})"
            )
        self._parts[job.fragment] = part
        self._count(job.fragment, part.pieces)
        part.used = time.monotonic()
        fetching = Fetching(
            part.pieces,
            open=self._session,
            request=lambda index: m.FetchChunk(job.fragment, part.tip.head, index),
            digests=part.manifest.chunks,
            store=part.assembly.put,
            lied=self._lied(job),
            progress=self._progress(job, part.pieces, "state"),
            in_thread=self._check,
            doubtful=part.doubtful,
        )
        why = await fetching.run([*part.vouchers, *part.doubtful])
        if why is not None:
            here = f"{_mb(part.pieces.have_bytes)}/{_mb(part.pieces.total_bytes)} MB are here"
            raise RepairFailed(f"the download stopped: {why}; {here}")
        del self._parts[job.fragment]
        return part

    async def _take_over(self, job: _Job, part: _Part) -> None:
        reduced = await self._in_thread(part.assembly.finish)
        try:
            with self._lock:
                better = self._peer.adopt(part.manifest, reduced, go_on=True)
        except RemoteProtocolError as error:
            # Every chunk was what the manifest says, so the manifest was false.
            for donor in part.vouchers:
                self._lied(job)(donor, error.why)
            raise RepairFailed(f"a download was of no use: {error.why}") from None
        self._ledger.downloaded(job.fragment, time.monotonic())
        if better:
            self._log.forget(job.fragment)
            job.giver = part.vouchers[0] if part.vouchers else None
            job.state_bytes += part.pieces.total_bytes
            job.spent.clear()
        else:
            job.spent.update(part.vouchers, part.doubtful)

    async def _part(self, job: _Job, donors: Sequence[bytes]) -> _Part | None:
        """The download to go on with, or a new one of the best state that is offered."""
        now = time.monotonic()
        kept = self._parts.pop(job.fragment, None)
        mine = self._tip(job)
        offers = await self._offers(job, donors)
        if kept is not None and now - kept.used < KEEP_PART and kept.tip.beats(mine):
            same = [donor for donor, (tip, manifest) in offers.items() if manifest.chunks == kept.manifest.chunks]
            # A donor may still serve the older state, though it offers a newer one now.
            others = [donor for donor in donors if donor not in same and donor not in job.failures]
            if same or await self._still_served(job, kept, others):
                kept.vouchers = list(dict.fromkeys([*kept.vouchers, *same]))
                kept.vouchers = [donor for donor in kept.vouchers if donor in donors]
                kept.doubtful = [donor for donor in others if donor not in kept.vouchers]
                return kept
        if not offers:
            return None
        best = max((tip for tip, _ in offers.values()), key=lambda tip: (tip.weight, tip.head))
        groups: dict[tuple[bytes, ...], list[bytes]] = {}
        for donor, (tip, manifest) in offers.items():
            if tip.head == best.head:
                groups.setdefault(manifest.chunks, []).append(donor)
        # Equal heads mean equal bits: of two manifests for one head, one is false. The majority is tried first.
        vouchers = max(groups.values(), key=len)
        contradict = {donor for group in groups.values() for donor in group if group is not vouchers}
        manifest = offers[vouchers[0]][1]
        empty, numel = self._peer.diloco.empty, self._state_bytes(job.fragment) // 8
        return _Part(
            manifest, best, Pieces(chunk_sizes(8 * numel), now), Assembly(empty(numel), empty(numel)), vouchers,
            [d for d in donors if d not in vouchers and d not in contradict and d not in job.failures], now,
        )  # fmt: skip

    async def _still_served(self, job: _Job, part: _Part, donors: Sequence[bytes]) -> bool:
        """Whether one of ``donors`` still has the state that a download broke off in."""
        left = next((i for i in range(len(part.manifest.chunks)) if not part.pieces.has(i)), 0)
        for donor in donors:
            session = self._session(donor)
            try:
                request = m.FetchChunk(job.fragment, part.tip.head, left)
                data = await session.fetch(request, part.pieces.sizes[left])
                if isinstance(data, (bytearray, m.Busy)):
                    return True
            except (Silent, *BROKEN) as error:
                job.failures[donor] = in_words(error)
            except RemoteProtocolError:
                continue  # it is found out when it is asked in earnest
            finally:
                await session.close()
        return False

    async def _offers(self, job: _Job, donors: Sequence[bytes]) -> dict[bytes, tuple[Tip, m.State]]:
        """The states that are better than the one here, by donor, after their manifests were checked."""
        request, kinds = m.FetchState(job.fragment), (m.State, m.Missing, m.Busy)
        tasks = {asyncio.ensure_future(self._ask(job, donor, request, *kinds)): donor for donor in donors}
        offers: dict[bytes, tuple[Tip, m.State]] = {}
        busy, pending = 0, set(tasks)
        try:
            while pending:
                limit = HEDGE if offers else None
                done, pending = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break  # who is slow now may still give chunks
                for task in done:
                    self._note_offer(job, tasks[task], task.result(), offers)
                    busy += isinstance(task.result(), m.Busy)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if busy and not offers:
            raise RepairFailed(f"{busy} peer(s) have the state and are busy with others")
        return offers

    def _note_offer(self, job: _Job, donor: bytes, answer: Any, offers: dict[bytes, tuple[Tip, m.State]]) -> None:
        if isinstance(answer, m.Missing):
            job.failures[donor] = answer.reason
        elif isinstance(answer, m.State):
            try:
                tip = self._peer.sound(job.fragment, answer)
            except RemoteProtocolError as error:
                self._lied(job)(donor, error.why)
                return
            if tip.beats(self._tip(job)):
                offers[donor] = tip, answer
            else:
                job.spent.add(donor)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}" if nbytes < 1e8 else f"{nbytes / 1e6:.0f}"
