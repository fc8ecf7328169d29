"""The planner for volunteers: golden tables (2 %), the conditions by hand, and what it suggests."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol.errors import ConfigError
from stretto.protocol.planner.home import (
    CodecChange,
    Cut,
    Machine,
    Plan,
    Recipe,
    equal_fragments,
    exchange_bits,
    make_plan,
    needed_uplink,
    remedies,
    usual_scheme,
)

# ---- golden values: RTX 4090 at 83 TFLOP/s, 4.125 bits per value both ways, eta = 0.85, written to the digits given

# K, H -> Mbit/s of uplink for pair or client, butterfly of 8 and 64, all-gather of 4 and 8, butterfly of 8 at 2.25 bit
UPLINK = {
    (32_768, 100): "20.5 35.9 40.3 61.5 143 19.6",
    (65_536, 100): "10.2 17.9 20.2 30.7 71.7 9.8",
    (65_536, 200): "5.1 9.0 10.1 15.4 35.9 4.9",
    (131_072, 100): "5.1 9.0 10.1 15.4 35.9 4.9",
    (131_072, 500): "1.0 1.8 2.0 3.1 7.2 1.0",
}
SCHEMES = [
    ("pair", 2, 4.125),
    ("butterfly", 8, 4.125),
    ("butterfly", 64, 4.125),
    ("all-gather", 4, 4.125),
    ("all-gather", 8, 4.125),
    ("butterfly", 8, 2.25),
]

# Layers and width -> seconds of a step, minutes of a round, MB per round each way, GB on the device (16 and 10 bytes
# per parameter) and the host, minutes to join (bf16 and exact state) at 20, 100 and 1000 Mbit/s down, days with 8 and
# 32 peers. "<" is an upper bound.
SIZES = {
    (6, 512): "0.17 0.3 32 0.6 0.4 0.3 0.6 2.2 0.1 0.4 <0.1 <0.1 <0.01 <0.01",
    (9, 768): "0.42 0.7 80 1.4 0.9 0.7 1.4 5.5 0.3 1.1 <0.1 0.1 0.02 <0.01",
    (12, 1024): "0.87 1.5 166 2.9 1.8 1.5 2.9 11.5 0.6 2.3 0.1 0.2 0.07 0.02",
    (15, 1280): "1.59 2.7 303 5.4 3.4 2.7 5.3 21 1.1 4.2 0.1 0.4 0.24 0.06",
    (18, 1536): "2.65 4.4 504 8.9 5.6 4.5 8.8 35 1.8 7.0 0.2 0.7 0.65 0.16",
    (24, 2048): "6.0 10 1150 20.4 12.7 10.2 20 80 4 16 0.4 1.6 3.4 0.85",
    (30, 2560): "11.6 19 2200 39 24.4 19.5 38 153 7.7 31 0.8 3.1 12.5 3.1",
    (36, 3072): "19.8 33 3800 67 42 33 66 262 13 52 1.3 5.2 36 9",
    (48, 4096): "46 77 8800 157 98 78 154 615 31 123 3.1 12 201 50",
}
LINKS = {(20, 10): (1.79, None, 0.56), (100, 20): (0.90, 5, 1.0), (1000, 1000): (0.02, 1, 1.0)}
"""Mbit/s down and up -> rho, tau with 20 fragments or more, CU."""


def assert_about(found: float, written: str) -> None:
    """Within 2 %, or within what was rounded away where fewer digits than that are written."""
    if written.startswith("<"):
        assert 0 < found < float(written[1:])
        return
    _, _, decimals = written.partition(".")
    rounding = 0.51 * 10.0 ** -len(decimals)
    if written.endswith("00"):  # 1150, 2200: whole tens or hundreds of MB
        rounding = 51.0
    assert found == pytest.approx(float(written), rel=0.02, abs=rounding)


def parameters(layers: int, width: int) -> int:
    return 12 * layers * width**2 + 32_000 * width


def machine(down: float = 100, up: float = 20, **changes: float) -> Machine:
    return Machine(**{"flops": 83e12, "memory": 24e9, "down": down * 1e6, "up": up * 1e6, **changes})


RECIPE = Recipe(
    fragments=equal_fragments(parameters(24, 2048), 20),
    tokens_per_step=65_536,
    inner_steps=100,
    group=8,
    swarm=8,
    up_bits=4.125,
    down_bits=4.125,
    scheme="butterfly",
    tau_max=5,
)


def plan(down: float = 100, up: float = 20, *, rtt: float = 0.0, **changes: object) -> Plan:
    return make_plan(dataclasses.replace(RECIPE, **changes), machine(down, up, rtt=rtt))


# ------------------------------------------------------------------------------------------------ golden tables


@pytest.mark.parametrize(("tokens", "steps"), UPLINK)
def test_the_uplink_that_hides_everything(tokens: int, steps: int) -> None:
    for (scheme, group, bits), written in zip(SCHEMES, UPLINK[tokens, steps].split(), strict=True):
        up, _ = exchange_bits(scheme, group, bits, bits)
        assert_about(needed_uplink(83e12, tokens * steps, up) / 1e6, written)


@pytest.mark.parametrize(("layers", "width"), SIZES)
def test_every_size_of_model(layers: int, width: int) -> None:
    fragments = equal_fragments(parameters(layers, width), 20)
    lines = [plan(down, up, fragments=fragments) for down, up in LINKS]
    here = lines[0]
    found = [
        here.step_seconds,
        here.round_seconds / 60,
        here.bytes_up / 1e6,
        here.state_bytes / 1e9,
        here.state_bytes_8bit / 1e9,
        here.host_bytes / 1e9,
        *(line.join_seconds(each) / 60 for line in lines for each in (2, 8)),
        plan(1000, 1000, fragments=fragments).days,
        plan(1000, 1000, fragments=fragments, swarm=32).days,
    ]
    for value, written in zip(found, SIZES[layers, width].split(), strict=True):
        assert_about(value, written)
    assert here.bytes_down == here.bytes_up


@pytest.mark.parametrize(("layers", "width"), SIZES)
@pytest.mark.parametrize("link", LINKS)
def test_every_line_is_the_same_for_every_size(layers: int, width: int, link: tuple[int, int]) -> None:
    here = plan(*link, fragments=equal_fragments(parameters(layers, width), 20))
    rho, tau, utilization = LINKS[link]
    assert here.rho == pytest.approx(rho, rel=0.02, abs=0.005)
    assert here.utilization == pytest.approx(utilization, rel=0.02)
    assert here.rate_fits is (tau is not None)
    if tau is not None:
        assert here.tau == tau
        assert here.overlap_fits


def test_what_makes_a_slow_line_fit() -> None:
    assert plan(20, 10, inner_steps=200).rho == pytest.approx(0.90, rel=0.02)
    assert plan(20, 10, inner_steps=200, fragments=equal_fragments(parameters(24, 2048), 40)).tau == 5
    assert plan(20, 10, tokens_per_step=131_072).rho == pytest.approx(0.90, rel=0.02)
    assert plan(20, 10, scheme="client").rho == pytest.approx(1.02, rel=0.02)
    assert plan(20, 10, scheme="pair").rho == pytest.approx(1.02, rel=0.02)
    assert plan(20, 10, up_bits=2.25, down_bits=2.25).rho == pytest.approx(0.98, rel=0.02)
    assert plan(20, 10, scheme="all-gather").rho == pytest.approx(7.2, rel=0.02)
    assert plan(100, 20, scheme="all-gather", group=4, inner_steps=200).rho == pytest.approx(0.77, rel=0.02)
    assert plan(1000, 1000, scheme="all-gather").rho == pytest.approx(0.07, rel=0.03)
    assert plan(1000, 1000, inner_steps=10).rate_fits


def test_eight_cards_in_one_peer_need_eight_times_the_tokens() -> None:
    eight = machine(1000, 1000, flops=8 * 83e12)
    assert make_plan(RECIPE, eight).rho == pytest.approx(0.14, rel=0.03)
    assert make_plan(RECIPE, machine(100, 20, flops=8 * 83e12)).rho == pytest.approx(7.2, rel=0.02)


def test_least_tokens_per_round_on_a_line() -> None:
    for scheme, group, bits, written in (
        ("pair", 2, 4.125, (6.7, 3.4, 0.07)),
        ("butterfly", 8, 4.125, (11.8, 5.9, 0.12)),
        ("all-gather", 8, 4.125, (47, 23.5, 0.47)),
        ("all-gather", 8, 0.219, (2.5, 1.25, 0.02)),
    ):
        up, _ = exchange_bits(scheme, group, bits, bits)
        for uplink, millions in zip((10, 20, 1000), written, strict=True):
            tokens = needed_uplink(83e12, 1.0, up) / (uplink * 1e6)
            assert tokens / 1e6 == pytest.approx(millions, rel=0.02, abs=0.0051)


# ------------------------------------------------------------------------------------------------ conditions


def test_bits_per_scheme() -> None:
    assert exchange_bits("all-gather", 3, 4, 8) == (8, 8)
    assert exchange_bits("butterfly", 4, 4, 8) == (9, 9)
    assert exchange_bits("client", 16, 4, 8) == (4, 8)
    assert exchange_bits("pair", 16, 4, 8) == (4, 4)
    for scheme in ("all-gather", "butterfly", "client", "pair"):
        assert exchange_bits(scheme, 1, 4, 8) == (0, 0)
    # With two members and one codec a butterfly is the ring's factor 2 (M - 1) / M, and an all-gather.
    assert exchange_bits("butterfly", 2, 4, 4) == exchange_bits("all-gather", 2, 4, 4)


def test_strettos_groups_exchange_whole_contributions_up_to_three() -> None:
    assert [usual_scheme(group) for group in (1, 2, 3, 4, 16)] == ["all-gather"] * 3 + ["butterfly"] * 2
    assert usual_scheme(3, client_mode=True) == "all-gather"
    assert usual_scheme(4, client_mode=True) == "client"


def test_overlap_comes_from_the_largest_fragment_and_the_trips() -> None:
    parts = (100e6, 200e6)
    here = plan(100, 20, rtt=0.5, fragments=parts)
    seconds = 200e6 * 7 / 8 * 8.25 / (0.85 * 20e6)
    assert here.overlap == pytest.approx((seconds + 2 * 0.5) / here.step_seconds)
    assert here.tau == 61  # (84.9 + 1) s of 1.42 s each
    gathered = plan(100, 20, rtt=0.5, fragments=parts, group=2, scheme="all-gather")
    assert gathered.overlap == pytest.approx((200e6 * 4.125 / (0.85 * 20e6) + 0.5) / gathered.step_seconds)


def test_the_slower_direction_decides() -> None:
    assert plan(20, 1000).rho == pytest.approx(plan(1000, 20).rho)
    wide = plan(100, 100, scheme="client", up_bits=4.0, down_bits=8.0)
    assert wide.rho == pytest.approx(RECIPE.parameters * 8.0 / 85e6 / wide.round_seconds)


def test_a_lone_peer_needs_no_line() -> None:
    alone = plan(1, 1, group=1, swarm=1, scheme="all-gather", rtt=1.0)
    assert (alone.rho, alone.tau, alone.bytes_up, alone.utilization) == (0, 1, 0, 1)
    assert alone.fits


def test_memory_leaves_room_for_activations() -> None:
    assert make_plan(RECIPE, machine(memory=24e9)).memory_fits
    assert not make_plan(RECIPE, machine(memory=23e9)).memory_fits
    assert plan(error_feedback=True).host_bytes == plan().host_bytes * 12 / 8


def test_a_token_budget_of_ones_own() -> None:
    assert plan(tokens=2e9).days == pytest.approx(plan().days * 2e9 / (20 * RECIPE.parameters))


# ------------------------------------------------------------------------------------------------ remedies

FOUR = CodecChange("four bits back", 4.03, 4.03)
TWO = CodecChange("two bits", 2.06, 2.06, feedback=True)


def test_every_remedy_is_tried_on_a_line_that_is_too_slow() -> None:
    slow = plan(20, 10, down_bits=8.06)
    finer = Cut("outer.fragments = 80", equal_fragments(RECIPE.parameters, 80))
    found = {remedy.what: remedy for remedy in remedies(slow, codecs=[FOUR, TWO], cuts=[finer], sequence_length=1024)}
    assert not slow.rate_fits
    assert len(found) == 5
    steps, tokens, client, four, two = found.values()
    assert steps.what.startswith("outer.inner_steps = 280 (H) in place of 100, and outer.fragments = 80")
    assert steps.plan.recipe.inner_steps == 320, "a multiple of the new number of fragments"
    assert tokens.plan.recipe.tokens_per_step % 1024 == 0
    assert tokens.plan.recipe.tokens_per_step == pytest.approx(65_536 * slow.overlap / 5, rel=0.02)
    assert client.plan.recipe.scheme == "client"
    assert four.plan.rho == pytest.approx(slow.rho * 8.06 / 12.185, rel=0.01)
    assert two.plan.recipe.error_feedback
    assert [remedy.cures for remedy in found.values()] == [True, True, False, False, True]


def test_a_fragment_that_is_late_asks_for_a_finer_cut_or_a_longer_overlap() -> None:
    coarse = plan(fragments=equal_fragments(RECIPE.parameters, 10))
    assert (coarse.rate_fits, coarse.overlap_fits, coarse.tau) == (True, False, 9)
    cuts = [Cut(f"outer.fragments = {count}", equal_fragments(RECIPE.parameters, count)) for count in (12, 16, 20, 24)]
    found = remedies(coarse, cuts=cuts)
    assert [remedy.what for remedy in found][:2] == ["outer.fragments = 20", "outer.tau_max = 9 in place of 5"]
    assert all(remedy.cures for remedy in found)


def test_an_overlap_beyond_what_the_paper_tried_is_not_suggested() -> None:
    coarse = plan(fragments=equal_fragments(RECIPE.parameters, 5))
    assert coarse.tau > 10
    assert not any("tau_max" in remedy.what for remedy in remedies(coarse))


@given(
    down=st.floats(1, 1000),
    up=st.floats(0.5, 1000),
    tokens=st.integers(64, 4096),
    steps=st.integers(1, 50),
    count=st.integers(1, 30),
    rtt=st.floats(0, 0.5),
    tau_max=st.integers(0, 9),
)
def test_a_larger_k_always_suffices(
    down: float, up: float, tokens: int, steps: int, count: int, rtt: float, tau_max: int
) -> None:
    here = plan(
        down, up, rtt=rtt, tokens_per_step=16 * tokens, inner_steps=steps * count,
        fragments=equal_fragments(RECIPE.parameters, count), tau_max=tau_max,
    )  # fmt: skip
    if here.rate_fits and here.overlap_fits:
        return
    (larger,) = (remedy for remedy in remedies(here, sequence_length=16) if remedy.what.startswith("inner.tokens"))
    assert larger.cures
    assert larger.plan.recipe.tokens_per_step % 16 == 0


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fragments": ()}, "fragments"),
        ({"fragments": (1.0, 0.0)}, "fragments"),
        ({"tokens_per_step": 0}, "K is 0"),
        ({"inner_steps": 0}, "H is 0"),
        ({"group": 9}, "group of 9 does not fit 8"),
        ({"up_bits": 0.0}, "bits per value"),
        ({"scheme": "ring"}, "none of all-gather, butterfly"),
        ({"tau_max": -1}, "tau_max"),
        ({"tokens": -1.0}, "negative"),
    ],
)
def test_a_recipe_refuses_nonsense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RECIPE, **changes)


def test_a_machine_refuses_nonsense() -> None:
    for name in ("flops", "memory", "down", "up"):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            dataclasses.replace(machine(), **{name: 0.0})
        with pytest.raises(ConfigError, match=f"{name} is nan"):
            dataclasses.replace(machine(), **{name: float("nan")})
    with pytest.raises(ConfigError, match="rtt"):
        machine(rtt=-1.0)
    with pytest.raises(ConfigError, match="cannot be cut into 0"):
        equal_fragments(1e6, 0)
