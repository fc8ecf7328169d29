"""What holds for all tests: the signals that processes started by them begin with."""

import signal


def pytest_configure() -> None:
    """A shell that starts ``make test &`` ignores Ctrl-C for it, and all its children inherit that.

    With a handler here they begin with the default, as they do when a person starts them; tests of Ctrl-C need that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
