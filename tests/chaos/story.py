"""What happened in a run, as plain values: what the nodes wrote down, and what was done to them.

Times are seconds since 1970, as in metrics.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass
class Hit:
    """A fault that was really done. ``end`` is when its cause was over: restart issued, SIGCONT, line up, healed."""

    fault: str
    victims: tuple[str, ...]
    begin: float
    end: float | None = None
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Story:
    """One run. ``ids`` are the peers' ids, ``exits`` the exit codes of their last lives (None: still running)."""

    setting: Mapping[str, Any]
    peers: Sequence[str]
    rounds: int
    fragments: int
    ids: Mapping[str, str]
    events: Mapping[str, Sequence[Event]]
    hits: Sequence[Hit]
    reports: Mapping[str, Mapping[str, Any]]
    exits: Mapping[str, int | None]
    bytes_up: Mapping[str, int]
    told_at: float
    load: float = 0.0
    """Processes that wanted a core, per core, in the last minute: above 1, speeds are those of a busy machine."""

    def name_of(self, tail: str) -> str:
        """The peer whose id ends so."""
        return next((name for name, text in self.ids.items() if text.endswith(tail)), tail)

    def rounds_of(self, peer: str) -> list[Event]:
        """A peer's round events."""
        return [event for event in self.events.get(peer, ()) if event["event"] == "round"]

    def worked_rounds(self, peer: str) -> list[Event]:
        """Those of its rounds that counted work of its own: what leaves before its first step weighs nothing."""
        return [
            event
            for event in self.rounds_of(peer)
            if event.get("counted")
            and any(tokens > 0 and self.name_of(tail) == peer for tail, tokens in event["contributions"].items())
        ]
