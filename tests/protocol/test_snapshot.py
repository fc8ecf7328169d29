"""A state in chunks: cut, described, put together again, and refused where the description is not sound."""

import dataclasses

import numpy as np
import pytest

from stretto.protocol import messages as m
from stretto.protocol import snapshot
from stretto.protocol.chain import CommitRecord, Member, SignedRecord, after
from stretto.protocol.digest import digest, payload_digest, state_digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.snapshot import Assembly, Snapshot, check_manifest, chunk_bytes, chunk_sizes

RUN = digest("run", [b"snapshot"])
CLOCK = Clock(3, 30.0, 10.0)


def make(numel: int, seed: int = 0) -> Snapshot:
    random = np.random.default_rng(seed)
    anchor, momentum = (random.normal(size=numel).astype(np.float32) for _ in range(2))
    record = CommitRecord(
        run=RUN, fragment=1, round=1, version=4, prev=bytes(32), members=(Member(peer_id(0), 5, bytes(32)),),
        electors=(peer_id(0),), state=state_digest(anchor, momentum), tokens_total=20, clock=Clock(2, 20.0, 10.0),
        coordinator=peer_id(0),
    )  # fmt: skip
    return Snapshot(anchor, momentum, after(record), SignedRecord(record, bytes(64)))


def test_the_size_of_a_chunk_follows_from_the_size_of_the_state() -> None:
    mib = 1 << 20
    assert chunk_bytes(0) == chunk_bytes(1) == chunk_bytes(4096 * mib) == mib
    assert chunk_bytes(4096 * mib + 1) == 2 * mib
    assert chunk_sizes(2 * mib + 5) == [mib, mib, 5]
    assert chunk_sizes(0) == []
    for nbytes in (1, mib, 4095 * mib + 1, 4096 * mib + 1, 9000 * mib):
        assert sum(chunk_sizes(nbytes)) == nbytes
        assert len(chunk_sizes(nbytes)) <= m.MAX_CHUNKS


@pytest.mark.parametrize("numel", [1, 2, 999, 1000, 1001, 5000])
def test_chunks_in_any_order_make_the_same_bits(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1000)  # some chunks lie across the end of the anchor
    state = make(numel)
    manifest = m.decode(m.encode(state.manifest(CLOCK)), m.State)
    assert check_manifest(manifest, 1, numel, RUN) == state.tip
    chunks = [state.chunk(index) for index in range(len(manifest.chunks))]
    assert b"".join(chunks) == state.anchor.tobytes() + state.momentum.tobytes()
    assert [payload_digest(chunk) for chunk in chunks] == list(manifest.chunks)
    assert [len(chunk) for chunk in chunks] == chunk_sizes(8 * numel)
    assembly = Assembly(np.empty(numel, np.float32), np.empty(numel, np.float32))
    for index in np.random.default_rng(1).permutation(len(chunks)):
        assembly.put(int(index), chunks[index])
    whole = assembly.finish()
    assert (whole.anchor.tobytes(), whole.momentum.tobytes()) == (state.anchor.tobytes(), state.momentum.tobytes())
    assert whole.digest == state.record.record.state == manifest.digest


@pytest.mark.parametrize("index", [-1, 8, 10**9])
def test_there_is_no_chunk_outside(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1000)
    with pytest.raises(IndexError, match="a state of 8000 bytes has no chunk"):
        make(1000).chunk(index)


def test_a_manifest_of_the_largest_kind_fits_into_a_message() -> None:
    state = make(1)
    count = m.MAX_CHUNKS
    largest = dataclasses.replace(
        state.manifest(CLOCK), nbytes=count << 20, chunk_bytes=1 << 20, chunks=(bytes(32),) * count
    )
    assert len(m.encode(largest)) < 256 * 1024


def test_unsound_manifests_are_refused() -> None:
    manifest = make(1000).manifest(CLOCK)
    assert manifest.record is not None
    bad = [
        (dataclasses.replace(manifest, record=None), "an initial state"),
        (dataclasses.replace(manifest, fragment=0), "another fragment or run"),
        (dataclasses.replace(manifest, nbytes=8001), "a state of 8001 bytes is offered where 8000 are due"),
        (dataclasses.replace(manifest, chunk_bytes=8000), "are due"),
        (dataclasses.replace(manifest, digest=bytes(32)), "not the one that its record names"),
    ]
    for wrong, why in bad:
        with pytest.raises(RemoteProtocolError, match=why):
            check_manifest(wrong, 1, 1000, RUN)
    with pytest.raises(RemoteProtocolError, match="another fragment or run"):
        check_manifest(manifest, 1, 1000, digest("run", [b"other"]))
