"""Folders and files that a program makes for itself: whole, private, or refused with the cure."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto.node.demo import DemoConfig, run_demo
from stretto.node.swarm import folders
from stretto.node.swarm.folders import own_folder, write_whole
from stretto.protocol.errors import ConfigError


def test_a_folder_is_private_and_may_be_there_already(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    own_folder(folder, parents=False)
    own_folder(folder, parents=False)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_in_a_folder_that_is_missing_is_refused_unless_it_is_ours(tmp_path: Path) -> None:
    folder = tmp_path / "typo" / "data"
    with pytest.raises(ConfigError, match=r"typo/data cannot be made: No such file .*--data-dir"):
        own_folder(folder, parents=False)
    own_folder(folder, parents=True)
    assert folder.is_dir()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be made: File exists"):
        own_folder(tmp_path / "data", parents=True)


def test_a_folder_of_somebody_else_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the system's answer is replaced.
    monkeypatch.setattr(folders.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=rf"data dir {tmp_path} belongs to uid \d+ .*chown -R \d+:\d+ {tmp_path}"):
        own_folder(tmp_path, parents=False)


def test_a_file_system_that_is_read_only_is_no_question_of_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(folders.os, "statvfs", lambda _: status)
    with pytest.raises(ConfigError, match=r"mounted read-only\. .*--data-dir.*volume"):
        own_folder(tmp_path, parents=False)


def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "invite"
    write_whole(path, "one\n", "--invite-file")
    write_whole(path, "two\n", "--invite-file")
    assert path.read_text() == "two\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["invite"]


def test_a_file_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nosuch/invite cannot be written: .*--invite-file"):
        write_whole(tmp_path / "nosuch" / "invite", "x", "--invite-file")


def demo(report: Path, folder: Path | None) -> DemoConfig:
    return DemoConfig(peers=1, rounds=1, report=report, folder=folder, inner_steps=4, fragments=1, seed=0)


def test_a_demo_refuses_a_report_that_it_could_not_write_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the report cannot be written to .*nosuch/report.json.*--report"):
        run_demo(demo(tmp_path / "nosuch" / "report.json", None))


def test_a_demo_refuses_a_folder_with_an_earlier_demos_files(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "invite").write_text("stretto:old\n")
    with pytest.raises(ConfigError, match=r"demo is not empty: .*--folder"):
        run_demo(demo(tmp_path / "report.json", folder))
