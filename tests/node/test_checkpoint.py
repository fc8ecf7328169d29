"""Checkpoints: whole or not there, checked before use, and a replica that goes on as if nothing had happened."""

import errno
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stretto.node import checkpoint_files
from stretto.node.checkpoint import Captured, capture
from stretto.node.checkpoint_files import CheckpointFiles
from stretto.node.saving import Saver
from stretto.node.sync import Sync
from stretto.protocol.actions import Rules
from stretto.protocol.chain import CommitRecord, Member, SignedRecord
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.peer import Peer
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo
from tests.fakes import toy_config

ME, OTHER = peer_id(0), peer_id(1)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Replica:
    """A model that trains, its protocol side, and its checkpoints in ``folder``."""

    def __init__(self, folder: Path, *, me: bytes = ME, keep: int = 2, every: float = 0.0) -> None:
        self.config = toy_config(fragments=2, alpha=0.5)
        self.net = Toy()
        self.model = FragmentedModel(self.net, split_model(self.net, count=2))
        diloco = StreamingDiLoCo(self.config, [self.model.gather(index) for index in range(2)])
        rules = Rules(inner_steps=20, fragments=2, min_group=1, max_group=4, window=3.0)
        self.peer = Peer(
            me=me, config=self.config, diloco=diloco, rules=rules, sign=lambda _: bytes(64), verify=lambda *_: True
        )
        self.sync = Sync(self.model, self.peer, tau_max=5)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.position, self.tokens, self.now = 0, 0, 0.0
        self.said: list[dict[str, Any]] = []
        self.files = CheckpointFiles(folder, keep=keep)
        self.saver = Saver(
            self.files,
            every=every,
            run=self.config.digest(),
            peer=me,
            sync=self.sync,
            optimizer=self.optimizer,
            reader=lambda: self.position.to_bytes(4, "big"),
            tokens=lambda: self.tokens,
            say=self.said.append,
            clock=lambda: self.now,
        )

    def train(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.position))
            loss = ((self.net(batch) - batch.flip(1)) ** 2).mean()
            loss.backward()
            self.sync.acquire_step()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.sync.release_step(32, 0.5)
            self.position, self.tokens = self.position + 1, self.tokens + 32
            self.sync.come_back()
            losses.append(loss.item())
        return losses

    def commit(self, fragment: int, *, counted: bool = True) -> None:
        """A round of this fragment in which another peer's contribution counts, and this one's if wanted."""
        contribution = self.sync.leave(fragment)
        diloco, state = self.peer.diloco, self.peer.diloco.fragments[fragment]
        diloco.left(contribution)
        members = [Member(ME if counted else OTHER, contribution.tokens, contribution.digest, contribution.norm)]
        reduced = diloco.reduce(fragment, members, {contribution.digest: contribution.payload})
        record = CommitRecord(
            run=self.peer.run,
            fragment=fragment,
            version=state.tip.version + 1,
            round=2 * state.tip.version + fragment,
            prev=state.tip.head,
            tokens_total=state.tip.tokens_total + contribution.tokens,
            members=tuple(members),
            state=reduced.digest,
            clock=Clock(round=0, at=100.0, interval=10.0),
            coordinator=ME,
            electors=tuple(sorted((ME, OTHER))),
        )
        diloco.install(fragment, SignedRecord(record, bytes(64)), reduced, me=self.peer.me)
        self.peer.adopt_clock(record.clock)

    def everything(self) -> list[bytes]:
        """All that decides how training goes on, as bytes."""
        parts = [self.model.gather(index).tobytes() for index in range(2)]
        for state in self.peer.diloco.fragments:
            for array in (state.anchor, state.momentum, state.merge_with, state.shift, state.residual):
                parts.append(b"" if array is None else array.tobytes())
            parts.append(repr((state.tip, state.record, state.tokens, state.attempts)).encode())
        for weight in self.net.parameters():
            parts += [value.numpy().tobytes() for _, value in sorted(self.optimizer.state[weight].items())]
        return [*parts, repr((self.sync.step, self.peer.clock)).encode()]


def lived(folder: Path, **settings: Any) -> Replica:
    """A replica with a history: commits that counted it and that did not, a pending result, one under way."""
    replica = Replica(folder, **settings)
    replica.train(5)
    replica.commit(0)
    replica.train(3)
    replica.commit(1, counted=False)
    replica.train(2)
    replica.commit(1)
    replica.peer.diloco.left(replica.sync.leave(0))
    return replica


def resumed(folder: Path, **settings: Any) -> Replica:
    replica = Replica(folder, **settings)
    contents = replica.saver.resume()
    assert contents is not None
    replica.position, replica.tokens = int.from_bytes(contents.reader, "big"), contents.tokens
    return replica


def test_everything_comes_back_bit_for_bit_and_the_losses_go_on_as_they_would_have(tmp_path: Path) -> None:
    first = lived(tmp_path)
    first.saver.save(last=True)
    second = resumed(tmp_path)
    assert second.everything() == first.everything()
    assert second.position == first.position == 10
    assert (second.sync.step, second.tokens) == (10, 320)
    assert second.train(10) == first.train(10)
    assert [e["event"] for e in first.said] == ["checkpoint"]
    assert first.said[0]["step"] == 10


def test_another_peer_goes_on_from_it_too(tmp_path: Path) -> None:
    first = lived(tmp_path)
    first.saver.save(last=True)
    second = resumed(tmp_path, me=OTHER)
    assert second.everything() == first.everything()


def test_the_newest_is_newest_by_number_and_only_so_many_stay(tmp_path: Path) -> None:
    replica = Replica(tmp_path, keep=2)
    for count in (9, 1, 90):
        replica.train(count)
        replica.saver.save(last=True)
    assert replica.files.steps() == [100, 10]
    assert resumed(tmp_path).sync.step == 100


def test_nothing_is_written_twice_for_one_step(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.train(1)
    replica.saver.save(last=True)
    replica.saver.save(last=True)
    assert len(replica.said) == 1


@pytest.mark.parametrize("name", ["local-0000.safetensors", "shared-0001.safetensors", "contents.msgpack"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "longer"])
def test_a_damaged_newest_one_is_named_and_the_one_before_is_taken(tmp_path: Path, name: str, damage: str) -> None:
    replica = lived(tmp_path)
    replica.saver.save(last=True)
    expected = replica.everything()
    replica.train(4)
    replica.saver.save(last=True)
    path = tmp_path / "step-000000000014" / name
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "longer":
        path.write_bytes(data + b"\0")
    else:
        path.unlink()
    second = resumed(tmp_path)
    assert second.everything() == expected
    assert [e["event"] for e in second.said] == ["fault"]
    assert "the checkpoint of step 14 is left out" in second.said[0]["what"]
    assert name in second.said[0]["what"]
    # The damaged one does not stand in the way of a new one, and goes when that is whole.
    second.train(1)
    second.saver.save(last=True)
    assert second.files.steps() == [11, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000010", "step-000000000011"]


def test_with_all_damaged_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.train(1)
    replica.saver.save(last=True)
    (tmp_path / "step-000000000001" / "contents.msgpack").write_bytes(b"")
    second = Replica(tmp_path)
    assert second.saver.resume() is None
    assert len(second.said) == 1
    assert Replica(tmp_path).saver.resume() is None


def test_a_state_that_does_not_fit_its_record_is_refused(tmp_path: Path) -> None:
    replica = lived(tmp_path)
    state = replica.peer.diloco.fragments[1]
    state.anchor = state.anchor + np.float32(1)  # a file written from broken memory passes every checksum
    replica.saver.save(last=True)
    second = Replica(tmp_path)
    before = [second.model.gather(i).tobytes() for i in range(2)]
    assert second.saver.resume() is None
    assert "another state than its record says" in second.said[0]["what"]
    assert [second.model.gather(i).tobytes() for i in range(2)] == before


def test_weights_that_are_not_finite_are_not_gone_on_from(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.train(1)
    replica.saver.save(last=True)
    replica.train(1)
    with torch.no_grad():
        next(replica.net.parameters())[0, 0] = float("nan")
    replica.saver.save(last=True)
    second = resumed(tmp_path)
    assert second.sync.step == 1
    assert "not finite" in second.said[0]["what"]


def test_one_of_another_run_is_left_alone(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.train(1)
    replica.saver.save(last=True)
    other = Replica(tmp_path)
    other.saver._run = bytes(32)
    assert other.saver.resume() is None
    assert "it is of another run" in other.said[0]["what"]


def test_a_full_disk_costs_the_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = lived(tmp_path)
    replica.saver.save(last=True)
    expected = replica.everything()
    replica.train(1)

    class Usage:
        free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: Usage)
        replica.saver.save(last=True)
    assert "needs 1 MB and" in replica.said[-1]["what"]
    assert "0 MB free" in replica.said[-1]["what"]

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "flush", full)
        replica.saver.save(last=True)
    assert "No space left" in replica.said[-1]["what"]
    assert "--data-dir" in replica.said[-1]["what"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000010"]
    assert resumed(tmp_path).everything() == expected


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    files.write(7, 0, [("a.safetensors", lambda path: path.write_bytes(b"half") and None)])  # and no finish
    assert files.steps() == []
    files.clean()
    assert list(tmp_path.iterdir()) == []


def test_it_is_due_by_time_and_never_costs_more_than_its_share(tmp_path: Path) -> None:
    replica = Replica(tmp_path, every=10.0)
    replica.train(1)
    replica.now = 9.0
    replica.saver.save_if_due()
    assert replica.files.steps() == []
    replica.now = 10.0
    replica.saver.save_if_due()
    replica.saver.save(last=True)
    assert replica.files.steps() == [1]
    replica.train(1)
    replica.saver._cost = 1.0  # a second of waiting: not again before 50 s
    replica.now = 59.0
    replica.saver.save_if_due()
    assert replica.files.steps() == [1]
    replica.now = 60.0
    replica.saver.save_if_due()
    replica.saver.save(last=True)
    assert replica.files.steps() == [2, 1]


def test_files_outside_the_folder_are_not_named(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "contents.msgpack", ""):
        with pytest.raises(ValueError, match="is not the name of a file"):
            checkpoint_files.FileEntry(name, 1, bytes(32))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write more to any file, as a disk that fills up does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_in_the_middle_of_a_file_costs_the_checkpoint_only(tmp_path: Path) -> None:
    replica = lived(tmp_path)
    replica.saver.save(last=True)
    expected = replica.everything()
    replica.train(1)
    sizes = [path.stat().st_size for path in (tmp_path / "step-000000000010").glob("local-*")]
    with largest_file(min(sizes) // 2):  # in the training thread
        replica.saver.save(last=True)
    assert "the checkpoint could not be written" in replica.said[-1]["what"]
    shared = [path.stat().st_size for path in (tmp_path / "step-000000000010").glob("shared-*")]
    unfinished = replica.files.write(11, 0, [])
    with largest_file(min(shared) // 2), pytest.raises(OSError, match="File too large"):  # as in the writer's thread
        unfinished.add(capture_of(replica).shared)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000010"]
    assert resumed(tmp_path).everything() == expected


def capture_of(replica: Replica) -> Captured:
    return capture(replica.sync, replica.optimizer, run=replica.config.digest(), peer=ME, tokens=0, reader=b"")


SAVE_FOR_EVER = """
import os, pathlib, sys
from stretto.node.checkpoint_files import CheckpointFiles
files = CheckpointFiles(pathlib.Path(sys.argv[1]), keep=2)
files.clean()
step = max(files.steps(), default=0)
while True:
    step += 1
    data = step.to_bytes(8, "big") * 50_000
    write = lambda path: path.write_bytes(data) and None
    files.write(step, 0, [("0.safetensors", write), ("1.safetensors", write)]).finish(data[:8])
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_of_writing_leaves_whole_checkpoints(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    files, reached = CheckpointFiles(tmp_path, keep=2), 0
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, tmp_path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()  # it is in the middle of its second one now
            time.sleep(float(random.uniform(0.0, 0.02)))
            writer.kill()
        steps = files.steps()
        assert steps[0] > reached
        for step in steps:
            folder, contents = files.read(step)  # whole, by size and digest
            assert int.from_bytes(contents, "big") == step
            assert len(list(folder.iterdir())) == 3
        reached = steps[0]
