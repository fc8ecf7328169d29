"""All tokens of a data source, split into training and held-out.

**Split.** A document is held out when BLAKE2b(name) mod 50 is 0, so every peer holds out the same 2 % of the documents
and none trains on them. A source of few documents can miss that share badly; when fewer than 0.5 % or more than 20 %
of the bytes would be held out (always so for a single file), the last 2 % of all tokens are held out instead. Both
rules look only at names and sizes, which the fingerprint covers.

**Fingerprint.** BLAKE2b over the names and contents of the documents in order. The run config carries it, so a peer
with other data (another version of Python, for the source ``stdlib``) is found at joining, not by its loss.

**Cache.** With a cache folder the tokens are written once and memory-mapped from then on, one copy in memory for all
nodes of a machine. The file is named after fingerprint and tokenizer and appears whole or not at all (temporary file,
fsync, rename), so nodes that start together may all write it: the last one wins with the same bytes. The source is
still read at each start, for the fingerprint, which costs about a second per gigabyte.

    file = magic 8 | fingerprint 32 | tokenizer digest 32 | train count u64 | all count u64 | ids, training first
"""

import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from stretto.node.data.sources import read_documents
from stretto.node.data.tokenizer import Tokenizer, Tokens
from stretto.protocol.errors import ConfigError

HELDOUT_EVERY = 50  # documents, and tokens where the tail is held out
MIN_TOKENS = 16_384  # below this a split says nothing
MAGIC = b"STRTOK01"
HEADER = struct.Struct("<8s32s32sQQ")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of one source under one tokenizer.

    train, heldout: (n,) uint16 or int32, read-only, in memory or memory-mapped; each document ends with eos_id.
    fingerprint: 32 bytes over names and contents of the documents. documents: their number.
    """

    source: str
    documents: int
    fingerprint: bytes
    train: Tokens = field(repr=False)
    heldout: Tokens = field(repr=False)

    def __post_init__(self) -> None:
        total = self.train.size + self.heldout.size
        if total < MIN_TOKENS or not self.train.size or not self.heldout.size:
            raise ConfigError(
                f"The data source {self.source} gives only {total:,} tokens in {self.documents:,} documents; at least "
                f"{MIN_TOKENS:,} are needed. Add text to it, or use the source 'stdlib'."
            )

    def describe(self) -> str:
        """Describe the corpus in one line, for logs."""
        return (
            f"{self.source}: {self.documents:,} documents, {self.train.size:,} training and {self.heldout.size:,} "
            f"held-out tokens, fingerprint {self.fingerprint.hex()[:16]}"
        )


def open_corpus(source: str, tokenizer: Tokenizer, *, cache_dir: Path | None) -> Corpus:
    """Read ``stdlib`` or ``text:PATH`` and return its tokens; see the top of the file.

    cache_dir: folder for token files, made when missing; None keeps the tokens in memory.
    Raises ConfigError when the source or the cache folder cannot be used, or the source is too small.
    """
    survey = _Survey()
    for name, text in read_documents(source):
        survey.add(name, text)
    if not survey.documents:
        raise ConfigError(f"The data source {source} holds no document. Point it at text, or use the source 'stdlib'.")
    if cache_dir is None:
        chunks: list[Tokens] = []
        train_count = _encode(source, tokenizer, survey, chunks.append)
        tokens: Tokens = np.concatenate(chunks)
        tokens.flags.writeable = False
    else:
        key = blake2b(survey.fingerprint() + tokenizer.digest, digest_size=16).hexdigest()
        path = cache_dir / f"tokens-{key}.bin"
        cached = _load(path, tokenizer, survey)
        if cached is None:
            _store(path, source, tokenizer, survey)
            cached = _load(path, tokenizer, survey)
        if cached is None:
            raise ConfigError(f"The token cache {path} was changed while it was written. Use a folder of its own.")
        tokens, train_count = cached
    return Corpus(
        source=source,
        documents=survey.documents,
        fingerprint=survey.fingerprint(),
        train=tokens[:train_count],
        heldout=tokens[train_count:],
    )


class _Survey:
    """Running digest and sizes of the documents seen so far."""

    def __init__(self) -> None:
        self.documents = 0
        self.size = 0  # bytes
        self.heldout_size = 0  # bytes in documents that the rule by name would hold out
        self._hash = blake2b(digest_size=32, person=b"stretto-corpus")

    def add(self, name: str, text: str) -> None:
        for part in (name.encode("utf-8", "surrogateescape"), text.encode("utf-8")):
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)
        self.documents += 1
        self.size += len(part)
        self.heldout_size += len(part) if is_heldout(name) else 0

    def fingerprint(self) -> bytes:
        return self._hash.digest()

    def splits_by_name(self) -> bool:
        return 0.005 * self.size <= self.heldout_size <= 0.2 * self.size


def is_heldout(name: str) -> bool:
    """Tell whether the rule by name holds this document out."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_EVERY == 0


def _encode(source: str, tokenizer: Tokenizer, survey: _Survey, write: Callable[[Tokens], object]) -> int:
    """Encode the documents into ``write``, training first, and return the number of training tokens."""
    by_name = survey.splits_by_name()
    eos = np.array([tokenizer.eos_id], dtype=tokenizer.dtype)
    heldout: list[Tokens] = []
    train_count = 0
    again = _Survey()
    for name, text in read_documents(source):
        again.add(name, text)
        parts = (tokenizer.encode(text), eos)
        if by_name and is_heldout(name):
            heldout += parts
            continue
        for part in parts:
            write(part)
            train_count += part.size
    for part in heldout:
        write(part)
    if again.fingerprint() != survey.fingerprint():
        raise ConfigError(f"The data source {source} changed while it was read. Start again when it is complete.")
    return train_count if by_name else train_count - train_count // HELDOUT_EVERY


def _load(path: Path, tokenizer: Tokenizer, survey: _Survey) -> tuple[Tokens, int] | None:
    """Map a cache file; None when it is missing or not the whole file that this source and tokenizer would give."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError:  # missing, or not ours to read: it is written anew
        return None
    if len(header) < HEADER.size:
        return None
    magic, fingerprint, digest, train_count, count = HEADER.unpack(header)
    expected = HEADER.size + count * tokenizer.dtype.itemsize
    if (magic, fingerprint, digest) != (MAGIC, survey.fingerprint(), tokenizer.digest):
        return None
    if not train_count <= count or count == 0 or path.stat().st_size != expected:
        return None
    tokens = np.memmap(path, dtype=tokenizer.dtype, mode="r", offset=HEADER.size, shape=(count,))
    return np.asarray(tokens), train_count


def _store(path: Path, source: str, tokenizer: Tokenizer, survey: _Survey) -> None:
    """Write a cache file whole or not at all."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(bytes(HEADER.size))  # the counts are known only at the end
            train_count = _encode(source, tokenizer, survey, lambda part: file.write(part.tobytes()))
            count = (file.tell() - HEADER.size) // tokenizer.dtype.itemsize
            file.seek(0)
            file.write(HEADER.pack(MAGIC, survey.fingerprint(), tokenizer.digest, train_count, count))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"The token cache {path} cannot be written: {error.strerror}. Free about {4 * survey.size >> 20} MiB "
            "there, or give another data folder."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # already gone after the rename
