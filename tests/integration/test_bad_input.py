"""What a person can get wrong: one clear paragraph on standard error, exit code not 0, never a traceback.

All commands of this file start together and each test looks at one: most of their time is imports.
"""

import dataclasses
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.protocol.config import RunConfig
from stretto.protocol.invite import Invite
from tests.integration.processes import Lab, Process, free_port, micro_run

HOST_ID = "12D3KooWCRNgXTuTXUUUYuQJ8AFnSW4wd31CgLXLnnkyVFrfuhjx"

CASES: dict[str, tuple[str, ...]] = {
    "unknown key": (r"bad-key\.toml", r"unknown key outer\.innersteps", r"valid are .*outer\.inner_steps"),
    "tau too long": (r"tau\.toml", r"outer\.tau_max is 40", r"less than outer\.inner_steps \(H = 40\)"),
    "no such run file": (r"nosuch\.toml cannot be read", r"stretto new"),
    "junk key": (r"junk\.key",),
    "empty key": (r"empty\.key",),
    "folder as key": (r"folder\.key",),
    "identity in use": (r"node/identity\.key is in use by process \d+",),
    "port in use": (r"Port \d+ is already in use by process \d+", r"--port"),
    "bootstrap port in use": (r"Port \d+ is already in use by process \d+", r"--port"),
    "invite with a bad character": (r"invite has '!' at position \d+",),
    "invite cut short": (r"invite 'stretto:\w+\.\.\.\w+' has a typing error or is cut short",),
    "no invite": (r"invite 'hello' does not start with 'stretto:'",),
    "address family": (r"address '/ip/10\.0\.0\.1/tcp/1/p2p/Q'", r"'/ip' is no address family"),
    "blank in an address": (r"address '/ ip4/10\.0\.0\.1/tcp/1/p2p/Q' contains a blank",),
    "address without peer": (r"the part /p2p/PEER_ID is missing",),
    "announced port 0": (r"announce address '/ip4/203\.0\.113\.5/tcp/0'", r"a port that is not 0"),
    "bootstrap unreachable": (
        r"dialling the bootstrap: 0 of 1 bootstrap peers reachable",
        r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/12D3KooW\w+: connection refused",
        r"--join-timeout",
    ),
    "data missing": (r"/nosuch/text",),
    "other corpus": (r"corpus has fingerprint 0123456789abcdef", r"the one here [0-9a-f]{16}", r"same data"),
    "unknown variable": (r"STRETTO_MICROBATCH is unknown", r"valid are .*STRETTO_MICRO_BATCH"),
    "variable of a wrong type": (r"STRETTO_PORT is 'http', it must be a whole number",),
    "unknown device": (r"device 'cuda:7' is not available", r"this machine has cpu"),
    "other run expected": (
        r"expected\.toml",
        r"inner\.lr: 0\.003 != 0\.01",
        r"outer\.inner_steps: 40 != 80",
        r"seed: 0 != 1",
    ),
    "data dir nowhere": (r"data dir /nosuch/deep/dir cannot be made", r"--data-dir"),
    "no rounds": (r"--rounds is 0, it must be at least 1",),
}


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    """A port that this process holds."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture(scope="module")
def started(shared_lab: Lab, busy_port: int) -> dict[str, Process]:
    """All the commands, by case."""
    lab = shared_lab
    run = micro_run(lab.corpus)
    _, invite = lab.bootstrap(lab.write_run(run))
    node = lab.join(invite, "node")
    node.see("listening at")
    return {
        **_bad_runs(lab, run),
        **_bad_keys(lab, invite, busy_port),
        **_bad_addresses(lab, invite),
        **_bad_settings(lab, invite, run),
    }


def _bad_runs(lab: Lab, run: RunConfig) -> dict[str, Process]:
    text = run.to_toml()
    other = dataclasses.replace(run, data=dataclasses.replace(run.data, fingerprint="0123456789abcdef" * 4))
    missing = dataclasses.replace(run, data=dataclasses.replace(run.data, source="text:/nosuch/text"))
    files = {
        "unknown key": lab.write_run(text.replace("inner_steps", "innersteps"), "bad-key.toml"),
        "tau too long": lab.write_run(text.replace("tau_max = 5", "tau_max = 40"), "tau.toml"),
        "no such run file": lab.folder / "nosuch.toml",
    }
    _, other_invite = lab.bootstrap(lab.write_run(other, "other.toml"), "other")
    _, missing_invite = lab.bootstrap(lab.write_run(missing, "missing.toml"), "missing")
    return {
        **{case: lab.start("bad-run", "bootstrap", file) for case, file in files.items()},
        "other corpus": lab.join(other_invite, "other-corpus"),
        "data missing": lab.join(missing_invite, "no-data"),
    }


def _bad_keys(lab: Lab, invite: str, busy_port: int) -> dict[str, Process]:
    junk, empty, folder = (lab.folder / name for name in ("junk.key", "empty.key", "folder.key"))
    junk.write_text("junk\n", encoding="utf-8")
    junk.chmod(0o600)
    empty.touch(0o600)
    folder.mkdir()
    port = str(busy_port)
    return {
        "junk key": lab.join(invite, "junk", "--identity", junk),
        "empty key": lab.join(invite, "empty", "--identity", empty),
        "folder as key": lab.join(invite, "folder", "--identity", folder),
        "identity in use": lab.join(invite, "twin", "--identity", lab.folder / "node" / "identity.key"),
        "port in use": lab.join(invite, "busy", "--port", port),
        "bootstrap port in use": lab.start(
            "busy-bootstrap", "bootstrap", lab.folder / "run.toml", "--data-dir", lab.folder / "busy-bootstrap",
            "--host", "127.0.0.1", "--port", port,
        ),
    }  # fmt: skip


def _bad_addresses(lab: Lab, invite: str) -> dict[str, Process]:
    parsed = Invite.parse(invite)
    dead = Invite(parsed.run, parsed.operator, (f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{HOST_ID}",))
    run = lab.folder / "run.toml"

    def with_peer(address: str) -> Process:
        return lab.start("bad-peer", "bootstrap", run, "--peer", address)

    return {
        "invite with a bad character": lab.start("bad", "join", invite[:20] + "!" + invite[21:]),
        "invite cut short": lab.start("bad", "join", invite[:-8]),
        "no invite": lab.start("bad", "join", "hello"),
        "address family": with_peer("/ip/10.0.0.1/tcp/1/p2p/Q"),
        "blank in an address": with_peer("/ ip4/10.0.0.1/tcp/1/p2p/Q"),
        "address without peer": with_peer("/ip4/10.0.0.1/tcp/1"),
        "announced port 0": lab.join(invite, "announce", "--announce", "/ip4/203.0.113.5/tcp/0"),
        "bootstrap unreachable": lab.join(str(dead), "unreachable", "--join-timeout", "5"),
    }


def _bad_settings(lab: Lab, invite: str, run: RunConfig) -> dict[str, Process]:
    expected = dataclasses.replace(
        run,
        seed=1,
        inner=dataclasses.replace(run.inner, lr=0.01),
        outer=dataclasses.replace(run.outer, inner_steps=80),
    )
    return {
        "unknown variable": lab.start("bad", "join", invite, variables={"STRETTO_MICROBATCH": "4"}),
        "variable of a wrong type": lab.start("bad", "join", invite, variables={"STRETTO_PORT": "http"}),
        "unknown device": lab.join(invite, "device", "--device", "cuda:7"),
        "other run expected": lab.join(invite, "expect", "--expect", lab.write_run(expected, "expected.toml")),
        "data dir nowhere": lab.start("bad", "join", invite, "--data-dir", "/nosuch/deep/dir"),
        "no rounds": lab.start("bad", "demo", "--rounds", "0"),
    }


@pytest.mark.parametrize("case", CASES)
def test_one_paragraph_names_the_fault(started: dict[str, Process], case: str) -> None:
    process = started[case]
    assert process.exit_code() == 1, process.tail()
    paragraph = process.errors
    assert paragraph.startswith("error: "), paragraph
    assert paragraph.endswith("\n")
    assert "\n\n" not in paragraph
    assert "Traceback" not in process.text
    assert "internal error" not in paragraph
    assert len(paragraph) < 1500
    sentence = " ".join(paragraph.split())
    for pattern in CASES[case]:
        assert re.search(pattern, sentence), f"{pattern} is not in {sentence}"


def test_every_case_is_started(started: dict[str, Process]) -> None:
    assert started.keys() == CASES.keys()


def test_the_holder_of_the_port_is_named(started: dict[str, Process], busy_port: int) -> None:
    for case in ("port in use", "bootstrap port in use"):
        assert started[case].exit_code() == 1
        sentence = " ".join(started[case].errors.split())
        assert f"Port {busy_port} is already in use by process {os.getpid()} " in sentence


def test_the_holder_of_the_key_is_named(started: dict[str, Process], shared_lab: Lab) -> None:
    assert started["identity in use"].exit_code() == 1
    (node,) = (process for process in shared_lab.processes if process.name == "node")
    assert f"in use by process {node.popen.pid} " in " ".join(started["identity in use"].errors.split())


def test_a_node_says_when_it_dials_again(started: dict[str, Process]) -> None:
    process = started["bootstrap unreachable"]
    process.exit_code()
    assert re.search(r"0 of 1 bootstrap peers reachable \(.*connection refused\), next try in 2 s", process.text)


def test_key_files_are_never_overwritten(started: dict[str, Process], shared_lab: Lab) -> None:
    for case in ("junk key", "empty key", "folder as key"):
        started[case].exit_code()
    folder: Path = shared_lab.folder
    assert (folder / "junk.key").read_text(encoding="utf-8") == "junk\n"
    assert (folder / "empty.key").read_bytes() == b""
    assert list((folder / "folder.key").iterdir()) == []


def test_flags_that_do_not_exist_show_the_usage(shared_lab: Lab) -> None:
    process = shared_lab.run("join", "--nosuch")
    assert process.popen.returncode == 2
    assert "No such option: --nosuch" in process.errors
    assert "Traceback" not in process.text
