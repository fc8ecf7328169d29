"""From finished runs to a table, goals and charts.

A case has one run per seed. Its loss is their mean with its standard error s / sqrt(n). Cases are compared by the
*ratio* to another case's loss at the same seed: both then began with the same weights and saw the same text in the
same order, so that what the seeds have in common cancels. The ratio's mean and standard error are what a goal is held
against; a goal is met if the mean meets it, and the error is there to judge what that is worth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.node.plots import Chart, Series
from stretto.node.simulate.recipes import Case, Goal, Recipe

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""By case label and seed: results."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error, nan where there is one value only."""

    value: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of at least one value."""
        mean = sum(values) / len(values)
        if len(values) == 1:
            return cls(mean, math.nan, 1)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance / len(values)), len(values))

    def text(self, digits: int) -> str:
        """``value ± error``."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{error}"


def loss_of(runs: Runs, label: str, weights: str = "") -> Mean | None:
    """Mean final loss of a case, of some ``weights`` or of those it was judged by; None if a run diverged."""
    values = [run["losses"][weights] if weights and run["losses"] else run["loss"] for run in runs[label].values()]
    return None if None in values else Mean.of(values)


def percent_above(runs: Runs, label: str, than: str) -> Mean | None:
    """By how many percent a case's loss is above another's, over the seeds that both have."""
    seeds = sorted(set(runs[label]) & set(runs[than]))
    pairs = [(runs[label][seed]["loss"], runs[than][seed]["loss"]) for seed in seeds]
    if not pairs or any(None in pair for pair in pairs):
        return None
    return Mean.of([100 * (a / b - 1) for a, b in pairs])


def check(goal: Goal, runs: Runs) -> dict[str, Any] | None:
    """A goal held against the runs; None while one of its cases is missing."""
    if goal.case not in runs or goal.than not in runs:
        return None
    found = percent_above(runs, goal.case, goal.than)
    met = found is not None and (found.value >= goal.limit if goal.least else found.value <= goal.limit)
    return {
        "case": goal.case,
        "than": goal.than,
        "limit_percent": goal.limit,
        "least": goal.least,
        "percent": None if found is None else found.value,
        "error": None if found is None or math.isnan(found.error) else found.error,
        "met": met,
    }


def table(cases: Sequence[Case], runs: Runs) -> list[list[str]]:
    """A heading and one row per case that has runs."""
    first = next(case.label for case in cases if case.label in runs)
    rows = [["case", "seeds", "loss", f"above {first}, %", "anchor", "average", "replica", "MB sent per peer"]]
    for case in cases:
        if case.label not in runs:
            continue
        loss = loss_of(runs, case.label)
        if loss is None:
            rows.append([case.label, str(len(runs[case.label])), "diverged", "", "", "", "", ""])
            continue
        above = percent_above(runs, case.label, first)
        views = [loss_of(runs, case.label, weights) for weights in ("anchor", "average", "replica")]
        sent = Mean.of([run["bytes_sent"] / 1e6 for run in runs[case.label].values()])
        rows.append(
            [case.label, str(loss.count), loss.text(4), above.text(2) if above else ""]
            + [f"{view.value:.4f}" if view else "" for view in views]
            + [f"{sent.value:.3g}"]
        )
    return rows


def markdown(recipe: Recipe, runs: Runs, command: str) -> str:
    """The table with its heading, command and goals as a Markdown page."""
    rows = table(recipe.cases, runs)
    lines = [f"# {recipe.name}: {recipe.what}", "", f"    {command}", ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += ["", "Held-out loss in nats per token; ± is the standard error over the seeds.", ""]
    lines += [f"- {goal_text(found)}" for goal in recipe.goals if (found := check(goal, runs))]
    return "\n".join(lines).rstrip() + "\n"


def goal_text(found: Mapping[str, Any]) -> str:
    """A goal in one sentence."""
    bound = "at least" if found["least"] else "at most"
    if found["percent"] is None:
        measured = "a run diverged"
    else:
        error = "" if found["error"] is None else f" ± {found['error']:.2f}"
        measured = f"{found['percent']:+.2f}{error} %"
    verdict = "met" if found["met"] else "missed"
    return f"{verdict}: {found['case']!r} {bound} {found['limit_percent']} % above {found['than']!r}: {measured}"


def plain(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def charts(recipe: Recipe, runs: Runs) -> list[Chart]:
    """The loss during training; over the recipe's x axis if it has one; cosines by layer where they were recorded."""
    found = [_curves(recipe, runs)]
    if recipe.x_label:
        found.append(_over_x(recipe, runs))
    found += [_cosines(case.label, runs[case.label]) for case in recipe.cases if _has_cosines(runs, case.label)]
    return [chart for chart in found if chart.series]


def _curves(recipe: Recipe, runs: Runs) -> Chart:
    series = []
    for case in recipe.cases:
        curves = [run["curve"] for run in runs.get(case.label, {}).values() if run["loss"] is not None]
        if not curves or len({len(curve) for curve in curves}) > 1 or len(curves[0]) < 2:
            continue
        means = [Mean.of([curve[i][1] for curve in curves]) for i in range(len(curves[0]))]
        series.append(_series(case.label, [point[0] for point in curves[0]], means))
    return Chart(f"{recipe.name}: held-out loss", "swarm steps", "nats per token", series)


def _over_x(recipe: Recipe, runs: Runs) -> Chart:
    lines: dict[str, list[tuple[float, Mean]]] = {}
    for case in recipe.cases:
        mean = loss_of(runs, case.label) if case.label in runs else None
        if case.x is not None and mean is not None:
            lines.setdefault(case.series or recipe.name, []).append((case.x, mean))
    series = [_series(name, [x for x, _ in points], [mean for _, mean in points]) for name, points in lines.items()]
    return Chart(f"{recipe.name}: {recipe.what}", recipe.x_label, "nats per token", series, log_x=recipe.log_x)


def _series(name: str, xs: list[float], means: list[Mean]) -> Series:
    ys = [mean.value for mean in means]
    if any(math.isnan(mean.error) for mean in means):
        return Series(name, xs, ys)
    return Series(name, xs, ys, [m.value - m.error for m in means], [m.value + m.error for m in means])


def _has_cosines(runs: Runs, label: str) -> bool:
    return any(run.get("cosine") for run in runs.get(label, {}).values())


def _cosines(label: str, of_seed: Mapping[int, Mapping[str, Any]]) -> Chart:
    first = of_seed[min(of_seed)]["cosine"]
    layers = sorted(first, key=lambda layer: (not layer.startswith("layer"), len(layer), layer))
    series = [Series(layer, [x for x, _ in first[layer]], [y for _, y in first[layer]]) for layer in layers]
    return Chart(f"outer gradients, {label}, seed {min(of_seed)}", "swarm steps", "cosine similarity", series)
