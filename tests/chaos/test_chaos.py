"""Five real nodes behind home lines, each kind of fault once: `make chaos-short`. Needs root."""

import json
from typing import Any

import pytest

from stretto.protocol.errors import StrettoError
from tests.chaos.run import run_scenario, say, summary
from tests.chaos.scenarios import Options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The report of the short scenario."""
    try:
        found = run_scenario("short", Options())
    except StrettoError as error:
        pytest.fail(f"the chaos run cannot be done here: {error}", pytrace=False)
    for line in summary(found):
        say(line)
    return found


def test_every_fault_was_done_and_every_victim_came_back(report: dict[str, Any]) -> None:
    assert sorted(row["fault"] for row in report["faults"]) == ["cut", "kill", "partition", "stop"]
    assert len({row["victim"] for row in report["faults"]}) == 4
    assert report["faults_skipped"] == 0
    assert report["never_recovered"] == []
    for row in report["faults"]:
        # Loading torch is this machine's business and takes as long as its load makes it.
        assert 0 < row["recovery_seconds"] - row["until_it_trains_seconds"] < 60, row


def test_the_others_went_on_and_all_have_the_same_bits(report: dict[str, Any]) -> None:
    assert report["rounds_possible"] == report["rounds"] == 26
    assert report["committed_share"] >= 0.7, report["aborted_rounds"]
    assert set(report["exit_codes"].values()) == {0}
    assert report["anchors_equal"], report["heads"]


def test_every_token_is_accounted_for(report: dict[str, Any]) -> None:
    assert report["emulated_device_time"] is True
    step = report["setting"]["tokens_per_step"]
    for peer, row in report["work"].items():
        assert row["trained"] > 100 * step
        assert report["weights"][peer]["rounds_counted"] > 0
        if peer != "p1":  # only a kill may lose work; a step that ends as a round departs may fall on either side
            assert abs(row["lost"]) <= 2 * step, (peer, row)
    # What the others say is its last word of what no round had counted.
    assert 0 < report["tokens_lost_as_peers_say"] < report["work"]["p1"]["trained"] / 2
    assert 0 <= report["work"]["p1"]["lost"] < report["work"]["p1"]["trained"] / 2


def test_no_goal_was_missed(report: dict[str, Any]) -> None:
    assert report["goals_missed"] == []
    assert json.loads(json.dumps(report)) == report
