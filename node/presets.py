"""Ready-made run configs for ``stretto new`` and ``stretto demo``."""

from stretto.node.data.corpus import open_corpus
from stretto.node.data.tokenizer import load_tokenizer
from stretto.node.model import PRESETS
from stretto.protocol.config import (
    DataConfig,
    EvalConfig,
    GroupConfig,
    InnerConfig,
    OuterConfig,
    RunConfig,
)
from stretto.protocol.errors import ConfigError


def model_table(preset: str, vocab_size: int) -> dict[str, object]:
    """The ``[model]`` table of a preset for a tokenizer of that size."""
    if preset not in PRESETS:
        raise ConfigError(f"no model preset {preset!r}; there are {', '.join(PRESETS)}")
    return {**PRESETS[preset], "vocab_size": vocab_size}


def _fragments(preset: str) -> int:
    """As many evenly spaced departures in H = 100 steps as the preset has layers for: small fragments, small tau.

    For every line to hide in tau_max = 5 steps, P >= H / tau_max = 20 fragments are wanted; only ``1b`` and ``4b``
    have so many layers.
    """
    layers = PRESETS[preset]["num_hidden_layers"]
    assert isinstance(layers, int)
    return max(count for count in (1, 2, 4, 5, 10, 20) if count <= layers)


def sequence_length(preset: str) -> int:
    """Tokens per training sequence: the paper's 1,024."""
    return 128 if preset == "tiny" else 1024


def preset_run(name: str, *, preset: str, table: dict[str, object], data: DataConfig, seed: int = 0) -> RunConfig:
    """A run config with the paper's settings for ``preset``, on ``data``; ``table`` is its ``[model]`` table."""
    tiny = preset == "tiny"
    return RunConfig(
        name=name,
        seed=seed,
        model=table,
        data=data,
        inner=InnerConfig(
            lr=3e-3 if tiny else 4e-4,
            tokens_per_step=1024 if tiny else 65_536,
            warmup_steps=50 if tiny else 1000,
            total_steps=5000 if tiny else 50_000,
        ),
        outer=OuterConfig(fragments=_fragments(preset), inner_steps=100),
        group=GroupConfig(min_size=1),
        eval=EvalConfig(),
    )


def new_run(name: str, *, preset: str, source: str, tokenizer: str, seed: int) -> RunConfig:
    """A run config with the paper's settings for ``preset``; the corpus is read once to take its fingerprint."""
    tokens = load_tokenizer(tokenizer)
    corpus = open_corpus(source, tokens, cache_dir=None)
    table = model_table(preset, tokens.vocab_size)
    data = DataConfig(
        source=source,
        tokenizer=tokenizer,
        sequence_length=sequence_length(preset),
        seed=seed,
        fingerprint=corpus.fingerprint.hex(),
        tokenizer_digest=tokens.digest.hex(),
    )
    return preset_run(name, preset=preset, table=table, data=data, seed=seed)


def planned_run(preset: str) -> RunConfig:
    """The run config that ``stretto plan`` reckons with: the preset with its own vocabulary, and no corpus."""
    if preset not in PRESETS:
        raise ConfigError(f"no model preset {preset!r}; there are {', '.join(PRESETS)}")
    data = DataConfig(sequence_length=sequence_length(preset))
    return preset_run(preset, preset=preset, table=dict(PRESETS[preset]), data=data)


def demo_run(*, inner_steps: int, fragments: int, seed: int, rounds: int) -> RunConfig:
    """The run of ``stretto demo``: about a million parameters on the Python library's sources."""
    tokens = load_tokenizer("bytes")
    corpus = open_corpus("stdlib", tokens, cache_dir=None)
    steps = inner_steps * (rounds + 2 * fragments) // fragments
    return RunConfig(
        name="demo",
        seed=seed,
        model=model_table("tiny", tokens.vocab_size),
        data=DataConfig(source="stdlib", sequence_length=128, seed=seed, fingerprint=corpus.fingerprint.hex()),
        inner=InnerConfig(lr=3e-3, tokens_per_step=512, warmup_steps=min(20, steps // 4), total_steps=max(steps, 40)),
        outer=OuterConfig(fragments=fragments, inner_steps=inner_steps, tau_max=min(5, inner_steps - 1)),
        group=GroupConfig(min_size=1),
    )
