"""What holds for all tests: which are collected, and the signals that processes started by them begin with."""

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A shell that starts ``make test &`` ignores Ctrl-C for it, and all its children inherit that.

    With a handler here they begin with the default, as they do when a person starts them; tests of Ctrl-C need that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whoever ends the tests with SIGTERM, as `timeout` and CI do, ends what they started too: through the fixtures.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


NEED_ROOT = ("test_chaos.py",)
"""They make network namespaces and take minutes: collected only where somebody names their file."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    if name in NEED_ROOT and not any(name in argument for argument in config.args):
        return True
    return None
