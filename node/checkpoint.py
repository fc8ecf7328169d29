"""What a checkpoint holds, and how a node becomes again what it was.

Of each fragment two files: ``local-0000.safetensors`` with the local weights and the state of the inner optimizer by
parameter name, ``shared-0000.safetensors`` with anchor, outer momentum, results that have not met the local weights
yet and what the codec lost so far. Everything else is in the contents: the ends of the chains with their commit
records, the contributions that are under way, the clock, how far the data were read, steps and tokens.

A checkpoint belongs to a run, not to a peer: whoever has the folder goes on from it, under any identity, in a swarm of
any size. What the swarm committed since then comes by the ordinary ways (replay, download).

Capturing takes references to the protocol's arrays, which are never changed in place; only the local side has to be
written before the next inner step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from stretto.node.checkpoint_files import MAX_CONTENTS, Damaged
from stretto.node.sync import Sync
from stretto.protocol import wire
from stretto.protocol.chain import SignedRecord, Tip
from stretto.protocol.errors import ProtocolError, RemoteProtocolError
from stretto.protocol.fragments import FragmentSpec
from stretto.protocol.outer import Vector
from stretto.protocol.schedule import Clock
from stretto.protocol.streaming import FragmentState

FORMAT = 2

LOCAL_KINDS = ("weight", "exp_avg", "exp_avg_sq", "step")
"""What is kept of a parameter: itself, and the state of AdamW by the names that torch gives it."""

Write = tuple[str, Callable[[Path], None]]
"""A file of a checkpoint and what writes it."""


@dataclass(frozen=True)
class Attempt:
    """A contribution that left and may still be counted, and the tokens behind it."""

    digest: bytes
    tokens: int


@dataclass(frozen=True)
class FragmentEntry:
    """A fragment's state without its arrays; ``merges`` says that the anchor has not met the local weights yet."""

    tip: Tip
    record: SignedRecord | None
    tokens: int
    attempts: tuple[Attempt, ...]
    merges: bool


@dataclass(frozen=True)
class Contents:
    """Everything that is not a tensor. ``reader`` is the data reader's state; ``clean``: the last of a life that ended
    in order, after which nothing left."""

    format: int
    run: bytes
    peer: bytes
    step: int
    tokens: int
    clock: Clock | None
    reader: bytes
    fragments: tuple[FragmentEntry, ...]
    clean: bool

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"checkpoint format {self.format}; this stretto reads {FORMAT}")
        if self.step < 0 or self.tokens < 0:
            raise ValueError("a negative count")


@dataclass
class Captured:
    """A moment of a replica: ``local`` must be written before weights change again, ``shared`` at any later time."""

    contents: bytes
    step: int
    local: list[Write]
    shared: list[Write]
    nbytes: int


def capture(
    sync: Sync,
    optimizer: torch.optim.Optimizer,
    *,
    run: bytes,
    peer: bytes,
    tokens: int,
    reader: bytes,
    clean: bool = False,
) -> Captured:
    """The state between two inner steps; from the training thread. ``reader`` is the data reader's, as it likes."""
    with sync.step_lock, sync.outer_lock:
        states = sync.peer.diloco.fragments
        entries = tuple(_entry(state) for state in states)
        arrays = [_arrays(state) for state in states]
        clock, step = sync.peer.clock, sync.step
    contents = Contents(FORMAT, run, peer, step, tokens, clock, reader, entries, clean)
    weights = [sync.model.parameters(index) for index in range(len(arrays))]
    shared: list[Write] = [
        (f"shared-{index:04}.safetensors", partial(_write_arrays, found)) for index, found in enumerate(arrays)
    ]
    local: list[Write] = [
        (f"local-{index:04}.safetensors", partial(_write_local, found, optimizer))
        for index, found in enumerate(weights)
    ]
    nbytes = sum(array.nbytes for found in arrays for array in found.values())
    nbytes += 3 * sum(weight.nbytes for found in weights for weight in found.values()) + (1 << 20)
    return Captured(wire.pack(wire.to_plain(contents)), step, local, shared, nbytes)


def _entry(state: FragmentState) -> FragmentEntry:
    attempts = tuple(Attempt(digest, tokens) for digest, tokens in state.attempts.items())
    return FragmentEntry(state.tip, state.record, state.tokens, attempts, state.merge_with is state.anchor)


def _arrays(state: FragmentState) -> dict[str, Vector]:
    found = {
        "anchor": state.anchor,
        "momentum": state.momentum,
        "merge_with": None if state.merge_with is state.anchor else state.merge_with,
        "shift": state.shift,
        "residual": state.residual,
        "residual_left": state.residual_left,
    }
    return {name: array for name, array in found.items() if array is not None}


def _write_arrays(arrays: dict[str, Vector], path: Path) -> None:
    with _as_os_error():
        save_arrays(arrays, path)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """safetensors has an error of its own for a disk that is full or fails."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from None


def _write_local(weights: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Tensors of one fragment: ``weight/NAME``, and ``exp_avg/NAME`` and so on as the optimizer calls them."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        found[f"weight/{name}"] = weight.detach().contiguous()
        for kind, value in optimizer.state.get(weight, {}).items():
            found[f"{kind}/{name}"] = torch.as_tensor(value).contiguous()
    with _as_os_error():
        save_tensors(found, path)


# ---------------------------------------------------------------------- back


def read_contents(data: bytes, *, run: bytes, fragments: int) -> Contents:
    """The contents of a checkpoint of this run. Damaged says what is wrong with them."""
    try:
        contents = wire.from_plain(Contents, wire.unpack(data, MAX_CONTENTS))
    except RemoteProtocolError as error:
        raise Damaged(f"its contents are not understood: {error.why}") from None
    if contents.run != run:
        raise Damaged("it is of another run")
    if len(contents.fragments) != fragments:
        raise Damaged(f"it has {len(contents.fragments)} fragments instead of {fragments}")
    return contents


def restore(folder: Path, contents: Contents, sync: Sync, optimizer: torch.optim.Optimizer) -> None:
    """Give a new replica the state of a checkpoint whose files were checked. Damaged if they do not fit this model.

    All is read and checked before anything changes. Takes as much memory again as the replica has, for a moment.
    """
    weights = [sync.model.parameters(spec.index) for spec in sync.model.specs]
    tensors = [_read_local(folder, index, found) for index, found in enumerate(weights)]
    pairs = zip(sync.model.specs, contents.fragments, strict=True)
    states = [_read_state(folder, spec, entry, sync) for spec, entry in pairs]
    for state in states:
        state.resumed, state.clean = True, contents.clean
    try:
        with sync.step_lock, sync.outer_lock:
            sync.peer.restore(states, contents.clock)
            sync.step = contents.step
    except ProtocolError as error:
        raise Damaged(f"its state does not fit its records: {error}") from None
    with torch.no_grad():
        for named, found in zip(weights, tensors, strict=True):
            for key, value in found.items():
                kind, name = key.split("/", 1)
                weight = named[name]
                if kind == "weight":
                    weight.copy_(value)
                else:
                    # As torch.optim keeps them: moments beside their weight, counters on the host.
                    optimizer.state[weight][kind] = value.to(weight.device) if value.shape == weight.shape else value


def _read_local(folder: Path, index: int, weights: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    path = folder / f"local-{index:04}.safetensors"
    try:
        tensors = load_tensors(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    for name, expected in weights.items():
        weight = tensors.get(f"weight/{name}")
        if weight is None or weight.shape != expected.shape:
            raise Damaged(f"{path} has no weight {name} of this model")
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        fits = kind in LOCAL_KINDS and name in weights
        if not fits or (value.numel() != 1 and value.shape != weights[name].shape):
            raise Damaged(f"{path} has an odd tensor {key}")
        if not bool(torch.isfinite(value).all()):
            raise Damaged(f"{path} has a tensor {key} that is not finite")
    return tensors


def _read_state(folder: Path, spec: FragmentSpec, entry: FragmentEntry, sync: Sync) -> FragmentState:
    path = folder / f"shared-{spec.index:04}.safetensors"
    try:
        found: dict[str, Any] = load_arrays(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    arrays: dict[str, Vector] = {}
    for name, array in found.items():
        if array.dtype != np.float32 or array.shape != (spec.numel,) or not np.isfinite(array).all():
            raise Damaged(f"{path} has an odd array {name}")
        arrays[name] = array
    if not {"anchor", "momentum"} <= arrays.keys():
        raise Damaged(f"{path} lacks the anchor or its momentum")
    empty = sync.peer.diloco.empty
    kept = {name: empty(spec.numel) for name in ("anchor", "momentum")}
    for name, array in kept.items():
        array[:] = arrays[name]
    return FragmentState(
        anchor=kept["anchor"],
        momentum=kept["momentum"],
        tip=entry.tip,
        record=entry.record,
        tokens=entry.tokens,
        attempts={attempt.digest: attempt.tokens for attempt in entry.attempts},
        merge_with=kept["anchor"] if entry.merges else arrays.get("merge_with"),
        shift=arrays.get("shift"),
        residual=arrays.get("residual"),
        residual_left=arrays.get("residual_left"),
    )
