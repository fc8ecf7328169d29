"""The plan of faults: by seed, at its rate, never two on one peer, never without a majority."""

from collections import Counter

import pytest

from tests.chaos.faults import Fault, Planned, Times, each_once, plan

PEERS = [f"p{index}" for index in range(8)]
TIMES = Times()


def half_hour(seed: int, peers: list[str] = PEERS, per_hour: float = 125.0) -> list[Planned]:
    return plan(seed=seed, peers=peers, seconds=1800, per_hour=per_hour, times=TIMES)


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    assert half_hour(1) == half_hour(1)
    assert half_hour(1) != half_hour(2)


@pytest.mark.parametrize("seed", range(20))
def test_rate_and_kinds(seed: int) -> None:
    found = half_hour(seed)
    assert 56 <= len(found) <= 63  # 62.5, less those that would outlast the half hour
    assert [x.begin for x in found] == sorted(x.begin for x in found)
    assert all(x.begin >= 0 and x.begin + x.seconds <= 1800 for x in found)
    counts = Counter(x.fault for x in found)
    assert counts.keys() == set(Fault)
    assert max(counts.values()) - min(counts.values()) <= 1
    whole = [x.whole for x in found if x.fault is Fault.STOP]
    assert whole == [index % 2 == 1 for index in range(len(whole))]
    assert not any(x.whole for x in found if x.fault is not Fault.STOP)
    assert {x.seconds for x in found if x.fault is Fault.PARTITION} == {72.0}
    assert len({victim for x in found for victim in x.victims}) == 8


@pytest.mark.parametrize("peers", [3, 4, 5, 8])
@pytest.mark.parametrize("per_hour", [125.0, 1000.0])
def test_its_promises_hold_at_every_moment(peers: int, per_hour: float) -> None:
    for seed in range(10):
        found = half_hour(seed, PEERS[:peers], per_hour)
        assert len(found) >= 15
        last: dict[str, float] = {}
        for x in found:
            assert len(set(x.victims)) == len(x.victims) > 0
            for victim in x.victims:
                assert x.begin >= last.get(victim, 0.0) - 0.01
                last[victim] = x.begin + TIMES.away(x.fault) + TIMES.rest
            away = {v for y in found if y.begin <= x.begin < y.begin + TIMES.away(y.fault) - 0.01 for v in y.victims}
            assert 2 * len(away) < peers, (x, away)


def test_a_partition_may_take_several_and_the_rest_one() -> None:
    sizes = {len(x.victims) for seed in range(10) for x in half_hour(seed) if x.fault is Fault.PARTITION}
    assert sizes == {1, 2, 3}
    assert {len(x.victims) for seed in range(10) for x in half_hour(seed) if x.fault is not Fault.PARTITION} == {1}


@pytest.mark.parametrize(("peers", "per_hour"), [(2, 125.0), (0, 125.0), (8, 0.0), (8, -1.0)])
def test_what_cannot_be_planned_is_refused(peers: int, per_hour: float) -> None:
    with pytest.raises(ValueError, match="majority"):
        half_hour(1, PEERS[:peers], per_hour)


def test_each_once_is_one_after_the_other() -> None:
    times = Times(kill=2, stop=8, partition=12, cut=5)
    kinds = {Fault.KILL: "p1", Fault.CUT: "p2", Fault.STOP: "p3", Fault.PARTITION: "p4"}
    found = each_once(peers=PEERS, times=times, kinds=kinds, pause=6)
    assert [(x.fault.value, x.victims, x.begin, x.seconds) for x in found] == [
        ("kill", ("p1",), 0.0, 2.0),
        ("cut", ("p2",), 8.0, 5.0),
        ("stop", ("p3",), 19.0, 8.0),
        ("partition", ("p4",), 33.0, 12.0),
    ]
    with pytest.raises(ValueError, match="nobody is none of the peers p0, p1"):
        each_once(peers=PEERS, times=times, kinds={Fault.KILL: "nobody"}, pause=6)
