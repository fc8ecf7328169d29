"""The windows: what a delay does to them, and what cannot mislead them."""

import pytest

from stretto.node.swarm.window import (
    BACK,
    LEAST,
    LEAST_CHUNK,
    LEAST_PATH,
    MEMORY,
    MOST,
    MOST_CHUNK,
    STALL,
    START,
    TARGET,
    USUAL,
    Least,
    Path,
    Window,
)

A, B, C = b"a", b"b", b"c"


def full(window: Window, to: bytes, now: float) -> int:
    """Fill the window towards ``to``; returns the bytes that this took."""
    room = int(min(window.size - window.in_flight, window.path(to).size - window.path(to).in_flight))
    window.take(to, room, now)
    return room


def trip(window: Window, to: bytes, now: float, queued: float, *, base: float = 0.05, clock: float = 1e6) -> None:
    """A window full of bytes leaves ``now`` and is acknowledged after ``base`` and a queue, in one."""
    nbytes = full(window, to, now)
    window.acknowledged(to, nbytes, now, now + clock + base / 2 + queued, now + base + queued)


def test_windows_double_in_each_round_trip_without_queues_up_to_the_most() -> None:
    window = Window()
    sizes = []
    for turn in range(10):
        trip(window, A, float(turn), 0.0)
        sizes.append(window.size)
    assert sizes[:3] == [2 * START, 4 * START, 8 * START]
    assert window.size == window.path(A).size == MOST
    assert window.chunk(A) == MOST_CHUNK


def test_windows_shrink_to_the_least_under_long_queues_and_come_back() -> None:
    window = Window()
    trip(window, A, 0.0, 0.0)
    for turn in range(1, 10):
        trip(window, A, 10.0 * turn, 4 * TARGET)
    assert (window.size, window.path(A).size) == (LEAST, LEAST_PATH)
    assert window.chunk(A) == LEAST_CHUNK
    trip(window, A, 100.0, 0.0)
    assert window.size > LEAST


def test_a_queue_of_the_target_leaves_windows_as_they_are() -> None:
    window = Window()
    trip(window, A, 0.0, 0.0)
    before = window.size
    trip(window, A, 1.0, TARGET)
    assert window.size == pytest.approx(before)


def test_a_window_that_is_not_used_does_not_grow() -> None:
    window = Window()
    for turn in range(50):
        window.take(A, 1000, float(turn))
        window.acknowledged(A, 1000, float(turn), float(turn), turn + 0.01)
    assert window.size == window.path(A).size == START


def test_a_slow_receiver_shrinks_its_own_path_and_not_the_line() -> None:
    window = Window()
    trip(window, A, 0.0, 0.0)
    trip(window, B, 0.5, 0.0)
    for turn in range(1, 9):
        window.take(A, LEAST_CHUNK, float(turn))
        window.take(B, LEAST_CHUNK, float(turn))
        window.acknowledged(B, LEAST_CHUNK, float(turn), turn + 1e6 + 0.025, turn + 0.05)
        window.take(B, LEAST_CHUNK, turn + 0.06)
        window.acknowledged(A, LEAST_CHUNK, float(turn), turn + 1e6 + 0.825, turn + 0.85)
        window.acknowledged(B, LEAST_CHUNK, turn + 0.06, turn + 0.06 + 1e6 + 0.025, turn + 0.9)
    assert window.path(A).size <= START
    assert window.size >= 2 * START


def test_a_queue_on_all_paths_shrinks_the_line() -> None:
    window = Window()
    for to in (A, B):
        trip(window, to, 0.0, 0.0)
    before = window.size
    for to in (A, B):
        window.take(to, LEAST_CHUNK, 5.0)
    for to in (A, B):
        window.acknowledged(to, LEAST_CHUNK, 5.0, 5.0 + 1e6 + 1.025, 6.05)
    assert window.size < before


def test_what_waits_on_the_way_back_is_not_our_queue() -> None:
    path = Path()
    path.measure(0.0, 500.02, 0.04, idle=True)
    path.measure(1.0, 501.02, 1.34, idle=False)
    assert path.queued == pytest.approx(0.0)
    path.measure(2.0, 502.22, 2.54, idle=False)
    assert path.queued == pytest.approx(0.2)


def test_a_receivers_clock_cannot_hide_a_long_queue_nor_invent_one() -> None:
    path = Path()
    path.measure(0.0, 500.0, 0.04, idle=True)
    path.measure(1.0, 501.0, 1.0 + 0.04 + BACK + 2.0, idle=False)
    assert path.queued == pytest.approx(2.0)
    path.measure(9.0, 1e12, 9.14, idle=False)
    assert path.queued == pytest.approx(0.1)
    # That clock is now the one to go by.
    path.measure(10.0, 1e12 + 1.0, 10.34, idle=False)
    assert path.queued == pytest.approx(0.0, abs=1e-3)


def test_who_comes_late_does_not_take_the_queue_for_the_way() -> None:
    path = Path()
    path.measure(0.0, 501.0, 1.0, idle=False)
    assert path.queued == pytest.approx(1.0 - USUAL)
    path.measure(2.0, 502.5, 2.5, idle=False)
    assert path.queued == pytest.approx(0.5 - USUAL)
    # Alone on the line it learns how long the way is: here longer than usual.
    path.measure(5.0, 505.4, 5.4, idle=True)
    assert path.queued == 0
    path.measure(6.0, 506.5, 6.5, idle=False)
    assert path.queued == pytest.approx(0.1)


def test_the_least_delay_is_forgotten_after_a_while() -> None:
    least = Least()
    assert least.put(1.0, 0.0) == 1.0
    assert least.put(5.0, MEMORY) == 1.0
    assert least.put(5.0, MEMORY + 1) == 1.0
    assert least.put(5.0, 2 * MEMORY + 2) == 5.0


def test_a_path_that_is_full_and_a_line_that_is_full() -> None:
    window = Window()
    assert window.path_has_room(A, START)
    window.take(A, START - 10, 0.0)
    assert not window.path_has_room(A, 11)
    assert window.path_has_room(A, 10)
    assert window.path_has_room(B, 11)
    assert not window.line_has_room(11, 0.0)
    assert window.line_has_room(10, 0.0)


def test_a_peer_that_stopped_does_not_keep_the_line() -> None:
    window = Window()
    full(window, A, 0.0)
    assert not window.line_has_room(LEAST_CHUNK, STALL - 0.1)
    assert window.line_has_room(LEAST_CHUNK, STALL)
    assert not window.path_has_room(A, LEAST_CHUNK)


def test_bytes_that_nobody_acknowledges_are_given_back() -> None:
    window = Window()
    window.take(A, 5000, 0.0)
    window.give_back(A, 5000)
    assert window.in_flight == 0


def test_what_is_remembered_of_peers_is_bounded() -> None:
    window = Window()
    window.take(A, 1, 0.0)
    for number in range(2000):
        window.path(number.to_bytes(4, "big"))
    assert len(window._paths) <= 256
    assert window.path(A).in_flight == 1
