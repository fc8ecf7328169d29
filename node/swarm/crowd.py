"""How many connections a node keeps: routers at home, and providers that share one address among many, allow few.

p2pd has a connection manager of its own (``-connHi``, ``-connLo``), but with a limit of 20 it was seen to keep 30
connections for as long as one looked. So the node looks every second and lets go of what it needs least: first
connections that carried no message of a run, then those that did so longest ago; never those of a round in hand. A
peer that is let go is dialled again when there is something to say to it.

Letting go alone would be a treadmill, since the others come back to ask the DHT. A node whose swarm does not fit its
limit therefore stops serving the DHT, and asks few of the others (``Host.be_frugal``). A round whose group would not
fit is sat out.
"""

from collections.abc import Collection, Mapping, Sequence

from stretto.protocol.errors import ConfigError

LEAST = 8
"""Smallest limit: the bootstrap peer, those that the DHT asks, and a group of five."""

TARGET = 0.85
"""Share of the limit to which connections are closed: others open some between two looks."""

ROOM = 2
"""Connections beside those of a round's group: the bootstrap peer, and one that the DHT asks."""

EVERY = 1.0
"""Seconds between two looks."""


def check_limit(limit: int, name: str) -> int:
    """``limit`` if it can be kept: 0 for none, or enough to take part. ConfigError otherwise."""
    if limit == 0 or limit >= LEAST:
        return limit
    raise ConfigError(
        f"{name} is {limit}, it must be at least {LEAST}, or 0 for no limit: a node needs the bootstrap peer, the "
        "peers that its DHT asks and those of a round's group at the same time"
    )


def target(limit: int) -> int:
    """Connections that are left after a look."""
    return int(TARGET * limit)


def largest_group(limit: int) -> int:
    """Members of the largest group that fits the limit, this node included."""
    return target(limit) - ROOM + 1


def superfluous(
    connected: Sequence[bytes], limit: int, *, used_at: Mapping[bytes, float], needed: Collection[bytes]
) -> list[bytes]:
    """The peers to let go, so that ``target(limit)`` are left: the longest unused first, none of the ``needed``."""
    excess = len(connected) - target(limit)
    if excess <= 0:
        return []
    spare = [peer for peer in connected if peer not in needed]
    return sorted(spare, key=lambda peer: used_at.get(peer, 0.0))[:excess]
