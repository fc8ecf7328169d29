"""What can happen to a peer at home, and a plan by seed of what happens when to whom.

The plan is a pure function: the same seed, peers and times give the same faults. It keeps two promises at every
moment: no peer has two faults at once, nor one within ``rest`` of the last; and fewer than half of the peers are away,
so that a majority can go on.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Fault(str, Enum):
    """One kind of fault."""

    KILL = "kill"
    """kill -9 of the node; started again with the same data dir a few seconds later."""
    STOP = "stop"
    """SIGSTOP of the node, then SIGCONT. Its network daemon runs on, so that the others see an open connection on
    which nobody answers; in every second one the daemon is stopped too, as when a laptop sleeps."""
    PARTITION = "partition"
    """A minority is cut off; its members still see each other."""
    CUT = "cut"
    """The line is down."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault that begins ``begin`` seconds after the plan's start and lasts ``seconds``.

    ``whole`` is for STOP: the daemon is stopped as well.
    """

    fault: Fault
    victims: tuple[str, ...]
    begin: float
    seconds: float
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that each kind lasts, that a killed peer needs to be there again, and that each victim is left alone."""

    kill: float = 5.0
    stop: float = 30.0
    partition: float = 72.0
    cut: float = 10.0
    boot: float = 25.0
    rest: float = 45.0

    def of(self, fault: Fault) -> float:
        """How long ``fault`` lasts."""
        return float(getattr(self, fault.value))

    def away(self, fault: Fault) -> float:
        """How long its victim is missing."""
        return self.of(fault) + (self.boot if fault is Fault.KILL else 0.0)


def plan(*, seed: int, peers: Sequence[str], seconds: float, per_hour: float, times: Times) -> list[Planned]:
    """Faults for ``seconds``, at ``per_hour``, every kind equally often, in order of their beginning.

    A fault whose moment has nobody left to hit waits until there is somebody. ValueError if ``peers`` are too few for
    one to be away, or the rate is not one.
    """
    limit = (len(peers) - 1) // 2
    if limit < 1 or per_hour <= 0:
        raise ValueError(f"no fault leaves a majority among {len(peers)} peers, or the rate {per_hour} is none")
    chance = random.Random(seed)
    gap = 3600.0 / per_hour
    deck: list[Fault] = []
    wholes = 0
    away_until: dict[str, float] = {}
    free_from: dict[str, float] = dict.fromkeys(peers, 0.0)
    planned: list[Planned] = []
    number, earliest = 0, 0.0
    while True:
        begin = max(earliest, (number + chance.uniform(0.1, 0.9)) * gap)
        if not deck:
            deck = chance.sample(list(Fault), len(Fault))
        fault = deck.pop()
        while True:
            free = [peer for peer in peers if free_from[peer] <= begin]
            room = limit - sum(until > begin for until in away_until.values())
            if free and room > 0:
                break
            ends = [t for t in (*free_from.values(), *away_until.values()) if t > begin]
            begin = min(ends)
        if begin + times.of(fault) > seconds:
            return planned
        size = 1
        if fault is Fault.PARTITION and chance.random() < 0.5:
            size = chance.randint(1, min(room, len(free)))
        victims = tuple(sorted(chance.sample(free, size)))
        wholes += fault is Fault.STOP
        planned.append(
            Planned(
                fault=fault,
                victims=victims,
                begin=round(begin, 2),
                seconds=times.of(fault),
                whole=fault is Fault.STOP and wholes % 2 == 0,
            )
        )
        for victim in victims:
            away_until[victim] = begin + times.away(fault)
            free_from[victim] = away_until[victim] + times.rest
        number, earliest = number + 1, begin


def each_once(*, peers: Sequence[str], times: Times, kinds: Mapping[Fault, str], pause: float) -> list[Planned]:
    """One fault of every kind to a named victim, one after the other with ``pause`` between them: the short run."""
    begin, planned = 0.0, []
    for fault, victim in kinds.items():
        if victim not in peers:
            raise ValueError(f"{victim} is none of the peers {', '.join(peers)}")
        planned.append(Planned(fault=fault, victims=(victim,), begin=begin, seconds=times.of(fault)))
        begin += times.of(fault) + pause
    return planned
