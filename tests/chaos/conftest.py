"""The real chaos run takes minutes and root: it is collected only where somebody names its file."""

from pathlib import Path

import pytest

LONG = "test_chaos.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name == LONG and not any(LONG in argument for argument in config.args):
        return True
    return None
