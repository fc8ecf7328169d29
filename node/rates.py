"""Rates of a line as people write them: ``500kB/s``, ``4Mbit/s``, ``2 MB/s``, ``1.5MiB/s``, or plain bytes per second.

Prefixes are decimal (k = 1000), with an ``i`` binary (Ki = 1024). ``B`` is a byte and ``bit`` an eighth of one. A lone
``b`` is refused, since half of its readers would take it for the other one.
"""

import re
from typing import NewType

from stretto.protocol.errors import ConfigError

Rate = NewType("Rate", float)
"""Bytes per second; 0 stands for no limit."""

LEAST = 10_000.0
"""Bytes per second. Below it, a chunk that shares the line with a few others would run into its time limit."""

MOST = 1e12

FORMS = "500kB/s, 4Mbit/s, 2 MB/s, 1.5MiB/s, or plain bytes per second such as 500000; 0 for no cap"

_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kKmMgG]?)(i?)(B|[bB][iI][tT]s?)(?:/s)?)?")


def parse_rate(value: object, name: str) -> Rate:
    """``value`` (text or number) in bytes per second. ConfigError names ``name`` and the accepted forms."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return check_rate(float(value), name)
    match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{name} is {value!r}, which is no rate; write it like {FORMS}")
    number, prefix, binary, unit = match.groups()
    scale = float(1024 if binary else 1000) ** ("kmg".index(prefix.lower()) + 1 if prefix else 0)
    return check_rate(float(number) * scale / (1 if unit in (None, "B") else 8), name)


def check_rate(rate: float, name: str) -> Rate:
    """``rate`` if it can be a cap: 0, or within what works. ConfigError otherwise."""
    if rate == 0 or LEAST <= rate <= MOST:
        return Rate(rate)
    raise ConfigError(
        f"{name} is {rate:g} bytes per second, it must be at least {LEAST:g} (10kB/s): below that, transfers "
        f"run into their time limits. Write it like {FORMS}"
    )
