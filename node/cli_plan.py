"""``stretto plan``: will it fit? One command, with the planner's tables and the paper's figures beside it."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.protocol.errors import ConfigError

if TYPE_CHECKING:
    from stretto.node.place import Given, Place
    from stretto.node.plan import Changes
    from stretto.protocol.config import RunConfig


def plan(
    invite: Annotated[str | None, typer.Argument(help="With --measure: time downloads from this run's peers.")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, 35m, 100m, 200m, 300m, 500m, 1b or 4b.")] = None,
    run: Annotated[Path | None, typer.Option(help="A run.toml to plan instead of a preset.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card such as 4090 or 3060.")] = None,
    tflops: Annotated[float | None, typer.Option(help="TFLOP/s that training sustains.")] = None,
    memory: Annotated[float | None, typer.Option(help="Memory of the card in GB.")] = None,
    link: Annotated[str | None, typer.Option(help="The line, DOWN/UP in Mbit/s, such as 100/20.")] = None,
    peers: Annotated[int, typer.Option(help="Peers that train.")] = 8,
    rtt: Annotated[float | None, typer.Option(help="Seconds of a message there and back; 0.1 if not known.")] = None,
    client_mode: Annotated[bool, typer.Option("--client-mode", help="This peer reduces nothing.")] = False,
    inner_steps: Annotated[int | None, typer.Option(help="H, in place of the run's.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="K, in place of the run's.")] = None,
    fragments: Annotated[int | None, typer.Option(help="P, in place of the run's.")] = None,
    tau_max: Annotated[int | None, typer.Option(help="Largest overlap, in place of the run's.")] = None,
    up: Annotated[str | None, typer.Option(help="Codec of contributions, in place of the run's.")] = None,
    down: Annotated[str | None, typer.Option(help="Codec of averages, in place of the run's.")] = None,
    tokens: Annotated[float, typer.Option(help="Billion tokens to train on; 0 for 20 per parameter.")] = 0.0,
    measure: Annotated[bool, typer.Option("--measure", help="Time this machine's inner step, and the line.")] = False,
    device: Annotated[str, typer.Option(help="With --measure: auto, cpu, cuda, cuda:N or mps.")] = "auto",
    micro_batch: Annotated[int, typer.Option(help="With --measure: sequences per forward pass.")] = 1,
    paper: Annotated[bool, typer.Option("--paper", help="Table 4 of the paper beside the simulator.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Lines and model sizes for an RTX 4090.")] = False,
    figure: Annotated[int | None, typer.Option(help="Draw this figure of the paper: 4, 7, 9, 15 or 16.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --figure: the PNG to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Tell whether a card and a line suit a run, and what to change if not; or compare the planner with the paper."""
    asked = [flag for flag, on in (("--paper", paper), ("--tables", tables), ("--figure", figure is not None)) if on]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different questions: ask one at a time")
    if out is not None and figure is None:
        raise ConfigError("--out is where --figure draws to: give the figure too")
    if paper:
        from stretto.node.plan_paper import compare_with_paper, render_paper

        _show(compare_with_paper(), render_paper, as_json)
    elif tables:
        from stretto.node.plan_tables import render_tables
        from stretto.node.plan_tables import tables as home_tables

        _show(home_tables(), render_tables, as_json)
    elif figure is not None:
        _figure(figure, out, as_json)
    else:
        from stretto.node.place import Given
        from stretto.node.plan import Changes, answer, render, to_json

        changes = Changes(
            inner_steps=inner_steps,
            tokens_per_step=tokens_per_step,
            fragments=fragments,
            tau_max=tau_max,
            up=up,
            down=down,
        )
        given = Given(gpu=gpu, tflops=tflops, memory=memory, link=link, rtt=rtt)
        planned, place = _question(model, run, changes, given, measure, invite, device, micro_batch)
        found = answer(planned, place, peers=peers, client_mode=client_mode, tokens=tokens * 1e9)
        print(json.dumps(to_json(found)) if as_json else render(found))


def _show(result: dict[str, Any], render: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    print(json.dumps(result) if as_json else render(result))


def _figure(number: int, out: Path | None, as_json: bool) -> None:
    from stretto.node.plan_paper import figure, figure_json
    from stretto.node.plots import draw_terminal, save_png

    charts = figure(number)
    if out is not None:
        save_png(charts, out)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        print(json.dumps(figure_json(number, charts)))
        return
    size = shutil.get_terminal_size((100, 24))
    print("\n\n".join(draw_terminal(chart, min(size.columns, 120), 22) for chart in charts))


def _question(
    model: str | None,
    file: Path | None,
    changes: "Changes",
    given: "Given",
    measure: bool,
    invite: str | None,
    device: str,
    micro_batch: int,
) -> tuple["RunConfig", "Place"]:
    """The run config and the place that are asked about, measured where that was asked for."""
    if invite is not None and not measure:
        raise ConfigError("an invite is only for --measure, which times downloads from the run's peers")
    if model is not None and file is not None:
        raise ConfigError("--model and --run both name a run: give one of them")
    from stretto.node.place import make_place
    from stretto.node.presets import planned_run
    from stretto.node.runfile import read_run

    run = planned_run(model) if model is not None else read_run(file) if file is not None else None
    line = timing = None
    if invite is not None:
        from stretto.node.plan_measure import measure_line

        visited, line = measure_line(invite, needed=given.link is None, say=_progress)
        run = run or visited
    if run is None:
        raise ConfigError("say which run: --model NAME (tiny, 35m, 100m, 200m, 300m, 500m, 1b, 4b) or --run run.toml")
    run = changes.apply(run)
    if measure:
        from stretto.node.plan_measure import measure_step

        timing = measure_step(run, device=device, micro_batch=micro_batch, say=_progress)
    return run, make_place(given, timing, line)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
