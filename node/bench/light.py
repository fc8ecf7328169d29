"""A light peer: all of a node but the training. It shows what rounds cost, and many of them fit one machine.

Network thread, daemon, roster, exchange, protocol, snapshots and merges are the node's own (``stretto.node.swarm``,
``stretto.node.sync``, ``stretto.node.parts``), over real sockets. The model is one tensor, so there is one fragment,
and an "inner step" adds the peer's own noise to it, once after each round. Its announced speed is made up so that
rounds depart at the interval that was asked for.

A round's ``wall`` goes from the clock's departure to the moment at which the result has met the local weights: the
snapshot, the outer gradient, encoding, finding the group, the exchange, the average, the outer step, the state's
digest, the commit and the merge. ``installed`` is the part of it up to the commit, as in a node's metrics.
"""

import asyncio
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.node.parts import make_peer
from stretto.node.swarm.chainlog import ChainLog
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.exchange import Exchange
from stretto.node.swarm.host import Host, HostConfig, dial_any, socket_dir
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.known_peers import KnownPeers
from stretto.node.swarm.line import Line
from stretto.node.swarm.member import Member, Progress
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import sign_run
from stretto.node.swarm.thread import NetworkThread
from stretto.node.swarm.time_keeper import TimeKeeper
from stretto.node.sync import Sync
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import StrettoError
from stretto.protocol.fragments import FragmentedModel, FragmentSpec
from stretto.protocol.schedule import Clock

NOISE = 1e-3
"""Standard deviation of what an inner step changes."""
TOKENS = 1000
DIAL_SECONDS = 60.0
LAST_SECONDS = 60.0
"""No two rounds end so far apart."""


def one_tensor(numel: int) -> tuple[FragmentedModel, torch.nn.Parameter]:
    """A model of ``numel`` weights, all zero, in one tensor and one fragment; and that tensor."""
    model, weights = torch.nn.Module(), torch.nn.Parameter(torch.zeros(numel))
    model.register_parameter("weights", weights)
    return FragmentedModel(model, [FragmentSpec(index=0, names=("weights",), shapes=((numel,),))]), weights


class LightPeer:
    """One peer of ``run`` (the text of a run.toml), whose only weights are ``numel`` float32. Methods are requests."""

    def __init__(
        self, *, run: str, numel: int, seed: int, rounds: int, folder: str, reply: Callable[[dict[str, Any]], None]
    ) -> None:
        self.run, self.rounds, self._reply = RunConfig.from_toml(run), rounds, reply
        data_dir = Path(folder)
        self.data_dir = data_dir
        self.identity = load_or_create(data_dir / "identity.key")
        self.model, self.weights = one_tensor(numel)
        self.noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(NOISE)
        self.peer = make_peer(self.run, self.model, self.identity, torch.device("cpu"), can_coordinate=True)
        self.sync = Sync(self.model, self.peer, tau_max=self.run.outer.tau_max)
        self.progress = Progress()
        self.events: queue.Queue[tuple[float, dict[str, Any]]] = queue.Queue()
        self.faults: list[str] = []
        self.thread = NetworkThread()
        config = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=socket_dir(data_dir))
        validator = SignedRecords(self.identity, [roster_key(self.run.digest())])
        self.host = self.thread.call(Host.start(self.identity, config, validator))
        self.member = self.thread.call(self._make_member())

    async def _make_member(self) -> Member:
        run, clock = self.run.digest(), SwarmClock()
        clock.settled = True  # all peers run on this machine
        roster = Roster(self.host, run, lambda: self.member.own_record("bench", client_mode=False), clock.now)
        keeper = TimeKeeper(host=self.host, run=run, clock=clock, tell=print)
        known = KnownPeers(self.data_dir / "peers.json", self.identity.peer_id, print)
        exchange = Exchange(
            host=self.host,
            peer=self.peer,
            sync=self.sync,
            roster=roster,
            line=Line(),
            clock=clock,
            log=ChainLog(self.data_dir / "log", run=run, budget=0, warn=print),
            run_config=sign_run(self.run, self.identity),
            say=self._said,
            last_round=self.rounds,
        )
        return Member(self.host, exchange, roster, self.progress, [], known, keeper, self._said, print)

    def _said(self, event: dict[str, Any]) -> None:
        if event["event"] == "fault":
            self.faults.append(str(event["what"]))
        elif event["event"] == "round":
            self.events.put((time.perf_counter(), event))

    # ------------------------------------------------------------------ requests

    def opened(self) -> dict[str, Any]:
        """Where this peer listens."""
        return {"address": self.host.addresses[0]}

    def enter(self, *, dial: list[str], others: int, step_seconds: float) -> dict[str, Any]:
        """Enter the swarm through ``dial``, and wait until ``others`` peers that are ready are in the roster."""
        self.step_seconds = step_seconds
        if dial:
            stop = asyncio.Event()
            self.thread.call(dial_any(self.host, dial, say=print, stop=stop, patience=DIAL_SECONDS))
        self._step()
        self.progress.rate, self.progress.state = 1 / step_seconds, "ready"
        self.thread.call(self.member.enter())
        end = time.monotonic() + DIAL_SECONDS
        while sum(record.state == "ready" for record in self.member.roster.peers.values()) < others:
            if time.monotonic() > end:
                raise StrettoError(f"only {len(self.member.roster.peers)} of {others} other peers came in sight")
            self.thread.loop.call_soon_threadsafe(self.member.roster.nudge)
            time.sleep(0.05)
        return {"peers": len(self.member.roster.peers)}

    def take_part(self, *, at: float, interval: float) -> dict[str, Any]:
        """Take part in all rounds, the first at swarm time ``at``; replies after each and with totals at the end."""
        self.progress.state = "training"
        clock = Clock(round=0, at=at, interval=interval)
        self.thread.loop.call_soon_threadsafe(self.member.exchange.set_clock, clock)
        self.thread.loop.call_soon_threadsafe(self.member.exchange.begin)
        reached = -1
        while reached < self.rounds - 1:
            happened, event = self.events.get(timeout=LAST_SECONDS)
            reached = max(reached, event["round"])
            self.sync.come_back()
            merged = time.perf_counter()
            self._step()
            installed = event["seconds"]
            event |= {"installed": installed, "wall": installed + merged - happened}
            self._reply(event)
        exchange = self.member.exchange
        payload = {name: value for name, value in vars(exchange.traffic).items() if name != "state_up"}
        return {
            "done": True,
            "payload_up": sum(value for name, value in payload.items() if name.endswith("_up")),
            "control_up": exchange.links.bytes_up,
            "state_up": exchange.traffic.state_up,
            "head": self.peer.tips()[0].head.hex(),
            "faults": self.faults[:10],
        }

    def close(self) -> dict[str, Any]:
        """Leave the swarm and end the daemon."""
        try:
            self.thread.call(self.member.leave())
        finally:
            self.thread.call(self.host.close())
            self.thread.close()
        return {"closed": True}

    def _step(self) -> None:
        """One inner step: the weights move, and the next contribution is another one."""
        self.sync.acquire_step()
        try:
            with torch.no_grad():
                self.weights.add_(self.noise, alpha=1.0 if self.sync.step % 2 else -0.5)
        finally:
            self.sync.release_step(TOKENS, self.step_seconds)
