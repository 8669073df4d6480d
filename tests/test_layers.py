"""The one direction of imports, epd <- video, encoders <- stages <- serve_app, and who alone may import what.

Every import of every file is read, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    "ray": {"serve_app"},
    "triton": {"encoders", "stages"},
}
# The commands, each a module of epd/cli/ that is imported when the command is run, may import upward.
COMMANDS = re.compile(r"epd/cli/(?!program|options)\w+\.py")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported top-level package, and where."""

    file: Path
    line: int
    package: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.package}"


def imports_of(source: str, file: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            yield Import(file, node.lineno, name.split(".")[0])  # type: ignore[attr-defined]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if node.level == 0 else []
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
    is_command = COMMANDS.fullmatch(found.file.as_posix()) is not None
    return not is_command and found.package not in ALLOWED[package]


def our_files() -> list[Path]:
    return [path.relative_to(ROOT) for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("file", our_files(), ids=str)
def test_imports_follow_the_arrows(file: Path) -> None:
    found = imports_of((ROOT / file).read_text(encoding="utf-8"), file)
    assert [str(one) for one in found if violation(one)] == []


def test_every_package_is_looked_at() -> None:
    assert {file.parts[0] for file in our_files()} >= {"epd", "video", "encoders", "stages"}


@pytest.mark.parametrize(
    ("file", "source", "is_violation"),
    [
        ("epd/types.py", "import video", True),
        ("epd/types.py", "def f():\n    from stages.colocated import x", True),
        ("epd/types.py", "import numpy", False),
        ("epd/cli/program.py", "def f():\n    from stages.colocated import x", True),
        ("epd/cli/program.py", "from stages.colocated import x", True),
        ("epd/cli/program.py", "if TYPE_CHECKING:\n    import stages", True),
        ("epd/cli/bench.py", "def f():\n    from video.demo_video import x", False),
        ("epd/cli/bench.py", "from video.demo_video import x", False),
        ("epd/cli/options.py", "from serve_app.app_args import x", True),
        ("epd/bench/cli.py", "def f():\n    from video.demo_video import x", True),
        ("video/containers/probe.py", "import av.container", False),
        ("video/containers/probe.py", "from encoders import Adapter", True),
        ("encoders/prompt/prompt.py", "import video", True),
        ("encoders/prompt/prompt.py", "import importlib\nimportlib.import_module('stages')", True),
        ("encoders/kernels/patches.py", "import triton", False),
        ("epd/policy.py", "import triton.language as tl", True),
        ("stages/media.py", "import av", True),
        ("stages/colocated.py", "def f():\n    import ray", True),
        ("stages/colocated.py", "import video, encoders, epd.types", False),
        ("serve_app/app.py", "import ray\nimport stages", False),
    ],
)
def test_the_rule_itself(file: str, source: str, is_violation: bool) -> None:
    assert any(violation(one) for one in imports_of(source, Path(file))) is is_violation
