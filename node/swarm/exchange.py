"""Rounds over the network: drives ``stretto.protocol.peer.Peer`` with sockets, a clock and worker threads.

Runs in the event loop of the network thread. It lets rounds depart when the clock says so, carries out what the
protocol wants done, and reports what happened through ``say`` (one dict per event, for metrics and people).
Arithmetic on whole fragments runs in worker threads, so that control messages flow meanwhile.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from stretto.node.lockstep import Lockstep
from stretto.node.swarm import crowd, traffic, transfer
from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.donor import REQUESTS, Donor, Stream
from stretto.node.swarm.electors import ElectorWatch
from stretto.node.swarm.host import Host
from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.inflow import Amount
from stretto.node.swarm.line import Lane, Line
from stretto.node.swarm.links import Links
from stretto.node.swarm.repair import Repairer, Word
from stretto.node.swarm.roster import EXPIRY, Roster, gives, online
from stretto.node.swarm.runs import answer_run
from stretto.node.swarm.streams import (
    BROKEN,
    Reader,
    Writer,
    bulk_name,
    control_name,
    read_message,
    serve,
    write_message,
)
from stretto.node.swarm.time_keeper import answer_time
from stretto.node.swarm.traffic import Costs, TrafficWatch
from stretto.node.swarm.uploads import Uploads
from stretto.node.sync import Sync
from stretto.protocol import messages as m
from stretto.protocol.actions import Aborted, Committed, Outrun, Send
from stretto.protocol.chain import Member, SignedRecord
from stretto.protocol.effects import Effect, FetchFrom, Over, PartWork, PushAverageTo, PushTo, Repair, Work
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError
from stretto.protocol.outer import clips
from stretto.protocol.peer import Peer
from stretto.protocol.reduce import mean_bytes
from stretto.protocol.schedule import Clock, fragment_of, plausible

logger = logging.getLogger(__name__)

Say = Callable[[dict[str, Any]], None]
T = TypeVar("T")

MAX_FAULTS = 100
"""Peers in the record of broken rules, and kinds for each."""

MAX_HELD = 100
"""Messages of one round that wait in lockstep until this peer departs with it."""

GROUP_WAIT = 10.0
"""Seconds for which bytes of a group wait that this peer has not heard of yet: its message may be on the way."""


class Exchange:
    """All rounds of one node. ``last_round`` is the first round that does not depart any more, None for no end."""

    def __init__(
        self,
        *,
        host: Host,
        peer: Peer,
        sync: Sync,
        roster: Roster,
        line: Line,
        run_config: m.SignedRun,
        clock: SwarmClock,
        say: Say,
        last_round: int | None,
        log: ChainLog,
        lockstep: Lockstep | None = None,
        watch: TrafficWatch | None = None,
    ) -> None:
        self.lockstep = lockstep
        self.host, self.peer, self.sync, self.roster = host, peer, sync, roster
        self.clock = clock
        self.last_round = last_round
        self._run_config, self._say = run_config, say
        self.traffic = transfer.Traffic()
        self.line = line
        self.links = Links(host.p2p, peer.run, line, self._lost)
        self.uploads = Uploads(host.p2p, peer.run, self.traffic, line, self._fault)
        self.faults: dict[bytes, dict[str, int]] = {}
        """Who broke a rule here, which and how often."""
        self.begun: set[int] = set()
        self.committed: set[int] = set()
        self.aborted: dict[int, str] = {}
        self.bytes_due = self.bytes_due_fp32 = 0.0
        """What the rounds that counted this peer had to cost it, and what they would cost with 4 bytes per weight."""
        self.ended = asyncio.Event()
        """All rounds up to ``last_round`` are over."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="round")
        self._woken = asyncio.Event()
        self._moved = asyncio.Event()
        self._settled = asyncio.Event()
        self._clock_set = asyncio.Event()
        self._trains = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost_at: dict[bytes, float] = {}
        self._taking: set[tuple[bytes, bytes, type, int]] = set()
        """Bytes of rounds that are being received: from whom, for which group, contribution or average, which part."""
        self._held: dict[int, list[tuple[bytes, m.Message]]] = {}
        """In lockstep: messages of rounds that this peer has not departed with yet."""
        self._departed = -1
        self._rests_since = time.monotonic()
        """When this peer was in a round last, or not resting."""
        self._entered = 0
        """Rounds that this peer contributed to."""
        self._leaving = 0
        """Departures whose contribution is being encoded."""
        self._electors = ElectorWatch(peer.config.group.absence)
        self._log = log
        self._donor = Donor(peer, log, self.traffic, self._in_thread)
        self.watch = watch
        self._crowd = host.config.max_connections
        self._repairer = Repairer(
            p2p=host.p2p,
            peer=peer,
            lock=sync.outer_lock,
            log=log,
            words=self._words,
            say=say,
            settled=self._settled.set,
            traffic=self.traffic,
            line=line,
            swarm_time=self.now,
        )

    def now(self) -> float:
        """Swarm time in seconds."""
        return self.clock.now()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Answer other peers, and begin to drive rounds as soon as there is a clock."""
        await serve(self.host.p2p, control_name(self.peer.run), self._on_control)
        await serve(self.host.p2p, bulk_name(self.peer.run), self._on_bulk)
        self._spawn(self._tick())
        self._spawn(self._departures())
        self._spawn(self._follow_roster())

    async def close(self) -> None:
        """Stop driving rounds and close the links."""
        await self.links.close()
        await self.uploads.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._repairer.close()
        await asyncio.get_running_loop().run_in_executor(None, self._log.close)

    def fetched(self, behind: Collection[int]) -> Amount:
        """How far the download of the run's state is, of which the fragments in ``behind`` are not complete."""
        return self._repairer.amount(behind)

    def joined(self) -> int:
        """The run's state is here; returns from how many peers it came."""
        donors = len(self._repairer.donors())
        self._repairer.joined()
        return donors

    def set_clock(self, clock: Clock) -> None:
        """The run has a clock (founded here, or learnt from the roster)."""
        with self.sync.outer_lock:
            self.peer.adopt_clock(clock)
        self._clock_set.set()

    def is_lost(self, peer: bytes) -> bool:
        """Whether the connection to ``peer`` broke after it renewed its roster record."""
        renewed = self.roster.expires.get(peer, 0.0) - EXPIRY
        return self._lost_at.get(peer, 0.0) > renewed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self.guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def guarded(self, work: Awaitable[None]) -> None:
        """Run a background task; a fault in it ends the node, in words."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A task that dies silently would leave the node alive and useless; the node ends instead.
            logger.debug("a network task failed", exc_info=True)
            what = f"internal error in a network task: {type(error).__name__}: {error}"
            self._say({"event": "fault", "what": what, "fatal": True})

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    # ------------------------------------------------------------------ departures

    def begin(self) -> None:
        """The trainer has begun: from now on rounds depart."""
        self._trains.set()

    async def _departures(self) -> None:
        await self._clock_set.wait()
        await self._trains.wait()
        if self.lockstep is not None:
            await self._depart_by_step(self.lockstep)
        else:
            await self._depart_by_clock()
        while self._leaving or self.peer.busy() or self.peer.repairing:
            self._settled.clear()
            await self._settled.wait()
        self.ended.set()

    async def _depart_by_clock(self) -> None:
        target = 0
        while True:
            clock = self.peer.clock
            assert clock is not None
            now = self.now()
            if now - clock.departure(target) > clock.interval:
                target = max(target, clock.next_round(now))  # late to the run, or the machine slept
            if self.last_round is not None and target >= self.last_round:
                break
            wait = clock.departure(target) - now
            if wait > 0:
                # The clock may change while this waits, so look again now and then.
                await asyncio.sleep(min(wait, 0.5))
                continue
            self.begun.add(target)
            self._leaving += 1
            self._spawn(self._depart(target))
            target += 1

    async def _depart_by_step(self, lockstep: Lockstep) -> None:
        """In lockstep: each round departs when the trainer has come to its inner step, and waits there."""
        loop, stepped = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(stepped.set)

        lockstep.wake = wake
        for target in range(lockstep.schedule.rounds):
            stepped.clear()
            while lockstep.reached < lockstep.schedule.departure(target):
                await stepped.wait()
                stepped.clear()
            self.begun.add(target)
            await self._enter(target)
            self._departed = target
            for sender, message in self._held.pop(target, []):
                try:
                    self._receive(sender, message)
                except RemoteProtocolError as error:
                    self._fault(sender, error)

    def set_crew(self, crew: Collection[bytes]) -> None:
        """In lockstep: these peers, this one among them, make up every group; the roster changes nothing any more."""
        others = set(crew) - {self.peer.me}
        records = self.roster.peers
        reachable = [peer for peer in others if peer not in records or not records[peer].client_mode]
        with self.sync.outer_lock:
            self.peer.set_roster(reachable, sorted(others))

    def _hold(self, sender: bytes, message: m.Message) -> bool:
        """In lockstep, whether ``message`` is of a round that this peer has yet to depart with: it waits till then."""
        if self.lockstep is None or not 0 < message.round - self._departed <= self.peer.fragments:
            return False
        held = self._held.setdefault(message.round, [])
        if len(held) < MAX_HELD:
            held.append((sender, message))
        return True

    async def _depart(self, round: int) -> None:
        try:
            await self._enter(round)
        finally:
            self._leaving -= 1
            self._settled.set()

    async def _enter(self, round: int) -> None:
        fragment = fragment_of(round, self.peer.fragments)
        self._look_at_limits()
        with self.sync.outer_lock:
            reason = self.peer.sits_out(round)
        if reason is None:
            try:
                contribution = await self._in_thread(self.sync.leave, fragment)
            except LocalProtocolError as error:
                with self.sync.outer_lock:
                    reason = self.peer.sits_out(round)  # a result may have come in between
                if reason is None:
                    self.sync.ask_reload()
                    reason = f"this peer's weights cannot be sent, so its anchors are reloaded: {error}"
            else:
                if self.lockstep is not None:
                    self.lockstep.left(round)
                if contribution.tokens and not any(contribution.payload):
                    self._say({"event": "fault", "what": f"fragment {fragment} did not change in a whole cycle"})
        if reason is not None:
            self._perform([Over(round, fragment, Aborted(reason), False, 0.0)])
            return
        self._entered += 1
        rate = 1.0 / max(self.sync.estimate.step_seconds, 1e-6) if self.lockstep is None else self.lockstep.rate
        with self.sync.outer_lock:
            effects = self.peer.depart(
                round,
                contribution,
                rate=rate,
                patience=self.sync.estimate.patience,
                uplink=self.line.uplink if self.peer.can_coordinate else 0.0,
                now=self.now(),
            )
        self._perform(effects)

    # ------------------------------------------------------------------ effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.links.send(effect.to, effect.message)
            elif isinstance(effect, PushTo):
                self._spawn(self._push(effect))
            elif isinstance(effect, PushAverageTo):
                self.uploads.send(effect.to, [(effect.header, effect.data)])
            elif isinstance(effect, FetchFrom):
                self._spawn(self._fetch(effect))
            elif isinstance(effect, (Work, PartWork)):
                self._spawn(self._work(effect))
            elif isinstance(effect, Repair):
                self._spawn(self._repair(effect))
            else:
                self._round_over(effect)
        self._woken.set()
        self._settled.set()
        self._moved.set()
        self._moved = asyncio.Event()

    async def _work(self, work: Work | PartWork) -> None:
        result = await self._in_thread(self.peer.reduce, work)
        with self.sync.outer_lock:
            effects = self.peer.reduced(work, result, self.now())
        self._perform(effects)

    async def _push(self, effect: PushTo) -> None:
        self.uploads.send(effect.to, await self._in_thread(self.peer.outgoing, effect))

    async def _fetch(self, effect: FetchFrom) -> None:
        request = m.Fetch(fragment_of(effect.round, self.peer.fragments), effect.round, effect.payload)
        try:
            nbytes = self.peer.fetch_size(effect)
            data = await transfer.fetch(
                self.host.p2p, self.peer.run, effect.source, request, nbytes, self.traffic, self.line
            )
            await self._in_thread(self.peer.check_fetched, effect, data)
        except (*BROKEN, RemoteProtocolError):
            with self.sync.outer_lock:
                effects = self.peer.fetch_failed(effect.source, effect.round, self.now())
        else:
            with self.sync.outer_lock:
                effects = self.peer.fetched(effect, data, self.now())
        self._perform(effects)

    async def _repair(self, effect: Repair) -> None:
        if self.watch is not None and not self.watch.may_fetch(self._state_bytes(effect.fragment)):
            self._repairer.put_off(
                effect.fragment,
                None if self.peer.resting else "its state does not fit into what the monthly cap leaves",
            )
            return
        await self._repairer.repair(effect)

    def _words(self, fragment: int) -> list[Word]:
        """What the other peers say of their chain of ``fragment``."""
        return [
            Word(peer=peer, weight=record.weights()[fragment])
            for peer, record in self.roster.peers.items()
            if fragment < len(record.versions) and gives(record) and not self.is_lost(peer)
        ]

    def _round_over(self, over: Over) -> None:
        event: dict[str, Any] = {"event": "round", "round": over.round, "fragment": over.fragment}
        seconds = over.seconds
        if isinstance(over.outcome, Committed):
            record = over.outcome.signed.record
            if self.lockstep is not None:
                seconds = self.lockstep.committed(over.round, len(record.members), counted=over.counted)
            self._log_commit(over.round, over.outcome.signed)
            self.committed.add(over.round)
            self.aborted.pop(over.round, None)
            if over.counted:
                self._note_due(over.fragment, len(record.members))
            with self.sync.outer_lock:
                self.sync.estimate = self.sync.estimate.with_round(seconds)
            self._say_clipped(record.members)
            event |= {
                "outcome": "committed",
                "members": len(record.members),
                "counted": over.counted,
                "version": record.version,
                "tokens": sum(member.tokens for member in record.members),
                "interval": round(record.clock.interval, 3),
            }
        else:
            reason = over.outcome.reason
            kind = "outrun" if isinstance(over.outcome, Outrun) else "aborted"
            if over.round not in self.committed:
                self.aborted[over.round] = reason
            event |= {"outcome": kind, "why": reason}
            if self.lockstep is not None:
                self.lockstep.aborted(over.round, reason)
            if reason == self.peer.resting:
                event["resting"] = True
        self._say(event | {"seconds": round(seconds, 3)})
        if "resting" not in event:
            self.roster.nudge()

    def _log_commit(self, round: int, signed: SignedRecord) -> None:
        """For those who are behind. If some bytes are not here any more, the log begins anew after this commit."""
        payloads = self.peer.log(round)
        if payloads.keys() >= set(signed.record.payloads()):
            self._log.append(signed.record.fragment, signed, payloads)

    def _say_clipped(self, members: Sequence[Member]) -> None:
        factors = clips([member.norm for member in members], len(members))
        for member, factor in zip(members, factors, strict=True):
            if factor < 1.0:
                self._say(
                    {"event": "clip", "peer": format_peer_id(member.peer), "factor": factor, "norm": member.norm}
                )

    def _note_due(self, fragment: int, members: int) -> None:
        diloco = self.peer.diloco
        numel = diloco.fragments[fragment].anchor.size
        self.bytes_due += mean_bytes(members, diloco.codec.nbytes(numel), diloco.down.nbytes(numel))
        self.bytes_due_fp32 += mean_bytes(members, 4 * numel, 4 * numel)

    # ------------------------------------------------------------------ arrivals

    async def _on_control(self, sender: bytes, reader: Reader, _: Writer) -> None:
        kinds = (m.Join, m.Group, m.Redirect, m.Behind, m.Have, m.Commit, m.Abort, m.Ask, m.Plan, m.Averaged)
        lane = self.line.to(sender)
        try:
            while True:
                message: Any = await read_message(reader, *kinds, timeout=None, lane=lane)
                self._lost_at.pop(sender, None)
                if not self._hold(sender, message):
                    self._receive(sender, message)
        except RemoteProtocolError as error:
            self._fault(sender, error)

    def _receive(self, sender: bytes, message: m.Message) -> None:
        with self.sync.outer_lock:
            effects = self.peer.received(sender, message, self.now())
        self._perform(effects)

    async def _on_bulk(self, sender: bytes, reader: Reader, writer: Writer) -> None:
        lane = self.line.to(sender)
        try:
            kinds = (m.Push, m.Average, m.Fetch, m.FetchTime, m.FetchRun, *REQUESTS)
            request: Any = await read_message(reader, *kinds, lane=lane)
            while isinstance(request, (m.Push, m.Average)):
                await self._take(sender, request, reader, writer, lane)
                request = await read_message(reader, m.Push, m.Average, lane=lane)
            if isinstance(request, m.Fetch):
                await transfer.answer_fetch(self.peer, request, reader, writer, self.traffic, lane)
            elif isinstance(request, REQUESTS):
                await self._donor.serve(sender, request, Stream(reader, writer, self.line.to(sender, patient=True)))
            elif isinstance(request, m.FetchTime):
                await answer_time(self.clock, request, reader, writer)
            else:
                await answer_run(self._run_config, reader, writer)
        except RemoteProtocolError as error:
            self._fault(sender, error)

    async def _take(
        self, sender: bytes, header: m.Push | m.Average, reader: Reader, writer: Writer, lane: Lane
    ) -> None:
        """Bytes of a round that ``sender`` offers."""
        end = time.monotonic() + GROUP_WAIT
        while self.peer.early(header) and time.monotonic() < end:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 1.0)
        # One stream at a time for each: however many offer the same bytes, memory is taken for one of them.
        what = (sender, header.group, type(header), header.part)
        unwanted = "already on its way" if what in self._taking else self.peer.wants(sender, header)
        if unwanted is None:
            self._taking.add(what)
        try:
            data = await transfer.take_upload(unwanted, header, reader, writer, self.traffic, lane)
        finally:
            if unwanted is None:
                self._taking.discard(what)
        if data is None:
            return
        await self._in_thread(self.peer.check, sender, header, data)
        with self.sync.outer_lock:
            effects = self.peer.payload_arrived(sender, header, data, self.now())
        self._perform(effects)
        await write_message(writer, m.Done(), lane=lane)

    def _fault(self, sender: bytes, error: RemoteProtocolError) -> None:
        """Record who broke which rule; numbers in the reason are left out, so that the record stays small."""
        kind = re.sub(r"[0-9][0-9.e+-]*", "N", error.why)[:80]
        of_peer = self.faults.setdefault(sender, {}) if len(self.faults) < MAX_FAULTS else self.faults.get(sender, {})
        if kind in of_peer or len(of_peer) < MAX_FAULTS:
            of_peer[kind] = of_peer.get(kind, 0) + 1
        self._say({"event": "fault", "peer": format_peer_id(sender), "what": error.why})

    def _lost(self, peer: bytes) -> None:
        self._lost_at[peer] = self.now()
        self.roster.forget(peer)
        with self.sync.outer_lock:
            effects = self.peer.lost(peer, self.now())
        self._perform(effects)

    # ------------------------------------------------------------------ limits

    async def keep_limits(self) -> None:
        """Hold this node to its monthly cap and its limit of connections, until cancelled."""
        looked = 0.0
        while True:
            await asyncio.sleep(crowd.EVERY)
            if self._crowd or self.roster.silent:
                await self._thin_out()
            if time.monotonic() - looked >= traffic.EVERY:
                self._look_at_limits()
                with contextlib.suppress(*BROKEN):  # whoever watches the daemon says so
                    await self.host.be_frugal(self.peer.resting is not None or self._crowded())
                looked = time.monotonic()

    def _look_at_limits(self) -> None:
        """Rest, or go on, if that is due; the roster hears of it at once."""
        reason = ""
        if self.watch is not None:
            costs = self.costs()
            reason = self.watch.look(costs)
            if self._trains.is_set():
                self.watch.warn_if_small(costs)
        if self.peer.resting is None or self.peer.busy():
            self._rests_since = time.monotonic()
        self.roster.calm = bool(reason)
        # Before it falls silent the others must have heard that it pauses: until then they reckon with its vote.
        heard = time.monotonic() - self._rests_since > EXPIRY
        self.roster.silent = self.watch is not None and self.watch.silent and heard
        members = self._members()
        if not reason and self._crowd and members > crowd.largest_group(self._crowd):
            reason = (
                f"a group of {members} does not fit the limit of {self._crowd} connections (--max-connections), "
                f"{crowd.largest_group(self._crowd)} do"
            )
            if self.peer.resting is None:
                self._say({"event": "fault", "what": f"{reason}: this node sits out rounds and trains on alone"})
        if (reason or None) != self.peer.resting:
            with self.sync.outer_lock:
                self.peer.resting = reason or None
            self.roster.nudge()

    def _members(self) -> int:
        """How many a group would have now, this peer included."""
        others = sum(online(record) for record in self.roster.peers.values())
        return min(self.peer.config.group.max_size, 1 + others)

    def _crowded(self) -> bool:
        """Whether the swarm does not fit the limit of connections."""
        return bool(self._crowd) and len(self.roster.peers) + crowd.ROOM > crowd.target(self._crowd)

    async def _thin_out(self) -> None:
        """Let go of the connections that are too many; of all when nothing may be sent any more."""
        if self.roster.silent:
            for peer in await self.host.connected():
                await self.host.let_go(peer)
            return
        await self.host.thin_out(self.line.used_at, self.peer.partners())
        self.line.used_at = {peer: at for peer, at in self.line.used_at.items() if peer in self.host.linked}

    def costs(self) -> Costs:
        """What rounds cost this node in bytes, both directions, with the peers that are online now."""
        diloco, members = self.peer.diloco, self._members()
        rounds = []
        for state in diloco.fragments:
            numel = state.anchor.size
            rounds.append(2 * mean_bytes(members, diloco.codec.nbytes(numel), diloco.down.nbytes(numel)))
        behind = {
            fragment
            for record in self.roster.peers.values()
            if gives(record)
            for fragment, weight in enumerate(record.weights()[: len(diloco.fragments)])
            if weight > diloco.fragments[fragment].tip.weight
        }
        catch_up = sum(self._state_bytes(fragment) for fragment in behind)
        return Costs(round=max(rounds), cycle=sum(rounds), catch_up=catch_up, rounds=self._entered)

    def _state_bytes(self, fragment: int) -> int:
        return 8 * self.peer.diloco.fragments[fragment].anchor.size

    # ------------------------------------------------------------------ background

    async def _tick(self) -> None:
        while True:
            due = self.peer.deadline()
            self._woken.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), None if due is None else max(0.0, due - self.now()))
            with self.sync.outer_lock:
                effects = self.peer.tick(self.now())
            if effects:
                self._perform(effects)

    async def _follow_roster(self) -> None:
        while True:
            await self.roster.changed.wait()
            self.roster.changed.clear()
            there = {peer: record for peer, record in self.roster.peers.items() if online(record)}
            seen_since = {peer for peer in there if not self.is_lost(peer)}
            candidates = [peer for peer in there if not there[peer].client_mode]
            effects: list[Effect] = []
            now = self.now()
            clocks = {
                peer: record.clock
                for peer, record in self.roster.peers.items()
                if record.clock is not None and plausible(record.clock, now)
            }
            with self.sync.outer_lock:
                if self.lockstep is None:
                    resigned = self._electors.resigned(self.peer.tips(), self.roster.peers, time.monotonic())
                    self.peer.set_roster(candidates, sorted(seen_since), resigned)
                self.peer.adopt_first_clock(list(clocks.values()))
                for peer, record in self.roster.peers.items():
                    if record.versions and gives(record):
                        effects += self.peer.hear(peer, clocks.get(peer), record.weights())
            if self.peer.clock is not None:
                self._clock_set.set()
            self._perform(effects)
