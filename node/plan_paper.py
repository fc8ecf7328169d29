"""``stretto plan --paper`` and ``--figure``: the compute-utilization simulator beside what the paper printed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from stretto.node.plots import Chart, Series
from stretto.protocol.errors import ConfigError
from stretto.protocol.planner.cu import FP4_BITS, Job, Schedule, utilization
from stretto.protocol.planner.paper import (
    DEEPSEEK,
    HUNDRED,
    JOBS,
    LLAMA,
    METHODS,
    TARGETS,
    Cell,
    held_out,
    paper_streaming,
    paper_table,
)

# ------------------------------------------------------------------------------------------------------- --paper


def compare_with_paper() -> dict[str, Any]:
    """Table 4 and the held-out rows, cell by cell."""
    began = time.perf_counter()
    cells, others = paper_table(), held_out()
    return {
        "cells_total": len(cells),
        "cells_exact": sum(cell.exact for cell in cells),
        "worst_relative_miss": max(cell.miss for cell in cells),
        "held_out_total": len(others),
        "held_out_exact": sum(cell.exact for cell in others),
        "worst_closed_form_error": max(cell.drift for cell in (*cells, *others)),
        "seconds": time.perf_counter() - began,
        "cells": [_plain(cell) for cell in cells],
        "held_out": [_plain(cell) for cell in others],
    }


def _plain(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model,
        "method": cell.method,
        "utilization": cell.target,
        "printed_gbits": cell.printed,
        "required_gbits": cell.gbits,
        "exact": cell.exact,
        "relative_miss": cell.miss,
    }


def render_paper(result: dict[str, Any]) -> str:
    """The comparison for people: printed / simulated, with a mark where they disagree."""
    head = f"{'':<12} {'':<24}" + "".join(f"{f'{target:.0%}':>17}" for target in TARGETS)
    lines = [
        "Gbit/s for a compute utilization of ...: printed / simulated need (printed is the point of the grid below)"
    ]
    for title, key in (
        ("Table 4 of arXiv 2501.18512", "cells"),
        ("Held out: Table 6 of arXiv 2503.09799", "held_out"),
    ):
        lines += ["", title, head]
        cells: Sequence[dict[str, Any]] = result[key]
        for start in range(0, len(cells), len(TARGETS)):
            row = cells[start : start + len(TARGETS)]
            shown = (
                f"{cell['printed_gbits']} / {cell['required_gbits']:.4g}{' ' if cell['exact'] else '!'}"
                for cell in row
            )
            lines.append(f"{row[0]['model']:<12} {row[0]['method']:<24}" + "".join(f"{text:>17}" for text in shown))
    lines += [
        "",
        f"{result['cells_exact']} of {result['cells_total']} cells agree, the worst of the others (!) would with "
        f"{result['worst_relative_miss']:.1%} more or less; held out: {result['held_out_exact']} of "
        f"{result['held_out_total']}",
        f"closed forms and played events differ by at most {result['worst_closed_form_error']:.0e}; "
        f"{result['seconds']:.1f} s",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ --figure

BANDWIDTHS = tuple(10 ** (-2 + 6 * k / 150) for k in range(151))
"""Gbit/s."""
TAUS = (0, 1, 2, 5, 10, 20)
STEP_SECONDS = (1.0, 5.0, 10.0)


def _curve(name: str, job: Job, schedule: Schedule) -> Series:
    return Series(name, BANDWIDTHS, [utilization(job, schedule, gbits) for gbits in BANDWIDTHS])


def _chart(title: str, series: Sequence[Series]) -> Chart:
    return Chart(title, "bandwidth, Gbit/s", "compute utilization", series, log_x=True)


def _methods(jobs: Sequence[Job]) -> list[Chart]:
    return [
        _chart(job.name, [_curve(method, job, schedule(job)) for method, schedule in METHODS.items()]) for job in jobs
    ]


def _patterns() -> list[Chart]:
    return [
        _chart(
            f"{HUNDRED.name}, tau = {tau}",
            [
                _curve(kind, HUNDRED, paper_streaming(HUNDRED, tau=tau, pattern=kind))
                for kind in ("strided", "sequential")
            ],
        )
        for tau in (0, 1)
    ]


def _taus() -> list[Chart]:
    return [
        _chart(
            f"{job.name}, FP4",
            [_curve(f"tau = {tau}", job, paper_streaming(job, tau=tau, bits=FP4_BITS)) for tau in TAUS],
        )
        for job in JOBS
    ]


def _step_times() -> list[Chart]:
    charts = []
    for seconds in STEP_SECONDS:
        job = Job(name="100B", parameters=HUNDRED.parameters, layers=HUNDRED.layers, step_seconds=seconds)
        series = [_curve(method, job, schedule(job)) for method, schedule in METHODS.items()]
        charts.append(_chart(f"100B, a step takes {seconds:g} s", series))
    return charts


FIGURES: dict[int, tuple[str, Callable[[], list[Chart]]]] = {
    4: ("compute utilization by bandwidth, five methods", lambda: _methods(JOBS)),
    7: ("strided against sequential fragments, 100B, bf16", _patterns),
    9: ("overlap of tau steps", _taus),
    15: ("step times of 1, 5 and 10 s, 100B", _step_times),
    16: ("Llama-405B and DeepSeek-V3", lambda: _methods((LLAMA, DEEPSEEK))),
}
"""Number of the paper's figure -> what it shows, and its charts."""


def figure(number: int) -> list[Chart]:
    """The charts of that figure of the paper. ConfigError lists those there are."""
    if number not in FIGURES:
        known = ", ".join(f"{key} ({title})" for key, (title, _) in FIGURES.items())
        raise ConfigError(f"figure {number} of the paper cannot be drawn; there are {known}")
    return FIGURES[number][1]()


def figure_json(number: int, charts: Sequence[Chart]) -> dict[str, Any]:
    """The lines of a figure as plain values."""
    return {
        "figure": number,
        "charts": [
            {
                "title": chart.title,
                "series": [{"name": s.name, "gbits": list(s.xs), "utilization": list(s.ys)} for s in chart.series],
            }
            for chart in charts
        ],
    }
