"""The training windows of the units that this peer holds, in the order that all peers share.

Windows. Window w of n = (count - 1) // T covers tokens w T .. w T + T: T inputs and, one further, T targets. Inputs of
different windows do not overlap; neighbours share one token, the target of one being the first input of the next.

Order. In every epoch the n windows come in a pseudo-random order that is the same for all peers, with no list of them
in memory: the k-th window of an epoch is E(k), where E is a permutation of 0..n-1 keyed by BLAKE2b(seed, epoch). The
peers share it out in work units of consecutive places (``stretto.protocol.units``), so that each window is read once
an epoch by the swarm, not by each peer. E is a balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2),
1988) of eight rounds over the next power of four, walked until it lands below n (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002); its round function is the 64-bit finalizer of SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014). Integers only, hence the same order on every machine and with every version of NumPy.

State. Which units, and how far in each: it lies with the units' source. A batch counts when ``consumed`` says that the
inner step that used it is done; a batch that was drawn and not trained on comes again.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stretto.node.data.tokenizer import Tokens
from stretto.node.data.units import Span, UnitSource, local_units
from stretto.protocol.errors import ConfigError
from stretto.protocol.unitbook import Bookmark
from stretto.protocol.units import UnitCut

ROUNDS = 8


class TokenStream:
    """Endless batches of training windows; see the top of the file.

    tokens: (count,) uint16 or int32. seq_len: T, tokens. seed: of the run, 0 .. 2^64 - 1. unit_sequences: windows in a
    work unit. units: where the units come from; without it this reader is alone and has them all.
    Raises ConfigError when the tokens do not fill one window.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, seed: int, *, unit_sequences: int, units: UnitSource | None = None
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.windows = count_windows(tokens, seq_len, "training")
        self.cut = UnitCut(self.windows, unit_sequences)
        self.units = units if units is not None else local_units(self.windows, unit_sequences)
        self._key_prefix = seed.to_bytes(8, "little")
        self._drawn: list[Span] = []

    def reserve(self, count: int) -> float:
        """Before an inner step: wait until units with ``count`` windows are held; the seconds waited, mostly 0."""
        return self.units.reserve(count)

    def next(self, batch: int) -> NDArray[np.int64]:
        """Take the next ``batch`` windows: (batch, seq_len + 1) int64."""
        assert batch >= 1, f"a batch has at least one window, not {batch}"
        spans = self.units.draw(batch)
        self._drawn += spans
        return gather_windows(self.tokens, np.concatenate([self._windows(span) for span in spans]), self.seq_len)

    def consumed(self) -> list[Span]:
        """After an inner step: what was drawn for it has been trained on. Returns that, neighbours joined."""
        spans: list[Span] = []
        for span in self._drawn:
            if spans and (spans[-1].unit, spans[-1].last) == (span.unit, span.first):
                span = Span(span.unit, spans.pop().first, span.last)
            spans.append(span)
        self._drawn = []
        self.units.consumed(spans)
        return spans

    def dropped(self) -> None:
        """What was drawn since the last step was not trained on, and comes again."""
        self._drawn = []
        self.units.dropped()

    def rehearsal(self, batch: int) -> NDArray[np.int64]:
        """Windows to try the machine with, which count for nothing: (batch, seq_len + 1) int64."""
        return gather_windows(self.tokens, np.arange(batch, dtype=np.int64) % self.windows, self.seq_len)

    def state(self) -> Bookmark:
        """The place in the data after the last consumed step."""
        return self.units.state()

    def restore(self, bookmark: Bookmark) -> None:
        """Go on from a state, before anything was drawn."""
        self.units.restore(bookmark)

    def _windows(self, span: Span) -> NDArray[np.int64]:
        """The windows of a span: (last - first,) int64."""
        epoch, start = self.cut.place(span.unit)
        places = np.arange(start + span.first, start + span.last, dtype=np.uint64)
        return permute(places, self.windows, self._keys(epoch))

    def _keys(self, epoch: int) -> NDArray[np.uint64]:
        """Derive the (ROUNDS,) round keys of one epoch."""
        text = self._key_prefix + epoch.to_bytes(8, "little")
        digest = blake2b(text, digest_size=8 * ROUNDS, person=b"stretto-stream").digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def heldout_batches(tokens: Tokens, seq_len: int, batch: int, limit: int) -> Iterator[NDArray[np.int64]]:
    """Yield the first ``limit`` held-out windows in order, ``batch`` at a time: (<= batch, seq_len + 1) int64.

    The same for every peer and every evaluation. Raises ConfigError, at the call, when there is not one window.
    """
    count = min(limit, count_windows(tokens, seq_len, "held-out"))
    return (
        gather_windows(tokens, np.arange(start, min(start + batch, count)), seq_len)
        for start in range(0, count, batch)
    )


def count_windows(tokens: Tokens, seq_len: int, what: str) -> int:
    """Return the number of windows, at least one, or raise ConfigError naming ``what`` part of the data is short."""
    windows = (tokens.size - 1) // seq_len
    if windows < 1:
        raise ConfigError(
            f"The {what} part of the data has {tokens.size:,} tokens, which is less than one window of "
            f"{seq_len + 1:,}. Use a larger source or a shorter sequence length."
        )
    return windows


def gather_windows(tokens: Tokens, windows: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Read windows by number, (batch,) -> (batch, seq_len + 1) int64."""
    offsets = np.arange(seq_len + 1, dtype=np.int64)
    ids: NDArray[np.int64] = tokens[windows[:, None] * seq_len + offsets].astype(np.int64)
    return ids


def permute(places: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Apply the keyed permutation of 0..size-1 to each place: (n,) uint64 below size -> (n,) int64 below size."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits in each half; 4^half >= size
    out = _feistel(places, half, keys)
    # A value outside is a step on its cycle, which passes 0..size-1 again: on average fewer than four steps.
    while (outside := out >= np.uint64(size)).any():
        out[outside] = _feistel(out[outside], half, keys)
    return out.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute 0 .. 4^half - 1; x: (n,) uint64, keys: (rounds,) uint64."""
    mask = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << np.uint64(half)) | right


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words: the finalizer of SplitMix64; wraps around on purpose."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
