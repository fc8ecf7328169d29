"""How processes ended, in words."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.node.endings import ending, peak_rss


@pytest.mark.parametrize(
    ("status", "peak", "words"),
    [
        (0, 5_000_000, "ended with exit code 0"),
        (3, 0, "ended with exit code 3"),
        (-15, 0, "was killed by signal 15 (SIGTERM)"),
        (-9, 0, "was killed by signal 9 (SIGKILL), by hand or because memory ran out (dmesg tells)"),
        (-11, 1_234_000_000, "was killed by signal 11 (SIGSEGV); it held up to 1,234 MB"),
        (-40, 0, "was killed by signal 40"),
    ],
)
def test_in_words(status: int, peak: int, words: str) -> None:
    assert ending(status, peak) == words


def test_the_peak_is_the_kernels(tmp_path: Path) -> None:
    assert peak_rss(os.getpid()) > 10_000_000
    script = "import sys; x = bytearray(80_000_000); x[::4096] = b'x' * len(x[::4096]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 80_000_000 < peak_rss(child.pid) < 200_000_000
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert peak_rss(child.pid) == 0
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nState:\tZ (zombie)\n")
    assert peak_rss(7, proc=tmp_path) == 0
