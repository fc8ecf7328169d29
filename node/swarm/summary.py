"""The swarm as its roster tells it: one summary for ``stretto status``, the bootstrap peer's log and its web page."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from stretto.node.swarm.clock import SwarmClock
from stretto.node.swarm.dht_time import set_dht_time
from stretto.node.swarm.host import Host, HostConfig, dial_any, socket_dir
from stretto.node.swarm.identity import format_peer_id, load_or_create
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster, online
from stretto.node.swarm.runs import check_run, fetch_run
from stretto.node.swarm.time_keeper import TimeKeeper
from stretto.protocol.config import RunConfig
from stretto.protocol.invite import Invite
from stretto.protocol.roster import PeerRecord
from stretto.protocol.units import units_done


def summarize(run: RunConfig | None, run_id: bytes, peers: Mapping[bytes, PeerRecord]) -> dict[str, Any]:
    """Plain values: the run, each peer, and what all agree on."""
    training = [record for record in peers.values() if online(record)]
    clocks = [record.clock for record in peers.values() if record.clock is not None]
    clock = max(clocks, key=lambda clock: clock.round, default=None)
    heads: dict[tuple[int, ...], set[bytes]] = {}
    for record in training:
        heads.setdefault(record.versions, set()).add(record.heads)
    # One peer's word must not decide: the median count, and heads among those that claim the same commits.
    commits = sorted(sum(record.versions) for record in training)
    units = sorted(units_done(record.data) for record in training)
    lost = median_low([record.lost for record in training] or [0])
    return {
        "run": run_id.hex(),
        "name": run.name if run else None,
        "peers": len(training),
        "round": clock.round if clock else None,
        "interval_seconds": clock.interval if clock else None,
        "commits": commits[(len(commits) - 1) // 2] if commits else 0,
        "units_done": units[(len(units) - 1) // 2] if units else 0,
        "tokens_lost": lost,
        "samples_lost": lost // run.data.sequence_length if run is not None else None,
        "heads_equal": all(len(claimed) == 1 for claimed in heads.values()),
        "tokens_per_second": (
            sum(record.rate for record in training) * run.inner.tokens_per_step if run is not None else None
        ),
        "members": [_member(peer, record) for peer, record in sorted(peers.items())],
    }


def _member(peer: bytes, record: PeerRecord) -> dict[str, Any]:
    return {
        "peer": format_peer_id(peer),
        "state": record.state,
        "version": record.version,
        "step": record.step,
        "loss": record.loss,
        "tokens": record.tokens,
        "tokens_uncounted": record.uncounted,
        "steps_per_second": record.rate,
        "tau": record.tau,
        "commits": sum(record.versions),
        "units": [claim.unit for claim in record.data.claims if claim.held],
        "client_mode": record.client_mode,
        "addresses": list(record.addresses),
    }


@dataclass(frozen=True)
class Visit:
    """What a stranger sees of a swarm while its connection lasts."""

    host: Host
    run: RunConfig
    peers: Mapping[bytes, PeerRecord]


@asynccontextmanager
async def visiting(invite: Invite, *, timeout: float, say: Callable[[str], None]) -> AsyncIterator[Visit]:
    """Visit the swarm with a throw-away identity. HostError if nobody answers."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        place = Path(folder)
        identity = load_or_create(place / "identity.key")
        config = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=socket_dir(place), dial_timeout=timeout)
        clock = SwarmClock()
        set_dht_time(clock.now)
        host = await Host.start(identity, config, SignedRecords(identity, [roster_key(invite.run)], clock.now))
        try:
            await dial_any(host, invite.addresses, say=say, stop=asyncio.Event(), patience=timeout)
            # A stranger with a wrong clock would take every record of the DHT for expired.
            await TimeKeeper(host=host, run=invite.run, clock=clock, tell=say).arrive()
            run = check_run(await fetch_run(host, invite), invite)
            yield Visit(host, run, await Roster(host, invite.run, lambda: None, clock.now).read())
        finally:
            await host.close()


async def look(invite: Invite, *, timeout: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Visit the swarm as a stranger and summarize it. HostError if nobody answers."""
    async with visiting(invite, timeout=timeout, say=say) as visit:
        return summarize(visit.run, invite.run, visit.peers)


def render(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    clock = f"next round {summary['round']}" if summary["round"] is not None else "not begun"
    agree = "all agree" if summary["heads_equal"] else "their chains differ"
    samples = "" if summary["samples_lost"] is None else f" ({summary['samples_lost']:,} samples)"
    lines = [
        f"run {summary['name']} ({summary['run'][:16]}): {summary['peers']} peer(s) training, {clock}, "
        f"{summary['commits']} commits, {agree}, {summary['units_done']} work units of the data done, "
        f"{summary['tokens_lost']:,} tokens{samples} lost with peers that vanished"
    ]
    for member in summary["members"]:
        lines.append(
            f"  {member['peer'][-8:]}  {member['state']:<9} step {member['step']:>7}  loss {member['loss']:.3f}  "
            f"{member['steps_per_second']:.2f} steps/s  tau {member['tau']}  {member['commits']} commits"
        )
    return "\n".join(lines)
