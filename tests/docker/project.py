"""A compose project in the tests: started, asked, disturbed, and removed with all that it made."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docker.shell import Failed, run, until

DOCKER = Path(__file__).resolve().parents[2] / "docker"
COMPOSE = os.environ.get("COMPOSE", "docker-compose").split()
"""`COMPOSE='docker compose'` for another one than Debian 12's, which is version 1.29."""

LABEL = "com.docker.compose.project"


@dataclass
class Project:
    """``files`` are compose files in docker/; ``variables`` are for them."""

    name: str
    files: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *words: str, limit: float = 300.0, code: int | None = 0) -> str:
        """A command of docker-compose on this project."""
        files = [word for file in self.files for word in ("-f", str(DOCKER / file))]
        return run(
            [*COMPOSE, "-p", self.name, *files, *words],
            limit=limit,
            code=code,
            env={**os.environ, **self.variables},
        )

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        found = run(
            ["docker", "ps", "-aq", "--filter", f"label={LABEL}={self.name}",
             "--filter", f"label=com.docker.compose.service={service}"]
        ).split()  # fmt: skip
        if len(found) != 1:
            raise Failed(f"service {service} of {self.name} has {len(found)} containers")
        return found[0]

    def state(self, service: str) -> dict[str, Any]:
        """What docker says of a service's container: its ``State``."""
        return dict(inspect(self.container(service))["State"])

    def health(self, service: str) -> str:
        """``starting``, ``healthy`` or ``unhealthy``; another state of the container if it does not run."""
        state = self.state(service)
        return str(state["Health"]["Status"] if state["Running"] else state["Status"])

    def status(self, service: str) -> dict[str, Any]:
        """What the program in a service's container says of itself; empty while it says nothing yet."""
        return status(self.container(service))

    def await_status(self, service: str, good: Any, what: str, *, limit: float) -> dict[str, Any]:
        """The first status of a service for which ``good(status)`` is true."""

        def look() -> dict[str, Any] | None:
            found = self.status(service)
            return found if found and good(found) else None

        return until(look, f"{self.name}/{service}: {what}", limit=limit, logs=self.logs) or {}

    def logs(self) -> str:
        """The end of every container's log."""
        return self.compose("logs", "--no-color", "--tail=25", code=None)

    def down(self) -> None:
        """Remove containers, networks and volumes. Failed if something is left."""
        self.compose("down", "-v", "--remove-orphans", "-t", "20", limit=300)
        left = leftovers(self.name)
        if left:
            raise Failed(f"`down` left this of {self.name}: {', '.join(left)}")


def status(container: str) -> dict[str, Any]:
    """What the program in a container says of itself; empty while it says nothing yet.

    The file that `stretto status` reads, as it is: starting Python every second would take from a busy machine what is
    to be tested. That the command reads it well is what each health check shows.
    """
    text = run(["docker", "exec", container, "cat", "/data/status.json"], code=None, limit=120)
    return dict(json.loads(text)) if text.startswith("{") else {}


def inspect(thing: str) -> dict[str, Any]:
    """`docker inspect`."""
    return dict(json.loads(run(["docker", "inspect", thing]))[0])


def stop(container: str, *, grace: int) -> tuple[float, int]:
    """`docker stop` with so many seconds until the kill; how long it took, and the exit code."""
    began = time.monotonic()
    run(["docker", "stop", "-t", str(grace), container], limit=grace + 60)
    return round(time.monotonic() - began, 1), int(inspect(container)["State"]["ExitCode"])


def leftovers(project: str) -> list[str]:
    """Containers, networks and volumes that a project still has."""
    found = []
    for kind, command in (
        ("container", ["ps", "-aq"]),
        ("network", ["network", "ls", "-q"]),
        ("volume", ["volume", "ls", "-q"]),
    ):
        names = run(["docker", *command, "--filter", f"label={LABEL}={project}"]).split()
        found += [f"{kind} {name}" for name in names]
    return found
