"""Events in words: one line each, and no flood of lines that say the same."""

from typing import Any

import numpy as np

from stretto.node.events import Narrator, chain_fields, event_in_words, pace_in_words, run_in_words
from stretto.node.swarm.identity import format_peer_id
from stretto.protocol.chain import CommitRecord, Member, SignedRecord, after, genesis
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import FragmentState
from tests.fakes import toy_config


def committed(round: int, members: int = 4) -> dict[str, Any]:
    return {
        "event": "round",
        "round": round,
        "fragment": round % 4,
        "outcome": "committed",
        "members": members,
        "counted": True,
        "seconds": 0.25,
    }


def aborted(round: int, why: str) -> dict[str, Any]:
    return {"event": "round", "round": round, "fragment": round % 4, "outcome": "aborted", "why": why, "seconds": 3.0}


def test_a_committed_round_names_round_fragment_and_group() -> None:
    assert event_in_words(committed(6)) == "round 6 (fragment 2) committed by 4 peer(s) in 0.2 s"


def test_an_aborted_round_says_why() -> None:
    assert event_in_words(aborted(5, "no quorum")) == "round 5 (fragment 1) aborted: no quorum"


def test_steps_are_for_the_metrics_file_only() -> None:
    assert event_in_words({"event": "step", "step": 1}) is None


def test_a_round_per_second_is_a_line_in_ten_seconds() -> None:
    narrator = Narrator(pause=10.0)
    lines = [narrator.line(committed(round), now=float(round)) for round in range(31)]
    said = [line for line in lines if line]
    assert len(said) == 4
    assert said[1] == "round 10 (fragment 2) committed by 4 peer(s) in 0.2 s (and 9 more like it)"


def test_a_change_is_said_at_once() -> None:
    narrator = Narrator(pause=10.0)
    assert narrator.line(committed(0), now=0.0)
    assert narrator.line(committed(1, members=3), now=1.0) == "round 1 (fragment 1) committed by 3 peer(s) in 0.2 s"
    assert narrator.line(aborted(2, "no quorum"), now=2.0)
    assert narrator.line(aborted(3, "no quorum"), now=3.0) is None
    assert narrator.line(aborted(4, "no coordinator answered"), now=4.0)


def test_what_is_unusual_about_a_work_unit_is_said() -> None:
    event = {"event": "unit", "unit": 12, "position": 7}
    assert event_in_words(event | {"what": "done"}) is None
    assert event_in_words(event | {"what": "held"}) is None
    assert event_in_words(event | {"what": "given up"}) == (
        "work unit 12: given up, another peer has the better claim (position 7)"
    )


def test_the_run_in_one_line_names_what_peers_share() -> None:
    line = run_in_words(toy_config())
    assert "outer lr" in line
    assert "contributions as" in line
    assert "\n" not in line


def test_a_pace_is_called_what_it_is() -> None:
    text = pace_in_words(0.5)
    assert "padded to 0.5 s" in text
    assert "emulated device time" in text


def test_an_event_that_moves_a_chain_says_where_to() -> None:
    members = tuple(
        Member(peer_id(index), 100 + index, bytes([index]) * 32) for index in sorted(range(2), key=peer_id)
    )
    peers = tuple(member.peer for member in members)
    record = CommitRecord(
        run=bytes(32), fragment=1, round=5, version=3, prev=b"p" * 32, members=members, electors=peers,
        state=b"s" * 32, tokens_total=900, clock=Clock(round=6, at=1.0, interval=1.0), coordinator=peers[0],
    )  # fmt: skip
    empty = np.zeros(1, dtype=np.float32)
    old = FragmentState(empty, empty, genesis(bytes(32), 0, bytes(32)))
    new = FragmentState(empty, empty, after(record), SignedRecord(record, bytes(64)))
    fields = chain_fields({**committed(5), "fragment": 1, "version": 3}, [old, new])
    assert fields == {
        "round": 5,
        "version": 3,
        "head": record.head().hex()[:16],
        "prev": (b"p" * 8).hex(),
        "contributions": {format_peer_id(member.peer)[-8:]: member.tokens for member in members},
    }
    assert chain_fields({"event": "repair", "state": "done", "fragment": 1}, [old, new]) == fields
    # The tip has moved on meanwhile, there is none yet, or the event moves nothing.
    assert chain_fields({**committed(4), "fragment": 1, "version": 2}, [old, new]) == {}
    assert chain_fields({"event": "repair", "state": "done", "fragment": 0}, [old, new]) == {}
    assert chain_fields({"event": "repair", "state": "begun", "fragment": 1}, [old, new]) == {}
    assert chain_fields({"event": "fault", "what": "odd"}, [old, new]) == {}
