"""Who is asked for what: donors that die, fall silent, lie, are busy or slow, in virtual time."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.repair import (
    BAN,
    DOWNLOAD_TURNS,
    FIRST_PAUSE,
    GIVE_UP,
    JITTER,
    LONGEST_PAUSE,
    TRIES,
    Ledger,
    Pieces,
)

A, B, C = b"a", b"b", b"c"
SILENCE = 20.0
LIE = "a chunk does not match its digest"


@dataclass
class FakeDonor:
    """Serves a piece in ``seconds``. ``fate(index, now)``: ok, broken, silent, lie, busy or missing."""

    fate: Callable[[int, float], str] = lambda index, now: "ok"
    seconds: float = 1.0
    asked: list[int] = field(default_factory=list)
    gave: list[int] = field(default_factory=list)


def play(pieces: Pieces, donors: dict[bytes, FakeDonor], limit: float = 3600.0) -> tuple[float, str | None]:
    """Let the donors serve until all is here or hopeless: the time that took, and why it is hopeless."""
    now = 0.0
    queue: list[tuple[float, bytes, int | None, str]] = []
    for name in donors:
        pieces.add(name, now)
        queue.append((now, name, None, ""))
    while not pieces.done:
        why = pieces.hopeless(now)
        if why is not None:
            return now, why
        now, name, index, fate = heapq.heappop(queue)
        assert now < limit, "it neither ends nor gives up"
        if index is not None:
            answer(pieces, donors[name], name, index, fate, now)
        index = pieces.take(name, now)
        if index is None:
            heapq.heappush(queue, (now + 0.5, name, None, ""))
            continue
        donor = donors[name]
        donor.asked.append(index)
        fate = donor.fate(index, now)
        took = {"silent": SILENCE, "broken": donor.seconds / 2, "busy": 0.1, "missing": 0.1}.get(fate, donor.seconds)
        heapq.heappush(queue, (now + took, name, index, fate))
    return now, None


def answer(pieces: Pieces, donor: FakeDonor, name: bytes, index: int, fate: str, now: float) -> None:
    if fate == "ok":
        if pieces.arrived(name, now):
            donor.gave.append(index)
    elif fate == "broken":
        pieces.broken(name, "connection refused", now)
    elif fate == "busy":
        pieces.busy(name, 5.0, now)
    elif fate == "missing":
        pieces.missing(name, "its state has moved on", now)
    else:
        pieces.drop(name, "no byte for 20 s" if fate == "silent" else LIE)


def always(fate: str) -> Callable[[int, float], str]:
    return lambda index, now: fate


# ---------------------------------------------------------------------- pieces


def test_three_donors_share_the_pieces_and_none_is_fetched_twice() -> None:
    pieces, donors = Pieces([10] * 30, 0.0), {name: FakeDonor() for name in (A, B, C)}
    assert play(pieces, donors) == (10.0, None)
    assert (pieces.have_bytes, pieces.total_bytes) == (300, 300)
    assert [len(donor.gave) for donor in donors.values()] == [10, 10, 10]
    assert sorted(index for donor in donors.values() for index in donor.asked) == list(range(30))


def test_the_first_dies_at_half_the_second_is_silent_the_third_completes() -> None:
    dies = FakeDonor(lambda index, now: "ok" if now < 5.0 else "broken")
    silent, healthy = FakeDonor(always("silent")), FakeDonor()
    pieces = Pieces([1] * 20, 0.0)
    seconds, why = play(pieces, {A: dies, B: silent, C: healthy})
    assert why is None
    assert dies.gave == [0, 3, 5, 7, 9]
    assert sorted(dies.gave + healthy.gave) == list(range(20))  # what the dead one gave is not fetched again
    assert silent.asked == [1]
    assert dies.asked[5:] == [11, *dies.asked[6:]]
    assert len(dies.asked) == 5 + TRIES
    assert seconds < SILENCE  # the piece of the silent one is fetched from the healthy one meanwhile
    assert pieces.givers() == [A, C]


def test_when_all_are_bad_it_says_why_and_keeps_what_is_here() -> None:
    dies = FakeDonor(lambda index, now: "ok" if now < 3.0 else "broken")
    donors = {A: dies, B: FakeDonor(always("silent")), C: FakeDonor(always("lie"))}
    pieces = Pieces([7] * 20, 0.0)
    seconds, why = play(pieces, donors)
    assert why is not None
    start = "none of 3 peer(s) could give it ("
    assert why.startswith(start)
    assert set(why.removeprefix(start)[:-1].split("; ")) == {"connection refused", "no byte for 20 s", LIE}
    assert seconds == SILENCE
    assert pieces.have_bytes == 7 * len(dies.gave) == 21
    # A later attempt fetches only the rest.
    pieces.rest()
    late = FakeDonor()
    assert play(pieces, {A: late})[1] is None
    assert sorted(dies.gave + late.gave) == list(range(20))
    assert len(late.asked) == 17


def test_a_donor_that_lies_in_one_piece_is_asked_no_more() -> None:
    liar, honest = FakeDonor(lambda index, now: "lie" if index == 4 else "ok"), FakeDonor()
    pieces = Pieces([1] * 12, 0.0)
    assert play(pieces, {A: liar, B: honest})[1] is None
    assert liar.asked == [0, 2, 4]
    assert 4 in honest.gave


def test_a_busy_donor_is_asked_again_when_it_said() -> None:
    busy = FakeDonor(lambda index, now: "busy" if now < 8.0 else "ok")
    pieces = Pieces([1] * 3, 0.0)
    seconds, why = play(pieces, {A: busy})
    assert why is None
    assert busy.asked == [0, 0, 0, 1, 2]  # at 0, 5 and 10 seconds
    assert 13.0 <= seconds <= 14.0


def test_donors_that_are_busy_for_ever_are_given_up() -> None:
    pieces = Pieces([1] * 3, 0.0)
    seconds, why = play(pieces, {A: FakeDonor(always("busy")), B: FakeDonor(always("busy"))})
    assert why == f"2 peer(s) have it, and none of them had time for {GIVE_UP:.0f} s"
    assert GIVE_UP < seconds < GIVE_UP + 10


def test_a_donor_that_asks_for_a_year_is_asked_again_within_a_minute() -> None:
    pieces = Pieces([1], 0.0)
    pieces.add(A, 0.0)
    assert pieces.take(A, 0.0) == 0
    pieces.busy(A, 1e6, 0.0)
    assert pieces.waits_until(A) == 60.0


def test_a_donor_without_the_piece_is_asked_for_others_and_dropped_in_the_end() -> None:
    half, full = FakeDonor(lambda index, now: "missing" if index % 2 else "ok"), FakeDonor(seconds=4.0)
    pieces = Pieces([1] * 12, 0.0)
    assert play(pieces, {A: half, B: full})[1] is None
    assert {index % 2 for index in half.gave} == {0}
    alone = Pieces([1] * 4, 0.0)
    lacking = FakeDonor(lambda index, now: "missing" if index == 2 else "ok")
    seconds, why = play(alone, {A: lacking})
    assert why == "none of 1 peer(s) could give it (its state has moved on)"
    assert sorted(lacking.gave) == [0, 1, 3]
    assert seconds < 30


def test_throttled_donors_give_what_they_can_and_do_not_hold_up_the_end() -> None:
    fast, slow = FakeDonor(seconds=1.0), FakeDonor(seconds=40.0)
    pieces = Pieces([1] * 20, 0.0)
    seconds, why = play(pieces, {A: slow, B: fast})
    assert why is None
    assert fast.asked[-1] == slow.asked[0] == 0  # the piece of the slow one, a second time
    assert len(fast.gave) == 20
    assert seconds < 25
    both = Pieces([1] * 20, 0.0)
    seconds, why = play(both, {A: FakeDonor(seconds=3.0), B: FakeDonor(seconds=1.0)})
    assert why is None
    assert seconds <= 16.0  # 15 is what the two lines allow


def test_a_donor_that_recovers_is_forgiven() -> None:
    shaky = FakeDonor(lambda index, now: "broken" if index % 3 == 2 and now - int(now / 10) * 10 < 5 else "ok")
    pieces = Pieces([1] * 9, 0.0)
    assert play(pieces, {A: shaky})[1] is None
    assert sorted(shaky.gave) == list(range(9))


def test_one_request_at_a_time() -> None:
    pieces = Pieces([1, 1], 0.0)
    pieces.add(A, 0.0)
    with pytest.raises(LocalProtocolError):
        pieces.arrived(A, 0.0)
    assert pieces.take(A, 0.0) == 0
    with pytest.raises(LocalProtocolError):
        pieces.take(A, 0.0)


def test_nothing_to_fetch_is_done() -> None:
    pieces = Pieces([], 0.0)
    assert pieces.done
    assert pieces.hopeless(1e9) is None


# ---------------------------------------------------------------------- ledger


def test_who_lied_is_not_asked_for_this_fragment_for_some_minutes() -> None:
    ledger = Ledger(random.Random(1))
    ledger.ban(0, A, LIE, 100.0)
    assert ledger.banned(0, A, 100.0 + BAN - 1) == LIE
    assert ledger.banned(0, A, 100.0 + BAN) is None
    assert ledger.banned(1, A, 101.0) is None
    assert A not in ledger.order(0, [A, B, C], A, 101.0)
    assert ledger.order(1, [A, B, C], C, 101.0)[0] == C
    assert sorted(ledger.order(1, [A, B, C], C, 101.0)) == [A, B, C]


def test_donors_take_turns() -> None:
    ledger = Ledger(random.Random(1))
    firsts = [ledger.order(0, [A, B, C], None, 0.0)[0] for _ in range(300)]
    assert min(firsts.count(name) for name in (A, B, C)) > 70


def test_pauses_double_are_bounded_and_differ() -> None:
    ledger, other = Ledger(random.Random(1)), Ledger(random.Random(2))
    pauses = [ledger.failed(0, 0.0) for _ in range(12)]
    for count, pause in enumerate(pauses):
        plain = min(LONGEST_PAUSE, FIRST_PAUSE * 2**count)
        assert (1 - JITTER) * plain <= pause <= (1 + JITTER) * plain
    assert pauses != [other.failed(0, 0.0) for _ in range(12)]
    assert not ledger.may_begin(0, 0.7 * LONGEST_PAUSE)
    assert ledger.may_begin(0, 2 * LONGEST_PAUSE)
    assert ledger.may_begin(1, 0.0)
    ledger.succeeded(0)
    assert ledger.may_begin(0, 0.0)
    assert ledger.failed(0, 0.0) <= (1 + JITTER) * FIRST_PAUSE


def test_a_fragment_is_downloaded_once_in_so_many_turns() -> None:
    ledger = Ledger(random.Random(1))
    assert ledger.wait_for_download(0, 10.0, 0.0) == 0.0
    ledger.downloaded(0, 100.0)
    assert ledger.wait_for_download(0, 10.0, 105.0) == DOWNLOAD_TURNS * 10.0 - 5.0
    assert ledger.wait_for_download(0, 10.0, 100.0 + DOWNLOAD_TURNS * 10.0) == 0.0
    assert ledger.wait_for_download(1, 10.0, 105.0) == 0.0
