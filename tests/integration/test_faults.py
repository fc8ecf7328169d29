"""Peers that are killed, stopped and come late: the others go on, and in the end all have the same bits."""

import signal

from tests.integration.processes import Lab, heads_equal, micro_run, no_traceback

MANY = "60"
"""Rounds of a run that goes on for about half a minute."""


def test_three_go_on_when_the_fourth_is_killed(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    nodes = lab.found(invite, 4, "--rounds", "24")
    nodes[0].commits(3)
    victim, others = nodes[2], [nodes[0], nodes[1], nodes[3]]
    victim.daemon()
    last = max(victim.committed())
    victim.signal(signal.SIGKILL)
    assert victim.exit_code(limit=5) == -signal.SIGKILL
    victim.all_gone(limit=10)
    for node in others:
        assert node.exit_code() == 0, node.tail()
        no_traceback(node)
    assert heads_equal(others), lab.logs()
    for node in others:
        after = [event for event in node.events("round") if event["round"] > last]
        committed = [event for event in after if event["outcome"] == "committed"]
        # Two is a quorum where a third came late: rounds here follow each other in less than a second.
        assert {event["members"] for event in committed} <= {2, 3, 4}
        assert 3 in {event["members"] for event in committed[-10:]}
        assert committed[-1]["round"] == 23
        # The round in hand may be lost with its member, and those that departed before anybody could know: rounds of
        # half a second, so on a busy machine that is a few.
        assert len(after) - len(committed) <= 6, after


def test_a_late_joiner_catches_up_and_contributes(lab: Lab) -> None:
    bootstrap, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    nodes = lab.found(invite, 2, "--rounds", MANY)
    begun = max(nodes[0].commits(3))
    late = lab.join(invite, "late", "--rounds", MANY)
    late.see(r"downloading the run's state|repair of fragment \d+: done")
    nodes.append(late)
    for node in nodes:
        assert node.exit_code() == 0, node.tail()
        no_traceback(node)
    assert heads_equal(nodes), lab.logs()
    report = late.report()
    assert report["versions"] == nodes[0].report()["versions"]
    assert min(report["rounds_begun"]) > begun
    counted = [event for event in late.events("round") if event.get("counted")]
    assert counted, "its contributions count"
    assert counted[-1]["members"] == 3
    # It trains from the downloaded weights, not from the initial ones.
    assert report["loss_first"] < nodes[0].report()["loss_first"] - 0.5
    no_traceback(bootstrap)


def test_a_stopped_peer_holds_nobody_and_comes_back(lab: Lab) -> None:
    # A cycle must be longer than the window in which a coordinator waits, or rounds overtake each other.
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=120, window=0.3)))
    nodes = lab.found(invite, 3, "--rounds", "26")
    others, sleeper = nodes[:2], nodes[2]
    last = max(others[0].commits(3))
    sleeper.signal(signal.SIGSTOP)
    for node in others:
        node.commits(last + 4)
    two = [event for event in others[0].events("round") if event.get("members") == 2]
    assert two, "the others commit without it"
    sleeper.signal(signal.SIGCONT)
    for node in nodes:
        assert node.exit_code() == 0, node.tail()
        no_traceback(node)
    assert heads_equal(nodes), lab.logs()
    back = [event for event in sleeper.events("round") if event.get("counted")]
    assert back[-1]["round"] > last + 4, "its contributions count again"
