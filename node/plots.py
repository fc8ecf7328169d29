"""Charts: the same lines as a PNG file (matplotlib) or as text in a terminal (plotext).

Both libraries are optional: `pip install 'stretto-swarm[plots]'`. They are imported at the first drawing, since
matplotlib alone takes half a second. Nothing here knows what it draws; whoever has numbers makes a `Chart` of them.
The PNG is drawn without a display, whatever the machine has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.protocol.errors import ConfigError

INCHES = (6.4, 4.4)
"""Width and height of one chart in a PNG."""
DPI = 150
COLUMNS = 3
"""Charts side by side in a PNG; more go below."""
LEAST = (20, 8)
"""The smallest width and height in characters in which a chart is drawn."""


@dataclass(frozen=True)
class Series:
    """One line: ``ys`` over ``xs``, with an optional band between ``low`` and ``high``. All of one length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ConfigError(f"series {self.name!r} has one edge of a band; give both low and high, or neither")
        for what, values in (("ys", self.ys), ("low", self.low), ("high", self.high)):
            if values is not None and len(values) != len(self.xs):
                raise ConfigError(
                    f"series {self.name!r} has {len(self.xs)} xs and {len(values)} {what}: give as many of each"
                )


@dataclass(frozen=True)
class Chart:
    """Some series over common axes. An axis in log scale needs positive values."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        for line in self.series:
            edges = () if line.low is None or line.high is None else (line.low, line.high)
            checks = [("x", self.log_x, (line.xs,)), ("y", self.log_y, (line.ys, *edges))]
            for axis, is_log, columns in checks:
                if is_log and any(value <= 0 for column in columns for value in column):
                    raise ConfigError(
                        f"series {line.name!r} of chart {self.title!r} has {axis} values that are not positive, which "
                        f"a log scale cannot show: leave them out, or draw the {axis} axis linear"
                    )


def save_png(charts: Sequence[Chart], path: Path) -> None:
    """Draw all charts into one PNG. ConfigError: matplotlib is missing, no chart, or a file that cannot be written."""
    if not charts:
        raise ConfigError(f"there is no chart to draw into {path}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing("matplotlib", error) from None
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(INCHES[0] * columns, INCHES[1] * rows), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot there is no global state, and no display is looked for
    for index, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, columns, index + 1), chart)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"the chart cannot be written to {path}: {error.strerror or error}") from None


def _draw(axes: Any, chart: Chart) -> None:
    for line in chart.series:
        (drawn,) = axes.plot(line.xs, line.ys, label=line.name, linewidth=1.6, marker="." if len(line.xs) < 40 else "")
        if line.low is not None:
            axes.fill_between(line.xs, line.low, line.high, color=drawn.get_color(), alpha=0.2, linewidth=0)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.grid(visible=True, alpha=0.3)
    if chart.series:
        axes.legend(fontsize="small")


def draw_terminal(chart: Chart, width: int, height: int) -> str:
    """The chart as text of at most ``width`` x ``height`` characters, without colours. Bands are not shown.

    ConfigError: plotext is missing.
    """
    try:
        import plotext as plot
    except ImportError as error:
        raise _missing("plotext", error) from None
    # plotext keeps one figure per process: it is emptied before and after.
    plot.clear_figure()
    plot.limit_size(False, False)
    plot.plot_size(max(width, LEAST[0]), max(height, LEAST[1]))
    marks = "*o+x#@%&$~"  # told apart without colours, also on a terminal that has none
    for index, line in enumerate(chart.series):
        plot.plot(list(line.xs), list(line.ys), label=line.name, marker=marks[index % len(marks)])
    plot.title(chart.title)
    plot.xlabel(chart.x_label)
    plot.ylabel(chart.y_label)
    plot.xscale("log" if chart.log_x else "linear")
    plot.yscale("log" if chart.log_y else "linear")
    text = str(plot.uncolorize(plot.build()))
    plot.clear_figure()
    return "\n".join(line.rstrip() for line in text.splitlines())


def _missing(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"charts need {name}, which cannot be imported ({error}): pip install 'stretto-swarm[plots]'")
