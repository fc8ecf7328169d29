"""The encoding below all messages: one value, one sequence of bytes; strict reading; bounded sizes."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol import wire
from stretto.protocol.errors import LocalProtocolError, RemoteProtocolError


@dataclass(frozen=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True)
class Shape:
    name: str
    body: bytes
    points: tuple[Point, ...]
    closed: bool
    tag: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a shape needs a name")


SHAPE = Shape("tri", b"\x01", (Point(1, 2.0), Point(-3, 0.5)), True)


def test_a_dataclass_is_an_array_of_its_fields() -> None:
    golden = "95 a3747269 c40101 92 9201cb4000000000000000 92fdcb3fe0000000000000 c3 c0"
    assert wire.encode(SHAPE) == bytes.fromhex(golden)


def test_round_trip() -> None:
    assert wire.decode(Shape, wire.encode(SHAPE)) == SHAPE


def test_maps_are_sorted_at_every_depth() -> None:
    a = wire.pack({"b": {"y": 1, "x": [{"q": 1, "p": 2}]}, "a": 0})
    b = wire.pack({"a": 0, "b": {"x": [{"p": 2, "q": 1}], "y": 1}})
    assert a == b == bytes.fromhex("82a16100a16282a1789182a17002a17101a17901")


@pytest.mark.parametrize(
    ("plain", "where"),
    [
        (["tri", b"", [], True], "Shape: expected a list of 5 fields"),
        (["tri", b"", [], True, None, 0], "Shape: expected a list of 5 fields"),
        ("tri", "Shape: expected a list of 5 fields"),
        ([b"tri", b"", [], True, None], "Shape.name: expected str, got bytes"),
        (["tri", "", [], True, None], "Shape.body: expected bytes, got str"),
        (["tri", b"", {}, True, None], "Shape.points: expected a list, got dict"),
        (["tri", b"", [[1]], True, None], r"Shape.points\[0\]: expected a list of 2 fields"),
        (["tri", b"", [[1, 2.0], ["1", 2.0]], True, None], r"Shape.points\[1\].x: expected int, got str"),
        (["tri", b"", [[True, 2.0]], True, None], r"Shape.points\[0\].x: expected int, got bool"),
        (["tri", b"", [[1, True]], True, None], r"Shape.points\[0\].y: expected float, got bool"),
        (["tri", b"", [], 1, None], "Shape.closed: expected bool, got int"),
        (["tri", b"", [], True, 7], "Shape.tag: expected str, got int"),
        (["", b"", [], True, None], "Shape: a shape needs a name"),
    ],
)
def test_what_does_not_fit_the_types_is_named(plain: object, where: str) -> None:
    with pytest.raises(RemoteProtocolError, match=where):
        wire.decode(Shape, wire.pack(plain))


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert wire.decode(Point, wire.pack([1, 2])) == Point(1, 2.0)


def test_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="message of 262145 bytes, the limit is 262144"):
        wire.unpack(bytes(wire.MAX_MESSAGE + 1))
    with pytest.raises(RemoteProtocolError, match="message of 5 bytes, the limit is 4"):
        wire.unpack(b"\xa4abcd", max_bytes=4)
    assert wire.unpack(b"\xa3abc", max_bytes=4) == "abc"


def test_an_own_message_that_is_too_long_is_a_bug_here() -> None:
    with pytest.raises(LocalProtocolError, match="Shape has"):
        wire.encode(Shape("big", bytes(wire.MAX_MESSAGE), (), False))


@pytest.mark.parametrize(
    "data",
    [
        b"",  # nothing
        b"\x92\x01",  # one item short
        b"\x01\x01",  # something behind the value
        b"\xdd\xff\xff\xff\xff",  # a list that claims four thousand million items
        b"\xc6\xff\xff\xff\xff",  # bytes that claim 4 GiB
        b"\xa1\xff",  # text that is not UTF-8
        b"\x81\x01\x02",  # a map whose key is a number
        b"\xc1",  # a byte that msgpack never uses
        b"\x91" * 100_000,  # lists nested without end
    ],
)
def test_what_is_not_one_msgpack_value_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a msgpack message"):
        wire.unpack(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    try:
        shape = wire.decode(Shape, data)
    except RemoteProtocolError:
        return
    assert isinstance(shape, Shape)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(plain_values)
def test_random_values_of_other_shapes_raise_nothing_else(plain: object) -> None:
    try:
        shape = wire.decode(Shape, wire.pack(plain))
    except RemoteProtocolError:
        return
    assert isinstance(shape, Shape)
