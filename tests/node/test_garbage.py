"""The collector after ``settle``: what was there is left alone, what comes later is freed."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from stretto.node.garbage import settle


class Loop:
    """Refers to itself, so only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """No pass but those asked for; the test process goes on with an ordinary collector."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_that_nobody_has_are_freed_before_and_after() -> None:
    early = weakref.ref(Loop())
    settle()
    assert early() is None
    late = weakref.ref(Loop())
    assert late() is not None
    gc.collect()
    assert late() is None


def test_what_is_there_is_not_looked_at_again() -> None:
    kept = Loop()
    count = settle()
    assert count == gc.get_freeze_count() > 10_000  # the standard library and pytest alone are more
    assert not any(found is kept for found in gc.get_objects())
    assert kept.me is kept
