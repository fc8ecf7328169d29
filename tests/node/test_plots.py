"""Charts: a PNG without a display, text of the asked size, and a sentence where the libraries are missing."""

import struct
import sys
from pathlib import Path

import pytest

from stretto.node.plots import Chart, Series, draw_terminal, save_png
from stretto.protocol.errors import ConfigError

LINES = (
    Series("data-parallel", [0.1, 1.0, 10.0, 100.0], [0.01, 0.1, 0.5, 0.9]),
    Series("streaming", [0.1, 1.0, 10.0, 100.0], [0.1, 0.5, 0.9, 1.0], [0.0, 0.4, 0.8, 0.9], [0.2, 0.6, 1.0, 1.0]),
)
CHART = Chart("Compute utilization", "Gbit/s", "CU", LINES, log_x=True)


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_png_holds_all_charts_and_needs_no_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    save_png([CHART], tmp_path / "new" / "one.png")
    save_png([CHART] * 4, tmp_path / "four.png")
    width, height = png_size(tmp_path / "new" / "one.png")
    assert (width, height) > (600, 400)
    assert png_size(tmp_path / "four.png") == (3 * width, 2 * height)


def test_the_terminal_drawing_has_the_asked_size_and_no_colours() -> None:
    text = draw_terminal(CHART, 70, 20)
    assert len(text.splitlines()) == 20
    assert max(map(len, text.splitlines())) == 70
    assert "\x1b" not in text
    for word in ("Compute utilization", "Gbit/s", "CU", "data-parallel", "streaming"):
        assert word in text
    assert draw_terminal(CHART, 70, 20) == text, "one drawing leaves nothing behind for the next"


def test_a_chart_without_series_and_a_tiny_terminal_are_drawn() -> None:
    assert "nothing" in draw_terminal(Chart("nothing", "x", "y", ()), 40, 10)
    assert len(draw_terminal(CHART, 1, 1).splitlines()) == 8


def test_series_and_charts_check_themselves() -> None:
    with pytest.raises(ConfigError, match="3 xs and 2 ys"):
        Series("a", [1, 2, 3], [1, 2])
    with pytest.raises(ConfigError, match="both low and high"):
        Series("a", [1.0], [1.0], low=[0.0])
    with pytest.raises(ConfigError, match="x values that are not positive"):
        Chart("c", "x", "y", [Series("a", [0, 1], [1, 2])], log_x=True)
    with pytest.raises(ConfigError, match="y values that are not positive"):
        Chart("c", "x", "y", [Series("a", [1.0], [1.0], [-1.0], [2.0])], log_y=True)
    with pytest.raises(ConfigError, match="no chart"):
        save_png([], Path("x.png"))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file/chart\.png"):
        save_png([CHART], tmp_path / "file" / "chart.png")


@pytest.mark.parametrize("library", ["matplotlib", "plotext"])
def test_a_missing_library_is_one_sentence_with_the_cure(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}.*pip install 'stretto-swarm\[plots\]'"):
        save_png([CHART], tmp_path / "x.png") if library == "matplotlib" else draw_terminal(CHART, 70, 20)
