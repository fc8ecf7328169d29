"""A machine and a line as the planner takes them, and where each of their numbers comes from.

What is given beats what was measured, and that beats the table of cards; a person is told which of them it was. A
download that was timed is a lower bound of the line anyway, since the peers' own lines may have been slower.
"""

import re
from dataclasses import dataclass, field

from stretto.node.gpus import find_gpu
from stretto.protocol.errors import ConfigError
from stretto.protocol.planner.home import Machine

DEFAULT_UP = 10e6
"""bit/s that a node reckons with before it has sent anything, see ``stretto.node.swarm.line``."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine and a line, and what about them was assumed or measured, in words."""

    name: str
    machine: Machine
    assumed: tuple[str, ...] = field(default=())
    measured: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a person said on the command line. TFLOP/s, GB (10^9 bytes), DOWN/UP in Mbit/s, seconds."""

    gpu: str | None = None
    tflops: float | None = None
    memory: float | None = None
    link: str | None = None
    rtt: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--tflops", self.tflops), ("--memory", self.memory)):
            if value is not None and not 0 < value < 1e6:
                raise ConfigError(f"{name} is {value}, it must be above 0 and below a million")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What ``--measure`` found of the device."""

    device: str
    flops: float
    """6 N K / T of the measured step."""
    memory: float
    """Bytes that the device has."""
    words: str


@dataclass(frozen=True, kw_only=True)
class LineTiming:
    """What ``--measure INVITE`` found of the line."""

    down: float
    """bit/s of a download from the run's peers."""
    rtt: float
    """Seconds there and back, the least of some."""
    words: str


RTT = 0.1
"""Seconds there and back when nothing is known."""


def parse_link(text: str) -> tuple[float, float]:
    """``DOWN/UP`` in Mbit/s, such as 100/20, as bit/s. ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*/\s*(\d{1,9}(?:\.\d{1,6})?)\s*", text, re.ASCII)
    if match is None or not float(match[1]) or not float(match[2]):
        raise ConfigError(f"--link is {text!r}, it must be DOWN/UP in Mbit/s, both above 0, such as 100/20")
    return float(match[1]) * 1e6, float(match[2]) * 1e6


def make_place(given: Given, timing: Timing | None = None, line: LineTiming | None = None) -> Place:
    """The machine and line to plan for. ConfigError says what is missing."""
    gpu = find_gpu(given.gpu) if given.gpu is not None else None
    assumed: list[str] = []
    if given.tflops is not None:
        flops = given.tflops * 1e12
        assumed.append(f"{given.tflops:g} TFLOP/s, as given")
    elif timing is not None:
        flops = timing.flops
    elif gpu is not None:
        flops = gpu.tflops * 1e12
        assumed.append(
            f"{gpu.name} sustains {flops / 1e12:.3g} TFLOP/s, half of its dense 16-bit peak. This version of Stretto "
            "trains in FP32, which is slower: --measure on the machine itself tells"
        )
    else:
        raise ConfigError("say which card: --gpu NAME, or --tflops (sustained in training) and --memory (GB)")
    if given.memory is not None:
        memory = given.memory * 1e9
    elif timing is not None:
        memory = timing.memory
    elif gpu is not None:
        memory = gpu.memory_gb * 1e9
    else:
        raise ConfigError("say how much memory the device has: --memory (GB)")
    if given.link is not None:
        down, up = parse_link(given.link)
    elif line is not None:
        down, up = line.down, DEFAULT_UP
        assumed.append(
            f"an uplink of {DEFAULT_UP / 1e6:g} Mbit/s: a visitor has nothing that peers would take from it, so an "
            "uplink is measured only while a node takes part in rounds. Give your own with --link DOWN/UP"
        )
    else:
        raise ConfigError("say which line: --link DOWN/UP in Mbit/s, such as --link 100/20")
    rtt = given.rtt if given.rtt is not None else line.rtt if line is not None else RTT
    name = timing.device if timing is not None else gpu.name if gpu is not None else "a device of your own"
    return Place(
        name=name,
        machine=Machine(flops=flops, memory=memory, down=down, up=up, rtt=rtt),
        assumed=tuple(assumed),
        measured=tuple(found.words for found in (timing, line) if found is not None),
    )
