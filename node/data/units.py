"""The units of one node, between its two threads: the trainer takes samples, the network publishes claims.

The trainer never waits for the network as long as a unit is held; one is held ahead, more of them where units are
short for this machine's speed. It waits, and says so, at the very start, and if its units run out before a new one is
confirmed. If the roster stays silent for ``PATIENCE`` it goes on with unconfirmed claims: what it then trains on twice
with others is counted, while a machine that stands still helps nobody.

Drawn is not consumed: ``draw`` moves a cursor that only this process knows. What was drawn counts, for the peers and
on disk, when the inner step that used it is done (``consumed``).
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from stretto.node.data.journal import Journal
from stretto.node.swarm.thread import Stopped
from stretto.protocol.unitbook import Bookmark, Heard, OwnClaim, UnitBook
from stretto.protocol.units import MAX_CLAIMS, DataWord, UnitCut

PATIENCE = 20.0
"""Seconds for which the trainer waits for a claim to be confirmed."""

RESERVE = 8.0
"""Seconds of training that lie in units held ahead: twice the time between two readings of the roster."""

NUDGE = 0.5
"""Seconds between two requests for a reading, while the trainer waits."""


@dataclass(frozen=True)
class Span:
    """Samples ``first`` .. ``last`` - 1 of a unit."""

    unit: int
    first: int
    last: int


class UnitSource(Protocol):
    """Where a reader gets its samples from."""

    def draw(self, count: int) -> list[Span]:
        """Take the next ``count`` samples."""

    def reserve(self, count: int) -> float:
        """Wait until ``count`` samples can be drawn without waiting; the seconds waited."""

    def consumed(self, spans: list[Span]) -> None:
        """These samples have been trained on."""

    def dropped(self) -> None:
        """What was drawn and not consumed comes again."""

    def state(self, *, clean: bool = False) -> Bookmark:
        """The place in the data, for a checkpoint."""

    def restore(self, bookmark: Bookmark) -> None:
        """Go on from ``bookmark``, before anything was drawn."""


class UnitKeeper:
    """A node's ``UnitSource``. ``now`` is swarm time.

    ``stopping``: whether the node was asked to stop; ``draw`` and ``reserve`` raise ``Stopped`` rather than wait then.
    """

    def __init__(
        self,
        book: UnitBook,
        *,
        now: Callable[[], float],
        stopping: Callable[[], bool] = lambda: False,
        journal: Journal | None = None,
        patience: float = PATIENCE,
        pause: float = NUDGE,
    ) -> None:
        self.book = book
        self._now, self._stopping, self._journal = now, stopping, journal
        self._ask: Callable[[], None] = lambda: None
        self._say: Callable[[dict[str, Any]], None] = lambda _: None
        self._patience, self._pause = patience, pause
        self.waiting_for = ""
        """What the trainer waits for, in words."""
        self.waited = 0.0
        """Seconds that it has waited so far."""
        self._changed = threading.Condition(threading.RLock())
        self._drawn: dict[int, int] = {}
        """For units with samples drawn and not yet consumed: the next position to draw."""
        self._before, self._counted = 0, 0
        """Samples that this peer trained on in earlier lives; contributions that rounds counted, in all lives."""
        self._heard_at: float | None = None
        """When the roster was read last, monotonic."""
        self._pace = (time.monotonic(), 0)
        self._least_ahead = 1

    def connect(self, *, ask: Callable[[], None], say: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Before anything else: ``ask`` wants the roster renewed and read soon, ``say`` takes events."""
        self._ask, self._say = ask, say

    # ------------------------------------------------------------------ training thread

    def draw(self, count: int) -> list[Span]:
        """Take the next ``count`` samples from units of this peer; waits if it has too few. Raises Stopped."""
        spans: list[Span] = []
        with self._changed:
            while True:
                spans += self._take(count - sum(span.last - span.first for span in spans))
                missing = count - sum(span.last - span.first for span in spans)
                if not missing:
                    return spans
                self._make_room()
                self._wait_for(missing)

    def reserve(self, count: int) -> float:
        """Wait until ``count`` samples can be drawn, or as many as claims are for. The seconds waited; or Stopped."""
        with self._changed:
            return self._wait_for(count)

    def consumed(self, spans: list[Span]) -> None:
        """The inner step that used ``spans`` is done."""
        with self._changed:
            done = self.book.counts.done
            for span in spans:
                if any(own.unit == span.unit for own in self.book.mine):
                    self.book.advance(span.unit, span.last)
                elif span.unit in self._drawn:  # given up while the step ran
                    self.book.lost(span.last - span.first)
            self._drawn.clear()
            self._tell()
            if self.book.counts.done > done:
                self._ask()

    def dropped(self) -> None:
        """What was drawn and not consumed comes again."""
        with self._changed:
            self._drawn.clear()

    def _take(self, count: int) -> list[Span]:
        """Up to ``count`` samples of those that are there."""
        spans: list[Span] = []
        for own in self.book.in_order():
            first = self._drawn.get(own.unit, own.position)
            last = min(first + count, self.book.cut.size(own.unit)) if own.usable else first
            if last > first:
                spans.append(Span(own.unit, first, last))
                self._drawn[own.unit] = last
                count -= last - first
        return spans

    def _left(self, own: OwnClaim) -> int:
        return self.book.cut.size(own.unit) - self._drawn.get(own.unit, own.position) if own.usable else 0

    def _make_room(self) -> None:
        """Where a step needs more units than a peer may claim, those drawn to their ends count as done before it."""
        if len(self.book.mine) == MAX_CLAIMS and not any(self._left(own) for own in self.book.mine):
            for own in [own for own in self.book.mine if own.usable]:
                del self._drawn[own.unit]
                self.book.advance(own.unit, self.book.cut.size(own.unit))

    def _wait_for(self, count: int) -> float:
        """Until ``count`` samples are there, or some are and a peer may not claim more. The seconds waited."""
        began, asked, mine = time.monotonic(), -math.inf, self.book.mine
        while (there := sum(self._left(own) for own in mine)) < count:
            ready = all(own.usable for own in mine)
            if ready and there and len(mine) == MAX_CLAIMS:
                break
            if self._stopping():
                raise Stopped
            if ready:
                self._least_ahead = max(self._least_ahead, min(len(mine), MAX_CLAIMS - 1))
                self.book.ahead = max(self.book.ahead, self._least_ahead)
            now = time.monotonic()
            silent = now - (began if self._heard_at is None else self._heard_at)
            if silent > self._patience or now - began > 2 * self._patience:
                self.book.fill(self._now())
                self.book.use_unsure()
                self._tell()
                continue
            self.waiting_for = f"waiting for a work unit of the data: {self._why()}"
            if now - asked > self._pause:
                self._ask()
                asked = now
            self._changed.wait(min(self._pause, 0.1))
        self.waiting_for = ""
        waited = time.monotonic() - began
        self.waited += waited
        return waited

    def _why(self) -> str:
        units = ", ".join(str(own.unit) for own in self.book.mine if not own.usable)
        return f"the claim of {units} is not confirmed yet" if units else "none is claimed yet"

    # ------------------------------------------------------------------ network thread

    def word(self, *, active: bool, clean: bool) -> DataWord:
        """What to publish now; the journal is written first. ``clean``: this node trains no more."""
        with self._changed:
            self._set_ahead()
            word = self.book.word(self._now(), active=active)
            bookmark = self.state(clean=clean)
            self._tell()
        if self._journal is not None:
            self._journal.write(bookmark)
        return word

    def heard(self, others: Mapping[bytes, Heard], published: DataWord | None, lease: float) -> None:
        """The roster was read; see ``UnitBook.heard``."""
        with self._changed:
            self._heard_at = time.monotonic()
            self.book.heard(self._now(), others, published, lease)
            self._tell()
            self._changed.notify_all()

    def _set_ahead(self) -> None:
        """As many units ahead as the measured speed uses up in ``RESERVE`` seconds."""
        (then, before), now, samples = self._pace, time.monotonic(), self.book.counts.samples
        if now - then >= RESERVE / 2:
            self._pace = (now, samples)
            units = (samples - before) / (now - then) * RESERVE / self.book.cut.length
            self.book.ahead = max(self._least_ahead, min(math.ceil(units), MAX_CLAIMS - 1))

    def _tell(self) -> None:
        events, self.book.events = self.book.events, []
        for what, unit, position in events:
            self._say({"event": "unit", "unit": unit, "what": what, "position": position})

    def contribution_counted(self) -> None:
        """The swarm has taken over what was trained on up to a round's departure."""
        with self._changed:
            self._counted += 1

    # ------------------------------------------------------------------ restarts and reports

    def state(self, *, clean: bool = False) -> Bookmark:
        """The place in the data after the last consumed step. ``clean``: nothing is trained on after it."""
        with self._changed:
            found = self.book.bookmark(self._before + self.book.counts.samples, clean=clean)
            return replace(found, counted=self._counted)

    def restore(self, bookmark: Bookmark) -> None:
        """Go on from ``bookmark``, before anything was drawn or published."""
        with self._changed:
            self._before, self._counted = bookmark.samples, bookmark.counted
            self.book.restore(bookmark, self._now())

    def report(self) -> dict[str, Any]:
        """What happened to this node's units, as plain values."""
        with self._changed:
            counts = self.book.counts
            return {
                "samples": counts.samples,
                "units_done": counts.done,
                "units_taken_over": counts.taken_over,
                "units_given_up": counts.given_up,
                "units_done_elsewhere": counts.done_elsewhere,
                "units_passed_over": counts.passed_over,
                "samples_repeated_at_most": counts.repeated_at_most,
                "samples_overlapping": counts.overlap,
                "data_wait_seconds": self.waited,
            }


def local_units(windows: int, unit_sequences: int) -> UnitKeeper:
    """The units of a lone reader without a network: every claim is confirmed at once."""
    keeper = UnitKeeper(UnitBook(b"", UnitCut(windows, unit_sequences)), now=lambda: 0.0, pause=0.0)
    keeper.connect(ask=lambda: keeper.heard({}, keeper.word(active=True, clean=False), math.inf))
    return keeper
