"""How the parts of a node are made that need its open network, or parts made before: gates, reader, member, saver.

What needs the run config and this machine only (corpus, model, protocol state) is in ``stretto.node.parts``.
"""

import time
from pathlib import Path
from typing import Any

from stretto.node.checkpoint_files import CheckpointFiles
from stretto.node.config import NodeConfig
from stretto.node.console import Console
from stretto.node.data.corpus import Corpus
from stretto.node.data.fixed_units import FixedUnits
from stretto.node.data.journal import Journal
from stretto.node.data.stream import TokenStream, count_windows
from stretto.node.data.units import UnitKeeper
from stretto.node.events import Narrator, chain_fields, lockstep_over
from stretto.node.lockstep import Lockstep, LockstepSchedule, check_lockstep
from stretto.node.metrics.jsonl import MetricsFile
from stretto.node.network import Network
from stretto.node.parts import last_round
from stretto.node.saving import Saver
from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.exchange import Exchange
from stretto.node.swarm.identity import Identity
from stretto.node.swarm.line import Line
from stretto.node.swarm.member import Member, Progress
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.sockets import SocketMeter
from stretto.node.swarm.traffic import TrafficWatch
from stretto.node.sync import Sync
from stretto.node.trainer import Trainer
from stretto.node.version import VERSION
from stretto.protocol import messages as m
from stretto.protocol import wire
from stretto.protocol.config import RunConfig
from stretto.protocol.peer import Peer
from stretto.protocol.roster import PeerRecord
from stretto.protocol.unitbook import UnitBook
from stretto.protocol.units import UnitCut


def make_lockstep(run: RunConfig, config: NodeConfig, fragments: int, network: Network) -> Lockstep | None:
    """The gates of a lockstep run, None for an ordinary one."""
    if not config.lockstep:
        return None
    assert config.tau is not None
    check_lockstep(run, config.lockstep, config.tau)
    rounds = last_round(run, fragments, config.rounds)
    schedule = LockstepSchedule(run.outer.inner_steps, fragments, rounds, config.tau)
    return Lockstep(schedule, config.lockstep, stopping=network.stopping)


def make_stream(
    run: RunConfig, corpus: Corpus, identity: Identity, network: Network, folder: Path, *, fixed: bool
) -> tuple[TokenStream, UnitKeeper | FixedUnits, Journal]:
    """The reader, this node's units, and the journal of its place in them. ``fixed``: nothing is claimed."""
    data = run.data
    cut = UnitCut(count_windows(corpus.train, data.sequence_length, "training"), data.unit_sequences)
    journal = Journal(folder / "data.json", cut, network.console.say)
    units: UnitKeeper | FixedUnits
    if fixed:
        units = FixedUnits(cut)
    else:
        book = UnitBook(identity.peer_id_bytes, cut)
        units = UnitKeeper(book, now=network.clock.now, stopping=network.stopping, journal=journal)
    stream = TokenStream(corpus.train, data.sequence_length, data.seed, unit_sequences=cut.length, units=units)
    return stream, units, journal


def make_member(
    run: RunConfig,
    signed: m.SignedRun,
    config: NodeConfig,
    network: Network,
    peer: Peer,
    sync: Sync,
    metrics: MetricsFile,
    console: Console,
    log_folder: Path,
    lockstep: Lockstep | None,
) -> Member:
    """The node's place in the swarm: exchange, roster and line, made in the loop that they run in."""
    host, progress, known, keeper = network.host, Progress(), network.known, network.time
    assert host is not None
    assert known is not None
    assert keeper is not None

    narrator = Narrator()

    def say(event: dict[str, Any]) -> None:
        metrics.write(event | chain_fields(event, peer.diloco.fragments))
        text = narrator.line(event, time.monotonic())
        # While it joins, one line sums up what comes of all fragments.
        if text and not (progress.state == "joining" and event.get("state") == "progress"):
            console.say(text)
        if event.get("fatal"):
            network.stopping.exit_code = 1
            network.stopping.stop()

    def warn(text: str) -> None:
        say({"event": "fault", "what": text})

    if lockstep is not None:
        lockstep.fail = lambda why: say({"event": "fault", "what": lockstep_over(why), "fatal": True})
    log = ChainLog(log_folder, run=run.digest(), budget=config.log_bytes, warn=warn)
    member: Member | None = None

    def own_record() -> PeerRecord | None:
        return member.own_record(VERSION, config.client_mode) if member else None

    roster = Roster(host, run.digest(), own_record, network.clock.now)

    async def make() -> Member:
        line = Line(max_upload=config.max_upload, max_download=config.max_download)
        watch = TrafficWatch(
            cap=config.monthly_bytes,
            path=config.data_dir / "traffic.json",
            line=line,
            meter=SocketMeter(host.daemon),
            say=say,
            tell=console.say,
        )
        exchange = Exchange(
            host=host,
            peer=peer,
            sync=sync,
            roster=roster,
            line=line,
            run_config=signed,
            clock=network.clock,
            say=say,
            last_round=last_round(run, peer.fragments, config.rounds),
            log=log,
            lockstep=lockstep,
            watch=watch,
        )
        return Member(host, exchange, roster, progress, network.bootstraps, known, keeper, say, console.say)

    member = network.thread.call(make())
    return member


def make_saver(
    run: RunConfig,
    identity: Identity,
    config: NodeConfig,
    trainer: Trainer,
    sync: Sync,
    member: Member,
    folder: Path,
) -> Saver:
    """What writes this node's checkpoints."""
    return Saver(
        CheckpointFiles(folder / "checkpoints", keep=config.checkpoints),
        every=config.checkpoint_every,
        run=run.digest(),
        peer=identity.peer_id_bytes,
        sync=sync,
        optimizer=trainer.optimizer,
        reader=lambda: wire.encode(trainer.stream.state()),
        tokens=lambda: member.progress.tokens,
        say=member.say,
    )
