"""When a lonely node warns and dials."""

import itertools

from stretto.node.swarm.isolation import GRACE, REDIAL, UNANSWERED, Isolation, Unanswered


def live(watch: Isolation, start: int, stop: int, in_sight: int) -> tuple[list[int], list[int]]:
    """The seconds at which it warned and dialled, looked at once a second."""
    warned, dialled = [], []
    for now in range(start, stop):
        watch.look(float(now), in_sight)
        if watch.warning_due(float(now)):
            warned.append(now)
        if watch.dial_due(float(now)):
            dialled.append(now)
    return warned, dialled


def test_before_anybody_was_seen_it_dials_quietly() -> None:
    watch = Isolation()
    assert live(watch, 0, 100, 0) == ([], [0, 30, 60, 90])
    assert watch.seconds(100.0) == 0.0


def test_with_others_in_sight_it_dials_now_and_then() -> None:
    assert live(Isolation(), 0, 100, 2) == ([], [0, 30, 60, 90])


def test_alone_it_dials_soon_and_warns_with_growing_pauses() -> None:
    watch = Isolation()
    live(watch, 0, 100, 1)
    warned, dialled = live(watch, 100, 700, 0)
    gone = 99 + int(GRACE)
    assert warned[:4] == [gone, 99 + 17, 99 + 29, 99 + 50]
    assert len(warned) <= 9
    assert dialled[:5] == [gone, gone + 2, gone + 6, gone + 14, gone + 30]
    assert {later - earlier for earlier, later in itertools.pairwise(dialled[5:])} == {int(REDIAL)}
    assert watch.seconds(700.0) == 601.0


def test_company_ends_it_and_the_next_time_begins_anew() -> None:
    watch = Isolation()
    live(watch, 0, 10, 1)
    live(watch, 10, 200, 0)
    assert live(watch, 200, 210, 1) == ([], [])
    assert watch.seconds(209.0) == 0.0
    warned, dialled = live(watch, 210, 240, 0)
    assert warned[0] == dialled[0] == 209 + int(GRACE)


def test_that_nobody_accepts_connections_is_said_ever_more_rarely() -> None:
    watch = Unanswered()
    first = int(UNANSWERED)
    assert [now for now in range(600) if watch.warning_due(float(now), True)] == [first * 2**i for i in range(6)]
    assert not watch.warning_due(600.0, False)
    assert not watch.warning_due(601.0, True)
    assert not watch.warning_due(600.0 + first, True)
    assert watch.warning_due(601.0 + first, True)
