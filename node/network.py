"""What a node opens on its way in: the network daemon, bootstrap peers and peers met before, the swarm's time."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from stretto.node.config import NodeConfig
from stretto.node.console import Console
from stretto.node.ports import doubt_reach, in_container
from stretto.node.statusfile import StatusFile
from stretto.node.stopping import StopSignal
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.dht_time import set_dht_time
from stretto.node.swarm.host import Host, HostConfig, dial_any, socket_dir
from stretto.node.swarm.identity import Identity
from stretto.node.swarm.known_peers import KnownPeers
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import fetch_run
from stretto.node.swarm.thread import NetworkThread
from stretto.node.swarm.time_keeper import TimeKeeper
from stretto.protocol import messages as m
from stretto.protocol.errors import ConfigError
from stretto.protocol.invite import Invite


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
