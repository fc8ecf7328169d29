"""A run from the first namespace to the last: set up, watched with a progress line every 30 s, always cleaned up."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.inject import Injector
from tests.chaos.links import Links
from tests.chaos.report import committed, departures, recovery
from tests.chaos.story import Story
from tests.chaos.swarm import Setting, Swarm, write_corpus
from tests.integration.processes import Lab

Say = Callable[[str], None]

PROGRESS = 30.0
"""Seconds between two progress lines."""


@dataclass
class Stage:
    """Where runs take place: ``folder`` keeps logs and metrics, ``say`` takes lines for people."""

    folder: Path
    say: Say

    @contextlib.contextmanager
    def swarm(self, setting: Setting, name: str = "run") -> Iterator[Swarm]:
        """A swarm that has begun to start; nothing of it is left behind, however its user ends."""
        folder = self.folder / name
        folder.mkdir()
        temp = Path(tempfile.mkdtemp(prefix="lab-"))
        links = Links()
        lab = Lab(folder, temp, f"{links.name}-{name}-", write_corpus(folder))
        swarm = Swarm(setting, lab, links)
        try:
            links.open()
            self.say(
                f"starting {setting.peers} peers: {setting.rounds} rounds, one about every {setting.interval:.1f} s, "
                f"a cycle of {setting.cycle:.0f} s; steps are padded to {setting.pace:g} s (emulated device time)"
            )
            swarm.start()
            yield swarm
        finally:
            try:
                swarm.close()
            except AssertionError as error:
                self.say(f"WARNING processes had to be killed: {str(error).splitlines()[0]}")
            finally:
                links.close()
                shutil.rmtree(temp, ignore_errors=True)

    def follow(self, swarm: Swarm, injector: Injector | None, *, done: Callable[[], bool], limit: float) -> bool:
        """Watch until ``done()``, carrying out faults; False if ``limit`` seconds were not enough."""
        end, said, began = time.monotonic() + limit, time.monotonic(), time.monotonic()
        while not done():
            if time.monotonic() > end:
                return False
            if injector is not None:
                injector.step()
            swarm.poll()
            if time.monotonic() - said >= PROGRESS:
                said = time.monotonic()
                self.say(f"{said - began:5.0f} s  {progress(swarm.story(), injector)}")
            time.sleep(0.2)
        return True

    def pass_cycles(self, swarm: Swarm, cycles: int) -> None:
        """Wait until so many cycles have passed on every peer: a side that commits nothing keeps its interval."""
        setting = swarm.setting
        begin = {name: node.round for name, node in swarm.nodes.items()}
        more = cycles * setting.fragments

        def passed() -> bool:
            return all(node.ended or node.round >= begin[name] + more for name, node in swarm.nodes.items())

        self.follow(swarm, None, done=passed, limit=4 * cycles * setting.cycle)

    def part(self, swarm: Swarm, names: Collection[str], *, limit: float) -> bool:
        """End a run that has no last round: when ``names`` hold equal chains, all are asked to leave at once.

        False if they were not equal within ``limit`` seconds; then they leave all the same.
        """
        equal = self.follow(swarm, None, done=lambda: len({swarm.nodes[n].tips() for n in names}) == 1, limit=limit)
        swarm.ask_to_leave()
        self.follow(swarm, None, done=lambda: all(node.ended for node in swarm.nodes.values()), limit=20)
        return equal

    def finish(self, swarm: Swarm, injector: Injector | None = None) -> Story:
        """Wait until the nodes have ended by themselves after the last round; the story of the run."""
        setting = swarm.setting
        left = max(0, setting.rounds - swarm.last_round())
        if not self.follow(swarm, injector, done=lambda: swarm.all_ended, limit=left * setting.interval * 1.5 + 120):
            late = [node.name for node in swarm.nodes.values() if not node.ended]
            self.say(f"WARNING these did not end by themselves after the last round: {', '.join(late)}")
            if injector is not None:
                injector.end_all()
            swarm.ask_to_leave()
            self.follow(swarm, None, done=lambda: all(node.ended for node in swarm.nodes.values()), limit=15)
        return swarm.story()


def progress(story: Story, injector: Injector | None) -> str:
    """One line: rounds, peers, faults."""
    when, by = departures(story), committed(story)
    running = sum(code is None for code in story.exits.values())
    line = (
        f"round {max(when, default=-1) + 1} of {story.rounds}: {len(by)} committed, "
        f"{sum(number not in by for number in when)} not; {running} of {len(story.peers)} processes up"
    )
    if injector is None:
        return line
    ended = [(hit, victim) for hit in story.hits if hit.end is not None for victim in hit.victims]
    recovered = sum(recovery(story, hit, victim, when=when, by=by) is not None for hit, victim in ended)
    going = ", ".join(f"{hit.fault} {'+'.join(hit.victims)}" for hit in injector.going)
    return f"{line}; {len(story.hits)} faults, {recovered} of {len(ended)} victims back; now {going or 'none'}"
