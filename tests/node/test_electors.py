"""Which electors are reckoned with: goodbyes count at once, silence after the run's absence time."""

from stretto.node.swarm.electors import ElectorWatch
from stretto.protocol.chain import Tip
from stretto.protocol.roster import PeerRecord
from stretto.protocol.simulation import peer_id

A, B, C = sorted(peer_id(index) for index in range(3))
TIP = Tip(fragment=0, version=1, head=bytes(32), tokens_total=10, electors=(A, B, C))


def record(state: str) -> PeerRecord:
    return PeerRecord(
        version="1",
        state=state,
        addresses=(),
        client_mode=False,
        rate=1.0,
        step=0,
        loss=0.0,
        tau=0,
        tokens=0,
        clock=None,
        versions=(1,),
        chain_tokens=(10,),
        last_tokens=(10,),
        heads=bytes(32),
    )


def test_whoever_says_goodbye_has_resigned_even_when_its_record_is_gone() -> None:
    watch = ElectorWatch(900.0)
    assert watch.resigned([TIP], {B: record("leaving"), C: record("training")}, 0.0) == [B]
    assert watch.resigned([TIP], {C: record("training")}, 100.0) == [B]


def test_whoever_pauses_has_resigned_until_it_goes_on() -> None:
    watch = ElectorWatch(900.0)
    assert watch.resigned([TIP], {B: record("paused"), C: record("training")}, 0.0) == [B]
    assert watch.resigned([TIP], {B: record("training"), C: record("training")}, 1.0) == []


def test_whoever_comes_back_is_reckoned_with_again() -> None:
    watch = ElectorWatch(900.0)
    watch.resigned([TIP], {B: record("finished")}, 0.0)
    assert watch.resigned([TIP], {B: record("training")}, 10.0) == []


def test_silence_counts_only_after_the_absence() -> None:
    watch = ElectorWatch(900.0)
    everybody = {peer: record("training") for peer in (A, B, C)}
    assert watch.resigned([TIP], everybody, 0.0) == []
    assert watch.resigned([TIP], {A: record("training"), C: record("training")}, 900.0) == []
    assert watch.resigned([TIP], {A: record("training"), C: record("training")}, 900.1) == [B]


def test_a_peer_that_was_never_seen_is_waited_for_from_now_on() -> None:
    watch = ElectorWatch(60.0)
    assert watch.resigned([TIP], {}, 1000.0) == []
    assert watch.resigned([TIP], {A: record("ready")}, 1061.0) == [B, C]


def test_a_quorum_without_those_who_resigned() -> None:
    assert not TIP.quorum({C})
    assert TIP.quorum({C}, resigned={A, B})
    assert not TIP.quorum({C}, resigned={B})  # one of two, and not the first
    assert TIP.quorum({A}, resigned={B})
    assert TIP.quorum({A, C}, resigned={A, B})  # whoever votes has not resigned
