"""A node that waits says for whom, and begins by itself when what it waits for is there."""

import signal

import pytest

from tests.integration.processes import Lab, heads_equal, micro_run, no_traceback


def test_a_run_for_two_waits_for_the_second(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, min_size=2)))
    first = lab.join(invite, "first", "--new-run", "--seconds-per-status", "2")
    first.see(r"waiting for 1 more peer\(s\): 1 of 2")
    first.see(r"\d\d:\d\d:\d\d training: step \d+, loss .*alone, no other peer is in sight", count=3, limit=20)
    assert first.committed() == []
    second = lab.join(invite, "second")
    first.see(r"committed by 2 peer\(s\)")
    second.see(r"committed by 2 peer\(s\)")
    assert all(event["members"] == 2 for event in first.events("round") if event["outcome"] == "committed")
    for node in (first, second):
        node.signal(signal.SIGTERM)
    for node in (first, second):
        assert node.exit_code(limit=10) == 0
        no_traceback(node)


@pytest.mark.slow
def test_nodes_that_are_there_before_their_bootstrap_peer_meet_when_it_comes(lab: Lab) -> None:
    # A window that is shorter than a cycle, so that rounds do not overtake each other.
    run = lab.write_run(micro_run(lab.corpus, inner_steps=160, window=1.0))
    bootstrap, invite = lab.bootstrap(run)
    bootstrap.signal(signal.SIGTERM)
    assert bootstrap.exit_code(limit=10) == 0
    port = bootstrap.see(r"listening at /ip4/127\.0\.0\.1/tcp/\d+")[0].rsplit("/", 1)[1]
    nodes = lab.found(invite, 2, "--rounds", "12")
    for node in nodes:
        node.see(rf"0 of 1 bootstrap peers reachable \(/ip4/127.0.0.1/tcp/{port}/.*\), next try in \d+ s")
        assert "founding" not in node.text
    _, again = lab.bootstrap(run, port=int(port))
    assert again == invite
    for node in nodes:
        assert node.exit_code() == 0, node.tail()
        no_traceback(node)
        # The first rounds may come before both know the clock, and a busy machine may make one peer late for a round
        # of a second; in the end there is one group of two.
        last = node.events("round")[-6:]
        assert ("committed", 2) in {(event["outcome"], event.get("members")) for event in last}, last
    assert heads_equal(nodes)
