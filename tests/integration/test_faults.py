"""Peers that are killed, stopped and come late: the others go on, and in the end all have the same bits."""

import signal

import pytest

from tests.integration.processes import Lab, Process, micro_run, no_traceback, one_lineage, until


def end(nodes: list[Process]) -> None:
    """Stop them in order, wherever they are; all must have the same history."""
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        assert node.exit_code() == 0, node.tail()
        no_traceback(node)
    assert one_lineage(nodes), "\n".join(node.tail() for node in nodes)


@pytest.mark.slow
def test_three_go_on_when_the_fourth_is_killed(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    nodes = lab.found(invite, 4)
    nodes[0].commits(3)
    victim, others = nodes[2], [nodes[0], nodes[1], nodes[3]]
    victim.daemon()
    last = max(victim.committed())
    victim.signal(signal.SIGKILL)
    assert victim.exit_code(limit=5) == -signal.SIGKILL
    victim.all_gone(limit=10)

    def three(node: Process) -> list[int]:
        # Rounds here follow each other in less than a second, so two are a quorum where a third came late; the round
        # in hand, and those that departed before anybody could know, may be lost with their member.
        rounds = [event for event in node.events("round") if event["round"] > last + 2]
        done = [event for event in rounds if event["outcome"] == "committed"]
        assert {event["members"] for event in done} <= {2, 3, 4}
        return [event["round"] for event in done if event["members"] == 3]

    for node in others:
        until(lambda node=node: len(three(node)) >= 5, "five rounds of three", logs=lab.logs)  # type: ignore[misc]
    end(others)


def test_a_late_joiner_catches_up_and_contributes(lab: Lab) -> None:
    bootstrap, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    nodes = lab.found(invite, 2)
    begun = max(nodes[0].commits(3))
    late = lab.join(invite, "late")
    late.see(r"downloading the run's state|repair of fragment \d+: done")
    nodes.append(late)
    # It may be counted with nothing behind it before its first step is over: that weighs nothing, and shows nothing.
    until(
        lambda: [
            event
            for event in late.events("round")
            if event.get("counted") and event["members"] == 3 and min(event["contributions"].values()) > 0
        ],
        "its contributions count",
        logs=lab.logs,
    )
    end(nodes)
    report = late.report()
    assert min(report["rounds_begun"]) > begun
    # It trains from the downloaded weights, not from the initial ones.
    assert report["loss_first"] < nodes[0].report()["loss_first"] - 0.5
    no_traceback(bootstrap)


@pytest.mark.slow
def test_a_stopped_peer_holds_nobody_and_comes_back(lab: Lab) -> None:
    # A cycle must be longer than the window in which a coordinator waits, or rounds overtake each other.
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=120, window=0.3)))
    nodes = lab.found(invite, 3)
    others, sleeper = nodes[:2], nodes[2]
    last = max(others[0].commits(3))
    sleeper.signal(signal.SIGSTOP)
    for node in others:
        node.commits(last + 4)
    two = [event for event in others[0].events("round") if event.get("members") == 2]
    assert two, "the others commit without it"
    sleeper.signal(signal.SIGCONT)
    until(
        lambda: [event for event in sleeper.events("round") if event.get("counted") and event["round"] > last + 4],
        "contributions of the stopped peer count again",
        logs=lab.logs,
    )
    end(nodes)
