"""The paper's simulations: what it printed, what `cu` gives, and when the two agree.

Every bandwidth that Streaming DiLoCo's Table 4 (arXiv 2501.18512) prints is one of 50 points, 10^-1 .. 10^3 Gbit/s in
equal ratios, rounded to two decimals and then printed with one; and it is the last point *below* what is needed. So a
threshold t agrees with a cell if some point g_k prints as the cell and g_k < t <= g_(k+1). To compare the numbers
themselves would test the grid: the true need lies up to 21 % above what is printed.

`held_out` compares rows that no choice of the model was matched to: data-parallel training of Llama-405B and
DeepSeek-V3, printed in Table 6 of arXiv 2503.09799 on the same grid.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.protocol.planner.cu import (
    FP4_BITS,
    Job,
    Schedule,
    data_parallel,
    diloco,
    required_gbits,
    simulate,
    streaming,
    utilization,
)

INNER_STEPS = 100
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID = tuple(10 ** (-1 + 4 * k / 49) for k in range(50))
"""The bandwidths that were tried, in Gbit/s."""
LAYERS_PER_FRAGMENT = 3

ONE = Job(name="1B", parameters=1e9, layers=24, step_seconds=0.1)
TEN = Job(name="10B", parameters=10e9, layers=48, step_seconds=0.8)
HUNDRED = Job(name="100B", parameters=100e9, layers=108, step_seconds=4.9)
LLAMA = Job(name="Llama-405B", parameters=405e9, layers=126, step_seconds=26.9)
DEEPSEEK = Job(name="DeepSeek-V3", parameters=671e9, layers=61, step_seconds=20.1)
JOBS = (ONE, TEN, HUNDRED)


def paper_streaming(job: Job, *, tau: int = 0, bits: float = 16.0, pattern: str = "strided") -> Schedule:
    """Streaming DiLoCo as the paper simulates it: fragments of three layers, H = 100."""
    return streaming(job, INNER_STEPS, job.layers // LAYERS_PER_FRAGMENT, tau=tau, bits=bits, pattern=pattern)


METHODS: dict[str, Callable[[Job], Schedule]] = {
    "data-parallel": data_parallel,
    "DiLoCo": lambda job: diloco(job, INNER_STEPS),
    "streaming": paper_streaming,
    "streaming, overlap": lambda job: paper_streaming(job, tau=1),
    "streaming, overlap, FP4": lambda job: paper_streaming(job, tau=1, bits=FP4_BITS),
}
"""Row of Table 4 -> its schedule."""

PRINTED: dict[str, dict[str, str]] = {
    "1B": {
        "data-parallel": "86.8 152.6 184.2 222.3 569.0",
        "DiLoCo": "1.4 6.2 13.3 23.3 86.8",
        "streaming": "1.4 5.2 9.1 16.0 28.1",
        "streaming, overlap": "1.4 4.3 6.2 9.1 11.0",
        "streaming, overlap, FP4": "0.4 0.9 1.7 2.0 3.0",
    },
    "10B": {
        "data-parallel": "104.8 222.3 222.3 268.3 471.5",
        "DiLoCo": "1.7 7.5 16.0 33.9 104.8",
        "streaming": "1.7 5.2 9.1 13.3 19.3",
        "streaming, overlap": "1.7 3.6 5.2 6.2 7.5",
        "streaming, overlap, FP4": "0.4 0.9 1.4 1.4 1.7",
    },
    "100B": {
        "data-parallel": "184.2 323.8 390.7 390.7 471.5",
        "DiLoCo": "3.0 11.0 23.3 49.4 184.2",
        "streaming": "2.4 6.2 9.1 11.0 19.3",
        "streaming, overlap": "1.7 3.6 4.3 5.2 5.2",
        "streaming, overlap, FP4": "0.5 0.9 1.1 1.1 1.4",
    },
}
"""Table 4: Gbit/s for a compute utilization of 50, 80, 90, 95 and 99 %."""

PRINTED_HELD_OUT: dict[str, str] = {
    "Llama-405B": "126.5 222.3 268.3 323.8 323.8",
    "DeepSeek-V3": "323.8 569.0 686.6 686.6 1000.0+",
}
"""Data-parallel rows of Table 6 of arXiv 2503.09799; ``+``: more than the last point of the grid."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One printed bandwidth beside the simulated one."""

    model: str
    method: str
    target: float
    printed: str
    gbits: float
    """The simulated threshold, Gbit/s."""
    miss: float
    """0 if the threshold agrees with what is printed, else by which share it would have to change."""
    drift: float
    """Difference in CU between closed form and played events at the threshold."""

    @property
    def exact(self) -> bool:
        """Whether the printed number follows from the threshold by the rule of the grid."""
        return self.miss == 0.0


def as_printed(gbits: float) -> str:
    """A point of the grid as the table shows it."""
    return f"{round(gbits, 2):.1f}"


def grid_miss(printed: str, gbits: float) -> float:
    """0 if ``gbits`` agrees with the cell ``printed``, else the least relative change with which it would."""
    misses = []
    for below, above in zip(GRID, [*GRID[1:], float("inf")], strict=True):
        shown = as_printed(below) + ("+" if above == float("inf") else "")
        if shown == printed:
            misses.append(max(0.0, below / gbits - 1, gbits / above - 1))
    assert misses, f"{printed} is on no point of the grid"
    return min(misses)


def paper_table() -> list[Cell]:
    """Table 4, all 75 cells."""
    return [
        cell
        for job in JOBS
        for method, schedule in METHODS.items()
        for cell in _row(job, method, schedule(job), PRINTED[job.name][method])
    ]


def held_out() -> list[Cell]:
    """The ten data-parallel cells of Llama-405B and DeepSeek-V3."""
    method = "data-parallel"
    return [
        cell for job in (LLAMA, DEEPSEEK) for cell in _row(job, method, data_parallel(job), PRINTED_HELD_OUT[job.name])
    ]


def _row(job: Job, method: str, schedule: Schedule, printed: str) -> Iterator[Cell]:
    for target, text in zip(TARGETS, printed.split(), strict=True):
        gbits = required_gbits(job, schedule, target)
        yield Cell(
            model=job.name,
            method=method,
            target=target,
            printed=text,
            gbits=gbits,
            miss=grid_miss(text, gbits),
            drift=abs(utilization(job, schedule, gbits) - simulate(job, schedule, gbits)),
        )
