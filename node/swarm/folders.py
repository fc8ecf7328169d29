"""The folder that a program of Stretto keeps its identity and state in: private, and made or refused in words."""

import os
from pathlib import Path

from stretto.protocol.errors import ConfigError


def own_folder(folder: Path, *, parents: bool) -> None:
    """Make ``folder`` (mode 0700), with its ``parents`` if wanted. ConfigError if it cannot be made or written."""
    try:
        folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data dir {folder} cannot be made: {error.strerror}. Make the folder above it, or choose another one "
            "with --data-dir"
        ) from None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"data dir {folder} is on a file system that is mounted read-only. Choose another one with --data-dir; in "
            f"a container put a volume there: docker run -v stretto:{folder} ..."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        owner, me = folder.stat().st_uid, f"{os.getuid()}:{os.getgid()}"
        raise ConfigError(
            f"data dir {folder} belongs to uid {owner} and cannot be written by uid {os.getuid()}. Change its owner "
            f"(chown -R {me} {folder}; for a container the folder of this machine that is mounted there), or choose "
            "another one with --data-dir"
        )


def flush(path: Path) -> None:
    """What was written to a file, or renamed in a folder, goes to the disk, not to its cache only. OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str, option: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees all of it or nothing. ConfigError names ``option``."""
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another place with {option}") from None
