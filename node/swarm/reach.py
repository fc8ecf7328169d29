"""A place at a relay: how a peer behind a router that forwards nothing can be reached all the same.

Such a peer reaches others, and those that it has reached can answer over its own connection. What it lacks is being
found by peers that cannot be reached either: two of them meet at a relay only. Every bootstrap peer is one. It passes
bytes on and can read none of them, they are encrypted between the two ends.

Until it has a place, and whenever it has lost it, the peer counts as one in client mode: it coordinates no round.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from stretto.node.swarm.exchange import Exchange
from stretto.node.swarm.host import Host, is_relayed

LOOK = 5.0
"""Seconds between two looks at this peer's addresses."""

SLOW = 240.0
"""Without a place for so many seconds something is wrong, and it is said; the daemon itself may wait for 180 s."""


class Reach:
    """Follows whether this peer has a place at a relay, and lets the round's protocol know."""

    def __init__(
        self, host: Host, exchange: Exchange, *, say: Callable[[dict[str, Any]], None], tell: Callable[[str], None]
    ) -> None:
        self._host, self._exchange, self._say, self._tell = host, exchange, say, tell
        self._began = asyncio.get_running_loop().time()
        self._warned = self._began

    async def keep(self) -> None:
        """Until cancelled; returns at once where no relay was asked for."""
        if not self._host.config.relays:
            return
        self._turn(self._host.relayed)
        if not self._host.relayed:
            self._tell("asking the bootstrap peers to be this node's relay; that takes up to three minutes")
        while True:
            await self._host.refresh_addresses()
            if self._host.relayed != self._exchange.peer.can_coordinate:
                self._turn(self._host.relayed)
                self._exchange.roster.nudge()
            self._warn(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK)

    def _turn(self, reachable: bool) -> None:
        with self._exchange.sync.outer_lock:
            self._exchange.peer.can_coordinate = reachable
        places = [address for address in self._host.addresses if is_relayed(address)]
        if reachable:
            self._tell(f"reachable through a relay: {places[0]}")
        self._say({"event": "relay", "addresses": places})

    def _warn(self, now: float) -> None:
        if self._host.relayed:
            self._began = self._warned = now
        elif now - self._warned >= SLOW:
            self._warned = now
            self._tell(
                f"WARNING no bootstrap peer has been this node's relay for {now - self._began:.0f} s; it takes part "
                "in rounds, but peers that cannot be reached either do not find it. A relay must have a public address"
            )
