"""What is held for lost when peers vanish, come back, are cut off, or are started again."""

from typing import Any

from stretto.node.swarm.losses import Losses
from stretto.protocol.roster import PeerRecord

A, B, C = b"a", b"b", b"c"


def record(tokens: int, uncounted: int, *, state: str = "training", lost: int = 0) -> PeerRecord:
    fields: dict[str, Any] = {
        "version": "1", "state": state, "addresses": (), "client_mode": False, "rate": 1.0, "step": 0, "loss": 0.0,
        "tau": 1, "clock": None, "versions": (), "chain_tokens": (), "last_tokens": (), "heads": bytes(32),
    }  # fmt: skip
    return PeerRecord(tokens=tokens, uncounted=uncounted, lost=lost, **fields)


def test_a_peer_that_vanishes_takes_along_what_no_round_has_counted() -> None:
    losses = Losses()
    assert losses.look({A: record(100, 10), B: record(200, 20)}) == {}
    assert losses.look({A: record(110, 20), B: record(210, 30)}) == {}
    assert losses.look({A: record(120, 30)}) == {B: 30}
    assert losses.look({A: record(130, 0)}) == {}
    assert losses.tokens == 30


def test_who_leaves_in_order_loses_nothing() -> None:
    losses = Losses()
    losses.look({A: record(100, 10), B: record(200, 20)})
    losses.look({A: record(100, 10), B: record(200, 20, state="leaving")})
    assert losses.look({A: record(110, 20)}) == {}
    assert losses.tokens == 0


def test_who_was_only_cut_off_has_lost_nothing_once_it_is_back() -> None:
    losses = Losses()
    losses.look({A: record(100, 10), B: record(200, 20)})
    losses.look({A: record(110, 20)})
    assert losses.tokens == 20
    assert losses.look({A: record(120, 30), B: record(260, 80)}) == {}
    assert losses.tokens == 0


def test_who_comes_back_from_a_checkpoint_has_lost_what_that_lacks() -> None:
    losses = Losses()
    losses.look({A: record(100, 10), B: record(200, 20)})
    losses.look({A: record(110, 20)})
    losses.look({A: record(120, 30), B: record(195, 15, state="joining")})
    assert losses.tokens == 5


def test_who_is_started_again_before_its_record_ends_is_noticed_by_its_tokens() -> None:
    losses = Losses()
    losses.look({A: record(100, 10), B: record(200, 20)})
    assert losses.look({A: record(110, 20), B: record(0, 0, state="joining")}) == {B: 20}
    assert losses.look({A: record(120, 20), B: record(10, 10)}) == {}
    assert losses.tokens == 20


def test_who_sees_nobody_concludes_nothing() -> None:
    losses = Losses()
    losses.look({A: record(100, 10), B: record(200, 20)})
    assert losses.look({}) == {}
    assert losses.tokens == 0
    assert losses.look({A: record(150, 60), B: record(260, 80)}) == {}
    assert losses.look({A: record(150, 60)}) == {B: 80}


def test_a_newcomer_takes_over_the_median_of_what_the_others_say() -> None:
    losses = Losses()
    losses.look({A: record(100, 10, lost=70), B: record(200, 20, lost=70), C: record(1, 1, lost=1 << 60)})
    assert losses.tokens == 70
    losses.look({A: record(100, 10, lost=70), B: record(200, 20, lost=70)})
    assert losses.tokens == 71
