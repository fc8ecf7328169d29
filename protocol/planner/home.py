"""What a peer at home can train: bytes, time and memory of a run on one machine and one line.

Per round trip of all fragments (H inner steps) a parameter costs g_up and g_down bits on the wire (`exchange_bits`).
With N parameters, K tokens per inner step, F FLOP/s sustained, U and D bit/s of which a share eta is usable:

    step time         T     = 6 N K / F
    rate              rho   = max(N g_up / (eta U), N g_down / (eta D)) / (H T)      must be <= 1
    fragment time     t_p   = max(n g_up / (eta U), n g_down / (eta D)) + trips RTT   n = the fragment's parameters
    overlap           tau   = ceil(t_p / T), of the largest fragment                 must be <= tau_max

N cancels in rho: **the line a peer needs does not depend on the size of the model**, only on the tokens between two
rounds: H K >= g_up F / (6 eta U). What limits the model is memory, the time to join, and the time in all.

Assumptions: all peers of a group have the same line and speed, so that shares of the reduction are equal; attention is
not counted in T (it adds little below some thousand tokens of context); control messages are not counted (they are
small and do not grow with the model). The state of training, 16 bytes per parameter on the device, is weights,
gradients and two moments in FP32, which is what `node/trainer.py` keeps; mixed precision with a float32 master copy
takes as much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from stretto.protocol.errors import ConfigError

Scheme: TypeAlias = Literal["all-gather", "butterfly", "client", "pair"]

USABLE = 0.85
"""eta: share of a line's nominal rate that payload gets."""
STATE_BYTES = 16
"""Bytes per parameter on the device: weights, gradients, and AdamW's two moments, each in FP32."""
STATE_BYTES_8BIT = 10
"""The same with the two moments in 8 bits each."""
ROOM = 0.15
"""Share of the device's memory that is left for activations; what little batch fits there decides nothing else."""
HOST_BYTES = 8
"""Bytes per parameter on the host: anchor and outer momentum in FP32."""
FEEDBACK_BYTES = 4
"""What the codec lost, for error feedback."""
ALL_GATHER_UP_TO = 3
"""Largest group whose members exchange whole contributions, see docs/protocol.md."""
MOST_TAU = 10
"""The largest overlap whose cost in quality the paper found small (its Figure 8; 5 in Figure 10)."""
TOKENS_PER_PARAMETER = 20
"""Tokens per parameter that a run is usually given (arXiv 2203.15556)."""
DAY = 86_400.0
MBIT = 1e6


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A peer's device and line."""

    flops: float
    """FLOP/s sustained in training: peak times the utilization that a training step reaches."""
    memory: float
    """Bytes on the device."""
    down: float
    """bit/s that the line takes in."""
    up: float
    """bit/s that it sends."""
    rtt: float = 0.0
    """Seconds of a message there and back."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "down", "up"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"{name} is {value}, it must be a positive number")
        _require(0 <= self.rtt < 60, f"rtt is {self.rtt} s, it must be in 0..60")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: model, method and wire format."""

    fragments: tuple[float, ...]
    """Parameters of each fragment; their sum is N."""
    tokens_per_step: float
    """K."""
    inner_steps: int
    """H."""
    group: int
    """M peers that average with one another."""
    swarm: int
    """Peers that train, in one group or more."""
    up_bits: float
    """Bits per value of a contribution."""
    down_bits: float
    """Bits per value of the mean that a reducer returns."""
    scheme: Scheme
    tau_max: int
    error_feedback: bool = False
    tokens: float = 0.0
    """Tokens of the whole run over all peers; 0 stands for 20 per parameter."""

    def __post_init__(self) -> None:
        _require(bool(self.fragments) and min(self.fragments) > 0, "a run needs fragments with parameters in them")
        _require(self.tokens_per_step > 0, f"K is {self.tokens_per_step} tokens per step, it must be positive")
        _require(self.inner_steps >= 1, f"H is {self.inner_steps}, it must be at least 1")
        _require(1 <= self.group <= self.swarm, f"a group of {self.group} does not fit {self.swarm} peer(s)")
        _require(self.up_bits > 0 and self.down_bits > 0, "bits per value must be positive")
        _require(self.scheme in get_args(Scheme), f"scheme {self.scheme!r} is none of {', '.join(get_args(Scheme))}")
        _require(self.tau_max >= 0, f"tau_max is {self.tau_max}, it must not be negative")
        _require(self.tokens >= 0, f"a budget of {self.tokens} tokens is negative")

    @property
    def parameters(self) -> float:
        """N."""
        return sum(self.fragments)

    @property
    def token_budget(self) -> float:
        """Tokens of the whole run."""
        return self.tokens or TOKENS_PER_PARAMETER * self.parameters


def usual_scheme(group: int, *, client_mode: bool = False) -> Scheme:
    """How a group of ``group`` peers averages in Stretto. A peer in client mode reduces nothing where that is done."""
    if group <= ALL_GATHER_UP_TO:
        return "all-gather"
    return "client" if client_mode else "butterfly"


def exchange_bits(scheme: Scheme, group: int, up_bits: float, down_bits: float) -> tuple[float, float]:
    """Bits per parameter that a peer sends and receives while all fragments are synchronized once.

    all-gather: everybody sends its contribution to everybody. butterfly: peer i reduces the share w_i = 1 / M, so it
    sends (1 - w) of its contribution and M - 1 times its mean, and receives the counterparts. client: w_i = 0. pair:
    with one other peer, whatever the size of the swarm (NoLoCo, arXiv 2506.10911). A lone peer sends nothing.
    """
    if group == 1:
        return 0.0, 0.0
    if scheme == "all-gather":
        return (group - 1) * up_bits, (group - 1) * up_bits
    if scheme == "client":
        return up_bits, down_bits
    if scheme == "pair":
        return up_bits, up_bits
    both = (group - 1) / group * (up_bits + down_bits)
    return both, both


def needed_uplink(flops: float, tokens_per_round: float, up_bits_per_parameter: float) -> float:
    """bit/s of uplink at which everything just hides (rho = 1), for a model of any size; tokens per round = H K."""
    return up_bits_per_parameter * flops / (6 * USABLE * tokens_per_round)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a `Recipe` costs a `Machine`. Seconds, bytes and tokens; per round means per H inner steps."""

    recipe: Recipe
    machine: Machine
    step_seconds: float
    bytes_up: float
    """Sent while all fragments are synchronized once."""
    bytes_down: float
    rho: float
    """Share of the time in which the line is busy; above 1 it does not keep up."""
    overlap: float
    """Time of the largest fragment's round, in steps: tau before it is rounded up."""

    @property
    def tau(self) -> int:
        """Steps of overlap that hide the largest fragment."""
        return max(1, math.ceil(self.overlap - 1e-9))

    @property
    def rate_fits(self) -> bool:
        """Whether the line keeps up."""
        return self.rho <= 1

    @property
    def overlap_fits(self) -> bool:
        """Whether every fragment is back within the run's tau_max."""
        return self.tau <= max(1, self.recipe.tau_max)

    @property
    def state_bytes(self) -> float:
        """On the device."""
        return STATE_BYTES * self.recipe.parameters

    @property
    def state_bytes_8bit(self) -> float:
        """On the device, were the inner optimizer's moments kept in 8 bits."""
        return STATE_BYTES_8BIT * self.recipe.parameters

    @property
    def memory_fits(self) -> bool:
        """Whether the state fits the device and leaves room for activations."""
        return self.state_bytes <= (1 - ROOM) * self.machine.memory

    @property
    def fits(self) -> bool:
        """Whether all of it fits."""
        return self.rate_fits and self.overlap_fits and self.memory_fits

    @property
    def host_bytes(self) -> float:
        """On the host."""
        each = HOST_BYTES + (FEEDBACK_BYTES if self.recipe.error_feedback else 0)
        return each * self.recipe.parameters

    @property
    def utilization(self) -> float:
        """Share of the time in which a peer computes, if the swarm keeps H and waits for its line."""
        return 1 / max(1.0, self.rho)

    @property
    def round_seconds(self) -> float:
        """H inner steps."""
        return self.recipe.inner_steps * self.step_seconds

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a peer trains on between two rounds of a fragment: H K."""
        return self.recipe.inner_steps * self.recipe.tokens_per_step

    @property
    def rounds_per_day(self) -> float:
        """How often all fragments are synchronized in a day."""
        return DAY * self.utilization / self.round_seconds

    @property
    def days(self) -> float:
        """Days until the swarm has trained on the run's tokens."""
        per_second = self.recipe.swarm * self.recipe.tokens_per_step / self.step_seconds * self.utilization
        return self.recipe.token_budget / per_second / DAY

    def join_seconds(self, bytes_per_parameter: int = HOST_BYTES) -> float:
        """Seconds to download the state: 8 bytes per parameter for anchor and momentum, 2 for bf16 weights alone."""
        return 8 * bytes_per_parameter * self.recipe.parameters / (USABLE * self.machine.down)


def make_plan(recipe: Recipe, machine: Machine) -> Plan:
    """Work out what ``recipe`` costs ``machine``."""
    up, down = exchange_bits(recipe.scheme, recipe.group, recipe.up_bits, recipe.down_bits)
    step = 6 * recipe.parameters * recipe.tokens_per_step / machine.flops
    per_parameter = max(up / (USABLE * machine.up), down / (USABLE * machine.down))
    trips = 0 if recipe.group == 1 else 2 if recipe.scheme in ("butterfly", "client") else 1
    return Plan(
        recipe=recipe,
        machine=machine,
        step_seconds=step,
        bytes_up=recipe.parameters * up / 8,
        bytes_down=recipe.parameters * down / 8,
        rho=recipe.parameters * per_parameter / (recipe.inner_steps * step),
        overlap=(max(recipe.fragments) * per_parameter + trips * machine.rtt) / step,
    )


def equal_fragments(parameters: float, count: int) -> tuple[float, ...]:
    """``count`` fragments of the same size."""
    _require(count >= 1, f"a model cannot be cut into {count} fragments")
    return (parameters / count,) * count


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change to a recipe, and the plan that it gives."""

    what: str
    """In words, with the setting's name."""
    plan: Plan

    @property
    def cures(self) -> bool:
        """Whether line and overlap then fit; memory is another matter."""
        return self.plan.rate_fits and self.plan.overlap_fits


@dataclass(frozen=True)
class CodecChange:
    """Another pair of wire codecs, in words and in bits per value; ``feedback``: it wants error feedback."""

    what: str
    up_bits: float
    down_bits: float
    feedback: bool = False


@dataclass(frozen=True)
class Cut:
    """Another way to cut the model; ``even``: H has to be a multiple of the number of fragments."""

    what: str
    fragments: tuple[float, ...]
    even: bool = True


def remedies(
    plan: Plan, *, codecs: Sequence[CodecChange] = (), cuts: Sequence[Cut] = (), sequence_length: int = 1
) -> list[Remedy]:
    """What would help where the line does not keep up, or fragments come back too late.

    A larger K, a larger H, client mode, smaller codecs; where with one of them the line keeps up but the largest
    fragment is still late, a finer cut or a larger tau_max is added, if that is enough. Whatever lowers neither rho
    nor the overlap is left out. A larger K always suffices; the others may not, see `Remedy.cures`.
    """
    recipe, found = plan.recipe, list[tuple[str, Recipe]]()
    if plan.rate_fits:
        found += _against_lateness(plan, cuts)
    else:
        steps = _round_up(recipe.inner_steps * plan.rho, len(recipe.fragments))
        what = f"outer.inner_steps = {steps} (H) in place of {recipe.inner_steps}"
        found.append((what, replace(recipe, inner_steps=steps)))
    tokens = _larger_k(plan, sequence_length)
    what = f"inner.tokens_per_step = {tokens} (K) in place of {recipe.tokens_per_step:.0f}"
    found.append((what, replace(recipe, tokens_per_step=tokens)))
    if recipe.scheme == "butterfly":
        found.append(
            (
                "client mode (--client-mode): this peer reduces nothing, others have to",
                replace(recipe, scheme="client"),
            )
        )
    for codec in codecs:
        feedback = recipe.error_feedback or codec.feedback
        changed = replace(recipe, up_bits=codec.up_bits, down_bits=codec.down_bits, error_feedback=feedback)
        found.append((codec.what, changed))
    made = [Remedy(what=what, plan=make_plan(changed, plan.machine)) for what, changed in found]
    return [_completed(remedy, cuts) for remedy in made if _better(remedy.plan, plan)]


def _completed(remedy: Remedy, cuts: Sequence[Cut]) -> Remedy:
    """The remedy, with the first further change that brings the fragments back in time if it needs one."""
    if remedy.plan.rate_fits and not remedy.plan.overlap_fits:
        for what, recipe in _against_lateness(remedy.plan, cuts):
            both = Remedy(what=f"{remedy.what}, and {what}", plan=make_plan(recipe, remedy.plan.machine))
            if both.cures:
                return both
    return remedy


def _against_lateness(plan: Plan, cuts: Sequence[Cut]) -> list[tuple[str, Recipe]]:
    """The first finer cut that is enough, a larger tau_max if that is allowed, or both."""
    finer: list[tuple[str, Recipe]] = []
    for cut in cuts:
        if max(cut.fragments) >= max(plan.recipe.fragments):
            continue
        steps, what = plan.recipe.inner_steps, cut.what
        if cut.even and steps % len(cut.fragments):
            steps = _round_up(steps, len(cut.fragments))
            what += f" with outer.inner_steps = {steps}"
        finer.append((what, replace(plan.recipe, fragments=cut.fragments, inner_steps=steps)))
    enough = [(what, recipe) for what, recipe in finer if make_plan(recipe, plan.machine).overlap_fits][:1]
    longer = [(f"outer.tau_max = {plan.tau} in place of {plan.recipe.tau_max}", plan.recipe, plan.tau)]
    longer += [
        (f"{what} and outer.tau_max = {tau}", recipe, tau)
        for what, recipe in finer[-1:]
        for tau in (make_plan(recipe, plan.machine).tau,)
    ]
    allowed = [(what, replace(recipe, tau_max=tau)) for what, recipe, tau in longer if tau <= MOST_TAU]
    return enough + allowed[:1]


def _better(new: Plan, old: Plan) -> bool:
    return new.rho < old.rho or new.overlap < old.overlap or (new.overlap_fits and not old.overlap_fits)


def _round_up(value: float, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return multiple * math.ceil(value / multiple - 1e-9)


def _larger_k(plan: Plan, sequence_length: int) -> int:
    """Least tokens per step, in whole sequences, with which rate and overlap both fit.

    The step's time grows with K, and with it what fits into H or tau_max steps.
    """
    factor = max(plan.rho, plan.overlap / max(1, plan.recipe.tau_max))
    return _round_up(plan.recipe.tokens_per_step * max(1.0, factor), sequence_length)
