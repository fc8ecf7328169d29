"""The run config: defaults, refusals that name key and rule, canonical bytes, TOML."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol import wire
from stretto.protocol.config import (
    DataConfig,
    EvalConfig,
    GroupConfig,
    InnerConfig,
    OuterConfig,
    RunConfig,
    WireConfig,
)
from stretto.protocol.errors import ConfigError, RemoteProtocolError

MODEL = {"model_type": "qwen3", "hidden_size": 96, "rope_theta": 10_000.0}
MINIMAL = RunConfig(name="tiny", model=MODEL)

NOT_A_DIVISOR = "outer.fragments (P = 3) does not divide outer.inner_steps (H = 100)"
OVERLAP = "outer.tau_max is 100, it must be at least 0 and less than outer.inner_steps (H = 100)"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"data": {"sequence_length": 0}}, "data.sequence_length is 0, it must be at least 1"),
        ({"data": {"unit_sequences": 0}}, "data.unit_sequences is 0, it must be in 1..1048576"),
        ({"data": {"unit_sequences": (1 << 20) + 1}}, "data.unit_sequences is 1048577, it must be in 1..1048576"),
        ({"data": {"source": ""}}, "data.source is empty"),
        ({"data": {"seed": -1}}, "data.seed is -1, it must be in 0..2^63 - 1"),
        ({"inner": {"lr": 0.0}}, "inner.lr is 0.0, it must be positive"),
        ({"inner": {"lr": -1}}, "inner.lr is -1.0, it must be positive"),
        ({"inner": {"beta1": 1.0}}, "inner.beta1 is 1.0, it must be in [0, 1)"),
        ({"inner": {"beta2": -0.1}}, "inner.beta2 is -0.1, it must be in [0, 1)"),
        ({"inner": {"eps": 0.0}}, "inner.eps is 0.0, it must be positive"),
        ({"inner": {"weight_decay": -0.1}}, "inner.weight_decay is -0.1, it must not be negative"),
        ({"inner": {"clip": 0}}, "inner.clip is 0.0, it must be positive"),
        ({"inner": {"z_loss": -1e-4}}, "inner.z_loss is -0.0001, it must not be negative"),
        ({"inner": {"final_lr": 1.1}}, "inner.final_lr is 1.1, it must be in [0, 1]"),
        ({"inner": {"tokens_per_step": 0}}, "inner.tokens_per_step is 0, it must be at least 1"),
        ({"inner": {"warmup_steps": -1}}, "inner.warmup_steps is -1, it must be at least 0"),
        (
            {"inner": {"warmup_steps": 50, "total_steps": 50}},
            "inner.warmup_steps is 50, it must be at least 0 and less than inner.total_steps (50)",
        ),
        (
            {"inner": {"tokens_per_step": 100}, "data": {"sequence_length": 64}},
            "inner.tokens_per_step (100) must be a multiple of data.sequence_length (64)",
        ),
        ({"outer": {"fragments": 4, "lr": 0.0}}, "outer.lr is 0.0, it must be positive"),
        ({"outer": {"fragments": 4, "momentum": 1.0}}, "outer.momentum is 1.0, it must be in [0, 1)"),
        ({"outer": {"fragments": 4, "alpha": 1.5}}, "outer.alpha is 1.5, it must be in [0, 1]"),
        ({"outer": {"fragments": 4, "alpha": -0.5}}, "outer.alpha is -0.5, it must be in [0, 1]"),
        ({"outer": {"fragments": 1, "inner_steps": 0}}, "outer.inner_steps (H) is 0, it must be at least 1"),
        ({"outer": {"fragments": 4, "tau_max": 100}}, OVERLAP),
        ({"outer": {"fragments": 4, "tau_max": -1}}, "outer.tau_max is -1"),
        ({"outer": {"fragments": 3}}, NOT_A_DIVISOR),
        ({"outer": {}}, "write either outer.fragments (how many) or outer.fragment_bytes (how large)"),
        ({"outer": {"fragments": 4, "fragment_bytes": 9}}, "write either outer.fragments"),
        ({"outer": {"fragments": -1}}, "write either outer.fragments"),
        ({"outer": {"fragments": -1, "fragment_bytes": 9}}, "must not be negative"),
        (
            {"outer": {"fragments": 4, "pattern": "random"}},
            "outer.pattern is 'random', it must be one of strided, sequential",
        ),
        ({"wire": {"up": "fp16"}}, "wire.up is 'fp16', it must be one of bf16, e1m0, e2m1, e3m0, fp32, int8"),
        ({"wire": {"down": "zip"}}, "wire.down is 'zip', it must be one of bf16, e1m0, e2m1, e3m0, fp32, int8"),
        (
            {"group": {"min_size": 3, "max_size": 2}},
            "group.min_size (3) and group.max_size (2) must be ordered and within 1..256",
        ),
        ({"group": {"min_size": 0}}, "group.min_size (0)"),
        ({"group": {"max_size": 257}}, "group.max_size (257)"),
        ({"group": {"window": 0}}, "group.window is 0.0 s, it must be in (0, 600]"),
        ({"group": {"window": 601.0}}, "group.window is 601.0 s"),
        ({"eval": {"every_rounds": -1}}, "eval.every_rounds must not be negative"),
        ({"eval": {"sequences": 0}}, "eval.sequences is 0, it must be at least 1"),
        ({"name": ""}, "name is '', write 1 to 64 characters"),
        ({"name": "a\nb"}, "name is 'a\\nb'"),
        ({"name": "x" * 65}, "write 1 to 64 characters"),
        ({"seed": -1}, "seed is -1, it must be in 0..2^63 - 1"),
        ({"model": {"hidden_size": 3}}, "model.model_type is missing"),
        # types
        ({"seed": "1"}, "seed is '1', it must be a whole number of 64 bits"),
        ({"seed": True}, "seed is True, it must be a whole number of 64 bits"),
        ({"seed": 2**64}, "seed is 18446744073709551616, it must be a whole number of 64 bits"),
        ({"name": 7}, "name is 7, it must be a text in quotes"),
        ({"outer": {"fragments": 4.0}}, "outer.fragments is 4.0, it must be a whole number of 64 bits"),
        ({"inner": {"lr": "fast"}}, "inner.lr is 'fast', it must be a finite number"),
        ({"inner": {"lr": float("nan")}}, "inner.lr is nan, it must be a finite number"),
        ({"inner": {"lr": float("inf")}}, "inner.lr is inf, it must be a finite number"),
        ({"wire": {"error_feedback": 1}}, "wire.error_feedback is 1, it must be true or false"),
        ({"data": {"source": 3}}, "data.source is 3, it must be a text in quotes"),
        ({"data": {"source": "text:\udc80"}}, "data.source is 'text:\\udc80', it must be a text in quotes"),
        ({"data": 3}, "[data] must be a table"),
        ({"model": 3}, "a run config needs a name and a [model] table"),
        ({"model": {"model_type": "toy", "when": object}}, "a run config cannot hold <class 'object'>"),
        ({"model": {"model_type": "toy", "layers": None}}, "a run config cannot hold None; leave the key out"),
        ({"model": {"model_type": "toy", "sizes": [1, 2**63]}}, "a run config cannot hold 9223372036854775808"),
        ({"model": {"model_type": "toy", "scale": float("nan")}}, "a run config cannot hold nan"),
    ],
)
def test_what_cannot_work_is_refused_by_key_and_rule(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.from_dict({"name": "tiny", "model": MODEL, **table})


def test_fragments_that_do_not_divide_h_and_too_large_an_overlap_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=re.escape(NOT_A_DIVISOR)):
        OuterConfig(inner_steps=100, fragments=3)
    with pytest.raises(ConfigError, match=re.escape(OVERLAP)):
        OuterConfig(inner_steps=100, fragments=4, tau_max=100)
    assert OuterConfig(inner_steps=100, fragments=4, tau_max=99).tau_max == 99


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"nmae": "x"}, "unknown key nmae; valid are name, seed, model, data, inner, outer, wire, group, eval"),
        ({"wire": {"upp": "e3m0"}}, "unknown key wire.upp; valid are wire.up, wire.down, wire.error_feedback"),
        (
            {"group": {"a": 1, "b": 2}},
            "unknown key group.a, group.b; valid are group.max_size, group.min_size, group.window",
        ),
    ],
)
def test_an_unknown_key_lists_the_valid_ones(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.from_dict({"name": "tiny", "model": MODEL, **table})


def test_every_section_refuses_unknown_keys() -> None:
    for section in ("data", "inner", "outer", "wire", "group", "eval"):
        with pytest.raises(ConfigError, match=rf"unknown key {section}\.zzz; valid are {section}\."):
            RunConfig.from_dict({"name": "tiny", "model": MODEL, section: {"zzz": 1}})


@pytest.mark.parametrize("plain", [{}, {"name": "x"}, {"model": MODEL}])
def test_name_and_model_are_needed(plain: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a run config needs a name and a \[model\] table"):
        RunConfig.from_dict(plain)


def test_the_defaults_are_the_papers() -> None:
    outer = MINIMAL.outer
    assert (outer.lr, outer.momentum, outer.alpha, outer.inner_steps, outer.tau_max) == (0.4, 0.9, 0.5, 100, 5)
    assert (outer.pattern, MINIMAL.wire.up) == ("strided", "e3m0")
    assert (MINIMAL.wire.down, MINIMAL.wire.error_feedback) == ("int8", False)


FULL = RunConfig(
    name='a "quoted" name \\ é',
    seed=7,
    model={
        "model_type": "qwen3",
        "layers": [1, 2.5, "x", True],
        "nested": {"a b": 1, "c": {"d": False}},
        "text": 'tab\t newline\n quote" back\\slash delete\x7f null\x00 ü',
        "odd key.": 1e-05,
        "large": 1e300,
    },
    data=DataConfig(source="text:/a b/c", sequence_length=64, seed=3, fingerprint="ab", tokenizer_digest="cd"),
    inner=InnerConfig(lr=3e-4, tokens_per_step=6400, warmup_steps=0),
    outer=OuterConfig(fragment_bytes=1 << 20, alpha=0.0, pattern="sequential", inner_steps=30),
    wire=WireConfig(up="bf16", down="fp32", error_feedback=True),
    group=GroupConfig(max_size=8, min_size=2, window=1.5),
    eval=EvalConfig(every_rounds=3, sequences=2),
)


@pytest.mark.parametrize("config", [MINIMAL, FULL])
def test_toml_dict_and_canonical_bytes_come_back_as_they_were(config: RunConfig) -> None:
    assert RunConfig.from_toml(config.to_toml()) == config
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_canonical(config.canonical()) == config


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        max_size=4,
    )
)
def test_any_model_table_survives_toml(fields: dict[str, Any]) -> None:
    config = RunConfig(name="x", model={**fields, "model_type": "toy"})
    assert RunConfig.from_toml(config.to_toml()).canonical() == config.canonical()


def test_golden_run_id() -> None:
    # A change here gives every run a new id: peers of older versions will not meet it any more.
    assert MINIMAL.digest().hex() == "f9f183c5e24f01c95ac5f07c098a9763cecd383c00321cd17c3c6b076ab541ab"
    assert FULL.digest().hex() == "e930edd2935330da2fa53267bb1ca99367caa1c45b95444f23881303280e21b9"


def test_canonical_bytes_do_not_depend_on_the_order_of_keys() -> None:
    backwards = RunConfig(name="tiny", model=dict(reversed(MODEL.items())))
    assert backwards.canonical() == MINIMAL.canonical()
    start = wire.unpack(MINIMAL.canonical())
    assert list(start) == sorted(start)
    assert start["protocol"] == 4


def test_every_field_changes_the_run_id() -> None:
    ids = {MINIMAL.digest(), dataclasses.replace(MINIMAL, name="b").digest()}
    ids.add(dataclasses.replace(MINIMAL, seed=1).digest())
    ids.add(dataclasses.replace(MINIMAL, model={**MODEL, "x": 1}).digest())
    changes = {
        "data": DataConfig(unit_sequences=511), "inner": InnerConfig(lr=2e-3), "outer": OuterConfig(fragments=2),
        "wire": WireConfig(up="fp32"), "group": GroupConfig(min_size=2), "eval": EvalConfig(sequences=1),
    }  # fmt: skip
    for section, value in changes.items():
        ids.add(dataclasses.replace(MINIMAL, **{section: value}).digest())  # type: ignore[arg-type]
    assert len(ids) == 10


def test_differences_name_each_key_with_both_values() -> None:
    other = RunConfig(
        name="tiny",
        model={**MODEL, "hidden_size": 128, "vocab_size": 272},
        inner=InnerConfig(lr=2e-3),
        outer=OuterConfig(inner_steps=50, fragments=2),
    )
    assert MINIMAL.differences(other) == [
        "inner.lr: 0.001 != 0.002",
        "model.hidden_size: 96 != 128",
        "model.vocab_size: (not set) != 272",
        "outer.fragments: 4 != 2",
        "outer.inner_steps: 100 != 50",
    ]
    assert MINIMAL.differences(MINIMAL) == []


@pytest.mark.parametrize(
    "text",
    ["name = ", "name = 'x'\nname = 'y'", "[model", "seed = 1" + "0" * 5000, "x = " + "[" * 20_000],
)
def test_broken_toml_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        RunConfig.from_toml(text)


def test_a_date_in_the_model_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="a run config cannot hold datetime"):
        RunConfig.from_toml('name = "x"\n[model]\nmodel_type = "toy"\nborn = 2024-01-01\n')


def test_another_protocol_version_is_named_with_the_cure() -> None:
    plain = wire.unpack(MINIMAL.canonical())
    with pytest.raises(ConfigError, match="the run speaks protocol version 5, this stretto speaks 4: install"):
        RunConfig.from_canonical(wire.pack({**plain, "protocol": 5}))
    with pytest.raises(ConfigError, match="the run speaks protocol version None"):
        RunConfig.from_canonical(wire.pack([1, 2]))


def test_other_bytes_of_the_same_config_are_refused() -> None:
    plain = wire.unpack(MINIMAL.canonical())
    for changed in (
        {**plain, "data": {key: value for key, value in plain["data"].items() if key != "seed"}},  # a default left out
        {**plain, "inner": {**plain["inner"], "clip": 1}},  # a whole number for a float
    ):
        with pytest.raises(ConfigError, match="not in canonical form"):
            RunConfig.from_canonical(wire.pack(changed))
    with pytest.raises(RemoteProtocolError):
        RunConfig.from_canonical(MINIMAL.canonical()[:-1])


@given(st.binary(max_size=200))
def test_random_bytes_are_never_a_traceback(data: bytes) -> None:
    with pytest.raises((ConfigError, RemoteProtocolError)):
        RunConfig.from_canonical(data)
