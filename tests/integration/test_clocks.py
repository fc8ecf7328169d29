"""Peers that start at the same moment, before their bootstrap peer and with wrong clocks, end in one group."""

import re
import signal

from tests.integration.processes import Lab, micro_run, no_traceback, until


def test_four_start_at_once(lab: Lab) -> None:
    run = lab.write_run(micro_run(lab.corpus, min_size=2, window=1.0))
    bootstrap, invite = lab.bootstrap(run)
    port = bootstrap.see(r"listening at /ip4/127\.0\.0\.1/tcp/\d+")[0].rsplit("/", 1)[1]
    bootstrap.signal(signal.SIGTERM)
    assert bootstrap.exit_code(limit=15) == 0
    right = lab.found(invite, 2)
    # 60 s is far beyond the 20 s that a roster record lives.
    offsets = {"early": 10.0, "late": -60.0}
    wrong = [lab.join(invite, name, variables=lab.wrong_clock(seconds)) for name, seconds in offsets.items()]
    _, again = lab.bootstrap(run, port=int(port))
    assert again == invite
    for node in [*right, *wrong]:
        until(
            lambda node=node: any(e.get("members") == 4 and e["counted"] for e in node.events("round")),
            f"{node.name} is counted in a round of four",
            logs=lab.logs,
        )
        no_traceback(node)
    for node, seconds in zip(wrong, offsets.values(), strict=True):
        (text, *_) = node.see(r"WARNING your clock is [\d.]+ s (?:ahead of|behind) \d of \d peers.*")
        ((said, direction, against, asked),) = re.findall(r"([\d.]+) s (ahead of|behind) (\d) of (\d)", text)
        # Where the two wrong ones and few others are there yet, the middle lies between them.
        assert abs(seconds) - 1 < float(said) < 71, text
        assert direction == ("ahead of" if seconds > 0 else "behind")
        assert int(against) > int(asked) / 2
        correction = [event["correction"] for event in node.events("clock") if "offset" in event][-1]
        assert abs(correction + seconds) < 1
    for node in right:
        assert "WARNING your clock" not in node.text
