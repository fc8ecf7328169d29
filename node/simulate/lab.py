"""The work of ``stretto simulate``: which runs there are, doing those that are missing, and writing what came of them.

Into the folder go ``results.jsonl`` (one run per line, kept by a command that is interrupted), ``table.md`` and
``charts.png``; the last two are made again after each run, so there is something to look at all the time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.node.plots import draw_terminal, save_png
from stretto.node.simulate.config import METHODS, SimConfig
from stretto.node.simulate.jobs import Task, run_all
from stretto.node.simulate.recipes import Case, Recipe, get_recipe
from stretto.node.simulate.report import charts, check, goal_text, markdown, plain, table
from stretto.node.simulate.results import Results
from stretto.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """What was asked for."""

    recipe: str = ""
    methods: Sequence[str] = ()
    """Without a recipe: these, the first is what the others are compared with."""
    settings: Mapping[str, Any]
    """Knobs of ``SimConfig``."""
    seeds: int = 1
    jobs: int = 1
    threads: int = 1
    out: Path
    command: str = "stretto simulate"

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"simulate: {name} is {getattr(self, name)}; write at least 1")


class Lab:
    """One command: its runs, and those that are done."""

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.recipe = get_recipe(config.recipe) if config.recipe else _comparison(config)
        first = int(config.settings.get("seed", 0))
        shared = config.settings if config.recipe else {}
        self.runs: list[tuple[Case, SimConfig]] = [
            run for seed in range(first, first + config.seeds) for run in self.recipe.configs(shared, seed)
        ]
        self.results = Results(config.out / "results.jsonl")

    def missing(self) -> list[Task]:
        """The runs that are not in the results file, each once, whatever its label."""
        tasks = {config.key(): Task(case.label, config) for case, config in self.runs}
        return [task for key, task in tasks.items() if key not in self.results.by_key]

    def finished(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Results by case label and seed."""
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for case, config in self.runs:
            if config.key() in self.results.by_key:
                runs.setdefault(case.label, {})[config.seed] = self.results.by_key[config.key()]
        return runs

    def work(self, say: Callable[[str], object]) -> None:
        """Do what is missing."""
        tasks = self.missing()
        done = len({config.key() for _, config in self.runs}) - len(tasks)
        kept = f" ({done} are done already)" if done else ""
        say(f"{len(tasks)} runs, {self.config.jobs} at a time, results in {self.config.out}{kept}")
        c = self.config
        for result in run_all(tasks, jobs=c.jobs, threads=c.threads, folder=c.out, say=say):
            self.results.add(result)
            loss = f"diverged: {result['diverged']}" if result["loss"] is None else f"loss {result['loss']:.4f}"
            say(f"{result['label']}, seed {result['settings']['seed']}: {loss}, {result['seconds']:.0f} s of CPU")
            self.write(draw=False)

    def write(self, *, draw: bool) -> list[str]:
        """Write table and charts of what is finished; returns remarks."""
        runs = self.finished()
        if not runs:
            return []
        try:
            (self.config.out / "table.md").write_text(
                markdown(self.recipe, runs, self.config.command), encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"the table cannot be written to {self.config.out}: {error.strerror}") from None
        pictures = charts(self.recipe, runs)
        if not draw or not pictures:
            return []
        try:
            save_png(pictures, self.config.out / "charts.png")
        except ConfigError as error:  # the numbers are there; a picture needs an optional library
            return [f"no charts: {error}"]
        return []

    def summary(self) -> dict[str, Any]:
        """Everything for a machine."""
        runs = self.finished()
        return {
            "recipe": self.recipe.name,
            "folder": str(self.config.out),
            "runs": [result for of_seed in runs.values() for result in of_seed.values()],
            "goals": [found for goal in self.recipe.goals if (found := check(goal, runs))],
        }

    def text(self, width: int) -> str:
        """Table, goals and one chart for people."""
        runs = self.finished()
        parts = [plain(table(self.recipe.cases, runs))]
        parts += [goal_text(found) for goal in self.recipe.goals if (found := check(goal, runs))]
        pictures = charts(self.recipe, runs)
        if pictures:
            try:
                parts.append(draw_terminal(pictures[0], min(width, 110), 22))
            except ConfigError as error:
                parts.append(f"no charts: {error}")
        return "\n".join(parts)


def _comparison(config: LabConfig) -> Recipe:
    """A recipe of the methods that were named; knobs that were given take the place of the methods' own."""
    unknown = [name for name in config.methods if name not in METHODS]
    if unknown:
        raise ConfigError(f"simulate: there is no method {unknown[0]!r}; choose one of {', '.join(METHODS)}")
    cases = [Case(name, name, config.settings) for name in dict.fromkeys(config.methods)]
    return Recipe("methods", ", ".join(config.methods), cases)
