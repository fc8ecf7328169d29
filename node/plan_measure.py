"""``stretto plan --measure``: this machine's inner step and its line, timed in a small and bounded way.

The step: the run's own model and optimizer on the device, with real passes over random tokens. A step of K tokens is
many equal passes and one update, so a few passes and an update are timed and the rest is multiplied. The line: see
``stretto.node.swarm.try_line``.
"""

import os
import time
from collections.abc import Callable
from statistics import median

import torch

from stretto.node.console import Console
from stretto.node.model import build_meta_model, build_model, count_parameters
from stretto.node.parts import choose_device
from stretto.node.place import LineTiming, Timing
from stretto.node.trainer import finish, make_optimizer, time_passes
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import Invite
from stretto.protocol.planner.home import STATE_BYTES

PASSES = 5
"""Passes that count, after one that warms up; fewer when they take long."""
SECONDS = 60.0
"""No further pass begins after so long."""

Say = Callable[[str], None]


def measure_step(run: RunConfig, *, device: str, micro_batch: int, say: Say) -> Timing:
    """Time the run's inner step on ``device``. ConfigError if the model does not fit it."""
    if micro_batch < 1:
        raise ConfigError(f"--micro-batch is {micro_batch}, it must be at least 1")
    chosen = choose_device(device, Console())
    memory = _memory(chosen)
    meta = build_meta_model(run.model)
    parameters = count_parameters(meta)
    if parameters * STATE_BYTES > memory:
        raise ConfigError(
            f"{run.name} needs {parameters * STATE_BYTES / 1e9:.1f} GB to train, {chosen} has {memory / 1e9:.1f} GB: "
            "there is nothing to time. Plan it with --gpu, or measure a smaller model"
        )
    say(f"building {run.name} ({parameters / 1e6:,.1f} million parameters) on {chosen}")
    try:
        passing, updating = _time_step(run, chosen, micro_batch, say)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{chosen} ran out of memory with {micro_batch} sequence(s) of {run.data.sequence_length} tokens"
        ) from None
    tokens = micro_batch * run.data.sequence_length
    step = passing * run.inner.tokens_per_step / tokens + updating
    flops = 6 * parameters * run.inner.tokens_per_step / step
    return Timing(
        device=_name(chosen),
        flops=flops,
        memory=memory,
        words=(
            f"a pass of {tokens:,} tokens takes {passing:.3g} s and an update {updating:.3g} s on {_name(chosen)}, in "
            f"FP32: {step:.3g} s for a step of {run.inner.tokens_per_step:,} tokens, {flops / 1e12:.3g} TFLOP/s"
        ),
    )


def _time_step(run: RunConfig, device: torch.device, micro_batch: int, say: Say) -> tuple[float, float]:
    """Seconds of a pass over ``micro_batch`` sequences, and of an update: medians."""
    model = build_model(run.model, 0, device=device)
    optimizer = make_optimizer(model, run.inner)
    vocabulary = run.model.get("vocab_size", 256)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, int(vocabulary), (micro_batch, run.data.sequence_length + 1), generator=generator)
    batch = batch.to(device)
    passes, updates = list[float](), list[float]()
    began = time.perf_counter()
    say(f"timing {PASSES} passes of {micro_batch * run.data.sequence_length:,} tokens, for a minute at most")
    for number in range(PASSES + 1):
        passes.append(time_passes(model, [batch], run.inner.z_loss))
        update_began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finish(device)
        updates.append(time.perf_counter() - update_began)
        if number and time.perf_counter() - began > SECONDS:
            break
    return median(passes[1:]), median(updates[1:])


def _memory(device: torch.device) -> float:
    """Bytes of the device; of a CPU or a GPU that shares it the machine's RAM."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def measure_line(invite: str, *, needed: bool, say: Say, timeout: float = 15.0) -> tuple[RunConfig, LineTiming | None]:
    """The run that ``invite`` names, and a timed download from its peers.

    Where no peer gives anything that is said, and without a line given by hand (``needed``) it is a ConfigError.
    """
    parsed = Invite.parse(invite)
    from stretto.node.swarm.thread import NetworkThread
    from stretto.node.swarm.try_line import try_line

    say("visiting the run, then downloading for a few seconds")
    thread = NetworkThread()
    try:
        run, found, why = thread.call(try_line(parsed, timeout=timeout, say=say))
    finally:
        thread.close()
    if found is None:
        if needed:
            raise ConfigError(f"the line could not be timed: {why}. Try again later, or give it with --link DOWN/UP")
        say(f"the line could not be timed: {why}")
        return run, None
    if why:
        say(f"peers that gave nothing, or stopped: {why}")
    words = (
        f"{found.nbytes / 1e6:.1f} MB came from {found.peers} peer(s) in {found.seconds:.1f} s, "
        f"{found.bits_per_second / 1e6:.3g} Mbit/s down: at least that, since their own lines and rounds may have "
        f"been what was slow; a message there and back took {1e3 * found.rtt:.3g} ms"
    )
    return run, LineTiming(down=found.bits_per_second, rtt=found.rtt, words=words)
