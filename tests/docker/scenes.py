"""What the swarm of the compose files lives through. Each scene starts a project, checks, and removes it."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.docker.project import Project, inspect, stop
from tests.docker.shell import PATIENCE, SLOW, Failed, need, run, say, until

QUICK = "../tests/docker/quick.yaml"
NODES = ("node1", "node2", "node3", "node4")


@contextmanager
def _up(project: Project, *services: str, limit: float = SLOW) -> Iterator[None]:
    try:
        project.compose("up", "-d", "--no-build", *services, limit=limit)
        yield
    except Failed as error:
        raise Failed(f"{error}\n{project.logs()}") from None
    finally:
        project.down()


def swarm(variables: Mapping[str, str]) -> dict[str, Any]:
    """A bootstrap peer and four nodes: rounds, a kill, the end of the bootstrap peer, an orderly stop."""
    project = Project(f"stretto-test-{os.getpid()}", ["compose.yaml", QUICK], variables)
    report: dict[str, Any] = {}
    began = time.monotonic()
    with _up(project):
        until(
            lambda: all(project.health(name) == "healthy" for name in ("bootstrap", *NODES)),
            "5 healthy containers",
            limit=SLOW,
            logs=project.logs,
        )
        report["healthy_seconds"] = round(time.monotonic() - began, 1)
        say(f"5 healthy containers after {report['healthy_seconds']:.0f} s")
        found = project.await_status(
            "bootstrap",
            lambda s: _agree(s, peers=4, commits=8),
            "8 commits with equal heads of 4 peers",
            limit=2 * SLOW,
        )
        report["rounds"] = {key: found["swarm"][key] for key in ("peers", "commits", "round", "heads_equal")}
        report["rounds_seconds"] = round(time.monotonic() - began, 1)
        say(f"{found['swarm']['commits']} rounds committed with equal heads after {report['rounds_seconds']:.0f} s")
        report["shared_memory"] = _shared_memory(project)
        report["kill"] = _kill(project)
        report["bootstrap_stopped"] = _without_bootstrap(project)
        report["stop"] = _stop(project)
    return report


def _agree(status: Mapping[str, Any], *, peers: int, commits: int) -> bool:
    swarm = status.get("swarm") or {}
    return bool(swarm) and swarm["peers"] == peers and swarm["commits"] >= commits and swarm["heads_equal"]


def _others(status: Mapping[str, Any]) -> set[str]:
    return {member["peer"] for member in status["swarm"]["members"]} - {status["peer"]}


def _commits(status: Mapping[str, Any]) -> int:
    """Of this peer itself."""
    own = [member["commits"] for member in status["swarm"]["members"] if member["peer"] == status["peer"]]
    return int(own[0]) if own else 0


def _shared_memory(project: Project) -> dict[str, Any]:
    """Nodes do not use /dev/shm, so that one of 64 KB is enough (case J3)."""
    rows = {}
    for name in NODES:
        container = project.container(name)
        left = run(["docker", "exec", container, "ls", "-A", "/dev/shm"]).split()
        need(not left, f"{name} has files in /dev/shm: {left}")
        rows[name] = inspect(container)["HostConfig"]["ShmSize"]
    need(rows["node2"] == 65536, f"node2 has {rows['node2']} bytes of /dev/shm, not 64 KB: {rows}")
    return rows


def _kill(project: Project) -> dict[str, Any]:
    """A node is killed, missed, started again, and takes part again as the same peer."""
    before = project.status("node3")
    run(["docker", "kill", project.container("node3")])
    project.await_status(
        "bootstrap", lambda s: s["swarm"]["peers"] == 3, "a killed node is gone from the roster", limit=300
    )
    began, started = time.monotonic(), time.time()
    run(["docker", "start", project.container("node3")])
    after = project.await_status(
        "node3",  # whose status of the earlier life is still there at first
        lambda s: s["time"] > started and s["state"] == "training" and _commits(s) > _commits(before),
        "a restarted node trains, with newer commits",
        limit=SLOW,
    )
    need(after["peer"] == before["peer"], f"after the restart node3 is {after['peer']}, not {before['peer']}")
    project.await_status(
        "bootstrap", lambda s: _agree(s, peers=4, commits=0), "4 peers with equal heads again", limit=SLOW
    )
    seconds = round(time.monotonic() - began, 1)
    say(f"node3 was killed, and trains again {seconds:.0f} s after it was started")
    return {"rejoined_seconds": seconds, "commits_before": _commits(before), "commits_after": _commits(after)}


def _without_bootstrap(project: Project) -> dict[str, Any]:
    """The bootstrap peer ends; rounds go on, and each node knows the three others."""
    seconds, code = stop(project.container("bootstrap"), grace=int(30 * PATIENCE))
    need(code == 0, f"the bootstrap peer ended with {code}")
    before = {name: _commits(project.status(name)) for name in NODES}
    after, peers = {}, set()
    for name in NODES:
        found = project.await_status(
            name,
            lambda s, least=before[name] + 2: _commits(s) >= least and len(_others(s)) == 3,
            "two more rounds without the bootstrap peer, three others known",
            limit=SLOW,
        )
        after[name] = _commits(found)
        peers.add(frozenset({found["peer"], *_others(found)}))
    need(len(peers) == 1, f"the nodes know different peers: {peers}")
    say(f"the bootstrap peer ended in {seconds} s; rounds go on, each node knows the three others")
    return {"bootstrap_stop_seconds": seconds, "commits_before": before, "commits_after": after, "known_peers": 3}


def _stop(project: Project) -> dict[str, Any]:
    """`docker stop` of a node that trains."""
    seconds, code = stop(project.container("node4"), grace=int(120 * PATIENCE))
    need(code == 0, f"node4 ended with {code} after `docker stop`")
    need(seconds < 10 * PATIENCE, f"node4 took {seconds} s to end after `docker stop`")
    say(f"`docker stop` of a node took {seconds} s")
    return {"seconds": seconds, "exit_code": code}


def two_projects(variables: Mapping[str, str]) -> dict[str, Any]:
    """Two compose projects in two networks, joined by published ports that differ from the inner ones (case R1)."""
    address = run(
        ["docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"]
    ).split()[-1]
    first = Project(
        f"stretto-first-{os.getpid()}",
        ["compose.yaml", "compose.public.yaml", QUICK],
        {**variables, "PUBLIC_IP": address, "BOOTSTRAP_PORT": "14001", "NODE1_PORT": "14011", "START_PEERS": "2"},
    )
    with _up(first, "bootstrap", "node1"):
        invite = first.compose("exec", "-T", "bootstrap", "cat", "/invite/invite").split()[-1]
        second = Project(
            f"stretto-second-{os.getpid()}",
            ["volunteer.yaml"],
            {**variables, "INVITE": invite, "ANNOUNCE": f"/ip4/{address}/tcp/24001", "PORT": "24001", "THREADS": "1"},
        )
        with _up(second):
            seen = {}
            for name, project, service in (("first", first, "node1"), ("second", second, "node")):
                found = project.await_status(
                    service,
                    lambda s: s["state"] == "training" and _agree(s, peers=2, commits=2),
                    "two peers with two commits and equal heads",
                    limit=SLOW,
                )
                seen[name] = {member["peer"]: member["addresses"] for member in found["swarm"]["members"]}
            told = sorted(address for addresses in seen["first"].values() for address in addresses)
            need(seen["first"] == seen["second"], f"the two see different swarms: {seen}")
            ports = sorted(text.split("/")[4] for text in told)
            need(ports == ["14011", "24001"], f"others are told {told}")
            need(all(text.split("/")[2] == address for text in told), f"others are told {told}")
            networks = {
                name: sorted(inspect(project.container(service))["NetworkSettings"]["Networks"])
                for name, project, service in (("first", first, "node1"), ("second", second, "node"))
            }
            need(networks["first"] != networks["second"], f"both projects are in {networks}")
            logs = second.logs()
            need("which only containers of the same network" not in logs, "a node with --announce is warned")
    say("two projects in two networks are one swarm")
    return {"announced": told, "networks": networks}


def chaos(variables: Mapping[str, str]) -> dict[str, Any]:
    """The chaos overlay holds a node's CPU, memory and uplink, and rounds commit all the same."""
    project = Project(
        f"stretto-chaos-{os.getpid()}",
        ["compose.yaml", "compose.chaos.yaml", QUICK],
        {**variables, "START_PEERS": "2", "UPLINK": "2mbit", "MEMORY": "1500m"},
    )
    with _up(project, "bootstrap", "node1", "node2", "line1", "line2"):
        project.await_status(
            "node1", lambda s: _agree(s, peers=2, commits=2), "two commits over slow lines", limit=2 * SLOW
        )
        limits = inspect(project.container("node1"))["HostConfig"]
        need(limits["NanoCpus"] == 500_000_000, f"node1 has {limits['NanoCpus']} billionths of a CPU")
        need(limits["Memory"] == 1500 << 20, f"node1 has {limits['Memory']} bytes of memory")
        told = run(["docker", "exec", project.container("line1"), "tc", "-s", "qdisc", "show", "dev", "eth0"])
        need("qdisc tbf" in told and "rate 2Mbit" in told, f"node1's line is not slow: {told}")
    say("rounds commit over lines of 2 Mbit/s")
    return {"tc": " ".join(told.split())}


SCENES: Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "swarm": swarm,
    "two_projects": two_projects,
    "chaos": chaos,
}
