"""The pure parts of the scenarios ``churn`` and ``join``: the plan, what climbs, the verdict on a join."""

import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.churn import BACK, KILL, LEAVE, NEW, climbs, plan
from tests.chaos.join import Joining, describe, judge
from tests.chaos.samples import Sampler, Series, count_files, floors, growth, last_two_thirds
from tests.chaos.story import Story

PLACES = ["p1", "p2", "p3"]


@pytest.mark.parametrize(("seconds", "every", "count"), [(600, 60, 8), (600, 120, 4), (7200, 120, 58), (90, 30, 2)])
def test_somebody_goes_and_then_somebody_comes_in_the_same_place(seconds: float, every: float, count: int) -> None:
    changes = plan(seed=1, places=PLACES, seconds=seconds, every=every)
    assert changes == plan(seed=1, places=PLACES, seconds=seconds, every=every)
    assert [change.at for change in changes] == [every * (number + 1) for number in range(count)]
    assert changes[-1].at <= seconds - every
    for going, coming in zip(changes[::2], changes[1::2], strict=True):
        assert going.what in (LEAVE, KILL)
        assert coming.what in (BACK, NEW)
        assert going.place == coming.place
    for four in range(0, count - 7, 8):  # each way of going meets each way of coming
        pairs = {(changes[n].what, changes[n + 1].what) for n in range(four, four + 8, 2)}
        assert len(pairs) == 4


def test_another_seed_is_another_plan_and_too_little_time_is_refused() -> None:
    assert plan(seed=1, places=PLACES, seconds=3600, every=60) != plan(seed=2, places=PLACES, seconds=3600, every=60)
    with pytest.raises(ValueError, match="fit into 100 s"):
        plan(seed=1, places=PLACES, seconds=100, every=40)
    with pytest.raises(ValueError, match="nobody may leave"):
        plan(seed=1, places=[], seconds=1000, every=40)


def test_growth_is_that_of_the_line_through_the_points() -> None:
    line = [(10.0 * n, 5.0 + 0.25 * n) for n in range(41)]
    assert growth(line) == pytest.approx(10.0)
    assert growth([(at, 7.0) for at, _ in line]) == 0.0
    assert growth(line[:1]) == growth([(3.0, 1.0), (3.0, 9.0)]) == 0.0
    chance = random.Random(3)
    noisy = [(at, value + chance.uniform(-2, 2)) for at, value in line]
    assert growth(noisy) == pytest.approx(10.0, abs=2.0)
    # One wild value in the middle hardly moves it.
    assert growth([*line[:20], (200.0, 1000.0), *line[21:]]) == pytest.approx(10.0, abs=1e-6)


def test_floors_leave_out_what_is_needed_for_a_while_but_not_what_stays() -> None:
    times = [10.0 * n for n in range(61)]
    peaks = [(at, 500.0 + (30.0 if 200 <= at < 240 or at >= 570 else 0.0)) for at in times]
    assert growth(peaks) > 5.0
    assert floors(peaks) == [(30.0 + 60 * n, 500.0) for n in range(10)]
    leak = [(at, value + 0.05 * at) for at, value in peaks]
    assert growth(floors(leak)) == pytest.approx(0.05 * 540)
    assert floors([]) == []
    assert floors(peaks[:2]) == [(30.0, 500.0)]


def test_only_figures_that_cover_the_last_two_thirds_count() -> None:
    points = [(float(at), 1.0) for at in range(0, 601, 10)]
    assert [at for at, _ in last_two_thirds(points, 0.0, 600.0)] == [float(at) for at in range(200, 601, 10)]
    assert last_two_thirds(points[:40], 0.0, 600.0) == []
    assert last_two_thirds(points[10:], 0.0, 600.0) == []  # it came late


def sampler(series: dict[tuple[str, str], list[tuple[float, float]]]) -> Sampler:
    found = Sampler.__new__(Sampler)
    found.series = {key: Series(*key, points) for key, points in series.items()}
    return found


def test_what_climbs_comes_first_and_is_not_flat() -> None:
    times = [10.0 * n for n in range(61)]
    rows = climbs(
        sampler(
            {
                ("p0", "fds"): [(at, 40 + 0.1 * at) for at in times],
                ("p0", "rss"): [(at, 5e8 + 3e6 * math.sin(at) + (9e7 if at > 560 else 0.0)) for at in times],
                ("p0", "heap"): [(at, 2e8 + 1e4 * at) for at in times],
                ("p0 p2pd", "rss"): [(at, 4e7 + 2e4 * at) for at in times],
                ("p3", "rss"): [(at, 1e3 * at) for at in times[:10]],
            }
        ),
        0.0,
        600.0,
        400_000,
    )
    assert [(row["process"], row["kind"], row["flat"]) for row in rows] == [
        ("p0", "fds", False),
        ("p0", "heap", True),
        ("p0 p2pd", "rss", True),
        ("p0", "rss", True),
    ]
    assert rows[0]["growth"] == pytest.approx(40.0)


def test_files_are_counted_and_the_log_is_not(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x" / "log").mkdir(parents=True)
    for name in ("identity.key", "runs/x/metrics.jsonl", "runs/x/log/0-1-ab.commit"):
        (tmp_path / name).write_text("x")
    assert count_files(tmp_path) == (2, 0)


def test_a_folder_that_goes_while_files_are_counted_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "identity.key").write_text("x")
    look = os.scandir

    def scandir(place: str) -> Any:
        if str(place).endswith("step-1"):
            shutil.rmtree(place)
        return look(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert count_files(tmp_path) == (1, 0)
    assert not (tmp_path / "checkpoints" / "step-1").exists()


# ---------------------------------------------------------------------- join

IDS = {name: f"12D3KooWxxxxxx-{name}" for name in ("p0", "p1", "p2", "p3", "p4")}


def commit(round: int, time: float, members: list[str], *, counted: bool = True) -> dict[str, Any]:
    return {
        "event": "round", "round": round, "fragment": round % 2, "outcome": "committed", "time": time, "seconds": 2.0,
        "members": len(members), "counted": counted, "version": round // 2 + 1, "head": f"h{round}",
        "prev": f"h{round - 2}", "contributions": {IDS[name][-8:]: 100 for name in members},
    }  # fmt: skip


def story(**changes: Any) -> Story:
    old = ["p0", "p1", "p2"]
    rounds = [commit(n, 100.0 + 25 * n, old) for n in range(7)]
    both = [commit(n, 100.0 + 25 * n, [*old, "p3"]) for n in (7, 8)]
    joiner = [
        {"event": "joining", "time": 200.0, "bytes": 60, "of_bytes": 100},
        {"event": "repair", "time": 240.0, "state": "done", "fragment": 0, "seconds": 80.0, "downloaded_bytes": 9},
        {"event": "merge", "time": 245.0, "fragment": 0, "counted": True, "late": False},
        {"event": "joined", "time": 250.0, "bytes": 220_000_000, "seconds": 100.0, "peers": 3},
        *both,
    ]
    events = {name: [*rounds, *both] for name in old} | {"p3": joiner, "p4": [e | {} for e in joiner]}
    fields: dict[str, Any] = {
        "setting": {"lines_mbit": {}, "line_mbit": [10.0, 20.0]},
        "peers": list(events),
        "rounds": 1000,
        "fragments": 2,
        "ids": IDS,
        "events": events,
        "hits": [],
        "reports": {name: {"heads": ["a" * 64, "b" * 64]} for name in events},
        "exits": dict.fromkeys(events, 0),
        "bytes_up": {},
        "told_at": 400.0,
    }
    return Story(**(fields | changes))


def joinings() -> list[Joining]:
    line = [(150.0 + 10 * n, 24_000_000 * n) for n in range(11)]
    return [
        Joining("p3", ("p0", "p1", "p2"), 140.0, rounds_at_end=5, line=line),
        Joining("p4", ("p0", "p1", "p2", "p3"), 140.0, rounds_at_end=5, killed="p1", stopped="p2"),
    ]


def verdict(told: Story, **changes: Any) -> list[str]:
    return judge(
        told, joinings(), ["p0", "p3", "p4"], **({"equal": True, "counted": True, "seed": 1} | changes)
    ).missed


def test_a_good_join_in_numbers() -> None:
    from tests.chaos import chains

    told = story()
    row = describe(told, joinings()[0], chains.records(told))
    assert row["bytes_per_second"] == 2_200_000
    assert row["share_of_downlink"] == 0.88
    assert row["share_of_downlink_on_the_line"] == 0.96
    assert (row["first_round_counted"], row["first_members"], row["cycles_until_counted"]) == (7, 4, 1.0)
    assert row["gave"] == 3
    assert row["donors_rounds_not_committed"] == {}
    assert row["donors_rounds_committed"] == 6  # those that ended from 140 to 275
    assert [repair["fragment"] for repair in row["repairs"]] == [0]
    assert verdict(told) == []


def test_a_round_that_counted_nothing_of_the_joiner_is_not_its_first() -> None:
    from tests.chaos import chains

    empty = {**commit(7, 275.0, ["p0", "p1", "p2", "p3"]), "contributions": {IDS["p0"][-8:]: 100, IDS["p3"][-8:]: 0}}
    events = [empty if event.get("round") == 7 else event for event in story().events["p3"]]
    told = story(events={**story().events, "p3": events})
    row = describe(told, joinings()[0], chains.records(told))
    assert (row["first_round_counted"], row["cycles_until_counted"]) == (8, 1.5)


def test_each_goal_can_be_missed() -> None:
    told = story()
    slow = [event | ({"seconds": 120.0} if event["event"] == "joined" else {}) for event in told.events["p3"]]
    assert "73% of the downlink" in verdict(story(events={**told.events, "p3": slow}))[0]
    late = [event | ({"round": 12} if event.get("round") == 7 else {}) for event in told.events["p3"]]
    assert "counted 3.5 cycles after" in verdict(story(events={**told.events, "p3": late}))[0]
    aborted = {"event": "round", "round": 3, "outcome": "aborted", "time": 180.0, "seconds": 5.0, "why": "no 7"}
    assert "{'3': {'p1': 'no #'}}" in verdict(story(events={**told.events, "p1": [*told.events["p1"], aborted]}))[0]
    never = [event for event in told.events["p4"] if event["event"] != "joined"]
    assert verdict(story(events={**told.events, "p4": never})) == ["join 2: the download did not end"]
    other = {**told.reports, "p4": {"heads": ["a" * 64, "c" * 64]}}
    assert verdict(story(reports=other)) == ["the chains of p0, p3, p4 are not equal at the end"]
    assert verdict(told, equal=False) == ["the chains of p0, p3, p4 are not equal at the end"]
    assert verdict(told, counted=False) == ["join 2: no round of every fragment counted the joiner"]
