"""Digests of 32 bytes, each under a domain word, so that no digest can stand in for another.

Small things (configs, groups, records) go through BLAKE2b. Tensors and what is encoded from them go through BLAKE3,
which takes a sixth of the time (0.2 against 1.2 ms per MB): a state's digest is in every round's way.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 32
PEER_ID_BYTES = 38
"""A libp2p peer id that carries an Ed25519 key: two bytes multihash, four bytes protobuf, 32 bytes key."""


def digest(domain: str, parts: Iterable[bytes | memoryview]) -> bytes:
    """32-byte BLAKE2b of ``parts`` under ``domain`` (at most 16 ASCII characters)."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=domain.encode("ascii"))
    for part in parts:
        state.update(part)
    return state.digest()


def bulk_digest(domain: str, parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """32-byte BLAKE3 of ``parts``, in its mode for keys that are derived under a context, here ``domain``."""
    state = blake3(derive_key_context=f"stretto {domain}")
    for part in parts:
        state.update(part)
    return state.digest(DIGEST_BYTES)


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """Digest under which an encoded contribution is announced, checked and fetched."""
    return bulk_digest("payload", [payload])


def state_digest(anchor: np.ndarray, momentum: np.ndarray) -> bytes:
    """Digest of a fragment's outer state: anchor and momentum, both (n,) float32, as little-endian bytes."""
    little = np.dtype("<f4")
    return bulk_digest(
        "state",
        [np.ascontiguousarray(x, dtype=little).data.cast("B") for x in (anchor, momentum) if x.size],
    )


def weights_digest(weights: np.ndarray) -> bytes:
    """Digest of a fragment's local weights, (n,) float32, as little-endian bytes; for comparisons, not on the wire."""
    return bulk_digest("weights", [np.ascontiguousarray(weights, dtype="<f4").data.cast("B")])


def check_digest(name: str, value: bytes) -> None:
    """ValueError unless ``value`` is 32 bytes."""
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"{name} must have {DIGEST_BYTES} bytes, has {len(value)}")


def check_peer(name: str, value: bytes) -> None:
    """ValueError unless ``value`` has the form of an Ed25519 peer id."""
    if len(value) != PEER_ID_BYTES or not value.startswith(b"\x00\x24\x08\x01\x12\x20"):
        raise ValueError(f"{name} is not an Ed25519 peer id")
