"""What every scenario is given and gives back."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line sets. A scenario uses what concerns it: ``every`` are the seconds between two changes."""

    peers: int = 8
    minutes: float = 30.0
    faults_per_hour: float = 140.0
    every: float = 120.0
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    """A report, and in words each goal that was missed."""

    report: dict[str, Any]
    missed: list[str]
