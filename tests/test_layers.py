"""The one direction of imports, between packages and between their rooms, and who alone may import what.

A package is a folder at the root of the repository. `epd/` has links to the other four, so that they are
imported as `epd.video`; here they are called by their folder. A room is a folder of a package; "." are the
modules at the package's root. Every import of every file is read, those inside functions and under
TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

# package: the packages of ours that it may import, besides itself.
ALLOWED: dict[str, set[str]] = {
    "epd": set(),
    "video": {"epd"},
    "encoders": {"epd"},
    "stages": {"epd", "video", "encoders"},
    "serve_app": {"epd", "video", "encoders", "stages"},
}
# outside package: those of ours that alone may import it.
RESERVED = {
    "av": {"video"},
    "llguidance": {"stages"},
    "ray": {"serve_app"},
    "triton": {"encoders", "stages"},
}
# What `import epd` and `python -m epd` find. They import upward, and nothing before it is asked for.
FRONT = {"epd/__init__.py", "epd/__main__.py"}

# package: {room: the rooms of the package it imports}. A module that is named stands above its folder, whose
# other modules may not import it. An arrow that is not used any more is an error too: delete it.
ROOMS: dict[str, dict[str, str]] = {
    "epd": {
        ".": "",
        "kv": ".",
        "store": ". control kv",
        "encode": ".",
        "transfer": ". encode kv",
        "workload": ".",
        "profiles": ". encode kv workload",
        "control": ". encode profiles",
        "shapes": ".",
        "models": ".",
        "eval": ". shapes",
        "simulate": ". control encode kv profiles transfer workload",
        "client": ".",
        "bench": ". client shapes workload",
        "batch": ". client",
        "engine_config.py": ". encode kv store",
        "planning": ". encode kv profiles simulate workload",
    },
    "video": {
        "sources": "",
        "containers": "sources",
        "decoding": "containers sources",
        "children": "containers decoding sources",
        ".": "children containers decoding sources",
    },
    "encoders": {
        ".": "",
        "kernels": ".",
        "patches.py": ". kernels",
        "prompt": ".",
        "families": ". kernels patches.py prompt reduction",
        "reduction": ".",
        "registry.py": ". prompt",  # and a family when it is asked for
        "__init__.py": ". prompt registry.py",
    },
    "stages": {
        ".": "",
        "kernels": "",
        "reduction": ". kernels",
        "attention": "kernels reduction",
        "decoder": ". attention kernels loading",
        "loading": ". attention kernels",
        "sampling": "",
        "grammar": "",
        "connectors": "",
        "engine": ". attention decoder grammar kernels reduction sampling",
        "encode": ". engine",
        "prefill.py": "engine",
        "decode.py": "engine sampling",
        "memory_sizing.py": ". engine",
        "ranks": ". connectors decoder engine loading",
        "profiling.py": ". encode engine loading memory_sizing.py",
    },
    "serve_app": {
        ".": "",
        "media": ".",
        "observability": ".",
        "files": ".",
        "http": ".",
        "http/guard": ". http media observability",
        "http/requests": ".",
        "http/answers": ". http http/guard observability",
        "http/chat_answers.py": ". files http/guard http/requests observability",
        "http/server_state.py": ". files http/chat_answers.py http/guard http/requests observability",
        "http/routes": (
            ". files http http/answers http/guard http/requests http/server_state.py observability"
        ),
        "http/page": "http observability",
        "http/http_server.py": "http http/guard observability",
        "http/api.py": (
            ". files http http/guard http/page http/requests http/routes http/server_state.py observability"
        ),
        "worker": ".",
        "orchestration": ". media worker",
        "service_composition.py": ". files http/chat_answers.py media orchestration worker",
        "composition.py": (
            ". http/api.py http/guard http/requests http/server_state.py network orchestration "
            "service_composition.py"
        ),
        "local": (
            ". composition.py http http/answers http/chat_answers.py http/http_server.py http/requests media "
            "observability orchestration service_composition.py worker"
        ),
        "network": ". worker",
        "ray": ". composition.py http http/http_server.py media network observability",
        "app.py": ". http ray",
        "ray/server.py": ". app.py http observability ray",
        "llm.py": ". http local",
        "verification.py": "llm.py",
        "cli": ". http local observability ray ray/server.py",
    },
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import. name: dotted, down to what is imported."""

    file: Path
    line: int
    name: str

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def imports_of(source: str, file: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            yield Import(file, node.lineno, _in_folder(name))  # type: ignore[attr-defined]


def _in_folder(name: str) -> str:
    """The dotted name as folders at the root have it: "video.sampling" for "epd.video.sampling"."""
    inner = name.removeprefix("epd.")
    return inner if inner.split(".")[0] in ALLOWED else name


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.level == 0 else []
    if (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
    ):
        return [
            arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def violation(found: Import) -> bool:
    package = found.file.parts[0]
    if found.package in RESERVED:
        return package not in RESERVED[found.package]
    if found.package not in ALLOWED or found.package == package:
        return False
    return found.file.as_posix() not in FRONT and found.package not in ALLOWED[package]


def room_of(file: Path) -> str:
    """The room of a module, as in "epd/kv"; "epd" are the modules at the root of epd."""
    package, *rest = file.parts
    for length in range(len(rest), 1, -1):
        if "/".join(rest[:length]) in ROOMS[package]:
            return "/".join((package, *rest[:length]))
    if file.as_posix() in {f"{package}/{name}" for name in ROOMS[package]}:
        return file.as_posix()
    return f"{package}/{rest[0]}" if len(rest) > 1 else package


def room_imported(name: str) -> str:
    """The room of the longest part of a dotted name that is a module."""
    path = Path(*name.split("."))
    while not (file := path.with_suffix(".py")).exists() and not (file := path / "__init__.py").exists():
        path = path.parent
    return room_of(file)


def arrow(found: Import) -> tuple[str, str] | None:
    """The rooms that an import joins; None in the front, or where it stays in its room or package."""
    if found.package != found.file.parts[0] or found.file.as_posix() in FRONT:
        return None
    rooms = room_of(found.file), room_imported(found.name)
    return rooms if rooms[0] != rooms[1] else None


def allowed_arrows() -> set[tuple[str, str]]:
    def path(package: str, room: str) -> str:
        return package if room == "." else f"{package}/{room}"

    return {
        (path(package, room), path(package, other))
        for package, rooms in ROOMS.items()
        for room, others in rooms.items()
        for other in others.split()
    }


def our_files() -> list[Path]:
    return [path.relative_to(ROOT) for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def imports_in(file: Path) -> list[Import]:
    return list(imports_of((ROOT / file).read_text(encoding="utf-8"), file))


@pytest.mark.parametrize("file", our_files(), ids=str)
def test_imports_follow_the_arrows(file: Path) -> None:
    assert [str(found) for found in imports_in(file) if violation(found)] == []


def test_rooms_import_only_what_the_table_allows() -> None:
    joined = [(arrow(found), found) for file in our_files() for found in imports_in(file)]
    allowed = allowed_arrows()
    assert [str(found) for rooms, found in joined if rooms and rooms not in allowed] == []
    assert allowed - {rooms for rooms, _ in joined} == set(), "nobody uses these arrows: delete them"


def test_the_table_of_rooms_has_no_cycle_and_every_room() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for room, other in allowed_arrows():
        graph[room].add(other)
    TopologicalSorter(graph).prepare()
    rooms = {f"{package}/{room}".removesuffix("/.") for package, names in ROOMS.items() for room in names}
    assert rooms == {room_of(file) for file in our_files()}


def test_http_and_orchestration_do_not_know_each_other() -> None:
    arrows = [" ".join(sorted(rooms)) for rooms in allowed_arrows()]
    assert not [each for each in arrows if "serve_app/http" in each and "serve_app/orchestration" in each]


def test_tests_lie_in_rooms_of_the_same_name() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    for folder in folders - {Path(), Path("deploy"), Path("faults"), Path("training")}:
        is_room = (ROOT / folder).is_dir() or (ROOT / "epd" / folder).is_dir()
        assert is_room, f"tests/{folder} is named like no room of epd and no folder of a package"


def test_few_imports_lie_inside_functions() -> None:
    """They keep torch, Ray and Triton out of what does not need them. More would hide what a module uses."""
    assert len(list(inner_imports())) <= 18, list(inner_imports())


def inner_imports() -> Iterator[str]:
    for file in our_files():
        for function in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found = [each for each in ast.walk(function) if isinstance(each, ast.Import | ast.ImportFrom)]
                yield from (f"{file}:{each.lineno}" for each in found)


@pytest.mark.parametrize("package", sorted(set(ALLOWED) - {"epd"}))
def test_packages_are_imported_below_one_root(package: str) -> None:
    """A module that is imported under two names is two modules, with two sets of its classes."""
    assert (ROOT / "epd" / package).readlink() == Path("..", package)
    folders = [*ALLOWED, "tests", "benchmarks", "training"]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    pattern = re.compile(rf"^\s*(?:from|import) {package}\b", flags=re.MULTILINE)
    assert [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_every_package_is_looked_at() -> None:
    assert {file.parts[0] for file in our_files()} == set(ALLOWED) == set(ROOMS)


@pytest.mark.parametrize(
    ("file", "source", "is_violation"),
    [
        ("epd/types.py", "from epd import video", True),
        ("epd/types.py", "def f():\n    from epd.stages.prefill import x", True),
        ("epd/types.py", "import numpy", False),
        ("epd/__main__.py", "from epd.serve_app.cli.program import x", False),
        ("epd/__init__.py", "if TYPE_CHECKING:\n    from epd import stages", False),
        ("epd/bench/cli.py", "def f():\n    from epd.video.demo_video import x", True),
        ("video/containers/probe.py", "import av.container", False),
        ("video/containers/probe.py", "from epd.encoders import Adapter", True),
        ("encoders/prompt/prompt.py", "from epd import video", True),
        ("encoders/prompt/prompt.py", "import importlib\nimportlib.import_module('epd.stages')", True),
        ("encoders/kernels/patches.py", "import triton", False),
        ("epd/policy.py", "import triton.language as tl", True),
        ("stages/media.py", "import av", True),
        ("stages/prefill.py", "def f():\n    import ray", True),
        ("stages/prefill.py", "from epd import video, encoders, types", False),
        ("serve_app/app.py", "import ray\nfrom epd import stages", False),
    ],
)
def test_the_rule_itself(file: str, source: str, is_violation: bool) -> None:
    assert any(violation(one) for one in imports_of(source, Path(file))) is is_violation


@pytest.mark.parametrize(
    ("file", "source", "rooms"),
    [
        ("epd/kv/scheduling.py", "from epd.errors import EPDError", ("epd/kv", "epd")),
        ("epd/errors.py", "from epd.kv.scheduling import Scheduler", ("epd", "epd/kv")),
        ("epd/errors.py", "from epd.kv import scheduling", ("epd", "epd/kv")),
        ("epd/errors.py", "def f():\n    import epd.kv.scheduling", ("epd", "epd/kv")),
        ("epd/control/elasticity/cluster.py", "from epd.control.routing import Router", None),
        ("epd/control/elasticity/cluster.py", "import epd.profiles", ("epd/control", "epd/profiles")),
        ("serve_app/ray/board.py", "import epd.serve_app.app", ("serve_app/ray", "serve_app/app.py")),
        ("serve_app/http/protocol.py", "from epd.serve_app.orchestration.requests import x",
         ("serve_app/http", "serve_app/orchestration")),
        ("encoders/names.py", "from epd.encoders import Adapter", ("encoders", "encoders/__init__.py")),
        ("stages/prefill.py", "from epd.errors import EPDError", None),
    ],
)  # fmt: skip
def test_the_rooms_of_an_import(file: str, source: str, rooms: tuple[str, str] | None) -> None:
    (found,) = imports_of(source, Path(file))
    assert arrow(found) == rooms
