"""The report, from events by hand: three peers, two fragments, a round every 10 s, steps of 100 tokens a second."""

import json
from typing import Any

import pytest

from tests.chaos import chains
from tests.chaos.report import (
    committed,
    departures,
    fault_part,
    make_report,
    plain_reason,
    present,
    recovery,
    round_part,
    steps_per_second,
)
from tests.chaos.run import summary
from tests.chaos.scenarios import Split, _judge_partition, _judge_uneven
from tests.chaos.story import Hit, Story

PEERS = ["p0", "p1", "p2"]
IDS = {name: f"12D3KooW{'x' * 8}tail-{name}"[-20:] for name in PEERS}
START = 1000.0


def step(second: int, number: int | None = None) -> dict[str, Any]:
    return {
        "event": "step",
        "time": START + second,
        "step": second + 1 if number is None else number,
        "tokens": 100,
        "loss": 1.0,
    }


def commit(
    round: int, version: int, who: dict[str, int], *, branch: str = "a", prev: str | None = None, late: float = 1.0
) -> dict[str, Any]:
    """A commit of round r of fragment r mod 2, which departed at START + 10 r."""
    fragment = round % 2
    return {
        "event": "round",
        "round": round,
        "fragment": fragment,
        "outcome": "committed",
        "time": START + 10 * round + late,
        "seconds": late,
        "members": len(who),
        "counted": True,
        "version": version,
        "head": f"{fragment}-{branch}-{version}",
        "prev": prev or f"{fragment}-{branch}-{version - 1}",
        "contributions": {IDS[name][-8:]: count for name, count in who.items()},
    }


def abort(round: int, why: str, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "event": "round",
        "round": round,
        "fragment": round % 2,
        "outcome": "aborted",
        "why": why,
        "time": START + 10 * round + seconds,
        "seconds": seconds,
    }


def story(
    events: dict[str, list[dict[str, Any]]],
    *,
    rounds: int = 6,
    hits: list[Hit] | None = None,
    reports: dict[str, dict[str, Any]] | None = None,
) -> Story:
    return Story(
        setting={"peers": 3},
        peers=PEERS,
        rounds=rounds,
        fragments=2,
        ids=IDS,
        events={name: sorted(found, key=lambda event: event["time"]) for name, found in events.items()},
        hits=hits or [],
        reports=reports or {},
        exits=dict.fromkeys(PEERS, 0),
        bytes_up=dict.fromkeys(PEERS, 7),
        told_at=START + 100,
    )


def node_report(heads: list[str]) -> dict[str, Any]:
    return {"heads": heads, "versions": [1, 1], "loss_last": 1.0, "compute_utilization": 0.99, "bytes_up": 5}


# ---------------------------------------------------------------------- rounds


def test_a_round_that_nobody_wrote_of_departed_between_its_neighbours() -> None:
    found = departures(
        story({"p0": [commit(0, 1, {"p0": 1}), abort(3, "no quorum")], "p1": [commit(1, 1, {"p1": 1})]})
    )
    assert found == {0: START, 1: START + 10, 2: START + 20, 3: START + 30}


def test_the_earliest_departure_counts() -> None:
    late = {**abort(0, "overtaken", 0.0), "time": START + 9}
    assert departures(story({"p0": [late], "p1": [commit(0, 1, {"p1": 1})]})) == {0: START}


def test_a_round_is_possible_while_a_majority_is_there() -> None:
    hits = [Hit("cut", ("p1",), START + 5, START + 35), Hit("stop", ("p2",), START + 15, START + 25)]
    events = {"p0": [commit(0, 1, {"p0": 1}), abort(1, "no quorum: 1 of 3"), abort(2, "x"), abort(3, "y")]}
    found = story(events, hits=hits)
    assert [present(found, START + second) for second in (0, 5, 16, 25, 35)] == [3, 2, 1, 2, 3]
    part = round_part(found)
    assert part["rounds_departed"] == 4
    assert part["rounds_possible"] == 3  # not round 2
    assert part["rounds_possible_committed"] == 1
    assert part["committed_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert part["aborted_rounds"] == {"1": {"p0": "no quorum: 1 of 3"}, "3": {"p0": "y"}}
    assert part["abort_reasons"] == {"no quorum: # of #": 1, "x": 1, "y": 1}
    assert part["committed_per_peer"] == {"p0": 1, "p1": 0, "p2": 0}


def test_a_killed_peer_is_away_until_its_next_life_trains() -> None:
    hit = Hit("kill", ("p1",), START + 5, START + 8)
    events = {"p1": [step(0), step(4), step(30, 1)]}
    found = story(events, hits=[hit])
    assert [present(found, START + second) for second in (4, 5, 9, 29, 30)] == [3, 2, 2, 2, 3]
    assert present(story({"p1": [step(0)]}, hits=[hit]), START + 99) == 2


def test_reasons_are_counted_without_their_numbers() -> None:
    assert plain_reason("no quorum: 2 of 4 electors in 1.5 s") == "no quorum: # of # electors in # s"
    assert plain_reason("12D3KooWAbC left") == "# left"


# ---------------------------------------------------------------------- recovery


def test_recovery_is_the_first_later_round_that_others_committed_too() -> None:
    hit = Hit("stop", ("p1",), START + 5, START + 12)
    events = {
        # Round 1 departed before the end of the fault, round 2 it committed alone, 3 with another.
        "p1": [commit(1, 1, {"p0": 1}, late=5), commit(2, 2, {"p1": 1}), commit(3, 2, {"p0": 1, "p1": 1}, late=2)],
        "p0": [commit(1, 1, {"p0": 1}), commit(3, 2, {"p0": 1, "p1": 1})],
    }
    found = story(events, hits=[hit])
    assert committed(found)[3] == {"p0", "p1"}

    def seconds(hit: Hit) -> float | None:
        return recovery(found, hit, "p1", when=departures(found), by=committed(found))

    assert seconds(hit) == 20.0
    assert seconds(Hit("stop", ("p1",), START, START + 31)) is None
    assert seconds(Hit("stop", ("p1",), START, None)) is None
    # Peers that were cut off together do not prove each other's recovery.
    assert seconds(Hit("partition", ("p0", "p1"), START, START + 12)) is None


def test_faults_are_listed_with_what_they_come_to() -> None:
    hits = [
        Hit("cut", ("p1",), START + 1, START + 2),
        Hit("stop", ("p2",), START + 3, START + 4, whole=True),
        Hit("cut", ("p1",), START + 12, START + 13),
        Hit("kill", ("p0",), START + 31, START + 32),
    ]
    who = {"p0": 1, "p1": 1, "p2": 1}
    events = {
        "p0": [commit(0, 1, who), commit(1, 1, who), commit(2, 2, who), commit(3, 2, who)],
        "p1": [commit(2, 2, who)],
        "p2": [commit(1, 1, who), commit(2, 2, who)],
    }
    part = fault_part(story(events, hits=hits))
    rows = [(r["fault"], r["victim"], r["recovery_seconds"], r["hit_again_before"]) for r in part["faults"]]
    assert rows == [
        ("cut", "p1", 19.0, True),
        ("stop", "p2", 7.0, False),
        ("cut", "p1", 8.0, False),
        ("kill", "p0", None, False),
    ]
    assert part["never_recovered"] == [{"fault": "kill", "victim": "p0", "begin": 31.0}]
    assert (part["recovery_median"], part["recovery_max"]) == (8.0, 19.0)
    assert part["recovery_median_by_fault"] == {"cut": 13.5, "kill": None, "stop": 7.0}
    assert part["faults_per_hour"] == 4 * 3600 / 30
    assert [row["with_daemon"] for row in part["faults"]] == [False, True, False, False]
    assert [row["until_it_trains_seconds"] for row in part["faults"]] == [0.0, 0.0, 0.0, None]


# ---------------------------------------------------------------------- chains and work


def test_every_token_is_counted_once_per_fragment_under_way_or_lost() -> None:
    # p0 trains for 60 s; p1 too, but is killed at 25 s and begins again at 40 s.
    both, one = {"p0": 1000, "p1": 1000}, {"p0": 2000}
    rounds = [
        commit(1, 1, both),
        commit(2, 1, {"p0": 2000, "p1": 2000}),
        commit(3, 2, one),
        commit(4, 2, {"p0": 2000}),
        commit(5, 3, {"p0": 2000, "p1": 1000}),
    ]
    p0 = [step(second) for second in range(60)] + rounds
    p1 = [step(second) for second in range(25)] + [step(second, second - 39) for second in range(40, 60)]
    p1 += [rounds[0], rounds[1], rounds[4]]
    heads = ["0-a-2", "1-a-3"]
    found = story({"p0": p0, "p1": p1}, reports={"p0": node_report(heads), "p1": node_report(heads)})
    known = chains.records(found)
    assert len(known) == 5
    assert [r.version for r in chains.lineage(known, "1-a-3", 1)] == [3, 2, 1]
    table = chains.work(found, known)
    # Fragment 0 counts 4000 of p0 (departures at 20, 40) and 2000 of p1; fragment 1 counts 5000 and 2000.
    assert table["p0"] == {"trained": 6000, "counted": 4500, "under_way_at_the_end": 1400, "lost": 100}
    # p1's second life trained 2000; of fragment 1 1000 are counted and those after 50 s are under way.
    assert table["p1"] == {"trained": 4500, "counted": 2000, "under_way_at_the_end": 1400, "lost": 1100}
    assert chains.weights(found, known)["p1"] == {"rounds_counted": 3, "mean_weight": 0.4444, "mean_tokens": 1333}
    report = make_report(found)
    assert report["tokens_trained"] == 10500
    assert report["tokens_lost"] == 1200
    assert report["anchors_equal"] is False  # p2 has no report
    assert report["without_report"] == ["p2"]
    assert "emulated device time" in report["note"]
    assert json.loads(json.dumps(report)) == report


def test_weights_are_bounded_as_in_the_outer_step() -> None:
    record = chains.Record(0, 1, 0, "h", "g", {"p0": 100, "p1": 100, "p2": 10_000})
    assert record.shares() == {"p0": 1 / 6, "p1": 1 / 6, "p2": 4 / 6}
    assert chains.Record(0, 1, 0, "h", "g", {"p0": 0, "p1": 0}).shares() == {"p0": 0.5, "p1": 0.5}


def test_anchors_are_equal_if_all_say_so() -> None:
    reports = {name: node_report(["0-a-1", "1-a-1"]) for name in PEERS}
    assert make_report(story({"p0": [commit(0, 1, {"p0": 1})]}, reports=reports))["anchors_equal"] is True
    reports["p2"] = node_report(["0-a-1", "1-b-1"])
    assert make_report(story({"p0": [commit(0, 1, {"p0": 1})]}, reports=reports))["anchors_equal"] is False


def test_one_may_end_a_commit_before_the_others_but_not_beside_them() -> None:
    base, last = commit(0, 1, {"p0": 1, "p1": 1}), commit(2, 2, {"p0": 5})
    other = commit(2, 2, {"p1": 1}, branch="b", prev="0-a-1")
    events = {"p0": [base, last], "p1": [base, other]}

    def ends(first: str, second: str, **states: list[str]) -> bool:
        reports = {"p0": node_report([first, "1-a-1"]), "p1": node_report([second, "1-a-1"])}
        for name, found in states.items():
            reports[name]["states"] = found
        told = story(events, reports=reports)
        return chains.one_end(told, chains.records(told), ["p0", "p1"])

    assert ends("0-a-2", "0-a-2")
    assert ends("0-a-2", "0-a-1")
    assert ends("0-a-1", "0-a-2")
    assert not ends("0-a-2", "0-b-2")
    assert not ends("0-a-2", "unknown")
    assert ends("0-a-2", "0-a-2", p0=["x", "y"], p1=["x", "y"])
    assert ends("0-a-2", "0-a-1", p0=["x", "y"], p1=["z", "y"])
    assert not ends("0-a-2", "0-a-2", p0=["x", "y"], p1=["z", "y"])
    alone = story(events, reports={"p0": node_report(["0-a-2", "1-a-1"])})
    assert not chains.one_end(alone, chains.records(alone), ["p0", "p1"])


def test_a_fork_and_who_leaves_it_are_seen() -> None:
    base, good = commit(0, 1, {"p0": 1, "p1": 1}), commit(2, 2, {"p0": 5})
    bad = commit(2, 2, {"p1": 1}, branch="b", prev="0-a-1")
    repaired = {**good, "event": "repair", "state": "done", "time": START + 45}
    later = commit(6, 3, {"p0": 1, "p1": 1})
    found = story({"p0": [base, good, later], "p1": [base, bad, repaired, later]}, rounds=8)
    known = chains.records(found)
    (fork,) = chains.forks(known)
    assert fork == {"fragment": 0, "version": 2, "heads": ["0-a-2", "0-b-2"], "heard": ["0-a-2"]}
    # Nobody but p1 ever had its branch, and p1 did not go on from it: no second lineage.
    assert chains.fork_missed([fork]) == []
    # Round 2 was committed by p0 alone: what p1 did on its own branch counts neither as commit nor as weight.
    assert committed(found) == {0: {"p0", "p1"}, 2: {"p0"}, 6: {"p0", "p1"}}
    assert chains.weights(found, known)["p1"]["rounds_counted"] == 2
    assert chains.switches(found, known, START + 30, START + 99) == {"p0": 0, "p1": 1, "p2": 0}
    assert chains.switches(found, known, START + 50, START + 99) == {"p0": 0, "p1": 0, "p2": 0}
    assert [r.head for r in chains.lineage(known, "0-a-3", 0)] == ["0-a-3", "0-a-2", "0-a-1"]


@pytest.mark.parametrize("who", ["p1", "p2"])
def test_a_branch_that_grows_or_that_two_peers_have_is_a_second_lineage(who: str) -> None:
    base, good = commit(0, 1, {"p0": 1, "p1": 1}), commit(2, 2, {"p0": 5})
    bad = commit(2, 2, {"p1": 1}, branch="b", prev="0-a-1")
    more = bad if who == "p2" else commit(6, 3, {"p1": 1}, branch="b", prev="0-b-2")
    events: dict[str, list[dict[str, Any]]] = {"p0": [base, good, commit(6, 3, {"p0": 1})], "p1": [base, bad]}
    events.setdefault(who, []).append(more)
    found = chains.forks(chains.records(story(events, rounds=8)))
    assert found[0]["heard"] == ["0-a-2", "0-b-2"]
    assert chains.fork_missed(found)


def test_a_gap_in_what_was_written_down_is_stepped_over() -> None:
    found = story({"p0": [commit(0, 1, {"p0": 1}), commit(4, 3, {"p0": 1})]})
    assert [r.version for r in chains.lineage(chains.records(found), "0-a-3", 0)] == [3, 1]


def test_taus_and_throughput() -> None:
    merges = [{"event": "merge", "time": START, "fragment": 0, "tau": tau, "counted": tau < 9} for tau in (1, 2, 2, 9)]
    found = story({"p0": [step(second) for second in range(20)] + merges})
    assert chains.taus(found)["p0"] == {"counts": {"1": 1, "2": 2}, "median": 2, "rebased": 1}
    assert steps_per_second(found, "p0", START + 5, START + 15) == 1.0
    assert steps_per_second(found, "p1", START + 5, START + 15) == 0.0


# ---------------------------------------------------------------------- partition


def split_story(minority: list[dict[str, Any]]) -> tuple[Story, list[Split]]:
    """p0 and p1 go on while p2 is alone from 15 s to 35 s; then all are together again."""
    three, two = dict.fromkeys(PEERS, 100), {"p0": 100, "p1": 100}
    together = [commit(0, 1, three), commit(1, 1, three), commit(4, 3, three), commit(5, 3, three)]
    majority = [*together, commit(2, 2, two), commit(3, 2, two)]
    reports = {name: node_report(["0-a-3", "1-a-3"]) for name in PEERS}
    found = story({"p0": majority, "p1": majority, "p2": [*together, *minority]}, reports=reports)
    return found, [Split((("p0", "p1"), ("p2",)), START + 15, START + 35, {"p2": ["aborted: no quorum"]})]


def test_a_minority_that_waits_is_as_it_should_be() -> None:
    outcome = _judge_partition(*split_story([abort(2, "no quorum: 1 of 3 electors"), abort(3, "no quorum: 1 of 3")]))
    assert outcome.missed == []
    (row,) = outcome.report["splits"]
    assert [side["rounds_committed"] for side in row["sides"]] == [[2, 3], []]
    assert row["sides"][1]["not_committed"] == {"no quorum: # of # electors": 1, "no quorum: # of #": 1}
    assert row["sides"][1]["printed"] == {"p2": ["aborted: no quorum"]}
    assert row["seconds_until_a_round_counts_all"] == 5.0
    assert row["forks_during"] == []


def test_a_minority_that_commits_is_a_miss_and_its_tokens_are_lost() -> None:
    alone = commit(2, 2, {"p2": 300}, branch="b", prev="0-a-1")
    outcome = _judge_partition(*split_story([alone]))
    assert outcome.missed == [
        "split 1: both sides committed",
        "split 1: a side without the right to it committed",
    ]
    side = outcome.report["splits"][0]["sides"][1]
    assert side["commits_on_the_losing_lineage"] == 1
    assert side["tokens_lost_of_those"] == {"p2": 150}
    assert len(outcome.report["splits"][0]["forks_during"]) == 1


def test_a_majority_that_stands_still_is_a_miss() -> None:
    found, splits = split_story([])
    quiet = {name: [dict(e) for e in found.events[name] if e["round"] not in (2, 3)] for name in PEERS}
    for events in quiet.values():
        events.append(abort(2, "no coordinator answered"))
    reports = {name: node_report(["0-a-3", "1-a-3"]) for name in PEERS}
    outcome = _judge_partition(story(quiet, reports=reports), splits)
    assert "split 1: the majority did not go on" in outcome.missed


# ---------------------------------------------------------------------- uneven


def uneven_story(fast: float, slow_counted: int) -> Story:
    """Four peers for 100 s: p0 and p1 with so many steps a second, p2 and p3 counted in so many of eight rounds."""
    names = [*PEERS, "p3"]
    ids = {name: f"12D3KooW-tail--{name}" for name in names}
    who = [{"p0": 100, "p1": 100, **({"p2": 10, "p3": 100} if r < slow_counted else {})} for r in range(8)]
    rounds = [
        {**commit(r, r // 2 + 1, {}), "contributions": {ids[name][-8:]: n for name, n in who[r].items()}}
        for r in range(8)
    ]
    steps = [{**step(0), "time": START + k / fast} for k in range(int(100 * fast))]
    return Story(
        setting={},
        peers=names,
        rounds=8,
        fragments=2,
        ids=ids,
        events={name: sorted(steps + rounds, key=lambda e: e["time"]) for name in names},
        hits=[],
        reports={name: node_report(["0-a-4", "1-a-4"]) for name in names},
        exits=dict.fromkeys(names, 0),
        bytes_up={},
        told_at=START + 100,
        load=2.5,
    )


def judge_uneven(rate: float, slow_counted: int) -> tuple[dict[str, Any], list[str]]:
    stories = {"equal": uneven_story(2.0, 8), "mixed": uneven_story(rate, slow_counted)}
    outcome = _judge_uneven(stories, dict.fromkeys(stories, (START + 10, START + 60)))
    return outcome.report, outcome.missed


def test_fast_peers_that_keep_their_speed_and_slow_ones_that_count_are_as_they_should_be() -> None:
    report, missed = judge_uneven(1.96, 8)
    assert missed == []
    assert report["fast_steps_per_second"]["p0"] == {
        "equal": 2.0,
        "mixed": 1.96,
        "loss_percent": 2.0,
        "blocked_percent": {"equal": 1.0, "mixed": 1.0},
    }
    assert report["slow"]["p2"]["counted_share"] == 1.0
    assert report["slow"]["p2"]["mean_weight"] == pytest.approx(10 / 310, abs=1e-4)
    assert any("the machine was busy: 2.5" in line for line in summary({**report, "goals_missed": []}))


def test_lost_speed_and_slow_peers_that_do_not_count_are_misses() -> None:
    _, missed = judge_uneven(1.9, 1)
    assert missed == [
        "p0 lost 5.0 % of its throughput, the goal is 3 %",
        "p1 lost 5.0 % of its throughput, the goal is 3 %",
        "p2 was counted in 12% of the rounds: the slow must contribute",
        "p3 was counted in 12% of the rounds: the slow must contribute",
    ]
