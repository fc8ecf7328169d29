"""A line with limits: a monthly cap that is soon used up, and few connections among many peers."""

import asyncio
import datetime
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from stretto.node.swarm import crowd
from stretto.node.swarm.budget import DAY, month_of
from stretto.node.swarm.host import Host, HostConfig
from stretto.node.swarm.identity import load_or_create
from stretto.node.swarm.records import SignedRecords
from stretto.node.swarm.sockets import SocketMeter
from stretto.node.swarm.streams import BROKEN, Reader, Writer, open_stream, serve
from tests.integration.processes import Lab, Process, micro_run, no_traceback, until

CAP = 20_000_000
"""Bytes per month; a day's worth of it is some rounds of the micro run."""

LIMIT_OF_FEW, STUBS = 8, 12


def mid_month() -> float:
    """Seconds by which a clock is wrong that shows the middle of the present month: a day's worth is small then."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return (now.replace(day=15, hour=12, minute=0) - now).total_seconds()


def used(node: Process) -> int:
    """What the node says it has sent and received."""
    event = node.events("traffic")[-1]
    return int(event["month_up"] + event["month_down"])


@pytest.mark.slow
def test_a_node_pauses_when_its_monthly_cap_says_so(lab: Lab) -> None:
    _, invite = lab.bootstrap(lab.write_run(micro_run(lab.corpus, inner_steps=60, window=5.0)))
    capped_flags = ("--monthly-cap", f"{CAP // 10**6}MB", "--seconds-per-status", "2")
    free = [lab.join(invite, "a", "--new-run", "--start-peers", "3"), lab.join(invite, "b")]
    ahead = mid_month()
    capped = lab.join(invite, "capped", *capped_flags, variables=lab.wrong_clock(ahead))
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
    assert {event["members"] for event in latest} <= {1, 2}  # alone: where the other one came late

    reading = meter.look()
    assert reading is not None
    # A day's worth of a cap that is spread over what is left of the month, and what was under way or seen too late:
    # some rounds of a run with one every few seconds.
    then = time.time() + ahead
    day = CAP * DAY / (month_of(then)[2] - then)
    assert reading.up + reading.down < 1.1 * day + 5 * entry["round_bytes"]
    assert used(capped) <= reading.up + reading.down + 50_000  # what it counts is what the kernel says
    for node in (*free, capped):
        node.signal(signal.SIGTERM)
    for node in (*free, capped):
        assert node.exit_code(limit=20) == 0
        no_traceback(node)


def test_a_host_keeps_few_connections_among_many_peers(session_temp: Path) -> None:
    counts, answers, broken = asyncio.run(amid_a_crowd(Path(tempfile.mkdtemp(dir=session_temp))))
    assert counts[0] > LIMIT_OF_FEW, "the stubs were no crowd"
    late = counts[len(counts) // 3 :]
    assert max(late) <= 1.1 * LIMIT_OF_FEW, counts
    # The stream that was in use all the time was never cut, and who was let go can be spoken to again.
    assert broken == 0
    assert answers > 10


async def amid_a_crowd(folder: Path) -> tuple[list[int], int, int]:
    """Real daemons that all connect to one with a limit, again and again.

    Its connections as the kernel counts them, the answers on a stream that it uses all the time, and how often that
    stream broke.
    """
    hosts: list[Host] = []
    used: dict[bytes, float] = {}
    answers, broken = 0, 0

    async def echo(_: bytes, reader: Reader, writer: Writer) -> None:
        while True:
            writer.write(await reader.readexactly(4))
            await writer.drain()

    async def ask(peer: bytes) -> None:
        async with open_stream(hosts[0].p2p, peer, "/echo") as (reader, writer):
            writer.write(b"ping")
            assert await asyncio.wait_for(reader.readexactly(4), 20) == b"ping"

    async def talk(partner: bytes) -> None:
        nonlocal answers, broken
        while True:
            try:
                async with open_stream(hosts[0].p2p, partner, "/echo") as (reader, writer):
                    while True:
                        writer.write(b"ping")
                        await asyncio.wait_for(reader.readexactly(4), 20)
                        used[partner], answers = time.monotonic(), answers + 1
                        await asyncio.sleep(0.5)
            except BROKEN:
                broken += 1

    async def thin_out() -> None:
        while True:
            await asyncio.sleep(crowd.EVERY)
            await hosts[0].thin_out(used, ())

    try:
        for index in range(1 + STUBS):
            identity = load_or_create(folder / f"{index}.key")
            config = HostConfig(
                host="127.0.0.1",
                port=0,
                announce=(),
                socket_dir=folder / str(index),
                max_connections=0 if index else LIMIT_OF_FEW,
            )
            hosts.append(await Host.start(identity, config, SignedRecords(identity, ["none"])))
            await serve(hosts[-1].p2p, "/echo", echo)
        few, stubs = hosts[0], hosts[1:]
        few.known = {stub.identity.peer_id_bytes: stub.addresses for stub in stubs}
        me, meter = few.identity.peer_id_bytes, SocketMeter(few.daemon)
        await asyncio.gather(*(stub.connect(me, few.addresses) for stub in stubs))
        tasks = [asyncio.create_task(talk(stubs[0].identity.peer_id_bytes)), asyncio.create_task(thin_out())]
        counts: list[int] = []
        for sample in range(75):
            reading = meter.look()
            assert reading is not None
            counts.append(reading.connections)
            if sample % 5 == 4:
                tasks.append(asyncio.create_task(_connect(stubs[sample // 5 % STUBS], me, few)))  # one a second
            await asyncio.sleep(0.2)
        gone = next(stub.identity.peer_id_bytes for stub in stubs if stub.identity.peer_id_bytes not in few.linked)
        await ask(gone)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await asyncio.gather(*(host.close() for host in hosts))
        shutil.rmtree(folder)
    return counts, answers, broken


async def _connect(stub: Host, peer: bytes, host: Host) -> None:
    """A coroutine without a result, as the list of tasks wants it."""
    await stub.connect(peer, host.addresses)
