"""Invites and bootstrap addresses: what a person may mistype is quoted back, before anything touches the network."""

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.protocol import wire
from stretto.protocol.digest import digest
from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import MAX_ADDRESSES, Invite, check_address

ID = "12D3KooWNTCSWSfcmforVpHLCTkABVQV92PGyaTpStzjH4XvcF38"  # a key of 32 bytes 0xbb
OPERATOR = b"\x00\x24\x08\x01\x12\x20" + b"\xaa" * 32
GOOD = f"/ip4/203.0.113.5/tcp/4001/p2p/{ID}"
INVITE = Invite(b"\x11" * 32, OPERATOR, (GOOD, f"/dns4/home.example/tcp/14001/p2p/{ID}"))


@pytest.mark.parametrize(
    "address",
    [
        GOOD,
        f"/ip6/2001:db8::1/tcp/4001/p2p/{ID}",
        f"/dns4/home.example/tcp/1/p2p/{ID}",
        f"/dns/bootstrap/tcp/65535/p2p/{ID}",
        f"/dns6/home.example/udp/4001/quic-v1/p2p/{ID}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{ID}/p2p-circuit/p2p/{ID}",
        f"/dns4/nosuch.invalid/tcp/4001/p2p/{ID}",  # well formed: whether the name exists is the network's matter
    ],
)
def test_good_addresses_pass(address: str) -> None:
    assert check_address(address) == address


BAD_ADDRESSES = [
    ("/ip/10.0.0.1/tcp/1/p2p/Q", "'/ip' is no address family"),
    (f"/ ip4/10.0.0.1/tcp/4001/p2p/{ID}", f"'/ ip4/10.0.0.1/tcp/4001/p2p/{ID}' contains a blank"),
    (GOOD + " ", "contains a blank"),
    (GOOD + "\n", "contains a blank"),
    ("/ip4/203.0.113.5/tcp/4001", "the part /p2p/PEER_ID is missing"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/{ID[:-1]}", f"{ID[:-1]!r} is not a whole peer id"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/{ID[:20]}", f"{ID[:20]!r} is not a whole peer id"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/{ID}x", f"'{ID}x' is not a whole peer id"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/{ID[:-1]}0", f"'{ID[:-1]}0' is not a whole peer id"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/{'1' * 52}", f"'{'1' * 52}' is not a whole peer id"),
    (f"/ip4/203.0.113.5/tcp/4001/p2p/1{'z' * 51}", "is not a whole peer id"),
    ("/ip4/203.0.113.5/tcp/4001/p2p/", "'tcp/4001/p2p/' is not a port followed by a peer id"),
    (f"203.0.113.5:4001/p2p/{ID}", "it starts with '203.0.113.5:4001' instead of a slash"),
    (f"/ip4/203.0.113.5/4001/p2p/{ID}", f"'4001/p2p/{ID}' is not a port followed by a peer id"),
    (f"/ip4/203.0.113.5/tcp/abc/p2p/{ID}", "is not a port followed by a peer id"),
    (f"/ip4/203.0.113.5/tcp/٤٠٠١/p2p/{ID}", "is not a port followed by a peer id"),
    (f"/ip4/203.0.113.5/tcp/0/p2p/{ID}", "port 0 is not in 1..65535"),
    (f"/ip4/203.0.113.5/tcp/65536/p2p/{ID}", "port 65536 is not in 1..65535"),
    (f"/ip4/203.0.113.555/tcp/4001/p2p/{ID}", "'203.0.113.555' is not an ip4 address"),
    (f"/ip4/home.example/tcp/4001/p2p/{ID}", "'home.example' is not an ip4 address"),
    (f"/ip6/203.0.113.5/tcp/4001/p2p/{ID}", "'203.0.113.5' is not an ip6 address"),
    (f"/unix/tmp/tcp/4001/p2p/{ID}", "'/unix' is no address family"),
    ("", "it is empty"),
    ("/", "'/' is no address family"),
    (f"/dns4/{'x' * 300}/tcp/4001/p2p/{ID}", "is not of the form /ip4/HOST/tcp/PORT/p2p/PEER_ID"),
]


@pytest.mark.parametrize(("address", "quoted"), BAD_ADDRESSES)
def test_c4_each_malformed_address_is_refused_with_the_offending_part_quoted(address: str, quoted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(quoted)) as caught:
        check_address(address)
    assert address[:100] in str(caught.value).replace("\\n", "\n")


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        check_address(text)


def test_golden_invite() -> None:
    assert str(INVITE) == (
        "stretto:spccaeirceirceirceirceirceirceirceirceirceirceirceirceiryqtaajaiaejcbkvkvkvkvkvkvkvkvkvkvkvk"
        "vkvkvkvkvkvkvkvkvkvkvkvkvkvkslmvel3joa2c6mrqgmxdalrrgezs4njporrxalzugaydcl3qgjyc6mjsiqzuw33pk5hfiq2t"
        "k5jwmy3nmzxxevtqjbgegvdlifbfmukwhezfar3zmfkhau3upjveqncyozrummzy3fks6zdoom2c62dpnvss4zlymfwxa3dff52g"
        "g4bpge2dambrf5yde4bpgezeim2ln5xvotsuinjvou3gmnwwm33skzyeqtcdkrvucqswkfldsmsqi54wcvdqkn2hu2sigrmhmy2g"
        "gm4ekbb6um"
    )


def test_round_trip_and_what_mail_programs_do_to_it() -> None:
    text = str(INVITE)
    assert Invite.parse(text) == INVITE
    assert Invite.parse(f"  {text}\n") == INVITE
    assert Invite.parse("stretto:" + text.removeprefix("stretto:").upper()) == INVITE


def _text_of(body: bytes) -> str:
    data = body + digest("invite", [body])[:4]
    return "stretto:" + base64.b32encode(data).decode().rstrip("=").lower()


TEXT = str(INVITE)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "invite '' does not start with 'stretto:'; paste the whole line"),
        ("http://example.org", "invite 'http://example.org' does not start with 'stretto:'"),
        (TEXT.removeprefix("stretto:"), "does not start with 'stretto:'"),
        ("stretto:", "invite 'stretto:' has a typing error or is cut short"),
        ("stretto:aaaa", "invite 'stretto:aaaa' has a typing error or is cut short"),
        ("stretto:abc", "invite 'stretto:abc' is cut short or too long: copy it again"),
        (TEXT[:-1], "copy it again"),
        (TEXT[:-8], f"invite '{TEXT[:30]}...{TEXT[:-8][-7:]}' has a typing error or is cut short"),
        (TEXT[:50] + ("b" if TEXT[50] != "b" else "c") + TEXT[51:], "has a typing error or is cut short"),
        (TEXT[:20] + "1" + TEXT[21:], "invite has '1' at position 21: copy it again"),
        (TEXT[:20] + " " + TEXT[20:], "invite has ' ' at position 21: copy it again"),
        (TEXT[:8] + "é" + TEXT[8:], "invite has 'é' at position 9"),
        (_text_of(b"\x93"), "cannot be used: not a msgpack message"),
        (_text_of(wire.pack([b"\x11" * 31, OPERATOR, [GOOD]])), "run id must have 32 bytes, has 31"),
        (_text_of(wire.pack([b"\x11" * 32, b"me", [GOOD]])), "operator is not an Ed25519 peer id"),
        (_text_of(wire.pack([b"\x11" * 32, OPERATOR, []])), "an invite has 1 to 16 addresses, not 0"),
        (_text_of(wire.pack([b"\x11" * 32, OPERATOR, [GOOD] * 17])), "an invite has 1 to 16 addresses, not 17"),
        (_text_of(wire.pack([b"\x11" * 32, OPERATOR, ["/ip/x"]])), "'/ip' is no address family"),
        (_text_of(wire.pack([b"\x11" * 32, OPERATOR, [7]])), "expected str, got int"),
    ],
)
def test_c4_each_malformed_invite_is_refused_with_what_is_wrong(text: str, quoted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(quoted)) as caught:
        Invite.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("address", "quoted"), BAD_ADDRESSES)
def test_c4_an_invite_cannot_be_made_with_a_malformed_address(address: str, quoted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(quoted)):
        Invite(b"\x11" * 32, OPERATOR, (GOOD, address))


def test_an_invite_holds_up_to_sixteen_addresses() -> None:
    many = Invite(b"\x11" * 32, OPERATOR, (GOOD,) * MAX_ADDRESSES)
    assert Invite.parse(str(many)) == many


@given(st.integers(8, len(TEXT) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_character_is_always_found(where: int, character: str) -> None:
    wrong = TEXT[:where] + character + TEXT[where + 1 :]
    try:
        assert Invite.parse(wrong) == INVITE
    except ConfigError:
        assert wrong != TEXT
    else:
        # the last character may carry unused bits
        assert wrong == TEXT or where == len(TEXT) - 1


@given(st.text(max_size=60))
def test_any_text_after_the_prefix_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        Invite.parse("stretto:" + text)
