"""The parts of a node that follow from its configs: device, corpus, fragments, the protocol side of a replica.

Each function makes one part and refuses, in words, what does not fit. ``stretto.node.app`` puts them together.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stretto.node.codec_pool import PooledE3M0
from stretto.node.console import Console
from stretto.node.data.corpus import Corpus, open_corpus
from stretto.node.data.tokenizer import load_tokenizer
from stretto.node.memory import empty_for
from stretto.node.swarm.identity import Identity, verify
from stretto.protocol.actions import Rules
from stretto.protocol.codecs import E3M0
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.peer import Peer
from stretto.protocol.streaming import StreamingDiLoCo

CODEC_THREADS = 2
"""One thread nearly fills the memory bus of a home machine, and the trainer wants the other cores."""


def choose_device(name: str, console: Console) -> torch.device:
    """The torch device of that name. ConfigError lists the devices if it is not there; ``auto`` says what it took."""
    available = ["cpu"]
    if torch.cuda.is_available():
        available += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        chosen = available[1] if len(available) > 1 else "cpu"
        if chosen == "cpu":
            console.say("WARNING no GPU found, training on the CPU")
        elif len(available) > 2 and chosen.startswith("cuda"):
            console.say(
                f"WARNING of {', '.join(available[1:])} only {chosen} is used: a node trains on one GPU. Another node "
                "may use another one, with its own --data-dir, --port and --device"
            )
        return torch.device(chosen)
    if name not in available and not (name == "cuda" and len(available) > 1):
        raise ConfigError(f"device {name!r} is not available; this machine has {', '.join(available)}")
    return torch.device(name)


def open_data(run: RunConfig, data_dir: Path) -> Corpus:
    """The run's corpus; it and the tokenizer are checked against the digests in the config."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    corpus = open_corpus(run.data.source, tokenizer, cache_dir=data_dir / "cache")
    pairs = (
        ("tokenizer", run.data.tokenizer_digest, tokenizer.digest.hex()),
        ("corpus", run.data.fingerprint, corpus.fingerprint.hex()),
    )
    for what, wanted, found in pairs:
        if wanted and wanted != found:
            raise ConfigError(
                f"the run's {what} has fingerprint {wanted[:16]}, the one here {found[:16]}: peers must train on the "
                f"same data ({run.data.source}, {run.data.tokenizer}). With stdlib that means the same Python version "
                f"({sys.version.split()[0]} here)"
            )
    vocabulary = run.model.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocabulary}, the tokenizer {run.data.tokenizer} needs {tokenizer.vocab_size}"
        )
    return corpus


def cut_model(run: RunConfig, model: torch.nn.Module) -> FragmentedModel:
    """The model in fragments as the run wants them."""
    outer = run.outer
    specs = split_model(
        model, count=outer.fragments or None, max_bytes=outer.fragment_bytes or None, pattern=outer.pattern
    )
    if outer.inner_steps < len(specs):
        raise ConfigError(
            f"outer.fragment_bytes cuts the model into {len(specs)} fragments, more than outer.inner_steps "
            f"({outer.inner_steps}): make fragments larger or H longer"
        )
    return FragmentedModel(model, specs)


def make_peer(
    run: RunConfig,
    model: FragmentedModel,
    identity: Identity,
    device: torch.device,
    *,
    can_coordinate: bool,
    rules: Rules | None = None,
) -> Peer:
    """The protocol side of a replica whose local weights are the initial ones.

    Anchors and momenta stay in host memory; only the fragment in hand visits the device (the paper, section 2.5).
    """
    initial = (model.gather(index) for index in range(len(model.specs)))
    diloco = StreamingDiLoCo(run, initial, empty_for(device))
    if run.wire.up == E3M0.name:
        diloco.codec = PooledE3M0(ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="codec"))
    rules = rules or Rules(
        inner_steps=run.outer.inner_steps,
        fragments=len(model.specs),
        min_group=run.group.min_size,
        max_group=run.group.max_size,
        window=run.group.window,
    )
    return Peer(
        me=identity.peer_id_bytes,
        config=run,
        diloco=diloco,
        rules=rules,
        sign=identity.sign,
        verify=verify,
        can_coordinate=can_coordinate,
    )


def last_round(run: RunConfig, fragments: int, limit: int) -> int:
    """The first round that does not depart any more: the run's end, or the node's own limit."""
    cycles = run.inner.total_steps / run.outer.inner_steps - 1
    end = max(1, int(cycles * fragments) + 1)
    return min(end, limit) if limit else end
