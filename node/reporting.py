"""What a node says of itself: its line on the console, the status file's fields, the report at the end."""

import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stretto.node.swarm.identity import format_peer_id
from stretto.node.swarm.summary import summarize
from stretto.node.version import VERSION
from stretto.protocol.digest import state_digest, weights_digest

if TYPE_CHECKING:
    from stretto.node.app import Node


def status_line(node: "Node") -> str:
    """One line: what this node does or waits for."""
    exchange, progress = node.member.exchange, node.member.progress
    peers = len(node.member.roster.peers)
    used = f", {exchange.watch.status()}" if exchange.watch is not None and exchange.watch.status() else ""
    if progress.state != "training":
        return f"{progress.state}: {node.member.waiting_for or f'{peers} other peer(s) in the run'}{used}"
    clock, rate = exchange.peer.clock, progress.rate
    swarm = ", ".join(exchange.peer.waiting_for())
    if node.lockstep is not None:
        swarm = "; ".join(filter(None, [node.lockstep.waiting_for, swarm])) or "in lockstep"
    elif not swarm and clock is not None:
        following = clock.next_round(exchange.now())
        due = clock.departure(following) - exchange.now()
        ends = exchange.last_round is not None and following >= exchange.last_round
        swarm = "the last round has departed" if ends else f"next round in {due:.0f} s"
    isolated = node.member.isolated
    alone = "" if peers else "; alone, no other peer is in sight"
    alone = f"; no peers for {isolated:.0f} s" if isolated else alone
    swarm = node.units.waiting_for or exchange.peer.resting or swarm
    return (
        f"{'isolated, ' if isolated else ''}training: step {progress.step}, loss {progress.loss:.3f}, "
        f"{rate * node.run.inner.tokens_per_step:,.0f} tokens/s, tau {progress.tau}, {peers} other peer(s), "
        f"{len(exchange.committed)} rounds committed, {len(exchange.aborted)} aborted{used}; {swarm}{alone}"
    )


def status_fields(node: "Node") -> dict[str, Any]:
    """The status file's fields: from the network thread."""
    member, host = node.member, node.member.host
    peers = {
        **member.roster.peers,
        host.identity.peer_id_bytes: member.own_record(VERSION, node.config.client_mode),
    }
    return {
        "state": member.progress.state,
        "doing": node.console.status(),
        "addresses": list(host.addresses),
        "swarm": summarize(node.run, node.run.digest(), peers),
    }


def node_report(node: "Node", *, evaluated: bool) -> dict[str, Any]:
    """What this node did, as plain values."""
    exchange, seconds = node.member.exchange, max(node.train_seconds, 1e-9)
    traffic = exchange.traffic
    return {
        "peer": exchange.host.identity.peer_id,
        "run": node.run.digest().hex(),
        "steps": node.sync.step,
        "tokens": node.member.progress.tokens,
        "rounds_begun": sorted(exchange.begun),
        "committed": sorted(exchange.committed),
        "rounds_committed": len(exchange.committed),
        "aborted": {str(number): why for number, why in sorted(exchange.aborted.items())},
        "heads": [tip.head.hex() for tip in exchange.peer.tips()],
        "states": [state_digest(s.anchor, s.momentum).hex() for s in exchange.peer.diloco.fragments],
        "versions": [tip.version for tip in exchange.peer.tips()],
        "loss_first": fmean(node.first_losses) if node.first_losses else None,
        "loss_last": fmean(node.last_losses) if node.last_losses else None,
        "eval_loss": node.heldout_loss() if evaluated else None,
        "bytes_up": traffic.contributions_up + traffic.state_up + exchange.links.bytes_up,
        "bytes_up_contributions": traffic.contributions_up,
        "bytes_up_state": traffic.state_up,
        "bytes_up_control": exchange.links.bytes_up,
        "bytes_due": exchange.bytes_due,
        "bytes_due_fp32": exchange.bytes_due_fp32,
        **(exchange.watch.fields() if exchange.watch is not None else {}),
        "faults": {format_peer_id(peer): kinds for peer, kinds in exchange.faults.items()},
        "payload_bytes": [exchange.peer.payload_size(f) for f in range(exchange.peer.fragments)],
        "fragment_parameters": [spec.numel for spec in node.sync.model.specs],
        "pace": node.config.pace,
        "emulated_device_time": node.config.pace > 0,
        "step_seconds": seconds / max(node.sync.step, 1),
        "blocked_seconds": node.sync.blocked_seconds,
        "compute_utilization": 1 - node.sync.blocked_seconds / seconds,
        "tau": max(set(node.taus), key=node.taus.count) if node.taus else None,
        "taus": node.taus,
        "late_merges": node.late_merges,
        **node.units.report(),
        "lockstep": _lockstep_report(node),
        "wall_seconds": time.monotonic() - node.started,
    }


def _lockstep_report(node: "Node") -> dict[str, Any] | None:
    """What a simulation needs to repeat this node's part, and the bits that it ended with."""
    if node.lockstep is None:
        return None
    model = node.sync.model
    return {
        "peers": node.lockstep.peers,
        "tau": node.lockstep.schedule.tau,
        "rounds": node.lockstep.schedule.rounds,
        "micro_batch": node.config.micro_batch,
        "device": str(node.trainer.device),
        "weights": [weights_digest(model.gather(p)).hex() for p in range(len(model.specs))],
    }
