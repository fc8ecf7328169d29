"""Who may import what: the import rules of the tree, read from the source and not from a running program.

    bootstrap --> node.swarm --> protocol        protocol: values in, values out
    node ---------------------^

- `protocol` imports neither `node` nor `bootstrap`, nor anything that reaches a socket, a thread, a clock, a file, the
  environment or a log.
- `node` imports `protocol`; `bootstrap` imports `protocol` and, of `node`, what EDGES lists.
- Each outside library has home files (HOMES); a library that is not in the table fails by name.
- hivemind and libp2p register the same protobuf package, so no file may bring both into one process, not even through
  other files. libp2p's home runs as a process of its own and is imported by nobody.
- Nothing that unpickles is used: a file or a peer could run code with it.
- Nothing of the standard library is used that Python 3.10 lacks (NEWER): the type checker sees only its own Python.

An import inside a function counts like any other. To allow something new, add one line to a table below, with its
reason. The checks are functions of `(path, source)`, so that the last tests can show each of them a bad file.
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "node", "bootstrap")

# Package -> the parts of Stretto that it may import besides itself.
EDGES: dict[str, tuple[str, ...]] = {
    "protocol": (),
    "node": ("stretto.protocol",),
    # node.swarm: what a peer that trains and one that does not both need of hivemind (DHT, identity, roster, streams).
    # node.console, node.ports: how a program of Stretto talks to people and refuses a busy port.
    # node.statusfile: what it says of itself to a health check.
    "bootstrap": (
        "stretto.protocol",
        "stretto.node.swarm",
        "stretto.node.console",
        "stretto.node.ports",
        "stretto.node.statusfile",
    ),
}

# File -> what it may import besides, but only inside a function.
# node/cli.py mounts the bootstrap's commands under the one command `stretto`. Lazily, so that the node package also
# works where the bootstrap is not installed, and so that `stretto join` does not load a web page.
LAZY_EDGES: dict[str, tuple[str, ...]] = {
    "node/cli.py": ("stretto.bootstrap.cli",),
}

# Outside library (its import name) -> the files that may import it; `*` also matches `/`.
HOMES: dict[str, tuple[str, ...]] = {
    "base58": ("protocol/invite.py", "protocol/peerid.py", "node/swarm/*"),
    "blake3": ("protocol/digest.py",),
    "cryptography": ("node/swarm/identity.py",),
    "datasets": ("node/data/*",),
    "hivemind": ("node/swarm/*", "node/bench/*"),  # the benchmark times its codecs next to ours
    "huggingface_hub": ("node/model.py",),  # an error type of transformers' configs lies there
    "libp2p": ("node/doctor_probe.py",),
    "matplotlib": ("node/plots.py",),
    "msgpack": ("protocol/wire.py",),
    "multiaddr": ("node/doctor_probe.py",),
    "numpy": ("protocol/*", "node/*"),  # the arrays of codecs and token streams
    "platformdirs": ("node/config.py", "node/paths.py"),
    "plotext": ("node/plots.py",),
    "prometheus_client": ("node/metrics/*",),
    "rich": ("node/cli.py", "node/console.py", "node/demo.py", "bootstrap/cli.py"),
    "safetensors": ("node/checkpoint.py", "node/export.py"),
    "tensorboard": ("node/metrics/*",),
    "tokenizers": ("node/data/tokenizer.py", "node/export.py"),
    "tomli": (
        "protocol/config.py",
        "protocol/toml.py",
        "node/config.py",
        "node/simulate/config.py",
    ),  # tomllib, for Python 3.10
    "torch": ("protocol/*", "node/*"),  # not the bootstrap: it holds no weights
    "transformers": ("node/model.py", "node/data/tokenizer.py", "node/export.py"),
    "trio": ("node/doctor_probe.py",),
    "typer": ("node/cli*.py", "bootstrap/cli.py"),
    "uvloop": ("node/swarm/*",),
}

# Imported directly although pyproject.toml does not name it: import name -> the dependency whose interface it is.
COMES_WITH = {
    "huggingface_hub": "transformers",
    "multiaddr": "libp2p",
    "prometheus_client": "libp2p",
    "trio": "libp2p",
}

# Parts of the standard library that `protocol` must not touch, by what they would bring in.
NOT_IN_PROTOCOL: dict[str, str] = {
    **dict.fromkeys(("http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"), "sockets"),
    **dict.fromkeys(("asyncio", "concurrent", "multiprocessing", "queue", "signal", "subprocess"), "threads"),
    **dict.fromkeys(("_thread", "threading"), "threads"),
    **dict.fromkeys(("datetime", "sched", "time"), "the clock"),
    **dict.fromkeys(("fileinput", "glob", "mmap", "os", "pathlib", "shutil", "sqlite3", "tempfile"), "files"),
    **dict.fromkeys(("argparse", "getpass", "platform"), "the environment"),
    **dict.fromkeys(("secrets", "uuid"), "randomness without a seed"),
    "logging": "logging",
}
BUILTINS_NOT_IN_PROTOCOL = {"breakpoint": "the terminal", "input": "the terminal", "open": "files", "print": "logging"}

UNPICKLERS = frozenset({"cloudpickle", "cPickle", "dill", "joblib", "marshal", "pickle", "shelve"})

# Names that came with Python 3.11 or later -> what to write instead.
NEWER: dict[str, str] = {
    "asyncio.Barrier": "an asyncio.Condition",
    "asyncio.Runner": "asyncio.run, or a loop of one's own",
    "asyncio.TaskGroup": "asyncio.gather, or tasks that are awaited one by one",
    "asyncio.timeout": "asyncio.wait_for",
    "asyncio.timeout_at": "asyncio.wait_for",
    "BaseExceptionGroup": "the first error",
    "contextlib.chdir": "absolute paths",
    "datetime.UTC": "datetime.timezone.utc",
    "enum.StrEnum": "class X(str, Enum)",
    "ExceptionGroup": "the first error",
    "hashlib.file_digest": "a loop over update()",
    "itertools.batched": "slices",
    "math.cbrt": "x ** (1 / 3)",
    "math.exp2": "2.0 ** x",
    "math.sumprod": "sum(a * b for ...)",
    "operator.call": "the call itself",
    "typing.assert_never": "raise AssertionError",
    "typing.LiteralString": "str",
    "typing.Never": "typing.NoReturn",
    "typing.NotRequired": "total=False",
    "typing.override": "nothing",
    "typing.Self": "the class's name in quotes",
    "typing.Unpack": "the types one by one",
}

STDLIB = sys.stdlib_module_names | {"tomllib"}  # tomllib joined it in 3.11


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: `from a import b` gives `a.b`, `import a.b` gives `a.b`."""

    name: str
    line: int
    lazy: bool  # inside a function

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports_of(path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import in the file, relative ones made absolute, `importlib.import_module("x")` included."""
    inside_functions = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["stretto", *Path(path).parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif call_name(node) in ("importlib.import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            yield Import(name=name, line=node.lineno, lazy=node in inside_functions)


def call_name(call: ast.Call) -> str:
    """`torch.load` for `torch.load(...)`, "" for a call of anything but a dotted name."""
    return dotted(call.func)


def dotted(node: ast.expr) -> str:
    """The dotted name that the expression is, or ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_part(name: str, package: str) -> bool:
    """Whether the dotted `name` is `package` or lies inside it."""
    return name == package or name.startswith(package + ".")


# ---- the rules: (path relative to the repository, source) -> "file:line: what is wrong" ----


def edge_faults(path: str, source: str) -> Iterator[str]:
    """Imports between the three packages that EDGES and LAZY_EDGES do not allow."""
    package = path.partition("/")[0]
    for item in imports_of(path, ast.parse(source)):
        if item.top in PACKAGES:
            yield f"{path}:{item.line}: imports {item.name}, a second copy of the package: write stretto.{item.name}"
        if item.top != "stretto" or is_part(item.name, f"stretto.{package}"):
            continue
        if any(is_part(item.name, allowed) for allowed in EDGES[package]):
            continue
        if any(is_part(item.name, allowed) for allowed in LAZY_EDGES.get(path, ())):
            if item.lazy:
                continue
            yield f"{path}:{item.line}: may import {item.name} inside a function only (LAZY_EDGES)"
            continue
        yield f"{path}:{item.line}: {package} may not import {item.name} (EDGES)"


def home_faults(path: str, source: str) -> Iterator[str]:
    """Outside libraries that are imported away from home, or that the table does not know."""
    for item in imports_of(path, ast.parse(source)):
        if item.top in STDLIB or item.top == "stretto" or item.top in PACKAGES:
            continue
        if item.top not in HOMES:
            yield f"{path}:{item.line}: imports {item.top}, which is not in the table (HOMES)"
        elif not any(fnmatch(path, home) for home in HOMES[item.top]):
            yield f"{path}:{item.line}: imports {item.top}, whose home is {', '.join(HOMES[item.top])} (HOMES)"


def purity_faults(path: str, source: str) -> Iterator[str]:
    """What `protocol` may not touch: sockets, threads, the clock, files, the environment, logging."""
    if not path.startswith("protocol/"):
        return
    tree = ast.parse(source)
    for item in imports_of(path, tree):
        if item.top in NOT_IN_PROTOCOL:
            yield f"{path}:{item.line}: imports {item.name}: protocol does without {NOT_IN_PROTOCOL[item.top]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and call_name(node) in BUILTINS_NOT_IN_PROTOCOL:
            name = call_name(node)
            yield f"{path}:{node.lineno}: calls {name}(): protocol does without {BUILTINS_NOT_IN_PROTOCOL[name]}"


def pickle_faults(path: str, source: str) -> Iterator[str]:
    """Everything that could unpickle: the modules, `torch.load` unless weights_only, `numpy.load` with pickles."""
    tree = ast.parse(source)
    for item in imports_of(path, tree):
        if item.top in UNPICKLERS or item.name == "torch.load":
            yield f"{path}:{item.line}: imports {item.name}: reading such a file can run code that somebody put there"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else "?" for k in node.keywords}
        if call_name(node) == "torch.load" and given.get("weights_only") is not True:
            yield f"{path}:{node.lineno}: torch.load without weights_only=True can run code from the file"
        if call_name(node) in ("np.load", "numpy.load") and given.get("allow_pickle", False) is not False:
            yield f"{path}:{node.lineno}: numpy.load with allow_pickle can run code from the file"


def newer_faults(path: str, source: str) -> Iterator[str]:
    """Names of the standard library that Python 3.10 does not have. `tomllib` is fine next to `tomli`."""
    tree = ast.parse(source)
    imported = list(imports_of(path, tree))
    used = [(item.name, item.line) for item in imported]
    used += [(dotted(n), n.lineno) for n in ast.walk(tree) if isinstance(n, (ast.Attribute, ast.Name))]
    for name, line in used:
        if name in NEWER:
            yield f"{path}:{line}: {name} is newer than Python 3.10: write {NEWER[name]}"
    for item in imported:
        if item.top == "tomllib" and not any(other.top == "tomli" for other in imported):
            yield f"{path}:{item.line}: tomllib is newer than Python 3.10: import tomli as tomllib there"


def process_faults(sources: dict[str, str]) -> Iterator[str]:
    """Files whose imports, followed through the tree, bring both hivemind and libp2p into one process."""
    modules = {module_name(path): path for path in sources}
    found = {path: list(imports_of(path, ast.parse(source))) for path, source in sources.items()}
    for start in sources:
        seen, todo = set[str](), [start]
        origin: dict[str, str] = {}  # library -> the place that imports it
        while todo:
            path = todo.pop()
            if path in seen:
                continue
            seen.add(path)
            for item in found[path]:
                if item.top in ("hivemind", "libp2p"):
                    origin.setdefault(item.top, f"{path}:{item.line}")
                # `a.b.c` may be a module or a name in `a.b`, and loads the packages above it.
                parts = item.name.split(".")
                above = (".".join(parts[: n + 1]) for n in range(len(parts)))
                todo.extend(modules[name] for name in above if name in modules)
        if len(origin) == 2:
            yield f"{start}: brings in hivemind ({origin['hivemind']}) and libp2p ({origin['libp2p']}) together"


def module_name(path: str) -> str:
    """`node/swarm/__init__.py` -> `stretto.node.swarm`, `node/cli.py` -> `stretto.node.cli`."""
    return "stretto." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---- the tree ----


def read_sources(*folders: str) -> dict[str, str]:
    """Path relative to the repository -> source, of every Python file below the folders."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    assert files, f"no Python file below {folders}"
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


RULES: tuple[Callable[[str, str], Iterator[str]], ...] = (
    edge_faults,
    home_faults,
    purity_faults,
    pickle_faults,
    newer_faults,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[str, str], Iterator[str]]) -> None:
    faults = [fault for path, source in read_sources(*PACKAGES).items() for fault in rule(path, source)]
    assert not faults, "\n" + "\n".join(faults)


def test_hivemind_and_libp2p_never_meet() -> None:
    faults = list(process_faults(read_sources(*PACKAGES)))
    assert not faults, "\n" + "\n".join(faults)


def test_the_tests_do_not_unpickle_either() -> None:
    faults = [fault for path, source in read_sources("tests").items() for fault in pickle_faults(path, source)]
    assert not faults, "\n" + "\n".join(faults)


def test_every_library_of_the_table_is_a_declared_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = {name.lower().replace("-", "_") for name in re.findall(r'"([A-Za-z0-9-]+)[><=]', text)}
    assert {"hivemind", "torch"} <= declared
    missing = {name for name in HOMES if COMES_WITH.get(name, name) not in declared}
    assert not missing, f"imported, but not in pyproject.toml: {sorted(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_a_relative_symlink(package: str) -> None:
    link = ROOT / "src" / "stretto" / package
    assert os.readlink(link) == f"../../{package}"
    assert link.resolve() == ROOT / package


def test_nothing_but_the_three_symlinks_lies_in_the_namespace_package() -> None:
    assert sorted(
        entry.name for entry in (ROOT / "src" / "stretto").iterdir() if entry.name != "__pycache__"
    ) == sorted(PACKAGES)


# ---- the rules see a bad file ----

BAD = [
    (edge_faults, "protocol/a.py", "import stretto.node.config", "protocol may not import stretto.node.config"),
    (edge_faults, "protocol/a.py", "from stretto import bootstrap", "protocol may not import stretto.bootstrap"),
    (edge_faults, "protocol/planner/a.py", "from ... import node", "protocol may not import stretto.node"),
    (edge_faults, "node/a.py", "def f():\n    import stretto.bootstrap.cli", "node may not import stretto.bootstrap"),
    (edge_faults, "node/cli.py", "from stretto.bootstrap import cli", "inside a function only"),
    (edge_faults, "bootstrap/a.py", "from stretto.node import trainer", "bootstrap may not import stretto.node.tr"),
    (edge_faults, "bootstrap/a.py", "from stretto.node import swarming", "bootstrap may not import stretto.node.sw"),
    (edge_faults, "node/a.py", "import protocol.errors", "a second copy of the package"),
    (home_faults, "node/a.py", "import requests", "imports requests, which is not in the table"),
    (home_faults, "node/a.py", "from hivemind.p2p import P2P", "imports hivemind, whose home is node/swarm/*"),
    (home_faults, "node/a.py", "import importlib\nimportlib.import_module('trio')", "imports trio, whose home is"),
    (purity_faults, "protocol/a.py", "import time", "imports time: protocol does without the clock"),
    (purity_faults, "protocol/a.py", "from os import environ", "imports os.environ: protocol does without files"),
    (purity_faults, "protocol/a.py", "def f(p):\n    return open(p)", "protocol/a.py:2: calls open()"),
    (pickle_faults, "node/a.py", "import pickle", "imports pickle: reading such a file can run code"),
    (pickle_faults, "node/a.py", "from torch import load", "imports torch.load"),
    (pickle_faults, "node/a.py", "import torch\n\ntorch.load('x')", "node/a.py:3: torch.load without weights_only"),
    (pickle_faults, "node/a.py", "torch.load('x', weights_only=False)", "torch.load without weights_only=True"),
    (newer_faults, "node/a.py", "async def f():\n    async with asyncio.timeout(1): ...", "write asyncio.wait_for"),
    (newer_faults, "node/a.py", "from typing import Self", "typing.Self is newer than Python 3.10"),
    (newer_faults, "node/a.py", "import tomllib", "import tomli as tomllib"),
    (pickle_faults, "node/a.py", "np.load('x', allow_pickle=True)", "numpy.load with allow_pickle"),
]


@pytest.mark.parametrize(("rule", "path", "source", "message"), BAD)
def test_a_bad_file_is_named_with_its_line(
    rule: Callable[[str, str], Iterator[str]], path: str, source: str, message: str
) -> None:
    (fault,) = rule(path, source)
    assert message in fault
    assert re.match(rf"{re.escape(path)}:\d+: ", fault)


def test_a_good_file_has_no_fault() -> None:
    good = {
        "protocol/a.py": "import hashlib, torch\nimport numpy as np\nfrom stretto.protocol import errors\nx.open('y')",
        "node/swarm/a.py": "import asyncio, time, hivemind, uvloop\nfrom . import dht\nfrom stretto.protocol import a",
        "node/cli.py": "import typer\ndef mount():\n    from stretto.bootstrap.cli import app",
        "protocol/config.py": "import tomllib\nimport tomli as tomllib",
        "bootstrap/a.py": "from stretto.node.swarm import dht\nfrom stretto.node import swarm",
        "node/checkpoint.py": "import torch, safetensors.torch\ntorch.load('x', weights_only=True)\nnp.load('y')",
    }
    assert [fault for rule in RULES for path, source in good.items() for fault in rule(path, source)] == []


def test_hivemind_and_libp2p_are_seen_to_meet_through_other_files() -> None:
    tree = {
        "node/swarm/__init__.py": "",
        "node/swarm/dht.py": "import hivemind",
        "node/doctor_probe.py": "import libp2p",
        "node/doctor.py": "from stretto.node.swarm import dht\ndef f():\n    from . import doctor_probe",
        "node/app.py": "from stretto.node.swarm.dht import start",
    }
    assert list(process_faults(tree)) == [
        "node/doctor.py: brings in hivemind (node/swarm/dht.py:1) and libp2p (node/doctor_probe.py:1) together"
    ]
