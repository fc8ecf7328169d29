"""What this node sends and receives in a month: counted, kept on disk, and held to the monthly cap.

``traffic.json`` in the data dir belongs to the machine's line, not to a run::

    {"month": "2026-11", "up": 123456, "down": 654321}

Counted is what the kernel says of the daemon's sockets (``stretto.node.swarm.sockets``). Where it says nothing, it is
what the ``Line`` counted, with MARGIN on top for what the daemon adds.

The watch looks every few seconds. When the budget says so it pauses the exchange: no round departs, nothing is
downloaded or served, the roster record says ``paused`` so that nobody waits for this node, and training goes on. Being
in the roster still costs some hundred bytes per second, more than a small cap brings in. So a node whose allowance is
in debt, or whose whole cap is gone, falls silent: it asks the DHT nothing and lets go of all connections, until the
allowance is half of what it needs to go on.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.node.swarm.budget import MonthlyBudget, Used
from stretto.node.swarm.folders import write_whole
from stretto.node.swarm.line import Line
from stretto.node.swarm.sockets import SocketMeter
from stretto.protocol.errors import ConfigError

MARGIN = 0.1
"""Added to what the line counts where the kernel does not tell."""

EVERY = 2.0
"""Seconds between two looks."""

SAVE_EVERY = 60.0
"""Seconds between two writes of the file, and between two entries in the metrics."""

SAMPLE_ROUNDS = 4
"""Rounds after which it is known anew what a round costs."""

MAX_FILE = 4096
MAX_BYTES = 2**60


def read_used(path: Path, tell: Callable[[str], None]) -> Used | None:
    """What the file says, None if there is none; a damaged one is left out with a warning."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_FILE))
        month, up, down = content["month"], content["up"], content["down"]
        if not (isinstance(month, str) and len(month) == 7 and all(_is_count(count) for count in (up, down))):
            raise ValueError("it does not hold a month and two counts")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        tell(
            f"WARNING {path} cannot be used: {why}. This month's traffic is counted from 0, so the monthly cap may be "
            "exceeded by what was used before"
        )
        return None
    return Used(month, up, down)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


def in_words(nbytes: float) -> str:
    """Bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


@dataclass
class Costs:
    """What the exchange tells the watch, in bytes: a round and a whole cycle by the run's settings, what catching up
    with the others costs at most; ``rounds`` is how many this node has entered."""

    round: float = 0.0
    cycle: float = 0.0
    catch_up: float = 0.0
    rounds: int = 0


class TrafficWatch:
    """Counts a node's traffic and decides when it pauses. ``cap`` in bytes per month, 0 for none.

    ``tell`` takes lines for people, ``say`` events, ``now`` is seconds since 1970.
    """

    def __init__(
        self,
        *,
        cap: int,
        path: Path,
        line: Line,
        meter: SocketMeter,
        say: Callable[[dict[str, Any]], None],
        tell: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._line, self._meter = path, line, meter
        self._say, self._tell, self._now = say, tell, now
        self.budget = MonthlyBudget(cap, read_used(path, tell), now())
        self.connections: int | None = None
        """TCP connections of the daemon, None where that is not known."""
        self._counted = (0, 0)
        self._measured = 0.0
        """What a round cost of late."""
        self._mark = (0, 0)
        """Bytes counted and rounds entered when that was measured last."""
        self._saved_at = now()
        self._failed = ""
        self._warned = False
        self.silent = False
        """Nothing may be sent or received at all."""
        self.reason = ""
        """Why the node pauses; it does not change while the pause lasts."""

    # ------------------------------------------------------------------ counting

    def count(self) -> None:
        """Take what passed since the last time from the budget."""
        totals, reading = self._line.totals, self._meter.look()
        up = int((totals.bulk_up + totals.control_up) * (1 if reading else 1 + MARGIN))
        down = int((totals.bulk_down + totals.control_down) * (1 if reading else 1 + MARGIN))
        if reading is not None:
            # A socket that closed between two looks keeps its last bytes for itself: the line knows better then.
            up, down = max(up, reading.up), max(down, reading.down)
            self.connections = reading.connections
        before = self._counted
        self._counted = (max(up, before[0]), max(down, before[1]))
        self.budget.count(self._counted[0] - before[0], self._counted[1] - before[1], self._now())

    def look(self, costs: Costs) -> str:
        """Count, decide, and tell; returns why the node pauses, empty if it does not."""
        self.count()
        budget, now = self.budget, self._now()
        round_bytes = self.round_bytes(costs)
        before = bool(self.reason)
        paused = budget.look(now, round_bytes=round_bytes, catch_up=costs.catch_up)
        if paused and not before:
            self.reason = "paused by the monthly cap"
            self._tell(f"{self.reason}: {self._why_paused(costs)}")
        elif before and not paused:
            self.reason = ""
            self._tell(
                f"the monthly cap allows rounds again: {in_words(budget.level)} may be used now, a round costs about "
                f"{in_words(round_bytes)}; catching up with the others first"
            )
        self._fall_silent(costs)
        if paused != before:
            self._say(self.entry(costs))
        if now - self._saved_at >= SAVE_EVERY or paused != before:
            self.save()
            if paused == before:
                self._say(self.entry(costs))
        return self.reason

    def _fall_silent(self, costs: Costs) -> None:
        budget, before = self.budget, self.silent
        if not self.reason:
            self.silent = False
        elif self.exhausted or budget.level < 0:
            self.silent = True
        elif budget.level >= 0.5 * budget.enough(self.round_bytes(costs), costs.catch_up):
            self.silent = False
        if self.silent and not before:
            self._tell(
                f"the allowance of the monthly cap is in debt by {in_words(max(0.0, -budget.level))}: this node "
                f"leaves the network for a while, to go on with rounds at about {self._when(costs)}; it trains on"
            )

    def _when(self, costs: Costs) -> str:
        return time.strftime("%d %b %H:%M", time.localtime(self._until(costs)))

    def round_bytes(self, costs: Costs) -> float:
        """What a round costs: what it has to, or what was measured if that is more."""
        if costs.rounds < self._mark[1]:
            self._mark = (sum(self._counted), costs.rounds)
        rounds = costs.rounds - self._mark[1]
        if rounds >= SAMPLE_ROUNDS:
            sample = (sum(self._counted) - self._mark[0]) / rounds
            self._measured = sample if not self._measured else (self._measured + sample) / 2
            self._mark = (sum(self._counted), costs.rounds)
        if self.reason:
            self._mark = (sum(self._counted), costs.rounds)  # what passes in a pause is no round's
        return max(costs.round * (1 + MARGIN), self._measured)

    # ------------------------------------------------------------------ words

    @property
    def exhausted(self) -> bool:
        """Nothing is left of the month's cap."""
        return bool(self.budget.cap) and self.budget.left <= 0

    def may_fetch(self, nbytes: float) -> bool:
        """Whether a download of so many bytes may begin."""
        return self.budget.may_fetch(nbytes)

    def status(self) -> str:
        """For the status line; empty without a cap."""
        if not self.budget.cap:
            return ""
        return f"{in_words(self.budget.used.total)} of {in_words(self.budget.cap)} used this month"

    def fields(self) -> dict[str, Any]:
        """This month so far, for metrics and reports."""
        used = self.budget.used
        return {"month": used.month, "month_up": used.up, "month_down": used.down, "monthly_cap": self.budget.cap}

    def entry(self, costs: Costs) -> dict[str, Any]:
        """The metrics event."""
        budget = self.budget
        return {
            "event": "traffic",
            **self.fields(),
            "allowance": round(budget.level),
            "round_bytes": round(self.round_bytes(costs)),
            "paused": bool(self.reason),
            "silent": self.silent,
            "until": self._until(costs) if self.reason else None,
        }

    def _until(self, costs: Costs) -> float:
        return round(self.budget.resumes_at(self.round_bytes(costs), costs.catch_up))

    def _why_paused(self, costs: Costs) -> str:
        budget = self.budget
        if self.exhausted:
            spread = "nothing is left, so this node also leaves the network"
        elif budget.left < self.round_bytes(costs):
            spread = "less than a round is left"
        else:
            spread = f"of the {in_words(budget.left)} left, {in_words(max(0.0, budget.level))} may be used now"
        return (
            f"{self.status()} ({in_words(budget.used.up)} up, {in_words(budget.used.down)} down), a round costs about "
            f"{in_words(self.round_bytes(costs))}, {spread}. This node sits out rounds, downloads and serves nothing "
            f"until about {self._when(costs)}, and trains on with its local weights"
        )

    def warn_if_small(self, costs: Costs) -> None:
        """Once, when it is known what a cycle costs: a cap that does not cover one a day is said to be too small."""
        budget = self.budget
        if not budget.cap or self._warned or not costs.cycle:
            return
        self._warned = True
        need = max(costs.cycle, costs.round) * (1 + MARGIN)
        day = budget.most
        if need > day:
            self._tell(
                f"WARNING the monthly cap is too small for one cycle a day: a cycle of rounds costs about "
                f"{in_words(need)}, and {in_words(day)} a day are left for the rest of the month. Raise --monthly-cap "
                f"to about {in_words(31 * need)} or more, or this node averages with the others less than once a day"
            )

    # ------------------------------------------------------------------ the file

    def save(self) -> None:
        """Write the file; a failure is told once and costs nothing else."""
        self._saved_at = self._now()
        used = self.budget.used
        try:
            text = json.dumps({"month": used.month, "up": used.up, "down": used.down})
            write_whole(self._path, text + "\n", "--data-dir")
            self._failed = ""
        except (OSError, ConfigError) as error:
            if str(error) != self._failed:
                self._tell(f"WARNING this month's traffic cannot be remembered: {error}")
            self._failed = str(error)
