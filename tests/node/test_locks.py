"""The lock on the state of a run: a second node with the same data dir is refused, by name of the first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.node.swarm.locks import run_lock
from stretto.protocol.errors import ConfigError

HOLD = """
import pathlib, sys
from stretto.node.swarm.locks import run_lock
with run_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_nodes_do_not_share_the_state_of_a_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match=f"is in use by process {holder.pid}. Each node needs a data dir"):
                run_lock(tmp_path)
        finally:
            holder.kill()
    with run_lock(tmp_path) as lock:  # a dead holder does not block
        assert lock.path.read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lock of the run's state cannot be opened: No such file.*--data-dir"):
        run_lock(tmp_path / "missing")
