"""What to make of the peers' clocks: pure functions of measured offsets.

A peer's offset is measured by a round trip (Cristian 1989): asked at t0, answered between t1 and t2 of the peer's
time, back at t3,

    offset = ((t1 - t0) + (t2 - t3)) / 2        error <= ((t3 - t0) - (t2 - t1)) / 2

wherever in the round trip the delay was. Of several round trips the shortest counts.

Who is followed: the median of all offsets, this peer's own 0 among them, if more than half of the voters agree with
it within ``TOLERANCE``. The median of a set with an honest majority lies between two honest values, so a single liar
moves nobody. Without a majority (two clocks that differ, for instance) the voter with the smallest peer id is
followed: a rule that all of them apply alike, so that two peers never swap their times. A newcomer has no vote, only a
casting one where the others have no majority; nor has a bootstrap peer, which follows those who train.

A clock is moved by no more than what exceeds the error of the measurement. Otherwise delays that differ by direction
(an uplink that is busy whenever one asks) would look like an offset to everybody, and the whole swarm would run away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TOLERANCE = 0.25
"""Seconds by which a clock may differ from the median and still agree with it, beside the error of the measurement."""

STEP = 1.0
"""Seconds: a running clock that is off by more is set at once; less is slewed."""

DEAD_BAND = 0.02
"""Seconds that are never corrected."""

WIDE = 1.0
"""Seconds: a measurement with a larger error is used only where there is no better one."""

WRONG = 3.0
"""Seconds by which a machine's clock may differ before people are told."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One peer's clock: ``offset`` is its swarm time minus this peer's, known to ``error`` (seconds).

    ``correction`` is, in the peer's own words, its swarm time minus its machine's clock.
    """

    peer: bytes
    offset: float
    error: float
    correction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Swarm time is ``target`` seconds ahead of this peer's, known to ``error``; ``majority``: most voters say so."""

    target: float
    error: float
    majority: bool
    agreeing: int
    """Peers, without this one, that agree with the target."""
    asked: int


def round_trip(
    peer: bytes, *, sent: float, received: float, answered: float, back: float, correction: float = 0.0
) -> Sample | None:
    """The sample of one round trip, None if its times cannot be: the peer held it longer than it was away."""
    away, held = back - sent, answered - received
    if not 0.0 <= held <= away:
        return None
    return Sample(
        peer=peer,
        offset=((received - sent) + (answered - back)) / 2,
        error=(away - held) / 2,
        correction=correction,
    )


def decide(samples: Sequence[Sample], *, me: bytes, votes: bool) -> Verdict | None:
    """Where swarm time is, None without samples. ``votes``: whether this peer's own clock counts like the others'."""
    usable = [sample for sample in samples if sample.error <= WIDE] or list(samples)
    if not usable:
        return None
    own = Sample(peer=me, offset=0.0, error=0.0)
    electorates = [[*usable, own]] if votes else [usable, [*usable, own]]
    for voters in electorates:
        verdict = _majority(voters, me)
        if verdict is not None:
            return verdict
    leader = min([*usable, own] if votes else usable, key=lambda sample: sample.peer)
    agreeing = _near(usable, leader.offset)
    return Verdict(
        target=leader.offset,
        error=leader.error,
        majority=False,
        agreeing=sum(sample.peer != me for sample in agreeing),
        asked=len(usable),
    )


def _near(samples: Sequence[Sample], target: float) -> list[Sample]:
    return [sample for sample in samples if abs(sample.offset - target) <= TOLERANCE + sample.error]


def _majority(voters: Sequence[Sample], me: bytes) -> Verdict | None:
    agreeing = _near(voters, median(voter.offset for voter in voters))
    if 2 * len(agreeing) <= len(voters):
        return None
    return Verdict(
        target=median(voter.offset for voter in agreeing),
        error=median(voter.error for voter in agreeing),
        majority=True,
        agreeing=sum(voter.peer != me for voter in agreeing),
        asked=sum(voter.peer != me for voter in voters),
    )


def correction_due(verdict: Verdict) -> float:
    """Seconds that a running clock should be moved by: what of the target is certain."""
    certain = max(0.0, abs(verdict.target) - max(DEAD_BAND, verdict.error))
    return certain if verdict.target > 0 else -certain


@dataclass(frozen=True, kw_only=True)
class WallClocks:
    """How this machine's own clock compares with those of the peers' machines, whatever swarm time is.

    ``ahead`` is its lead over their median in seconds. ``against`` of ``asked`` peers are behind (or ahead) of it by
    more than ``WRONG``, ``odd`` names other peers' clocks that are off, with their lead over the median of all.
    """

    ahead: float
    against: int
    asked: int
    odd: tuple[tuple[bytes, float], ...]

    @property
    def wrong(self) -> bool:
        """Whether this machine's clock is the one that is off: most of the others say so."""
        return 2 * self.against > self.asked


def compare_walls(samples: Sequence[Sample], correction: float) -> WallClocks:
    """Compare the machines' clocks. ``correction`` is this peer's own swarm time minus its wall clock, seconds."""
    mine = -correction
    walls = {sample.peer: sample.offset - sample.correction for sample in samples}
    errors = {sample.peer: sample.error for sample in samples}
    if not walls:
        return WallClocks(ahead=0.0, against=0, asked=0, odd=())
    ahead = mine - median(walls.values())
    off = [peer for peer, wall in walls.items() if abs(mine - wall) > WRONG + errors[peer]]
    against = sum((mine > walls[peer]) == (ahead > 0) for peer in off)
    middle = median([*walls.values(), mine])
    odd = tuple((peer, wall - middle) for peer, wall in sorted(walls.items()) if abs(wall - middle) > WRONG)
    return WallClocks(ahead=ahead, against=against, asked=len(walls), odd=odd)


def walls_in_words(walls: WallClocks, name: str) -> str | None:
    """The line for people, None if all clocks agree. ``name`` says who the odd ones are, e.g. their short ids."""
    if walls.wrong:
        direction = "ahead of" if walls.ahead > 0 else "behind"
        doubt = " (or that one's clock is wrong)" if walls.asked == 1 else ""
        return (
            f"WARNING your clock is {abs(walls.ahead):.1f} s {direction} {walls.against} of {walls.asked} peers"
            f"{doubt}; Stretto corrects for it, other programs do not: turn on time synchronization (NTP) here"
        )
    if walls.odd:
        lead = walls.odd[0][1]
        count = len(walls.odd)
        return (
            f"WARNING the clocks of {count} of {walls.asked} peers ({name}) differ from this machine's and most "
            f"others, the first by {abs(lead):.1f} s ({'ahead' if lead > 0 else 'behind'}); Stretto corrects for it, "
            "their owners should turn on time synchronization"
        )
    return None
