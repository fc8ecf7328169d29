"""Rates as people write them."""

import re
from pathlib import Path

import pytest

from stretto.node.config import load_node_config
from stretto.node.rates import parse_rate
from stretto.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500kB/s", 500e3),
        ("4Mbit/s", 500e3),
        ("2 MB/s", 2e6),
        ("1.5MiB/s", 1.5 * 1024**2),
        ("1Gbit/s", 125e6),
        ("100000bits/s", 12_500),
        ("64 KiB", 65536),
        (" 250000 ", 250e3),
        ("20000B/s", 20e3),
        (".5 mbit/s", 62_500),
        ("0", 0),
        (300_000, 300e3),
        (1.25e6, 1.25e6),
        (0, 0),
    ],
)
def test_accepted_forms(text: object, rate: float) -> None:
    assert parse_rate(text, "max_upload") == rate


@pytest.mark.parametrize(
    "value",
    ["fast", "", "-5MB/s", "4Mb/s", "4 MB/h", "iB", "5iB/s", "1e6", "inf", "nan", "500 kB per s", True, None, []],
)
def test_what_is_no_rate_is_told_the_accepted_forms(value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(value))) as caught:
        parse_rate(value, "max_upload")
    for form in ("max_upload", "500kB/s", "4Mbit/s", "2 MB/s", "plain bytes per second"):
        assert form in str(caught.value)


@pytest.mark.parametrize("value", ["500", "9kB/s", -1, float("nan"), float("inf"), 1e13])
def test_what_cannot_work_is_told_the_least_rate(value: object) -> None:
    with pytest.raises(ConfigError, match=r"must be at least 10000 \(10kB/s\)"):
        parse_rate(value, "max_upload")


def test_caps_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('max_upload = "4Mbit/s"\nmax_download = 2000000\n')
    config = load_node_config({}, environment={}, file=file)
    assert (config.max_upload, config.max_download) == (500e3, 2e6)
    config = load_node_config({"max_upload": "1MB/s"}, environment={"STRETTO_MAX_DOWNLOAD": "300kB/s"}, file=file)
    assert (config.max_upload, config.max_download) == (1e6, 3e5)
    assert load_node_config({}, environment={}).max_upload == 0
    with pytest.raises(ConfigError, match="STRETTO_MAX_UPLOAD is 'x', which is no rate"):
        load_node_config({}, environment={"STRETTO_MAX_UPLOAD": "x"})
