"""Ctrl-C while the command line is still being imported ends quietly, like later."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_an_interrupt_among_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    source = Path(__file__).resolve().parents[2] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", "from stretto.node.entry import main; main()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest) == (130, "")


def test_the_command_is_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from stretto.node.entry import main; main()", "--version"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "stretto")
