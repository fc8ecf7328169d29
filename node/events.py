"""Events of a node and settings of a run as sentences, for the person in front of it."""

from collections.abc import Sequence
from typing import Any

from stretto.node.swarm.identity import format_peer_id
from stretto.protocol.config import RunConfig
from stretto.protocol.streaming import FragmentState

UNIT_WORDS = {
    "taken over": "taken over from a peer that is gone, or from this one's earlier life",
    "given up": "given up, another peer has the better claim",
    "unsure": "used without being held, since the roster does not take this peer's record",
}
"""What of the work units is worth a line; the metrics file has all of it."""


def run_in_words(run: RunConfig) -> str:
    """The run's settings in one line."""
    outer, inner = run.outer, run.inner
    cut = f"{outer.fragments} fragments" if outer.fragments else f"fragments of {outer.fragment_bytes} bytes"
    return (
        f"the run: {run.model['model_type']} on {run.data.source}, AdamW lr {inner.lr:g}, {inner.tokens_per_step} "
        f"tokens per step, H {outer.inner_steps}, {cut}, alpha {outer.alpha:g}, outer lr {outer.lr:g}, "
        f"tau up to {outer.tau_max}, contributions as {run.wire.up}"
    )


def pace_in_words(pace: float) -> str:
    """What a padded step means for every figure of this node."""
    return (
        f"WARNING every inner step is padded to {pace:g} s (--pace): speeds, overlap and utilization of this node are "
        "emulated device time, not what this machine can do"
    )


def lockstep_over(why: str) -> str:
    """Why a run in lockstep ends."""
    return f"lockstep: {why}. This run can no longer equal the simulation, so this node ends"


def chain_fields(event: dict[str, Any], fragments: Sequence[FragmentState]) -> dict[str, Any]:
    """For an event that moved the tip of a fragment's chain: where it is now, and whose tokens the last record counts.

    ``head`` and ``prev`` are the first 16 hex digits of the chain's head and of the one before it, ``contributions``
    the tokens of each counted peer by the last 8 characters of its id, ``round`` the round that made the record.
    They tell one lineage from another.
    """
    if event.get("outcome") != "committed" and (event["event"], event.get("state")) != ("repair", "done"):
        return {}
    signed = fragments[event["fragment"]].record
    if signed is None or signed.record.version != event.get("version", signed.record.version):
        return {}
    record = signed.record
    return {
        "round": record.round,
        "version": record.version,
        "head": record.head().hex()[:16],
        "prev": record.prev.hex()[:16],
        "contributions": {format_peer_id(member.peer)[-8:]: member.tokens for member in record.members},
    }


class Narrator:
    """Which events are worth a line now: each kind of event at most every ``pause`` seconds while it stays the same.

    In a run with a round per second nobody reads a line per round; the metrics file has them all.
    """

    def __init__(self, pause: float = 10.0) -> None:
        self._pause = pause
        self._said: dict[str, float] = {}
        self._skipped: dict[str, int] = {}

    def line(self, event: dict[str, Any], now: float) -> str | None:
        """The line for ``event`` at monotonic time ``now``, None if nothing needs to be said."""
        text = event_in_words(event)
        if text is None:
            return None
        key = " ".join(str(event.get(name, "")) for name in ("event", "outcome", "state", "why", "what", "peer"))
        if event.get("members") is not None:
            key += f" {event['members']} {event['counted']}"
        if now - self._said.get(key, -self._pause) < self._pause:
            self._skipped[key] = self._skipped.get(key, 0) + 1
            return None
        if len(self._said) > 200:
            self._said.clear()
            self._skipped.clear()
        self._said[key] = now
        skipped = self._skipped.pop(key, 0)
        return f"{text} (and {skipped} more like it)" if skipped else text


def event_in_words(event: dict[str, Any]) -> str | None:
    """One line for an event, None for those that only the metrics file needs."""
    kind = event["event"]
    if kind == "round" and event["outcome"] == "committed":
        counted = "" if event["counted"] else ", without this peer's contribution"
        return (
            f"round {event['round']} (fragment {event['fragment']}) committed by {event['members']} peer(s) "
            f"in {event['seconds']:.1f} s{counted}"
        )
    if kind == "round" and event.get("resting"):
        return None  # this node rests, which was said once and is in its status line
    if kind == "round":
        return f"round {event['round']} (fragment {event['fragment']}) {event['outcome']}: {event['why']}"
    if kind == "repair" and event["state"] != "begun":
        why = event.get("why", f"{event.get('seconds', 0)} s")
        return f"repair of fragment {event['fragment']}: {event['state']} ({why})"
    if kind == "merge" and event["late"]:
        return f"result of fragment {event['fragment']} came late, {event['tau']} steps after its snapshot; merged now"
    if kind == "unit" and event["what"] in UNIT_WORDS:
        return f"work unit {event['unit']}: {UNIT_WORDS[event['what']]} (position {event['position']})"
    if kind == "clip":
        return (
            f"contribution of {event['peer']} was scaled by {event['factor']:.3g}: its norm is far above the others'"
        )
    if kind == "checkpoint":
        return (
            f"checkpoint of step {event['step']} written: {event['bytes'] / 1e6:,.1f} MB in {event['seconds']:.1f} s, "
            f"training waited {event['blocked_seconds']:.2f} s"
        )
    if kind == "lost":
        return (
            f"peer {event['peer'][-8:]} is gone without having left: {event['tokens']:,} tokens that it trained on "
            "are lost, unless it comes back with them"
        )
    if kind == "fault":
        return f"WARNING {event.get('peer', '')} {event['what']}".replace("  ", " ")
    return None
