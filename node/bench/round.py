"""``stretto bench round``: what one averaging round costs a peer, next to hivemind's averager, in the same run.

Peers are processes of their own with real sockets on loopback. Ours are light peers (``light``): the node's own code
without the training. hivemind's are its DHT and DecentralizedAverager over one tensor of as many float32
(``hivemind_peer``). What is counted, per peer and round, medians for seconds of waiting and means for the rest:

    wall        ours: from the clock's departure to the result in the local weights, all that a round does.
                hivemind's: from the common start of ``step()`` to the result in the tensor, without what the benchmark
                does between matchmaking and all-reduce
    allreduce   hivemind's second part alone, since a trainer may compute during matchmaking
    cpu         CPU seconds of the process and all its children (p2pd, hivemind's own processes), idle time between
                rounds included
    bytes_up, bytes_down   on the TCP connections of those processes, as the kernel counts them: payloads, control
                messages, the DHT, encryption and headers of libp2p
    payload_up, control_up, control_share   ours, as the node counts them: encoded vectors, control messages, and the
                share of the latter in both

The bytes that a group of M needs, per peer in the mean and one way, for n values and payload(n, codec) bytes:

    M <= 3      (M - 1) payload(n, up)                                  everybody sends to everybody
    M > 3       (M - 1) / M (payload(n, up) + payload(n, down))         the vector is reduced in parts

Machines differ and other programs disturb, so ratios are taken within one run, and the contenders take turns in
``passes``. On a busy machine trust ratios of CPU and bytes; the load average is in the report.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import fmean, median
from typing import Any

from stretto.node.bench.contenders import (
    HIVEMIND_CODECS,
    INNER_STEPS,
    Samples,
    measure_averager,
    measure_light_peers,
)
from stretto.node.bench.counters import available
from stretto.node.bench.crew import Crew, Worker
from stretto.protocol.codecs import get_codec
from stretto.protocol.config import GroupConfig, OuterConfig, RunConfig, WireConfig
from stretto.protocol.errors import ConfigError

SECONDS_PER_BYTE = 1e-7
"""A generous guess of the CPU time that a byte costs in all, to choose the interval between rounds."""


@dataclass(frozen=True, kw_only=True)
class RoundBench:
    """What to measure: ``numel`` float32, groups of each size in ``peers``, the run's codecs.

    Each contender has ``rounds`` rounds that count in each of ``passes`` passes.
    """

    numel: int = 8_000_000
    peers: tuple[int, ...] = (4, 8)
    rounds: int = 4
    passes: int = 2
    up: str = WireConfig().up
    down: str = WireConfig().down
    hivemind: bool = True

    def __post_init__(self) -> None:
        if not available():
            raise ConfigError("bench round reads /proc and the kernel's socket diagnosis, which only Linux has")
        if not 1000 <= self.numel <= 1_000_000_000:
            raise ConfigError(f"--millions gives {self.numel} floats; bench round takes 0.001 to 1000 million")
        if not self.peers or not all(2 <= count <= 64 for count in self.peers):
            raise ConfigError(f"--peers is {list(self.peers)}; each must be 2 to 64")
        if not (1 <= self.rounds <= 1000 and 1 <= self.passes <= 100):
            raise ConfigError(f"--rounds is {self.rounds} and --passes {self.passes}: 1 to 1000 and 1 to 100")
        WireConfig(up=self.up, down=self.down)


def _silent(text: str) -> None:
    """Says nothing."""


def bench_round(bench: RoundBench, say: Callable[[str], None] = _silent) -> dict[str, Any]:
    """Measure, and ``say`` what is being measured. Returns a JSON object, see the file's docstring.

    Raises:
        StrettoError: if a peer fails.
    """
    report: dict[str, Any] = {
        "parameters": bench.numel,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [os.getloadavg()[0]],
        "rounds": bench.rounds,
        "passes": bench.passes,
        "up": bench.up,
        "down": bench.down,
        "payload_bytes": {name: get_codec(name).nbytes(bench.numel) for name in ("fp32", bench.up, bench.down)},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("stretto-swarm", "hivemind", "numpy", "torch")},
        "peers": {},
        "sizes": {},
    }
    with Crew() as crew:
        for count in sorted(set(bench.peers)):
            report["peers"][str(count)] = found = _bench_size(bench, crew, count, say)
            keys = ("wall", "cpu", "bytes_up", "formula_bytes", "ratio_to_formula", "control_share")
            report["sizes"][str(count)] = {key: found["stretto"][key] for key in keys}
    report["load_average"].append(os.getloadavg()[0])
    return report


def formula_bytes(numel: int, peers: int, up: str, down: str) -> float:
    """Bytes that a peer sends in one round of ``peers``, in the mean; see the file's docstring."""
    contribution, average = get_codec(up).nbytes(numel), get_codec(down).nbytes(numel)
    if peers <= 3:
        return float((peers - 1) * contribution)
    return (peers - 1) / peers * (contribution + average)


def make_run(numel: int, peers: int, up: str, down: str) -> RunConfig:
    """A run of one fragment whose rounds commit with all ``peers`` only; else the defaults."""
    return RunConfig(
        name=f"bench-{peers}",
        model={"model_type": "one-tensor", "numel": numel},
        outer=OuterConfig(fragments=1, inner_steps=INNER_STEPS),
        wire=WireConfig(up=up, down=down),
        group=GroupConfig(min_size=peers, max_size=max(peers, GroupConfig().max_size)),
    )


# ---------------------------------------------------------------------- one group size


def _bench_size(bench: RoundBench, crew: Crew, count: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All contenders with ``count`` peers, in turns."""
    say(f"{count} peers: starting their processes")
    workers = crew.grow(count)
    downs = {"stretto": bench.down}
    if count > 3 and bench.down != bench.up:
        downs[f"stretto_{bench.up}"] = bench.up
    contenders = {name: _light(bench, crew, workers, down) for name, down in downs.items()}
    if bench.hivemind:
        contenders |= {f"hivemind_{codec}": _averager(bench, crew, workers, codec) for codec in HIVEMIND_CODECS}
    taken: dict[str, list[Samples]] = {name: [] for name in contenders}
    for number in range(bench.passes):
        for name, contender in contenders.items():
            began = time.monotonic()
            taken[name].append(contender())
            wall, seconds = median(taken[name][-1].seconds["wall"]), time.monotonic() - began
            say(f"{count} peers, pass {number + 1} of {bench.passes}, {name}: {wall:.3f} s a round ({seconds:.0f} s)")
    found: dict[str, Any] = {name: _summary(samples) for name, samples in taken.items()}
    for name, down in downs.items():
        _against_formula(found[name], formula_bytes(bench.numel, count, bench.up, down))
        if bench.hivemind:
            _against_hivemind(found[name], found)
    if bench.hivemind:
        ratios = ("wall_ratio_float16", "allreduce_ratio_float16", "cpu_ratio_float16", "bytes_ratio_float16")
        found |= {key: found["stretto"][key] for key in ratios}
    return found


def _light(bench: RoundBench, crew: Crew, workers: Sequence[Worker], down: str) -> Callable[[], Samples]:
    run = make_run(bench.numel, len(workers), bench.up, down)
    total = formula_bytes(bench.numel, len(workers), bench.up, down) * len(workers)
    interval = 1.0 + 0.1 * len(workers) + SECONDS_PER_BYTE * total / len(os.sched_getaffinity(0))
    return lambda: measure_light_peers(crew, workers, run, bench.numel, bench.rounds, interval)


def _averager(bench: RoundBench, crew: Crew, workers: Sequence[Worker], codec: str) -> Callable[[], Samples]:
    return lambda: measure_averager(crew, workers, codec, bench.numel, bench.rounds)


def _summary(samples: Sequence[Samples]) -> dict[str, Any]:
    """Medians and means over all passes."""

    def pooled(name: str) -> list[float]:
        return [value for sample in samples for value in sample.seconds.get(name, ())]

    return {
        **{name: median(pooled(name)) for name in samples[0].seconds},
        **{name: fmean(sample.spent[name] for sample in samples) for name in samples[0].spent},
        **{name: [sample.facts[name] for sample in samples] for name in samples[0].facts},
    }


def _against_formula(found: dict[str, Any], needed: float) -> None:
    """Shares and ratios of the bytes, added to what was found."""
    payload, control = found["payload_up"], found["control_up"]
    found |= {
        "control_share": control / (control + payload),
        "overhead_share": 1 - payload / found["bytes_up"],
        "formula_bytes": needed,
        "ratio_to_formula": found["bytes_up"] / needed,
        "payload_to_formula": payload / needed,
    }


def _against_hivemind(mine: dict[str, Any], found: dict[str, Any]) -> None:
    for codec in HIVEMIND_CODECS:
        theirs = found[f"hivemind_{codec}"]
        mine[f"wall_ratio_{codec}"] = mine["wall"] / theirs["wall"]
        mine[f"allreduce_ratio_{codec}"] = mine["wall"] / theirs["allreduce"]
        mine[f"cpu_ratio_{codec}"] = mine["cpu"] / theirs["cpu"]
        mine[f"bytes_ratio_{codec}"] = mine["bytes_up"] / theirs["bytes_up"]


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    counts = f"{report['passes']} x {report['rounds']} rounds; per peer and round"
    lines = [f"{report['parameters']:,} float32, {report['cores']} cores, {counts}"]
    for count, found in report["peers"].items():
        lines.append(f"{count + ' peers':<20}  wall s  all-reduce s  CPU s  MB up  MB down  of formula")
        for name, row in found.items():
            if isinstance(row, dict):
                alone = f"{row['allreduce']:14.3f}" if "allreduce" in row else f"{'':>14}"
                against = f"{row['ratio_to_formula']:12.3f}" if "ratio_to_formula" in row else ""
                sent = f"{row['bytes_up'] / 1e6:7.2f}{row['bytes_down'] / 1e6:9.2f}"
                lines.append(f"  {name:<18}{row['wall']:8.3f}{alone}{row['cpu']:7.2f}{sent}{against}")
        lines += [f"  {name} {ratio:.3f}" for name, ratio in found.items() if isinstance(ratio, float)]
    return "\n".join(lines)
