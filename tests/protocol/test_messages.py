"""Every message: its golden bytes, its limits, and that nothing from the network raises anything unexpected.

A golden value that changes means that older peers no longer understand: raise ``PROTOCOL_VERSION`` with it.
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol import messages as m
from stretto.protocol import wire
from stretto.protocol.chain import CommitRecord, Member, SignedRecord, Tip
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock

ID_START = b"\x00\x24\x08\x01\x12\x20"
A, B, C = (ID_START + bytes([byte]) * 32 for byte in (0xAA, 0xBB, 0xCC))
D1, D2 = b"\x11" * 32, b"\x22" * 32
ALICE, BOB = Member(A, 1000, D1), Member(B, 70_000, D2)
CLOCK = Clock(round=8, at=123.5, interval=2.0)
TIP = Tip(fragment=3, version=2, head=D1, tokens_total=71_000, electors=(A, B))
RECORD = CommitRecord(
    run=D1, fragment=3, round=7, version=2, prev=D2, members=(ALICE, BOB), electors=(A, B, C), state=D1,
    tokens_total=71_000, clock=CLOCK, coordinator=B,
)  # fmt: skip
SIGNED = SignedRecord(RECORD, b"\x99" * 64)

EXAMPLES: dict[str, Any] = {
    "Join": m.Join(3, 7, D1, 2, ALICE, 0.5, 4.0, (B,)),
    "Group": m.Group(3, 7, (ALICE, BOB), 10.0),
    "Redirect": m.Redirect(3, 7, B),
    "Behind": m.Behind(3, 7, TIP),
    "Have": m.Have(3, 7, (A, B)),
    "Commit": m.Commit(3, 7, SIGNED),
    "Abort": m.Abort(3, 7, "no quorum"),
    "Ask": m.Ask(3, 7),
    "Push": m.Push(3, 7, D1, 4096),
    "Fetch": m.Fetch(3, 7, D1),
    "FetchState": m.FetchState(3),
    "Payload": m.Payload(D1, 4096),
    "State": m.State(3, TIP, SIGNED, CLOCK, D2, 8192),
    "FetchRun": m.FetchRun(),
    "SignedRun": m.SignedRun(b"config", A, b"\x99" * 64),
    "Missing": m.Missing("not here"),
    "Done": m.Done(),
}

_A, _B, _C = A.hex(), B.hex(), C.hex()
_11, _22, _99 = "11" * 32, "22" * 32, "99" * 64
GOLDEN: dict[str, str] = {
    "Join": f"9200980307c420 {_11} 0293c426 {_A} cd03e8c420 {_11} cb3fe0000000000000cb401000000000000091c426 {_B}",
    "Group": f"92019403079293c426 {_A} cd03e8c420 {_11} 93c426 {_B} ce00011170c420 {_22} cb4024000000000000",
    "Redirect": f"9202930307c426 {_B}",
    "Behind": f"9203930307950302c420 {_11} ce0001155892c426 {_A} c426 {_B}",
    "Have": f"920493030792c426 {_A} c426 {_B}",
    "Commit": (
        f"9205930307929bc420 {_11} 030702c420 {_22} 9293c426 {_A} cd03e8c420 {_11} 93c426 {_B} "
        f"ce00011170c420 {_22} 93c426 {_A} c426 {_B} c426 {_C} c420 {_11} "
        f"ce000115589308cb405ee00000000000cb4000000000000000c426 {_B} c440 {_99}"
    ),
    "Abort": "9206930307a96e6f2071756f72756d",
    "Ask": "9207920307",
    "Push": f"9208940307c420 {_11} cd1000",
    "Fetch": f"9209930307c420 {_11}",
    "FetchState": "920a9103",
    "Payload": f"920b92c420 {_11} cd1000",
    "State": (
        f"920c9603950302c420 {_11} ce0001155892c426 {_A} c426 {_B} 929bc420 {_11} 030702c420 {_22} "
        f"9293c426 {_A} cd03e8c420 {_11} 93c426 {_B} ce00011170c420 {_22} 93c426 {_A} c426 {_B} c426 {_C} "
        f"c420 {_11} ce000115589308cb405ee00000000000cb4000000000000000c426 {_B} c440 {_99} "
        f"9308cb405ee00000000000cb4000000000000000c420 {_22} cd2000"
    ),
    "FetchRun": "920d90",
    "SignedRun": f"920e93c406636f6e666967c426 {_A} c440 {_99}",
    "Missing": "920f91a86e6f742068657265",
    "Done": "921090",
}


def test_every_kind_has_an_example_and_golden_bytes() -> None:
    kinds = [kind.__name__ for kind in m._KINDS]
    assert list(EXAMPLES) == kinds
    assert list(GOLDEN) == kinds


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes(name: str) -> None:
    assert m.encode(EXAMPLES[name]).hex(" ") == bytes.fromhex(GOLDEN[name]).hex(" ")


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip(name: str) -> None:
    assert m.decode(bytes.fromhex(GOLDEN[name])) == EXAMPLES[name]
    assert m.decode(memoryview(m.encode(EXAMPLES[name])), type(EXAMPLES[name])) == EXAMPLES[name]


def test_another_kind_than_expected_is_named() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^Ask where Join or Commit was expected$"):
        m.decode(m.encode(m.Ask(0, 0)), m.Join, m.Commit)


@pytest.mark.parametrize(
    "plain",
    [[len(m._KINDS), []], [-1, []], ["0", []], [True, []], [0.0, []], [13], [13, [], []], 13, None, {"a": 1}],
)
def test_unknown_kinds_are_refused(plain: object) -> None:
    with pytest.raises(RemoteProtocolError, match="not a message of this protocol version"):
        m.decode(wire.pack(plain))


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_field_more_or_less_is_refused(name: str) -> None:
    tag, fields = wire.unpack(m.encode(EXAMPLES[name]))
    for changed in ([*fields, 0], fields[:-1] if fields else None):
        with pytest.raises(RemoteProtocolError, match=f"{name}: expected a list of {len(fields)} fields"):
            m.decode(wire.pack([tag, changed]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_another_type_are_refused(name: str) -> None:
    tag, fields = wire.unpack(m.encode(EXAMPLES[name]))
    for index in range(len(fields)):
        changed = list(fields)
        changed[index] = {"a": 1}
        with pytest.raises(RemoteProtocolError, match=rf"{name}\.\w+: expected"):
            m.decode(wire.pack([tag, changed]))


WRONG_IDS = [b"", A[:-1], A + b"\x00", b"\x12" + A[1:], bytes(38)]


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_bad_peer_ids_are_refused(wrong: bytes) -> None:
    for message in (
        [2, [3, 7, wrong]],
        [4, [3, 7, [A, wrong]]],
        [0, [3, 7, D1, 2, [wrong, 1, D1], 0.5, 4.0, []]],
        [0, [3, 7, D1, 2, [A, 1, D1], 0.5, 4.0, [wrong]]],
        [3, [3, 7, [3, 2, D1, 9, [wrong]]]],
        [14, [b"config", wrong, bytes(64)]],
    ):
        with pytest.raises(RemoteProtocolError, match="not an Ed25519 peer id"):
            m.decode(wire.pack(message))


def _changed(name: str, **fields: Any) -> Any:
    return lambda: dataclasses.replace(EXAMPLES[name], **fields)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_changed("Join", round=-1), "round -1 is not a count"),
        (_changed("Join", fragment=2**62 + 1), "fragment 4611686018427387905 is not a count"),
        (_changed("Join", head=D1[:-1]), "head must have 32 bytes, has 31"),
        (_changed("Join", rate=0.0), "step rate 0.0 is not positive and finite"),
        (_changed("Join", rate=float("nan")), "step rate nan"),
        (_changed("Join", rate=float("inf")), "step rate inf"),
        (_changed("Join", patience=-1.0), "patience -1.0 is not a duration"),
        (_changed("Join", patience=float("nan")), "patience nan is not a duration"),
        (_changed("Join", tried=(B,) * 257), "too many peers tried"),
        (_changed("Group", seconds=float("inf")), "seconds inf is not a duration"),
        (_changed("Group", members=()), "0 members, allowed are 1 to 256"),
        (_changed("Group", members=(BOB, ALICE)), "not in peer-id order or named twice"),
        (_changed("Group", members=(ALICE, ALICE)), "not in peer-id order or named twice"),
        (_changed("Have", peers=(A,) * 257), "too many peers"),
        (_changed("Abort", reason="x" * 301), "reason too long"),
        (_changed("Missing", reason="x" * 301), "reason too long"),
        (_changed("Commit", round=8), "commit of another round inside"),
        (_changed("Commit", fragment=2), "commit of another round inside"),
        (_changed("Push", nbytes=-1), "nbytes -1 is not a count"),
        (_changed("Push", payload=b""), "payload must have 32 bytes, has 0"),
        (_changed("Fetch", payload=D1 * 2), "payload must have 32 bytes, has 64"),
        (_changed("Payload", nbytes=2**63), "nbytes 9223372036854775808 is not a count"),
        (_changed("State", digest=b""), "digest must have 32 bytes"),
        (_changed("State", nbytes=-5), "nbytes -5 is not a count"),
        (_changed("FetchState", fragment=-1), "fragment -1 is not a count"),
        (_changed("SignedRun", signature=bytes(63)), "signature has"),
        (lambda: SignedRecord(RECORD, bytes(65)), "signature has 65 bytes, not 64"),
        (lambda: Member(A, -1, D1), "tokens -1"),
        (lambda: Member(A, 2**40 + 1, D1), "tokens 1099511627777"),
        (lambda: Clock(-1, 0.0, 1.0), "clock round -1"),
        (lambda: Clock(0, float("nan"), 1.0), "clock time nan"),
        (lambda: Clock(0, 1e300, 1.0), "clock time 1e\\+300"),
        (lambda: Clock(0, 0.0, 0.0), "clock interval 0.0"),
        (lambda: Clock(0, 0.0, float("nan")), "clock interval nan"),
        (lambda: Clock(0, 0.0, 1e9), "clock interval 1000000000.0"),
    ],
)
def test_limits(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_limits_broken_by_a_peer_are_its_fault() -> None:
    with pytest.raises(RemoteProtocolError, match=r"Join: step rate -1\.0 is not positive and finite"):
        m.decode(wire.pack([0, [3, 7, D1, 2, [A, 1, D1], -1.0, 4.0, []]]))
    with pytest.raises(RemoteProtocolError, match=r"Join\.member: tokens -1"):
        m.decode(wire.pack([0, [3, 7, D1, 2, [A, -1, D1], 1.0, 4.0, []]]))


def test_a_message_that_is_too_long_is_refused() -> None:
    long = wire.pack([14, [bytes(wire.MAX_MESSAGE), A, bytes(64)]])
    with pytest.raises(RemoteProtocolError, match="the limit is 262144"):
        m.decode(long)


def _is_harmless(data: bytes) -> None:
    try:
        message = m.decode(data)
    except RemoteProtocolError:
        return
    assert m.decode(m.encode(message)) == message


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_a_remote_error(data: bytes) -> None:
    _is_harmless(data)


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.sampled_from([b"", A, B, D1, D2, bytes(64)])
)  # fmt: skip
nested = st.recursive(scalars, lambda inner: st.lists(inner, max_size=8), max_leaves=20)


@given(st.integers(0, len(m._KINDS) - 1), st.lists(nested, max_size=8))
def test_random_fields_raise_nothing_but_a_remote_error(tag: int, fields: list[Any]) -> None:
    _is_harmless(wire.pack([tag, fields]))


@given(st.sampled_from(list(EXAMPLES)), st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_byte_raises_nothing_but_a_remote_error(name: str, where: int, byte: int) -> None:
    data = bytearray(m.encode(EXAMPLES[name]))
    data[where % len(data)] = byte
    _is_harmless(bytes(data))


@given(st.sampled_from(list(EXAMPLES)), st.integers(0, 10_000))
def test_a_message_cut_short_is_refused(name: str, length: int) -> None:
    data = m.encode(EXAMPLES[name])
    with pytest.raises(RemoteProtocolError):
        m.decode(data[: length % len(data)])
