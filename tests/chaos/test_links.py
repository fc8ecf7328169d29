"""What people are told where the chaos runs cannot be done."""

import os
import shutil

import pytest

from tests.chaos import links


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(links.LinksError, match=r"need tc, which .*apt-get install -y iproute2"):
        links.check_machine()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(links.LinksError, match="need ip and tc"):
        links.check_machine()


def test_whoever_is_not_root_is_told_how_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(links.LinksError, match=r"only root may.*sudo make chaos-short"):
        links.check_machine()


def test_a_kernel_that_cannot_is_told_of_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, ...]] = []

    def call(*command: str) -> str:
        done.append(command)
        if command[0] == "tc":
            raise links.LinksError("`tc` failed: Specified qdisc kind is unknown.")
        return ""

    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(links, "_call", call)
    with pytest.raises(links.LinksError, match=r"qdisc kind is unknown.*modprobe"):
        links.check_machine()
    added = {command[3] for command in done if command[:3] == ("ip", "netns", "add")}
    removed = {command[3] for command in done if command[:3] == ("ip", "netns", "del")}
    assert len(added) == 2
    assert removed == added


def test_only_leftovers_of_dead_runs_in_which_nothing_runs_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def call(*command: str) -> str:
        if command == ("ip", "netns", "list"):
            mine, gone = os.getpid(), 1 << 30
            return f"chaos-{mine}-hub (id: 3)\nchaos-{gone}-p0 (id: 1)\nchaos-{gone}-p1\nother\nchaos\n"
        if command[2] == "pids":
            return "4711\n" if command[3].endswith("p1") else ""
        assert command[2] == "del"
        removed.append(command[3])
        return ""

    monkeypatch.setattr(links, "_call", call)
    assert links.remove_leftovers() == removed == [f"chaos-{1 << 30}-p0"]
