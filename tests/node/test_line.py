"""The line in virtual time: short queues, fair turns, caps, time-outs, and nothing left behind by those who end."""

import asyncio
import struct
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from stretto.node.swarm.line import DEFAULT_UPLINK, Line, Meter, Upload
from stretto.node.swarm.streams import (
    BROKEN,
    CHUNK_TIMEOUT,
    read_bytes,
    read_message,
    write_bytes,
    write_message,
)
from stretto.node.swarm.window import LEAST_CHUNK, MOST_CHUNK, START
from stretto.protocol import messages as m
from stretto.protocol.errors import RemoteProtocolError
from tests.virtual import Wire, run, stream

MBIT = 125_000.0
A, B = b"a", b"b"


def now() -> float:
    return asyncio.get_running_loop().time()


def line(up: float = 0.0, down: float = 0.0) -> Line:
    return Line(max_upload=up, max_download=down, clock=asyncio.get_running_loop().time)


async def carry(
    sender: Line, receiver: Line, out: Wire, back: Wire, nbytes: int, to: bytes = A, *, patient: bool = False
) -> float:
    """One transfer; returns its seconds."""
    (reader, writer), (there, answers) = stream(out, back)
    payload = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    began = now()
    _, got = await asyncio.gather(
        write_bytes(reader, writer, memoryview(payload), sender.to(to, patient=patient)),
        read_bytes(there, answers, nbytes, receiver.to(b"sender")),
    )
    assert got == payload
    return now() - began


async def deepest(wire: Wire, work: Coroutine[Any, Any, Any], *, after: float = 2.0) -> tuple[float, list[float]]:
    """Runs ``work``; the queue of ``wire`` in seconds every 10 ms meanwhile, from ``after`` seconds on; its length."""
    queues, began = [], now()
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=0.01)
        if now() - began > after:
            queues.append(wire.queue)
    task.result()
    return now() - began, queues


@pytest.mark.parametrize("rate", [MBIT, 4 * MBIT, 20 * MBIT])
@pytest.mark.parametrize("streams", [1, 8])
def test_queues_stay_short_and_the_line_busy(rate: float, streams: int) -> None:
    async def scene() -> None:
        out, back = Wire(rate, 0.02), Wire(rate, 0.02)
        here, there = line(), line()
        nbytes = int(20 * rate) // streams
        work = asyncio.gather(*(carry(here, there, out, back, nbytes) for _ in range(streams)))
        seconds, queues = await deepest(out, work)  # type: ignore[arg-type]
        assert sorted(queues)[len(queues) // 2] < 0.4
        assert max(queues) < 0.6
        assert seconds < 20 / 0.93

    run(scene())


def test_several_receivers_share_a_slow_uplink_and_its_queue_stays_short() -> None:
    async def scene() -> None:
        out, back = Wire(MBIT, 0.03), Wire(20 * MBIT, 0.03)
        here = line()
        work = asyncio.gather(*(carry(here, line(), out, back, 400_000, bytes([n])) for n in range(6)))
        seconds, queues = await deepest(out, work)  # type: ignore[arg-type]
        assert max(queues) < 0.65
        assert sorted(queues)[len(queues) // 2] < 0.45
        assert seconds < 2.4e6 / MBIT / 0.93

    run(scene())


def test_both_ways_at_once_both_are_used() -> None:
    async def scene() -> None:
        there_wire, back_wire = Wire(MBIT, 0.02), Wire(MBIT, 0.02)
        one, two = line(), line()
        seconds = await asyncio.gather(
            carry(one, two, there_wire, back_wire, 2_500_000), carry(two, one, back_wire, there_wire, 2_500_000)
        )
        assert max(seconds) < 20 / 0.85

    run(scene())


def test_control_messages_pass_the_bulk_data() -> None:
    async def scene() -> None:
        out, back = Wire(MBIT, 0.02), Wire(MBIT, 0.02)
        here, there = line(), line()
        bulk = asyncio.gather(*(carry(here, there, out, back, 250_000) for _ in range(4)))
        (_, writer), (reader, _) = stream(out, back)
        waits = []
        while not bulk.done():
            began = now()
            await write_message(writer, m.Ask(0, 1), lane=here.to(A))
            assert await read_message(reader, m.Ask, lane=there.to(A)) == m.Ask(0, 1)
            waits.append(now() - began)
            await asyncio.sleep(0.1)
        assert len(waits) > 15
        assert max(waits) < 0.7
        assert here.totals.control_up > 0 < there.totals.control_down

    run(scene())


def test_a_fast_line_with_a_long_way_is_filled() -> None:
    async def scene() -> None:
        out, back = Wire(12.5e6, 0.1), Wire(12.5e6, 0.1)
        here = line()
        first = await carry(here, line(), out, back, 32 << 20)
        assert first < (32 << 20) / 12.5e6 * 1.6
        again = await carry(here, line(), out, back, 32 << 20)
        assert again < (32 << 20) / 12.5e6 * 1.1

    run(scene())


def test_chunks_are_small_on_slow_lines_and_large_on_fast_ones() -> None:
    async def scene(rate: float, nbytes: int) -> int:
        here = line()
        await carry(here, line(), Wire(rate, 0.01), Wire(rate, 0.01), nbytes)
        return here.window.chunk(A)

    assert run(scene(MBIT, 1_000_000)) == LEAST_CHUNK
    assert run(scene(50e6, 20_000_000)) == MOST_CHUNK


def test_a_slow_receiver_does_not_slow_the_others() -> None:
    async def scene() -> None:
        fast, slow, back = Wire(80 * MBIT, 0.02), Wire(MBIT, 0.02), Wire(80 * MBIT, 0.02)
        here = line()
        lagging = asyncio.ensure_future(carry(here, line(), slow, back, 1_000_000, B))
        alone = await carry(line(), line(), fast, back, 8_000_000)
        beside = await carry(here, line(), fast, back, 8_000_000)
        assert not lagging.done()
        assert beside < 1.6 * alone
        assert await lagging < 1_000_000 / MBIT * 1.1

    run(scene())


def test_a_stopped_receiver_does_not_stop_the_others() -> None:
    async def scene() -> None:
        out, dead, back = Wire(8 * MBIT, 0.02), Wire(8 * MBIT, 0.02), Wire(8 * MBIT, 0.02)
        here = line()
        dead.cut = True
        stopped = asyncio.ensure_future(carry(here, line(), dead, back, 1_000_000, B))
        await asyncio.sleep(0)
        assert await carry(here, line(), out, back, 1_000_000) < 6
        with pytest.raises(asyncio.TimeoutError):
            await stopped
        assert here.window.in_flight == 0

    run(scene())


def test_streams_take_turns() -> None:
    async def scene() -> None:
        here, ends = line(), {}
        out, back = Wire(MBIT, 0.02), Wire(MBIT, 0.02)

        async def one(name: int, nbytes: int) -> None:
            await carry(here, line(), out, back, nbytes)
            ends[name] = now()

        # Four of a kind end together, a short one among them does not wait for the long ones.
        await asyncio.gather(*(one(n, 300_000) for n in range(4)), one(9, 30_000))
        assert ends[9] < 2.5
        last = max(ends.values())
        assert all(ends[n] > 0.8 * last for n in range(4))

    run(scene())


def test_rounds_come_before_those_who_download_and_do_not_cut_them_off() -> None:
    async def scene() -> dict[str, float]:
        here, out, back, ends = line(), Wire(10 * MBIT, 0.02), Wire(10 * MBIT, 0.02), {}

        async def one(name: str, nbytes: int, to: bytes, patient: bool) -> None:
            await carry(here, line(), out, back, nbytes, to, patient=patient)
            ends[name] = now()

        async def rounds() -> None:
            await asyncio.sleep(5)
            await asyncio.gather(one("a", 2_500_000, A, False), one("b", 2_500_000, B, False))

        states = (one(f"state {n}", 6_250_000, b"joiner", True) for n in (1, 2))
        await asyncio.gather(rounds(), *states)
        return ends

    ends = run(scene())
    # 5 MB need 4 s of 10 Mbit/s; in fair turns with two others they would take 8 s.
    assert max(ends["a"], ends["b"]) - 5 < 6
    assert 14 < max(ends["state 1"], ends["state 2"]) < 16  # the line was never idle

    async def flood() -> float:
        here, out, back = line(), Wire(MBIT, 0.02), Wire(MBIT, 0.02)
        others = asyncio.gather(*(carry(here, line(), out, back, 2_000_000, bytes([n])) for n in range(4)))
        seconds = await carry(here, line(), out, back, 200_000, b"joiner", patient=True)
        assert not others.done()
        await others
        return seconds

    assert run(flood()) < CHUNK_TIMEOUT


@pytest.mark.parametrize("streams", [1, 5])
def test_the_cap_on_uploads_holds(streams: int) -> None:
    async def scene() -> None:
        out, back = Wire(100 * MBIT, 0.01), Wire(100 * MBIT, 0.01)
        here = line(up=200_000)
        work = (carry(here, line(), out, back, 2_000_000 // streams, bytes([n])) for n in range(streams))
        seconds = max(await asyncio.gather(*work))
        assert 10 / 1.02 < seconds < 10 / 0.95
        assert here.uplink == 200_000

    run(scene())


@pytest.mark.parametrize("senders", [1, 5])
def test_the_cap_on_downloads_holds_with_several_senders(senders: int) -> None:
    async def scene() -> None:
        here = line(down=200_000)
        work = (
            carry(line(), here, Wire(100 * MBIT, 0.01), Wire(100 * MBIT, 0.01), 2_000_000 // senders)
            for _ in range(senders)
        )
        seconds = max(await asyncio.gather(*work))
        assert 10 / 1.03 < seconds < 10 / 0.93
        assert here.totals.bulk_down == 2_000_000

    run(scene())


def test_control_messages_wait_for_no_cap_but_count() -> None:
    async def scene() -> None:
        here, there = line(up=10_000), line(down=10_000)
        out, back = Wire(100 * MBIT, 0.0), Wire(100 * MBIT, 0.0)
        (_, writer), (reader, _) = stream(out, back)
        message = m.Missing("x" * 290)
        began = now()
        for _ in range(60):
            await write_message(writer, message, lane=here.to(A))
            await read_message(reader, lane=there.to(A))
        assert now() - began < 0.1
        assert here.totals.control_up == there.totals.control_down > 60 * 290
        # 18 kB at 10 kB/s: bulk data waits until they are paid for.
        seconds = await carry(here, line(), out, back, 4096)
        assert 1.5 < seconds < 2.5
        began = now()
        assert await there.may_read() == 4096
        assert now() - began < 0.5  # the time that the transfer took has paid for most of it

    run(scene())


def test_totals_count_every_byte() -> None:
    async def scene() -> None:
        out, back = Wire(MBIT, 0.01), Wire(MBIT, 0.01)
        here, there = line(), line()
        await carry(here, there, out, back, 100_001)
        assert here.totals.bulk_up == there.totals.bulk_down == 100_001
        assert here.totals.control_up == there.totals.control_down
        assert here.totals.control_down == there.totals.control_up
        assert out.carried == here.totals.bulk_up + here.totals.control_up
        assert back.carried == there.totals.control_up

    run(scene())


# ---- uplink ----


def test_the_uplink_is_what_was_measured() -> None:
    async def scene() -> None:
        here = line()
        assert here.uplink == DEFAULT_UPLINK
        await carry(here, line(), Wire(4 * MBIT, 0.02), Wire(4 * MBIT, 0.02), 5_000_000)
        assert here.uplink == pytest.approx(4 * MBIT, rel=0.1)
        assert line(up=300_000).uplink == 300_000
        slow = line(up=8 * MBIT)
        await carry(slow, line(), Wire(MBIT, 0.02), Wire(MBIT, 0.02), 1_000_000)
        assert slow.uplink == pytest.approx(MBIT, rel=0.1)

    run(scene())


def test_the_meter_counts_busy_time_only_and_falls_slowly() -> None:
    meter = Meter()
    meter.busy(0.0)
    meter.acknowledged(1_000_000, 1.0, last=True)
    assert meter.rate == 1e6
    meter.busy(500.0)
    meter.acknowledged(2_000_000, 501.0, last=True)
    assert meter.rate == 1.5e6
    meter.busy(600.0)
    meter.acknowledged(500_000, 601.0, last=True)
    assert meter.rate == 1.4e6
    meter.busy(700.0)
    meter.acknowledged(1000, 701.0, last=True)  # too little to say anything
    assert meter.rate == 1.4e6
    meter.busy(800.0)
    meter.acknowledged(3_000_000, 900.0, last=True)  # the peer had stopped, not the line
    assert meter.rate == pytest.approx(1.4e6 + 0.1 * (1e6 - 1.4e6))


# ---- ends ----


def test_a_cancelled_transfer_gives_its_bytes_back_at_once() -> None:
    async def scene() -> None:
        here = line()
        out, back = Wire(MBIT, 0.05), Wire(MBIT, 0.05)
        (reader, writer), _ = stream(out, back)
        first = asyncio.ensure_future(write_bytes(reader, writer, memoryview(bytes(500_000)), here.to(A)))
        waiting = asyncio.ensure_future(carry(here, line(), Wire(MBIT, 0.01), Wire(MBIT, 0.01), 40_000))
        await asyncio.sleep(0.01)
        assert here.window.in_flight == START
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert now() == pytest.approx(0.01)
        await asyncio.sleep(0)
        assert 0 < here.window.in_flight <= 40_000, "who waited has its turn"
        await waiting
        assert here.window.in_flight == 0
        assert not here._waiting

    run(scene())


def test_a_transfer_that_is_cancelled_in_the_queue_leaves_it() -> None:
    async def scene() -> None:
        here = line(up=10_000)
        (reader, writer), _ = stream(Wire(MBIT, 0.05), Wire(MBIT, 0.05))
        works = [
            asyncio.ensure_future(write_bytes(reader, writer, memoryview(bytes(50_000)), here.to(A))) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        assert not here._waiting
        assert here.window.in_flight == 0
        assert len(asyncio.all_tasks()) == 1

    run(scene())


async def _silent_upload(timeout: float | None) -> float:
    (reader, writer), _ = stream(Wire(MBIT, 0.05), Wire(MBIT, 0.05))
    here, began = line(), now()
    with pytest.raises(BROKEN):
        await write_bytes(reader, writer, memoryview(bytes(500_000)), here.to(A), timeout=timeout)
    assert here.window.in_flight == 0
    assert len(asyncio.all_tasks()) == 1
    return now() - began


async def _silent_download(timeout: float | None) -> float:
    (reader, writer), _ = stream(Wire(MBIT, 0.05), Wire(MBIT, 0.05))
    began = now()
    with pytest.raises(BROKEN):
        await read_bytes(reader, writer, 1000, line().to(A), timeout=timeout)
    return now() - began


async def _trickle(timeout: float | None) -> float:
    """A sender that is slow but alive: a chunk of 4 KiB every 10 s."""
    (reader, writer), (_, there) = stream(Wire(MBIT, 0.05), Wire(MBIT, 0.05))

    async def drip() -> None:
        for _ in range(10):
            await asyncio.sleep(10)
            there.write((4096).to_bytes(4, "big") + bytes(4096))

    dripping, began = asyncio.ensure_future(drip()), now()
    try:
        await read_bytes(reader, writer, 40_960, line().to(A), timeout=timeout)
    except asyncio.TimeoutError:
        dripping.cancel()
    return now() - began


def test_time_limits_are_kept_as_documented() -> None:
    for work in (_silent_upload, _silent_download):
        assert run(work(5)) == pytest.approx(5, abs=0.01)
        assert run(work(0)) == 0
        assert run(work(None)) == pytest.approx(CHUNK_TIMEOUT, abs=0.5)
    assert run(_trickle(5)) == pytest.approx(5, abs=0.01)
    assert run(_trickle(55)) == pytest.approx(55, abs=0.01)
    assert run(_trickle(None)) == pytest.approx(100, abs=1)


def test_after_silence_the_next_transfer_begins_carefully() -> None:
    async def scene() -> None:
        here = line()
        await carry(here, line(), Wire(50e6, 0.01), Wire(50e6, 0.01), 20_000_000)
        assert here.window.path(A).size > 1e6
        (reader, writer), _ = stream(Wire(50e6, 0.01), Wire(50e6, 0.01))
        with pytest.raises(asyncio.TimeoutError):
            await write_bytes(reader, writer, memoryview(bytes(500_000)), here.to(A))
        assert here.window.path(A).size == LEAST_CHUNK

    run(scene())


def _answer(*counts: int) -> bytes:
    return b"".join(struct.pack(">QQ", count, 0) for count in counts)


@pytest.mark.parametrize(
    "answer",
    [
        _answer(40_961),
        _answer(2**64 - 1),
        _answer(0),
        _answer(LEAST_CHUNK, LEAST_CHUNK),
        _answer(LEAST_CHUNK + 1),
        _answer(2 * LEAST_CHUNK, LEAST_CHUNK),
        b"\xff" * 16,
        b"garbage, garbage",
    ],
)
def test_acknowledging_what_was_not_sent_breaks_the_rules(answer: bytes) -> None:
    async def scene() -> None:
        (reader, writer), (_, there) = stream(Wire(MBIT, 0.01), Wire(MBIT, 0.01))
        here = line()
        sending = asyncio.ensure_future(write_bytes(reader, writer, memoryview(bytes(40_960)), here.to(A)))
        await asyncio.sleep(1.0)
        there.write(answer)
        with pytest.raises(RemoteProtocolError, match=r"acknowledges \d+ bytes of a transfer"):
            await sending
        assert here.window.in_flight == 0
        assert now() < 2

    run(scene())


def test_one_acknowledgement_may_stand_for_several_chunks() -> None:
    async def scene() -> None:
        (reader, writer), (_, there) = stream(Wire(MBIT, 0.01), Wire(MBIT, 0.01))
        sending = asyncio.ensure_future(write_bytes(reader, writer, memoryview(bytes(40_960)), line().to(A)))
        await asyncio.sleep(1.0)
        there.write(_answer(2 * LEAST_CHUNK, 40_960))
        await sending

    run(scene())


@pytest.mark.parametrize("size", [0, 1, 4095, MOST_CHUNK + 1, 2**32 - 1])
def test_a_chunk_that_cannot_be_breaks_the_rules(size: int) -> None:
    async def scene() -> None:
        (reader, writer), (_, there) = stream(Wire(MBIT, 0.01), Wire(MBIT, 0.01))
        there.write(size.to_bytes(4, "big") + bytes(100))
        with pytest.raises(RemoteProtocolError, match=f"chunk of {size} bytes where 1000000 are due"):
            await read_bytes(reader, writer, 1_000_000, line().to(A))

    run(scene())


@pytest.mark.parametrize(
    ("sent", "count", "filled"), [(b"", 9, 0), (b"\x00\x00", 9, 0), (b"\x00\x00\x00\x09five.", 9, 5)]
)
def test_a_stream_that_ends_early_is_told_with_numbers(sent: bytes, count: int, filled: int) -> None:
    async def scene() -> None:
        (reader, writer), (_, there) = stream(Wire(MBIT, 0.01), Wire(MBIT, 0.01))
        there.write(sent)
        there.close()
        with pytest.raises(EOFError, match=f"stream ended after {filled} of {count} bytes"):
            await read_bytes(reader, writer, count, line().to(A))

    run(scene())


def test_a_receiver_that_goes_ends_the_transfer_at_once() -> None:
    async def scene() -> None:
        here = line()
        (reader, writer), (_, there) = stream(Wire(MBIT, 0.01), Wire(MBIT, 0.01))
        sending = asyncio.ensure_future(write_bytes(reader, writer, memoryview(bytes(400_000)), here.to(A)))
        await asyncio.sleep(1.0)
        there.close()
        with pytest.raises(BROKEN):
            await sending
        assert now() < 1.1
        assert here.window.in_flight == 0

    run(scene())


def test_an_upload_may_be_closed_twice_and_before_it_began() -> None:
    async def scene() -> None:
        here = line()
        upload = Upload(here.to(A), 100_000)
        upload.close()
        assert await upload.turn(1.0) == LEAST_CHUNK
        upload.close()
        upload.close()
        assert here.window.in_flight == 0

    run(scene())


def test_virtual_seconds_cost_nothing() -> None:
    began = time.monotonic()
    run(asyncio.sleep(50_000))
    assert time.monotonic() - began < 5
