"""A swarm that outlives its bootstrap peers, and processes that end in words when a terminal or a daemon is gone."""

import os
import re
import signal

from tests.integration.processes import Lab, Process, micro_run, no_traceback, until


def address_of(process: Process) -> str:
    """Where a bootstrap peer listens."""
    return process.see(r"listening at /ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")[0].split()[-1]


def test_dead_bootstraps(lab: Lab) -> None:
    run = lab.write_run(micro_run(lab.corpus, inner_steps=100, window=1.0))
    other, _ = lab.bootstrap(run, "other")
    place = address_of(other)
    operator, invite = lab.bootstrap(run, "operator", "--peer", place)
    nodes = lab.found(invite, 3)
    for node in nodes:
        until(lambda node=node: list(node.folder.glob("runs/*/peers.json")), f"{node.name} remembers", logs=lab.logs)
        node.commits(0)
    for bootstrap in (other, operator):
        bootstrap.signal(signal.SIGKILL)
        bootstrap.exit_code(limit=5)

    nodes[2].signal(signal.SIGTERM)
    assert nodes[2].exit_code(limit=20) == 0
    last = max(nodes[0].committed())
    newcomer = lab.join(invite, "newcomer")
    back = lab.join(invite, "back", folder=nodes[2].folder)
    known = len(back.events("round"))

    # A survivor that is restarted has the others' addresses on its disk. Who knows only the dead waits, until one of
    # them is there again: here not the operator, whose signature counts.
    back.see(r"0 of 2 bootstrap peers reachable \(.*connection refused.*\), [12] of 2 addresses of peers met earlier")
    newcomer.see(r"0 of 2 bootstrap peers reachable \(.*connection refused; .*connection refused\), next try in \d+ s")
    nodes[0].commits(last)
    lab.bootstrap(run, "other", port=int(place.split("/")[4]))
    newcomer.see(r"1 of 2 bootstrap peers reachable \(")
    newcomer.see("serve this run under another key; asking the run's peers for its config")
    until(lambda: [e for e in back.events("round")[known:] if e.get("counted")], "its work counts", logs=lab.logs)
    until(lambda: [e for e in newcomer.events("round") if e.get("counted")], "the newcomer counts", logs=lab.logs)
    assert 4 in {event.get("members") for event in newcomer.events("round")}
    for node in (*nodes[:2], back, newcomer):
        node.signal(signal.SIGTERM)
    for node in (*nodes[:2], back, newcomer):
        assert node.exit_code(limit=20) == 0, node.tail()
        no_traceback(node)


def test_a_closed_terminal_ends_node_and_bootstrap_peer_in_order(lab: Lab) -> None:
    bootstrap, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    node = lab.join(invite, "node", "--new-run")
    node.see("committed by 1")
    for process in (node, bootstrap):
        process.signal(signal.SIGHUP)
        assert process.exit_code(limit=20) == 0, process.tail()
        process.all_gone(limit=10)
        no_traceback(process)
    assert "leaving the swarm" in node.text
    assert node.report()["rounds_committed"] > 0
    assert "stopping" in bootstrap.text


def test_a_dead_daemon_ends_its_process_with_the_reason(lab: Lab) -> None:
    bootstrap, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    node = lab.join(invite, "node", "--new-run")
    node.see("committed by 1")
    for process in (node, bootstrap):
        os.kill(process.daemon(), signal.SIGKILL)
        assert process.exit_code(limit=10) == 1, process.tail()
        text = " ".join(process.text.split())
        assert "the network daemon (p2pd) was killed by signal 9 (SIGKILL), by hand or because memory ran out" in text
        assert re.search(r"it held up to \d+ MB", text)
        process.all_gone(limit=10)
        no_traceback(process)
