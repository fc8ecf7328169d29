"""Work units: how the data is cut, what is done, and a peer's book, alone and among many that come, die and part.

The swarm at the end plays the roster as a register per peer, as weak as the protocol allows: a stored record reaches
each reader at a moment of its own, the writer goes on when it has reached all, and a reader that reads meanwhile may
see the old one. Peers are killed, restarted, replaced, frozen and cut off; clocks differ; stores fail.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from stretto.protocol import wire
from stretto.protocol.doneset import DoneSet
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.simulation import peer_id
from stretto.protocol.unitbook import KEEP, Bookmark, Heard, UnitBook
from stretto.protocol.units import (
    MASK_BYTES,
    MAX_CLAIMS,
    MAX_UNIT,
    WINDOW,
    Claim,
    DataWord,
    Trace,
    UnitCut,
    units_done,
)

A, B, C = sorted(peer_id(index) for index in range(3))
CUT = UnitCut(1000, 10)
INF = float("inf")

# ---------------------------------------------------------------------- units and words


def test_units_cover_each_epoch_once_and_the_last_one_is_short() -> None:
    cut = UnitCut(windows=23, length=10)
    assert cut.per_epoch == 3
    assert [cut.size(unit) for unit in range(7)] == [10, 10, 3, 10, 10, 3, 10]
    assert [cut.place(unit) for unit in (0, 1, 2, 3, 8)] == [(0, 0), (0, 10), (0, 20), (1, 0), (2, 20)]
    for epoch in range(2):
        units = [unit for unit in range(9) if cut.place(unit)[0] == epoch]
        places = [cut.place(unit)[1] + position for unit in units for position in range(cut.size(unit))]
        assert places == list(range(23))


def test_a_corpus_smaller_than_a_unit_is_one_unit_an_epoch() -> None:
    cut = UnitCut(windows=4, length=512)
    assert (cut.per_epoch, cut.size(0), cut.size(77), cut.place(77)) == (1, 4, 4, (77, 0))


@pytest.mark.parametrize(("windows", "length"), [(0, 1), (1, 0), (5, (1 << 20) + 1)])
def test_a_cut_that_cannot_be_is_refused(windows: int, length: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        UnitCut(windows, length)


LIMIT_WORD = DataWord(
    tuple(Claim(MAX_UNIT - index, 5, 9, 1e10, True) for index in range(MAX_CLAIMS)),
    MAX_UNIT,
    b"\xff" * MASK_BYTES,
    tuple(Trace(index, 1 << 20, False) for index in range(4)),
)


@pytest.mark.parametrize("word", [DataWord(), LIMIT_WORD, DataWord(done_below=7, done_mask=b"\x02")])
def test_a_word_survives_the_wire(word: DataWord) -> None:
    assert wire.decode(DataWord, wire.encode(word)) == word
    assert len(wire.encode(word)) <= 455


@pytest.mark.parametrize(
    "plain",
    [
        [[[1, 0, 0, 0.0, True]] * 2, 0, b"", []],  # twice the same unit
        [[[unit, 0, 0, 0.0, True] for unit in range(5)], 0, b"", []],
        [[], 0, b"\0" * 257, []],
        [[], -1, b"", []],
        [[], MAX_UNIT + 1, b"", []],
        [[], 0, b"", [[unit, 0, True] for unit in range(5)]],
        [[[MAX_UNIT + 1, 0, 0, 0.0, True]], 0, b"", []],
        [[[1, 3, 2, 0.0, True]], 0, b"", []],
        [[[1, 0, (1 << 20) + 1, 0.0, True]], 0, b"", []],
        [[[1, 0, 0, float("nan"), True]], 0, b"", []],
        [[[1, 0, 0, 1e12, True]], 0, b"", []],
        [[[1, 0, 0, 0.0, 1]], 0, b"", []],
    ],
)
def test_an_impossible_word_is_the_senders_fault(plain: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(DataWord, wire.pack(plain))


# ---------------------------------------------------------------------- what is done


def test_the_watermark_rises_over_what_is_done() -> None:
    done = DoneSet()
    for unit in (1, 2, 4):
        done.add(unit)
    assert (done.below, done.mask(), len(done)) == (0, b"\x16", 3)
    done.add(0)
    assert (done.below, done.mask(), len(done)) == (3, b"\x02", 4)
    assert [unit in done for unit in range(6)] == [True, True, True, False, True, False]
    assert list(itertools.islice(done.open_units(), 3)) == [3, 5, 6]


def test_sets_are_joined_whatever_their_watermarks() -> None:
    randomly = random.Random(4)
    for _ in range(300):
        sets = [{randomly.randrange(60) for _ in range(randomly.randrange(60))} for _ in range(2)]
        mine, theirs = DoneSet(), DoneSet()
        for done, units in zip((mine, theirs), sets, strict=True):
            for unit in units:
                done.add(unit)
        mine.join(theirs.below, theirs.mask(), WINDOW)
        assert {unit for unit in range(100) if unit in mine} == sets[0] | sets[1]
        assert mine.below not in mine


def test_only_what_lies_under_the_limit_is_believed() -> None:
    done = DoneSet()
    done.join(1 << 40, b"\xff" * MASK_BYTES, WINDOW)
    assert (done.below, done.mask()) == (WINDOW, b"")
    done.join(WINDOW + 1, b"\xff" * MASK_BYTES, WINDOW + 9)
    assert (done.below, done.mask()) == (WINDOW + 9, b"")


def test_a_full_window_has_a_mask_of_256_bytes() -> None:
    done = DoneSet()
    done.add(WINDOW)  # beyond the window: cannot be said, hence not done
    assert WINDOW not in done
    done.add(WINDOW - 1)
    assert len(done.mask()) == MASK_BYTES
    assert DoneSet(0, done.mask()).mask() == done.mask()


# ---------------------------------------------------------------------- one book


def book(me: bytes = A, cut: UnitCut = CUT) -> UnitBook:
    return UnitBook(me, cut)


def said(*claims: Claim, below: int = 0, mask: bytes = b"", away: bool = False, joining: bool = False) -> Heard:
    return Heard(word=DataWord(claims, below, mask), expires=INF, away=away, joining=joining)


def turn(own: UnitBook, now: float, others: dict[bytes, Heard] | None = None) -> DataWord:
    """Publish, then read; returns what was published."""
    word = own.word(now, active=True)
    own.heard(now, others or {}, word, now + 20)
    return word


def states(own: UnitBook) -> dict[int, str]:
    return {claim.unit: claim.state for claim in own.mine}


def alone(now: float = 2.0) -> UnitBook:
    """A book that holds units 0 and 1."""
    own = book()
    own.heard(0.0, {}, None, 0.0)
    turn(own, now)
    assert states(own) == {0: "held", 1: "held"}
    return own


def test_nothing_is_claimed_before_the_roster_was_read() -> None:
    own = book()
    assert own.word(0.0, active=True).claims == ()
    own.heard(1.0, {}, None, 0.0)
    assert own.word(1.0, active=False).claims == ()
    assert [claim.unit for claim in own.word(1.0, active=True).claims] == [0, 1]


def test_a_claim_is_held_only_after_a_reading_that_shows_it() -> None:
    own = book()
    own.heard(0.0, {}, None, 0.0)
    word = own.word(1.0, active=True)
    assert not any(claim.held for claim in word.claims)
    own.heard(2.0, {}, None, 0.0)  # the store failed
    assert states(own) == {0: "claimed", 1: "claimed"}
    own.heard(3.0, {}, word, 21.0)
    assert states(own) == {0: "held", 1: "held"}
    assert own.events == [("claimed", 0, 0), ("claimed", 1, 0), ("held", 0, 0), ("held", 1, 0)]


def test_units_are_worked_through_in_turn_and_marked_as_done() -> None:
    own = alone()
    own.advance(0, 6)
    assert own.word(3.0, active=True).claims[0] == Claim(0, 0, 6, 2.0, True)
    own.advance(0, 10)
    assert (own.done.below, own.counts.done, own.counts.samples) == (1, 1, 10)
    assert [claim.unit for claim in turn(own, 4.0).claims] == [1, 2]
    assert states(own) == {1: "held", 2: "held"}


def test_what_others_have_or_have_done_is_not_chosen() -> None:
    own = book()
    own.heard(0.0, {B: said(Claim(0, 0, 4, 0.0, True), Claim(3, 0, 0, 0.0, False), mask=b"\x02")}, None, 0.0)
    own.ahead = 3
    word = own.word(1.0, active=True)
    assert len(word.claims) == 4
    assert not {claim.unit for claim in word.claims} & {0, 1, 3}
    assert max(claim.unit for claim in word.claims) < 20  # of the lowest


def test_peers_that_choose_at_once_seldom_choose_alike() -> None:
    chosen = []
    crowd = {peer_id(index): said() for index in range(16)}
    for me in crowd:
        own = book(me)
        own.heard(0.0, {peer: heard for peer, heard in crowd.items() if peer != me}, None, 0.0)
        own.fill(0.0)
        chosen += [claim.unit for claim in own.mine]
    assert len(set(chosen)) >= 20  # of 32
    assert max(chosen) < 70


def rival(**changed: float) -> Claim:
    """A claim of unit 0, as good as the one of ``alone`` but for the peer id."""
    fields = {"unit": 0, "first": 0, "position": 0, "since": 2.0, "held": False} | changed
    return Claim(**fields)  # type: ignore[arg-type]


def test_a_contested_claim_is_not_held_before_the_other_gave_way() -> None:
    own = book()
    own.heard(0.0, {}, None, 0.0)
    word = turn(own, 2.0, {B: said(rival())})
    assert states(own) == {0: "claimed", 1: "held"}
    assert own.mine[0].contested
    own.heard(3.0, {B: said()}, word, 23.0)
    assert states(own)[0] == "held"


@pytest.mark.parametrize(
    ("better", "peer"), [(rival(held=True, since=3.0), B), (rival(since=1.0), B), (rival(since=2.0), A)]
)
def test_the_worse_claim_gives_way_before_it_is_trained_on(better: Claim, peer: bytes) -> None:
    me = next(i for i in (B, C) if i != peer)
    own = book(me)
    own.heard(0.0, {}, None, 0.0)
    turn(own, 2.0, {peer: said(better)})
    assert 0 not in states(own)
    assert (own.counts.given_up, own.counts.overlap) == (1, 0)


def test_a_held_unit_is_not_given_to_a_mere_claim() -> None:
    own = alone()
    own.heard(3.0, {B: said(rival(since=0.0))}, None, 0.0)
    assert states(own)[0] == "held"


def test_when_both_hold_a_unit_one_stops_at_once_and_the_overlap_is_counted() -> None:
    winner, loser = alone(), alone()
    loser.me = B
    winner.advance(0, 5)
    loser.advance(0, 8)
    mine, theirs = winner.word(3.0, active=True), loser.word(3.0, active=True)
    winner.heard(4.0, {B: Heard(word=theirs, expires=INF)}, None, 0.0)
    loser.heard(4.0, {A: Heard(word=mine, expires=INF)}, None, 0.0)
    assert 0 in states(winner)
    assert 0 not in states(loser)
    assert (winner.counts.overlap, loser.counts.overlap) == (0, 8)
    assert ("given up", 0, 8) in loser.events


def test_overlap_begins_where_the_other_took_the_unit_over() -> None:
    own = alone()
    own.advance(0, 8)
    own.heard(4.0, {B: said(rival(first=6, position=7, since=1.0, held=True))}, None, 0.0)
    assert own.counts.overlap == 2


def test_a_dead_peers_unit_goes_on_at_its_last_position() -> None:
    own = alone()
    own.heard(3.0, {B: Heard(word=DataWord((Claim(2, 0, 7, 1.0, True),)), expires=10.0)}, None, 0.0)
    own.ahead = 2
    own.heard(9.9, {}, None, 0.0)  # a reading without its record, which is valid still
    assert 2 not in {claim.unit for claim in own.word(9.9, active=True).claims}
    own.mine.pop()
    own.heard(10.1, {}, None, 0.0)
    word = turn(own, 10.2)
    assert word.claims[-1] == Claim(2, 7, 7, 10.2, False)
    assert states(own)[2] == "held"
    assert (own.counts.taken_over, own.counts.repeated_at_most) == (1, 3)


def test_who_leaves_in_order_frees_his_units_at_once_and_nothing_is_repeated() -> None:
    own = alone()
    own.ahead = 2
    turn(own, 3.0, {B: said(Claim(2, 0, 7, 1.0, True), away=True)})
    assert states(own)[2] == "held"
    assert own.mine[-1].first == 7
    assert (own.counts.taken_over, own.counts.repeated_at_most) == (1, 0)


def test_a_claim_counts_no_longer_than_its_record_should_live() -> None:
    own = alone()
    own.heard(3.0, {B: said(Claim(2, 0, 7, 1.0, True))}, None, 0.0)  # it says that it lives for ever
    own.heard(3.0 + KEEP + 0.1, {}, None, 0.0)
    assert own.word(24.0, active=True).abandoned == (Trace(2, 7, False),)


def test_an_older_record_does_not_replace_a_newer_one() -> None:
    own = alone()
    newer, older = (
        Heard(word=DataWord((Claim(unit, 0, 1, 1.0, True),)), expires=expires)
        for unit, expires in ((5, 22.0), (4, 18.0))
    )
    own.heard(3.0, {B: newer}, None, 0.0)
    own.heard(4.0, {B: older}, None, 0.0)
    assert own._taken() == {5}


def test_newcomers_hear_of_units_that_nobody_has() -> None:
    own = alone()
    own.heard(3.0, {B: Heard(word=DataWord((Claim(2, 0, 7, 1.0, True),)), expires=10.0)}, None, 0.0)
    own.heard(11.0, {}, None, 0.0)
    newcomer = book(C)
    newcomer.heard(12.0, {A: Heard(word=own.word(11.0, active=False), expires=INF)}, None, 0.0)
    newcomer.ahead = 3
    for now in range(13, 60):
        turn(newcomer, float(now))
        if 2 in states(newcomer):
            break
        newcomer.advance(newcomer.mine[0].unit, 10)
    assert next(claim.first for claim in newcomer.mine if claim.unit == 2) == 7
    assert newcomer.counts.repeated_at_most == 3


def test_a_unit_trained_to_its_end_by_a_dead_peer_is_done() -> None:
    own = alone()
    own.ahead = 2
    own.heard(3.0, {B: said(Claim(2, 0, 10, 1.0, True), away=True)}, None, 0.0)
    own.heard(3.0 + KEEP, {}, None, 0.0)
    turn(own, 24.0)
    assert 2 in own.done
    assert states(own) == {0: "held", 1: "held", 3: "held"}


def test_without_a_renewed_record_units_are_used_but_not_held() -> None:
    own = alone(2.0)
    own.advance(0, 3)
    assert own.word(22.1, active=True).claims[0] == Claim(0, 0, 3, 2.0, False)
    assert own.mine[0].usable
    turn(own, 22.2)
    assert states(own) == {0: "held", 1: "held"}
    own.word(50.0, active=True)
    own.heard(51.0, {B: said(rival(first=3, position=4, since=45.0, held=True))}, None, 0.0)
    assert 0 not in states(own)
    assert own.counts.overlap == 0  # it stood still: nothing after position 3


def test_a_silent_roster_does_not_stop_the_trainer() -> None:
    own = book()
    own.heard(0.0, {}, None, 0.0)
    own.fill(1.0)
    own.use_unsure()
    assert states(own) == {0: "unsure", 1: "unsure"}
    own.advance(0, 4)
    own.heard(2.0, {B: said(rival(position=9, since=0.0))}, None, 0.0)
    assert states(own) == {1: "unsure"}
    assert own.counts.overlap == 4


def test_units_done_elsewhere_are_dropped_unless_they_are_begun() -> None:
    own = alone()
    own.advance(0, 4)
    for _ in range(2):
        own.heard(4.0, {B: said(below=2)}, None, 0.0)
    assert states(own) == {0: "held"}
    assert own.counts.done_elsewhere == 1
    own.advance(0, 10)
    assert own.counts.done == 1


def test_the_first_reading_believes_the_lower_median_and_later_ones_a_window() -> None:
    own = book()
    crowd = {A: said(below=500), B: said(below=9000), C: said(below=1 << 40), peer_id(9): said(joining=True)}
    own.heard(0.0, crowd, None, 0.0)
    assert own.done.below == 9000 + WINDOW  # the liar moves it by one window per reading
    fresh = book()
    fresh.heard(0.0, {A: said(below=700), B: said(below=1 << 40)}, None, 0.0)
    assert fresh.done.below == 700 + WINDOW


def test_a_full_window_passes_over_units_in_slow_hands() -> None:
    own = book()
    slow = {B: said(Claim(0, 0, 1, 0.0, True))}
    own.heard(0.0, slow, None, 0.0)
    for unit in range(1, WINDOW):
        own.done.add(unit)
    assert own.done.below == 0
    turn(own, 1.0, slow)
    assert own.counts.passed_over == 1
    assert own.done.below == WINDOW
    assert all(WINDOW <= unit < WINDOW + 8 for unit in states(own))
    assert len(states(own)) == 2


def test_hostile_words_do_not_grow_the_book() -> None:
    own = alone()
    randomly = random.Random(1)
    for now in range(400):
        claims = tuple(Claim(randomly.randrange(MAX_UNIT), 0, 1 << 20, 0.0, True) for _ in range(4))
        near = tuple(Trace(randomly.randrange(8 * WINDOW), 1 << 20, True) for _ in range(4))
        word = DataWord(claims, randomly.randrange(MAX_UNIT), bytes([170]) * MASK_BYTES, near)
        own.heard(float(now), {peer_id(now): Heard(word=word, expires=INF)}, None, 0.0)
        assert len(own._traces) <= WINDOW
        assert len(own._others) <= KEEP + 1
        assert len(own.word(float(now), active=True).done_mask) <= MASK_BYTES


# ---------------------------------------------------------------------- restarts


def test_a_restarted_peer_goes_on_exactly() -> None:
    whole = alone()
    whole.advance(0, 4)
    kept = whole.bookmark(4, clean=True)
    again = book()
    again.restore(kept, 100.0)
    assert again.word(100.0, active=True).claims[0] == Claim(0, 0, 4, 100.0, False)
    turn(again, 101.0)
    for own in (whole, again):
        for now in range(102, 130):
            turn(own, float(now))
            own.advance(own.in_order()[0].unit, 10)
    assert [event for event in whole.events if event[0] == "done"] == [
        event for event in again.events if event[0] == "done"
    ]
    assert again.counts.repeated_at_most == 0
    assert again.bookmark(0, clean=True).done_below == whole.bookmark(0, clean=True).done_below == 28


def test_after_a_crash_the_rest_of_the_units_in_use_may_be_repeated() -> None:
    whole = alone()
    whole.advance(0, 4)
    again = book()
    again.restore(whole.bookmark(4, clean=False), 100.0)
    again.heard(100.0, {}, None, 0.0)
    turn(again, 101.0)
    assert (again.counts.taken_over, again.counts.repeated_at_most) == (2, 16)


def test_a_unit_claimed_meanwhile_stays_with_the_other() -> None:
    again = book()
    again.restore(Bookmark((rival(position=4, held=True), Claim(1, 0, 0, 0.0, True)), samples=4), 100.0)
    turn(again, 101.0, {B: said(rival(first=4, position=5, since=60.0, held=True))})
    assert states(again) == {1: "held"}
    assert again.counts.overlap == 0


def test_a_unit_that_was_taken_further_meanwhile_goes_on_from_there() -> None:
    again = book()
    again.restore(Bookmark((rival(position=4, held=True),), samples=4), 100.0)
    turn(again, 101.0, {B: said(rival(first=4, position=9, since=60.0, held=True), away=True)})
    assert (again.mine[0].first, again.mine[0].position, again.counts.repeated_at_most) == (9, 9, 0)


def test_a_unit_finished_meanwhile_is_not_begun_again() -> None:
    again = book()
    again.restore(Bookmark((rival(position=4, held=True),), samples=4), 100.0)
    turn(again, 101.0, {B: said(below=1)})
    assert 0 not in states(again)


# ---------------------------------------------------------------------- a swarm

U = 40
TURN = 0.25
RENEW, EXPIRY = 4.0, 20.0


@dataclass
class Post:
    """A record as it lies in the roster: word, state and end."""

    word: DataWord
    expires: float
    away: bool


@dataclass
class Player:
    """One peer: its book, its view of the roster, its speed, and how its life goes."""

    name: bytes
    own: UnitBook
    speed: int  # samples per training turn
    skew: float
    seen: dict[bytes, Post] = field(default_factory=dict)
    island: int = 0
    alive: bool = True
    frozen_until: float = 0.0
    parted: float = -INF  # when it last could not reach somebody
    journal: Bookmark | None = None


class Swarm:
    """Peers that train, publish and read, with events in virtual time; see the top of the file."""

    def __init__(self, seed: int, windows: int) -> None:
        self.random = random.Random(seed)
        self.cut = UnitCut(windows, U)
        self.now = 0.0
        self.players: dict[bytes, Player] = {}
        self.trained: Counter[tuple[int, int]] = Counter()
        self.deaths = self.meetings = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._past: list[UnitBook] = []

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    def living(self) -> list[Player]:
        return [player for player in self.players.values() if player.alive]

    def clock(self, player: Player) -> float:
        return self.now + player.skew

    # -- lives

    def join(self, name: bytes | None = None, journal: Bookmark | None = None) -> None:
        name = name or peer_id(next(self._names))
        own = UnitBook(name, self.cut)
        own.ahead = 3
        player = Player(name, own, self.random.choice([1, 1, 2, 3]), self.random.uniform(-0.5, 0.5))
        if journal is not None:
            own.restore(journal, self.clock(player))
        old = self.players.get(name)
        if old is not None:
            self._past.append(old.own)
        island = self.random.choice(self.living()).island if self.living() else 0
        player.island = island
        # What is stored already can be read by a newcomer.
        friends = [other for other in self.living() if other.island == island]
        for friend in friends:
            for writer, post in friend.seen.items():
                if writer not in player.seen or post.expires > player.seen[writer].expires:
                    player.seen[writer] = post
        player.seen.pop(name, None)
        self.players[name] = player
        self.at(self.random.uniform(0, 1), lambda: self.publish(player))
        self.at(0.0, lambda: self.train(player))

    def kill(self, player: Player) -> None:
        player.alive = False
        self.deaths += 1

    def leave(self, player: Player) -> None:
        word = player.own.word(self.clock(player), active=False)
        player.alive = False
        for other in self.reachable(player):
            self.deliver(player, other, Post(word, self.clock(player) + EXPIRY, away=True))

    def part(self) -> None:
        """Two islands."""
        for player in self.living():
            player.island = self.random.randrange(2)
        self.note_parted()

    def meet(self) -> None:
        self.meetings += 1
        self.note_parted()
        for player in self.living():
            player.island = 0

    def note_parted(self) -> None:
        if len({player.island for player in self.living()}) > 1:
            for player in self.living():
                player.parted = self.now

    def reachable(self, player: Player) -> list[Player]:
        return [other for other in self.living() if other.island == player.island and other is not player]

    # -- turns

    def publish(self, player: Player) -> None:
        if not player.alive:
            return
        if self.now < player.frozen_until:
            self.at(player.frozen_until - self.now, lambda: self.publish(player))
            return
        own, now = player.own, self.clock(player)
        word = own.word(now, active=True)
        self.check()
        player.journal = own.bookmark(own.counts.samples, clean=False)
        post = Post(word, now + EXPIRY, away=False)
        failed = self.random.random() < 0.03
        slowest = 0.0
        for other in self.reachable(player):
            delay = self.random.choice([0.01, 0.1, 1.0, 3.0]) * self.random.random()
            slowest = max(slowest, delay)
            if not (failed and self.random.random() < 0.5):
                self.at(delay, lambda other=other: self.deliver(player, other, post))  # type: ignore[misc]
        self.at(slowest + 0.001, lambda: self.begin_reading(player, None if failed else word, post.expires))

    def deliver(self, writer: Player, reader: Player, post: Post) -> None:
        known = reader.seen.get(writer.name)
        if reader.island == writer.island and (known is None or post.expires > known.expires):
            reader.seen[writer.name] = post

    def begin_reading(self, player: Player, published: DataWord | None, ends: float) -> None:
        """The answer comes later than the look."""
        now = self.clock(player)
        others = {
            name: Heard(word=post.word, expires=post.expires, away=post.away)
            for name, post in player.seen.items()
            if post.expires > now
        }
        answered = self.random.random() > 0.03

        def read() -> None:
            if answered and player.alive and self.now >= player.frozen_until:
                player.own.heard(self.clock(player), others, published, ends)
                self.check()
            pause = self.random.uniform(0.7, RENEW)
            self.at(pause, lambda: self.publish(player))

        self.at(self.random.choice([0.0, 0.5, 2.0]) * self.random.random(), read)

    def train(self, player: Player) -> None:
        if not player.alive:
            return
        if self.now >= player.frozen_until:
            own = next((own for own in player.own.in_order() if own.usable), None)
            if own is not None:
                last = min(own.position + player.speed, self.cut.size(own.unit))
                for position in range(own.position, last):
                    self.trained[own.unit, position] += 1
                player.own.advance(own.unit, last)
        self.at(TURN, lambda: self.train(player))

    # -- what must hold

    def check(self) -> None:
        """No two peers that reach each other, and have for a while, hold one unit."""
        self.note_parted()
        holders: dict[int, bytes] = {}
        for player in self.living():
            assert len(player.own.mine) <= MAX_CLAIMS
            settled = self.now - player.parted > EXPIRY and self.now >= player.frozen_until
            present = self.clock(player) <= player.own.lease
            for own in player.own.mine if settled and present else ():
                if own.state == "held":
                    assert own.unit not in holders, f"unit {own.unit} is held twice at {self.now:.1f} s"
                    holders[own.unit] = player.name

    def books(self) -> Iterator[UnitBook]:
        yield from (player.own for player in self.players.values())
        yield from self._past

    def duplicates(self) -> int:
        return sum(times - 1 for times in self.trained.values())

    def check_all_read(self) -> None:
        """Every sample under the watermark was trained on, but for units passed over."""
        below = min(player.own.done.below for player in self.living())
        assert below > 0
        missing = {unit for unit in range(below) for at in range(self.cut.size(unit)) if not self.trained[unit, at]}
        assert not missing


def stormy(seed: int, *, seconds: float, partitions: bool) -> Swarm:
    """Twelve peers, of which one is killed, restarted, replaced, frozen or leaves every six seconds."""
    swarm = Swarm(seed, windows=4_000)
    for _ in range(12):
        swarm.join()

    def strike() -> None:
        living = swarm.living()
        victim = swarm.random.choice(living)
        kind = swarm.random.choice(["restart", "replace", "freeze", "leave", "join"])
        if kind == "freeze":
            victim.frozen_until = swarm.now + swarm.random.uniform(1, 60)
            swarm.deaths += 1
        elif kind == "join" or len(living) < 6:
            if len(living) < 16:
                swarm.join()
        elif kind == "leave":
            swarm.leave(victim)
        else:
            swarm.kill(victim)
            name, journal = (victim.name, victim.journal) if kind == "restart" else (None, None)
            swarm.at(swarm.random.uniform(0.5, 40), lambda: swarm.join(name, journal))
        if swarm.now < seconds - 60:
            swarm.at(swarm.random.expovariate(1 / 6), strike)

    swarm.at(10.0, strike)
    if partitions:
        for start in (60.0, 200.0):
            swarm.at(start, swarm.part)
            swarm.at(start + swarm.random.uniform(5, 90), swarm.meet)
    swarm.run(seconds)
    return swarm


@pytest.mark.parametrize("seed", range(4))
def test_a_swarm_under_storms_reads_everything_and_hardly_anything_twice(seed: int) -> None:
    swarm = stormy(seed, seconds=300, partitions=False)
    assert swarm.deaths >= 10
    swarm.check_all_read()
    counts = [own.counts for own in swarm.books()]
    overlap = sum(count.overlap for count in counts)
    assert swarm.duplicates() <= swarm.deaths * U
    assert swarm.duplicates() <= sum(count.repeated_at_most for count in counts) + overlap
    assert sum(count.taken_over for count in counts) >= swarm.deaths / 4
    assert sum(count.done for count in counts) > 50


@pytest.mark.parametrize("seed", range(2))
def test_a_split_swarm_reads_on_both_sides_and_agrees_afterwards(seed: int) -> None:
    swarm = stormy(seed + 100, seconds=420, partitions=True)
    assert swarm.meetings == 2
    swarm.check_all_read()
    known = [len(player.own.done) for player in swarm.living() if swarm.now >= player.frozen_until]
    assert max(known) - min(known) <= 2 * len(known)


def test_a_quiet_swarm_reads_each_sample_once() -> None:
    swarm = Swarm(7, windows=4_000)
    for _ in range(8):
        swarm.join()
    swarm.run(200.0)
    assert swarm.duplicates() == 0
    swarm.check_all_read()
    assert all(own.counts.overlap == own.counts.repeated_at_most == 0 for own in swarm.books())
    # Claims ahead are confirmed in time: nobody stands still for long.
    for player in swarm.living():
        assert player.own.counts.samples > 0.95 * (200 - 20) / TURN * player.speed
    assert units_done(next(iter(swarm.living())).own.word(swarm.now, active=False)) > 50
