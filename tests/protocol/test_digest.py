"""Digests: the values that peers compare, fixed."""

import hashlib

import numpy as np
from blake3 import blake3

from stretto.protocol.digest import digest, payload_digest, state_digest


def test_small_things_are_hashed_with_blake2b_under_a_domain() -> None:
    assert digest("run", [b"ab", b"c"]) == hashlib.blake2b(b"abc", digest_size=32, person=b"run").digest()
    assert digest("run", [b"abc"]) != digest("head", [b"abc"])


def test_payloads_and_states_are_hashed_with_blake3_under_a_domain() -> None:
    assert payload_digest(b"abc") == blake3(b"abc", derive_key_context="stretto payload").digest()
    assert payload_digest(memoryview(b"abc")) == payload_digest(bytearray(b"abc"))
    assert payload_digest(b"abc").hex()[:16] == "c5ab61cf84a08cd4"
    anchor, momentum = np.arange(3, dtype=np.float32), np.full(3, 0.5, dtype=np.float32)
    expected = blake3(derive_key_context="stretto state")
    expected.update(anchor.tobytes() + momentum.tobytes())
    assert state_digest(anchor, momentum) == expected.digest()
    assert state_digest(momentum, anchor) != expected.digest()
    assert state_digest(anchor[:0], momentum[:0]) == blake3(derive_key_context="stretto state").digest()
