"""The monthly cap: how it is spread, when a node pauses, and that it holds whatever happens."""

import datetime
import random

import pytest

from stretto.node.swarm.budget import DAY, HOUR, MonthlyBudget, Used, month_of

GB = 10**9


def at(text: str) -> float:
    """Seconds since 1970 of a time in UTC."""
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.timezone.utc).timestamp()


def test_a_month_is_that_of_utc() -> None:
    assert month_of(at("2026-11-30T23:59:59")) == ("2026-11", at("2026-11-01"), at("2026-12-01"))
    assert month_of(at("2026-12-01T00:00:00"))[0] == "2026-12"
    assert month_of(at("2028-02-29T12:00:00")) == ("2028-02", at("2028-02-01"), at("2028-03-01"))
    assert month_of(at("2026-12-31T12:00:00"))[2] == at("2027-01-01")


def test_the_allowance_begins_with_a_days_worth_and_flows_in_evenly() -> None:
    now = at("2026-11-01T00:00:00")
    budget = MonthlyBudget(30 * GB, None, now)
    assert budget.level == pytest.approx(GB)
    assert budget.inflow == pytest.approx(GB / DAY)
    budget.count(GB // 2, GB // 2, now)
    assert budget.level == pytest.approx(0.0, abs=1.0)
    budget.look(now + HOUR, round_bytes=1)
    assert budget.level == pytest.approx(29 * GB / (30 * 24), rel=0.01)


def test_it_holds_a_days_worth_however_long_nothing_is_used() -> None:
    budget = MonthlyBudget(30 * GB, None, at("2026-11-01T00:00:00"))
    budget.look(at("2026-11-21T00:00:00"), round_bytes=1)
    assert budget.level == pytest.approx(3 * GB)  # 30 GB on 10 days
    budget.look(at("2026-11-30T12:00:00"), round_bytes=1)
    assert budget.level == pytest.approx(30 * GB)


def test_a_restart_brings_no_new_days_worth() -> None:
    now = at("2026-11-10T00:00:00")
    budget = MonthlyBudget(30 * GB, Used("2026-11", 10 * GB, 0), now)
    assert budget.level == pytest.approx(0.0, abs=1.0)
    assert budget.look(now, round_bytes=1000)
    ahead = MonthlyBudget(30 * GB, Used("2026-11", 0, 12 * GB), now)
    assert ahead.level == pytest.approx(-2 * GB)


def test_without_a_cap_it_counts_and_never_pauses() -> None:
    budget = MonthlyBudget(0, Used("2026-11", 3, 4), at("2026-11-10"))
    budget.count(10**12, 10**12, at("2026-11-11"))
    assert not budget.look(at("2026-11-11"), round_bytes=10**12)
    assert budget.may_fetch(10**12)
    assert budget.used == Used("2026-11", 10**12 + 3, 10**12 + 4)


def test_hysteresis() -> None:
    now = at("2026-11-10T00:00:00")
    budget = MonthlyBudget(30 * GB, None, now)
    day, cost = budget.most, 100_000_000
    budget.count(int(day) - cost + 1, 0, now)
    assert budget.look(now, round_bytes=cost)
    assert not budget.may_fetch(1)
    # Four rounds, and what was missed.
    assert budget.enough(cost) == 4 * cost
    assert budget.enough(cost, catch_up=3 * cost) == 7 * cost
    back = budget.resumes_at(cost)
    assert back == pytest.approx(now + 3 * cost / budget.inflow, rel=1e-3)
    assert budget.look(back - 60, round_bytes=cost)
    assert not budget.look(back + 60, round_bytes=cost)
    assert not budget.look(back + 61, round_bytes=cost)  # and not paused again at once
    # An hour's worth where rounds cost little.
    assert budget.enough(1000) == pytest.approx(budget.inflow * HOUR)


def test_a_round_of_more_than_a_days_worth_waits_for_a_full_allowance() -> None:
    now = at("2026-11-02T00:00:00")
    budget = MonthlyBudget(29 * 10**6, None, now)
    cost = 2_500_000  # a day's worth is one million
    assert not budget.look(now, round_bytes=cost)
    budget.count(cost, 0, now)
    assert budget.look(now + 1, round_bytes=cost)
    assert budget.look(now + 2 * DAY, round_bytes=cost)
    assert not budget.look(now + 3 * DAY, round_bytes=cost)


def test_a_new_month_begins_from_nothing() -> None:
    budget = MonthlyBudget(30 * GB, Used("2026-11", 30 * GB, 0), at("2026-11-29T00:00:00"))
    assert budget.look(at("2026-11-30T23:59:59"), round_bytes=1000)
    assert budget.resumes_at(1000) == at("2026-12-01")
    assert not budget.look(at("2026-12-01T00:00:01"), round_bytes=1000)
    assert budget.used == Used("2026-12", 0, 0)
    assert budget.level == pytest.approx(30 * GB / 31, rel=0.01)


def test_counts_of_another_month() -> None:
    now = at("2026-11-10T00:00:00")
    assert MonthlyBudget(GB, Used("2026-10", 5, 5), now).used == Used("2026-11", 0, 0)
    # A clock that was wrong does not make what was used free.
    assert MonthlyBudget(GB, Used("2026-12", 5, 6), now).used == Used("2026-11", 5, 6)


def test_a_clock_that_is_set_back_stops_the_inflow() -> None:
    now = at("2026-11-10T00:00:00")
    budget = MonthlyBudget(30 * GB, None, now)
    budget.count(int(budget.most), 0, now)
    level = budget.level
    for _ in range(10):
        budget.look(now - 5 * DAY, round_bytes=1)
        budget.look(now, round_bytes=1)
    assert budget.level == level


@pytest.mark.parametrize("seed", range(6))
def test_never_more_than_the_cap_and_one_round(seed: int) -> None:
    """Whatever rounds cost and whenever they come: what they use in a month stays below cap and one round."""
    choose = random.Random(seed)
    now = at("2026-11-01T00:00:00") + choose.uniform(0, 40 * DAY)
    cap = int(10 ** choose.uniform(6, 11))
    cost = cap * 10 ** choose.uniform(-6, -1)
    budget = MonthlyBudget(cap, None, now)
    used: dict[str, int] = {}
    day_used: dict[tuple[str, int], int] = {}
    end = now + 75 * DAY
    while now < end:
        if not budget.look(now, round_bytes=cost):
            spent = int(cost * choose.uniform(0.5, 1.0))
            budget.count(spent // 2, spent - spent // 2, now)
            used[month_of(now)[0]] = used.get(month_of(now)[0], 0) + spent
            day = (month_of(now)[0], int(now // DAY))
            day_used[day] = day_used.get(day, 0) + spent
        if choose.random() < 0.01:
            budget = MonthlyBudget(cap, budget.used, now)
        now += choose.expovariate(1 / 3600)
    assert len(used) >= 3
    assert all(total <= cap + cost for total in used.values()), (cap, cost, used)
    # And it is spread: no day but a month's last ones takes more than some days' share.
    early = [total for (_, day), total in day_used.items() if month_of((day + 8) * DAY)[0] == month_of(day * DAY)[0]]
    assert all(total <= 5 * cap / 28 + cost for total in early)
