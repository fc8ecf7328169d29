"""Peers that find each other again: without a bootstrap peer, after being alone, with one that accepts connections."""

import signal

import pytest

from tests.integration.processes import Lab, micro_run, no_traceback, until


@pytest.mark.slow
def test_outliving_bootstrap(lab: Lab) -> None:
    run = lab.write_run(micro_run(lab.corpus, window=1.0))
    bootstrap, invite = lab.bootstrap(run)
    founder = lab.join(invite, "open", "--new-run", "--start-peers", "3", "--seconds-per-status", "1")
    closed = [lab.join(invite, name, "--client-mode") for name in ("a", "b")]
    for node in (founder, *closed):
        until(
            lambda node=node: any(e.get("members") == 3 and e["counted"] for e in node.events("round")),
            f"{node.name} is counted in a group of one that listens and two that do not",
            logs=lab.logs,
        )
    for node in closed:
        until(lambda node=node: list(node.folder.glob("runs/*/peers.json")), f"{node.name} remembers", logs=lab.logs)
    bootstrap.signal(signal.SIGKILL)
    bootstrap.exit_code(limit=5)
    founder.commits(max(founder.committed()) + 3)

    # Alone: it says so and dials. Those who went know nobody but it.
    for node in closed:
        node.signal(signal.SIGKILL)
        node.exit_code(limit=5)
    founder.see(r"WARNING no peers for \d+ s, dialling 1 bootstrap address\(es\) and 0 of peers met before")
    founder.see(r"isolated, training: step .*; no peers for \d+ s")
    back = lab.join(invite, "back", "--client-mode", folder=closed[0].folder)
    back.see(r"0 of 1 bootstrap peers reachable \(.*connection refused\), 1 of 1 addresses of peers met earlier")
    founder.see(r"1 other peer\(s\) in sight again after \d+ s")
    rounds = founder.events("round")
    until(
        lambda: any(e["round"] > rounds[-1]["round"] and e.get("members") == 2 for e in founder.events("round")),
        "the two are a group again",
        logs=lab.logs,
    )
    for node in (founder, back):
        node.signal(signal.SIGTERM)
    for node in (founder, back):
        assert node.exit_code(limit=20) == 0
        no_traceback(node)
