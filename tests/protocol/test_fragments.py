"""Cutting models into fragments, and copying fragments out and in."""

import hashlib
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.protocol.errors import ConfigError, LocalProtocolError
from stretto.protocol.fragments import FragmentedModel, FragmentSpec, Pattern, layout_digest, split_model

BLOCK = 4 * (4 * 4 + 4)
"""FP32 bytes of one block of `Tiny` at width 4."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)


class Tiny(nn.Module):
    """An embedding, a list of equal blocks, a norm and a head; a vocabulary of 5 and a width of 4 by default."""

    def __init__(self, layers: int, *, width: int = 4, vocabulary: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def language_model(kind: str, layers: int, tied: bool) -> nn.Module:
    sizes: dict[str, Any] = {
        "qwen3": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8,
        },
        "gpt2": {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 16},
    }[kind]  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=40, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied, **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, nn.Module)
    return model


def layers_of(specs: Sequence[FragmentSpec], prefix: str = "blocks.") -> list[list[int]]:
    """Which layers each fragment holds."""
    return [
        sorted({int(name[len(prefix) :].split(".")[0]) for name in spec.names if name.startswith(prefix)})
        for spec in specs
    ]


def held(specs: Sequence[FragmentSpec]) -> list[str]:
    return [name for spec in specs for name in spec.names]


# --- cutting by count


def test_strided_deals_the_layers_out_in_turn() -> None:
    specs = split_model(Tiny(7), count=3)
    assert layers_of(specs) == [[0, 3, 6], [1, 4], [2, 5]]
    assert [spec.index for spec in specs] == [0, 1, 2]
    # The embedding goes to the smallest fragment, and so does what follows the layers.
    assert specs[1].names[0] == "embed.weight"
    assert specs[2].names[-3:] == ("norm.weight", "norm.bias", "head.weight")


def test_strided_with_equal_fragments_starts_with_the_embedding_and_ends_with_the_head() -> None:
    specs = split_model(Tiny(6), count=3)
    assert layers_of(specs) == [[0, 3], [1, 4], [2, 5]]
    assert specs[0].names == (
        "embed.weight", "blocks.0.mix.weight", "blocks.0.mix.bias", "blocks.3.mix.weight", "blocks.3.mix.bias",
    )  # fmt: skip
    assert specs[0].shapes == ((5, 4), (4, 4), (4,), (4, 4), (4,))
    assert specs[0].numel == 20 + 2 * 20
    assert specs[0].nbytes == 240
    assert specs[2].names[-1] == "head.weight"


@pytest.mark.parametrize(
    ("layers", "count", "runs"),
    [
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (10, 4, [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]),
        (5, 4, [[0], [1], [2, 3], [4]]),
        (3, 1, [[0, 1, 2]]),
        (3, 3, [[0], [1], [2]]),
    ],
)
def test_sequential_runs_are_even(layers: int, count: int, runs: list[list[int]]) -> None:
    # Without weights outside the layers, which would shift the balance.
    model = Tiny(layers)
    for outside in (model.embed, model.norm, model.head):
        outside.requires_grad_(False)
    assert layers_of(split_model(model, count=count, pattern="sequential")) == runs


def test_sequential_counts_the_embedding_and_the_head_in() -> None:
    # Embedding and head weigh about two blocks each, so the middle run takes more layers.
    specs = split_model(Tiny(8, vocabulary=10), count=3, pattern="sequential")
    assert layers_of(specs) == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert specs[0].names[0] == "embed.weight"
    assert specs[2].names[-1] == "head.weight"


@settings(max_examples=120, deadline=None)
@given(layers=st.integers(1, 24), data=st.data(), tied=st.booleans())
def test_every_trainable_tensor_is_in_exactly_one_fragment(layers: int, data: st.DataObject, tied: bool) -> None:
    pattern: Pattern = data.draw(st.sampled_from(["strided", "sequential"]))
    model = Tiny(layers, width=2, vocabulary=data.draw(st.integers(1, 40)), tied=tied)
    if data.draw(st.booleans()):
        count = data.draw(st.integers(1, layers))
        specs = split_model(model, count=count, pattern=pattern)
        assert len(specs) == count
        if pattern == "strided":
            assert layers_of(specs) == [list(range(p, layers, count)) for p in range(count)]
    else:
        limit = data.draw(st.integers(24, 2000))
        specs = split_model(model, max_bytes=limit, pattern=pattern)
        assert all(spec.nbytes <= limit or len(spec.names) == 1 for spec in specs)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(held(specs)) == sorted(names)
    for spec in specs:
        assert list(spec.names) == sorted(spec.names, key=names.index)
    if pattern == "sequential":
        assert held(specs) == names
    assert FragmentedModel(model, specs).specs == specs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "prefix"), [("qwen3", "model.layers."), ("gpt2", "transformer.h.")])
def test_language_models(kind: str, prefix: str, tied: bool) -> None:
    model = language_model(kind, 5, tied)
    specs = split_model(model, count=2)
    assert layers_of(specs, prefix) == [[0, 2, 4], [1, 3]]
    assert sorted(held(specs)) == sorted(name for name, _ in model.named_parameters())
    assert ("lm_head.weight" in held(specs)) is not tied
    assert sum(spec.numel for spec in specs) == sum(p.numel() for p in model.parameters())
    assert layers_of(split_model(model, count=5, pattern="sequential"), prefix) == [[0], [1], [2], [3], [4]]


def test_a_count_above_the_number_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 fragments were asked for, but the model has 7 trainable layers"):
        split_model(Tiny(7), count=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either how many fragments"),
        ({"count": 2, "max_bytes": 100}, "either how many fragments"),
        ({"count": 0}, "count of 0"),
        ({"max_bytes": 0}, "limit of 0"),
        ({"count": 1, "pattern": "spiral"}, "'spiral'; choose one of strided, sequential"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_model(Tiny(3), **arguments)


# --- cutting by bytes


def test_by_bytes_takes_as_few_fragments_as_fit() -> None:
    model = Tiny(6)  # a block is 80 bytes, the embedding and the head 80 each, the norm 32
    assert layers_of(split_model(model, max_bytes=10_000)) == [[0, 1, 2, 3, 4, 5]]
    specs = split_model(model, max_bytes=3 * BLOCK + 112)
    assert layers_of(specs) == [[0, 2, 4], [1, 3, 5]]
    assert [spec.nbytes for spec in specs] == [320, 352]
    specs = split_model(model, max_bytes=3 * BLOCK + 80)
    # Together with the norm the head does not fit any more, and by itself not either once the norm is in.
    assert layers_of(specs) == [[0, 2, 4], [1, 3, 5], []]
    assert specs[1].names[-2:] == ("norm.weight", "norm.bias")
    assert specs[2].names == ("head.weight",)
    assert held(split_model(model, max_bytes=BLOCK))[0] == "embed.weight"


def test_by_bytes_an_embedding_above_the_limit_stands_alone() -> None:
    model = Tiny(4, vocabulary=1000, tied=True)
    for pattern, expected in (("strided", [[], [0, 2], [1, 3]]), ("sequential", [[], [0, 1], [2, 3]])):
        specs = split_model(model, max_bytes=2 * BLOCK + 32, pattern=pattern)  # type: ignore[arg-type]
        assert specs[0].names == ("embed.weight",)
        assert specs[0].nbytes == 16_000
        assert layers_of(specs) == expected


def test_by_bytes_sequential_is_balanced_within_the_limit() -> None:
    model = Tiny(8)
    specs = split_model(model, max_bytes=5 * BLOCK, pattern="sequential")
    # 832 bytes in all: three runs, none of them a leftover.
    assert [spec.nbytes for spec in specs] == [240, 320, 272]
    assert held(specs) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_by_bytes_a_layer_above_the_limit_is_named(pattern: Pattern) -> None:
    with pytest.raises(ConfigError, match=r"layer blocks\.0 has 80 bytes .* raise the limit to at least 80 bytes"):
        split_model(Tiny(3), max_bytes=79, pattern=pattern)


# --- which parameters, which layers


def test_frozen_parameters_are_left_out_and_frozen_layers_do_not_count() -> None:
    model = Tiny(4)
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    specs = split_model(model, count=3)
    assert layers_of(specs) == [[0], [2], [3]]
    assert "embed.weight" not in held(specs)
    with pytest.raises(ConfigError, match="3 trainable layers"):
        split_model(model, count=4)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        split_model(Tiny(2).requires_grad_(False), count=1)


def test_tied_weights_count_once_even_as_two_parameter_objects() -> None:
    model = Tiny(2)
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert "head.weight" not in held(split_model(model, count=2))


def test_a_trainable_complex_parameter_is_refused_by_name() -> None:
    model = Tiny(2)
    model.norm.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match=r"norm\.phase .* torch\.complex64"):
        split_model(model, count=2)


def test_a_model_on_the_meta_device_has_the_same_layout() -> None:
    with torch.device("meta"):
        ghost = Tiny(5)
    assert split_model(ghost, count=2) == split_model(Tiny(5), count=2)


def test_lists_inside_a_layer_are_not_the_layers() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    class Other(Mixture):
        pass

    model = nn.Module()
    model.layers = nn.ModuleList([Mixture(), Mixture(), Mixture()])
    assert layers_of(split_model(model, count=3), "layers.") == [[0], [1], [2]]
    model.layers = nn.ModuleList([Mixture(), Other()])  # blocks of two classes: no list of layers
    with pytest.raises(ConfigError, match="no list of layers"):
        split_model(model, count=2)


def test_the_heaviest_list_is_the_list_of_layers() -> None:
    model = Tiny(3)
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    specs = split_model(model, count=3)
    assert layers_of(specs) == [[0], [1], [2]]
    assert "extra.8.bias" in specs[2].names


def test_a_model_without_layers_is_cut_into_runs_of_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    specs = split_model(model, count=3, pattern="sequential")
    assert [spec.names for spec in specs] == [(f"{i}.weight", f"{i}.bias") for i in range(3)]
    assert [len(s.names) for s in split_model(model, max_bytes=80, pattern="sequential")] == [2, 2, 2]
    with pytest.raises(ConfigError, match="choose the sequential pattern"):
        split_model(model, count=3)
    with pytest.raises(ConfigError, match=r"7 fragments .* 6 trainable tensors"):
        split_model(model, count=7, pattern="sequential")


# --- specs and digests


@pytest.mark.parametrize(
    ("index", "names", "shapes", "message"),
    [
        (-1, ("a",), ((1,),), "starts at 0"),
        (0, (), (), "0 names and 0 shapes"),
        (0, ("a", "b"), ((1,),), "2 names and 1 shapes"),
        (0, ("a", "a"), ((1,), (1,)), "twice: a"),
        (0, ("a",), ((2, -1),), "negative"),
    ],
)
def test_a_spec_checks_itself(
    index: int, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FragmentSpec(index=index, names=names, shapes=shapes)


def test_layout_digest_is_fixed() -> None:
    spec = FragmentSpec(index=0, names=("w", "bias"), shapes=((2, 3), ()))
    assert spec.numel == 7
    numbers = struct.pack
    encoded = (
        numbers(">3Q", 1, 0, 2)  # one fragment: index 0, two tensors
        + (numbers(">Q", 1) + b"w" + numbers(">3Q", 2, 2, 3))  # a name of 1 byte; 2 dimensions, 2 and 3
        + (numbers(">Q", 4) + b"bias" + numbers(">Q", 0))
    )
    assert layout_digest([spec]) == hashlib.blake2b(encoded, digest_size=32, person=b"stretto-layout").digest()
    assert layout_digest([spec]).hex() == "bb5215f0b2d8c5a81d41c89f166e6917243145102c94e139c70d19b7b4fc33c1"


def test_layout_digest_tells_layouts_apart() -> None:
    model = Tiny(6)
    layouts = [
        split_model(model, count=2),
        split_model(model, count=3),
        split_model(model, count=2, pattern="sequential"),
        split_model(Tiny(6, width=2), count=2),
        (FragmentSpec(index=0, names=("ab",), shapes=((2, 3),)),),
        (FragmentSpec(index=0, names=("ab",), shapes=((3, 2),)),),
        (FragmentSpec(index=0, names=("a", "b"), shapes=((2, 3), ())),),
        (),
    ]
    assert len({layout_digest(specs) for specs in layouts}) == len(layouts)
    assert layout_digest(split_model(Tiny(6), count=2)) == layout_digest(layouts[0])


# --- gather and scatter


def test_gather_lays_the_tensors_end_to_end() -> None:
    model = Tiny(3)
    whole = FragmentedModel(model, split_model(model, count=1))
    expected = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
    assert np.array_equal(whole.gather(0), expected)
    out = np.empty_like(expected)
    assert whole.gather(0, out) is out
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_what_is_gathered_can_be_scattered_back(kind: str, dtype: torch.dtype) -> None:
    model = language_model(kind, 3, tied=True).to(dtype)
    fragments = FragmentedModel(model, split_model(model, count=2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flats = [fragments.gather(p) for p in range(2)]
    assert all(flat.dtype == np.float32 for flat in flats)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not any(fragments.gather(p).any() for p in range(2))
    fragments.scatter(0, flats[0])
    first = set(fragments.specs[0].names)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] if name in first else torch.zeros_like(parameter))
    fragments.scatter(1, flats[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == dtype


def test_scatter_rounds_to_the_parameters_type_and_keeps_the_object() -> None:
    model = Tiny(1).to(torch.bfloat16)
    fragments = FragmentedModel(model, split_model(model, count=1))
    weight = model.head.weight
    fragments.scatter(0, np.full(fragments.specs[0].numel, 1.001, dtype=np.float32))
    assert model.head.weight is weight
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.tolist() == torch.full((5, 4), 1.0).tolist()


def test_parameters_that_are_not_contiguous() -> None:
    model = Tiny(1)
    values = torch.arange(20.0).reshape(4, 5)
    model.head.weight = nn.Parameter(values.t())
    assert not model.head.weight.is_contiguous()
    fragments = FragmentedModel(model, split_model(model, count=1))
    flat = fragments.gather(0)
    assert flat[-20:].tolist() == values.t().reshape(-1).tolist()
    fragments.scatter(0, flat + np.float32(1))
    assert torch.equal(values, torch.arange(20.0).reshape(4, 5) + 1)


def test_scatter_takes_a_read_only_array_without_a_warning() -> None:
    model = Tiny(1)
    fragments = FragmentedModel(model, split_model(model, count=1))
    flat = np.ones(fragments.specs[0].numel, dtype=np.float32)
    flat.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fragments.scatter(0, flat)
    assert fragments.gather(0).tolist() == flat.tolist()
    with pytest.raises(LocalProtocolError, match="read-only"):
        fragments.gather(0, flat)


def test_arrays_of_another_kind_are_refused_and_the_model_stays() -> None:
    model = Tiny(1)
    fragments = FragmentedModel(model, split_model(model, count=1))
    before = fragments.gather(0)
    n = before.size
    strided = np.zeros(2 * n, dtype=np.float32)[::2]
    for wrong in (np.zeros(n), np.zeros(n - 1, dtype=np.float32), np.zeros((1, n), dtype=np.float32), strided):
        with pytest.raises(LocalProtocolError, match=rf"fragment 0 is a contiguous float32 array of shape \({n},\)"):
            fragments.scatter(0, wrong)  # type: ignore[arg-type]
        with pytest.raises(LocalProtocolError, match="fragment 0"):
            fragments.gather(0, wrong)  # type: ignore[arg-type]
    assert np.array_equal(fragments.gather(0), before)


def test_fragments_of_another_model_are_refused_by_name() -> None:
    specs = split_model(Tiny(3), count=3)
    with pytest.raises(ConfigError, match=r"in no fragment are blocks\.3\.mix\.weight, blocks\.3\.mix\.bias"):
        FragmentedModel(Tiny(4), specs)
    with pytest.raises(ConfigError, match=r"not trainable parameters of this model are blocks\.2\.mix\.weight"):
        FragmentedModel(Tiny(2), specs)
    with pytest.raises(ConfigError, match=r"of another shape .* are embed\.weight, head\.weight"):
        FragmentedModel(Tiny(3, vocabulary=6), specs)
    with pytest.raises(ConfigError, match=r"in more than one fragment are blocks\.1\.mix\.weight"):
        FragmentedModel(Tiny(3), [*specs, FragmentSpec(index=3, names=specs[1].names, shapes=specs[1].shapes)])
    with pytest.raises(ConfigError, match=r"numbered 0 to 2 in order, got \[2, 1, 0\]"):
        FragmentedModel(Tiny(3), specs[::-1])
