"""The command ``stretto``: flags in, exit codes out. Each command imports what it needs when it runs.

Whatever a person can get wrong is printed as one paragraph and ends with exit code 1; a traceback is shown only with
``--debug`` (or STRETTO_DEBUG=1). Ctrl-C ends with 130.
"""

import json
import logging
import os
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stretto.node.cli_bench import bench
from stretto.node.cli_plan import plan
from stretto.node.cli_simulate import simulate
from stretto.protocol.errors import StrettoError

app = typer.Typer(
    name="stretto",
    help="Train a language model together with others, over home internet and without a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bench, name="bench")
app.command()(simulate)

_debug = False
_all_closed = False
"""Set by the long-running commands when they have ended in order and nothing is left to be done."""

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder for identity, caches and state.")]


def main() -> None:
    """Entry point."""
    try:
        # In this mode typer returns the code of a typer.Exit instead of raising it, and 130 for Ctrl-C.
        code = app(standalone_mode=False)
    except StrettoError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the last line of defence: people get a sentence, not a traceback
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            _usage(error)
        _fail(f"internal error: {type(error).__name__}: {error}. Run again with --debug and report what it prints")
    code = code if isinstance(code, int) else 0
    if _all_closed:
        # Taking the interpreter down with torch and hivemind in it costs another 1.5 s of CPU time, which on a busy
        # machine is the grace period of whoever asked this process to stop.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _usage(error: Any) -> NoReturn:
    """A flag or argument that typer refused: click's errors show themselves, whichever copy of click typer uses."""
    error.show()
    sys.exit(error.exit_code)


def _fail(text: str) -> NoReturn:
    if _debug or os.environ.get("STRETTO_DEBUG"):
        traceback.print_exc()
    width = max(60, min(120, _columns()))
    paragraph = " ".join(text.split())
    print(textwrap.fill(f"error: {paragraph}", width, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    sys.exit(1)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 120


def _version(value: bool) -> None:
    if value:
        from stretto.node.version import VERSION

        print(f"stretto {VERSION}")
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    global _debug
    _debug = debug
    quiet_libraries()


def quiet_libraries() -> None:
    """Before hivemind is imported: its log lines are for its developers, errors only; no shared-memory manager."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if _debug else "ERROR")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level=logging.DEBUG if _debug else logging.WARNING, format="%(message)s")
    # The loop reports what tasks of the libraries left behind; whoever waited for them has heard already.
    logging.getLogger("asyncio").setLevel(logging.WARNING if _debug else logging.CRITICAL)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="The run.toml to write.")],
    name: Annotated[str, typer.Option(help="Name of the run.")] = "my-run",
    model: Annotated[str, typer.Option(help="tiny, 35m, 100m, 200m, 300m, 500m, 1b or 4b.")] = "tiny",
    data: Annotated[str, typer.Option(help="stdlib or text:PATH.")] = "stdlib",
    tokenizer: Annotated[str, typer.Option(help="bytes or file:PATH.")] = "bytes",
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
) -> None:
    """Write a run.toml with the paper's settings, to be edited and then served with `stretto bootstrap`."""
    from stretto.node.presets import new_run
    from stretto.protocol.errors import ConfigError

    if file.exists():
        raise ConfigError(f"{file} exists already; remove it or choose another name")
    run = new_run(name, preset=model, source=data, tokenizer=tokenizer, seed=seed)
    try:
        file.write_text(run.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    print(f"wrote {file} (run id {run.digest().hex()[:16]}). Next: stretto bootstrap {file}")


@app.command()
def bootstrap(
    file: Annotated[Path, typer.Argument(help="The run.toml to serve.")],
    data_dir: DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes any free one.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddr to announce; may be repeated.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Another bootstrap peer of this run.")] = None,
    invite_file: Annotated[Path | None, typer.Option(help="Also write the invite here.")] = None,
    exit_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a run: an entry for peers that publishes the run config, prints the invite, and does not train."""
    from stretto.bootstrap.cli import BootstrapConfig, serve_run
    from stretto.node.config import default_data_dir, load_node_config
    from stretto.node.console import Console
    from stretto.node.runfile import read_run
    from stretto.node.stopping import StopSignal
    from stretto.protocol.invite import check_address

    if data_dir is None and "STRETTO_DATA_DIR" not in os.environ:
        data_dir = default_data_dir() / "bootstrap"
    # Where it listens and keeps its things is set as for a node, by flags or the same variables.
    place = load_node_config(
        {"data_dir": data_dir, "host": host, "port": port, "announce": announce}, environment=os.environ
    )
    run = read_run(file)
    stopping = StopSignal()
    stopping.install()
    if exit_with_stdin:
        stopping.follow_stdin()
    config = BootstrapConfig(
        data_dir=place.data_dir,
        host=place.host,
        port=place.port,
        announce=place.announce,
        peers=tuple(check_address(address) for address in peer or ()),
    )
    serve_run(run, config, Console(), stopping.event, invite_file)
    raise _end(stopping.exit_code)


@app.command()
def join(
    invite: Annotated[
        str | None, typer.Argument(help="The invite that the run's operator gave you, or @FILE; or in STRETTO_INVITE.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of these settings.")] = None,
    data_dir: DataDir = None,
    identity: Annotated[Path | None, typer.Option(help="Key file; default is in the data dir.")] = None,
    expect: Annotated[Path | None, typer.Option(help="A run.toml that the run must equal.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per forward pass.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0 leaves the default.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port to listen on; 0 takes any free one.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddr to announce; may be repeated.")] = None,
    client_mode: Annotated[bool | None, typer.Option("--client-mode", help="Cannot be reached.")] = None,
    max_upload: Annotated[str | None, typer.Option(help="Cap on sending, such as 500kB/s or 4Mbit/s.")] = None,
    max_download: Annotated[str | None, typer.Option(help="Cap on receiving, such as 2MB/s.")] = None,
    monthly_cap: Annotated[
        str | None, typer.Option(help="Cap on sending and receiving in a calendar month, such as 100GB.")
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Connections to other peers at most; 0 for no limit.")
    ] = None,
    tau: Annotated[int | None, typer.Option(help="Fixed overlap in inner steps.")] = None,
    lockstep: Annotated[
        int | None, typer.Option(help="For experiments: as the simulation, step by step, with so many peers in all.")
    ] = None,
    new_run: Annotated[bool | None, typer.Option("--new-run", help="Found the run if nobody has.")] = None,
    start_peers: Annotated[int | None, typer.Option(help="With --new-run: wait for so many peers.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Stop after so many rounds of the run.")] = None,
    join_timeout: Annotated[float | None, typer.Option(help="Seconds to look for a bootstrap peer.")] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="Seconds between two checkpoints; 0 for one at the end only.")
    ] = None,
    checkpoints: Annotated[int | None, typer.Option(help="How many checkpoints to keep.")] = None,
    log_budget: Annotated[str | None, typer.Option(help="Disk space for the last commits: 1GB, 0 for none.")] = None,
    seconds_per_status: Annotated[float | None, typer.Option(help="Time between two status lines.")] = None,
    pace: Annotated[float | None, typer.Option(help="For tests: pad each step to so many seconds.")] = None,
    exit_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Join a run and train: all that a volunteer needs is the invite."""
    flags = {key: value for key, value in locals().items() if key not in ("invite", "config", "exit_with_stdin")}
    from stretto.node.config import load_node_config, refuse_ranks
    from stretto.node.console import Console
    from stretto.node.invites import VARIABLE, await_invite
    from stretto.node.stopping import StopSignal

    refuse_ranks(os.environ)
    node_config = load_node_config(flags, environment=os.environ, file=config)
    stopping, console = StopSignal(), Console()
    stopping.install()
    if exit_with_stdin:
        stopping.follow_stdin()
    parsed = await_invite(
        invite or os.environ.get(VARIABLE),
        say=console.say,
        wait=stopping.event.wait,
        patience=node_config.join_timeout,
    )
    if parsed is None:
        raise typer.Exit(stopping.exit_code)
    from stretto.node.app import run_node

    raise _end(run_node(str(parsed), node_config, console, stopping))


def _end(code: int) -> typer.Exit:
    global _all_closed
    _all_closed = True
    return typer.Exit(code)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(help="Training peers.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds until the demo ends.")] = 24,
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("report.json"),
    folder: Annotated[Path | None, typer.Option(help="Keep all files of the run here.")] = None,
    inner_steps: Annotated[int, typer.Option(help="H: inner steps between two rounds of a fragment.")] = 40,
    fragments: Annotated[int, typer.Option(help="P: fragments.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="For experiments: step by step, and compare with the simulation.")
    ] = False,
    tau: Annotated[
        list[int] | None, typer.Option(help="With --lockstep: overlap in inner steps, once or once per peer.")
    ] = None,
) -> None:
    """Run a whole swarm on this machine: one bootstrap peer and some training peers, on real text."""
    from stretto.node.demo import DemoConfig, run_demo

    config = DemoConfig(
        peers=peers,
        rounds=rounds,
        report=report.absolute(),
        folder=folder.absolute() if folder else None,
        inner_steps=inner_steps,
        fragments=fragments,
        seed=seed,
        lockstep=lockstep,
        tau=tuple(tau or ()),
    )
    raise typer.Exit(run_demo(config))


@app.command()
def status(
    invite: Annotated[str | None, typer.Argument(help="A run's invite, or @FILE.")] = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a bootstrap peer.")] = 15.0,
) -> None:
    """Show who is in a run and how far it is; without an invite, how the node on this machine is.

    Without an invite it reads what the node or bootstrap peer with this data dir says of itself, opens no connection,
    and ends with 1 unless that process is there and does its work: for health checks.
    """
    if invite is None:
        _local_status(data_dir, as_json)
        return
    from stretto.node.invites import read_invite

    parsed = read_invite(invite)
    from stretto.node.swarm.summary import look, render
    from stretto.node.swarm.thread import NetworkThread

    thread = NetworkThread()
    try:
        summary = thread.call(look(parsed, timeout=timeout, say=lambda text: print(text, file=sys.stderr)))
    finally:
        thread.close()
    print(json.dumps(summary) if as_json else render(summary))


def _local_status(data_dir: Path | None, as_json: bool) -> None:
    from stretto.node.statusfile import check_well, in_words, read_status

    if data_dir is None:
        from stretto.node.config import load_node_config

        data_dir = load_node_config({}, environment=os.environ).data_dir
    found = read_status(data_dir)
    print(json.dumps(found) if as_json else in_words(found))
    check_well(found)


@app.command()
def doctor(
    invite: Annotated[str | None, typer.Argument(help="Also check this run's bootstrap peers.")] = None,
    data_dir: DataDir = None,
    port: Annotated[int | None, typer.Option(help="Also check that this TCP port is free.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds for each bootstrap address.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine, and whether the swarm answers."""
    from stretto.node.config import default_data_dir
    from stretto.node.doctor import render, run_doctor
    from stretto.node.invites import read_invite

    parsed = read_invite(invite) if invite else None
    found = run_doctor(
        parsed.addresses if parsed else (),
        data_dir=data_dir or default_data_dir(),
        port=port,
        device=device,
        timeout=timeout,
        run=parsed.run if parsed else None,
    )
    print(found.to_json() if as_json else render(found))
    raise typer.Exit(0 if found.ok else 1)


app.command()(plan)


if __name__ == "__main__":
    main()
