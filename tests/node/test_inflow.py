"""How a join goes, in numbers and words."""

from stretto.node.swarm.inflow import SAY_EVERY, SPAN, Amount, Inflow
from stretto.protocol.repair import Pieces

MB = 1_000_000


def test_rate_and_time_left_are_those_of_the_last_seconds() -> None:
    inflow = Inflow()
    assert inflow.words() == "0.0 of 0.0 MB from 0 peer(s)"
    for second in range(31):
        # 2 MB/s for 20 s, then 1 MB/s.
        have = 2 * MB * min(second, 20) + MB * max(0, second - 20)
        inflow.look(Amount(have, 240 * MB, 3), float(second))
    assert inflow.rate == 1 * MB
    assert inflow.left == 190
    assert inflow.words() == "50.0 of 240.0 MB from 3 peer(s), 1.00 MB/s, about 3 min 10 s left"
    assert inflow.began == 0.0
    assert inflow.seconds == 30.0


def test_a_download_that_stands_still_has_no_time_left_to_tell() -> None:
    inflow = Inflow()
    inflow.look(Amount(5 * MB, 10 * MB, 1), 0.0)
    for second in range(1, 2 * int(SPAN)):
        inflow.look(Amount(6 * MB, 10 * MB, 1), float(second))
    assert inflow.left is None
    assert inflow.words() == "6.0 of 10.0 MB from 1 peer(s)"
    assert inflow.seconds == 1.0  # until the last bytes


def test_a_growing_total_makes_the_rest_longer_and_hours_are_told_as_such() -> None:
    inflow = Inflow()
    inflow.look(Amount(0, 100 * MB, 2), 0.0)
    inflow.look(Amount(10 * MB, 100 * MB, 2), 10.0)
    assert inflow.left == 90
    inflow.look(Amount(10 * MB, 4010 * MB, 2), 10.0)
    assert inflow.left == 4000
    assert inflow.words().endswith("about 1 h 6 min left")


def test_entries_come_at_intervals() -> None:
    inflow = Inflow()
    due = [second for second in range(20) if inflow.entry_due(float(second))]
    assert due == [0, 5, 10, 15]
    assert SAY_EVERY == 5.0


def test_donors_at_work_are_those_that_are_asked_for_something() -> None:
    pieces = Pieces([10, 10], 0.0)
    for donor in (b"a", b"b", b"c"):
        pieces.add(donor, 0.0)
    assert pieces.at_work() == []
    pieces.take(b"a", 0.0)
    pieces.take(b"c", 0.0)
    assert pieces.at_work() == [b"a", b"c"]
    pieces.arrived(b"a", 1.0)
    assert pieces.at_work() == [b"c"]
