"""Repair from several donors: by replay where that is cheaper, else by download, whatever the donors do."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.node.swarm import donor as donor_module
from stretto.node.swarm import repair as repair_module
from stretto.node.swarm.identity import format_peer_id
from stretto.protocol import messages as m
from stretto.protocol import snapshot
from stretto.protocol.repair import DOWNLOAD_TURNS
from stretto.protocol.simulation import peer_id
from stretto.protocol.snapshot import Snapshot
from tests.node.repair_scene import CHUNKS, NUMEL, Joiner, Net, Place, history, play


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4000)


def dies_after(net: Net, place: Place, chunks: int) -> None:
    """The donor vanishes when it is asked for another chunk after so many."""

    async def hook(request: Any) -> None:
        if len(place.donor.chunks()) > chunks:
            place.reachable = False
            raise ConnectionResetError

    place.donor.hook = hook


async def silent(_: Any) -> None:
    await asyncio.sleep(3600)


async def slow(_: Any) -> None:
    await asyncio.sleep(0.05)


# ---------------------------------------------------------------------- replay


def test_a_few_missed_versions_are_replayed_with_fewer_bytes_than_the_state(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(6)
        donors = [net.add(index, commits) for index in (1, 2)]
        joiner = Joiner(net)
        done = await joiner.repair()
        assert (done["state"], done["versions"], done["downloaded_bytes"]) == ("done", 6, 0)
        assert done["replayed_bytes"] == sum(len(data) for _, payloads in commits for data in payloads.values())
        assert done["replayed_bytes"] == joiner.traffic.state_down < done["state_bytes"] / 2
        assert done["version"] == 6
        assert done["why"].startswith("version 0 to 6, 6 version(s) replayed from 0.02 MB, in ")
        assert joiner.has_the_bits_of(donors[0])
        # and it can serve them to others
        joiner.log.flush(30)
        assert joiner.log.kept(0) == [1, 2, 3, 4, 5, 6]

    play(tmp_path, scene)


def test_many_missed_versions_are_downloaded_as_a_state(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        donors = [net.add(index, history(20)) for index in (1, 2, 3)]
        joiner = Joiner(net)
        done = await joiner.repair()
        assert (done["versions"], done["downloaded_bytes"]) == (0, 8 * NUMEL)
        assert joiner.has_the_bits_of(donors[0])
        asked = [place.donor.chunks() for place in donors]
        assert sorted(index for some in asked for index in some) == list(range(CHUNKS))
        assert sum(bool(some) for some in asked) >= 2

    play(tmp_path, scene)


def test_the_own_log_is_replayed_first_without_a_byte_from_others(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(30)
        place = net.add(1, commits)
        before = Joiner(net)
        for signed, payloads in commits[:28]:
            before.log.append(0, signed, payloads)
        before.log.close()
        restarted = Joiner(net)
        done = await restarted.repair()
        assert (done["own_versions"], done["versions"], done["downloaded_bytes"]) == (28, 2, 0)
        assert restarted.traffic.state_down == done["replayed_bytes"] < 0.2 * done["state_bytes"]
        assert restarted.has_the_bits_of(place)

    play(tmp_path, scene)


def test_an_own_log_of_another_chain_is_left(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(20, tokens=1000))
        before = Joiner(net)
        for signed, payloads in history(3, seed=50):
            before.log.append(0, signed, payloads)
        before.log.close()
        restarted = Joiner(net)
        done = await restarted.repair()
        assert (done["own_versions"], done["downloaded_bytes"]) == (3, 8 * NUMEL)
        assert restarted.has_the_bits_of(place)

    play(tmp_path, scene)


def test_bytes_of_missed_versions_come_from_whoever_has_them(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(6)
        place, gone = net.add(1, commits), net.add(2, commits)

        async def hook(request: Any) -> None:
            if isinstance(request, m.FetchLogged):
                gone.reachable = False
                raise ConnectionResetError

        gone.donor.hook = hook
        joiner = Joiner(net)
        done = await joiner.repair(gone.peer.me)
        assert (done["state"], done["versions"]) == ("done", 6)
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_a_log_that_does_not_reach_back_means_download(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(3), logged=False)
        joiner = Joiner(net)
        done = await joiner.repair()
        assert (done["versions"], done["downloaded_bytes"]) == (0, 8 * NUMEL)
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_false_bytes_behind_a_commit_are_a_fault_and_another_donor_helps(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(3)
        liar, honest = net.add(1, commits), net.add(2, commits)
        (size,) = {len(data) for data in commits[0][1].values()}
        liar.log.payload = lambda fragment, version, wanted: bytes(size)  # type: ignore[method-assign]
        joiner = Joiner(net)
        done = await joiner.repair(liar.peer.me)
        assert (done["state"], done["versions"]) == ("done", 3)
        assert joiner.has_the_bits_of(honest)
        faults = joiner.of("fault")
        assert [fault["peer"] for fault in faults] == [format_peer_id(liar.peer.me)]

    play(tmp_path, scene)


# ---------------------------------------------------------------------- download


def test_one_dies_at_half_one_is_silent_and_the_third_completes(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(20)
        dies, stopped, healthy = (net.add(index, commits) for index in (1, 2, 3))
        dies_after(net, dies, 8)

        async def stops(request: Any) -> None:
            if isinstance(request, m.FetchChunk):
                await silent(request)

        stopped.donor.hook, healthy.donor.hook = stops, slow
        joiner = Joiner(net)
        done = await joiner.repair()
        assert done["state"] == "done"
        assert joiner.has_the_bits_of(healthy)
        given = dies.donor.chunks()[:8] + healthy.donor.chunks()
        # nothing that was here is fetched again; a piece of the slow end may come twice
        assert sorted(set(given)) == list(range(CHUNKS))
        assert len(given) <= CHUNKS + 1

    assert play(tmp_path, scene) < 15


def test_when_all_are_bad_it_backs_off_and_goes_on_later_with_what_is_here(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(20)
        place = net.add(1, commits)
        dies_after(net, place, 10)
        joiner = Joiner(net)
        start = joiner.peer.diloco.fragments[0].anchor.tobytes()
        failed = await joiner.repair()
        assert failed["state"] == "failed"
        assert "none of 1 peer(s) could give it (connection refused); 0.04/0.06 MB are here" in failed["why"]
        assert "next attempt in 2 s at the earliest" in failed["why"]
        assert joiner.peer.diloco.fragments[0].anchor.tobytes() == start
        opened, said = len(net.opened), len(joiner.events)
        await joiner.repair()  # within the pause: nothing happens, and nothing is said
        assert (len(net.opened), len(joiner.events)) == (opened, said)
        joiner.forgive()
        again = await joiner.repair()
        assert "none of 1 peer(s) that are further could be used (connection refused)" in again["why"]
        place.reachable, place.donor.hook = True, None
        place.donor.asked.clear()
        joiner.forgive()
        assert (await joiner.repair())["state"] == "done"
        assert place.donor.chunks() == list(range(10, CHUNKS))
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_a_false_manifest_marks_its_donor_and_another_one_is_asked(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(20)
        liar, honest = net.add(1, commits), net.add(2, commits)
        state = liar.peer.diloco.fragments[0]
        assert state.record is not None
        false = Snapshot(state.anchor + np.float32(1), state.momentum, state.tip, state.record)
        liar.donor._present = lambda fragment: false  # type: ignore[method-assign]
        honest.reachable = False
        joiner = Joiner(net)
        failed = await joiner.repair()
        assert failed["state"] == "failed"
        assert "downloaded state does not match its record" in failed["why"]
        (fault,) = joiner.of("fault")
        assert fault["peer"] == format_peer_id(liar.peer.me)
        assert "does not match its record" in fault["what"]
        honest.reachable = True
        joiner.forgive()
        asked = len(liar.donor.asked)
        assert (await joiner.repair())["state"] == "done"
        assert len(liar.donor.asked) == asked  # not asked again
        assert joiner.has_the_bits_of(honest)

    play(tmp_path, scene)


def test_of_two_manifests_for_one_head_the_one_with_more_donors_is_tried_first(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(20)
        liar, *honest = (net.add(index, commits) for index in (1, 2, 3))
        state = liar.peer.diloco.fragments[0]
        assert state.record is not None
        false = Snapshot(state.anchor + np.float32(1), state.momentum, state.tip, state.record)
        liar.donor._present = lambda fragment: false  # type: ignore[method-assign]
        joiner = Joiner(net)
        assert (await joiner.repair(liar.peer.me))["state"] == "done"
        assert liar.donor.chunks() == []
        assert joiner.has_the_bits_of(honest[0])

    play(tmp_path, scene)


def test_one_false_chunk_marks_its_donor_and_the_others_go_on(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(20)
        liar, honest = net.add(1, commits), net.add(2, commits)
        send = liar.donor._send

        async def lie(data: bytes, digest: bytes, to: Any) -> None:
            await send(bytes(len(data)), digest, to)

        liar.donor._send = lie  # type: ignore[method-assign]
        joiner = Joiner(net)
        assert (await joiner.repair())["state"] == "done"
        assert len(liar.donor.chunks()) == 1
        assert joiner.has_the_bits_of(honest)
        (fault,) = joiner.of("fault")
        assert fault["peer"] == format_peer_id(liar.peer.me)
        assert "does not match its digest" in fault["what"]

    play(tmp_path, scene)


def test_a_donor_serves_few_peers_at_a_time_and_says_so_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(20), uploads=2)
        place.donor._served = {peer_id(50): place.donor._now(), peer_id(51): place.donor._now()}
        joiner = Joiner(net)
        failed = await joiner.repair()
        assert "1 peer(s) have the state and are busy with others" in failed["why"]
        place.donor._served.popitem()
        joiner.forgive()
        assert (await joiner.repair())["state"] == "done"

    play(tmp_path, scene)


def test_progress_is_said_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_module, "SAY_EVERY", 0.2)

    async def scene(net: Net) -> None:
        net.add(1, history(20)).donor.hook = slow
        joiner = Joiner(net)
        await joiner.repair()
        said = [event for event in joiner.of("repair") if event["state"] == "progress"]
        assert said
        assert said[0]["why"] == f"{said[0]['bytes'] / 1e6:.2f}/0.06 MB of state from 1 peer(s)"
        assert [event["bytes"] for event in said] == sorted(event["bytes"] for event in said)
        assert said[0]["of_bytes"] == 8 * NUMEL

    play(tmp_path, scene)


# ---------------------------------------------------------------------- a swarm that moves on


def test_a_state_is_served_while_its_fragment_moves_on_and_the_rest_is_replayed(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(26)
        place = net.add(1, commits[:20])

        async def moves(request: Any) -> None:
            if isinstance(request, m.FetchChunk) and request.index in (3, 7, 11):
                done = place.peer.tips()[0].version
                place.move(commits[done : done + 2])

        place.donor.hook = moves
        joiner = Joiner(net)
        done = await joiner.repair()
        assert (done["state"], done["downloaded_bytes"], done["versions"]) == ("done", 8 * NUMEL, 6)
        assert place.donor.chunks() == list(range(CHUNKS))
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_at_most_one_older_state_is_kept_and_only_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(net: Net) -> None:
        commits = history(8)
        place = net.add(1, commits[:4], logged=False)
        now = 0.0
        donor = place.donor
        donor._now = lambda: now
        heads = []
        for version in range(4, 8):
            heads.append(place.peer.tips()[0].head)
            offer = await donor._offer(0, donor._present(0))  # type: ignore[arg-type]
            assert offer.snapshot.tip.head == heads[-1]  # without a log nobody could go on from an older one
            donor._use(offer, 0)
            now += 1.0
            place.move(commits[version : version + 1])
        donor._forget_unused(0)
        assert [offer.snapshot.tip.head for offer in donor._offers[0]] == [heads[-1]]
        now += donor_module.KEEP
        donor._forget_unused(0)
        assert donor._offers == {}

    play(tmp_path, scene)


def test_newcomers_are_given_the_older_state_while_it_is_in_use(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(22)
        place = net.add(1, commits[:20])
        first = await place.donor._offer(0, place.donor._present(0))  # type: ignore[arg-type]
        place.move(commits[20:])
        again = await place.donor._offer(0, place.donor._present(0))  # type: ignore[arg-type]
        assert again is first
        joiner = Joiner(net)
        done = await joiner.repair()
        assert (done["version"], done["versions"], done["downloaded_bytes"]) == (22, 2, 8 * NUMEL)
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_no_second_download_within_a_few_turns_of_the_fragment(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        commits = history(24)
        place = net.add(1, commits[:20], logged=False)
        joiner = Joiner(net)
        assert (await joiner.repair())["state"] == "done"
        place.move(commits[20:22])
        failed = await joiner.repair()
        assert failed["state"] == "failed"
        assert "this fragment was downloaded whole a moment ago and may be again in" in failed["why"]
        assert "the log here does not reach back to this commit" in failed["why"]
        assert joiner.traffic.state_down == 8 * NUMEL
        clock = joiner.peer.clock
        assert clock is not None
        joiner.repairer._ledger._downloaded[0] -= DOWNLOAD_TURNS * clock.interval
        joiner.forgive()
        assert (await joiner.repair())["downloaded_bytes"] == 8 * NUMEL
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


def test_a_worse_chain_never_replaces_a_better_one(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(20, seed=7, tokens=10))  # longer, with fewer tokens
        place.said = (99, 10**9)
        joiner = Joiner(net)
        better = history(3, tokens=1000)
        mine = Place(joiner.peer, joiner.log, place.donor)
        mine.move(better)
        tip = joiner.peer.tips()[0]
        assert (await joiner.repair())["state"] == "not needed"
        assert joiner.peer.tips()[0] == tip
        # and who claimed more than it has is not asked again for that
        assert joiner.peer.hear(place.peer.me, None, [(0, 10**9, 99)]) == []

    play(tmp_path, scene)


def test_a_better_branch_replaces_the_own_one(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(3, seed=7, tokens=1000))
        joiner = Joiner(net)
        Place(joiner.peer, joiner.log, place.donor).move(history(5, tokens=10))
        done = await joiner.repair()
        assert (done["version"], done["downloaded_bytes"]) == (3, 8 * NUMEL)
        assert joiner.has_the_bits_of(place)
        joiner.log.flush(30)
        assert joiner.log.kept(0) == []

    play(tmp_path, scene)


def test_who_has_nothing_to_give_is_not_a_donor(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, [])
        place.said = (5, 500)
        joiner = Joiner(net)
        last = await joiner.repair()
        assert last["state"] in ("failed", "not needed")
        assert joiner.peer.tips()[0].version == 0

    play(tmp_path, scene)


def test_a_contribution_counted_in_a_missed_round_is_merged(tmp_path: Path) -> None:
    """The peer left one contribution, lost touch, and two commits later learns that the first counted it."""

    async def scene(net: Net) -> None:
        commits = history(2)
        place = net.add(1, commits)
        joiner = Joiner(net)
        record = commits[0][0].record
        joiner.peer.me = record.members[0].peer
        joiner.peer.diloco.trained(250)
        joiner.peer.diloco.fragments[0].attempts[record.members[0].payload] = 100
        assert (await joiner.repair())["versions"] == 2
        state = joiner.peer.diloco.fragments[0]
        assert state.tokens == 150
        assert state.merge_with is not None
        assert state.shift is None or state.shift.shape == (NUMEL,)
        assert joiner.has_the_bits_of(place)

    play(tmp_path, scene)


# ---------------------------------------------------------------------- limits


@dataclasses.dataclass
class _Case:
    timeout: float | None
    least: float
    most: float


@pytest.mark.parametrize("case", [_Case(0, 0.0, 1.0), _Case(1.0, 1.0, 3.0), _Case(5.0, 5.0, 6.5)], ids=str)
def test_a_timeout_is_what_the_caller_says(case: _Case, tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        net.add(1, history(3)).donor.hook = silent
        failed = await Joiner(net, timeout=case.timeout).repair()
        assert f"no byte for {case.timeout:g} s" in failed["why"]

    assert case.least <= play(tmp_path, scene) < case.most


def test_without_a_timeout_the_documented_default_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.node.swarm import download

    assert download.silence_limit(None) == download.SILENCE == 15.0
    monkeypatch.setattr(download, "SILENCE", 1.5)

    async def scene(net: Net) -> None:
        net.add(1, history(3)).donor.hook = silent
        failed = await Joiner(net, timeout=None).repair()
        assert "no byte for 1.5 s" in failed["why"]

    assert 1.5 <= play(tmp_path, scene) < 3.5


def test_a_slow_line_is_not_a_silent_one(tmp_path: Path) -> None:
    async def scene(net: Net) -> None:
        place = net.add(1, history(20))

        async def drip(request: Any) -> None:
            await asyncio.sleep(0.3)

        place.donor.hook = drip
        joiner = Joiner(net, timeout=1.0)
        assert (await joiner.repair())["state"] == "done"  # longer than the limit, with a byte now and then

    assert play(tmp_path, scene) > 3.0
