"""Work that was lost with peers that vanished, as one peer sees it in the roster.

Each record says how many tokens its sender has trained on that no round has counted yet (``uncounted``). If a peer is
gone without having left, its last word is what it took along. It may only have been cut off: when it is back and has
trained on, nothing was lost after all. If it comes back from a checkpoint, only what that checkpoint lacks is.

While this peer sees nobody at all it concludes nothing: then it is as likely itself that is cut off. A peer that joins
takes over the total of those it meets first (the median), so that the swarm's number outlives its peers.
"""

from collections.abc import Mapping
from statistics import median_low

from stretto.protocol.roster import PeerRecord

MAX_GONE = 1024
"""Peers that are remembered as gone, the last ones."""


class Losses:
    """Hand every reading of the roster to ``look``; ``tokens`` is what has been lost since the run began."""

    def __init__(self) -> None:
        self._before: int | None = None
        """What was lost before this peer came, in the others' words."""
        self._seen: dict[bytes, PeerRecord] = {}
        self._gone: dict[bytes, tuple[int, int]] = {}
        """Who vanished: tokens trained on by its last word, and how many of them are held for lost."""
        self._settled = 0

    @property
    def tokens(self) -> int:
        """Tokens trained on and lost, at most."""
        return (self._before or 0) + self._settled + sum(lost for _, lost in self._gone.values())

    def look(self, peers: Mapping[bytes, PeerRecord]) -> dict[bytes, int]:
        """``peers`` are all others in the roster now. Returns whose loss became known, and how many tokens it is."""
        if not peers:
            return {}
        if self._before is None:
            self._before = median_low(record.lost for record in peers.values())
        news: dict[bytes, int] = {}
        for peer, record in peers.items():
            if peer in self._gone:
                self._back(peer, record)
            elif peer in self._seen and record.tokens < self._seen[peer].tokens:
                before = self._seen[peer]  # it was started again before its record ended
                self._lose(peer, min(before.uncounted, before.tokens - record.tokens), news)
        for peer, before in self._seen.items():
            if peer not in peers and before.state == "training":
                self._gone[peer] = (before.tokens, before.uncounted)
                if before.uncounted:
                    news[peer] = before.uncounted
        while len(self._gone) > MAX_GONE:
            self._settled += self._gone.pop(next(iter(self._gone)))[1]
        self._seen = dict(peers)
        return news

    def _back(self, peer: bytes, record: PeerRecord) -> None:
        trained, lost = self._gone.pop(peer)
        self._settled += min(lost, max(0, trained - record.tokens))

    def _lose(self, peer: bytes, tokens: int, news: dict[bytes, int]) -> None:
        if tokens:
            self._settled += tokens
            news[peer] = tokens
