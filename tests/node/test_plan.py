"""``stretto plan``: its words, its JSON, and what it says to bad input. The numbers are tested in tests/protocol."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.node.cli import app
from stretto.node.gpus import GPUS, find_gpu
from stretto.node.place import Given, LineTiming, Timing, make_place, parse_link
from stretto.node.plan import codec_bits
from stretto.node.presets import planned_run
from stretto.protocol.errors import ConfigError

HOME = ("--gpu", "4090", "--link", "100/20")


def plan(*arguments: str) -> str:
    """What the command prints. Errors that a person would read as a sentence are raised."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def plan_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return answer


# ------------------------------------------------------------------------------------------------ a plan


def test_a_line_that_is_too_slow_in_words() -> None:
    text = plan("--model", "1b", *HOME, "--peers", "8")
    for words in (
        "1b: 1,270.5 million parameters in 20 fragments",
        "8 peers in groups of 8: each reduces a part: e3m0 to the reducers, int8 back",
        "It does not fit: the line is too slow for so few tokens per round.",
        "20.3 GB of 24 GB on the device",
        "10.2 GB on the host",
        "6.55 million tokens per peer",
        "rho = 1.31: the line does not keep up",
        "the run allows 5",
        "days until the swarm has trained on 25.4 billion tokens",
        "outer.inner_steps = 140 (H)",
        "inner.tokens_per_step = ",
        "--client-mode",
        'wire.up = wire.down = "e1m0"',
        "RTX 4090 sustains 83 TFLOP/s",
    ):
        assert words in text


def test_a_plan_that_fits_in_words() -> None:
    text = plan("--model", "500m", "--gpu", "3090", "--link", "1000/1000")
    assert "It fits." in text
    assert "For the" not in text
    assert "35 TFLOP/s" in text


def test_the_same_as_json() -> None:
    found = plan_json("--model", "1b", *HOME, "--peers", "8", "--up", "e3m0", "--down", "e3m0")
    bits = 2 * codec_bits("e3m0")
    assert (found["fits"], found["fits_rate"], found["fits_memory"]) == (False, True, True)
    assert (found["group"], found["scheme"], found["fragments"], found["tau_max"]) == (8, "butterfly", 20, 5)
    assert found["bytes_up_per_round"] == pytest.approx(found["parameters"] * 7 / 8 * bits / 8)
    assert found["step_seconds"] == pytest.approx(6 * found["parameters"] * 65_536 / 83e12)
    assert found["tokens_per_round"] == 6_553_600
    assert found["rho"] == pytest.approx(0.90 * bits / 8.25, rel=0.02)
    assert found["bytes_up_per_day"] == pytest.approx(
        found["bytes_up_per_round"] * 86_400 / found["round_seconds"], rel=1e-3
    )
    assert found["join_seconds"] == pytest.approx(16 * 60, rel=0.02)
    assert found["days"] == pytest.approx(3.4, rel=0.02)
    assert all(remedy["suffices"] for remedy in found["remedies"])


def test_whatever_is_suggested_works_when_it_is_tried() -> None:
    slow = ("--model", "1b", "--gpu", "4090", "--link", "20/10")
    steps, tokens = plan_json(*slow)["remedies"][:2]
    assert (steps["suffices"], tokens["suffices"]) == (False, True)
    k = tokens["change"].split("tokens_per_step = ")[1].split()[0]
    tried = plan_json(*slow, "--tokens-per-step", k)
    assert tried["fits"]
    assert (tried["rho"], tried["tau"]) == (pytest.approx(tokens["rho"]), tokens["tau"])
    h = steps["change"].split("inner_steps = ")[1].split()[0]
    assert plan_json(*slow, "--inner-steps", h)["rho"] == pytest.approx(steps["rho"])


def test_a_model_that_is_too_large_gets_advice_on_memory() -> None:
    found = plan_json("--model", "4b", "--gpu", "4090", "--link", "1000/1000")
    assert (found["fits"], found["fits_memory"], found["fits_rate"]) == (False, False, True)
    assert any("1b needs 20.3 GB" in text for text in found["memory_remedies"])
    assert any("h200" in text for text in found["memory_remedies"])
    eight_bit = plan_json("--model", "1b", "--tflops", "20", "--memory", "16", "--link", "1000/1000")
    assert any(text.startswith("8-bit Adam would need 12.7 GB") for text in eight_bit["memory_remedies"])


def test_peers_beyond_the_largest_group_are_mentioned() -> None:
    found = plan_json("--model", "35m", *HOME, "--peers", "40")
    assert (found["peers"], found["group"]) == (40, 16)
    assert any("group.max_size = 16" in text for text in found["assumed"])


def test_small_groups_exchange_whole_contributions_and_one_peer_sends_nothing() -> None:
    three = plan_json("--model", "35m", *HOME, "--peers", "3")
    assert three["scheme"] == "all-gather"
    assert three["bytes_up_per_round"] == pytest.approx(three["parameters"] * 2 * codec_bits("e3m0") / 8, abs=1)
    alone = plan_json("--model", "35m", *HOME, "--peers", "1")
    assert (alone["bytes_up_per_round"], alone["fits"]) == (0, True)


def test_a_run_file_gives_its_own_settings(tmp_path: Path) -> None:
    text = planned_run("35m").to_toml()
    text = text.replace("inner_steps = 100", "inner_steps = 60").replace('down = "int8"', 'down = "bf16"')
    file = tmp_path / "run.toml"
    file.write_text(text.replace("fragments = 5", "fragments = 3").replace("tau_max = 5", "tau_max = 2"))
    found = plan_json("--run", str(file), *HOME)
    assert (found["inner_steps"], found["fragments"], found["tau_max"]) == (60, 3, 2)
    assert (found["up_codec"], found["down_codec"], found["down_bits"]) == ("e3m0", "bf16", 16)


# ------------------------------------------------------------------------------------------------ the paper


def test_the_comparison_with_the_paper() -> None:
    found = plan_json("--paper")
    assert (found["cells_total"], found["cells_exact"]) == (75, 73)
    assert found["worst_relative_miss"] < 0.015
    assert (found["held_out_total"], found["held_out_exact"]) == (10, 10)
    assert found["worst_closed_form_error"] < 1e-6
    assert found["seconds"] < 60
    assert len(found["cells"]) == 75
    text = plan("--paper")
    assert "73 of 75 cells agree" in text
    assert "1.7 / 1.657!" in text
    assert "1000.0+ / 1129" in text


def test_the_tables_for_volunteers() -> None:
    found = plan_json("--tables")
    assert found["uplink"][0]["butterfly M=8"] == pytest.approx(35.9, rel=0.02)
    assert [row["model"] for row in found["sizes"]][-1] == "9.8B"
    assert [row["tau"] for row in found["links"]] == [None, 5, 1]
    assert "20/10  rho 1.79  does not keep up, CU 0.56" in plan("--tables")


@pytest.mark.parametrize(("number", "charts"), [(4, 3), (7, 2), (9, 3), (15, 3), (16, 2)])
def test_figures(number: int, charts: int, tmp_path: Path) -> None:
    file = tmp_path / "figure.png"
    found = json.loads(plan("--figure", str(number), "--out", str(file), "--json"))
    assert (found["figure"], len(found["charts"])) == (number, charts)
    for chart in found["charts"]:
        for line in chart["series"]:
            assert all(0 < value <= 1 for value in line["utilization"])
            assert line["utilization"] == sorted(line["utilization"])
            assert line["utilization"][-1] > 0.95
    assert struct.unpack(">II", file.read_bytes()[16:24]) > (600, 400)


def test_a_figure_in_the_terminal() -> None:
    text = plan("--figure", "7")
    assert "strided" in text
    assert "bandwidth, Gbit/s" in text


# ------------------------------------------------------------------------------------------------ sources of numbers


def test_what_is_given_beats_what_was_measured_and_that_beats_the_table() -> None:
    timing = Timing(device="this card", flops=5e12, memory=8e9, words="timed")
    line = LineTiming(down=42e6, rtt=0.03, words="downloaded")
    measured = make_place(Given(gpu="4090"), timing, line)
    assert (measured.machine.flops, measured.machine.memory) == (5e12, 8e9)
    assert (measured.machine.down, measured.machine.up, measured.machine.rtt) == (42e6, 10e6, 0.03)
    assert measured.measured == ("timed", "downloaded")
    assert any("uplink of 10 Mbit/s" in text for text in measured.assumed)
    given = make_place(Given(tflops=7, memory=12, link="50/5", rtt=0.2), timing, line)
    assert (given.machine.flops, given.machine.memory) == (7e12, 12e9)
    assert (given.machine.down, given.machine.up, given.machine.rtt) == (50e6, 5e6, 0.2)


def test_the_default_uplink_is_the_nodes_own() -> None:
    from stretto.node.place import DEFAULT_UP
    from stretto.node.swarm.line import DEFAULT_UPLINK

    assert DEFAULT_UP == 8 * DEFAULT_UPLINK


def test_cards_are_found_however_they_are_written() -> None:
    assert find_gpu("RTX 4090") is find_gpu("4090") is GPUS["4090"]
    assert find_gpu("H100").tflops == 495
    assert all(gpu.tflops > 0 and gpu.memory_gb > 0 for gpu in GPUS.values())


def test_this_machines_step_is_measured() -> None:
    found = plan_json("--model", "tiny", "--measure", "--device", "cpu", "--link", "100/20")
    (words,) = found["measured"]
    assert "a pass of 128 tokens takes" in words
    assert found["device"].startswith("cpu")
    assert found["flops"] == pytest.approx(6 * found["parameters"] * 1024 / found["step_seconds"])


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "7b", *HOME), r"no model preset '7b'; there are tiny, 35m, .*4b"),
        (("--model", "1b", "--gpu", "voodoo", "--link", "1/1"), r"no card 'voodoo' in the table; there are .*4090"),
        (HOME, r"say which run: --model NAME"),
        (("--model", "tiny", "--link", "1/1"), r"say which card: --gpu NAME"),
        (("--model", "tiny", "--tflops", "3", "--link", "1/1"), r"--memory"),
        (("--model", "tiny", "--gpu", "3060"), r"say which line: --link DOWN/UP"),
        (("--model", "tiny", "--gpu", "3060", "--tflops", "-1", "--link", "1/1"), r"--tflops is -1"),
        (("--model", "tiny", *HOME, "--peers", "0"), r"--peers is 0"),
        (("--model", "tiny", *HOME, "--rtt", "-1"), r"rtt is -1"),
        (("--model", "tiny", *HOME, "--down", "zip"), r"wire.down is 'zip'"),
        (("--model", "tiny", *HOME, "--inner-steps", "33"), r"does not divide"),
        (("--model", "35m", *HOME, "--fragments", "10"), r"10 fragments were asked for, but the model has 6"),
        (("--model", "tiny", "--run", "run.toml", *HOME), r"--model and --run"),
        (("--run", "/nowhere/run.toml", *HOME), r"/nowhere/run.toml cannot be read"),
        (("--paper", "--tables"), r"different questions"),
        (("--figure", "3"), r"figure 3 .* there are 4 .*7 .*9 .*15 .*16"),
        (("--model", "tiny", *HOME, "--out", "x.png"), r"--figure"),
        (("stretto:abc", "--model", "tiny", *HOME), r"only for --measure"),
        (("--model", "tiny", "--measure", "--micro-batch", "0", *HOME), r"--micro-batch is 0"),
        (("--model", "tiny", "--measure", "--device", "abacus", *HOME), r"device 'abacus' is not available"),
    ],
)
def test_bad_input_is_one_sentence_with_the_cure(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)


@pytest.mark.parametrize("text", ["100", "100/", "/20", "0/20", "100/0", "-1/5", "1e3/5", "a/b", "nan/1", "100/20/3"])
def test_a_link_is_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="DOWN/UP in Mbit/s"):
        parse_link(text)


def test_links_in_mbit() -> None:
    assert parse_link(" 100 / 20.5 ") == (100e6, 20.5e6)
