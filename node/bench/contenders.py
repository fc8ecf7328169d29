"""The contenders of ``stretto bench round``, one pass each: a swarm of light peers, a swarm of hivemind's averagers.

A pass starts its peers anew in the crew's processes and ends them. The counters of all processes are read from outside
(``counters``) at two moments when nothing is under way: after the warm-up and after the last round.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from stretto.node.bench.counters import Cost, read_costs
from stretto.node.bench.crew import Crew, Worker
from stretto.protocol.config import RunConfig
from stretto.protocol.errors import StrettoError

WARM_UP = 2
"""Rounds before those that count: connections open, memory is touched for the first time."""
INNER_STEPS = 100
HEAD_START = 0.3
"""Seconds from an order to its common start."""
HIVEMIND_CODECS = ("none", "float16", "uniform8")
TRIES = 3
"""How often a swarm whose rounds came too fast for this machine is started anew, each time with twice the interval."""


@dataclass
class Samples:
    """One pass: ``seconds`` as a value per peer and round, ``spent`` as means per peer and round, and ``facts``."""

    seconds: dict[str, list[float]]
    spent: dict[str, float]
    facts: dict[str, Any]


def measure_light_peers(
    crew: Crew, workers: Sequence[Worker], run: RunConfig, numel: int, rounds: int, interval: float
) -> Samples:
    """``rounds`` rounds of ``run`` among light peers, one every ``interval`` seconds."""
    for left in reversed(range(TRIES)):
        watched = _swarm(crew, workers, run, numel, WARM_UP + rounds, interval)
        if not left or watched.complete(len(workers)):
            break
        interval *= 2
    return _light_samples(watched, rounds, interval)


@dataclass
class _Watched:
    """What the light peers said, and the counters of each before and after the rounds that count."""

    events: list[dict[str, Any]] = field(default_factory=list)
    totals: list[dict[str, Any]] = field(default_factory=list)
    before: list[Cost] = field(default_factory=list)
    after: list[Cost] = field(default_factory=list)

    def complete(self, peers: int) -> bool:
        """Whether every round was committed with everybody's contribution, at every peer."""
        return all(event["outcome"] == "committed" and event["members"] == peers for event in self.events)


def _swarm(crew: Crew, workers: Sequence[Worker], run: RunConfig, numel: int, last: int, interval: float) -> _Watched:
    """A swarm of light peers from start to end; ``last`` is the first round that does not depart."""
    numbers = range(len(workers))
    shared = {"do": "open", "system": "stretto", "numel": numel, "run": run.to_toml(), "rounds": last}
    opened = crew.ask_each(workers, [{**shared, "seed": number, "folder": crew.new_folder()} for number in numbers])
    enter = {"do": "enter", "others": len(workers) - 1, "step_seconds": interval / INNER_STEPS}
    crew.ask_each(workers, [{**enter, "dial": [opened[0]["address"]] if number else []} for number in numbers])
    at = time.time() + HEAD_START + interval
    for worker in workers:
        worker.send({"do": "take_part", "at": at, "interval": interval})
    watched = _watch_rounds(crew, workers, last)
    crew.ask(workers, {"do": "close"})
    return watched


def _watch_rounds(crew: Crew, workers: Sequence[Worker], last: int) -> _Watched:
    """Follow the rounds; read the counters when all peers are through with the warm-up, and when all is over."""
    watched = _Watched()
    reached = {worker.index: -1 for worker in workers}
    totals: dict[int, dict[str, Any]] = {}
    pids = [worker.process.pid for worker in workers]
    for worker, reply in crew.listen(workers):
        if reply.get("done"):
            totals[worker.index] = reply
            if len(totals) == len(workers):
                break
            continue
        reached[worker.index] = max(reached[worker.index], reply["round"])
        watched.events.append(reply)
        slowest = min(reached.values())
        if not watched.before and slowest >= WARM_UP - 1:
            watched.before = read_costs(pids)
        if not watched.after and slowest >= last - 1:
            watched.after = read_costs(pids)
    watched.totals = [totals[worker.index] for worker in workers]
    return watched


def _light_samples(watched: _Watched, rounds: int, interval: float) -> Samples:
    measured = [event for event in watched.events if event["round"] >= WARM_UP]
    good = [event for event in measured if event["outcome"] == "committed" and event["counted"]]
    faults = sorted({fault for total in watched.totals for fault in total["faults"]})
    if not good:
        said = sorted({str(event.get("why")) for event in measured}) + faults
        raise StrettoError(f"no round of the benchmark was committed with all peers: {'; '.join(said)}")
    committed = {event["round"] for event in watched.events if event["outcome"] == "committed"}
    totals = {
        name: fmean(total[name] for total in watched.totals) / len(committed) for name in ("payload_up", "control_up")
    }
    return Samples(
        seconds={"wall": [event["wall"] for event in good], "installed": [event["installed"] for event in good]},
        spent=_per_round(watched.before, watched.after, rounds) | totals,
        facts={
            "interval": interval,
            "rounds_committed": len({event["round"] for event in good}),
            "rounds_missed": len(measured) - len(good),
            "heads_equal": len({total["head"] for total in watched.totals}) == 1,
            "faults": faults,
        },
    )


def measure_averager(crew: Crew, workers: Sequence[Worker], codec: str, numel: int, rounds: int) -> Samples:
    """``rounds`` steps of hivemind's averager with ``codec``."""
    addresses: list[str] = []
    for number, worker in enumerate(workers):
        request = {"do": "open", "system": "hivemind", "numel": numel, "seed": number, "dial": addresses[:1]}
        addresses += [reply["address"] for reply in crew.ask([worker], {**request, "folder": crew.new_folder()})]
    patched = crew.ask(workers, {"do": "average", "codec": codec, "peers": len(workers)})[0]["patched"]
    seconds: dict[str, list[float]] = {"wall": [], "matchmaking": [], "allreduce": []}
    spent: list[dict[str, float]] = []
    failed = 0
    while len(spent) < WARM_UP + rounds:
        before = read_costs([worker.process.pid for worker in workers])
        halves = _step(crew, workers)
        if halves is None:
            failed += 1
            if failed > TRIES:
                raise StrettoError(
                    f"hivemind's averager with {codec} failed in {failed} of its steps, no more is tried"
                )
            continue
        spent.append(_per_round(before, read_costs([worker.process.pid for worker in workers]), 1))
        if len(spent) > WARM_UP:
            seconds["matchmaking"] += halves[0]
            seconds["allreduce"] += halves[1]
    seconds["wall"] = [a + b for a, b in zip(seconds["matchmaking"], seconds["allreduce"], strict=True)]
    crew.ask(workers, {"do": "close"})
    means = {name: fmean(each[name] for each in spent[WARM_UP:]) for name in spent[0]}
    return Samples(seconds, means, {"patched": patched, "steps_failed": failed})


def _step(crew: Crew, workers: Sequence[Worker]) -> tuple[list[float], list[float]] | None:
    """One step of all averagers: each one's seconds of matchmaking and of all-reduce, None if it failed for one."""
    matched = crew.ask(workers, {"do": "match", "at": time.time() + HEAD_START})
    if not all(reply["ok"] for reply in matched):
        crew.ask(workers, {"do": "abandon"})
        return None
    reduced = crew.ask(workers, {"do": "reduce", "at": time.time() + HEAD_START})
    if not all(reply["ok"] for reply in reduced):
        return None
    return [reply["seconds"] for reply in matched], [reply["seconds"] for reply in reduced]


def _per_round(before: Sequence[Cost], after: Sequence[Cost], rounds: int) -> dict[str, float]:
    """CPU seconds and bytes per peer and round."""
    spent = [now.since(then) for now, then in zip(after, before, strict=True)]
    names = ("cpu", "bytes_up", "bytes_down")
    return {name: fmean(each) / rounds for name, each in zip(names, zip(*spent, strict=True), strict=True)}
