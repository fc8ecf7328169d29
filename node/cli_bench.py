"""``stretto bench``: measurements that a person can repeat on their own machine. Ratios are taken within one run."""

import json
import signal
import sys
from typing import Annotated, Any

import typer

bench = typer.Typer(
    help="Measure this machine: codecs, what synchronization costs the trainer, what a round costs a peer."
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@bench.command()
def codec(
    as_json: AsJson = False,
    millions: Annotated[list[int] | None, typer.Option(help="Sizes in million floats.")] = None,
    runs: Annotated[int, typer.Option(help="Interleaved rounds; medians are taken.")] = 7,
) -> None:
    """Encode and decode+accumulate of E3M0 against memcpy and hivemind's codecs, one thread."""
    from stretto.node.bench.codec import bench_codec

    _show(bench_codec(sizes=[m * 1_000_000 for m in millions or (16, 64)], runs=runs), as_json)


@bench.command()
def step(
    as_json: AsJson = False,
    blocks: Annotated[int, typer.Option(help="Pairs of blocks with and without sync.")] = 6,
    steps: Annotated[int, typer.Option(help="Inner steps per block.")] = 12,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of the training process; 0 leaves torch's default.")] = 1,
    memory_rounds: Annotated[int, typer.Option(help="Rounds for the memory slope; 0 skips memory.")] = 200,
) -> None:
    """Wall time and memory of training with synchronization against training without."""
    from stretto.node.bench.step import bench_step

    _show(bench_step(blocks=blocks, steps=steps, device=device, threads=threads, memory_rounds=memory_rounds), as_json)


@bench.command(name="round")
def round_(
    as_json: AsJson = False,
    millions: Annotated[float, typer.Option(help="Million floats in the vector that is averaged.")] = 8.0,
    peers: Annotated[list[int] | None, typer.Option(help="Group sizes; 4 and 8 by default. May be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds that count in each pass, after two that warm up.")] = 4,
    passes: Annotated[int, typer.Option(help="How often the contenders take turns.")] = 2,
    up: Annotated[str | None, typer.Option(help="Codec of contributions; the run's default if absent.")] = None,
    down: Annotated[str | None, typer.Option(help="Codec of averages; the run's default if absent.")] = None,
    hivemind: Annotated[bool, typer.Option(help="Also measure hivemind's averager.")] = True,
) -> None:
    """Time, CPU and bytes of a round of averaging on loopback, against hivemind's DecentralizedAverager."""
    from stretto.node.bench.round import RoundBench, bench_round, render
    from stretto.protocol.config import WireConfig

    wire = WireConfig()
    asked = RoundBench(
        numel=int(millions * 1e6),
        peers=tuple(peers or (4, 8)),
        rounds=rounds,
        passes=passes,
        up=up or wire.up,
        down=down or wire.down,
        hivemind=hivemind,
    )
    # Like Ctrl-C: whoever ends this program ends its peers and their files too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = bench_round(asked, lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(result) if as_json else render(result))


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        print(f"{key:<{width}}  {value:.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}")
