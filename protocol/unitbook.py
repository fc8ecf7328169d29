"""One peer's view of the work units: what others have, what is done, what this peer has and may take.

A pure state machine. The roster carries one ``DataWord`` per peer; this peer publishes its own (``word``), then reads
the others' (``heard``), over and over. Swarm time is handed in; nothing is drawn at random.

**Choosing.** A peer alone takes the lowest free unit. With others in sight, one of the lowest is chosen by a hash of
this peer's id and those units: peers that choose at the same moment seldom choose alike, each of the lowest is chosen
soon, and a restart with the same state chooses the same. A unit that somebody left goes on at the furthest position
that was published for it.

**Claimed, then held.** A claim becomes *held* only when it has been published, and a reading that began afterwards
shows no other claim of the unit. Of two peers that both publish first and read afterwards at least one sees the other
(the flags of Dekker's and Peterson's algorithms; reads that overlap with a write may return either value), so two
peers between which the roster works never hold one unit. Which of two claims gives way only decides how soon one of
them gets it: held before claimed, then the earlier ``since``, then the smaller peer id.

**Lost.** A record that is not renewed ends after its time; its units are free then. A peer that could not renew its
own record in time no longer publishes its units as held. It trains on (*unsure*): whether somebody has taken a unit
over shows when the roster answers again. If so it gives the unit up, and what both may have trained on is counted.

**Memory.** Units in the window of ``WINDOW`` above the watermark, and one word per peer in the roster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from stretto.protocol.doneset import DoneSet
from stretto.protocol.units import MAX_ABANDONED, MAX_CLAIMS, WINDOW, Claim, DataWord, Trace, UnitCut

CHOICE_PER_PEER, LEAST_CHOICE = 4, 8
"""A peer chooses among so many of the lowest free units: per peer in sight, and at the least."""

KEEP = 20.0
"""Seconds for which a claim counts after its record was seen last, however long the record says that it lives."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A record as it was read: the word, when it ends (swarm time), and what its peer does.

    ``away``: it has left or finished, and its units are free at exactly the positions it names. ``joining``: it may
    not know yet what is done.
    """

    word: DataWord
    expires: float
    away: bool = False
    joining: bool = False


@dataclass
class OwnClaim:
    """A unit of this peer's. ``state`` is ``claimed``, ``held`` or ``unsure`` (in use without being held)."""

    unit: int
    first: int
    position: int
    since: float
    state: str = "claimed"
    contested: bool = False
    inherited: bool = False
    """Somebody had it before, perhaps this peer before a crash."""
    repeats: int = 0
    """Samples of it that its former owner may have trained on after its last word."""

    @property
    def usable(self) -> bool:
        """Whether samples may be taken from it."""
        return self.state != "claimed"

    @property
    def begun(self) -> bool:
        """Whether this peer has trained on it."""
        return self.position > self.first


@dataclass(frozen=True)
class Bookmark:
    """What a peer keeps on disk of its place in the data: its claims in the order of use, and the units done.

    ``samples`` counts all that it ever trained on; of two bookmarks the one with more is the later one. ``clean``: it
    has trained on nothing since. ``counted``: its contributions that rounds have counted. A claim counts as ``held``
    here if it was in use.
    """

    claims: tuple[Claim, ...] = ()
    done_below: int = 0
    done_mask: bytes = b""
    samples: int = 0
    clean: bool = False
    counted: int = 0

    def __post_init__(self) -> None:
        DataWord(self.claims, self.done_below, self.done_mask)  # the same bounds
        for count in (self.samples, self.counted):
            if not 0 <= count < 1 << 62:
                raise ValueError(f"{count} is no count of samples or rounds")


@dataclass
class Counts:
    """What has happened to this peer's units since its start."""

    samples: int = 0
    done: int = 0
    taken_over: int = 0
    given_up: int = 0
    repeated_at_most: int = 0
    """Samples that former owners may have trained on after their last word."""
    overlap: int = 0
    """Samples that this peer trained on although another one had the unit too."""
    done_elsewhere: int = 0
    """Units that others said were done while this peer was in the middle of them."""
    passed_over: int = 0
    """Units that the watermark left behind in slow hands."""


class UnitBook:
    """The units as peer ``me`` sees them; see the top of the file. ``ahead``: units to have besides the one in use."""

    def __init__(self, me: bytes, cut: UnitCut) -> None:
        self.me, self.cut, self.ahead = me, cut, 1
        self.done = DoneSet()
        self.mine: list[OwnClaim] = []
        self.counts = Counts()
        self.events: list[tuple[str, int, int]] = []
        """(what, unit, position) of all that happened since they were taken away."""
        self.lease = float("-inf")
        """Swarm time until which others count this peer as present."""
        self.read = False
        """Whether the roster has been read."""
        self._others: dict[bytes, Heard] = {}
        self._traces: dict[int, tuple[int, bool]] = {}
        """Position and exactness of all that was heard of units that are not done."""
        self._seen_done: set[int] = set()

    # ------------------------------------------------------------------ the roster

    def word(self, now: float, *, active: bool) -> DataWord:
        """What to publish. ``active``: this peer trains or soon will, and takes the units that it lacks."""
        if now > self.lease:
            for own in [own for own in self.mine if own.state == "held"]:
                own.state = "unsure"
                self._tell("unsure", own)
        if active and self.read:
            self.fill(now)
        claims = tuple(
            Claim(own.unit, own.first, own.position, own.since, own.state == "held") for own in self.in_order()
        )
        return DataWord(claims, self.done.below, self.done.mask(), self._abandoned())

    def heard(self, now: float, others: Mapping[bytes, Heard], published: DataWord | None, lease: float) -> None:
        """The roster was read. ``published``: this peer's word that was in it before the reading began, if one was.

        ``lease`` is the swarm time at which that record ends.
        """
        if published is not None:
            self.lease = max(self.lease, lease)
        for peer, heard in others.items():
            known, expires = self._others.get(peer), min(heard.expires, now + KEEP)
            if known is None or expires >= known.expires:
                self._others[peer] = replace(heard, expires=expires)
        # A reading may miss a record that is still valid, or show an older one: only its end says that a peer is gone.
        self._others = {peer: heard for peer, heard in self._others.items() if heard.expires > now}
        self._join_done()
        self._note_traces()
        self._resolve(published)
        self.read = True

    def _join_done(self) -> None:
        marks = sorted(heard.word.done_below for heard in self._others.values() if not heard.joining)
        if not self.read and marks:
            # One word must not decide how far the run is, and the swarm may be far beyond what a restarted peer knows.
            self.done.raise_to(marks[(len(marks) - 1) // 2])
        limit = self.done.below + WINDOW
        for heard in self._others.values():
            self.done.join(heard.word.done_below, heard.word.done_mask, limit)

    def _note_traces(self) -> None:
        for heard in self._others.values():
            for trace in heard.word.abandoned:
                if trace.position > self._traces.get(trace.unit, (0, True))[0]:
                    self._trace(trace.unit, trace.position, exact=trace.exact)
        # Whoever is there comes last: it may be training on at the very position at which another one left.
        for heard in sorted(self._others.values(), key=lambda heard: not heard.away):
            for claim in heard.word.claims:
                self._trace(claim.unit, claim.position, exact=heard.away)
        self._traces = {
            unit: trace
            for unit, trace in self._traces.items()
            if self.done.below <= unit < self.done.end and unit not in self.done
        }

    def _trace(self, unit: int, position: int, *, exact: bool) -> None:
        if unit >= self.done.end or unit in self.done:
            return
        position = min(position, self.cut.size(unit))
        if position >= self._traces.get(unit, (0, True))[0]:
            self._traces[unit] = (position, exact)

    def _resolve(self, published: DataWord | None) -> None:
        """Give up what others have a better claim to, and hold what nobody else claims."""
        said = {(claim.unit, claim.since) for claim in published.claims} if published is not None else set()
        rivals: dict[int, list[tuple[bool, float, bytes, Claim]]] = {}
        for peer, heard in self._others.items():
            for claim in () if heard.away else heard.word.claims:
                rivals.setdefault(claim.unit, []).append((not claim.held, claim.since, peer, claim))
        for own in list(self.mine):
            against = sorted(rivals.get(own.unit, []), key=lambda rival: rival[:3])
            own.contested = bool(against)
            if against and against[0][:3] < (own.state != "held", own.since, self.me):
                self._give_up(own, against[0][3])
            elif own.unit in self.done and not (own.usable and own.begun):
                self._drop(own, "done elsewhere")
            elif own.unit in self.done and own.unit not in self._seen_done:
                self._seen_done.add(own.unit)
                self.counts.done_elsewhere += 1
            if not against and own in self.mine and own.state != "held" and (own.unit, own.since) in said:
                self._hold(own)

    def _hold(self, own: OwnClaim) -> None:
        position, exact = self._traces.get(own.unit, (0, True))
        if own.state == "claimed":
            if position > own.position:  # somebody had it, and this peer learns of it only now
                own.first = own.position = position
                own.inherited = True
                own.repeats = 0 if exact else self.cut.size(own.unit) - position
            self._begin(own)
        own.state = "held"
        self._tell("held", own)
        if own.position >= self.cut.size(own.unit):
            self._finish(own)

    def _begin(self, own: OwnClaim) -> None:
        if own.inherited:
            self.counts.taken_over += 1
            self.counts.repeated_at_most += own.repeats
            self._tell("taken over", own)

    def _give_up(self, own: OwnClaim, rival: Claim) -> None:
        self.counts.given_up += 1
        if own.usable:
            self.counts.overlap += max(0, own.position - max(own.first, rival.first))
            self._trace(own.unit, own.position, exact=False)
        self._drop(own, "given up")

    def _drop(self, own: OwnClaim, why: str) -> None:
        self.mine.remove(own)
        self._seen_done.discard(own.unit)
        self._tell(why, own)

    def _tell(self, what: str, own: OwnClaim) -> None:
        self.events.append((what, own.unit, own.position))

    def _abandoned(self) -> tuple[Trace, ...]:
        taken = self._taken() | {own.unit for own in self.mine}
        free = sorted(unit for unit, (position, _) in self._traces.items() if position and unit not in taken)
        return tuple(Trace(unit, *self._traces[unit]) for unit in free[:MAX_ABANDONED])

    def _taken(self) -> set[int]:
        """Units that other peers claim."""
        return {claim.unit for heard in self._others.values() if not heard.away for claim in heard.word.claims}

    # ------------------------------------------------------------------ choosing

    def fill(self, now: float) -> None:
        """Claim units until there are enough without a rival, as far as a record has room for."""
        wanted = 1 + self.ahead
        while len(self.mine) < MAX_CLAIMS and sum(not own.contested for own in self.mine) < wanted:
            unit = self._choose()
            position, exact = self._traces.get(unit, (0, True))
            left = self.cut.size(unit) - position
            if left <= 0:  # its owner was gone before it could say so
                self.done.add(unit)
                continue
            inherited = unit in self._traces
            own = OwnClaim(unit, position, position, now, inherited=inherited, repeats=0 if exact else left)
            self.mine.append(own)
            self._tell("claimed", own)

    def _choose(self) -> int:
        """A free unit. If the window has none, its lowest units are passed over: they are in somebody's hands."""
        taken = self._taken() | {own.unit for own in self.mine}
        count = max(LEAST_CHOICE, CHOICE_PER_PEER * (1 + len(self._others))) if self._others else 1
        while True:
            free: list[int] = []
            for unit in self.done.open_units():
                if unit not in taken:
                    free.append(unit)
                    if len(free) == count:
                        break
            if free:
                state = blake2b(self.me, digest_size=8, person=b"stretto-unit")
                for unit in free:
                    state.update(unit.to_bytes(8, "little"))
                return free[int.from_bytes(state.digest(), "little") % len(free)]
            self.counts.passed_over += 1
            self.done.raise_to(self.done.below + 1)

    # ------------------------------------------------------------------ training

    def in_order(self) -> list[OwnClaim]:
        """This peer's units in the order of use: the one that it is in the middle of first."""
        return sorted(self.mine, key=lambda own: not (own.usable and own.begun))

    def use_unsure(self) -> None:
        """Take samples from claims that could not be confirmed: the roster has been silent for too long."""
        for own in self.mine:
            if own.state == "claimed":
                own.state = "unsure"
                self._begin(own)
                self._tell("unsure", own)

    def advance(self, unit: int, last: int) -> None:
        """This peer has trained on ``unit`` up to position ``last`` (exclusive)."""
        own = next((own for own in self.mine if own.unit == unit), None)
        if own is not None and last > own.position:
            self.counts.samples += last - own.position
            own.position = last
            if last >= self.cut.size(unit):
                self._finish(own)

    def lost(self, samples: int) -> None:
        """So many samples were trained on after their unit had been given up."""
        self.counts.samples += samples
        self.counts.overlap += samples

    def _finish(self, own: OwnClaim) -> None:
        self.done.add(own.unit)
        self._traces.pop(own.unit, None)
        self.counts.done += 1
        self._drop(own, "done")

    # ------------------------------------------------------------------ restarts

    def bookmark(self, samples: int, *, clean: bool) -> Bookmark:
        """What to keep on disk; ``samples`` is what this peer trained on in its whole life."""
        claims = tuple(Claim(own.unit, own.first, own.position, own.since, own.usable) for own in self.in_order())
        return Bookmark(claims, self.done.below, self.done.mask(), samples, clean)

    def restore(self, bookmark: Bookmark, now: float) -> None:
        """Go on from ``bookmark``, before anything else: claim its units anew. Who has them meanwhile keeps them."""
        self.done = DoneSet(bookmark.done_below, bookmark.done_mask)
        for claim in bookmark.claims:
            size = self.cut.size(claim.unit)
            if claim.unit in self.done or claim.unit >= self.done.end or claim.position > size:
                continue
            repeats = 0 if bookmark.clean or not claim.held else size - claim.position
            self.mine.append(
                OwnClaim(claim.unit, claim.first, claim.position, now, inherited=claim.held, repeats=repeats)
            )
