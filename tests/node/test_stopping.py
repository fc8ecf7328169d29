"""Which signals end a program in order."""

import signal
import subprocess
import sys

import pytest

from stretto.node.stopping import stop_signals


def test_a_hangup_ends_a_program_unless_nohup_started_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


INTERRUPTED_WITH_A_LOCK_IN_HAND = """
import signal, sys
from stretto.node.stopping import StopSignal
stopping = StopSignal()
stopping.install()
with stopping.event._cond:
    signal.raise_signal(signal.SIGTERM)
assert stopping.event.wait(60)
print("in order")
sys.exit(stopping.exit_code)
"""


def test_a_signal_is_heard_while_the_main_thread_holds_the_events_lock() -> None:
    """As in one of 15 leaves of a soak: the trainer was about to wait on the event that a handler wanted to set."""
    code = [sys.executable, "-c", INTERRUPTED_WITH_A_LOCK_IN_HAND]
    told = subprocess.run(code, capture_output=True, text=True, timeout=60, check=False)
    assert (told.returncode, told.stdout.strip()) == (0, "in order")


TWO_SIGNALS = """
import signal, sys, time
from stretto.node.stopping import StopSignal
stopping = StopSignal()
stopping.install()
signal.raise_signal(getattr(signal, sys.argv[1]))
assert stopping.event.wait(60)
print("asked", stopping.exit_code, flush=True)
signal.raise_signal(getattr(signal, sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize(("name", "first", "second"), [("SIGINT", 130, 130), ("SIGTERM", 0, 143)])
def test_a_second_signal_ends_at_once(name: str, first: int, second: int) -> None:
    code = [sys.executable, "-c", TWO_SIGNALS, name]
    told = subprocess.run(code, capture_output=True, text=True, timeout=50, check=False)
    assert (told.returncode, told.stdout.strip()) == (second, f"asked {first}")
