"""Compute utilization: which share of the wall time a peer computes, for a given bandwidth (the paper, section 3.1).

The model of the paper's simulator (arXiv 2501.18512, Table 4; which of its choices are printed and which were found by
matching the table is told in docs/planner.md):

- A step is a chain of nodes, each of u = T / (3 L) seconds: the forward passes F(1) .. F(L), then for l = L .. 1 the
  gradient by the activations A(l) and by the weights W(l). A(1) is not needed, so a step computes for
  Tc = (3 L - 1) u.
- The network is one queue, first come first served. The reduction R(l) of a layer that departs in this step enters it
  when W(l) is done, and takes c = (N / L) bits f / B seconds, f = 2 (M - 1) / M.
- F(l) of step s + 1 + tau waits for R(l) that departed in step s. Layer by layer: nothing else waits.

Everything that distinguishes data-parallel training, DiLoCo and Streaming DiLoCo is *when which layers depart*: a
`Schedule`. Closed form, exact where at most one departure is in flight, that is, where two departures lie at least
1 + tau steps apart: of layers l_1 < ... < l_k that depart together l_1 arrives last but is needed first, so a
departure costs the trainer

    stall = max(0, max_j (w(l_j) + j c) - (1 + tau) Tc - (l_1 - 1) u)

with w(l) the end of W(l) within its step, and CU = period Tc / (period Tc + all stalls). With more in flight the
events are played until the state repeats (`simulate`); they agree wherever both apply.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.protocol.errors import ConfigError

BF16_BITS = 16.0
FP4_BITS = 4.0

REPEATS = 1e-10
"""The state of the simulation repeats when it changed by less than this share of a cycle's time."""
CYCLES = 2_000
"""A simulation that does not repeat after so many cycles is averaged over the latter half of them."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model as the simulator sees it: equal layers and a step time."""

    name: str
    parameters: float
    layers: int
    """L, at least 2."""
    step_seconds: float
    """T: seconds of a step with 3 L nodes, of which 3 L - 1 are computed."""
    replicas: int = 2
    """M peers of the ring all-reduce, whose factor is 2 (M - 1) / M."""

    def __post_init__(self) -> None:
        _require(self.layers >= 2, f"{self.name} has {self.layers} layers, the simulator needs at least 2")
        _require(self.replicas >= 2, f"{self.name} has {self.replicas} replicas, it takes two to send anything")
        _require(
            math.isfinite(self.parameters) and self.parameters > 0 and 0 < self.step_seconds < math.inf,
            f"{self.name} needs a positive number of parameters and a positive step time",
        )

    @property
    def node_seconds(self) -> float:
        """u: seconds of one node."""
        return self.step_seconds / (3 * self.layers)

    @property
    def compute_seconds(self) -> float:
        """Tc: seconds that a step computes."""
        return self.node_seconds * (3 * self.layers - 1)

    def gradient_end(self, layer: int) -> float:
        """w(l): seconds from the start of a step's first node to the end of W(l), ``layer`` in 1..L."""
        nodes = self.layers + 2 * (self.layers - layer + 1)
        return self.node_seconds * (nodes - 1 if layer == 1 else nodes)

    def layer_seconds(self, gbits: float, bits: float) -> float:
        """c: seconds of one layer on a link of ``gbits`` Gbit/s with ``bits`` per value."""
        _require(gbits > 0 and bits > 0, f"bandwidth ({gbits} Gbit/s) and bits per value ({bits}) must be positive")
        factor = 2 * (self.replicas - 1) / self.replicas
        return self.parameters / self.layers * bits * factor / (gbits * 1e9)


@dataclass(frozen=True)
class Schedule:
    """When which layers depart, for ever: at step t those of ``departures[t mod period]``.

    departures: step within the period -> layers in 1..L, ascending. tau: steps until they are needed, less one.
    """

    period: int
    departures: tuple[tuple[int, tuple[int, ...]], ...]
    bits: float = BF16_BITS
    tau: int = 0

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.departures]
        _require(bool(steps) and steps == sorted(set(steps)), "a schedule needs departures, one per step, in order")
        _require(steps[0] >= 0 and steps[-1] < self.period, "departures must lie within the period")
        _require(self.tau >= 0, f"tau is {self.tau}, it must not be negative")
        for _, layers in self.departures:
            _require(bool(layers) and list(layers) == sorted(set(layers)), "departing layers must be ascending")

    @property
    def closest(self) -> int:
        """Least steps between two departures."""
        steps = [step for step, _ in self.departures]
        return min(later - earlier for earlier, later in zip(steps, [*steps[1:], steps[0] + self.period], strict=True))

    @property
    def has_closed_form(self) -> bool:
        """Whether a departure is back before the next one leaves, so that `closed_form` is exact."""
        return self.tau + 1 <= self.closest


def data_parallel(job: Job, bits: float = BF16_BITS) -> Schedule:
    """Every layer in every step."""
    return Schedule(1, ((0, tuple(range(1, job.layers + 1))),), bits)


def diloco(job: Job, inner_steps: int, bits: float = BF16_BITS) -> Schedule:
    """Every layer in one of H steps (arXiv 2311.08105)."""
    _require(inner_steps >= 1, f"H is {inner_steps}, it must be at least 1")
    return Schedule(inner_steps, ((0, tuple(range(1, job.layers + 1))),), bits)


def streaming(
    job: Job,
    inner_steps: int,
    fragments: int,
    *,
    bits: float = BF16_BITS,
    tau: int = 0,
    pattern: str = "strided",
) -> Schedule:
    """One of P fragments every round(H / P) steps. So a fragment's period is P round(H / P) steps, not H."""
    _require(1 <= fragments <= job.layers, f"{job.name} has {job.layers} layers, which make no {fragments} fragments")
    _require(pattern in ("strided", "sequential"), f"pattern {pattern!r} is neither strided nor sequential")
    spacing = max(1, round(inner_steps / fragments))
    layers = range(1, job.layers + 1)
    if pattern == "strided":
        cut = [tuple(layers[p::fragments]) for p in range(fragments)]
    else:
        ends = [round(p * job.layers / fragments) for p in range(fragments + 1)]
        cut = [tuple(layers[start:stop]) for start, stop in itertools.pairwise(ends)]
    return Schedule(spacing * fragments, tuple((p * spacing, part) for p, part in enumerate(cut)), bits, tau)


def utilization(job: Job, schedule: Schedule, gbits: float) -> float:
    """CU in 0..1 on a link of ``gbits`` Gbit/s: by the closed form where it is exact, else by simulation."""
    if schedule.has_closed_form:
        return closed_form(job, schedule, gbits)
    return simulate(job, schedule, gbits)


def closed_form(job: Job, schedule: Schedule, gbits: float) -> float:
    """CU in 0..1 by the formula above. ConfigError where more than one departure may be in flight."""
    _require(
        schedule.has_closed_form,
        f"the closed form needs departures at least 1 + tau = {schedule.tau + 1} steps apart, they are "
        f"{schedule.closest} apart: simulate them",
    )
    each = job.layer_seconds(gbits, schedule.bits)
    hidden = (1 + schedule.tau) * job.compute_seconds
    stalls = 0.0
    for _, layers in schedule.departures:
        arrival = max(job.gradient_end(layer) + (j + 1) * each for j, layer in enumerate(layers))
        stalls += max(0.0, arrival - hidden - (layers[0] - 1) * job.node_seconds)
    busy = schedule.period * job.compute_seconds
    return busy / (busy + stalls)


def simulate(job: Job, schedule: Schedule, gbits: float) -> float:
    """CU in 0..1 from played events, in the steady state.

    Nodes between two events are not visited one by one: a forward node can only be held up where a layer is due, and
    the network only hears of layers that depart. Time is counted from the start of the present step.
    """
    each, node, busy = job.layer_seconds(gbits, schedule.bits), job.node_seconds, job.compute_seconds
    leaving = dict(schedule.departures)
    due: deque[list[tuple[int, float]]] = deque([] for _ in range(schedule.tau + 1))
    """For each of the next 1 + tau steps the layers that it waits for, ascending, and when they arrive."""
    free = 0.0  # when the network is
    times: list[float] = []
    before: list[float] = []
    for _ in range(CYCLES):
        cycle = 0.0
        for step in range(schedule.period):
            late = 0.0
            for layer, arrival in due.popleft():
                late = max(late, arrival - (layer - 1) * node)
            arrivals = []
            for layer in reversed(leaving.get(step, ())):
                free = max(free, late + job.gradient_end(layer)) + each
                arrivals.append((layer, free))
            due.append(arrivals[::-1])
            took = late + busy
            cycle += took
            free -= took
            due = deque([(layer, arrival - took) for layer, arrival in waiting] for waiting in due)
        times.append(cycle)
        # What has arrived already is past, however long ago.
        state = [max(0.0, free), *(max(0.0, arrival) for waiting in due for _, arrival in waiting)]
        if len(state) == len(before) and all(
            abs(now - then) <= REPEATS * cycle for now, then in zip(state, before, strict=True)
        ):
            return schedule.period * busy / cycle
        before = state
    late_half = times[len(times) // 2 :]
    return schedule.period * busy * len(late_half) / sum(late_half)


def required_gbits(job: Job, schedule: Schedule, target: float, *, precision: float = 1e-6) -> float:
    """The least bandwidth in Gbit/s with a CU of ``target``, to the relative ``precision``, by bisection.

    CU never falls when the bandwidth grows, and comes as near to 1 as one likes.
    """
    _require(0 < target < 1, f"a compute utilization of {target} cannot be asked for, only one within 0 and 1")
    low, high = 1e-3, 1.0
    while utilization(job, schedule, high) < target:
        low, high = high, high * 8
    while utilization(job, schedule, low) >= target:
        low, high = low / 8, low
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        if utilization(job, schedule, middle) < target:
            low = middle
        else:
            high = middle
    return high


def floor_gbits(job: Job, schedule: Schedule) -> float:
    """Gbit/s below which the network falls behind for ever, whatever tau: bits of a period over its compute time."""
    layers: Sequence[int] = [layer for _, departing in schedule.departures for layer in departing]
    return len(layers) * job.layer_seconds(1.0, schedule.bits) / (schedule.period * job.compute_seconds)
