"""``stretto plan``: whether a machine and a line suit a run, in words or as JSON, and what to change if they do not.

The arithmetic is in `stretto.protocol.planner.home`; here a run config becomes its input: the model's real fragments,
the codecs' real sizes, the group that this many peers make.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from stretto.node.gpus import GPUS
from stretto.node.model import PRESETS, build_meta_model, count_parameters
from stretto.node.place import Place
from stretto.protocol.codecs import get_codec
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError
from stretto.protocol.fragments import split_model
from stretto.protocol.planner.home import (
    ROOM,
    STATE_BYTES,
    USABLE,
    CodecChange,
    Cut,
    Plan,
    Recipe,
    Remedy,
    make_plan,
    remedies,
    usual_scheme,
)

GB = 1e9
MANY = 1 << 20
"""Values over which a codec's scales are spread to tell its bits per value."""
MEGABYTE = 1_000_000
MOST_FRAGMENTS = 200
TIGHT = 0.7
"""Share of the device's memory from which on the state leaves little for activations."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that is said about one question."""

    run: RunConfig
    place: Place
    plan: Plan
    line_remedies: tuple[Remedy, ...]
    memory_remedies: tuple[str, ...]


def codec_bits(name: str) -> float:
    """Bits per value on the wire, scales included. ConfigError for an unknown codec."""
    return 8 * get_codec(name).nbytes(MANY) / MANY


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Settings that a person tries in place of the run's; None keeps the run's."""

    inner_steps: int | None = None
    tokens_per_step: int | None = None
    fragments: int | None = None
    tau_max: int | None = None
    up: str | None = None
    down: str | None = None

    def apply(self, run: RunConfig) -> RunConfig:
        """The run with these settings. ConfigError from the run config's own checks."""
        outer = {
            "inner_steps": self.inner_steps,
            "fragments": self.fragments,
            "fragment_bytes": None if self.fragments is None else 0,
            "tau_max": self.tau_max,
        }
        return dataclasses.replace(
            run,
            outer=_changed(run.outer, outer),
            inner=_changed(run.inner, {"tokens_per_step": self.tokens_per_step}),
            wire=_changed(run.wire, {"up": self.up, "down": self.down}),
        )


def _changed(section: Any, values: dict[str, Any]) -> Any:
    return dataclasses.replace(section, **{key: value for key, value in values.items() if value is not None})


def recipe_of(run: RunConfig, *, peers: int, client_mode: bool = False, tokens: float = 0.0) -> Recipe:
    """The run as the planner sees it, with ``peers`` peers: the model without weights, cut as a node cuts it."""
    if peers < 1:
        raise ConfigError(f"--peers is {peers}, there must be at least 1")
    outer = run.outer
    specs = split_model(
        build_meta_model(run.model),
        count=outer.fragments or None,
        max_bytes=outer.fragment_bytes or None,
        pattern=outer.pattern,
    )
    group = min(peers, run.group.max_size)
    return Recipe(
        fragments=tuple(float(spec.numel) for spec in specs),
        tokens_per_step=run.inner.tokens_per_step,
        inner_steps=outer.inner_steps,
        group=group,
        swarm=peers,
        up_bits=codec_bits(run.wire.up),
        down_bits=codec_bits(run.wire.down),
        scheme=usual_scheme(group, client_mode=client_mode),
        tau_max=outer.tau_max,
        error_feedback=run.wire.error_feedback,
        tokens=tokens,
    )


def answer(run: RunConfig, place: Place, *, peers: int, client_mode: bool = False, tokens: float = 0.0) -> Answer:
    """Plan ``run`` for ``place`` and look for what would make it fit."""
    plan = make_plan(recipe_of(run, peers=peers, client_mode=client_mode, tokens=tokens), place.machine)
    helps: list[Remedy] = []
    if not (plan.rate_fits and plan.overlap_fits):
        helps = remedies(plan, codecs=_codec_changes(plan), cuts=_cuts(run), sequence_length=run.data.sequence_length)
    return Answer(
        run=run,
        place=place,
        plan=plan,
        line_remedies=tuple(helps),
        memory_remedies=() if plan.memory_fits else tuple(_for_memory(plan)),
    )


def _codec_changes(plan: Plan) -> list[CodecChange]:
    """Smaller codecs that this version has."""
    four, two = codec_bits("e3m0"), codec_bits("e1m0")
    if plan.recipe.scheme == "all-gather":  # nothing is reduced, so nothing is encoded twice
        changes = [
            CodecChange('wire.up = "e3m0": four bits', four, plan.recipe.down_bits),
            CodecChange('wire.up = "e1m0" with wire.error_feedback: two bits', two, plan.recipe.down_bits, True),
        ]
    else:
        up = min(plan.recipe.up_bits, four)
        changes = [
            CodecChange('wire.down = "e3m0": the mean comes back in four bits, and rounded once more', up, four),
            CodecChange('wire.up = wire.down = "e1m0" with wire.error_feedback: two bits each way', two, two, True),
        ]
    now = plan.recipe.up_bits + plan.recipe.down_bits
    return [change for change in changes if change.up_bits + change.down_bits < now - 1e-9]


def _cuts(run: RunConfig) -> list[Cut]:
    """Finer cuts that this model allows, the coarsest first: more fragments, at last each layer by itself."""
    model, pattern = build_meta_model(run.model), run.outer.pattern
    now = split_model(
        model, count=run.outer.fragments or None, max_bytes=run.outer.fragment_bytes or None, pattern=pattern
    )
    found: list[Cut] = []
    for count in range(len(now) + 1, MOST_FRAGMENTS + 1):
        try:
            specs = split_model(model, count=count, pattern=pattern)
        except ConfigError:  # there are no more layers
            break
        found.append(Cut(f"outer.fragments = {count}", tuple(float(spec.numel) for spec in specs)))
    if found:
        # Then what is outside the layers too: a limit with room for one layer and the last norm.
        layer = median(4 * numel for numel in found[-1].fragments)
        limit = MEGABYTE * math.ceil(1.005 * layer / MEGABYTE)
        with contextlib.suppress(ConfigError):  # a model with one layer that is larger than the others
            specs = split_model(model, max_bytes=limit, pattern=pattern)
            what = f"outer.fragment_bytes = {limit} in place of outer.fragments"
            found.append(Cut(what, tuple(float(spec.numel) for spec in specs), even=False))
    return found


def _for_memory(plan: Plan) -> list[str]:
    """What would fit a state that does not, in words."""
    room = (1 - ROOM) * plan.machine.memory
    found = []
    sizes = {name: count_parameters(build_meta_model(table)) for name, table in PRESETS.items()}
    fitting = [name for name, size in sizes.items() if STATE_BYTES * size <= room]
    if fitting:
        best = max(fitting, key=lambda name: sizes[name])
        found.append(f"a smaller model: {best} needs {_gb(STATE_BYTES * sizes[best])}")
    cards = [name for name, gpu in GPUS.items() if plan.state_bytes <= (1 - ROOM) * gpu.memory_gb * GB]
    if cards:
        found.append(f"a card with more memory: {', '.join(cards)}")
    eight = plan.state_bytes_8bit
    if eight <= room:
        found.append(f"8-bit Adam would need {_gb(eight)}; this version of Stretto does not have it")
    if not cards or eight > room:
        found.append("several cards in one peer; this version of Stretto uses one")
    return found


# ---------------------------------------------------------------------------------------------------------- output


def to_json(found: Answer) -> dict[str, Any]:
    """The answer as plain values: bytes, seconds, bit/s."""
    plan, recipe, machine = found.plan, found.plan.recipe, found.plan.machine
    return {
        "fits": plan.fits,
        "fits_memory": plan.memory_fits,
        "fits_rate": plan.rate_fits,
        "fits_overlap": plan.overlap_fits,
        "model": found.run.name,
        "parameters": round(recipe.parameters),
        "fragments": len(recipe.fragments),
        "largest_fragment": round(max(recipe.fragments)),
        "inner_steps": recipe.inner_steps,
        "tokens_per_step": round(recipe.tokens_per_step),
        "peers": recipe.swarm,
        "group": recipe.group,
        "scheme": recipe.scheme,
        "up_codec": found.run.wire.up,
        "down_codec": found.run.wire.down,
        "up_bits": recipe.up_bits,
        "down_bits": recipe.down_bits,
        "device": found.place.name,
        "flops": machine.flops,
        "device_memory_bytes": machine.memory,
        "down_bits_per_second": machine.down,
        "up_bits_per_second": machine.up,
        "rtt_seconds": machine.rtt,
        "state_bytes": round(plan.state_bytes),
        "state_bytes_8bit_adam": round(plan.state_bytes_8bit),
        "host_bytes": round(plan.host_bytes),
        "step_seconds": plan.step_seconds,
        "round_seconds": plan.round_seconds,
        "tokens_per_round": round(plan.tokens_per_round),
        "bytes_up_per_round": round(plan.bytes_up),
        "bytes_down_per_round": round(plan.bytes_down),
        "bytes_up_per_day": round(plan.bytes_up * plan.rounds_per_day),
        "bytes_down_per_day": round(plan.bytes_down * plan.rounds_per_day),
        "rho": plan.rho,
        "tau": plan.tau,
        "tau_max": recipe.tau_max,
        "compute_utilization": plan.utilization,
        "join_seconds": plan.join_seconds(),
        "join_seconds_bf16": plan.join_seconds(2),
        "token_budget": round(recipe.token_budget),
        "days": plan.days,
        "remedies": [
            {"change": remedy.what, "rho": remedy.plan.rho, "tau": remedy.plan.tau, "suffices": remedy.cures}
            for remedy in found.line_remedies
        ],
        "memory_remedies": list(found.memory_remedies),
        "assumed": list(_assumptions(found)),
        "measured": list(found.place.measured),
    }


def render(found: Answer) -> str:
    """The answer for people."""
    return "\n".join([*_question(found), "", _verdict(found.plan), *_figures(found), *_advice(found), *_basis(found)])


def _question(found: Answer) -> list[str]:
    recipe, machine = found.plan.recipe, found.plan.machine
    wire = found.run.wire
    how = {
        "all-gather": f"everybody sends its contribution ({wire.up}) to everybody",
        "butterfly": f"each reduces a part: {wire.up} to the reducers, {wire.down} back",
        "client": f"this peer reduces nothing: {wire.up} to the reducers, {wire.down} back",
        "pair": "pairs",
    }[recipe.scheme]
    return [
        f"{found.run.name}: {recipe.parameters / 1e6:,.1f} million parameters in {len(recipe.fragments)} fragments of "
        f"up to {max(recipe.fragments) / 1e6:,.1f} million, H = {recipe.inner_steps}, "
        f"K = {recipe.tokens_per_step:,.0f}",
        f"{recipe.swarm} peers in groups of {recipe.group}: {how if recipe.group > 1 else 'nothing is sent'}",
        f"each on {found.place.name}: {machine.flops / 1e12:.3g} TFLOP/s, {machine.memory / GB:g} GB; line "
        f"{machine.down / 1e6:g}/{machine.up / 1e6:g} Mbit/s down/up",
    ]


def _verdict(plan: Plan) -> str:
    wrong = []
    if not plan.memory_fits:
        wrong.append("the device's memory is too small")
    if not plan.rate_fits:
        wrong.append("the line is too slow for so few tokens per round")
    elif not plan.overlap_fits:
        wrong.append("the largest fragment takes too long on the line")
    return f"It does not fit: {' and '.join(wrong)}." if wrong else "It fits."


def _figures(found: Answer) -> list[str]:
    plan, recipe, machine = found.plan, found.plan.recipe, found.plan.machine
    share = plan.state_bytes / machine.memory
    tight = ", which leaves little for activations: micro_batch = 1" if TIGHT < share <= 1 - ROOM else ""
    per_day = plan.rounds_per_day
    if plan.rate_fits:
        busy = f"rho = {plan.rho:.2f}: the line is busy {plan.rho:.0%} of the time"
    else:
        busy = (
            f"rho = {plan.rho:.2f}: the line does not keep up. If all waited for it, a peer would compute "
            f"{plan.utilization:.0%} of the time; Stretto's clock lets H grow to about "
            f"{recipe.inner_steps * plan.rho:.0f} instead"
        )
    allowed = f"; the run allows {recipe.tau_max}" if not plan.overlap_fits else f" of {recipe.tau_max} allowed"
    return [
        f"  memory   {_gb(plan.state_bytes)} of {machine.memory / GB:g} GB on the device{tight}; "
        f"{_gb(plan.host_bytes)} on the host",
        f"  step     {_time(plan.step_seconds)}; a round of all fragments (H steps) {_time(plan.round_seconds)}, "
        f"{plan.tokens_per_round / 1e6:,.3g} million tokens per peer",
        f"  line     {_size(plan.bytes_up)} up and {_size(plan.bytes_down)} down per round, "
        f"{_size(plan.bytes_up * per_day)} and {_size(plan.bytes_down * per_day)} per day; {busy}",
        f"  overlap  tau = {plan.tau} steps for the largest fragment{allowed}",
        f"  join     {_time(plan.join_seconds())} to download {_size(8 * recipe.parameters)} of state",
        f"  time     {_days(plan.days)} until the swarm has trained on {recipe.token_budget / 1e9:,.3g} billion tokens"
        + ("" if plan.rate_fits else ", if all waited"),
    ]


def _advice(found: Answer) -> list[str]:
    lines: list[str] = []
    if found.memory_remedies:
        lines += ["", "For the memory:", *(f"  - {text}" for text in found.memory_remedies)]
    enough = [remedy for remedy in found.line_remedies if remedy.cures]
    partly = [remedy for remedy in found.line_remedies if not remedy.cures]
    if enough:
        lines += ["", "For the line, any one of these is enough:", *map(_remedy, enough)]
    if partly:
        lines += ["", "These help, but not enough alone:", *map(_remedy, partly)]
    return lines


def _remedy(remedy: Remedy) -> str:
    return f"  - {remedy.what}: rho {remedy.plan.rho:.2f}, tau {remedy.plan.tau}"


def _basis(found: Answer) -> list[str]:
    lines = ["", "Assumed:", *(f"  - {text}" for text in _assumptions(found))]
    if found.place.measured:
        lines += ["Measured:", *(f"  - {text}" for text in found.place.measured)]
    return lines


def _assumptions(found: Answer) -> Sequence[str]:
    recipe = found.plan.recipe
    standing = [
        f"{USABLE:.0%} of the line's nominal rate is usable; all peers are alike; a message there and back takes "
        f"{found.plan.machine.rtt:g} s",
        f"{STATE_BYTES} bytes per parameter on the device, 8 on the host; {ROOM:.0%} of the device is kept for "
        "activations; attention is not counted in the step",
    ]
    if recipe.swarm > recipe.group:
        standing.append(
            f"group.max_size = {recipe.group}: of {recipe.swarm} peers only {recipe.group} are counted in a round; "
            "the days count all of them"
        )
    return (*found.place.assumed, *standing)


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.1f} GB"


def _size(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _days(days: float) -> str:
    return f"{days:,.3g} days" if days >= 1 else _time(days * 86_400)
