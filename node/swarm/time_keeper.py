"""Keeps swarm time: asks peers, sets the clock, says so when this machine's own clock is wrong.

    arriving    measured against whoever is connected, and set at once, before anything of the DHT is believed
    settling    once the roster has been read: measured against its peers, set at once; from then on others may ask
    running     once a minute: slewed, or set where it is off by more than a step; measured at once after a sleep

What the offsets mean is decided in ``stretto.node.swarm.time_votes``.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from hivemind.p2p import P2P

from stretto.node.swarm.clock import SleepWatch, SwarmClock
from stretto.node.swarm.host import Host
from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.streams import BROKEN, Reader, Writer, bulk_name, open_stream, read_message, write_message
from stretto.node.swarm.time_votes import (
    STEP,
    WRONG,
    Sample,
    Verdict,
    compare_walls,
    correction_due,
    decide,
    round_trip,
    walls_in_words,
)
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError

PEERS = 8
"""Peers that are asked at once."""

ROUND_TRIPS = 4
"""Questions to each, the shortest round trip counts; the first one also opens the stream."""

ANSWERS = 16
"""Questions that are answered on one stream."""

PATIENCE = 5.0
"""Seconds for one peer."""

EVERY, SOON, CALM = 60.0, 5.0, 600.0
"""Seconds between two measurements; while nobody has answered, or without a majority."""

DOUBT = 30.0
"""Seconds after a sleep in which this peer tells nobody the time until it has measured it."""

TRIES, PAUSE = 4, 0.7
"""How often a newcomer asks peers that are there but have not settled themselves, and seconds between."""


async def ask_time(p2p: P2P, run: bytes, peer: bytes, clock: SwarmClock) -> Sample | None:
    """Measure ``peer``'s clock; None if it has not settled its own. Raises ``BROKEN``, RemoteProtocolError."""
    samples: list[Sample] = []
    async with open_stream(p2p, peer, bulk_name(run)) as (reader, writer):
        for _ in range(ROUND_TRIPS):
            sent = clock.raw()
            await write_message(writer, m.FetchTime(clock.at(sent)))
            answer = await read_message(reader, m.Time, m.Busy, m.Missing)
            back = clock.raw()
            if not isinstance(answer, m.Time):
                return None
            sample = round_trip(
                peer,
                sent=clock.at(sent),
                received=answer.received,
                answered=answer.answered,
                back=clock.at(back),
                correction=answer.correction,
            )
            if sample is None:
                raise RemoteProtocolError("it claims to have held a question longer than that was away")
            samples.append(sample)
    return min(samples, key=lambda sample: sample.error)


async def answer_time(clock: SwarmClock, request: m.FetchTime, reader: Reader, writer: Writer) -> None:
    """Serve a question that was just read, and those that follow it on the stream."""
    for left in reversed(range(ANSWERS)):
        received = clock.now()
        if not clock.settled:
            await write_message(writer, m.Busy(1.0))
            return
        await write_message(writer, m.Time(request.sent, received, clock.now(), clock.correction))
        if left == 0:
            return
        try:
            following = await read_message(reader, m.FetchTime)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError):
            return  # it has what it wanted
        assert isinstance(following, m.FetchTime)
        request = following


class TimeKeeper:
    """Measures and corrects ``clock``.

    ``follows``: a peer that does not train (the bootstrap) goes by those who do. ``trainers`` names the peers in the
    roster and ``say`` takes events for the metrics; both may be set once they are there. ``tell`` takes lines for
    people.
    """

    def __init__(
        self,
        *,
        host: Host,
        run: bytes,
        clock: SwarmClock,
        tell: Callable[[str], None],
        follows: bool = False,
        randomness: random.Random | None = None,
    ) -> None:
        self._host, self._run, self.clock, self._follows, self._tell = host, run, clock, follows, tell
        self.trainers: Callable[[], Sequence[bytes]] = tuple
        self.say: Callable[[dict[str, Any]], None] = lambda _: None
        self._random = randomness or random.Random()
        self._told = ""
        self._correction_then = clock.correction
        """The clock's correction when the latest samples were taken."""
        self.settled = asyncio.Event()
        self.every = EVERY
        """Seconds between two measurements: CALM, or infinite, for a node that saves traffic."""

    # ------------------------------------------------------------------ before taking part

    async def arrive(self) -> None:
        """Set the clock against the peers that are connected; nothing happens where none has the time."""
        verdict = self._steer(await self._measure(), votes=False)
        if verdict is not None and abs(verdict.target) > WRONG:
            self._tell(
                f"this machine's clock is {abs(verdict.target):.1f} s off the swarm's, which is used from now on"
            )

    async def settle(self) -> None:
        """Set the clock against the roster's peers, some of whom may be settling too; then answer others."""
        for left in reversed(range(TRIES)):
            samples = await self._measure()
            if samples or not self.trainers() or left == 0:
                break
            await asyncio.sleep(PAUSE)
        self._report(samples, self._steer(samples, votes=False))
        self._settle()

    def _settle(self) -> None:
        self.clock.settled = True
        self.settled.set()

    # ------------------------------------------------------------------ running

    async def keep(self) -> None:
        """Settle if that is not done, then measure now and then, and at once after a sleep; until cancelled."""
        if self._follows:
            self._settle()
        elif not self.clock.settled:
            await self.settle()
        watch = SleepWatch()
        due = self.clock.raw() + SOON
        doubtful_until = 0.0
        while True:
            await asyncio.sleep(1.0)
            now = self.clock.raw()
            broken = watch.look()
            if broken is not None:
                self._tell(f"{broken.words}; measuring swarm time against the other peers")
                self.say({"event": "clock", "broken": broken.words})
                due = now
                doubtful_until = now + DOUBT if broken.doubtful else doubtful_until
                self.clock.settled = not broken.doubtful
            if now < due or self.every == math.inf:
                continue
            samples = await self._measure()
            verdict = self._steer(samples, votes=self.clock.settled and not (self._follows and self.trainers()))
            self._report(samples, verdict)
            # After a sleep the network may need a while; until then others are not told a doubtful time.
            self.clock.settled = self.clock.settled or bool(samples) or now > doubtful_until
            due = self.clock.raw() + (self.every if verdict is not None and verdict.majority else SOON)

    def _steer(self, samples: Sequence[Sample], *, votes: bool) -> Verdict | None:
        """Correct the clock by what ``samples`` say: at once as long as nobody relies on it."""
        verdict = decide(samples, me=self._host.identity.peer_id_bytes, votes=votes)
        if verdict is not None:
            steer(self.clock, verdict, running=self.clock.settled)
        return verdict

    def _report(self, samples: Sequence[Sample], verdict: Verdict | None) -> None:
        if verdict is None:
            return
        # The samples were taken before a possible jump, and so is what is compared: walls do not jump with it.
        walls = compare_walls(samples, self._correction_then)
        self.say(
            {
                "event": "clock",
                "offset": round(walls.ahead, 4),
                "correction": round(self.clock.correction, 4),
                "target": round(verdict.target, 4),
                "error": round(verdict.error, 4),
                "agreeing": verdict.agreeing,
                "asked": verdict.asked,
                "majority": verdict.majority,
            }
        )
        names = ", ".join(format_peer_id(peer)[-8:] for peer, _ in walls.odd[:4])
        text = walls_in_words(walls, names) or ""
        # The same fault is told once, and again when it has changed by more than a second.
        key = f"{walls.wrong} {round(walls.ahead) if walls.wrong else names}" if text else ""
        if key != self._told:
            self._tell(text or "the clocks of this machine and its peers agree again")
            self._told = key

    # ------------------------------------------------------------------ asking

    async def _measure(self) -> list[Sample]:
        """Samples of up to ``PEERS`` peers: those who train first, then others that are connected."""
        self._correction_then = self.clock.correction
        trainers = [peer for peer in self.trainers() if peer != self._host.identity.peer_id_bytes]
        # A bootstrap peer must not follow another one that follows it, so among trainers it asks nobody else.
        connected = [] if self._follows and trainers else await self._host.connected()
        others = [peer for peer in connected if peer not in trainers]
        self._random.shuffle(trainers)
        self._random.shuffle(others)
        answers = await asyncio.gather(*(self._ask(peer) for peer in [*trainers, *others][:PEERS]))
        return [sample for sample in answers if sample is not None]

    async def _ask(self, peer: bytes) -> Sample | None:
        try:
            return await asyncio.wait_for(ask_time(self._host.p2p, self._run, peer, self.clock), PATIENCE)
        except BROKEN:
            return None
        except RemoteProtocolError as error:
            self.say({"event": "fault", "peer": format_peer_id(peer), "what": f"its time: {error.why}"})
            return None


def steer(clock: SwarmClock, verdict: Verdict, *, running: bool) -> None:
    """Apply ``verdict``: at once, or, for a ``running`` clock that is off by less than a step, slowly."""
    if not running or abs(verdict.target) > STEP + verdict.error:
        clock.jump(verdict.target)
    else:
        clock.slew(correction_due(verdict))
