"""A node's units between trainer and network, and the journal on disk."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.node.data.journal import MAX_FILE, Journal, latest, place
from stretto.node.data.units import Span, UnitKeeper, local_units
from stretto.node.swarm.thread import Stopped
from stretto.protocol.simulation import peer_id
from stretto.protocol.unitbook import Bookmark, Heard, UnitBook
from stretto.protocol.units import Claim, DataWord, UnitCut

ME, OTHER = peer_id(0), peer_id(1)
CUT = UnitCut(1000, 10)


class Board:
    """A roster that answers when it is asked; ``rivals`` is what others say. Swarm time is a step per answer."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.rivals: dict[bytes, Heard] = {}
        self.asked = 0
        self.answers = self.stores = True
        self.events: list[dict[str, Any]] = []
        self.keeper = UnitKeeper(UnitBook(ME, CUT), now=lambda: self.now, **options)
        self.keeper.connect(ask=self.answer, say=self.events.append)

    def answer(self) -> None:
        self.asked += 1
        self.now += 1.0
        word = self.keeper.word(active=True, clean=False)
        if self.answers:
            self.keeper.heard(self.rivals, word if self.stores else None, self.now + 20)


def test_the_first_draw_asks_until_a_claim_is_confirmed() -> None:
    board = Board(pause=0.0)
    assert board.keeper.draw(4) == [Span(0, 0, 4)]
    assert board.asked == 2  # a first look, then claim, publish, look again
    assert board.keeper.waiting_for == ""
    assert [(event["what"], event["unit"]) for event in board.events] == [
        ("claimed", 0), ("claimed", 1), ("held", 0), ("held", 1)
    ]  # fmt: skip


def test_drawing_on_needs_no_answer() -> None:
    board = Board(pause=0.0)
    board.keeper.draw(4)
    asked = board.asked
    assert board.keeper.draw(12) == [Span(0, 4, 10), Span(1, 0, 6)]
    assert board.asked == asked
    assert board.keeper.state().samples == 0


def test_a_finished_unit_asks_for_the_next_one() -> None:
    board = Board(pause=0.0)
    board.keeper.consumed(board.keeper.draw(10))
    assert [own.unit for own in board.keeper.book.mine] == [1, 2]
    assert all(own.usable for own in board.keeper.book.mine)
    assert {"event": "unit", "unit": 0, "what": "done", "position": 10} in board.events


def test_the_trainer_says_what_it_waits_for_and_is_woken() -> None:
    board = Board(patience=60.0)
    board.stores = False
    drawn: list[Span] = []
    trainer = threading.Thread(target=lambda: drawn.extend(board.keeper.draw(4)), daemon=True)
    trainer.start()
    wait_until(lambda: "claim of 0, 1 is not confirmed yet" in board.keeper.waiting_for)
    assert board.keeper.waiting_for.startswith("waiting for a work unit of the data: ")
    board.stores = True
    trainer.join(30)
    assert drawn == [Span(0, 0, 4)]
    assert board.keeper.waiting_for == ""
    assert board.keeper.report()["data_wait_seconds"] > 0


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within 30 s")


def test_a_stop_ends_the_wait() -> None:
    stop = threading.Event()
    board = Board(stopping=stop.is_set)
    board.stores = False
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Stopped):
        board.keeper.reserve(4)


def test_when_the_roster_is_silent_unconfirmed_units_are_used() -> None:
    board = Board(patience=0.3, pause=0.01)
    board.answers = False
    assert board.keeper.draw(4) == [Span(0, 0, 4)]
    assert "unsure" in {event["what"] for event in board.events}
    board.answers = True
    board.rivals = {OTHER: Heard(word=DataWord((Claim(0, 0, 5, 0.0, True),)), expires=1e9)}
    board.keeper.consumed([Span(0, 0, 4)])
    board.answer()
    assert board.keeper.report()["samples_overlapping"] == 4
    assert [own.unit for own in board.keeper.book.mine] == [1]


def test_what_was_drawn_from_a_unit_given_up_meanwhile_counts_as_overlap() -> None:
    board = Board(pause=0.0)
    spans = board.keeper.draw(6)
    board.rivals = {OTHER: Heard(word=DataWord((Claim(0, 0, 5, -5.0, True),)), expires=1e9)}
    board.answer()
    assert all(own.unit != 0 for own in board.keeper.book.mine)
    board.keeper.consumed(spans)
    report = board.keeper.report()
    assert (report["samples"], report["samples_overlapping"], report["units_given_up"]) == (6, 6, 1)


def test_fast_machines_hold_more_units_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr("stretto.node.data.units.time.monotonic", lambda: seconds[0])
    board = Board(pause=0.0)
    board.answer()
    board.answer()
    for _ in range(20):
        board.keeper.consumed(board.keeper.draw(10))
    seconds[0] = 10.0  # 20 units in 10 s
    board.answer()
    assert board.keeper.book.ahead == 3
    assert len(board.keeper.book.mine) == 4
    seconds[0] = 20.0
    board.answer()
    assert board.keeper.book.ahead == 1


# ---------------------------------------------------------------------- the journal


def said_by(path: Path) -> tuple[Bookmark | None, list[str]]:
    lines: list[str] = []
    return Journal(path, CUT, lines.append).read(), lines


def test_a_killed_node_goes_on_where_the_journal_says(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    first = Board(pause=0.0, journal=Journal(path, CUT, lambda _: None))
    first.keeper.consumed(first.keeper.draw(14))
    first.answer()  # publishes, and writes the journal
    first.keeper.consumed(first.keeper.draw(3))  # nobody heard of these
    kept, lines = said_by(path)
    assert lines == []
    assert kept is not None
    assert (kept.samples, kept.clean, kept.done_below, kept.claims[0].position) == (14, False, 1, 4)
    second = Board(pause=0.0)
    second.keeper.restore(kept)
    assert second.keeper.draw(2) == [Span(1, 4, 6)]
    assert second.keeper.state().samples == 14
    assert second.keeper.report()["samples_repeated_at_most"] == 6 + 10
    assert {"event": "unit", "unit": 1, "what": "taken over", "position": 4} in second.events


def test_a_node_that_left_in_order_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    first = Board(pause=0.0, journal=Journal(path, CUT, lambda _: None))
    first.keeper.consumed(first.keeper.draw(14))
    first.keeper.word(active=False, clean=True)
    kept, _ = said_by(path)
    assert kept is not None
    assert kept.clean
    assert kept.samples == 14
    second = Board(pause=0.0)
    second.keeper.restore(kept)
    assert second.keeper.draw(2) == [Span(1, 4, 6)]
    assert second.keeper.report()["samples_repeated_at_most"] == 0


def test_no_journal_is_no_news(tmp_path: Path) -> None:
    assert said_by(tmp_path / "data.json") == (None, [])


GOOD: dict[str, Any] = {
    "windows": 1000, "unit_sequences": 10, "claims": [[3, 0, 4, True]], "done_below": 2, "done_mask": "08",
    "samples": 24, "clean": False, "counted": 0,
}  # fmt: skip


def test_the_form_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    found, lines = said_by(path)
    assert (found, lines) == (Bookmark((Claim(3, 0, 4, 0.0, True),), 2, b"\x08", 24, False), [])
    assert found is not None
    Journal(path, CUT, lambda _: None).write(found)
    assert json.loads(path.read_text(encoding="utf-8")) == GOOD


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[]", "no table"),
        ("x" * (MAX_FILE + 1), "longer than"),
        ("[" * 5000, ""),
        (json.dumps({**GOOD, "windows": 999}), "other data"),
        (json.dumps({**GOOD, "claims": [[1, 0, 0, True]] * 5}), "at most 4 claims"),
        (json.dumps({**GOOD, "claims": [[1, 0, 0, True]] * 2}), "two of one unit"),
        (json.dumps({**GOOD, "claims": [[1, 5, 4, True]]}), "behind its position"),
        (json.dumps({**GOOD, "claims": [[1, 0]]}), "not enough values"),
        (json.dumps({**GOOD, "claims": [["1", 0, 0, True]]}), "not a whole number"),
        (json.dumps({**GOOD, "done_mask": "0g"}), "hexadecimal"),
        (json.dumps({**GOOD, "done_mask": "00" * 257}), "at most 4 claims"),
        (json.dumps({**GOOD, "done_below": -1}), "beyond all bounds"),
        (json.dumps({**GOOD, "samples": 1e3}), "not a whole number"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "samples"}), "samples"),
    ],
)
def test_a_damaged_journal_is_ignored_in_words(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content, encoding="utf-8")
    found, (line,) = said_by(path)
    assert found is None
    assert line.startswith(f"WARNING {path} cannot be used and is ignored")
    assert why in line


def test_a_journal_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    lines: list[str] = []
    journal = Journal(tmp_path / "missing" / "data.json", CUT, lines.append)
    for _ in range(3):
        journal.write(Bookmark())
    assert len(lines) == 1
    assert "will read some data twice" in lines[0]


def test_of_a_checkpoint_and_a_journal_the_one_further_on_counts() -> None:
    checkpoint, journal = Bookmark(samples=100), Bookmark(samples=140)
    assert latest(checkpoint, journal) is journal
    assert latest(None, checkpoint) is checkpoint
    assert latest(Bookmark(samples=140, clean=True), journal).clean  # type: ignore[union-attr]
    assert latest(None, None) is None


def test_what_was_lost_with_the_weights_is_read_again_and_what_a_round_took_over_is_not() -> None:
    checkpoint = Bookmark(samples=100, counted=3)
    assert place(checkpoint, Bookmark(samples=140, counted=3)) is checkpoint
    counted_since = Bookmark(samples=140, counted=4)
    assert place(checkpoint, counted_since) is counted_since
    assert place(None, counted_since) is counted_since
    assert place(checkpoint, None) is checkpoint
    older = Bookmark(samples=90, counted=3)
    assert place(checkpoint, older) is checkpoint
    same = Bookmark(samples=100, counted=3, clean=True)
    assert place(checkpoint, same) is same


def test_a_counted_contribution_is_kept_in_the_bookmark_over_lives() -> None:
    units = local_units(100, 10)
    units.contribution_counted()
    again = local_units(100, 10)
    again.restore(units.state())
    again.contribution_counted()
    assert again.state().counted == 2
