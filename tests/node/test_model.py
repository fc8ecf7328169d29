"""The model table, the portable initial weights and the loss."""

import math
import socket
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from stretto.node.data.tokenizer import load_tokenizer
from stretto.node.model import PRESETS, build_meta_model, build_model, count_parameters, loss_fn
from stretto.node.portable_init import CHUNK, fill, init_portably, round_to_grid
from stretto.protocol.errors import ConfigError

TINY = PRESETS["tiny"]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def digest(model: nn.Module) -> str:
    """BLAKE2b over names and little-endian float32 bytes of all parameters."""
    hasher = blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        hasher.update(name.encode())
        hasher.update(parameter.detach().numpy().astype("<f4").tobytes())
    return hasher.hexdigest()


def test_initial_weights_are_these_bits_on_every_machine() -> None:
    first, second = build_model(TINY, 7), build_model(TINY, 7)
    assert digest(first) == digest(second) == "60ce4f8e94e8dbfaac27c8ce050ff5ef"
    assert digest(build_model(TINY, 8)) == "4c559739192e627de718a4688c0b0c64"


def test_fill_follows_its_written_definition_across_chunks() -> None:
    count, std = CHUNK + 3, 0.03125
    values = torch.empty(count)
    fill(values, 5, "some.weight", std)
    key = blake2b((5).to_bytes(8, "little") + b"some.weight", digest_size=16, person=b"stretto-init").digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(3 * count).tolist()
    for index in (0, 1, CHUNK - 1, CHUNK, CHUNK + 2):
        total = sum((word >> shift) & 0xFFFF for word in words[3 * index : 3 * index + 3] for shift in (0, 16, 32, 48))
        expected = np.float32(total - 393_210) * np.float32(std / math.sqrt(2**32 - 1))
        assert values[index].item() == expected


def test_values_look_normal_and_differ_between_names() -> None:
    first, second = torch.empty(1 << 18), torch.empty(1 << 18)
    fill(first, 0, "a", 1.0)
    fill(second, 0, "b", 1.0)
    assert abs(first.mean().item()) < 0.01
    assert abs(first.std().item() - 1.0) < 0.01
    assert abs((first * second).mean().item()) < 0.01
    assert abs((first[1:] * first[:-1]).mean().item()) < 0.01
    # the sum of twelve uniforms has kurtosis 3 - 0.1
    assert abs(first.pow(4).mean().item() - 2.9) < 0.06
    assert abs((first.abs() < 1.0).float().mean().item() - 0.683) < 0.01


def test_widths_are_the_models_own_and_constants_stay() -> None:
    model = build_model(TINY, 0)
    random = [p for p in model.parameters() if p.dim() == 2]
    pooled = torch.cat([p.detach().flatten() for p in random])
    assert abs(pooled.std().item() / 0.02 - 1.0) < 0.01
    for parameter in random:
        assert abs(parameter.std().item() / 0.02 - 1.0) < 6.0 / math.sqrt(2 * parameter.numel())
    norms = [p for p in model.parameters() if p.dim() == 1]
    assert len(norms) == 8 * 4 + 1  # two norms and the query and key norms a layer, one at the end
    assert all(bool((p == 1.0).all()) for p in norms)


def test_width_that_no_field_names_is_measured() -> None:
    # GPT-2 draws its output projections narrower: 0.02 / sqrt(2 x layers)
    table = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 2, "n_positions": 32}
    model = build_model({**table, "bos_token_id": 0, "eos_token_id": 0}, 3)
    projections = [p for name, p in model.named_parameters() if name.endswith("c_proj.weight")]
    pooled = torch.cat([p.detach().flatten() for p in projections])
    assert abs(pooled.std().item() / (0.02 / 4.0) - 1.0) < 0.015
    assert all(bool((p == 0.0).all()) for name, p in model.named_parameters() if name.endswith("bias"))


def test_round_to_grid_is_exact_and_close() -> None:
    assert round_to_grid(0.5) == 0.5
    assert round_to_grid(0.02) == 82 / 4096  # 81.92 / 128 / 32
    for std in np.geomspace(1e-6, 10.0, 997):
        rounded = round_to_grid(float(std))
        assert abs(rounded / std - 1.0) <= 1 / 128
        assert round_to_grid(rounded) == rounded


def test_tied_embedding_is_one_tensor() -> None:
    model = build_model(TINY, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = build_model({**TINY, "tie_word_embeddings": False}, 0)
    assert count_parameters(untied) - count_parameters(model) == 272 * 96
    assert torch.equal(untied.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert not torch.equal(untied.lm_head.weight, model.lm_head.weight)


def test_padding_row_stays_zero() -> None:
    weight = build_model({**LLAMA, "pad_token_id": 3}, 0).model.embed_tokens.weight
    assert bool((weight[3] == 0.0).all())
    assert bool((weight[2] != 0.0).any())


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    build_model(LLAMA, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_dtype_is_a_rounding_of_the_same_values() -> None:
    exact, half = build_model(LLAMA, 0), build_model(LLAMA, 0, dtype=torch.bfloat16)
    for (_, a), (_, b) in zip(exact.named_parameters(), half.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b)
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_structured_initial_values_are_refused() -> None:
    module = nn.Module()
    module.decay = nn.Parameter(torch.arange(1.0, 17.0).log())
    with pytest.raises(ConfigError, match=r"parameter decay have mean 1\.9"):
        init_portably(module, 0, 0.02)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"not {seed}"):
        build_model(LLAMA, seed)


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("35m", 35.3e6),
        ("100m", 88.3e6),
        ("200m", 183.8e6),
        ("300m", 335.9e6),
        ("500m", 558.8e6),
        ("1b", 1.273e9),
        ("4b", 4.175e9),
    ],
)
def test_presets_have_the_papers_sizes(name: str, paper: float) -> None:
    model = build_meta_model(PRESETS[name])
    assert abs(count_parameters(model) / paper - 1.0) < 0.01
    assert all(parameter.is_meta for parameter in model.parameters())
    assert PRESETS[name]["head_dim"] == 64
    assert PRESETS[name]["vocab_size"] == 32_000


def test_tiny_fits_the_byte_tokenizer() -> None:
    assert TINY["vocab_size"] == load_tokenizer("bytes").vocab_size
    assert count_parameters(build_meta_model(TINY)) == 912_992
    assert TINY["num_hidden_layers"] == 8


def test_model_uses_fused_attention_and_no_cache() -> None:
    model = build_model(LLAMA, 0)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.use_cache is False
    assert model.training
    assert build_model({**LLAMA, "attn_implementation": "eager"}, 0).config._attn_implementation == "eager"


def test_building_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model build opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert count_parameters(build_model(TINY, 0)) == 912_992


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen33"}, "no model_type 'qwen33'. Did you mean qwen3"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"hidden_sizes": 64}, "field 'hidden_sizes' .* did you mean hidden_size"),
        ({"auto_map": {"AutoConfig": "x.y"}}, "field 'auto_map'"),
        ({"_attn_implementation": "eager"}, "field '_attn_implementation'"),
        ({"attn_implementation": "someone/kernel"}, "'someone/kernel' is not supported; write one of sdpa, eager"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"hidden_size": 0}, "no elements"),
        ({"hidden_size": -1}, "negative dimension"),
        ({"hidden_size": 1 << 40}, "hidden_size = 1099511627776; at most"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers = 1000000000; at most 1000"),
        ({"num_hidden_layers": 0}, "no layers"),
        ({"num_key_value_heads": 2}, "num_attention_heads = 3 and num_key_value_heads = 2"),
        ({"num_attention_heads": 0}, "cannot be built|no elements"),
        ({"hidden_act": "foo"}, "KeyError: 'foo'"),
        ({"initializer_range": float("nan")}, "found std nan"),
    ],
)
def test_bad_tables_give_one_clear_paragraph(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model({**TINY, **change}, 0)
    assert "\n" not in str(caught.value)


def test_loss_is_cross_entropy_plus_z_loss() -> None:
    model = build_model(LLAMA, 1)
    batch = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    total, cross_entropy = loss_fn(model, batch, 1e-2)
    with torch.no_grad():
        logits = model(input_ids=batch[:, :-1]).logits
    expected = functional.cross_entropy(logits.reshape(-1, 64), batch[:, 1:].reshape(-1))
    z = torch.logsumexp(logits, -1).square().mean()
    torch.testing.assert_close(cross_entropy, expected)
    torch.testing.assert_close(total, expected + 1e-2 * z)
    assert abs(cross_entropy.item() - math.log(64)) < 0.1  # untrained: close to uniform
    plain, same = loss_fn(model, batch, 0.0)
    torch.testing.assert_close(plain, expected)
    assert plain is same


def test_loss_is_float32_and_trains_every_parameter() -> None:
    model = build_model(LLAMA, 1, dtype=torch.bfloat16)
    batch = torch.arange(20).reshape(2, 10)
    total, cross_entropy = loss_fn(model, batch, 1e-4)
    assert total.dtype == cross_entropy.dtype == torch.float32
    total.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_a_prediction_sees_only_the_past() -> None:
    model = build_model(LLAMA, 1)
    first = torch.arange(8).reshape(1, 8)
    second = first.clone()
    second[0, 5:] = 60
    with torch.no_grad():
        a, b = model(input_ids=first).logits, model(input_ids=second).logits
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])
