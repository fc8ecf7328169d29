"""This peer's own order of reading the training tokens.

Windows. Window w of n = (count - 1) // T covers tokens w T .. w T + T: T inputs and, one further, T targets. Inputs of
different windows do not overlap; neighbours share one token, the target of one being the first input of the next.

Order. Each reader goes through all n windows in its own pseudo-random order, epoch after epoch, with no list of them
in memory: the k-th window of an epoch is E(k), where E is a permutation of 0..n-1 keyed by BLAKE2b(seed, epoch,
reader). E is a balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2), 1988) of eight rounds over the next
power of four, walked until it lands below n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002);
its round function is the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Integers only, hence the
same order on every machine and with every version of NumPy.

State. One integer, the number of windows taken: a reader restored to it goes on with exactly the windows that would
have come. Different readers draw without knowing of each other, so two peers meet the same window as often as chance
has it, but never walk the same path.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stretto.node.data.tokenizer import Tokens
from stretto.protocol.errors import ConfigError

ROUNDS = 8


class TokenStream:
    """Endless batches of training windows for one reader; see the top of the file.

    tokens: (count,) uint16 or int32. seq_len: T, tokens. seed: of the run, 0 .. 2^64 - 1. reader: the peer's id.
    Raises ConfigError when the tokens do not fill one window.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, reader: bytes) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.windows = count_windows(tokens, seq_len, "training")
        self._key_prefix = seed.to_bytes(8, "little")
        self._reader = reader
        self._position = 0

    def next(self, batch: int) -> NDArray[np.int64]:
        """Take the next ``batch`` windows: (batch, seq_len + 1) int64."""
        assert batch >= 1, f"a batch has at least one window, not {batch}"
        positions = np.arange(self._position, self._position + batch, dtype=np.uint64)
        epochs, places = np.divmod(positions, np.uint64(self.windows))
        chosen = np.empty(batch, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permute(places[here], self.windows, self._keys(int(epoch)))
        self._position += batch
        return gather_windows(self.tokens, chosen, self.seq_len)

    def state(self) -> int:
        """Return the number of windows taken so far."""
        return self._position

    def restore(self, position: int) -> None:
        """Go on as if ``position`` windows had been taken. Raises ConfigError for a number that no state() gives."""
        if not 0 <= position < 1 << 62:
            raise ConfigError(
                f"A saved data position of {position} windows is impossible; the checkpoint it comes from is damaged. "
                "Use an older checkpoint."
            )
        self._position = position

    def _keys(self, epoch: int) -> NDArray[np.uint64]:
        """Derive the (ROUNDS,) round keys of one epoch."""
        text = self._key_prefix + epoch.to_bytes(8, "little") + self._reader
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
