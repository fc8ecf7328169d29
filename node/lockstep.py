"""Lockstep, for experiments: real nodes that compute exactly what the simulation computes.

In an ordinary run a round departs at a *time*, and its result merges when it is there, so what is computed depends on
how fast machines and lines are. In lockstep both are tied to inner steps, as in the paper (arXiv 2501.18512,
Algorithm 2) and in ``stretto.protocol.simulation``: with H inner steps between two departures of a fragment and P
fragments

    round r departs after inner step   s_r = H + r H / P        (fragment r mod P)
    its result merges after inner step s_r + tau                 (tau fixed per peer)

All else is what it always is: daemon, DHT, streams, rounds, codecs, threads. Where the schedule demands it one side
waits for the other (*gates*): the trainer, after step s_r, until the contribution is encoded, and after step s_r + tau
until the round is committed; the network thread, with round r, until the trainer has done step s_r. So speeds change
only how long a run takes. A wait for a round can only end in its commit with all peers in it: a round that is aborted,
or that leaves a peer out, ends the node with a sentence, since nothing could make this run equal the simulation again.

Deadlock-free: to depart with round r a trainer needs the results of earlier rounds only (s_q + tau <= s_r means q < r
where tau > 0), and each of those needs departures only.

The swarm's clock goes on numbering the rounds, and says nothing about when they depart: its interval is ``INTERVAL``,
far above what a round takes here, so no time limit that the protocol derives from it cuts a round short on a machine
that is busy.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stretto.node.swarm.thread import Stopped
from stretto.node.sync import Merged, Sync
from stretto.protocol.actions import Rules
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import ConfigError
from stretto.protocol.schedule import Clock, fragment_of

INTERVAL = 60.0
"""Seconds between two departures by the swarm's clock, which nobody follows."""

PATIENCE = 60.0
"""Seconds for which a coordinator waits for the others, and an exchange may take: peers of a busy machine."""

LIMIT = 600.0
"""Seconds after which a trainer gives up waiting: some peer is far too slow, or stopped and still connected."""


@dataclass(frozen=True)
class LockstepSchedule:
    """Which round departs after which inner step, and when it merges. ``rounds`` depart, tau is in inner steps."""

    inner_steps: int
    fragments: int
    rounds: int
    tau: int

    def __post_init__(self) -> None:
        if self.inner_steps % self.fragments:
            raise ConfigError(
                f"lockstep needs fragments (P = {self.fragments}) that divide outer.inner_steps (H = "
                f"{self.inner_steps}): departures are evenly spaced in inner steps"
            )
        if not 0 <= self.tau < self.inner_steps:
            raise ConfigError(f"tau is {self.tau}, it must be at least 0 and less than H ({self.inner_steps})")

    def departure(self, round: int) -> int:
        """The inner step after which ``round`` departs."""
        return self.inner_steps + round * self.inner_steps // self.fragments

    def departing(self, step: int) -> int | None:
        """The round that departs after inner step ``step``."""
        round, rest = divmod(step - self.inner_steps, self.inner_steps // self.fragments)
        return round if rest == 0 and 0 <= round < self.rounds else None

    def merging(self, step: int) -> int | None:
        """The round whose result merges after inner step ``step``."""
        return self.departing(step - self.tau)

    @property
    def last_step(self) -> int:
        """The inner step after which the last result merges, and the run is over."""
        return self.departure(self.rounds - 1) + self.tau


def check_lockstep(run: RunConfig, peers: int, tau: int) -> None:
    """ConfigError unless so many peers with such a tau can train in lockstep under ``run``."""
    if peers > run.group.max_size:
        raise ConfigError(
            f"lockstep is for one group: {peers} peers are more than group.max_size ({run.group.max_size})"
        )
    if tau > run.outer.tau_max:
        raise ConfigError(f"tau is {tau}, it must be at most outer.tau_max ({run.outer.tau_max})")


def lockstep_rules(run: RunConfig, fragments: int, peers: int) -> Rules:
    """The time limits of a round in lockstep, all patient, and a group that is whole or none."""
    return Rules(
        inner_steps=run.outer.inner_steps,
        fragments=fragments,
        min_group=peers,
        max_group=run.group.max_size,
        window=PATIENCE,
        margin=PATIENCE / 2,
        min_exchange=PATIENCE,
    )


class Lockstep:
    """The gates between the trainer and the network thread of one node.

    ``stopping`` tells whether the node was asked to stop; waits raise ``Stopped`` then. ``fail`` takes the sentence
    with which a run in lockstep ends that cannot go on, and has the node stop.
    """

    def __init__(
        self,
        schedule: LockstepSchedule,
        peers: int,
        *,
        stopping: Callable[[], bool] = lambda: False,
        limit: float = LIMIT,
    ) -> None:
        self.schedule, self.peers = schedule, peers
        self.fail: Callable[[str], None] = lambda _: None
        self.wake: Callable[[], None] = lambda: None
        """Called in the training thread when it has come to another step."""
        self.waiting_for = ""
        """What the trainer waits for, in words."""
        self.reached = 0
        """Inner steps that the trainer has done, with all merges that were due."""
        self._stopping, self._limit = stopping, limit
        self._changed = threading.Condition()
        self._left_at: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    @property
    def rate(self) -> float:
        """Inner steps per second that keep the swarm's clock at ``INTERVAL``."""
        return self.schedule.inner_steps / self.schedule.fragments / INTERVAL

    @staticmethod
    def clock(now: float) -> Clock:
        """The clock of a run that is founded at swarm time ``now``."""
        return Clock(round=0, at=now, interval=INTERVAL)

    @property
    def done(self) -> bool:
        """Whether the trainer has come to the end."""
        return self.reached >= self.schedule.last_step

    # ------------------------------------------------------------------ training thread

    def come_back(self, sync: Sync) -> list[Merged]:
        """After each inner step: merge what is due after it, and let the round depart that is due. Raises Stopped."""
        step, merged = sync.step, list[Merged]()
        departing, merging = self.schedule.departing(step), self.schedule.merging(step)
        began = time.perf_counter()
        if merging is not None and merging != departing:
            self._await(self._seconds, merging, f"the result of round {merging}, due after inner step {step}")
        waited = time.perf_counter() - began
        merged += sync.come_back()
        self.reached = step
        if departing is not None:
            self.wake()
            began = time.perf_counter()
            self._await(self._left_at, departing, f"the departure of round {departing} after inner step {step}")
            if merging == departing:
                self._await(self._seconds, departing, f"the result of round {departing}, due at once (tau 0)")
            waited += time.perf_counter() - began
            merged += sync.come_back() if merging == departing else []
        sync.blocked_seconds += waited
        return merged

    def _await(self, done: dict[int, float], round: int, what: str) -> None:
        end = time.monotonic() + self._limit
        with self._changed:
            while round not in done:
                self.waiting_for = f"waiting for {what}"
                if self._stopping():
                    raise Stopped
                if time.monotonic() > end:
                    self.fail(f"{what} has not come within {self._limit:.0f} s; some peer is stopped or far too slow")
                    raise Stopped
                self._changed.wait(0.1)
            self.waiting_for = ""

    # ------------------------------------------------------------------ network thread

    def left(self, round: int) -> None:
        """The contribution to ``round`` was taken from the weights, and encoded."""
        with self._changed:
            self._left_at[round] = time.monotonic()
            self._changed.notify_all()

    def committed(self, round: int, members: int, *, counted: bool) -> float:
        """``round`` is committed and installed. The seconds since its departure."""
        if members != self.peers or not counted:
            self.aborted(
                round, f"it counts {members} of {self.peers} peers{'' if counted else ', this one not among them'}"
            )
            return 0.0
        with self._changed:
            self._seconds[round] = time.monotonic() - self._left_at[round]
            self._changed.notify_all()
        return self._seconds[round]

    def aborted(self, round: int, why: str) -> None:
        """``round`` will not do what it does in the simulation: the end."""
        fragment = fragment_of(round, self.schedule.fragments)
        self.fail(f"round {round} (fragment {fragment}) failed: {why}")


class InLockstep:
    """A ``Sync`` as the trainer sees it in lockstep: the same, with gates between two steps."""

    def __init__(self, sync: Sync, lockstep: Lockstep) -> None:
        self._sync, self._lockstep = sync, lockstep

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self._sync.step

    @property
    def blocked_seconds(self) -> float:
        """As ``Sync``; waits at the gates count."""
        return self._sync.blocked_seconds

    @blocked_seconds.setter
    def blocked_seconds(self, seconds: float) -> None:
        self._sync.blocked_seconds = seconds

    def acquire_step(self) -> None:
        """As ``Sync``."""
        self._sync.acquire_step()

    def release_step(self, tokens: int, seconds: float) -> None:
        """As ``Sync``."""
        self._sync.release_step(tokens, seconds)

    def come_back(self) -> list[Merged]:
        """Merge what is due, let depart what is due, and wait for both. Raises Stopped."""
        return self._lockstep.come_back(self._sync)

    def reload_if_asked(self) -> bool:
        """As ``Sync``."""
        return self._sync.reload_if_asked()
