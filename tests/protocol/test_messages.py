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
from stretto.protocol.chain import CommitRecord, Member, Part, SignedRecord, Tip
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock

ID_START = b"\x00\x24\x08\x01\x12\x20"
A, B, C = (ID_START + bytes([byte]) * 32 for byte in (0xAA, 0xBB, 0xCC))
D1, D2 = b"\x11" * 32, b"\x22" * 32
ALICE, BOB = Member(A, 1000, D1, 1.5), Member(B, 70_000, D2)
CLOCK = Clock(round=8, at=123.5, interval=2.0)
TIP = Tip(fragment=3, version=2, head=D1, tokens_total=71_000, electors=(A, B))
RECORD = CommitRecord(
    run=D1, fragment=3, round=7, version=2, prev=D2, members=(ALICE, BOB), electors=(A, B, C), state=D1,
    tokens_total=71_000, clock=CLOCK, coordinator=B, parts=(Part(512, D2), Part(700, D1)),
)  # fmt: skip
SIGNED = SignedRecord(RECORD, b"\x99" * 64)

EXAMPLES: dict[str, Any] = {
    "Join": m.Join(3, 7, D1, 2, ALICE, 0.5, 4.0, (B,), 2.5e6),
    "Group": m.Group(3, 7, (ALICE, BOB), (m.Share(A, 512), m.Share(B, 700)), 10.0),
    "Redirect": m.Redirect(3, 7, B),
    "Behind": m.Behind(3, 7, TIP),
    "Have": m.Have(3, 7, 1, (A, B)),
    "Commit": m.Commit(3, 7, SIGNED),
    "Abort": m.Abort(3, 7, "no quorum"),
    "Ask": m.Ask(3, 7),
    "Plan": m.Plan(3, 7, 1, (A, B), (B, B)),
    "Averaged": m.Averaged(3, 7, 1, (D1, D2)),
    "Push": m.Push(3, 7, D2, 1, D1, 4096),
    "Average": m.Average(3, 7, D2, 1, 0, D1, 4096),
    "Fetch": m.Fetch(3, 7, D1),
    "Payload": m.Payload(D1, 4096),
    "FetchState": m.FetchState(3),
    "State": m.State(3, TIP, SIGNED, CLOCK, D2, 8192, 5000, (D1, D2)),
    "FetchChunk": m.FetchChunk(3, D1, 1),
    "FetchRecords": m.FetchRecords(3, D1),
    "Records": m.Records((SIGNED,)),
    "FetchLogged": m.FetchLogged(3, 2, D1),
    "FetchTime": m.FetchTime(123.5),
    "Time": m.Time(123.5, 124.0, 124.5, -0.25),
    "FetchRun": m.FetchRun(),
    "SignedRun": m.SignedRun(b"config", A, b"\x99" * 64),
    "Busy": m.Busy(4.0),
    "Missing": m.Missing("not here"),
    "Done": m.Done(),
}

_A, _B, _C = A.hex(), B.hex(), C.hex()
_11, _22, _99 = "11" * 32, "22" * 32, "99" * 64
_MEMBERS = (
    f"9294c426 {_A} cd03e8c420 {_11} cb3ff8000000000000"
    f"94c426 {_B} ce00011170c420 {_22} cb0000000000000000"
)  # fmt: skip
_SIGNED = (
    f"929cc420 {_11} 030702c420 {_22} {_MEMBERS} 93c426 {_A} c426 {_B} c426 {_C} c420 {_11} "
    f"ce000115589308cb405ee00000000000cb4000000000000000c426 {_B} 9292cd0200c420 {_22} 92cd02bcc420 {_11} c440 {_99}"
)
GOLDEN: dict[str, str] = {
    "Join": (
        f"9200990307c420 {_11} 0294c426 {_A} cd03e8c420 {_11} cb3ff8000000000000cb3fe0000000000000"
        f"cb401000000000000091c426 {_B} cb414312d000000000"
    ),
    "Group": f"9201950307 {_MEMBERS} 9292c426 {_A} cd020092c426 {_B} cd02bccb4024000000000000",
    "Redirect": f"9202930307c426 {_B}",
    "Behind": f"9203930307960302c420 {_11} ce0001155892c426 {_A} c426 {_B} 00",
    "Have": f"92049403070192c426 {_A} c426 {_B}",
    "Commit": f"9205930307 {_SIGNED}",
    "Abort": "9206930307a96e6f2071756f72756d",
    "Ask": "9207920307",
    "Plan": f"92089503070192c426 {_A} c426 {_B} 92c426 {_B} c426 {_B}",
    "Averaged": f"92099403070192c420 {_11} c420 {_22}",
    "Push": f"920a960307c420 {_22} 01c420 {_11} cd1000",
    "Average": f"920b970307c420 {_22} 0100c420 {_11} cd1000",
    "Fetch": f"920c930307c420 {_11}",
    "Payload": f"920d92c420 {_11} cd1000",
    "FetchState": "920e9103",
    "State": (
        f"920f9803960302c420 {_11} ce0001155892c426 {_A} c426 {_B} 00 {_SIGNED} "
        f"9308cb405ee00000000000cb4000000000000000c420 {_22} cd2000cd138892c420 {_11} c420 {_22}"
    ),
    "FetchChunk": f"92109303c420 {_11} 01",
    "FetchRecords": f"92119203c420 {_11}",
    "Records": f"92129191 {_SIGNED}",
    "FetchLogged": f"9213930302c420 {_11}",
    "FetchTime": "921491cb405ee00000000000",
    "Time": "921594cb405ee00000000000cb405f000000000000cb405f200000000000cbbfd0000000000000",
    "FetchRun": "921690",
    "SignedRun": f"921793c406636f6e666967c426 {_A} c440 {_99}",
    "Busy": "921891cb4010000000000000",
    "Missing": "921991a86e6f742068657265",
    "Done": "921a90",
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
    [[len(m._KINDS), []], [-1, []], ["0", []], [True, []], [0.0, []], [22], [22, [], []], 22, None, {"a": 1}],
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
        [4, [3, 7, 0, [A, wrong]]],
        [0, [3, 7, D1, 2, [wrong, 1, D1, 0.0], 0.5, 4.0, [], 0.0]],
        [0, [3, 7, D1, 2, [A, 1, D1, 0.0], 0.5, 4.0, [wrong], 0.0]],
        [1, [3, 7, [[A, 1, D1, 0.0]], [[wrong, 700]], 10.0]],
        [3, [3, 7, [3, 2, D1, 9, [wrong], 0]]],
        [8, [3, 7, 1, [wrong], [A]]],
        [8, [3, 7, 1, [A], [wrong]]],
        [23, [b"config", wrong, bytes(64)]],
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
        (_changed("Join", uplink=-1.0), "uplink -1.0 is not a rate"),
        (_changed("Join", uplink=1e13), "uplink 10000000000000.0 is not a rate"),
        (_changed("Join", uplink=float("nan")), "uplink nan is not a rate"),
        (_changed("Group", shares=(m.Share(A, 700), m.Share(B, 700))), "parts are empty or not in order"),
        (_changed("Group", shares=(m.Share(A, 0), m.Share(B, 700))), "parts are empty or not in order"),
        (_changed("Group", shares=tuple(m.Share(A, i + 1) for i in range(1025))), "1025 parts, allowed are 1024"),
        (_changed("Group", shares=(m.Share(A, 512), m.Share(C, 700))), "a reducer is no member of the group"),
        (_changed("Plan", attempt=0), "attempt 0 is not in 1..99"),
        (_changed("Plan", attempt=100), "attempt 100 is not in 1..99"),
        (_changed("Plan", counted=()), "0 counted members, allowed are 1 to 256"),
        (_changed("Plan", counted=(B, A)), "counted members are not in peer-id order or named twice"),
        (_changed("Plan", reducers=()), "0 parts, allowed are 1 to 1024"),
        (_changed("Plan", reducers=(A,) * 1025), "1025 parts, allowed are 1 to 1024"),
        (_changed("Averaged", parts=()), "0 parts, allowed are 1 to 1024"),
        (_changed("Averaged", parts=(D1,) * 1025), "1025 parts, allowed are 1 to 1024"),
        (_changed("Averaged", parts=(D1, D2[:-1])), "part must have 32 bytes, has 31"),
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
        (_changed("Push", group=b""), "group must have 32 bytes, has 0"),
        (_changed("Push", part=-1), "part -1 is not a count"),
        (_changed("Average", attempt=-1), "attempt -1 is not a count"),
        (_changed("Average", group=D1[1:]), "group must have 32 bytes, has 31"),
        (_changed("Average", nbytes=2**63), "nbytes 9223372036854775808 is not a count"),
        (_changed("Fetch", payload=D1 * 2), "payload must have 32 bytes, has 64"),
        (_changed("Payload", nbytes=2**63), "nbytes 9223372036854775808 is not a count"),
        (_changed("State", digest=b""), "digest must have 32 bytes"),
        (_changed("State", nbytes=-5), "nbytes -5 is not a count"),
        (_changed("State", chunk_bytes=0), "2 chunks of 0 bytes do not make 8192"),
        (_changed("State", chunks=(D1,)), "1 chunks of 5000 bytes do not make 8192"),
        (_changed("State", chunks=(D1, D1, D1)), "3 chunks of 5000 bytes do not make 8192"),
        (_changed("State", nbytes=4097, chunk_bytes=1, chunks=(D1,) * 4097), "4097 chunks, allowed are 4096"),
        (_changed("State", chunks=(D1, b"")), "chunk must have 32 bytes, has 0"),
        (_changed("FetchChunk", index=-1), "index -1 is not a count"),
        (_changed("FetchChunk", head=b""), "head must have 32 bytes, has 0"),
        (_changed("Records", records=(SIGNED,) * 65), "65 records, allowed are 64"),
        (_changed("FetchRecords", head=b""), "head must have 32 bytes, has 0"),
        (_changed("FetchLogged", version=-1), "version -1 is not a count"),
        (_changed("FetchTime", sent=float("nan")), "time nan is not a time"),
        (_changed("Time", answered=float("inf")), "time inf is not a time"),
        (_changed("Busy", seconds=-1.0), "seconds -1.0 is not a duration"),
        (_changed("FetchState", fragment=-1), "fragment -1 is not a count"),
        (_changed("SignedRun", signature=bytes(63)), "signature has"),
        (lambda: SignedRecord(RECORD, bytes(65)), "signature has 65 bytes, not 64"),
        (lambda: Member(A, -1, D1), "tokens -1"),
        (lambda: Member(A, 2**40 + 1, D1), "tokens 1099511627777"),
        (lambda: Member(A, 1, D1, -1.0), "norm -1.0"),
        (lambda: Member(A, 1, D1, float("nan")), "norm nan"),
        (lambda: Member(A, 1, D1, 1.1e30), "norm 1.1e\\+30"),
        (lambda: Part(256, D1[1:]), "payload must have 32 bytes, has 31"),
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
        m.decode(wire.pack([0, [3, 7, D1, 2, [A, 1, D1, 0.0], -1.0, 4.0, [], 0.0]]))
    with pytest.raises(RemoteProtocolError, match=r"Join\.member: tokens -1"):
        m.decode(wire.pack([0, [3, 7, D1, 2, [A, -1, D1, 0.0], 1.0, 4.0, [], 0.0]]))
    with pytest.raises(RemoteProtocolError, match=r"Join\.member: norm nan"):
        m.decode(wire.pack([0, [3, 7, D1, 2, [A, 1, D1, float("nan")], 1.0, 4.0, [], 0.0]]))


def test_a_message_that_is_too_long_is_refused() -> None:
    long = wire.pack([23, [bytes(wire.MAX_MESSAGE), A, bytes(64)]])
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
