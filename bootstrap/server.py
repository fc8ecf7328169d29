"""The bootstrap peer: an entry to the DHT that stays, publishes the signed run config, and does not train.

It holds no power over the run: peers check the config against the invite, find each other through the DHT, and go on
without it once they have met. Several may serve one run; they need not know each other.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.bootstrap.monitor import Monitor
from stretto.node.ports import check_announce
from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.dht_time import set_dht_time
from stretto.node.swarm.host import Host, HostConfig, HostError, socket_dir
from stretto.node.swarm.identity import Identity
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.runs import answer_run, sign_run, wait_closed_by_client
from stretto.node.swarm.streams import Reader, Writer, bulk_name, read_message, serve, write_message
from stretto.node.swarm.summary import summarize
from stretto.node.swarm.time_keeper import TimeKeeper, answer_time
from stretto.protocol import messages as m
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.invite import Invite

REDIAL = 30.0

_REQUESTS = (m.FetchRun, m.FetchTime, m.FetchState, m.Fetch, m.Push)


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """Where a bootstrap peer listens; ``peers`` are other bootstrap peers of the run, named in the invite too."""

    data_dir: Path
    host: str
    port: int
    announce: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for address in self.announce:
            check_announce(address)


class Bootstrap:
    """A running bootstrap peer. Use from its event loop."""

    def __init__(
        self, host: Host, run: RunConfig, signed: m.SignedRun, config: BootstrapConfig, clock: SwarmClock
    ) -> None:
        self.host, self.run, self.config, self.clock = host, run, config, clock
        self._signed = signed
        self.roster = Roster(host, run.digest(), lambda: None, clock.now)
        self.monitor = Monitor(run)

    @classmethod
    async def start(cls, run: RunConfig, identity: Identity, config: BootstrapConfig) -> "Bootstrap":
        """Open the network and publish the run."""
        host_config = HostConfig(
            host=config.host,
            port=config.port,
            announce=config.announce,
            socket_dir=socket_dir(config.data_dir),
        )
        clock = SwarmClock()
        clock.settled = True  # who comes first has nobody to ask
        set_dht_time(clock.now)
        host = await Host.start(identity, host_config, SignedRecords(identity, [roster_key(run.digest())], clock.now))
        self = cls(host, run, sign_run(run, identity), config, clock)
        await serve(host.p2p, bulk_name(run.digest()), self._answer)
        return self

    def invite(self) -> Invite:
        """The invite: addresses that others can use come first, loopback last."""
        addresses = sorted(self.host.addresses, key=lambda address: is_loopback(address))
        return Invite(
            self.run.digest(),
            self.host.identity.peer_id_bytes,
            tuple(dict.fromkeys([*addresses, *self.config.peers]))[:16],
        )

    async def _answer(self, _sender: bytes, reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(RemoteProtocolError):
            request = await read_message(reader, *_REQUESTS)
            if isinstance(request, m.FetchRun):
                await answer_run(self._signed, reader, writer)
            elif isinstance(request, m.FetchTime):
                await answer_time(self.clock, request, reader, writer)
            else:
                await write_message(writer, m.Missing("a bootstrap peer holds the run config only"))
                await wait_closed_by_client(reader)

    async def keep(self, say: Callable[[str], None], *, seconds_per_status: float) -> None:
        """Follow the roster and keep in touch with the other bootstrap peers, until cancelled or p2pd dies."""
        keeper = TimeKeeper(host=self.host, run=self.run.digest(), clock=self.clock, tell=say, follows=True)
        keeper.trainers = lambda: list(self.roster.peers)
        work: Sequence[Any] = (
            asyncio.ensure_future(self.roster.keep()),
            asyncio.ensure_future(self._redial()),
            asyncio.ensure_future(self._report(say, seconds_per_status)),
            asyncio.ensure_future(self.host.died()),
            asyncio.ensure_future(keeper.keep()),
        )
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            if work[3].done():
                raise HostError(f"the network daemon (p2pd) {work[3].result()}")
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _redial(self) -> None:
        while True:
            for address in self.config.peers:
                with contextlib.suppress(HostError):
                    await self.host.dial(address)
            await asyncio.sleep(REDIAL)

    async def _report(self, say: Callable[[str], None], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            say(self.monitor.line(self.roster.peers))

    def tell(self) -> dict[str, Any]:
        """The status file's fields."""
        return {
            "state": "serving",
            "doing": f"run {self.run.name!r}",
            "addresses": list(self.host.addresses),
            "swarm": summarize(self.run, self.run.digest(), self.roster.peers),
        }

    async def close(self) -> None:
        """Stop."""
        await self.host.close()


def is_loopback(address: str) -> bool:
    """Whether an address is of use on this machine only."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))
