"""Which electors are reckoned with: a run must not stand still because of peers that are gone for good.

An elector that said goodbye in the roster, or says there that it pauses, has resigned until it is seen at work again.
One that nobody has seen for
the run's ``group.absence`` is taken for gone. That second rule gives up the promise that only one half of a split
network goes on, for splits that last longer; the fork choice then decides when the halves meet again.
"""

from collections.abc import Mapping, Sequence

from stretto.node.swarm.roster import online
from stretto.protocol.chain import Tip
from stretto.protocol.roster import PeerRecord


class ElectorWatch:
    """Remembers when each elector was seen last, since a roster record lives for seconds only."""

    def __init__(self, absence: float) -> None:
        self._absence = absence
        self._seen: dict[bytes, float] = {}
        self._left: set[bytes] = set()

    def resigned(self, tips: Sequence[Tip], roster: Mapping[bytes, PeerRecord], now: float) -> list[bytes]:
        """Electors of ``tips`` that vote no more, given the other peers' records at monotonic time ``now``."""
        electors = {peer for tip in tips for peer in tip.electors}
        for peer in electors:
            record = roster.get(peer)
            if record is not None and record.state in ("leaving", "finished", "paused"):
                self._left.add(peer)
            elif record is not None and online(record):
                self._left.discard(peer)
                self._seen[peer] = now
            self._seen.setdefault(peer, now)
        self._seen = {peer: at for peer, at in self._seen.items() if peer in electors}
        self._left &= electors
        return sorted(self._left | {peer for peer, at in self._seen.items() if now - at > self._absence})
