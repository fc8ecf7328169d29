"""Which connections a node lets go, and how large a limit must be."""

import pytest

from stretto.node.swarm.crowd import LEAST, check_limit, largest_group, superfluous, target
from stretto.protocol.errors import ConfigError

PEERS = [bytes([i]) for i in range(30)]


def test_nothing_is_let_go_below_the_target() -> None:
    assert superfluous(PEERS[:17], 20, used_at={}, needed=()) == []
    assert len(superfluous(PEERS[:18], 20, used_at={}, needed=())) == 1


def test_the_longest_unused_go_first_and_the_needed_stay() -> None:
    used_at = {peer: 100.0 - i for i, peer in enumerate(PEERS[:20])}  # the first was used last
    gone = superfluous(PEERS, 20, used_at=used_at, needed=PEERS[25:])
    assert gone == [*PEERS[20:25], *reversed(PEERS[12:20])]
    assert len(PEERS) - len(gone) == target(20)


def test_what_is_needed_stays_even_above_the_limit() -> None:
    assert superfluous(PEERS, 8, used_at={}, needed=PEERS) == []


def test_a_limit_too_small_is_named() -> None:
    assert check_limit(0, "max_connections") == 0
    assert check_limit(LEAST, "max_connections") == LEAST
    for limit in (-1, 1, LEAST - 1):
        with pytest.raises(ConfigError, match=f"max_connections is {limit}, it must be at least 8, or 0 for no limit"):
            check_limit(limit, "max_connections")


def test_groups_that_fit() -> None:
    assert largest_group(20) == 16  # the default of group.max_size
    assert largest_group(LEAST) == 5
