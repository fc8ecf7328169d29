"""The node config: its three sources, which of them wins, and every way to be told what is wrong."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stretto.node.config import NodeConfig, default_data_dir, describe, load_node_config, refuse_ranks
from stretto.protocol.errors import ConfigError


def load(
    tmp_path: Path, toml: str | None = None, flags: dict[str, Any] | None = None, **environment: str
) -> NodeConfig:
    file = None
    if toml is not None:
        file = tmp_path / "node.toml"
        file.write_text(toml, encoding="utf-8")
    return load_node_config(flags or {}, environment=environment, file=file)


def test_without_sources_it_is_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, HOME="/somewhere", PATH="/bin")
    assert config == NodeConfig()
    assert config.data_dir == default_data_dir()
    assert config.data_dir.is_absolute()
    assert config.key_file == default_data_dir() / "identity.key"
    assert config.tau is None


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path) -> None:
    toml = "micro_batch = 1\nport = 1001\nthreads = 1\n"
    config = load(
        tmp_path,
        toml,
        {"micro_batch": 3, "port": None, "threads": None},
        STRETTO_MICRO_BATCH="2",
        STRETTO_PORT="1002",
    )
    assert (config.micro_batch, config.port, config.threads) == (3, 1002, 1)


def test_each_type_is_read_from_each_source(tmp_path: Path) -> None:
    wanted = {
        "data_dir": Path("/data/dir"),
        "tau": 3,
        "client_mode": True,
        "join_timeout": 2.0,
        "announce": ("/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/tcp/4002"),
        "device": "cpu",
    }
    toml = (
        'data_dir = "/data/dir"\ntau = 3\nclient_mode = true\njoin_timeout = 2\ndevice = "cpu"\n'
        'announce = ["/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/tcp/4002"]\n'
    )
    from_file = load(tmp_path, toml)
    from_environment = load(
        tmp_path,
        STRETTO_DATA_DIR="/data/dir",
        STRETTO_TAU="3",
        STRETTO_CLIENT_MODE="yes",
        STRETTO_JOIN_TIMEOUT="2",
        STRETTO_DEVICE="cpu",
        STRETTO_ANNOUNCE="/ip4/203.0.113.5/tcp/4001,/ip4/203.0.113.5/tcp/4002",
    )
    from_flags = load(tmp_path, flags={**wanted, "announce": list(wanted["announce"])})  # type: ignore[call-overload]
    for config in (from_file, from_environment, from_flags):
        assert {name: getattr(config, name) for name in wanted} == wanted
    assert type(from_file.join_timeout) is float


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("YES", True), ("0", False), ("False", False), ("no", False)]
)
def test_switches_in_the_environment(tmp_path: Path, text: str, value: bool) -> None:
    assert load(tmp_path, STRETTO_NEW_RUN=text).new_run is value


def test_paths_are_absolute_from_wherever_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(tmp_path, flags={"data_dir": Path("here")}).data_dir == tmp_path / "here"
    assert load(tmp_path, STRETTO_DATA_DIR="~/there").data_dir == Path("/home/somebody/there")
    config = load(tmp_path, 'identity = "my.key"')
    assert config.key_file == tmp_path / "my.key"


def test_the_debug_variable_belongs_to_the_command_line(tmp_path: Path) -> None:
    assert load(tmp_path, STRETTO_DEBUG="1") == NodeConfig()


def test_an_unknown_variable_lists_all_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, STRETTO_MICROBATCH="4")
    text = str(caught.value)
    assert text.startswith("environment variable STRETTO_MICROBATCH is unknown; valid are ")
    named = text.split("valid are ")[1].split(", ")
    assert named == [f"STRETTO_{item.name.upper()}" for item in dataclasses.fields(NodeConfig)]


def test_an_unknown_key_names_the_file_and_lists_all_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "micro_batch = 2\nmicrobatch = 4\nprot = 1\n")
    text = str(caught.value)
    assert str(tmp_path / "node.toml") in text
    assert "unknown keys microbatch, prot;" in text
    assert text.split("valid are ")[1].split(", ") == [item.name for item in dataclasses.fields(NodeConfig)]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('port = "4001"', "port is '4001', it must be of type int"),
        ("port = true", "port is True, it must be of type int"),
        ("port = 1.5", "port is 1.5, it must be of type int"),
        ("device = 1", "device is 1, it must be of type str"),
        ("client_mode = 1", "client_mode is 1, it must be of type bool"),
        ('announce = "/ip4/1.2.3.4/tcp/1"', "announce must be a list of texts"),
        ("announce = [1]", "announce must be a list of texts"),
        ("port = ", "is not valid TOML"),
    ],
)
def test_a_wrong_type_in_a_file_is_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STRETTO_PORT": "http"}, "STRETTO_PORT is 'http', it must be a whole number"),
        ({"STRETTO_PORT": "1.5"}, "STRETTO_PORT is '1.5', it must be a whole number"),
        ({"STRETTO_TAU": ""}, "STRETTO_TAU is '', it must be a whole number"),
        ({"STRETTO_JOIN_TIMEOUT": "soon"}, "STRETTO_JOIN_TIMEOUT is 'soon', it must be a number"),
        ({"STRETTO_CLIENT_MODE": "maybe"}, "STRETTO_CLIENT_MODE is 'maybe', it must be 1 or 0"),
    ],
)
def test_a_wrong_type_in_the_environment_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_node_config({}, environment=variables)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"micro_batch": 0}, "micro_batch is 0, it must be at least 1"),
        ({"threads": -1}, "threads is -1"),
        ({"port": 65536}, "port is 65536, it must be in 0..65535"),
        ({"tau": -1}, "tau is -1"),
        ({"start_peers": 0}, "start_peers is 0"),
        ({"lockstep": -1}, "lockstep is -1"),
        ({"lockstep": 4}, "lockstep needs a fixed overlap: give tau as well"),
        ({"rounds": -1}, "rounds is -1"),
        ({"join_timeout": -1.0}, "join_timeout is -1.0"),
        ({"seconds_per_status": 31.0}, "nothing runs in silence"),
        ({"pace": -0.1}, "pace is -0.1, it must be in 0..600 seconds"),
        ({"pace": float("nan")}, "pace is nan"),
        ({"pace": 601.0}, "pace is 601.0"),
        ({"max_connections": 7}, "max_connections is 7, it must be at least 8, or 0 for no limit"),
        ({"max_connections": -1}, "max_connections is -1"),
        ({"monthly_cap": "999kB"}, "monthly_cap is '999kB', it must be at least 1MB, or 0 for no cap"),
        ({"monthly_cap": "much"}, "monthly_cap is 'much', it must be an amount of bytes"),
        ({"announce": ["/ip4/203.0.113.5/tcp/0"]}, "'/ip4/203.0.113.5/tcp/0' is not of the form"),
        ({"announce": ["203.0.113.5:4001"]}, "'203.0.113.5:4001' is not of the form"),
    ],
)
def test_values_that_cannot_work_are_named(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, flags=flags)
    assert message in str(caught.value)


def test_the_pace_comes_from_every_source(tmp_path: Path) -> None:
    assert load(tmp_path).pace == 0.0
    assert load(tmp_path, "pace = 1\n").pace == 1.0
    assert load(tmp_path, "pace = 1\n", STRETTO_PACE="0.5").pace == 0.5
    assert load(tmp_path, None, {"pace": 0.25}, STRETTO_PACE="0.5").pace == 0.25


def test_limits_of_the_line_come_from_every_source(tmp_path: Path) -> None:
    toml = 'monthly_cap = "1.5GB"\nmax_connections = 20\n'
    from_file = load(tmp_path, toml)
    from_environment = load(tmp_path, STRETTO_MONTHLY_CAP="1500MB", STRETTO_MAX_CONNECTIONS="20")
    from_flags = load(tmp_path, flags={"monthly_cap": "1.5 GB", "max_connections": 20})
    for config in (from_file, from_environment, from_flags):
        assert (config.monthly_bytes, config.max_connections) == (1_500_000_000, 20)
    assert (NodeConfig().monthly_bytes, NodeConfig().max_connections) == (0, 0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for file in (tmp_path / "nosuch.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_node_config({}, environment={}, file=file)
        assert str(caught.value).startswith(f"node config {file} cannot be read")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'device = "\xe4"')
    with pytest.raises(ConfigError, match=r"latin\.toml cannot be read"):
        load_node_config({}, environment={}, file=latin)


def test_a_node_is_one_process() -> None:
    """Case R4: under a launcher every local process would be a peer that averages over the internet."""
    refuse_ranks({})
    refuse_ranks({"LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    refuse_ranks({"WORLD_SIZE": "8"})  # of a job that this is not part of
    with pytest.raises(ConfigError, match=r"has started 2 processes of this node.*--data-dir, --port and --device"):
        refuse_ranks({"LOCAL_RANK": "1", "WORLD_SIZE": "2"})


def test_the_invite_may_stand_in_the_environment(tmp_path: Path) -> None:
    assert load(tmp_path, STRETTO_INVITE="@/invite/invite") == NodeConfig()


def test_a_config_can_be_described() -> None:
    text = describe(NodeConfig(port=4001))
    assert text["port"] == "4001"
    assert text.keys() == {item.name for item in dataclasses.fields(NodeConfig)}
