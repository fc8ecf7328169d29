"""Tokenizers, sources, the corpus with its cache, and each reader's stream of windows."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from stretto.node.data.corpus import HEADER, HELDOUT_EVERY, Corpus, is_heldout, open_corpus
from stretto.node.data.sources import read_documents
from stretto.node.data.stream import ROUNDS, TokenStream, heldout_batches, permute
from stretto.node.data.tokenizer import load_tokenizer
from stretto.node.data.units import Span
from stretto.protocol.errors import ConfigError
from stretto.protocol.unitbook import Bookmark

BYTES = load_tokenizer("bytes")


# Tokenizers


def test_bytes_tokenizer_writes_any_text() -> None:
    text = "a\n\x00 é 語"
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.decode([104, 105, 256, 271, 33]) == "hi!"  # the end of a document and unused ids have no text
    assert BYTES.decode([0xC3]) == "\ufffd"
    assert (BYTES.vocab_size, BYTES.eos_id, len(BYTES.digest)) == (272, 256, 32)
    assert BYTES.encode("").size == 0


def write_tokenizer(path: Path, words: list[str]) -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.enable_truncation(2)
    library.save(str(path))


def test_file_tokenizer_reads_hugging_face_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, ["?", "</s>", "the", "cat"])
    tokenizer = load_tokenizer(f"file:{path}")
    assert tokenizer.encode("the cat the dog").tolist() == [2, 3, 2, 0]  # the file's own cut at 2 is not applied
    assert tokenizer.encode("the").dtype == np.uint16
    assert tokenizer.decode([2, 3, 99]) == "the cat"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 1)
    write_tokenizer(path, ["?", "</s>", "cat", "the"])
    assert load_tokenizer(f"file:{path}").digest != tokenizer.digest
    write_tokenizer(path, [str(i) for i in range(70_000)] + ["</s>"])
    assert load_tokenizer(f"file:{path}").encode("69999").dtype == np.int32


def test_tokenizers_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer 'gpt2'. Write 'bytes' .* or 'file:PATH'"):
        load_tokenizer("gpt2")
    with pytest.raises(ConfigError, match=r"none.json cannot be read: No such file"):
        load_tokenizer(f"file:{tmp_path}/none.json")
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer file"):
        load_tokenizer(f"file:{bad}")
    bad.write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer file"):
        load_tokenizer(f"file:{bad}")
    write_tokenizer(bad, ["?", "cat"])
    with pytest.raises(ConfigError, match=r"no token that ends a document"):
        load_tokenizer(f"file:{bad}")


# Sources


def test_stdlib_is_its_own_sources_only() -> None:
    documents = dict(read_documents("stdlib"))
    names = list(documents)
    assert names == sorted(names)
    assert "json/decoder.py" in documents
    assert "class JSONDecoder" in documents["json/decoder.py"]
    banned = {"site-packages", "test", "tests", "__pycache__", "idle_test"}
    assert not [name for name in names if banned & set(name.split("/")) or "_sysconfigdata" in name]
    assert max(len(text) for text in documents.values()) <= 1 << 20
    assert sum(len(text) for text in documents.values()) > 5_000_000


def test_folder_gives_sorted_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "z.md").write_text("zed", encoding="utf-8")
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / ".hidden" / "c.txt").write_text("secret", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "half \\ud800", "id": 2}\n', encoding="utf-8")
    assert list(read_documents(f"text:{tmp_path}")) == [
        ("a.txt", "é"),
        ("b/z.md", "zed"),
        ("c.jsonl:1", "one"),
        ("c.jsonl:3", "half ?"),
    ]
    assert list(read_documents(f"text:{tmp_path}/a.txt")) == [("a.txt", "é")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine \xff", "a.txt is not UTF-8 text: invalid start byte at byte 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text":', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}', 'line 1 has no string "text"'),
        ("a.jsonl", b"[1]", 'line 1 has no string "text"'),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b"\xff", "a.jsonl line 1 is not UTF-8"),
        ("a.txt", b"short", "gives only 6 tokens in 1 documents; at least 16,384"),
        ("a.bin", b"", "holds no document"),
    ],
)
def test_unusable_text_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_corpus(f"text:{tmp_path}", BYTES, cache_dir=None)


@pytest.mark.parametrize("source", ["c4", "text:", "stdlib:x", ""])
def test_unknown_sources_are_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"Write 'stdlib' .* or 'text:PATH'"):
        open_corpus(source, BYTES, cache_dir=None)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        open_corpus(f"text:{tmp_path}/nowhere", BYTES, cache_dir=None)


# Corpus


def write_folder(folder: Path, count: int) -> dict[str, str]:
    folder.mkdir()
    texts = {f"{i:04}.txt": f"document {i} " * 20 for i in range(count)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return texts


def test_split_holds_out_whole_documents_by_name(tmp_path: Path) -> None:
    texts = write_folder(tmp_path / "many", 400)
    corpus = open_corpus(f"text:{tmp_path}/many", BYTES, cache_dir=None)
    held = [text for name, text in texts.items() if is_heldout(name)]
    kept = [text for name, text in texts.items() if not is_heldout(name)]
    assert 2 <= len(held) <= 20
    assert BYTES.decode(corpus.heldout) == "".join(held)
    assert BYTES.decode(corpus.train) == "".join(kept)
    assert np.flatnonzero(corpus.train == BYTES.eos_id).size == len(kept)
    assert corpus.train[-1] == corpus.heldout[-1] == BYTES.eos_id
    assert corpus.documents == 400


def test_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(3_000))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus(f"text:{tmp_path}/one.txt", BYTES, cache_dir=None)
    total = len(text) + 1
    assert corpus.heldout.size == total // HELDOUT_EVERY
    assert corpus.train.size == total - total // HELDOUT_EVERY
    assert BYTES.decode(corpus.train) + BYTES.decode(corpus.heldout) == text
    assert not corpus.train.flags.writeable
    assert corpus.describe().startswith(f"text:{tmp_path}/one.txt: 1 documents, 28,314 training and 577 held-out")


def test_fingerprint_covers_names_and_contents_not_the_place(tmp_path: Path) -> None:
    def fingerprint(folder: str) -> bytes:
        return open_corpus(f"text:{tmp_path}/{folder}", BYTES, cache_dir=None).fingerprint

    for folder in ("a", "b"):
        write_folder(tmp_path / folder, 100)
    first = fingerprint("a")
    assert len(first) == 32
    assert fingerprint("b") == first
    (tmp_path / "b" / "0000.txt").rename(tmp_path / "b" / "0000x.txt")
    renamed = fingerprint("b")
    (tmp_path / "b" / "0000x.txt").write_text("document 9 " * 20, encoding="utf-8")
    assert len({first, renamed, fingerprint("b")}) == 3


def assert_same(a: Corpus, b: Corpus) -> None:
    assert a.fingerprint == b.fingerprint
    assert np.array_equal(a.train, b.train)
    assert np.array_equal(a.heldout, b.heldout)


def test_cache_is_used_and_damage_is_repaired(tmp_path: Path) -> None:
    write_folder(tmp_path / "text", 200)
    source, cache = f"text:{tmp_path}/text", tmp_path / "new" / "cache"
    plain = open_corpus(source, BYTES, cache_dir=None)
    assert_same(open_corpus(source, BYTES, cache_dir=cache), plain)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    assert len(whole) == HEADER.size + 2 * (plain.train.size + plain.heldout.size)

    marked = whole[:-2] + b"\x07\x00"  # a byte that only the cache can have given
    path.write_bytes(marked)
    assert open_corpus(source, BYTES, cache_dir=cache).heldout[-1] == 7

    wrong_fingerprint = whole[:8] + bytes(32) + whole[40:]
    for damaged in (whole[:-1], whole[:50], b"", wrong_fingerprint, whole + b"x"):
        path.write_bytes(damaged)
        assert_same(open_corpus(source, BYTES, cache_dir=cache), plain)
        assert path.read_bytes() == whole

    (tmp_path / "text" / "0001.txt").write_text("other " * 40, encoding="utf-8")
    changed = open_corpus(source, BYTES, cache_dir=cache)
    assert changed.fingerprint != plain.fingerprint
    assert len(list(cache.iterdir())) == 2


def test_nodes_that_start_together_share_one_cache_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "text", 200)
    source, cache = f"text:{tmp_path}/text", tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(lambda _: open_corpus(source, BYTES, cache_dir=cache), range(8)))
    for corpus in corpora[1:]:
        assert_same(corpus, corpora[0])
    assert [path.suffix for path in cache.iterdir()] == [".bin"]


def test_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "text", 200)
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"token cache .* cannot be written"):
        open_corpus(f"text:{tmp_path}/text", BYTES, cache_dir=tmp_path / "file")


def test_stdlib_corpus_has_both_parts(tmp_path: Path) -> None:
    corpus = open_corpus("stdlib", BYTES, cache_dir=tmp_path)
    assert corpus.train.size > 5_000_000
    assert 0.005 < corpus.heldout.size / corpus.train.size < 0.2
    assert int(corpus.train[:1_000_000].max()) <= BYTES.eos_id
    assert corpus.train.dtype == np.uint16


# Streams


def keys(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 63, ROUNDS).astype(np.uint64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1_000, 4_096, 4_097])
def test_permute_reaches_every_place_once(size: int) -> None:
    for seed in range(3):
        order = permute(np.arange(size, dtype=np.uint64), size, keys(seed))
        assert sorted(order.tolist()) == list(range(size))


def test_permute_shuffles_well() -> None:
    size = 10_000
    places = np.arange(size, dtype=np.uint64)
    first, second = permute(places, size, keys(1)), permute(places, size, keys(2))
    # A random permutation has about one fixed point, one pair of neighbours kept, and no correlation (std 1/100).
    assert np.count_nonzero(first == places) < 8
    assert np.count_nonzero(np.diff(first) == 1) < 8
    assert np.count_nonzero(first == second) < 8
    assert abs(np.corrcoef(places, first)[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def numbered(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint16)


def stream(tokens: np.ndarray, seed: int = 1, *, unit: int = 30) -> TokenStream:
    return TokenStream(tokens, 10, seed, unit_sequences=unit)


def take(reader: TokenStream, count: int) -> list[int]:
    """The first tokens of the next ``count`` windows, which are then consumed."""
    found: list[int] = reader.next(count)[:, 0].tolist()
    reader.consumed()
    return found


@pytest.mark.parametrize("unit", [1, 7, 30, 100, 512])
def test_stream_reads_each_window_once_an_epoch(unit: int) -> None:
    reader = stream(numbered(1_005), unit=unit)
    assert reader.windows == 100
    batch = reader.next(3)
    assert batch.shape == (3, 11)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()
    reader.dropped()
    epochs = [[window for _ in range(25) for window in take(reader, 4)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 1_000, 10))
    assert epochs[0] != epochs[1]


def test_stream_is_the_same_on_every_machine_and_whatever_the_units_are() -> None:
    expected = [0, 970, 670, 370, 340, 830, 100, 950, 280, 820, 380, 50]
    assert stream(numbered(1_005)).next(12)[:, 0].tolist() == expected
    assert take(stream(numbered(1_005), unit=5), 12) == expected


def test_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(take(stream(numbered(1_005), seed), 100)) for seed in range(4)}
    assert len(orders) == 4


def test_a_step_that_needs_more_units_than_a_peer_may_claim_is_served_all_the_same() -> None:
    reader = stream(numbered(1_005), unit=2)
    assert reader.reserve(50) < 5.0
    assert len(set(take(reader, 50))) == 50
    assert reader.state().samples == 50
    assert len(set(take(stream(numbered(25)), 9))) == 2  # a corpus smaller than a step is read several times in it


def test_what_was_drawn_counts_when_it_is_consumed() -> None:
    reader = stream(numbered(1_005))
    first = reader.next(4)
    reader.next(3)
    assert reader.state().samples == 0
    assert reader.consumed() == [Span(0, 0, 7)]
    assert (reader.state().samples, reader.state().claims[0].position) == (7, 7)
    again = reader.next(4)
    assert not np.array_equal(again, first)
    reader.dropped()
    assert np.array_equal(reader.next(4), again)
    reader.next(20)
    assert reader.consumed() == [Span(0, 7, 30), Span(1, 0, 1)]


def test_a_rehearsal_reads_windows_and_takes_none() -> None:
    reader = stream(numbered(35))
    assert reader.rehearsal(5)[:, 0].tolist() == [0, 10, 20, 0, 10]
    assert reader.state() == Bookmark()


def test_restored_stream_goes_on_exactly() -> None:
    tokens = numbered(505)
    whole = stream(tokens, 3)
    expected = [window for _ in range(30) for window in take(whole, 7)]  # 210 windows: more than four epochs
    assert whole.state().samples == 210
    for cut in (0, 1, 29, 30, 31, 49, 50, 51, 133):
        begun, resumed = stream(tokens, 3), stream(tokens, 3)
        if cut:
            take(begun, cut)
        resumed.restore(begun.state())
        assert resumed.state().samples == cut
        assert take(resumed, 210 - cut) == expected[cut:]  # another batch size, the same windows


def test_stream_refuses_short_data() -> None:
    with pytest.raises(ConfigError, match=r"training part of the data has 10 tokens, .* one window of 11"):
        stream(numbered(10))
    assert stream(numbered(11)).next(2).tolist() == [list(range(11))] * 2


def test_heldout_windows_come_in_order_up_to_the_limit() -> None:
    tokens = numbered(108)
    batches = list(heldout_batches(tokens, 10, 4, 7))
    assert [batch.shape for batch in batches] == [(4, 11), (3, 11)]
    assert np.concatenate(batches)[:, 0].tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert sum(len(batch) for batch in heldout_batches(tokens, 10, 4, 1_000)) == 10
    with pytest.raises(ConfigError, match=r"held-out part of the data has 108 tokens"):
        heldout_batches(tokens, 108, 4, 1)


def test_corpus_to_batch_keeps_the_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"record {i} of many"}) for i in range(1_500)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corpus = open_corpus(f"text:{tmp_path}/records.jsonl", BYTES, cache_dir=tmp_path / "cache")
    assert corpus.documents == 1_500
    batch = TokenStream(corpus.train, 64, 0, unit_sequences=512).next(4)
    assert all("record" in BYTES.decode(row) for row in batch)
