"""``stretto simulate``: training runs with many replicas in one process, in virtual time. Flags in, tables out."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.protocol.errors import ConfigError


def simulate(
    recipe: Annotated[str | None, typer.Option(help="A named experiment; --list shows them.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Without a recipe: a method; may be repeated.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List recipes and methods.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of the settings below.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each case, with seeds that count up from --seed.")] = 1,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads of each run.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for results; simulate-RECIPE by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    replicas: Annotated[int | None, typer.Option(help="M.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens that the swarm sees in all.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens that the swarm sees per step.")] = None,
    seed: Annotated[int | None, typer.Option(help="First seed.")] = None,
    model: Annotated[str | None, typer.Option(help="small (see --layers, --width) or a preset.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the small model.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the small model.")] = None,
    source: Annotated[str | None, typer.Option(help="stdlib or text:PATH.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    inner: Annotated[str | None, typer.Option(help="Inner optimizer: adamw or sgd.")] = None,
    lr: Annotated[float | None, typer.Option(help="Inner learning rate.")] = None,
    root_rule: Annotated[
        bool | None, typer.Option("--root-rule", help="Inner rate times the root of the number of replicas.")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Of the inner learning rate.")] = None,
    final_lr: Annotated[float | None, typer.Option(help="At the end, as a share of --lr.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the inner optimizer.")] = None,
    z_loss: Annotated[float | None, typer.Option(help="Weight of the z-loss.")] = None,
    outer: Annotated[str | None, typer.Option(help="Outer optimizer: nesterov or adam.")] = None,
    outer_lr: Annotated[float | None, typer.Option(help="Outer learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Outer momentum.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Share of the local weights kept at a merge.")] = None,
    alpha_end: Annotated[float | None, typer.Option(help="Where alpha goes by the end; -1 keeps it.")] = None,
    inner_steps: Annotated[int | None, typer.Option(help="H.")] = None,
    fragments: Annotated[int | None, typer.Option(help="P.")] = None,
    pattern: Annotated[str | None, typer.Option(help="strided or sequential.")] = None,
    tau: Annotated[str | None, typer.Option(help="Overlap of the replicas in steps: 5, or 1,5.")] = None,
    speeds: Annotated[str | None, typer.Option(help="Speeds of the replicas, such as 1,4.")] = None,
    growth: Annotated[float | None, typer.Option(help="Rounds grow rarer by (peak lr / lr) to this power.")] = None,
    frozen: Annotated[bool | None, typer.Option("--frozen", help="Train only the fragment that leaves next.")] = None,
    codec: Annotated[str | None, typer.Option(help="e3m0, fp32, bf16, int8, e2m1, e1m0, topk, dropout, dare.")] = None,
    keep: Annotated[float | None, typer.Option(help="Share that topk, dropout and dare keep.")] = None,
    down: Annotated[str | None, typer.Option(help="Codec of averages in groups above three.")] = None,
    error_feedback: Annotated[bool | None, typer.Option("--error-feedback", help="Send later what was lost.")] = None,
    delay: Annotated[float | None, typer.Option(help="Of each message, in steps.")] = None,
    jitter: Annotated[float | None, typer.Option(help="Largest extra delay, in steps.")] = None,
    drop: Annotated[float | None, typer.Option(help="Probability that a message is lost.")] = None,
    crash: Annotated[
        list[str] | None, typer.Option(help="REPLICA:DOWN:UP, the steps at which it crashes and returns.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Judge by anchor, average or replica.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; 0: an eighth.")] = None,
    eval_sequences: Annotated[int | None, typer.Option(help="Held-out sequences.")] = None,
    cosine: Annotated[bool | None, typer.Option("--cosine", help="Record cosines of outer gradients.")] = None,
) -> None:
    """Train with many replicas in this process, in virtual time, with the nodes' protocol; compare methods."""
    given = dict(locals())
    if show:
        print(_listing())
        return
    if recipe and method:
        raise ConfigError("simulate: give either --recipe or --method, since a recipe says which methods it compares")
    own = ("recipe", "method", "show", "config", "seeds", "jobs", "threads", "out", "as_json", "crash")
    settings = _settings({key: value for key, value in given.items() if key not in own}, crash, config)
    from stretto.node.simulate.lab import Lab, LabConfig

    lab = Lab(
        LabConfig(
            recipe=recipe or "",
            methods=tuple(method or ("data-parallel", "fp4")),
            settings=settings,
            seeds=seeds,
            jobs=jobs,
            threads=threads,
            out=out or Path(f"simulate-{recipe or 'methods'}"),
            command=" ".join(["stretto", *sys.argv[1:]]),
        )
    )
    try:
        lab.work(lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        lab.write(draw=False)
        print("interrupted: the same command goes on with the runs that are missing", file=sys.stderr)
        raise
    for remark in lab.write(draw=True):
        print(remark, file=sys.stderr)
    print(json.dumps(lab.summary()) if as_json else lab.text(shutil.get_terminal_size().columns))


def _settings(flags: dict[str, Any], crash: list[str] | None, file: Path | None) -> dict[str, Any]:
    """The file's settings, and on top those flags that were given."""
    from stretto.node.simulate.config import read_settings

    found = {key: value for key, value in flags.items() if value is not None}
    for name, kind in (("tau", int), ("speeds", float)):
        if name in found:
            found[name] = _numbers(name, found[name], kind)
    if crash:
        found["crashes"] = tuple(_crash(text) for text in crash)
    return {**(read_settings(file) if file else {}), **found}


def _numbers(name: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"simulate: --{name} is {text!r}; write numbers with commas, such as 1,5") from None


def _crash(text: str) -> tuple[int, float, float]:
    try:
        who, down, up = text.split(":")
        return int(who), float(down), float(up)
    except ValueError:
        raise ConfigError(f"simulate: --crash is {text!r}; write REPLICA:DOWN:UP, such as 1:200:300") from None


def _listing() -> str:
    from stretto.node.simulate.config import METHODS
    from stretto.node.simulate.recipes import RECIPES

    width = max(map(len, RECIPES))
    lines = ["recipes (--recipe):"]
    lines += [f"  {r.name:<{width}}  {r.what}: {len(r.cases)} runs a seed" for r in RECIPES.values()]
    return "\n".join([*lines, "", f"methods (--method): {', '.join(METHODS)}"])
