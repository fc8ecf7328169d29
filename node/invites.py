"""The invite as a person gives it: the line itself, or ``@FILE`` for a file that holds it.

A container of a node is often started together with the bootstrap peer that makes the invite, so a file that is not
there yet is waited for. What is waited for is said.
"""

import time
from collections.abc import Callable
from pathlib import Path

from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import Invite

LOOK = 1.0
"""Seconds between two looks for a file."""

VARIABLE = "STRETTO_INVITE"


def read_invite(text: str) -> Invite:
    """The invite in ``text`` or in the file that it names. ConfigError if it is none, or not there."""
    found = _find(text)
    if found is None:
        raise ConfigError(f"there is no invite in {text[1:]}; a bootstrap peer writes one with --invite-file")
    return found


def await_invite(
    text: str | None, *, say: Callable[[str], None], wait: Callable[[float], bool], patience: float
) -> Invite | None:
    """As ``read_invite``, but waits for a file.

    ``wait(seconds)`` sleeps and returns true when somebody asks to stop; the result is None then. After ``patience``
    seconds (0: never) ConfigError. ``text`` is None if nobody gave an invite.
    """
    if not text:
        raise ConfigError(
            f"no invite: give it on the command line, as `stretto join INVITE` or @FILE, or in {VARIABLE}"
        )
    told, began = False, time.monotonic()
    while (found := _find(text)) is None:
        if not told:
            say(f"waiting for an invite in {text[1:]}: a bootstrap peer writes it with --invite-file")
            told = True
        if patience and time.monotonic() - began > patience:
            raise ConfigError(f"no invite came in {text[1:]} within {patience:.0f} s; is the bootstrap peer running?")
        if wait(LOOK):
            return None
    return found


def _find(text: str) -> Invite | None:
    """None if ``text`` names a file that is not there, or is empty."""
    if not text.startswith("@"):
        return Invite.parse(text)
    file = Path(text[1:]).expanduser()
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the invite in {file} cannot be read: {error}") from None
    return Invite.parse(content) if content.strip() else None
