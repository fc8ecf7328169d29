"""What can be said of docker/ without docker: the files parse, fit together, and name only what exists."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from stretto.node.cli import app
from stretto.node.config import load_node_config

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = ("compose.yaml", "compose.public.yaml", "compose.chaos.yaml", "volunteer.yaml", "volunteer.gpu.yaml")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
DEFAULT = re.compile(r"\$\{(\w+)(?::?-([^}]*)|:?\?[^}]*)?\}")


def services(file: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / file).read_text(encoding="utf-8"))["services"])


def filled(text: Any) -> str:
    """A value with the defaults of its variables; those that a person must set are 1."""
    return DEFAULT.sub(lambda match: match[2] if match[2] is not None else "1", str(text))


def settings(service: dict[str, Any]) -> dict[str, str]:
    return {name: filled(value) for name, value in service.get("environment", {}).items()}


def options_of(words: list[str]) -> None:
    """Each word of a command line of ours is a command, one of its options, or a value."""
    assert words[0] == "stretto", words
    command = COMMANDS[words[1]]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words[2:] if word.startswith("-")} <= known, words


@pytest.mark.parametrize("file", COMPOSE)
def test_every_setting_in_a_compose_file_is_one_that_a_node_knows(file: str) -> None:
    for name, service in services(file).items():
        found = settings(service)
        if "PUBLIC_IP" in str(service):
            found["STRETTO_ANNOUNCE"] = found["STRETTO_ANNOUNCE"].replace("/ip4/1/", "/ip4/203.0.113.5/")
        config = load_node_config({}, environment=found)
        assert all(address.startswith(("/dns4/", "/ip4/")) for address in config.announce), name


@pytest.mark.parametrize("file", COMPOSE)
def test_variables_of_compose_files_are_not_settings(file: str) -> None:
    """Somebody who exports one for compose would find `stretto join` refusing it."""
    names = {match[1] for match in DEFAULT.finditer((DOCKER / file).read_text(encoding="utf-8"))}
    assert names, file
    assert not [name for name in names if name.startswith("STRETTO_")]


def test_no_two_services_publish_one_port() -> None:
    """Of all files together: whatever is started beside whatever else (case A4)."""
    ports = [
        filled(port) for file in COMPOSE for service in services(file).values() for port in service.get("ports", ())
    ]
    outside = Counter(port.split(":")[0] for port in ports)
    assert outside == dict.fromkeys(("4001", "4002", "4011", "4012", "4013", "4014"), 1)
    assert {port.split(":")[1] for port in ports} == {"4001"}


def test_the_local_swarm_is_one_bootstrap_and_four_nodes_that_share_nothing_but_the_invite() -> None:
    found = services("compose.yaml")
    assert sorted(found) == ["bootstrap", "node1", "node2", "node3", "node4"]
    volumes = [volume for service in found.values() for volume in service["volumes"]]
    data = [volume for volume in volumes if volume.endswith(":/data")]
    assert len(set(data)) == 5
    assert sorted(set(volumes) - set(data)) == ["invite:/invite", "invite:/invite:ro"]
    founders = [name for name, service in found.items() if service["environment"].get("STRETTO_NEW_RUN")]
    assert founders == ["node1"]
    for name, service in found.items():
        assert settings(service)["STRETTO_ANNOUNCE"] == f"/dns4/{name}/tcp/4001"


@pytest.mark.parametrize("file", ["compose.yaml", "volunteer.yaml"])
def test_every_peer_is_told_to_end_in_time_and_may_write_its_data_only(file: str) -> None:
    for service in services(file).values():
        assert service["init"] is True
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["shm_size"] == "256m"
        assert service["stop_grace_period"] in ("2m", "10m")
        assert len([volume for volume in service["volumes"] if volume.endswith(":/data")]) == 1
        assert "privileged" not in service
        assert "cap_add" not in service


def test_overlays_change_services_that_are_there() -> None:
    base, volunteer = set(services("compose.yaml")), set(services("volunteer.yaml"))
    assert set(services("compose.public.yaml")) == base
    assert {name for name in services("compose.chaos.yaml") if not name.startswith("line")} == base - {"bootstrap"}
    assert set(services("volunteer.gpu.yaml")) == volunteer
    for name, service in services("compose.chaos.yaml").items():
        # Who shapes a line has the right to; who trains behind it has not.
        assert ("NET_ADMIN" in service.get("cap_add", ())) is name.startswith("line")
        if name.startswith("line"):
            assert service["network_mode"] == f"service:{name.replace('line', 'node')}"


def test_commands_in_the_files_exist() -> None:
    shell = services("compose.yaml")["bootstrap"]["command"][0]
    for line in re.findall(r"(?:\|\| |exec )(stretto[^;]*)", shell):
        options_of(line.split())
    assert shell.count("stretto") == 2
    for file in ("compose.yaml", "volunteer.yaml"):
        for name, service in services(file).items():
            if name != "bootstrap":
                options_of(["stretto", *service["command"]])
    options_of(services("compose.yaml")["bootstrap"]["healthcheck"]["test"][1:])


def dockerfile_stages() -> dict[str, list[str]]:
    """Instructions of node.Dockerfile by stage; the last one is called ''."""
    text = (DOCKER / "node.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stages: dict[str, list[str]] = {}
    name = "before"
    for line in text.splitlines():
        if line.startswith("FROM"):
            name = line.split(" AS ")[1] if " AS " in line else ""
        if line and not line.startswith("#"):
            stages.setdefault(name, []).append(line)
    return stages


def test_the_final_stage_takes_two_folders_and_nothing_of_the_build_machine() -> None:
    final = dockerfile_stages()[""]
    assert final[0] == "FROM ${BASE}"
    copies = [line for line in final if line.startswith(("COPY", "ADD"))]
    assert copies == [
        "COPY --from=dependencies /opt/venv /opt/venv",
        "COPY --from=program /opt/stretto /opt/stretto",
    ]
    assert not [line for line in final if "pip" in line or "apt-get" in line]
    assert final.index("USER 1000:1000") > final.index(copies[1])


def test_the_image_knows_its_settings_and_its_health_check() -> None:
    final = dockerfile_stages()[""]
    (environment,) = (line for line in final if line.startswith("ENV"))
    found = dict(re.findall(r"(STRETTO_\w+)=(\S+)", environment))
    config = load_node_config({}, environment=found)
    assert (config.data_dir, config.port) == (Path("/data"), 4001)
    (check,) = (line for line in final if line.startswith("HEALTHCHECK"))
    options_of(re.findall(r'"([^"]+)"', check))


def test_only_named_files_reach_the_builder() -> None:
    lines = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] not in ("#", "")
    ]
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    # Whatever pyproject.toml or setup.py read has to be there.
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "node", "protocol", "bootstrap"} <= set(
        allowed
    )


def test_the_service_unit_starts_a_command_that_exists_with_settings_that_exist() -> None:
    unit = (DOCKER / "stretto.service").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    program, *words = lines["ExecStart"].split()
    assert program.endswith("/bin/stretto")
    options_of(["stretto", *words])
    found = dict(re.findall(r"(STRETTO_\w+)=(\S+)", lines["Environment"]))
    config = load_node_config({}, environment=found)
    assert config.data_dir == Path("/var/lib") / lines["StateDirectory"]
    assert lines["KillMode"] == "mixed"
