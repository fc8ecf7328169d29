"""Every test here gets a ``Lab``; after the last one nothing may be left of all that they started."""

import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Lab, marked, until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # each wait has its own, shorter limit


@pytest.fixture(scope="session")
def session_temp() -> Iterator[Path]:
    """The temp dir of all processes, with a short path because sockets may lie in it. Empty at the end."""
    before = foreign_sockets()
    place = Path(tempfile.mkdtemp(prefix="lab-"))
    yield place
    # torch leaves an empty folder for its compiler wherever it is imported.
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*") if "torchinductor" not in path.name)
    shutil.rmtree(place)
    until(lambda: not marked(session_mark()), "end of all processes of the session", limit=10)
    assert not left, f"left in the temp dir: {left}"
    assert not foreign_sockets() - before, "hivemind's default sockets were used"


def session_mark() -> str:
    """What all processes of this session carry in their mark."""
    return f"pytest{os.getpid()}-"


def foreign_sockets() -> set[str]:
    """Sockets at the place where hivemind puts them unless told otherwise."""
    return {path.name for path in Path("/tmp").glob("hivemind-p2p*")}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 kB of English and code that is here on any machine."""
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    library = Path(textwrap.__file__).parent
    names = ("argparse.py", "textwrap.py", "tarfile.py")
    file.write_text("\n".join((library / name).read_text(encoding="utf-8") for name in names), encoding="utf-8")
    return file


def open_lab(folder: Path, temp: Path, corpus: Path, name: str) -> Iterator[Lab]:
    """A lab that ends its processes, however its user ends."""
    lab = Lab(folder, temp, f"{session_mark()}{name}-", corpus)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(tmp_path: Path, session_temp: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The processes of one test."""
    yield from open_lab(tmp_path, session_temp, corpus, request.node.name)


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory, session_temp: Path, corpus: Path) -> Iterator[Lab]:
    """The processes that the tests of one file share."""
    yield from open_lab(tmp_path_factory.mktemp("lab"), session_temp, corpus, "shared")
