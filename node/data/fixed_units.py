"""The data of a lockstep run: which peer reads which samples is fixed before the start.

In an ordinary run peers claim work units as they go, so who reads what depends on who is fast. In lockstep peer
``rank`` of M reads the units rank, rank + M, rank + 2 M, ... of the same order (``stretto.protocol.units``), each from
its beginning to its end: a pure function of the run's seed, the rank and M. Nobody asks the roster.
"""

from typing import Any

from stretto.node.data.units import Span
from stretto.protocol.errors import ConfigError
from stretto.protocol.unitbook import Bookmark
from stretto.protocol.units import UnitCut


class FixedUnits:
    """A ``UnitSource`` that never waits. ``sit`` gives it its place; without one it is alone and reads all units."""

    waiting_for = ""
    """It waits for nothing; see ``UnitKeeper``."""

    def __init__(self, cut: UnitCut) -> None:
        self.cut = cut
        self._rank, self._peers = 0, 1
        self._done = self._drawn = (0, 0)
        """Turn and position of the next sample: after what was trained on, and after what was drawn."""
        self._samples = self._units_done = self._counted = 0

    def sit(self, rank: int, peers: int) -> None:
        """Read as peer ``rank`` of ``peers``, from 0. Before anything was drawn."""
        assert self._drawn == (0, 0), "a place is taken before anything is read"
        assert 0 <= rank < peers, f"there is no place {rank} among {peers}"
        self._rank, self._peers = rank, peers

    def draw(self, count: int) -> list[Span]:
        """Take the next ``count`` samples."""
        spans: list[Span] = []
        turn, position = self._drawn
        while count:
            unit = self._rank + turn * self._peers
            last = min(position + count, self.cut.size(unit))
            spans.append(Span(unit, position, last))
            count -= last - position
            turn, position = (turn, last) if last < self.cut.size(unit) else (turn + 1, 0)
        self._drawn = (turn, position)
        return spans

    def reserve(self, _count: int) -> float:
        """Nothing has to be waited for."""
        return 0.0

    def consumed(self, spans: list[Span]) -> None:
        """These samples have been trained on."""
        self._done = self._drawn
        self._samples += sum(span.last - span.first for span in spans)
        self._units_done += sum(span.last == self.cut.size(span.unit) for span in spans)

    def dropped(self) -> None:
        """What was drawn and not consumed comes again."""
        self._drawn = self._done

    def contribution_counted(self) -> None:
        """The swarm has taken over what was trained on up to a round's departure."""
        self._counted += 1

    def state(self, *, clean: bool = False) -> Bookmark:
        """The counts, for a checkpoint; the place follows from them."""
        return Bookmark(samples=self._samples, clean=clean, counted=self._counted)

    def restore(self, bookmark: Bookmark) -> None:
        """ConfigError: a peer that goes on in the middle would not train in lockstep."""
        raise ConfigError(
            f"the data dir holds an earlier life of this peer in this run ({bookmark.samples:,} samples read): a "
            "lockstep run is computed from its beginning. Start all its peers with empty data dirs"
        )

    def report(self) -> dict[str, Any]:
        """As ``UnitKeeper.report``: what happened to this node's units, as plain values."""
        return {
            "samples": self._samples,
            "units_done": self._units_done,
            "units_taken_over": 0,
            "units_given_up": 0,
            "units_done_elsewhere": 0,
            "units_passed_over": 0,
            "samples_repeated_at_most": 0,
            "samples_overlapping": 0,
            "data_wait_seconds": 0.0,
        }
