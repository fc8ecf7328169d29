"""Carries a plan of faults out on a swarm, and notes what was really done and when."""

import time
from collections.abc import Sequence

from tests.chaos.faults import Fault, Planned
from tests.chaos.story import Hit
from tests.chaos.swarm import Swarm


class Injector:
    """``step`` does what is due. The plan's seconds count from ``start``; no fault begins once ``stop_at_round`` came.

    A fault whose victim has left by itself (its run is over, or it crashed) is left out and counted in ``skipped``.
    """

    def __init__(self, swarm: Swarm, planned: Sequence[Planned], *, start: float, stop_at_round: int) -> None:
        self._swarm, self._start, self._stop_at_round = swarm, start, stop_at_round
        self._todo = list(planned)
        self._going: list[tuple[Planned, Hit]] = []
        self._sides = 0
        self.skipped = 0

    @property
    def going(self) -> list[Hit]:
        """Faults that last."""
        return [hit for _, hit in self._going]

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._todo and not self._going

    def step(self) -> None:
        """Begin and end what is due now."""
        now = time.time()
        for entry in list(self._going):
            planned, hit = entry
            if now >= hit.begin + planned.seconds and self._end(planned):
                hit.end = time.time()
                self._going.remove(entry)
        if self._todo and self._swarm.last_round() >= self._stop_at_round:
            self._todo.clear()
        while self._todo and now >= self._start + self._todo[0].begin:
            self._begin(self._todo.pop(0))

    def _begin(self, planned: Planned) -> None:
        swarm = self._swarm
        # A restart may take longer than planned: a peer that is still away is not hit again.
        busy = {victim for hit in self.going for victim in hit.victims}
        if any(swarm.nodes[v].ended or swarm.nodes[v].down or v in busy for v in planned.victims):
            self.skipped += 1
            return
        hit = Hit(planned.fault.value, planned.victims, time.time(), whole=planned.whole)
        self._sides += 1
        for victim in planned.victims:
            if planned.fault is Fault.KILL:
                swarm.kill(victim)
            elif planned.fault is Fault.STOP:
                swarm.freeze(victim, whole=planned.whole)
            elif planned.fault is Fault.CUT:
                swarm.links.cut(victim)
            else:
                swarm.links.move(victim, self._sides)
        swarm.hits.append(hit)
        self._going.append((planned, hit))

    def _end(self, planned: Planned) -> bool:
        """Take the cause away; False if that is not possible yet."""
        swarm = self._swarm
        for victim in planned.victims:
            if planned.fault is Fault.KILL:
                if not swarm.restart(victim):
                    return False
            elif planned.fault is Fault.STOP:
                swarm.thaw(victim)
            elif planned.fault is Fault.CUT:
                swarm.links.mend(victim)
            else:
                swarm.links.move(victim, 0)
        return True

    def end_all(self) -> None:
        """Take all causes away, whatever their time: the run is over."""
        for planned, hit in self._going:
            if self._end(planned):
                hit.end = time.time()
        self._going.clear()
        self._todo.clear()
