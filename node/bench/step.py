"""``stretto bench step``: what synchronization costs the trainer, without the network.

A model of about 30 million parameters trains on the CPU through the very ``Trainer``, ``Sync`` and
``StreamingDiLoCo`` that a node uses. In the "on" blocks a round departs every few steps: snapshot, encode, average of
four encoded contributions, outer step and digest run in a worker thread, the merge between two steps; a round is
always in flight. In the "off" blocks nothing departs. Blocks alternate, so that the machine's mood hits both alike.

Memory is measured in processes of their own: the resident set of plain training against that of training with sync,
and its slope over many rounds.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from stretto.node.data.stream import TokenStream
from stretto.node.memory import empty_for
from stretto.node.model import build_model, count_parameters
from stretto.node.sync import Sync
from stretto.node.trainer import StepReport, Trainer, make_optimizer
from stretto.protocol.actions import Rules
from stretto.protocol.chain import CommitRecord, Member, SignedRecord
from stretto.protocol.config import DataConfig, InnerConfig, OuterConfig, RunConfig
from stretto.protocol.digest import PEER_ID_BYTES, payload_digest
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.live import decoded_norm
from stretto.protocol.peer import Peer
from stretto.protocol.schedule import Clock
from stretto.protocol.streaming import StreamingDiLoCo

GROUP = 4
STEPS_PER_ROUND = 4
TOKENS = 512


def bench_run() -> RunConfig:
    """About 30 million parameters in 8 fragments; a round every four steps, merged four steps later."""
    model = {
        "model_type": "qwen3",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return RunConfig(
        name="bench",
        model=model,
        data=DataConfig(sequence_length=128),
        inner=InnerConfig(tokens_per_step=TOKENS),
        outer=OuterConfig(inner_steps=8 * STEPS_PER_ROUND, fragments=8, tau_max=STEPS_PER_ROUND),
    )


class Stage:
    """A replica, and a played group whose other members' contributions are already here."""

    def __init__(self, device: torch.device, micro_batch: int) -> None:
        self.run, self.device = bench_run(), device
        model = build_model(self.run.model, 0, device=device)
        self.parameters = count_parameters(model)
        self.specs = split_model(model, count=self.run.outer.fragments, pattern="strided")
        self.fragments = FragmentedModel(model, self.specs)
        tokens = np.random.default_rng(0).integers(0, 8192, 400_000, dtype=np.uint16)
        data = self.run.data
        stream = TokenStream(tokens, data.sequence_length, 0, unit_sequences=data.unit_sequences)
        self.peer = self._peer()
        tau = self.run.outer.tau_max
        on_device = device.type == "cuda"
        self.sync = Sync(self.fragments, self.peer, tau_max=tau, fixed_tau=tau, encode_on_device=on_device)
        self.trainer = Trainer(
            model=model,
            optimizer=make_optimizer(model, self.run.inner),
            stream=stream,
            config=self.run.inner,
            sync=self.sync,
            sequence_length=self.run.data.sequence_length,
            micro_batch=micro_batch,
            device=device,
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="round")
        self._round = 0
        self.rounds = 0
        self.others = [self._other(index) for index in range(len(self.specs))]

    def _peer(self) -> Peer:
        weights = (self.fragments.gather(index) for index in range(len(self.specs)))
        outer = self.run.outer
        return Peer(
            me=_peer(0),
            config=self.run,
            diloco=StreamingDiLoCo(self.run, weights, empty_for(self.device)),
            rules=Rules(inner_steps=outer.inner_steps, fragments=8, min_group=1, max_group=8, window=1.0),
            sign=lambda _: bytes(64),
            verify=lambda *_: True,
        )

    def _other(self, fragment: int) -> bytes:
        """A contribution that the three other members share: decoding does not look at who sent it."""
        gradient = np.random.default_rng(fragment).normal(0, 1e-3, self.specs[fragment].numel)
        return self.peer.diloco.codec.encode(gradient.astype(np.float32))

    def depart(self) -> "Future[None]":
        """Start the next round in the worker thread."""
        fragment = self._round % len(self.specs)
        self._round += 1
        return self._worker.submit(self._one_round, fragment)

    def _one_round(self, fragment: int) -> None:
        """Everything that a node does for a round, but for the sockets."""
        diloco = self.peer.diloco
        if diloco.fragments[fragment].pending:
            return
        contribution = self.sync.leave(fragment)
        with self.sync.outer_lock:
            diloco.left(contribution)
        other = self.others[fragment]
        payloads = {payload_digest(other): other, contribution.digest: contribution.payload}
        names = [contribution.digest] + [payload_digest(other)] * (GROUP - 1)
        members = tuple(Member(_peer(index), TOKENS, name) for index, name in enumerate(names))
        for _ in range(GROUP - 1):
            payload_digest(other)
            decoded_norm(diloco.codec, other, diloco.fragments[fragment].anchor.size)
        reduced = diloco.reduce(fragment, members, payloads)
        tip = diloco.fragments[fragment].tip
        record = CommitRecord(
            run=self.peer.run,
            fragment=fragment,
            round=self.rounds,
            version=tip.version + 1,
            prev=tip.head,
            members=members,
            electors=tuple(member.peer for member in members),
            state=reduced.digest,
            tokens_total=tip.tokens_total + GROUP * TOKENS,
            clock=Clock(0, 0.0, 1.0),
            coordinator=_peer(0),
        )
        with self.sync.outer_lock:
            diloco.install(fragment, SignedRecord(record, bytes(64)), reduced, me=_peer(0))
        self.rounds += 1

    def train(self, steps: int, *, on: bool) -> list[StepReport]:
        """A block of inner steps, with rounds or without."""
        reports: list[StepReport] = []
        flights: list[Future[None]] = []
        loop: Iterator[StepReport] = self.trainer.steps(lambda: 1000.0)
        for number in range(steps):
            if on and number % STEPS_PER_ROUND == 0:
                flights.append(self.depart())
            reports.append(next(loop))
        for flight in flights:
            flight.result()
        return reports

    def settle(self) -> None:
        """Merge what is pending, whatever its tau."""
        tau, self.sync.fixed_tau = self.sync.fixed_tau, None
        self.sync.come_back()
        self.sync.fixed_tau = tau


def _peer(index: int) -> bytes:
    return (b"\x00\x24\x08\x01\x12\x20" + bytes(31) + bytes([index]))[:PEER_ID_BYTES]


def bench_step(*, blocks: int, steps: int, device: str, threads: int, memory_rounds: int) -> dict[str, Any]:
    """Time ``blocks`` pairs of blocks of ``steps`` inner steps; then memory. Values are plain, for JSON."""
    if threads:
        torch.set_num_threads(threads)
    stage = Stage(torch.device(device), micro_batch=TOKENS // 128)
    sync = stage.sync
    stage.train(2, on=False)
    on, off, ratios, blocked, wall = [], [], [], 0.0, 0.0
    for block in range(blocks):
        for mode in (True, False) if block % 2 else (False, True):
            before = sync.blocked_seconds
            times = [report.seconds for report in stage.train(steps, on=mode)]
            stage.settle()
            if mode:
                on.append(sum(times) / len(times))
                blocked += sync.blocked_seconds - before
                wall += sum(times)
            else:
                off.append(sum(times) / len(times))
        ratios.append(on[-1] / off[-1])
    result: dict[str, Any] = {
        "parameters": stage.parameters,
        "fragments": len(stage.specs),
        "group": GROUP,
        "steps_per_round": STEPS_PER_ROUND,
        "tau": sync.fixed_tau,
        "device": device,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "rounds": stage.rounds,
        "step_seconds_on": median(on),
        "step_seconds_off": median(off),
        "on_over_off": median(ratios),
        "on_over_off_per_block": [round(ratio, 4) for ratio in ratios],
        "blocked_fraction": blocked / wall,
    }
    if memory_rounds:
        result |= measure_memory(device, memory_rounds, stage)
    return result


def measure_memory(device: str, rounds: int, stage: Stage) -> dict[str, Any]:
    """Resident set with and without sync, each in a fresh process, and its slope over ``rounds`` rounds."""
    plain, synced = (_child(mode, device, rounds) for mode in ("plain", "sync"))
    largest = max(spec.numel for spec in stage.specs)
    return {
        "rss_plain": plain["peak"],
        "rss_sync": synced["peak"],
        "rss_over_plain": synced["peak"] - plain["peak"],
        "rss_allowed": 8 * stage.parameters + 3 * 4 * largest,
        "rss_rounds": rounds,
        "rss_slope_bytes_per_round": synced["slope"],
    }


def _child(mode: str, device: str, rounds: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "stretto.node.bench.step", mode, device, str(rounds)],
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _resident() -> int:
    """Resident set of this process in bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _memory_process(mode: str, device: str, rounds: int) -> dict[str, float]:
    """Runs in a process of its own: the highest resident set while training, and the slope over rounds alone."""
    stage = Stage(torch.device(device), micro_batch=TOKENS // 128)
    if mode == "plain":
        stage.peer.diloco.fragments.clear()
        stage.others.clear()
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], _resident())

    threading.Thread(target=watch, daemon=True).start()
    stage.train(2 * STEPS_PER_ROUND if mode == "plain" else 4 * STEPS_PER_ROUND, on=mode == "sync")
    highest, sizes = peak[0], []
    if mode == "sync":
        stage.settle()
        for _ in range(rounds):
            stage.depart().result()
            stage.settle()
            sizes.append(_resident())
        highest = peak[0]
    stop.set()
    half = sizes[len(sizes) // 4 :]
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 2 else 0.0
    return {"peak": float(highest), "slope": slope}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_memory_process(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
