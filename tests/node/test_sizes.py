"""Amounts of bytes in settings."""

import pytest

from stretto.node.config import NodeConfig
from stretto.node.sizes import parse_size
from stretto.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1GB", 10**9), ("1.5 gb", 1_500_000_000), (" 500MB ", 5 * 10**8), ("7", 7), ("2kB", 2000)],
)
def test_amounts_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size("x", text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1GiB", "1e9", "1 000", "inf", "٣GB", "9" * 13])
def test_other_texts_are_refused_by_name(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"log_budget is .* it must be an amount of bytes such as 500MB, 1\.5GB or 0"
    ):
        NodeConfig(log_budget=text)


def test_the_log_budget_is_a_gigabyte_unless_told_otherwise() -> None:
    assert NodeConfig().log_bytes == 10**9
    assert NodeConfig(log_budget="0").log_bytes == 0
