"""Where documents come from.

``stdlib``     the sources of the running Python's standard library, about 12 MB of text that is on every machine that
               can run this program. Left out: tests, installed packages, files over 1 MiB, files that are not UTF-8,
               and the one module that records how this Python was built.
``text:PATH``  a UTF-8 file, or a folder of .txt, .md, .py and .jsonl files (searched through, hidden names left out).
               A line of a .jsonl file is one document: an object with a string ``text``.

A document is (name, text). Names are relative to the source, with "/" between folders, and documents come sorted by
file name, so that equal files give equal documents in equal order wherever they lie.

Reading only: what is done with the documents is the business of ``corpus``.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from stretto.protocol.errors import ConfigError

Document: TypeAlias = tuple[str, str]

MAX_STDLIB_FILE = 1 << 20
MAX_DOCUMENT = 1 << 30  # bytes; a document is held in memory while it is cut into tokens
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def read_documents(source: str) -> Iterator[Document]:
    """Yield the documents of ``stdlib`` or ``text:PATH``. Raises ConfigError for what cannot be read."""
    kind, _, path = source.partition(":")
    if source == "stdlib":
        return _stdlib_documents(Path(sysconfig.get_path("stdlib")))
    if kind == "text" and path:
        return _text_documents(Path(os.path.expanduser(path)))
    raise ConfigError(
        f"There is no data source {source!r}. Write 'stdlib' (the sources of Python's standard library) or "
        f"'text:PATH' with a UTF-8 file or a folder of {', '.join(TEXT_SUFFIXES)} files."
    )


def _stdlib_documents(root: Path) -> Iterator[Document]:
    for name in _walk(root, enter=lambda folder: folder not in NOT_STDLIB, suffixes=(".py",)):
        path = root / name
        # Distributions put links to files of the machine's own settings here.
        if path.is_symlink() or path.name.startswith("_sysconfigdata") or path.stat().st_size > MAX_STDLIB_FILE:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few historical files name another encoding in their first line
            continue
        yield name, text


def _text_documents(path: Path) -> Iterator[Document]:
    if not os.path.exists(path):
        raise ConfigError(f"The data source {path} does not exist or is out of reach. Correct the path after 'text:'.")
    if path.is_dir():
        for name in _walk(path, enter=lambda folder: not folder.startswith("."), suffixes=TEXT_SUFFIXES):
            yield from _file_documents(path / name, name)
    else:
        yield from _file_documents(path, path.name)


def _walk(root: Path, *, enter: Callable[[str], bool], suffixes: tuple[str, ...]) -> list[str]:
    """List the files below ``root`` with these suffixes: relative names by code point; links to folders are left."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(root, onerror=_refuse_folder):
        subfolders[:] = [name for name in subfolders if enter(name)]
        found += [
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    return sorted(found)


def _refuse_folder(error: OSError) -> None:
    raise ConfigError(f"The folder {error.filename} cannot be read: {error.strerror}. Check its permissions.")


def _file_documents(path: Path, name: str) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                number = 0
                while line := file.readline(MAX_DOCUMENT + 1):
                    number += 1
                    if line.strip():
                        yield f"{name}:{number}", _json_text(_decode(line, f"{path} line {number}"), path, number)
            else:
                yield name, _decode(file.read(MAX_DOCUMENT + 1), str(path))
    except OSError as error:
        raise ConfigError(f"The data file {path} cannot be read: {error.strerror}. Check its permissions.") from error


def _decode(content: bytes, where: str) -> str:
    if len(content) > MAX_DOCUMENT:
        raise ConfigError(
            f"The document {where} is larger than {MAX_DOCUMENT >> 20} MiB. Split it into several files in one folder."
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The document {where} is not UTF-8 text: {error.reason} at byte {error.start}. Convert it (for example "
            "with iconv) or take it out of the source."
        ) from error


def _json_text(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} line {number} is not JSON: {error}. A .jsonl file has one object a line."
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f'{path} line {number} has no string "text". Each line must be an object such as {{"text": "..."}}.'
        )
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON can hold half a surrogate pair, UTF-8 cannot
