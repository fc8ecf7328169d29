"""Sync: snapshots under the lock, results that meet the local weights, a tau that holds them back, reloads."""

import threading
from typing import Any

import numpy as np
import pytest
from torch import nn

from stretto.node.sync import Merged, Sync
from stretto.protocol import outer
from stretto.protocol.actions import Rules
from stretto.protocol.chain import CommitRecord, Member, SignedRecord
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.fragments import FragmentedModel, split_model
from stretto.protocol.outer import Vector
from stretto.protocol.peer import Peer
from stretto.protocol.schedule import Clock
from stretto.protocol.simulation import peer_id
from stretto.protocol.streaming import StreamingDiLoCo, seal
from tests.fakes import toy_config

ME, OTHER = peer_id(0), peer_id(1)
ALPHA = 0.25


class Toy(nn.Module):
    """Three linear layers under a name that fragments are found by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])


def make(*, fixed_tau: int | None = None, codec: str = "fp32", encode_on_device: bool = False) -> Sync:
    """A replica in two fragments with the weights 0, 1, 2, ..."""
    config = toy_config(codec=codec, fragments=2, alpha=ALPHA)
    net = Toy()
    model = FragmentedModel(net, split_model(net, count=2))
    for index, spec in enumerate(model.specs):
        model.scatter(index, np.arange(spec.numel, dtype=np.float32))
    diloco = StreamingDiLoCo(config, [model.gather(index) for index in range(2)])
    rules = Rules(inner_steps=20, fragments=2, min_group=1, max_group=4, window=3.0)
    peer = Peer(
        me=ME, config=config, diloco=diloco, rules=rules, sign=lambda _: bytes(64), verify=lambda *_: True
    )  # fmt: skip
    return Sync(model, peer, tau_max=5, fixed_tau=fixed_tau, encode_on_device=encode_on_device)


def steps(sync: Sync, count: int, tokens: int = 10) -> None:
    """Inner steps that leave the weights alone."""
    for _ in range(count):
        sync.acquire_step()
        sync.release_step(tokens, 0.5)


def train(sync: Sync, fragment: int, change: float) -> None:
    """An inner step that adds ``change`` to the weights of a fragment."""
    sync.acquire_step()
    sync.model.scatter(fragment, sync.model.gather(fragment) + np.float32(change))
    sync.release_step(10, 0.5)


def contributed(sync: Sync, fragment: int) -> Vector:
    """The weights that a contribution shows which leaves now: anchor minus outer gradient."""
    payload = sync.leave(fragment).payload
    shown: Vector = sync.peer.diloco.fragments[fragment].anchor - np.frombuffer(payload, "<f4")
    return shown


def commit(sync: Sync, fragment: int, *, counted: bool) -> Vector:
    """A round of ``fragment``: leave, and a commit in which this peer is counted, or only the other one.

    Returns the new anchor.
    """
    diloco = sync.peer.diloco
    contribution = sync.leave(fragment)
    diloco.left(contribution)
    mover = contribution if counted else diloco.leave(fragment, sync.model.gather(fragment) - np.float32(3))
    member = Member(ME if counted else OTHER, 10, mover.digest)
    reduced = diloco.reduce(fragment, (member,), {mover.digest: mover.payload})
    tip = diloco.fragments[fragment].tip
    record = CommitRecord(
        run=sync.peer.run,
        fragment=fragment,
        round=fragment,
        version=tip.version + 1,
        prev=tip.head,
        members=(member,),
        electors=(member.peer,),
        state=reduced.digest,
        tokens_total=tip.tokens_total + 10,
        clock=Clock(1, 0.0, 10.0),
        coordinator=ME,
    )
    assert diloco.install(fragment, SignedRecord(record, bytes(64)), reduced, me=ME) is counted
    return diloco.fragments[fragment].anchor


def test_a_contribution_shows_the_weights_as_they_are() -> None:
    sync = make()
    start = [sync.model.gather(index) for index in range(2)]
    assert np.array_equal(contributed(sync, 0), start[0])
    train(sync, 0, 2.0)
    contribution = sync.leave(0)
    assert np.array_equal(np.frombuffer(contribution.payload, "<f4"), np.full(start[0].size, -2.0))
    assert contribution.tokens == 10
    # It only reads: model and anchors are what they were.
    assert np.array_equal(sync.model.gather(0), start[0] + 2)
    assert np.array_equal(sync.peer.diloco.fragments[0].anchor, start[0])
    assert np.array_equal(contributed(sync, 1), start[1])


def test_a_contribution_waits_for_a_running_optimizer_step_and_for_nothing_else() -> None:
    sync = make()
    shown: list[Vector] = []
    sync.outer_lock.acquire()  # whatever the protocol does meanwhile
    sync.acquire_step()
    thread = threading.Thread(target=lambda: shown.append(contributed(sync, 0)))
    thread.start()
    sync.model.scatter(0, np.full(sync.model.specs[0].numel, 7.0, np.float32))
    assert not shown
    sync.step_lock.release()
    thread.join(10)
    assert np.array_equal(shown[0], np.full_like(shown[0], 7.0))
    sync.outer_lock.release()


def test_encoded_where_the_weights_are_it_has_the_same_bits() -> None:
    payloads = []
    for on_device in (False, True):
        sync = make(codec="e3m0", encode_on_device=on_device)
        train(sync, 0, 0.3)
        sync.model.scatter(0, sync.model.gather(0) * np.linspace(0.5, 2, sync.model.specs[0].numel, dtype=np.float32))
        payloads.append(sync.leave(0).payload)
    assert payloads[0] == payloads[1]
    assert any(payloads[0])


def test_weights_that_are_not_finite_do_not_leave_and_are_named() -> None:
    sync = make()
    weights = sync.model.gather(0)
    weights[5] = np.inf
    sync.model.scatter(0, weights)
    with pytest.raises(LocalProtocolError, match=r"not finite in layers\.\d\.weight"):
        sync.leave(0)


def test_time_that_a_step_waits_for_a_snapshot_is_blocked_time() -> None:
    sync = make()
    steps(sync, 1)
    assert sync.blocked_seconds < 0.1
    sync.step_lock.acquire()
    entered = threading.Event()

    def step() -> None:
        entered.set()
        sync.acquire_step()
        sync.release_step(10, 0.5)

    thread = threading.Thread(target=step)
    before = sync.blocked_seconds
    thread.start()
    assert entered.wait(10)
    threading.Event().wait(0.02)
    sync.step_lock.release()
    thread.join(10)
    assert sync.blocked_seconds > before


def test_a_step_counts_tokens_for_every_fragment_and_measures() -> None:
    sync = make()
    steps(sync, 3, tokens=7)
    assert sync.step == 3
    assert [state.tokens for state in sync.peer.diloco.fragments] == [21, 21]
    assert sync.estimate.step_seconds == 0.5


def test_nothing_comes_back_where_nothing_is_pending() -> None:
    sync = make()
    before = sync.model.gather(0)
    assert sync.come_back() == []
    assert np.array_equal(sync.model.gather(0), before)


def test_a_counted_result_is_merged_with_the_weights_of_today() -> None:
    sync = make()
    train(sync, 0, 2.0)
    anchor = commit(sync, 0, counted=True)
    train(sync, 0, 0.5)
    train(sync, 0, 0.5)
    local = sync.model.gather(0)
    other = sync.model.gather(1)
    assert sync.come_back() == [Merged(fragment=0, tau=2, counted=True)]
    expected = outer.merge(local, anchor, ALPHA)
    assert np.array_equal(sync.model.gather(0), expected)
    assert np.allclose(expected, ALPHA * local + (1 - ALPHA) * anchor, rtol=1e-6)
    assert np.array_equal(sync.model.gather(1), other)
    assert sync.come_back() == []


def test_a_result_that_did_not_count_this_peer_moves_its_weights_by_the_anchors_move() -> None:
    sync = make(fixed_tau=4)
    train(sync, 0, 2.0)
    old = sync.peer.diloco.fragments[0].anchor
    anchor = commit(sync, 0, counted=False)
    local = sync.model.gather(0)
    assert not np.array_equal(anchor, old)
    # A rebase is not held back by a fixed tau: nothing of this peer's is in it.
    assert sync.come_back() == [Merged(fragment=0, tau=0, counted=False)]
    assert np.array_equal(sync.model.gather(0), local + (anchor - old))


def test_a_fixed_tau_holds_a_result_back() -> None:
    sync = make(fixed_tau=2)
    train(sync, 0, 2.0)
    commit(sync, 0, counted=True)
    for _ in range(2):
        assert sync.come_back() == []
        steps(sync, 1)
    assert sync.come_back() == [Merged(fragment=0, tau=2, counted=True)]


def test_a_fragment_leaves_only_after_its_last_result_was_merged() -> None:
    sync = make()
    train(sync, 0, 2.0)
    commit(sync, 0, counted=True)
    with pytest.raises(LocalProtocolError, match="has not been merged yet"):
        sync.leave(0)
    sync.come_back()
    assert sync.leave(0).fragment == 0


def test_a_reload_puts_the_anchors_in_place_and_forgets_the_work() -> None:
    sync = make()
    anchors = [state.anchor.copy() for state in sync.peer.diloco.fragments]
    train(sync, 0, 2.0)
    steps(sync, 1)
    for fragment in range(2):
        sync.model.scatter(fragment, np.full(sync.model.specs[fragment].numel, np.nan, np.float32))
    assert sync.reload_if_asked() is False
    assert np.isnan(sync.model.gather(0)).all()
    sync.ask_reload()
    assert sync.reload_if_asked() is True
    for fragment in range(2):
        assert np.array_equal(sync.model.gather(fragment), anchors[fragment])
    assert [state.tokens for state in sync.peer.diloco.fragments] == [0, 0]
    assert sync.reload_if_asked() is False


def test_a_reload_drops_a_result_that_waits() -> None:
    sync = make()
    train(sync, 0, 2.0)
    anchor = commit(sync, 0, counted=True)
    sync.ask_reload()
    assert sync.reload_if_asked()
    assert sync.come_back() == []
    assert np.array_equal(sync.model.gather(0), anchor)


def test_a_replaced_state_comes_back_as_a_rebase() -> None:
    sync = make()
    diloco = sync.peer.diloco
    old = diloco.fragments[0].anchor.copy()
    train(sync, 0, 2.0)
    local = sync.model.gather(0)
    reduced = seal(old + np.float32(5), np.zeros_like(old))
    member = Member(OTHER, 10, bytes(32))
    fields: dict[str, Any] = {
        "run": sync.peer.run, "fragment": 0, "round": 2, "version": 7, "prev": bytes(32), "members": (member,),
        "electors": (OTHER,), "state": reduced.digest, "tokens_total": 70, "clock": Clock(1, 0.0, 10.0),
        "coordinator": OTHER,
    }  # fmt: skip
    diloco.replace(0, reduced, SignedRecord(CommitRecord(**fields), bytes(64)), me=ME)
    assert [merged.counted for merged in sync.come_back()] == [False]
    assert np.allclose(sync.model.gather(0), local + 5, atol=1e-6)
