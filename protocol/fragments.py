"""Fragments: how a model is cut into the pieces that are synchronized one at a time.

Streaming DiLoCo (arXiv 2501.18512, section 2.2) never sends a whole model: it sends fragment after fragment, each a
set of transformer layers, in one of two patterns. With L layers and P fragments

- **strided**: layer i goes to fragment i mod P, so each fragment spans the depth of the model (the paper's choice);
- **sequential**: fragment p is a run of neighbouring layers.

A fragment is a list of whole tensors in the order of the model's own ``named_parameters()``, and on the wire one flat
FP32 vector, the tensors one after the other. The cut is a function of the model's structure alone (names, shapes, what
is tied, what is frozen), so that peers with the same model agree without a word; `layout_digest` lets them check that.

The file knows no model by name. It takes the outermost ``nn.ModuleList`` of blocks of one class that holds the most
trainable values as the layers; what is registered before the first layer (embeddings) or after it but outside the
layers (final norm, head) is called *outside* here. This and the flat copies are all that may live here, and the only
reason why this file needs torch.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto.protocol.errors import ConfigError, LocalProtocolError

Pattern: TypeAlias = Literal["strided", "sequential"]

FP32_BYTES = 4


PIECE = 1 << 16
"""Values that a host handles at a time where it needs a temporary: it stays in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class FragmentSpec:
    """One fragment: which tensors, in which order, of which shape.

    Raises:
        ConfigError: if names and shapes do not pair up, or a name occurs twice.
    """

    index: int
    """Position p in the model's tuple of fragments, from 0."""
    names: tuple[str, ...]
    """Parameter names, in the order of ``model.named_parameters()``."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each, in the same order; () for a scalar."""

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ConfigError(f"a fragment's index starts at 0, got {self.index}")
        if not self.names or len(self.names) != len(self.shapes):
            raise ConfigError(
                f"fragment {self.index} has {len(self.names)} names and {len(self.shapes)} shapes; "
                "it needs one shape per name and at least one of them"
            )
        if len(set(self.names)) != len(self.names):
            raise ConfigError(f"fragment {self.index} names a tensor twice: {_some(_repeated(self.names))}")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise ConfigError(f"fragment {self.index} has a negative size in one of its shapes")

    @property
    def numel(self) -> int:
        """Number of values in the fragment."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the fragment as FP32, the way anchors are kept."""
        return FP32_BYTES * self.numel


def split_model(
    model: nn.Module, *, count: int | None = None, max_bytes: int | None = None, pattern: Pattern = "strided"
) -> tuple[FragmentSpec, ...]:
    """Cut the trainable parameters of a model into fragments; each belongs to exactly one.

    Give either ``count`` or ``max_bytes``.

    - ``count``: P fragments, at most one per layer. Strided: what is before the layers, then what is after them, goes
      to the fragment that is smallest at that point; of equals to the first and the last one. Sequential: what is
      before goes with the first layer, what is after with the last one, and the runs are cut so that the largest is
      as small as possible.
    - ``max_bytes``: the smallest P for which no fragment exceeds ``max_bytes``, in FP32 bytes. What is outside the
      layers joins a fragment where it fits, whole or tensor by tensor, and forms fragments of its own where it does
      not (before the layers: first; after: last). Only one thing may exceed the limit: a single outside tensor that
      is larger by itself (often the embedding), which then is a fragment alone. A layer is never cut.

    A model without a list of layers is cut, in the sequential pattern only, into runs of neighbouring tensors.
    Tied weights count once, under the first of their names; frozen parameters are left out.

    Raises:
        ConfigError: if the model cannot be cut like that; names the layer or tensor in the way.
    """
    _check_request(count, max_bytes, pattern)
    anatomy = _dissect(model)
    if anatomy.layers:
        cut = _cut_layers(anatomy, count, max_bytes, pattern)
    else:
        cut = _cut_tensors(anatomy.before, count, max_bytes, pattern)
    place = {tensor.name: index for index, part in enumerate(cut) for tensor in part}
    fragments: list[list[_Tensor]] = [[] for _ in cut]
    for tensor in anatomy.tensors:
        fragments[place[tensor.name]].append(tensor)
    specs = tuple(
        FragmentSpec(index=index, names=tuple(t.name for t in part), shapes=tuple(t.shape for t in part))
        for index, part in enumerate(fragments)
    )
    _check_cover(anatomy.tensors, specs)
    return specs


def layout_digest(specs: Sequence[FragmentSpec]) -> bytes:
    """BLAKE2b-256 over the fragments' names and shapes, in order: equal digests mean equal layouts.

    Every number is a big-endian uint64 and every name is preceded by its length, so no two layouts share an encoding.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"stretto-layout")

    def put(*numbers: int) -> None:
        digest.update(struct.pack(f">{len(numbers)}Q", *numbers))

    put(len(specs))
    for spec in specs:
        put(spec.index, len(spec.names))
        for name, shape in zip(spec.names, spec.shapes, strict=True):
            raw = name.encode()
            put(len(raw))
            digest.update(raw)
            put(len(shape), *shape)
    return digest.digest()


class FragmentedModel:
    """A model and its fragments: copies a fragment's weights out to the host, and back in.

    Parameters are looked up once. Moving or casting the model in place is fine (its ``Parameter`` objects stay);
    after replacing one, make a new ``FragmentedModel``.
    """

    def __init__(self, model: nn.Module, specs: Sequence[FragmentSpec]) -> None:
        """
        Raises:
            ConfigError: if the fragments are not those of this model: a tensor is missing, foreign, in two fragments,
                or of another shape.
        """
        _check_cover(_trainable(model), specs)
        parameters = dict(model.named_parameters())
        self.specs = tuple(specs)
        self._parameters = tuple(tuple(parameters[name] for name in spec.names) for spec in specs)

    def parameters(self, p: int) -> dict[str, nn.Parameter]:
        """The tensors of fragment ``p`` by name, in the order of its spec."""
        return dict(zip(self.specs[p].names, self._parameters[p], strict=True))

    def gather(self, p: int, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Copy fragment ``p`` of the model to the host, as FP32.

        Args:
            p: index of the fragment.
            out: (numel,) float32, contiguous, to be written to; a new array by default.

        Returns:
            (numel,) float32: ``out``, or the new array. It shares no memory with the model.

        Raises:
            LocalProtocolError: if ``out`` is of another kind.
        """
        if out is None:
            out = np.empty(self.specs[p].numel, dtype=np.float32)
        flat = self._flat(p, out, writable=True)
        with torch.no_grad():
            for parameter, part in zip(self._parameters[p], self._parts(p, flat), strict=True):
                part.copy_(parameter)
        return out

    def gather_on_device(self, p: int) -> torch.Tensor:
        """Copy fragment ``p`` to a (numel,) float32 tensor on the device where its weights are."""
        with torch.no_grad():
            return torch.cat([parameter.detach().reshape(-1).float() for parameter in self._parameters[p]])

    def scatter(self, p: int, flat: NDArray[np.float32]) -> None:
        """Write (numel,) float32 into the weights of fragment ``p``, in place, cast to each parameter's dtype.

        Parameters keep their identity, so an optimizer's state stays theirs. Call it between optimizer steps only:
        autograd is not told.

        Raises:
            LocalProtocolError: if ``flat`` is of another kind; the model is untouched.
        """
        source = self._flat(p, flat, writable=False)
        with torch.no_grad():
            for parameter, part in zip(self._parameters[p], self._parts(p, source), strict=True):
                parameter.data.copy_(part)

    def meet(
        self,
        p: int,
        anchor: NDArray[np.float32] | None,
        shift: NDArray[np.float32] | None,
        alpha: float,
    ) -> None:
        """Let a result meet the weights of fragment ``p``, tensor by tensor and in place, where the weights are.

        weights = alpha * weights + (1 - alpha) * anchor, then weights += shift; each part may be None. The arithmetic
        is that of ``stretto.protocol.outer.merge``, bit for bit: FP32, every product and sum rounded on its own. Only
        one tensor's worth of the anchor is on the weights' device at a time.

        Args:
            p: index of the fragment.
            anchor: (numel,) float32 on the host, or None.
            shift: (numel,) float32 on the host, or None.
            alpha: share of the present weights that is kept.

        Raises:
            LocalProtocolError: if an array is of another kind; the model is untouched.
        """
        anchors = None if anchor is None else self._parts(p, self._flat(p, anchor, writable=False))
        shifts = None if shift is None else self._parts(p, self._flat(p, shift, writable=False))
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters[p]):
                weights = parameter.data.float()  # the very weights where they are FP32
                if anchors is not None and alpha != 1.0:
                    _mix(weights, anchors[index].to(weights.device, non_blocking=True), alpha)
                if shifts is not None:
                    weights.add_(shifts[index].to(weights.device, non_blocking=True))
                if parameter.dtype != torch.float32:
                    parameter.data.copy_(weights)

    def _flat(self, p: int, array: NDArray[np.float32], *, writable: bool) -> torch.Tensor:
        """A host array as a (numel,) tensor that shares its memory, once it has the right kind."""
        numel = self.specs[p].numel
        if array.dtype != np.float32 or array.shape != (numel,) or not array.flags.c_contiguous:
            raise LocalProtocolError(
                f"fragment {p} is a contiguous float32 array of shape ({numel},), got {array.dtype} of {array.shape}"
            )
        if not array.flags.writeable:
            if writable:
                raise LocalProtocolError(f"the array to gather fragment {p} into is read-only")
            # torch has no read-only tensors and warns about every array that is one.
            array = array.copy()
        return torch.from_numpy(array)

    def _parts(self, p: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """The flat vector of fragment ``p`` as one view per tensor, shaped like it."""
        spec = self.specs[p]
        pieces = flat.split([math.prod(shape) for shape in spec.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, spec.shapes, strict=True)]


def _mix(weights: torch.Tensor, anchor: torch.Tensor, alpha: float) -> None:
    """weights = alpha * weights + (1 - alpha) * anchor, in place."""
    if alpha == 0.0:
        weights.copy_(anchor)
    elif weights.device.type != "cpu" or not weights.is_contiguous():
        weights.mul_(alpha).add_(anchor * (1.0 - alpha))
    else:
        # In pieces: a temporary as large as the tensor comes page by page, which takes longer than the arithmetic.
        flat, target = weights.view(-1), anchor.reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            part = slice(start, start + PIECE)
            flat[part].mul_(alpha).add_(target[part] * (1.0 - alpha))


def first_not_finite(spec: FragmentSpec, flat: NDArray[np.float32]) -> str | None:
    """The name of the first tensor of a fragment's (numel,) vector that holds a NaN or an infinity, or None."""
    start = 0
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        stop = start + math.prod(shape)
        if not np.isfinite(flat[start:stop]).all():
            return name
        start = stop
    return None


# --- the model's anatomy ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A trainable parameter, without its values."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """FP32 bytes."""
        return FP32_BYTES * math.prod(self.shape)


_Group: TypeAlias = tuple[_Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class _Anatomy:
    """All trainable tensors of a model in order, and the part that each plays."""

    tensors: _Group
    before: _Group
    """Ahead of the layers, or everything if there are none."""
    layers: dict[str, _Group]
    """The layers that have something to train, in order, by name (``model.layers.3``)."""
    after: _Group


def _trainable(model: nn.Module) -> _Group:
    """The trainable tensors in the model's own order, tied ones once under their first name.

    Raises:
        ConfigError: if there is none, if one is not of a floating-point type.
    """
    found: list[_Tensor] = []
    seen: set[tuple[str, int, int]] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"parameter {name} is trainable and of type {parameter.dtype}, but only floating-point weights can be "
                "averaged; freeze it (requires_grad = False) or store it as floating point"
            )
        # Tying usually shares the Parameter object, which named_parameters() reports once; two objects over the same
        # memory are tied as well. On the meta device there is no memory, and every address is 0.
        memory = (str(parameter.device), parameter.data_ptr(), parameter.numel())
        if memory in seen:
            continue
        if parameter.data_ptr():
            seen.add(memory)
        found.append(_Tensor(name=name, shape=tuple(parameter.shape)))
    if not found:
        raise ConfigError("the model has no trainable parameter, so there is nothing to synchronize")
    return tuple(found)


def _dissect(model: nn.Module) -> _Anatomy:
    """Find the layers, and sort all other tensors into those before and those after the first layer's first tensor."""
    tensors = _trainable(model)
    found = _layer_list(model, tensors)
    layers: dict[str, list[_Tensor]] = {}
    before: list[_Tensor] = []
    after: list[_Tensor] = []
    for tensor in tensors:
        if found is not None and tensor.name.startswith(found):
            layers.setdefault(_layer_name(found, tensor), []).append(tensor)
        else:
            (after if layers else before).append(tensor)
    return _Anatomy(
        tensors=tensors,
        before=tuple(before),
        layers={name: tuple(group) for name, group in layers.items()},
        after=tuple(after),
    )


def _layer_list(model: nn.Module, tensors: _Group) -> str | None:
    """The name of the list of layers with a dot at its end, so that it is a prefix of its tensors' names.

    Lists inside a list of two and more are parts of its blocks (experts, say), never the layers.
    """
    best: tuple[int, int] = (0, 0)
    found: str | None = None
    lists: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if not isinstance(module, nn.ModuleList) or any(prefix.startswith(outer) for outer in lists):
            continue
        if len(module) > 1:
            lists.append(prefix)
        weight = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith(prefix))
        if len({type(block) for block in module}) == 1 and weight and (weight, len(module)) > best:
            best, found = (weight, len(module)), prefix
    return found


def _layer_name(prefix: str, tensor: _Tensor) -> str:
    """``model.layers.3`` for the tensor ``model.layers.3.mlp.weight`` of the list ``model.layers.``."""
    return prefix + tensor.name[len(prefix) :].split(".", 1)[0]


# --- cutting ---------------------------------------------------------------------------------------------------------


def _check_request(count: int | None, max_bytes: int | None, pattern: str) -> None:
    if pattern not in get_args(Pattern):
        raise ConfigError(f"there is no fragment pattern {pattern!r}; choose one of {', '.join(get_args(Pattern))}")
    if (count is None) == (max_bytes is None):
        raise ConfigError(
            "say either how many fragments there are or how many bytes one may have, not both or neither"
        )
    if count is not None and count < 1:
        raise ConfigError(f"a model has at least 1 fragment, got a fragment count of {count}")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"a fragment has at least 1 byte, got a limit of {max_bytes}")


def _cut_layers(anatomy: _Anatomy, count: int | None, max_bytes: int | None, pattern: Pattern) -> list[_Group]:
    """Cut a model that has layers; one group of tensors per fragment."""
    layers = list(anatomy.layers.values())
    if count is not None:
        if count > len(layers):
            raise ConfigError(
                f"{count} fragments were asked for, but the model has {len(layers)} trainable layers, and a layer is "
                f"never cut; choose a fragment count of at most {len(layers)}"
            )
        if pattern == "strided":
            return _strided(anatomy, count, None)
        layers[0] = anatomy.before + layers[0]
        layers[-1] = layers[-1] + anatomy.after
        return _runs(layers, count)
    assert max_bytes is not None
    for name, layer in anatomy.layers.items():
        if _size(layer) > max_bytes:
            raise ConfigError(
                f"layer {name} has {_size(layer)} bytes in FP32, more than a fragment's limit of {max_bytes}, and a "
                f"layer is never cut; raise the limit to at least {max(map(_size, layers))} bytes"
            )
    if pattern == "strided":
        return min((_strided(anatomy, p, max_bytes) for p in _counts_that_fit(layers, max_bytes)), key=len)
    units = [(t,) for t in anatomy.before] + layers + [(t,) for t in anatomy.after]
    return _runs(units, _runs_needed([_size(unit) for unit in units], max_bytes))


def _cut_tensors(tensors: _Group, count: int | None, max_bytes: int | None, pattern: Pattern) -> list[_Group]:
    """Cut a model without layers into runs of neighbouring tensors."""
    if pattern == "strided":
        raise ConfigError(
            "the model has no list of layers (an nn.ModuleList of blocks of one class with something to train), so "
            "the strided pattern has nothing to deal out; choose the sequential pattern"
        )
    units = [(tensor,) for tensor in tensors]
    if count is None:
        assert max_bytes is not None
        count = _runs_needed([_size(unit) for unit in units], max_bytes)
    if count > len(units):
        raise ConfigError(
            f"{count} fragments were asked for, but the model has no layers and {len(units)} trainable tensors; "
            f"choose a fragment count of at most {len(units)}"
        )
    return _runs(units, count)


def _counts_that_fit(layers: Sequence[_Group], max_bytes: int) -> list[int]:
    """The numbers of strided fragments, ascending, for which no fragment's layers exceed the limit."""
    sizes = [_size(layer) for layer in layers]
    return [p for p in range(1, len(sizes) + 1) if max(sum(sizes[i::p]) for i in range(p)) <= max_bytes]


def _strided(anatomy: _Anatomy, count: int, max_bytes: int | None) -> list[_Group]:
    """Deal the layers out; what is outside joins the smallest fragment, or stands alone if it exceeds the limit."""
    layers = list(anatomy.layers.values())
    cut = [_joined(layers[p::count]) for p in range(count)]
    first: list[_Group] = []
    last: list[_Group] = []
    for outside, alone in ((anatomy.before, first), (anatomy.after, last)):
        whole = max_bytes is None or min(map(_size, cut)) + _size(outside) <= max_bytes
        rest: list[_Group] = []
        for piece in [outside] if whole else [(tensor,) for tensor in outside]:
            least = min(map(_size, cut))
            ties = [p for p in range(count) if _size(cut[p]) == least]
            if max_bytes is None or least + _size(piece) <= max_bytes:
                cut[ties[0] if alone is first else ties[-1]] += piece
            else:
                rest.append(piece)
        if rest:
            assert max_bytes is not None
            alone += _runs(rest, _runs_needed([_size(piece) for piece in rest], max_bytes))
    return first + cut + last


def _runs_needed(sizes: Sequence[int], cap: int) -> int:
    """The fewest runs of neighbours of at most ``cap`` bytes each; one that is larger by itself stands alone."""
    runs = room = 0
    for size in sizes:
        if not runs or size > room:
            runs += 1
            room = cap
        room -= size
    return runs


def _runs(units: Sequence[_Group], count: int) -> list[_Group]:
    """Cut into exactly ``count`` runs, the largest as small as possible and the others near their average.

    ``count`` is at most the number of units. A unit that exceeds what the others need forms a run of its own.
    """
    sizes = [_size(unit) for unit in units]
    cap, high = 1, max(1, sum(sizes))
    while cap < high:
        middle = (cap + high) // 2
        cap, high = (cap, middle) if _runs_needed(sizes, middle) <= count else (middle + 1, high)
    runs: list[_Group] = []
    start = 0
    for left in range(count, 0, -1):
        rest = sum(sizes[start:])
        stop, total = start + 1, sizes[start]
        # Take the next one while enough remain for the later runs, and either those need it gone, or it brings the run
        # nearer to the average of what is left.
        while len(sizes) - stop >= left and (
            _runs_needed(sizes[stop:], cap) >= left
            or ((2 * total + sizes[stop]) * left <= 2 * rest and total + sizes[stop] <= cap)
        ):
            total += sizes[stop]
            stop += 1
        runs.append(_joined(units[start:stop]))
        start = stop
    return runs


# --- small helpers ---------------------------------------------------------------------------------------------------


def _size(group: _Group) -> int:
    """FP32 bytes of a group of tensors."""
    return sum(tensor.nbytes for tensor in group)


def _joined(groups: Iterable[_Group]) -> _Group:
    """Several groups of tensors as one."""
    return tuple(chain.from_iterable(groups))


def _repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in order."""
    return [name for name, times in Counter(names).items() if times > 1]


def _some(names: Sequence[str]) -> str:
    """Up to three names for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_cover(tensors: _Group, specs: Sequence[FragmentSpec]) -> None:
    """Refuse fragments that do not hold every trainable tensor of a model exactly once.

    Raises:
        ConfigError: naming the tensors.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    held = [name for spec in specs for name in spec.names]
    once = set(held)
    checks = (
        ("in more than one fragment", _repeated(held)),
        ("in no fragment", [name for name in shapes if name not in once]),
        ("in a fragment, but not trainable parameters of this model", [name for name in held if name not in shapes]),
        (
            "of another shape in the model than in their fragment",
            [n for spec in specs for n, shape in zip(spec.names, spec.shapes, strict=True) if shapes.get(n) != shape],
        ),
    )
    for fault, names in checks:
        if names:
            raise ConfigError(f"the fragments do not fit the model: {fault} are {_some(names)}")
    if [spec.index for spec in specs] != list(range(len(specs))):
        raise ConfigError(f"fragments are numbered 0 to {len(specs) - 1} in order, got {[s.index for s in specs]}")
