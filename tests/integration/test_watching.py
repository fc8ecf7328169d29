"""A swarm seen from outside: ``stretto status``, ``stretto doctor``, and a peer that means harm."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.node.swarm.host import Host, HostConfig
from stretto.node.swarm.identity import load_or_create, parse_peer_id
from stretto.node.swarm.records import SignedRecords, roster_key
from stretto.node.swarm.roster import Roster
from stretto.node.swarm.streams import (
    BROKEN,
    bulk_name,
    control_name,
    open_stream,
    read_message,
    write_message,
)
from stretto.node.swarm.thread import NetworkThread
from stretto.protocol import messages as m
from stretto.protocol.chain import CommitRecord, Member, SignedRecord
from stretto.protocol.invite import Invite
from stretto.protocol.roster import PeerRecord
from stretto.protocol.schedule import Clock, fragment_of
from tests.integration.processes import MARK, Lab, Process, micro_run, no_traceback, until

FRAGMENTS = 2


@pytest.fixture(scope="module")
def swarm(shared_lab: Lab) -> tuple[str, list[Process]]:
    """The invite and two nodes that train together, about one round per second."""
    _, invite = shared_lab.bootstrap(shared_lab.write_run(micro_run(shared_lab.corpus, inner_steps=200)))
    nodes = shared_lab.found(invite, 2)
    for node in nodes:
        node.commits(1)
    return invite, nodes


def peer_id(node: Process) -> str:
    """A node's peer id, as it told."""
    (line,) = node.see(r"peer 12D3KooW\w+, data in")
    return line.split()[1].rstrip(",")


def test_status_lists_the_peers(shared_lab: Lab, swarm: tuple[str, list[Process]]) -> None:
    invite, nodes = swarm
    status = shared_lab.run("status", invite, "--json")
    assert status.popen.returncode == 0, status.tail()
    found = json.loads(status.text)
    assert found["run"] == Invite.parse(invite).run.hex()
    assert found["name"] == "micro"
    assert found["peers"] == 2
    assert found["heads_equal"] is True
    assert found["round"] >= 2
    assert found["commits"] >= 2
    assert {member["peer"] for member in found["members"]} == {peer_id(node) for node in nodes}
    for member in found["members"]:
        assert member["state"] == "training"
        assert member["step"] > 0
        assert member["steps_per_second"] > 0
        assert member["addresses"][0].startswith("/ip4/127.0.0.1/tcp/")


def test_plan_times_a_download_from_the_peers_and_this_machines_step(
    shared_lab: Lab, swarm: tuple[str, list[Process]]
) -> None:
    invite, _ = swarm
    plan = shared_lab.run("plan", "--measure", invite, "--device", "cpu", "--json")
    assert plan.popen.returncode == 0, plan.tail()
    found = json.loads(plan.log.read_text(encoding="utf-8").splitlines()[-1])
    assert found["model"] == "micro"
    step, line = found["measured"]
    assert "a pass of 64 tokens takes" in step
    assert re.match(r"\d+\.\d MB came from [12] peer\(s\) in", line)
    assert found["down_bits_per_second"] > 1e5
    assert 0 < found["rtt_seconds"] < 5
    assert any("uplink of 10 Mbit/s" in text for text in found["assumed"])
    assert found["up_bits_per_second"] == 10e6
    no_traceback(plan)


def test_status_in_words(shared_lab: Lab, swarm: tuple[str, list[Process]]) -> None:
    invite, nodes = swarm
    status = shared_lab.run("status", invite)
    assert status.popen.returncode == 0, status.tail()
    assert "run micro" in status.text
    assert "2 peer(s) training" in status.text
    assert all(peer_id(node)[-8:] in status.text for node in nodes)
    assert not status.errors


def test_doctor_finds_the_bootstrap_peer(shared_lab: Lab, swarm: tuple[str, list[Process]]) -> None:
    invite, _ = swarm
    doctor = shared_lab.run("doctor", invite, "--json", "--data-dir", shared_lab.folder / "doctor")
    report = json.loads(doctor.text)
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["bootstrap"]["status"] == "ok", report
    assert doctor.popen.returncode == (0 if report["ok"] else 1)
    no_traceback(doctor)


# ---------------------------------------------------------------------- a peer that means harm


class Intruder:
    """A real libp2p peer in this process that knows the invite and keeps no rule."""

    def __init__(self, folder: Path, invite: Invite) -> None:
        folder.mkdir()
        self.invite = invite
        self.identity = load_or_create(folder / "key")
        self.thread = NetworkThread()
        config = HostConfig(host="127.0.0.1", port=0, announce=(), socket_dir=folder / "s")
        validator = SignedRecords(self.identity, [roster_key(invite.run)])
        self.host = self.thread.call(Host.start(self.identity, config, validator))
        for address in invite.addresses:
            self.thread.call(self.host.dial(address))
        self.roster = Roster(self.host, invite.run, lambda: None)

    def peers(self) -> dict[bytes, PeerRecord]:
        """The roster as it is now; reading it also connects to all."""
        return dict(self.thread.call(self.roster.read()))

    def clock(self) -> Clock:
        """The clock that is in force."""
        clocks = [record.clock for record in self.peers().values() if record.clock is not None]
        return max(clocks, key=lambda clock: clock.round)

    def control(self, victim: bytes, *frames: bytes | m.Message) -> None:
        """Send messages, or bytes as they are, on a control stream; waits until the other side has hung up or not."""

        async def send() -> None:
            async with open_stream(self.host.p2p, victim, control_name(self.invite.run)) as (_, writer):
                for frame in frames:
                    if isinstance(frame, bytes):
                        writer.write(frame)
                        await writer.drain()
                    else:
                        await write_message(writer, frame)

        self.thread.call(send())

    def request(self, victim: bytes, message: object) -> object:
        """One request on a bulk stream and its answer."""

        async def ask() -> object:
            async with open_stream(self.host.p2p, victim, bulk_name(self.invite.run)) as (reader, writer):
                await write_message(writer, message)
                return await read_message(reader)

        return self.thread.call(ask())

    def close(self) -> None:
        self.thread.call(self.host.close())
        self.thread.close()


@pytest.fixture(scope="module")
def intruder(shared_lab: Lab, swarm: tuple[str, list[Process]]) -> Iterator[Intruder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, f"{shared_lab.mark}intruder-")  # its p2pd is watched like all others
        found = Intruder(shared_lab.folder / "intruder", Invite.parse(swarm[0]))
    yield found
    found.close()


def faults(node: Process, intruder: Intruder) -> list[str]:
    """What the node recorded against the intruder."""
    return [event["what"] for event in node.events("fault") if event.get("peer") == intruder.identity.peer_id]


def join_message(name: bytes, clock: Clock, round: int, version: int = 0) -> m.Join:
    member = Member(name, 100, bytes(32))
    return m.Join(fragment_of(round, FRAGMENTS), round, bytes(32), version, member, 1.0, 5.0)


GARBAGE = {
    "not msgpack": (b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1", "not a msgpack message"),
    "far too long": (b"\xff\xff\xff\xffwhatever", "frame of 4294967295 bytes, the limit is"),
    "another message": (m.encode(m.FetchRun()), "FetchRun where Join or"),
    "unknown number": (b"\x92\xcc\xfa\x90", "not a message of this protocol version"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_a_fault_of_its_sender(swarm: tuple[str, list[Process]], intruder: Intruder, kind: str) -> None:
    _, nodes = swarm
    frame, what = GARBAGE[kind]
    if kind not in ("not msgpack", "far too long"):
        frame = len(frame).to_bytes(4, "big") + frame
    intruder.peers()
    intruder.control(parse_peer_id(peer_id(nodes[0])), frame)
    until(lambda: [text for text in faults(nodes[0], intruder) if what in text], f"fault {what!r}", limit=10)
    nodes[0].see(rf"WARNING {intruder.identity.peer_id} ")


def test_a_join_in_anothers_name_is_a_fault(swarm: tuple[str, list[Process]], intruder: Intruder) -> None:
    _, nodes = swarm
    victim, other = (parse_peer_id(peer_id(node)) for node in nodes)

    def caught() -> bool:
        clock = intruder.clock()
        for round in range(clock.round, clock.round + 3):
            intruder.control(victim, join_message(other, clock, round))
        return "joined in another peer's name" in faults(nodes[0], intruder)

    until(caught, "the fault", limit=20)


def test_a_commit_with_a_wrong_signature_is_a_fault(swarm: tuple[str, list[Process]], intruder: Intruder) -> None:
    _, nodes = swarm
    victim, me = parse_peer_id(peer_id(nodes[0])), intruder.identity.peer_id_bytes

    def forged(clock: Clock, round: int) -> m.Commit:
        fragment = fragment_of(round, FRAGMENTS)
        record = CommitRecord(
            run=intruder.invite.run,
            fragment=fragment,
            round=round,
            version=1,
            prev=bytes(32),
            members=(Member(me, 100, bytes(32)),),
            electors=(me,),
            state=bytes(32),
            tokens_total=1 << 50,
            clock=clock,
            coordinator=victim,
        )
        return m.Commit(fragment, round, SignedRecord(record, bytes(64)))

    def caught() -> bool:
        # A join for a round that is about to begin opens it at the victim; the commit must meet it open.
        clock = intruder.clock()
        for round in range(clock.round, clock.round + 3):
            intruder.control(victim, join_message(me, clock, round), forged(clock, round))
        return "commit with a wrong signature" in faults(nodes[0], intruder)

    until(caught, "the fault", limit=30)


def test_contributions_that_nobody_wants_are_refused_before_a_byte(
    swarm: tuple[str, list[Process]], intruder: Intruder
) -> None:
    _, nodes = swarm
    victim = parse_peer_id(peer_id(nodes[0]))
    round = intruder.clock().round
    for nbytes in (1, 1 << 40):
        answer = intruder.request(
            victim, m.Push(fragment_of(round, FRAGMENTS), round, bytes(32), 0, bytes(32), nbytes)
        )
        assert isinstance(answer, m.Missing)
        assert answer.reason in (f"round {round} is not going on here", "another group")
    answer = intruder.request(victim, m.Fetch(0, round, bytes(32)))
    assert answer == m.Missing(f"no such bytes of round {round} here")
    assert isinstance(intruder.request(victim, m.FetchState(99)), m.Missing)
    with pytest.raises(BROKEN):  # the node hangs up on what is no request
        intruder.request(victim, m.Done())


def test_a_lie_in_the_roster_is_not_believed(swarm: tuple[str, list[Process]], intruder: Intruder) -> None:
    _, nodes = swarm
    clock = intruder.clock()
    lie = PeerRecord(
        version="1",
        state="training",
        addresses=intruder.host.addresses,
        client_mode=False,
        rate=1e6,
        step=1 << 40,
        loss=0.0,
        tau=1,
        tokens=1 << 40,
        clock=Clock(clock.round + 1_000_000, clock.at, 1e-3),
        versions=(1_000_000,) * FRAGMENTS,
        chain_tokens=(1 << 50,) * FRAGMENTS,
        last_tokens=(1,) * FRAGMENTS,
        heads=bytes(32),
    )
    intruder.thread.call(Roster(intruder.host, intruder.invite.run, lambda: lie).renew())
    begun = max(nodes[0].committed())
    gone = dataclasses.replace(lie, state="leaving", clock=None, versions=(), chain_tokens=(), last_tokens=())
    for node in nodes:
        node.commits(begun + 4)
        assert max(node.committed()) < begun + 1000  # its clock is not taken over
        repairs = [event for event in node.events("repair") if event["state"] != "begun"]
        assert {event["state"] for event in repairs} <= {"failed", "done", "not needed"}
        assert [event for event in repairs if event["state"] == "failed"], "what it claims to have was asked for"
    intruder.thread.call(Roster(intruder.host, intruder.invite.run, lambda: gone).renew())


def test_the_swarm_goes_on_unharmed(shared_lab: Lab, swarm: tuple[str, list[Process]], intruder: Intruder) -> None:
    invite, nodes = swarm
    last = max(nodes[0].committed())
    for node in nodes:
        node.commits(last + 3)
        no_traceback(node)

    def members() -> list[int]:
        return [e["members"] for e in nodes[0].events("round") if e["outcome"] == "committed" and e["round"] > last]

    # Alone: where the other one came late. Three would be the two and the intruder.
    until(lambda: 2 in members(), "a round of both", logs=shared_lab.logs)
    assert set(members()) <= {1, 2}
    found = json.loads(shared_lab.run("status", invite, "--json").text)
    assert found["heads_equal"] is True
    assert {member["peer"] for member in found["members"] if member["state"] == "training"} == {
        peer_id(node) for node in nodes
    }
    losses = [event["loss"] for event in nodes[0].events("step")]
    assert sum(losses[-20:]) / 20 < losses[0] - 0.5
