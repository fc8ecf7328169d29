"""One volunteer's node from start to end: this file puts the parts together and decides nothing that they decide.

Order, each phase with its own message: identity and its lock, port, network daemon, bootstrap peers, run config,
corpus and model, the last checkpoint, rehearsal (how fast is this machine?), the swarm's state, training, the last
checkpoint of this life, leaving.
"""

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto.node import resources
from stretto.node.allocator import few_arenas
from stretto.node.assembly import make_lockstep, make_member, make_saver, make_stream
from stretto.node.checkpoint import Contents
from stretto.node.config import NodeConfig, default_data_dir
from stretto.node.console import Console
from stretto.node.data.corpus import Corpus
from stretto.node.data.fixed_units import FixedUnits
from stretto.node.data.journal import Journal, place
from stretto.node.data.stream import heldout_batches
from stretto.node.data.units import UnitKeeper
from stretto.node.events import pace_in_words, run_in_words
from stretto.node.garbage import settle
from stretto.node.lockstep import InLockstep, Lockstep, lockstep_rules
from stretto.node.metrics.jsonl import MetricsFile
from stretto.node.model import build_model, count_parameters
from stretto.node.network import Network, run_folder
from stretto.node.parts import choose_device, cut_model, make_peer, open_data
from stretto.node.ports import probe_port
from stretto.node.reporting import node_report, status_fields, status_line
from stretto.node.runfile import check_expected
from stretto.node.saving import Saver
from stretto.node.statusfile import StatusFile
from stretto.node.stopping import StopSignal
from stretto.node.swarm.folders import own_folder, write_whole
from stretto.node.swarm.identity import Identity, IdentityLock, format_peer_id, load_or_create
from stretto.node.swarm.locks import run_lock
from stretto.node.swarm.member import Member
from stretto.node.swarm.runs import check_run
from stretto.node.swarm.thread import Stopped
from stretto.node.sync import Sync
from stretto.node.trainer import StepReport, Trainer, evaluate, make_optimizer
from stretto.node.version import VERSION
from stretto.protocol import fp4, wire
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.invite import Invite
from stretto.protocol.unitbook import Bookmark

REHEARSAL = 5
"""Forward and backward passes that measure this machine before the run's clock is set."""

LEAVE_SECONDS = 8.0
"""Longest that leaving may take after that."""

SAVE_SECONDS = 600.0
"""Longest that the last checkpoint may take after somebody asked this node to stop."""


def run_node(invite_text: str, config: NodeConfig, console: Console, stopping: StopSignal) -> int:
    """Join the run that ``invite_text`` names and train until it ends or somebody stops it. Returns the exit code."""
    invite = Invite.parse(invite_text)
    few_arenas()
    device = choose_device(config.device, console)
    if config.threads:
        torch.set_num_threads(config.threads)
    own_folder(config.data_dir, parents=config.data_dir == default_data_dir())
    identity = load_or_create(config.key_file)
    console.say(f"stretto {VERSION}, peer {identity.peer_id}, data in {config.data_dir}")
    with IdentityLock(config.key_file):
        probe_port(config.host, config.port)
        network = Network(config, console, stopping)
        status = network.status = StatusFile(
            config.data_dir, "node", identity.peer_id, lambda: {"state": "starting", "doing": console.status()}
        )
        try:
            console.start_status(config.seconds_per_status)
            network.thread.start(status.keep())
            host = network.open(identity, invite)
            signed = network.fetch_run(host, invite)
            run = check_run(signed, invite)
            check_expected(run, config.expect)
            console.say(f"run {run.name!r}, id {invite.run.hex()[:16]}, signed by {format_peer_id(signed.operator)}")
            console.say(run_in_words(run))
            if config.pace:
                console.say(pace_in_words(config.pace))
            folder = run_folder(config, run.digest())
            folder.mkdir(parents=True, exist_ok=True)
            with run_lock(folder):
                return Node.build(run, signed, identity, config, device, network, console).live()
        except Stopped:
            return stopping.exit_code
        finally:
            network.close()
            console.close()
            status.write(state="ended")


@dataclass
class Node:
    """The parts of a node that has its run config."""

    run: RunConfig
    config: NodeConfig
    console: Console
    network: Network
    metrics: MetricsFile
    corpus: Corpus
    trainer: Trainer
    sync: Sync
    member: Member
    units: UnitKeeper | FixedUnits
    journal: Journal
    saver: Saver
    folder: Path
    lockstep: Lockstep | None
    first_losses: list[float] = field(default_factory=list)
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    taus: list[int] = field(default_factory=list)
    train_seconds: float = 0.0
    evaluations: int = 0
    late_merges: int = 0
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def build(
        cls,
        run: RunConfig,
        signed: m.SignedRun,
        identity: Identity,
        config: NodeConfig,
        device: torch.device,
        network: Network,
        console: Console,
    ) -> "Node":
        """Corpus, model, protocol state and network parts for ``run``."""
        folder = run_folder(config, run.digest())
        corpus = open_data(run, config.data_dir)
        console.say(corpus.describe())
        model = build_model(run.model, run.seed, device=device)
        fragments = cut_model(run, model)
        console.say(
            f"model {run.model['model_type']} with {count_parameters(model):,} parameters on {device}, "
            f"{len(fragments.specs)} fragments of up to {max(spec.numel for spec in fragments.specs):,}"
        )
        metrics = MetricsFile(folder / "metrics.jsonl")
        lockstep = make_lockstep(run, config, len(fragments.specs), network)
        rules = lockstep_rules(run, len(fragments.specs), lockstep.peers) if lockstep else None
        peer = make_peer(run, fragments, identity, device, can_coordinate=not config.client_mode, rules=rules)
        on_device = device.type == "cuda" and run.wire.up == "e3m0" and not run.wire.error_feedback
        sync = Sync(fragments, peer, tau_max=run.outer.tau_max, fixed_tau=config.tau, encode_on_device=on_device)
        path = f" (the {fp4.path_name()} path on the host)" if run.wire.up == "e3m0" else ""
        console.say(f"contributions are encoded as {run.wire.up} on {device if on_device else 'the host'}{path}")
        stream, units, journal = make_stream(run, corpus, identity, network, folder, fixed=lockstep is not None)
        trainer = Trainer(
            model=model,
            optimizer=make_optimizer(model, run.inner),
            stream=stream,
            config=run.inner,
            sync=InLockstep(sync, lockstep) if lockstep else sync,
            sequence_length=run.data.sequence_length,
            micro_batch=config.micro_batch,
            device=device,
            pace=config.pace,
            wait=network.stopping.event.wait,
        )
        member = make_member(run, signed, config, network, peer, sync, metrics, console, folder / "log", lockstep)

        def ask() -> None:
            network.thread.loop.call_soon_threadsafe(member.roster.nudge)

        if isinstance(units, UnitKeeper):
            units.connect(ask=ask, say=member.say)
            member.units = units
        saver = make_saver(run, identity, config, trainer, sync, member, folder)
        return cls(
            run,
            config,
            console,
            network,
            metrics,
            corpus,
            trainer,
            sync,
            member,
            units,
            journal,
            saver,
            folder,
            lockstep,
        )

    # ------------------------------------------------------------------ life

    def live(self) -> int:
        """Enter the swarm, train, leave."""
        call, stopping = self.network.thread.call, self.network.stopping
        progress = self.member.progress
        resumed = self._resume()
        settle()
        call(self.member.enter(), stopping=stopping)
        watches = [self.network.thread.start(work) for work in (self._watch_daemon(), self._watch_resources())]
        if self.network.status is not None:
            self.network.status.tell = lambda: status_fields(self)
        try:
            self.console.say("measuring the speed of this machine")
            step_seconds = self.trainer.rehearse(REHEARSAL)
            progress.rate = 1 / step_seconds
            self.sync.estimate = self.sync.estimate.with_step(step_seconds)
            self.console.status = lambda: status_line(self)
            wait = self.member.await_start(
                new_run=self.config.new_run,
                start_peers=self.config.lockstep or self.config.start_peers,
            )
            call(wait, stopping=stopping)
            if self.lockstep is not None:
                self._take_place(self.lockstep)
            if resumed is None:
                self._take_over_anchors()
            progress.state = "training"
            self.network.thread.loop.call_soon_threadsafe(self.member.exchange.begin)
            try:
                self.train()
            finally:
                self._save_last()
            return self._end()
        except Stopped:
            return stopping.exit_code
        finally:
            for watch in watches:
                watch.cancel()
            self.console.say("leaving the swarm")
            call(self.member.leave())
            self.metrics.close()

    def _resume(self) -> Contents | None:
        """Go on from the last checkpoint, if there is one."""
        contents = self.saver.resume()
        bookmark = place(self._bookmark_in(contents), self.journal.read())
        if bookmark is not None:
            self.trainer.stream.restore(bookmark)
            places = ", ".join(f"unit {claim.unit} at sample {claim.position}" for claim in bookmark.claims)
            self.console.say(f"the data goes on after {bookmark.samples:,} samples: {places or 'no unit in hand'}")
        if contents is not None:
            self.member.progress.step, self.member.progress.tokens = contents.step, contents.tokens
            self.console.say(
                f"going on from the checkpoint of step {contents.step}: {contents.tokens:,} tokens trained on, "
                f"fragments at versions {', '.join(str(tip.version) for tip in self.sync.peer.tips())}"
            )
        return contents

    def _take_place(self, lockstep: Lockstep) -> None:
        """In lockstep: wait for the whole crew; a peer's place in it, by peer id, says what it reads."""
        crew = self.network.thread.call(self.member.await_crew(lockstep.peers), stopping=self.network.stopping)
        rank = crew.index(self.member.host.identity.peer_id_bytes)
        assert isinstance(self.units, FixedUnits)
        self.units.sit(rank, lockstep.peers)
        self.member.exchange.set_crew(crew)
        self.console.say(
            f"in lockstep: peer {rank} of {lockstep.peers}, counted from 0; rounds depart at inner step counts and "
            f"merge {lockstep.schedule.tau} step(s) later; the others are waited for"
        )

    def _bookmark_in(self, contents: Contents | None) -> Bookmark | None:
        """The place in the data that a checkpoint holds."""
        try:
            return None if contents is None else wire.decode(Bookmark, contents.reader)
        except RemoteProtocolError as error:
            self.console.say(
                f"WARNING the checkpoint's place in the data is left out, some may be read twice: {error}"
            )
            return None

    def _save_last(self) -> None:
        """The checkpoint from which the next life goes on; a second signal cuts it short and loses only this one."""
        self.console.say("writing the last checkpoint")
        self.network.stopping.grant(SAVE_SECONDS)
        self.saver.save(last=True)
        self.network.stopping.grant(LEAVE_SECONDS)

    def train(self) -> None:
        """The inner loop, until the last round is over or somebody stops it."""
        ended, stopping = self.member.exchange.ended, self.network.stopping
        began = time.monotonic()
        with contextlib.suppress(Stopped):  # asked to stop while it waited for data
            for report in self.trainer.steps(self.swarm_step):
                self._note(report)
                self._evaluate_if_due()
                self.saver.save_if_due()
                # In lockstep the last round is over before its result is merged.
                if stopping() or (ended.is_set() if self.lockstep is None else self.lockstep.done):
                    break
        self.train_seconds = time.monotonic() - began
        self.sync.come_back()

    def swarm_step(self) -> float:
        """The swarm's mean inner step count now; in lockstep all peers' own."""
        if self.lockstep is not None:
            return float(self.sync.step)
        clock = self.member.exchange.peer.clock
        if clock is None:
            return 0.0
        return clock.swarm_step(
            self.member.exchange.now(), self.run.outer.inner_steps, self.member.exchange.peer.fragments
        )

    def _note(self, report: StepReport) -> None:
        progress = self.member.progress
        if len(self.first_losses) < 5:
            self.first_losses.append(report.loss)
        self.last_losses.append(report.loss)
        self.taus += [merged.tau for merged in report.merged if merged.counted]
        progress.step, progress.loss, progress.tokens = report.step, report.loss, progress.tokens + report.tokens
        progress.rate = 1 / self.sync.estimate.step_seconds
        progress.tau = self.sync.estimate.tau if self.lockstep is None else self.lockstep.schedule.tau
        self.metrics.write(
            {
                "event": "step",
                "step": report.step,
                "loss": round(report.loss, 5),
                "lr": report.lr,
                "tokens": report.tokens,
                "seconds": round(report.seconds, 5),
                "samples": [[span.unit, span.first, span.last] for span in report.samples],
            }
        )
        for merged in report.merged:
            self.member.say(
                {
                    "event": "merge",
                    "fragment": merged.fragment,
                    "tau": merged.tau,
                    "counted": merged.counted,
                    "late": merged.late,
                }
            )
            self.late_merges += merged.late
            if merged.counted:
                self.units.contribution_counted()

    def _evaluate_if_due(self) -> None:
        """Held-out loss of the local weights, every so many committed rounds."""
        every, done = self.run.eval.every_rounds, len(self.member.exchange.committed)
        if every and done // every > self.evaluations:
            self.evaluations = done // every
            loss = self.heldout_loss()
            self.metrics.write({"event": "eval", "rounds": done, "step": self.sync.step, "loss": round(loss, 5)})
            self.console.say(f"held-out loss {loss:.3f} nats per token after {done} rounds")

    def heldout_loss(self) -> float:
        """Mean cross-entropy of the local weights on the run's evaluation windows, nats per token."""
        batches = heldout_batches(
            self.corpus.heldout, self.run.data.sequence_length, self.config.micro_batch, self.run.eval.sequences
        )
        return evaluate(self.trainer.model, batches, self.trainer.device)

    def _take_over_anchors(self) -> None:
        """Local weights := anchors, where a state was downloaded."""
        if any(state.pending for state in self.sync.peer.diloco.fragments):
            self.sync.ask_reload()
            self.sync.reload_if_asked()
            self.trainer.begin_anew()

    async def _watch_daemon(self) -> None:
        assert self.network.host is not None
        ended = await self.network.host.died()
        self.console.say(f"ERROR the network daemon (p2pd) {ended}; this node cannot go on")
        self.network.stopping.exit_code = 1
        self.network.stopping.stop()

    async def _watch_resources(self) -> None:
        assert self.network.host is not None
        watch = self.member.exchange.watch
        assert watch is not None

        def fields() -> dict[str, Any]:
            connections = {} if watch.connections is None else {"daemon_connections": watch.connections}
            return watch.fields() | connections

        await resources.watch(self.metrics.write, self.network.host.daemon, more=fields)

    def _end(self) -> int:
        stopping = self.network.stopping
        if not stopping():
            self.member.progress.state = "finished"
            self.console.say("the last round is over; staying until the others have it too")
            self.network.thread.call(self.member.linger(), stopping=stopping)
            self.sync.come_back()
        report = node_report(self, evaluated=not stopping())
        path = self.folder / "report.json"
        write_whole(path, json.dumps(report, indent=2) + "\n", "--data-dir")
        loss = f", loss {report['loss_first']:.3f} -> {report['loss_last']:.3f}" if self.last_losses else ""
        self.console.say(f"done: {report['rounds_committed']} rounds committed{loss}; report in {path}")
        return stopping.exit_code
