"""An invite from the command line or from a file, which may come later."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.node.invites import await_invite, read_invite
from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import Invite

ID = "12D3KooWNTCSWSfcmforVpHLCTkABVQV92PGyaTpStzjH4XvcF38"  # a key of 32 bytes 0xbb
OPERATOR = b"\x00\x24\x08\x01\x12\x20" + b"\xaa" * 32
INVITE = Invite(b"\x11" * 32, OPERATOR, (f"/ip4/203.0.113.5/tcp/4001/p2p/{ID}",))


def waiting(*steps: Callable[[], None], stop_after: int = 100) -> Callable[[float], bool]:
    """A sleep that takes no time: each one does the next step; true after so many."""
    done: list[float] = []

    def wait(seconds: float) -> bool:
        if len(done) < len(steps):
            steps[len(done)]()
        done.append(seconds)
        return len(done) >= stop_after

    return wait


def test_the_line_itself_and_a_file_that_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "invite"
    file.write_text(f"{INVITE}\n", encoding="utf-8")
    assert read_invite(str(INVITE)) == INVITE
    assert read_invite(f"@{file}") == INVITE
    assert await_invite(f"@{file}", say=pytest.fail, wait=waiting(), patience=0) == INVITE


def test_a_file_is_waited_for_and_that_is_said_once(tmp_path: Path) -> None:
    file, said = tmp_path / "invite", list[str]()
    steps = (lambda: None, lambda: file.touch(), lambda: None, lambda: file.write_text(str(INVITE), encoding="utf-8"))
    assert await_invite(f"@{file}", say=said.append, wait=waiting(*steps), patience=0) == INVITE
    assert said == [f"waiting for an invite in {file}: a bootstrap peer writes it with --invite-file"]


def test_waiting_ends_when_somebody_stops_it_or_patience_does(tmp_path: Path) -> None:
    text, said = f"@{tmp_path / 'invite'}", list[str]()
    assert await_invite(text, say=said.append, wait=waiting(stop_after=2), patience=0) is None
    with pytest.raises(ConfigError, match=r"no invite came in .*invite within 0 s"):
        await_invite(text, say=said.append, wait=waiting(), patience=1e-9)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no invite: .*STRETTO_INVITE"), ("", "no invite"), ("x", "start")]
)
def test_no_invite_and_a_wrong_one_are_refused_at_once(text: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await_invite(text, say=pytest.fail, wait=waiting(), patience=0)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no invite in .*nosuch; .*--invite-file"):
        read_invite(f"@{tmp_path / 'nosuch'}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_invite(f"@{tmp_path}")
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_invite(f"@{tmp_path / 'latin'}")
    (tmp_path / "wrong").write_text("hello", encoding="utf-8")
    with pytest.raises(ConfigError, match="does not start with"):
        read_invite(f"@{tmp_path / 'wrong'}")
