"""Peers that start at the same moment, some before their bootstrap peer, end in one group."""

import signal

from tests.integration.processes import Lab, micro_run, until


def test_four_that_start_with_their_bootstrap_peer_are_one_group(lab: Lab) -> None:
    run = lab.write_run(micro_run(lab.corpus, min_size=2, inner_steps=80, window=1.0))
    bootstrap, invite = lab.bootstrap(run)
    port = bootstrap.see(r"listening at /ip4/127\.0\.0\.1/tcp/\d+")[0].rsplit("/", 1)[1]
    bootstrap.signal(signal.SIGTERM)
    assert bootstrap.exit_code(limit=15) == 0
    nodes = lab.found(invite, 4)
    _, again = lab.bootstrap(run, port=int(port))
    assert again == invite
    for node in nodes:
        until(
            lambda node=node: any(e.get("members") == 4 and e["counted"] for e in node.events("round")),
            f"{node.name} is counted in a group of four",
            logs=lab.logs,
        )
