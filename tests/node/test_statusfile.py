"""The status file: written whole, and read as well or not well, in words."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.node.cli import app
from stretto.node.statusfile import FRESH, WELL, NotWell, StatusFile, check_well, in_words, read_status
from stretto.protocol.errors import ConfigError

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
SWARM = {"members": [{"peer": "12D3KooWabcdefgh", "state": "training", "step": 7, "addresses": []}]}


def writer(folder: Path, **fields: Any) -> StatusFile:
    return StatusFile(folder, "node", PEER, lambda: fields)


def write(folder: Path, *, age: float = 0.0, **fields: Any) -> dict[str, Any]:
    """Write a status and make it ``age`` seconds old; what is read."""
    writer(folder).write(**fields)
    path = folder / "status.json"
    plain = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**plain, "time": time.time() - age}), encoding="utf-8")
    return read_status(folder)


def test_it_is_renewed_with_what_is_so_at_that_moment(tmp_path: Path) -> None:
    file = writer(tmp_path, state="starting", doing="dialling")

    async def live() -> None:
        work = asyncio.ensure_future(file.keep(every=0.01))
        seen = []
        while len(seen) < 2:
            await asyncio.sleep(0.01)
            state = read_status(tmp_path)["state"]
            if state not in seen:
                seen.append(state)
                file.tell = lambda: {"state": "training", "swarm": SWARM}
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        assert seen == ["starting", "training"]

    asyncio.run(asyncio.wait_for(live(), 20))
    found = read_status(tmp_path)
    assert (found["role"], found["peer"], found["swarm"]) == ("node", PEER, SWARM)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("state", WELL)
def test_a_process_that_does_its_work_is_well(tmp_path: Path, state: str) -> None:
    check_well(write(tmp_path, state=state, age=FRESH - 5))


@pytest.mark.parametrize(
    ("fields", "age", "words"),
    [
        ({"state": "training"}, FRESH + 5, "the node vnc6iDEp has not renewed its status for 65 s (it was 'training'"),
        ({"state": "starting", "doing": "dialling 1 bootstrap peer(s)"}, 1.0, "is starting: dialling 1 bootstrap"),
        ({"state": "leaving"}, 1.0, "the node vnc6iDEp is leaving"),
        ({"state": "ended"}, 300.0, "the node vnc6iDEp has ended, 300 s ago"),
    ],
)
def test_a_process_that_is_not_well_is_told_why(
    tmp_path: Path, fields: dict[str, Any], age: float, words: str
) -> None:
    with pytest.raises(NotWell) as caught:
        check_well(write(tmp_path, age=age, **fields))
    assert words in str(caught.value)


def test_a_clock_that_was_set_back_makes_no_negative_age(tmp_path: Path) -> None:
    assert write(tmp_path, state="training", age=-3600.0)["age"] == 0.0


def test_no_file_and_a_damaged_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotWell, match=r"no node or bootstrap peer has run with the data dir .*--data-dir"):
        read_status(tmp_path)
    for text in ("", "{", "[]", "{}", '{"time": "x", "state": "", "role": "", "peer": ""}'):
        (tmp_path / "status.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"status\.json is damaged"):
            read_status(tmp_path)
    (tmp_path / "status.json").unlink()
    (tmp_path / "status.json").mkdir()
    with pytest.raises(ConfigError, match=r"status\.json cannot be read: Is a directory"):
        read_status(tmp_path)


def test_a_folder_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    writer(tmp_path / "gone").write(state="training")


def test_in_words_it_names_the_process_and_whom_it_knows(tmp_path: Path) -> None:
    text = in_words(write(tmp_path, state="training", doing="step 7", swarm=SWARM))
    assert text.splitlines() == [
        "node vnc6iDEp, training, 0 s ago: step 7",
        "  knows abcdefgh  training  step       7",
    ]


def test_the_command_reads_it_from_the_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, state="training", doing="step 7")
    told = CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path), "--json"])
    assert told.exit_code == 0
    assert json.loads(told.stdout)["doing"] == "step 7"
    monkeypatch.setenv("STRETTO_DATA_DIR", str(tmp_path))
    assert "training" in CliRunner().invoke(app, ["status"]).stdout
    write(tmp_path, state="training", age=FRESH + 5)
    told = CliRunner().invoke(app, ["status", "--json"])
    assert isinstance(told.exception, NotWell)
    assert json.loads(told.stdout)["state"] == "training"
