"""The model: a Hugging Face configuration in, a causal language model and its loss out.

A run names its model by a table of plain values, ``model_type`` and that type's fields, so any causal language model
of the transformers library can be trained without code from here. Everything is built from the configuration alone:
nothing is ever fetched, and no code that a configuration might point to is loaded.

Presets follow the architectures of the paper's Table 2 (arXiv 2501.18512) with QK-norm, which is the Qwen3 family:
L layers, d = 64 x heads, vocabulary 32,000, tied embeddings, so 12 L d^2 + 32000 d parameters. The paper's MLP has two
matrices d x 4d; Qwen3's is gated and has three, so its width is two thirds of 4d, to the nearest multiple of 64, which
keeps the parameter count.

This is the only file that may import transformers. The import takes seconds, so it happens at the first model, not
at the start of every command.
"""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.node.portable_init import init_portably
from stretto.protocol.errors import ConfigError

MAX_LAYERS = 1_000  # the library makes lists of this length before anything else can be checked
MAX_SIZE = 1 << 31  # of any other whole number in the table
ATTENTION = ("sdpa", "eager")  # any other name could make the library look for a kernel on the network


def _preset(layers: int, heads: int, *, head_dim: int = 64, vocab_size: int = 32_000) -> dict[str, object]:
    width = heads * head_dim
    return {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": round(8 * width / 3 / 64) * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2_048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }


PRESETS: dict[str, dict[str, object]] = {
    # 0.9 M parameters over bytes (vocab_size of data.tokenizer); eight layers give four strided fragments two each
    "tiny": _preset(8, 3, head_dim=32, vocab_size=272),
    "35m": _preset(6, 8),
    "100m": _preset(9, 12),
    "200m": _preset(12, 16),
    "300m": _preset(15, 20),
    "500m": _preset(18, 24),
    "1b": _preset(24, 32),
    "4b": _preset(36, 48),
}


def build_model(
    config: Mapping[str, object], seed: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> nn.Module:
    """Build the model with initial weights that are the same bits on every machine (see ``portable_init``).

    config: ``model_type`` and fields of that type; ``attn_implementation`` may be "sdpa" (default) or "eager".
    seed: 0 .. 2^64 - 1. The weights are drawn in float32 on the CPU, then rounded to ``dtype`` and moved to
    ``device``; buffers keep their own dtype. The state of torch's global generators is left as it was.
    Raises ConfigError when the library cannot use the configuration.
    """
    build_meta_model(config)  # refuses what cannot be built before any memory is taken
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _explained(config):
        torch.default_generator.manual_seed(0)  # not the run's seed: these values are only measured
        model = _from_config(config)
    nominal = getattr(model.config, "initializer_range", None)
    init_portably(model, seed, float(nominal) if isinstance(nominal, int | float) else None)
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.train()


def build_meta_model(config: Mapping[str, object]) -> nn.Module:
    """Build names, shapes and structure only, on the meta device: no memory, no weights. Errors as ``build_model``."""
    with torch.device("meta"), _explained(config):
        model = _from_config(config)
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if empty:
        raise ConfigError(
            f"The model table gives parameter {empty[0]} no elements ({len(empty)} such parameters in all): one of "
            "its sizes is zero. Correct it."
        )
    return model


def count_parameters(model: nn.Module) -> int:
    """Number of trainable values; tied parameters count once. Works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def loss_fn(model: nn.Module, batch: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Next-token loss of a batch of token windows.

    batch: (B, T + 1) int64 ids, on the model's device; position t predicts position t + 1, so T predictions a row.
    z_loss: weight tau_z of mean(logsumexp(logits)^2), which keeps the logits from drifting.
    Returns (total, cross-entropy), float32 scalars in nats per token; both are means over B x T. The logarithms are
    taken in float32 whatever the model's dtype.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(input_ids=inputs).logits.float()  # (B, T, V) fp32
    # One logsumexp serves both terms: cross-entropy = logsumexp - logit of the target.
    log_normalizer = torch.logsumexp(logits, dim=-1)  # (B, T)
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # (B, T)
    cross_entropy = (log_normalizer - target_logits).mean()
    if z_loss == 0.0:
        return cross_entropy, cross_entropy
    return cross_entropy + z_loss * log_normalizer.square().mean(), cross_entropy


@contextmanager
def _explained(config: Mapping[str, object]) -> Iterator[None]:
    """Turn whatever the library raises for this configuration into one ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ConfigError:
        raise
    except (  # a bad size fails wherever in the library it is first used, so the list is long
        StrictDataclassError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        RuntimeError,
    ) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"The model table (model_type {config.get('model_type')!r}) cannot be built: {type(error).__name__}: "
            f"{why}. Correct that field, or begin from a preset: {', '.join(PRESETS)}."
        ) from error


def _from_config(config: Mapping[str, object]) -> nn.Module:
    """Let transformers build the model on the current default device, in float32, without a key-value cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    attention = fields.pop("attn_implementation", "sdpa")
    if attention not in ATTENTION:
        raise ConfigError(f"attn_implementation {attention!r} is not supported; write one of {', '.join(ATTENTION)}.")
    # typed as Any: the library's own annotations do not cover its factories
    factory: Any = AutoConfig
    blank = factory.for_model(_checked_type(model_type))
    _check_fields(fields, blank, str(model_type))
    hf_config = factory.for_model(model_type, **{**fields, "use_cache": False})
    if getattr(hf_config, "num_hidden_layers", 1) < 1:
        raise ConfigError("The model table says that the model has no layers. Give it at least one.")
    heads = getattr(hf_config, "num_attention_heads", None)
    kv_heads = getattr(hf_config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        # the library would find this at the first batch only
        raise ConfigError(
            f"The model table says num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the first must "
            "be a multiple of the second. Correct one of them."
        )
    models: Any = AutoModelForCausalLM
    return cast(nn.Module, models.from_config(hf_config, attn_implementation=attention, dtype=torch.float32))


def _checked_type(model_type: object) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return model_type
        raise ConfigError(
            f"model_type {model_type!r} is not a causal language model, so it has no next token to learn. "
            "Choose one that is, such as qwen3, llama or gpt2."
        )
    if model_type is None:
        raise ConfigError("The model table has no model_type. Write one such as qwen3, llama or gpt2.")
    near = difflib.get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Write one such as qwen3, llama or gpt2."
    raise ConfigError(f"The installed transformers library knows no model_type {model_type!r}. {hint}")


def _check_fields(fields: Mapping[str, object], blank: Any, model_type: str) -> None:
    """Refuse names that the library would silently keep without using; a misspelt size must not train a default."""
    known = set(blank.to_dict()) | set(vars(blank)) | set(blank.attribute_map) | {"rope_theta", "rope_scaling"}
    known = {name for name in known if not name.startswith("_")} - {"model_type", "dtype", "transformers_version"}
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}."
            raise ConfigError(
                f"The model table has a field {name!r} that model_type {model_type} does not have; {hint}"
            )
        limit = MAX_LAYERS if "layer" in name else MAX_SIZE
        if isinstance(value, int) and value > limit:
            raise ConfigError(f"The model table says {name} = {value}; at most {limit} is allowed here. Lower it.")
