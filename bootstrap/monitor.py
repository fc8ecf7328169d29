"""What a bootstrap peer sees of the swarm: the roster, in one line, and what changed since the last look."""

from collections.abc import Mapping

from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.summary import summarize
from stretto.protocol.config import RunConfig
from stretto.protocol.roster import PeerRecord


class Monitor:
    """Remembers who was there."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._known: frozenset[bytes] = frozenset()

    def line(self, peers: Mapping[bytes, PeerRecord]) -> str:
        """One line on the swarm as ``peers`` tells it."""
        summary = summarize(self._run, self._run.digest(), peers)
        came, went = peers.keys() - self._known, self._known - peers.keys()
        self._known = frozenset(peers)
        if not peers:
            return "serving the run config; no peer is in the run" + _names("left", went)
        agree = "chains agree" if summary["heads_equal"] else "chains differ"
        units = f", {summary['units_done']} units of data done" if summary["units_done"] else ""
        return (
            f"{summary['peers']} peer(s) training, round {summary['round']}, {summary['commits']} commits, {agree}"
            + units
            + _names("new", came)
            + _names("left", went)
        )


def _names(what: str, peers: frozenset[bytes] | set[bytes]) -> str:
    return f", {what}: {', '.join(format_peer_id(peer)[-8:] for peer in sorted(peers))}" if peers else ""
