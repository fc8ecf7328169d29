"""Bytes on the wire and in signatures: frozen dataclasses as msgpack arrays, the same bytes on every machine.

A dataclass becomes an array of its field values in the order of declaration, recursively; there are no maps and no
extension types, so one value has exactly one encoding and can be hashed and signed. Reading is strict: the annotated
type of every field is checked, sizes are bounded before msgpack allocates, and whatever is wrong is the sender's
fault (``RemoteProtocolError``). This is the only file that knows msgpack.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

from stretto.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError

T = TypeVar("T")

MAX_MESSAGE = 256 * 1024
"""Largest control message or record in bytes. Tensors never travel inside one."""

_LEAVES = frozenset({bool, bytes, float, int, str, type(None)})


def pack(value: object) -> bytes:
    """msgpack bytes of plain values (None, bool, int, float, str, bytes, lists, and dicts with sorted str keys)."""
    return typing.cast(bytes, msgpack.packb(_sorted(value), use_bin_type=True))


def unpack(data: bytes | memoryview, max_bytes: int = MAX_MESSAGE) -> Any:
    """The plain value of ``data``; lists come back as lists.

    Raises RemoteProtocolError if it is longer than ``max_bytes`` or is not exactly one msgpack value.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"message of {len(data)} bytes, the limit is {max_bytes}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a msgpack message: {error}") from None


def encode(message: object) -> bytes:
    """Canonical bytes of a dataclass instance."""
    data = typing.cast(bytes, msgpack.packb(to_plain(message), use_bin_type=True))
    if len(data) > MAX_MESSAGE:
        raise LocalProtocolError(f"{type(message).__name__} has {len(data)} bytes, the limit is {MAX_MESSAGE}")
    return data


def decode(cls: type[T], data: bytes | memoryview) -> T:
    """A ``cls`` from its canonical bytes; RemoteProtocolError if they are not one."""
    return from_plain(cls, unpack(data))


def to_plain(value: object) -> Any:
    """Nested lists of msgpack types for a dataclass, a tuple or a plain value; maps with their keys sorted."""
    if type(value) in _LEAVES:
        return value
    kind: type = type(value)
    names = _field_names(kind)
    if names is not None:
        return [to_plain(getattr(value, name)) for name in names]
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(value[key]) for key in sorted(value)}
    return value


def from_plain(cls: type[T], plain: Any) -> T:
    """The inverse of ``to_plain`` for a dataclass, with every field checked against its annotation."""
    value = _parse(cls, plain, cls.__name__)
    return typing.cast(T, value)


@functools.cache
def _field_names(cls: type) -> tuple[str, ...] | None:
    """The fields of a dataclass in order, None for another type; looked up for every value that is sent."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _parse(kind: Any, plain: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type, kind), plain, where)
    origin = typing.get_origin(kind)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(plain, list):
            raise RemoteProtocolError(f"{where}: expected a list, got {type(plain).__name__}")
        return tuple(_parse(item, value, f"{where}[{i}]") for i, value in enumerate(plain))
    if origin in (typing.Union, types.UnionType):
        if plain is None:
            return None
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return _parse(inner, plain, where)
    if kind is float and type(plain) in (int, float):
        return float(plain)
    if type(plain) is not kind:
        raise RemoteProtocolError(f"{where}: expected {kind.__name__}, got {type(plain).__name__}")
    return plain


def _parse_dataclass(kind: type, plain: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(plain, list) or len(plain) != len(hints):
        raise RemoteProtocolError(f"{where}: expected a list of {len(hints)} fields")
    fields = {
        name: _parse(hint, value, f"{where}.{name}") for (name, hint), value in zip(hints.items(), plain, strict=True)
    }
    try:
        return kind(**fields)
    except (ValueError, ProtocolError) as error:
        raise RemoteProtocolError(f"{where}: {error}") from None


def _sorted(value: object) -> object:
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value
