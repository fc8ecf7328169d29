"""Peers that find each other again: without a bootstrap peer, after being alone, with few who accept connections."""

import signal

from tests.integration.processes import Lab, micro_run, no_traceback, until


def test_a_run_outlives_its_bootstrap(lab: Lab) -> None:
    run = lab.write_run(micro_run(lab.corpus, inner_steps=120, window=1.0))
    bootstrap, invite = lab.bootstrap(run)
    nodes = lab.found(invite, 3, "--seconds-per-status", "2")
    nodes[0].commits(1)
    until(lambda: all(list(node.folder.glob("runs/*/peers.json")) for node in nodes), "all remember", logs=lab.logs)
    bootstrap.signal(signal.SIGKILL)
    bootstrap.exit_code(limit=5)
    last = max(nodes[0].committed())
    nodes[0].commits(last + 3)
    # One node is killed and comes back; nobody is left but the two that it remembers.
    nodes[2].signal(signal.SIGKILL)
    nodes[2].exit_code(limit=5)
    back = lab.join(invite, "back", folder=nodes[2].folder)
    back.see(r"0 of 1 bootstrap peers reachable \(.*connection refused\), [12] of 2 addresses of peers met earlier")
    until(lambda: any(e.get("counted") for e in back.events("round")[-3:]), "it is counted again", logs=lab.logs)
    # The other two go: the one that stays says so and dials; with the first that returns there is a group again.
    for node in (nodes[1], back):
        node.signal(signal.SIGKILL)
        node.exit_code(limit=5)
    nodes[0].see(r"WARNING no peers for \d+ s, dialling 1 bootstrap address\(es\) and 2 of peers met before")
    nodes[0].see(r"isolated, training: step .*; no peers for \d+ s")
    again = lab.join(invite, "again", folder=nodes[1].folder)
    nodes[0].see(r"\d other peer\(s\) in sight again after \d+ s")
    seen = max(event["round"] for event in nodes[0].events("round"))
    until(
        lambda: [e for e in nodes[0].events("round") if e["round"] > seen and e.get("members", 0) > 1],
        "a group of two",
        logs=lab.logs,
    )
    for node in (nodes[0], again):
        node.signal(signal.SIGTERM)
    for node in (nodes[0], again):
        assert node.exit_code(limit=15) == 0
        no_traceback(node)


def test_one_that_listens_is_enough_and_none_is_not(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, min_size=2, window=1.0)))
    closed = [
        lab.join(invite, name, "--client-mode", "--new-run", "--start-peers", "2") if name == "a" else
        lab.join(invite, name, "--client-mode")
        for name in ("a", "b")
    ]  # fmt: skip
    for node in closed:
        node.see(r"WARNING no peer in this run accepts connections: all 2, this one included, are in client mode")
        assert node.committed() == []
        # Lines since it trains: a round every second or so must not mean a line every second.
        lines = node.text.partition("measuring the speed")[2].count("\n")
        assert lines < 40, node.tail()
    lab.join(invite, "open")
    for node in closed:
        until(
            lambda node=node: any(e.get("members") == 3 and e["counted"] for e in node.events("round")),
            f"{node.name} is counted in a group of three",
            logs=lab.logs,
        )
