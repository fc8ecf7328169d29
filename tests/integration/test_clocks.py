"""Machines whose clocks are wrong: they are told so, and take part like the others."""

import re

from tests.integration.processes import Lab, micro_run, no_traceback, until


def test_two_of_four_clocks_are_off_and_all_commit_together(lab: Lab) -> None:
    # 60 s is far beyond the 20 s that a roster record lives.
    offsets = {"early": 10.0, "late": -60.0}
    run = lab.write_run(micro_run(lab.corpus, min_size=2, inner_steps=40, window=1.0))
    _, invite = lab.bootstrap(run)
    nodes = lab.found(invite, 2)
    wrong = [lab.join(invite, name, variables=lab.wrong_clock(seconds)) for name, seconds in offsets.items()]
    nodes += wrong
    for node in nodes:
        until(
            lambda node=node: any(event.get("members") == 4 and event["counted"] for event in node.events("round")),
            f"{node.name} is counted in a round of four",
            logs=lab.logs,
        )
    for node, seconds in zip(wrong, offsets.values(), strict=True):
        (text,) = node.see(r"WARNING your clock is [\d.]+ s (ahead of|behind) \d of \d peers.*")
        said, direction, against, asked = re.findall(r"([\d.]+) s (ahead of|behind) (\d) of (\d)", text)[0]
        assert abs(float(said) - abs(seconds)) < 1, text
        assert direction == ("ahead of" if seconds > 0 else "behind")
        assert int(against) > int(asked) / 2
        (first, *_) = [event for event in node.events("clock") if "offset" in event]
        assert abs(first["offset"] - seconds) < 1, first
        assert abs(first["correction"] + seconds) < 1, first
    for node in nodes[:2]:
        assert "WARNING your clock" not in node.text
        no_traceback(node)
