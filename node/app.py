"""One volunteer's node from start to end: this file puts the parts together and decides nothing that they decide.

Order, each phase with its own message: identity and its lock, port, network daemon, bootstrap peers, run config,
corpus and model, the last checkpoint, rehearsal (how fast is this machine?), the swarm's state, training, the last
checkpoint of this life, leaving.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from stretto.node import resources
from stretto.node.checkpoint import Contents
from stretto.node.checkpoint_files import CheckpointFiles
from stretto.node.config import NodeConfig, default_data_dir
from stretto.node.console import Console
from stretto.node.data.corpus import Corpus
from stretto.node.data.fixed_units import FixedUnits
from stretto.node.data.journal import Journal, place
from stretto.node.data.stream import TokenStream, count_windows, heldout_batches
from stretto.node.data.units import UnitKeeper
from stretto.node.events import Narrator, chain_fields, lockstep_over, pace_in_words, run_in_words
from stretto.node.lockstep import InLockstep, Lockstep, LockstepSchedule, check_lockstep, lockstep_rules
from stretto.node.metrics.jsonl import MetricsFile
from stretto.node.model import build_model, count_parameters
from stretto.node.parts import (
    choose_device,
    cut_model,
    last_round,
    make_peer,
    open_data,
)
from stretto.node.ports import doubt_reach, in_container, probe_port
from stretto.node.runfile import check_expected
from stretto.node.saving import Saver
from stretto.node.statusfile import StatusFile
from stretto.node.stopping import StopSignal
from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.dht_time import set_dht_time
from stretto.node.swarm.exchange import Exchange
from stretto.node.swarm.folders import own_folder, write_whole
from stretto.node.swarm.host import Host, HostConfig, dial_any, socket_dir
from stretto.node.swarm.identity import Identity, IdentityLock, format_peer_id, load_or_create
from stretto.node.swarm.known_peers import KnownPeers
from stretto.node.swarm.line import Line
from stretto.node.swarm.locks import run_lock
from stretto.node.swarm.member import Member, Progress
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import check_run, fetch_run
from stretto.node.swarm.sockets import SocketMeter
from stretto.node.swarm.summary import summarize
from stretto.node.swarm.thread import NetworkThread, Stopped
from stretto.node.swarm.time_keeper import TimeKeeper
from stretto.node.swarm.traffic import TrafficWatch
from stretto.node.sync import Sync
from stretto.node.trainer import StepReport, Trainer, evaluate, make_optimizer
from stretto.protocol import fp4, wire
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.digest import state_digest, weights_digest
from stretto.protocol.errors import ConfigError, RemoteProtocolError
from stretto.protocol.invite import Invite
from stretto.protocol.peer import Peer
from stretto.protocol.roster import PeerRecord
from stretto.protocol.unitbook import Bookmark, UnitBook
from stretto.protocol.units import UnitCut

VERSION = version("stretto-swarm")
REHEARSAL = 5
"""Forward and backward passes that measure this machine before the run's clock is set."""


LEAVE_SECONDS = 8.0
"""Longest that leaving may take after that."""

SAVE_SECONDS = 600.0
"""Longest that the last checkpoint may take after somebody asked this node to stop."""


def run_folder(config: NodeConfig, run: bytes) -> Path:
    """Where this node keeps what belongs to the run with this id."""
    return config.data_dir / "runs" / run.hex()[:16]


@dataclass
class Network:
    """Everything that was opened on the way in, closed in reverse order on the way out."""

    config: NodeConfig
    console: Console
    stopping: StopSignal
    thread: NetworkThread = field(default_factory=NetworkThread)
    host: Host | None = None
    bootstraps: list[str] = field(default_factory=list)
    clock: SwarmClock = field(default_factory=SwarmClock)
    time: TimeKeeper | None = None
    known: KnownPeers | None = None
    reached: list[str] = field(default_factory=list)
    """Addresses of bootstrap and remembered peers that answered at the start."""
    status: StatusFile | None = None
    """What this node says of itself to whoever asks on this machine."""

    def open(self, identity: Identity, invite: Invite) -> Host:
        """Start the daemon, reach a bootstrap peer or one met before, and take over the swarm's time."""
        config = self.config
        self.console.say(f"starting the network daemon on {config.host} port {config.port or '(any free one)'}")
        host_config = HostConfig(
            host=config.host,
            port=config.port,
            announce=config.announce,
            socket_dir=socket_dir(config.data_dir),
            max_connections=config.max_connections,
        )
        set_dht_time(self.clock.now)
        validator = SignedRecords(identity, [roster_key(invite.run)], self.clock.now)
        self.host = self.thread.call(Host.start(identity, host_config, validator), stopping=self.stopping)
        self.console.say(f"listening at {', '.join(self.host.addresses)}")
        doubt = doubt_reach(config.port, config.announce, self.host.addresses, container=in_container())
        if doubt is not None and not config.client_mode:
            self.console.say(doubt)
        addresses = self.bootstraps = [a for a in invite.addresses if not a.endswith(identity.peer_id)]
        if not addresses:
            raise ConfigError(
                f"the invite names only this node's own peer id ({identity.peer_id}) as a bootstrap peer: the key "
                f"file {identity.path} is a copy of the bootstrap's. Give this node a key of its own with --identity"
            )
        if len(addresses) < len(invite.addresses):
            self.console.say("WARNING the invite names this peer itself as a bootstrap; that address is ignored")
        known = KnownPeers(run_folder(config, invite.run) / "peers.json", identity.peer_id, self.console.say)
        self.known, remembered = known, known.addresses()
        also = f" and {len(remembered)} address(es) of peers met earlier" if remembered else ""
        self.console.say(f"dialling {len(addresses)} bootstrap peer(s){also}")
        self.reached = self.thread.call(self._dial(addresses, remembered), stopping=self.stopping)
        bootstraps = sum(address in addresses for address in self.reached)
        self.console.say(f"{bootstraps} of {len(addresses)} bootstrap peers reached")
        self.time = self.thread.call(self._take_time(invite.run), stopping=self.stopping)
        return self.host

    def fetch_run(self, host: Host, invite: Invite) -> m.SignedRun:
        """The run config, from a bootstrap peer or, if need be, from the peers of the run."""
        others = Roster(host, invite.run, lambda: None, self.clock.now)
        work = fetch_run(host, invite, self.reached, others=others.read, say=self.console.say)
        return self.thread.call(work, stopping=self.stopping)

    async def _dial(self, addresses: list[str], remembered: list[str]) -> list[str]:
        assert self.host is not None
        patience, remembered = self.config.join_timeout or None, [a for a in remembered if a not in addresses]
        say, stop = self.console.say, asyncio.Event()
        return await dial_any(self.host, addresses, say=say, stop=stop, patience=patience, remembered=remembered)

    async def _take_time(self, run: bytes) -> TimeKeeper:
        """Made in the loop that it runs in."""
        assert self.host is not None
        keeper = TimeKeeper(host=self.host, run=run, clock=self.clock, tell=self.console.say)
        await keeper.arrive()
        return keeper

    def close(self) -> None:
        """Stop daemon and thread."""
        if self.host is not None:
            self.thread.call(self.host.close())
        self.thread.close()


def run_node(invite_text: str, config: NodeConfig, console: Console, stopping: StopSignal) -> int:
    """Join the run that ``invite_text`` names and train until it ends or somebody stops it. Returns the exit code."""
    invite = Invite.parse(invite_text)
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
        lockstep = _make_lockstep(run, config, len(fragments.specs), network)
        rules = lockstep_rules(run, len(fragments.specs), lockstep.peers) if lockstep else None
        peer = make_peer(run, fragments, identity, device, can_coordinate=not config.client_mode, rules=rules)
        on_device = device.type == "cuda" and run.wire.up == "e3m0" and not run.wire.error_feedback
        sync = Sync(fragments, peer, tau_max=run.outer.tau_max, fixed_tau=config.tau, encode_on_device=on_device)
        path = f" (the {fp4.path_name()} path on the host)" if run.wire.up == "e3m0" else ""
        console.say(f"contributions are encoded as {run.wire.up} on {device if on_device else 'the host'}{path}")
        stream, units, journal = _make_stream(run, corpus, identity, network, folder, fixed=lockstep is not None)
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
        member = _make_member(run, signed, config, network, peer, sync, metrics, console, folder / "log", lockstep)

        def ask() -> None:
            network.thread.loop.call_soon_threadsafe(member.roster.nudge)

        if isinstance(units, UnitKeeper):
            units.connect(ask=ask, say=member.say)
            member.units = units
        saver = _make_saver(run, identity, config, trainer, sync, member, folder)
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
        call(self.member.enter(), stopping=stopping)
        watches = [self.network.thread.start(work) for work in (self._watch_daemon(), self._watch_resources())]
        if self.network.status is not None:
            self.network.status.tell = self.tell
        try:
            self.console.say("measuring the speed of this machine")
            step_seconds = self.trainer.rehearse(REHEARSAL)
            progress.rate = 1 / step_seconds
            self.sync.estimate = self.sync.estimate.with_step(step_seconds)
            self.console.status = self.status
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
        status = await self.network.host.died()
        self.console.say(f"ERROR the network daemon (p2pd) ended with status {status}; this node cannot go on")
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
        report = self.report(evaluated=not stopping())
        path = self.folder / "report.json"
        write_whole(path, json.dumps(report, indent=2) + "\n", "--data-dir")
        loss = f", loss {report['loss_first']:.3f} -> {report['loss_last']:.3f}" if self.last_losses else ""
        self.console.say(f"done: {report['rounds_committed']} rounds committed{loss}; report in {path}")
        return stopping.exit_code

    # ------------------------------------------------------------------ reporting

    def status(self) -> str:
        """One line: what this node does or waits for."""
        exchange, progress = self.member.exchange, self.member.progress
        peers = len(self.member.roster.peers)
        used = f", {exchange.watch.status()}" if exchange.watch is not None and exchange.watch.status() else ""
        if progress.state != "training":
            return f"{progress.state}: {self.member.waiting_for or f'{peers} other peer(s) in the run'}{used}"
        clock, rate = exchange.peer.clock, progress.rate
        swarm = ", ".join(exchange.peer.waiting_for())
        if self.lockstep is not None:
            swarm = "; ".join(filter(None, [self.lockstep.waiting_for, swarm])) or "in lockstep"
        elif not swarm and clock is not None:
            following = clock.next_round(exchange.now())
            due = clock.departure(following) - exchange.now()
            ends = exchange.last_round is not None and following >= exchange.last_round
            swarm = "the last round has departed" if ends else f"next round in {due:.0f} s"
        isolated = self.member.isolated
        alone = "" if peers else "; alone, no other peer is in sight"
        alone = f"; no peers for {isolated:.0f} s" if isolated else alone
        swarm = self.units.waiting_for or exchange.peer.resting or swarm
        return (
            f"{'isolated, ' if isolated else ''}training: step {progress.step}, loss {progress.loss:.3f}, "
            f"{rate * self.run.inner.tokens_per_step:,.0f} tokens/s, tau {progress.tau}, {peers} other peer(s), "
            f"{len(exchange.committed)} rounds committed, {len(exchange.aborted)} aborted{used}; {swarm}{alone}"
        )

    def tell(self) -> dict[str, Any]:
        """The status file's fields: from the network thread."""
        member, host = self.member, self.member.host
        peers = {
            **member.roster.peers,
            host.identity.peer_id_bytes: member.own_record(VERSION, self.config.client_mode),
        }
        return {
            "state": member.progress.state,
            "doing": self.console.status(),
            "addresses": list(host.addresses),
            "swarm": summarize(self.run, self.run.digest(), peers),
        }

    def report(self, *, evaluated: bool) -> dict[str, Any]:
        """What this node did, as plain values."""
        exchange, seconds = self.member.exchange, max(self.train_seconds, 1e-9)
        traffic = exchange.traffic
        return {
            "peer": exchange.host.identity.peer_id,
            "run": self.run.digest().hex(),
            "steps": self.sync.step,
            "tokens": self.member.progress.tokens,
            "rounds_begun": sorted(exchange.begun),
            "committed": sorted(exchange.committed),
            "rounds_committed": len(exchange.committed),
            "aborted": {str(number): why for number, why in sorted(exchange.aborted.items())},
            "heads": [tip.head.hex() for tip in exchange.peer.tips()],
            "states": [state_digest(s.anchor, s.momentum).hex() for s in exchange.peer.diloco.fragments],
            "versions": [tip.version for tip in exchange.peer.tips()],
            "loss_first": fmean(self.first_losses) if self.first_losses else None,
            "loss_last": fmean(self.last_losses) if self.last_losses else None,
            "eval_loss": self.heldout_loss() if evaluated else None,
            "bytes_up": traffic.contributions_up + traffic.state_up + exchange.links.bytes_up,
            "bytes_up_contributions": traffic.contributions_up,
            "bytes_up_state": traffic.state_up,
            "bytes_up_control": exchange.links.bytes_up,
            "bytes_due": exchange.bytes_due,
            "bytes_due_fp32": exchange.bytes_due_fp32,
            **(exchange.watch.fields() if exchange.watch is not None else {}),
            "faults": {format_peer_id(peer): kinds for peer, kinds in exchange.faults.items()},
            "payload_bytes": [exchange.peer.payload_size(f) for f in range(exchange.peer.fragments)],
            "fragment_parameters": [spec.numel for spec in self.sync.model.specs],
            "pace": self.config.pace,
            "emulated_device_time": self.config.pace > 0,
            "step_seconds": seconds / max(self.sync.step, 1),
            "blocked_seconds": self.sync.blocked_seconds,
            "compute_utilization": 1 - self.sync.blocked_seconds / seconds,
            "tau": max(set(self.taus), key=self.taus.count) if self.taus else None,
            "taus": self.taus,
            "late_merges": self.late_merges,
            **self.units.report(),
            "lockstep": self._lockstep_report(),
            "wall_seconds": time.monotonic() - self.started,
        }

    def _lockstep_report(self) -> dict[str, Any] | None:
        """What a simulation needs to repeat this node's part, and the bits that it ended with."""
        if self.lockstep is None:
            return None
        model = self.sync.model
        return {
            "peers": self.lockstep.peers,
            "tau": self.lockstep.schedule.tau,
            "rounds": self.lockstep.schedule.rounds,
            "micro_batch": self.config.micro_batch,
            "device": str(self.trainer.device),
            "weights": [weights_digest(model.gather(p)).hex() for p in range(len(model.specs))],
        }


def _make_saver(
    run: RunConfig,
    identity: Identity,
    config: NodeConfig,
    trainer: Trainer,
    sync: Sync,
    member: Member,
    folder: Path,
) -> Saver:
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


def _make_lockstep(run: RunConfig, config: NodeConfig, fragments: int, network: Network) -> Lockstep | None:
    """The gates of a lockstep run, None for an ordinary one."""
    if not config.lockstep:
        return None
    assert config.tau is not None
    check_lockstep(run, config.lockstep, config.tau)
    rounds = last_round(run, fragments, config.rounds)
    schedule = LockstepSchedule(run.outer.inner_steps, fragments, rounds, config.tau)
    return Lockstep(schedule, config.lockstep, stopping=network.stopping)


def _make_stream(
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


def _make_member(
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
