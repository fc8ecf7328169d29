"""A crash leaves nothing behind that stands in the way of the next start."""

import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.integration.processes import Lab, free_port, micro_run, no_traceback


def sockets(folder: Path) -> list[str]:
    """Names of the unix sockets in ``folder``."""
    return sorted(entry.name for entry in folder.iterdir() if stat.S_ISSOCK(entry.lstat().st_mode))


@pytest.mark.slow
def test_a_killed_node_starts_again_with_the_same_port_and_data_dir(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus)))
    port, data_dir = free_port(), lab.folder / "node"
    socket_folder = data_dir / "run" if len(str(data_dir)) < 70 else None
    counts: list[int] = []
    ids: set[str] = set()
    for life in range(4):
        node = lab.join(invite, f"life{life}", "--port", str(port), "--new-run", folder=data_dir)
        node.see(r"round \d+ \(fragment \d\) committed by 1 peer")
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        ids.update(word for word in node.text.split() if word.startswith("12D3KooW") and word.endswith(","))
        folders = [socket_folder] if socket_folder else list(lab.temp.glob("stretto-*"))
        counts.append(sum(len(sockets(folder)) for folder in folders))
        if life < 3:
            node.daemon()
            node.signal(signal.SIGKILL)
    assert len(ids) == 1, ids
    assert counts == [counts[0]] * 4, counts
    assert counts[0] > 0
    node.signal(signal.SIGTERM)
    assert node.exit_code(limit=10) == 0
    no_traceback(node)
    for earlier in lab.processes[1:]:
        earlier.all_gone(limit=10)
