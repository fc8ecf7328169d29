"""A line with limits: a monthly cap that is soon used up, and few connections among many peers."""

import asyncio
import datetime
import shutil
import signal
import tempfile
from pathlib import Path

from hivemind.p2p import PeerID

from stretto.node.swarm.host import Host, HostConfig
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.records import SignedRecords
from stretto.node.swarm.sockets import SocketMeter
from tests.integration.processes import Lab, Process, micro_run, no_traceback, until

CAP = 20_000_000
"""Bytes per month; a thirtieth of it is some rounds of the micro run."""

LIMIT_OF_FEW, STUBS = 8, 12


def mid_month() -> float:
    """Seconds by which a clock is wrong that shows the middle of the present month: a day's worth is small then."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return (now.replace(day=15, hour=12, minute=0) - now).total_seconds()


def used(node: Process) -> int:
    """What the node says it has sent and received."""
    event = node.events("traffic")[-1]
    return int(event["month_up"] + event["month_down"])


def test_a_node_pauses_when_its_monthly_cap_says_so(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=60, window=5.0)))
    capped_flags = ("--monthly-cap", f"{CAP // 10**6}MB", "--seconds-per-status", "2")
    free = [lab.join(invite, "a", "--new-run", "--start-peers", "3"), lab.join(invite, "b")]
    capped = lab.join(invite, "capped", *capped_flags, variables=lab.wrong_clock(mid_month()))
    capped.see("training: step")
    meter = SocketMeter(capped.daemon())
    capped.see(r"paused by the monthly cap: .* of 20\.00 MB used this month .* a round costs about .* left, .* until")
    capped.see(r"training: step .* used this month; paused by the monthly cap", count=2, limit=30)
    assert any(event["outcome"] == "committed" and event["counted"] for event in capped.events("round"))
    entry = capped.events("traffic")[-1]
    assert entry["paused"]
    assert entry["monthly_cap"] == CAP

    # Training goes on, and so do the others' rounds, without waiting for the one that pauses.
    steps = len(capped.events("step"))
    for node in free:
        node.commits(max(node.committed()) + 4)
    until(lambda: len(capped.events("step")) > steps + 10, "steps of the node that pauses", logs=capped.tail)
    latest = [event for event in free[0].events("round") if event["outcome"] == "committed"][-2:]
    assert [event["members"] for event in latest] == [2, 2]

    reading = meter.look()
    assert reading is not None
    day = CAP / 28
    assert reading.up + reading.down < 1.1 * day + 2 * entry["round_bytes"]
    assert used(capped) <= reading.up + reading.down + 50_000  # what it counts is what the kernel says
    for node in (*free, capped):
        node.signal(signal.SIGTERM)
    for node in (*free, capped):
        assert node.exit_code(limit=20) == 0
        no_traceback(node)


def test_a_node_keeps_few_connections_among_many_peers(lab: Lab, tmp_path: Path) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=60, window=5.0)))
    few = lab.join(invite, "few", "--max-connections", str(LIMIT_OF_FEW), "--new-run", "--start-peers", "2")
    other = lab.join(invite, "other")
    few.commits(-1)
    address = few.see(r"listening at /ip4/\S+/p2p/\w+")[0].removeprefix("listening at ")
    counts = asyncio.run(crowd_around(address, few, lab.temp))
    assert max(counts[:10]) > LIMIT_OF_FEW, "the stubs were no crowd"
    late = sorted(counts[len(counts) // 3 :])
    assert late[int(0.95 * len(late))] <= 1.1 * LIMIT_OF_FEW, counts
    # The one that it trains with stayed, or was dialled again.
    before = max(few.committed())
    few.commits(before + 2)
    latest = [event for event in other.events("round") if event["outcome"] == "committed"][-2:]
    assert [event["members"] for event in latest] == [2, 2]
    for node in (few, other):
        node.signal(signal.SIGTERM)
    for node in (few, other):
        assert node.exit_code(limit=20) == 0
        no_traceback(node)


async def crowd_around(address: str, node: Process, temp: Path) -> list[int]:
    """Stubs that connect to ``node`` all at once, and again when they were let go; its connections meanwhile."""
    meter, hosts, counts = SocketMeter(node.daemon()), [], []
    folder = Path(tempfile.mkdtemp(dir=temp))
    try:
        for index in range(STUBS):
            place = folder / str(index)
            place.mkdir()
            identity = load_or_create(place / "key")
            config = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=place / "s")
            hosts.append(await Host.start(identity, config, SignedRecords(identity, ["none"])))
        peer = PeerID.from_base58(address.rsplit("/p2p/", 1)[1]).to_bytes()
        await asyncio.gather(*(host.connect(peer, [address]) for host in hosts))
        for sample in range(90):
            reading = meter.look()
            assert reading is not None
            counts.append(reading.connections)
            if sample % 5 == 4:
                await hosts[sample // 5 % STUBS].connect(peer, [address])  # one a second
            await asyncio.sleep(0.2)
    finally:
        await asyncio.gather(*(host.close() for host in hosts))
        shutil.rmtree(folder)
    return counts
