"""Amounts of bytes as people write them in settings: ``500MB``, ``1.5 GB``, ``0``."""

import re

from stretto.protocol.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(name: str, text: str) -> int:
    """The bytes that ``text`` means, powers of ten. ConfigError names the setting ``name`` and what it may be."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{name} is {text!r}, it must be an amount of bytes such as 500MB, 1.5GB or 0")
    return int(float(match[1]) * UNITS[match[2].upper()])
