"""Text to token ids and back.

Two kinds, chosen by name:

``bytes``      one id per UTF-8 byte, 0..255, and one id, 256, that ends a document. Nothing to download, nothing to
               train, any text can be written in it. ``vocab_size`` is 272: the 257 ids in use, padded to a multiple of
               16 so that the matrices of the embedding have an even shape for the hardware; the rest never occurs.
``file:PATH``  a ``tokenizer.json`` of Hugging Face tokenizers.

All peers of a run must cut text alike, so a tokenizer has a digest that the run config carries. This is the only file
that may import tokenizers.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stretto.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

Tokens: TypeAlias = NDArray[np.integer[Any]]
"""Ids of a text, (n,), in the dtype of their tokenizer: uint16 or int32."""

MAX_FILE_BYTES = 256 << 20  # the largest published tokenizer files are below 40 MB
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
"""Names under which a tokenizer file may hold its end-of-document token, in order of preference."""


class Tokenizer(Protocol):
    """What the corpus and the commands need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids a model must have; every id is below it."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document; ``encode`` never adds it."""

    @property
    def digest(self) -> bytes:
        """32 bytes that differ when two tokenizers may cut text differently."""

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """Of the arrays from ``encode``: uint16, or int32 for more than 65,536 ids. Little-endian."""

    def encode(self, text: str) -> Tokens:
        """Return the ids of ``text``, (n,)."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, leaving out the end of a document; never fails on ids a model made up."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load ``bytes`` or ``file:PATH``; anything else is a ConfigError."""
    kind, _, path = name.partition(":")
    if name == "bytes":
        return BytesTokenizer()
    if kind == "file" and path:
        return _load_file(Path(os.path.expanduser(path)))
    raise ConfigError(
        f"There is no tokenizer {name!r}. Write 'bytes' (one token per byte, nothing to download) or "
        "'file:PATH' with the path of a Hugging Face tokenizer.json."
    )


@dataclass(frozen=True, kw_only=True)
class BytesTokenizer:
    """One id per byte; see the top of the file."""

    vocab_size: int = field(default=272, init=False)
    eos_id: int = field(default=256, init=False)
    dtype: np.dtype[np.integer[Any]] = field(default=np.dtype("<u2"), init=False)
    digest: bytes = field(default=blake2b(b"stretto bytes tokenizer 1", digest_size=32).digest(), init=False)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class FileTokenizer:
    """A tokenizer of the tokenizers library; see the top of the file."""

    library: "LibraryTokenizer"
    vocab_size: int
    eos_id: int
    digest: bytes

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<i4")

    def encode(self, text: str) -> Tokens:
        return np.array(self.library.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return self.library.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True)


def _load_file(path: Path) -> FileTokenizer:
    """Read, digest and check a tokenizer file; digest = BLAKE2b of the very bytes that were parsed."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The tokenizer file {path} cannot be read: {error.strerror}. Give the path of a Hugging Face "
            "tokenizer.json, or use the tokenizer 'bytes'."
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"The tokenizer file {path} is larger than {MAX_FILE_BYTES >> 20} MiB; that is no tokenizer."
        )

    from tokenizers import Tokenizer as LibraryTokenizer

    try:
        library = LibraryTokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise ConfigError(
            f"{path} is not a tokenizer file of Hugging Face tokenizers: {error}. Give the path of a tokenizer.json."
        ) from error
    # A published file may cut or pad every text to some length, and would read "</s>" in a text as the end of it.
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    vocabulary = library.get_vocab(with_added_tokens=True)
    eos_id = next((vocabulary[name] for name in END_OF_TEXT if name in vocabulary), None)
    if eos_id is None:
        raise ConfigError(
            f"The tokenizer file {path} has no token that ends a document. Add one of these to it as a special "
            f"token: {', '.join(END_OF_TEXT)}."
        )
    return FileTokenizer(
        library=library,
        vocab_size=max(vocabulary.values()) + 1,  # ids may have gaps
        eos_id=eos_id,
        digest=blake2b(content, digest_size=32).digest(),
    )
