"""Each module of most rooms has a test that its name leads to.

epd/control/routing.py    tests/control/test_routing.py, the file at the mirrored place
epd/control/recent.py     or the test file whose docstring has it behind "Modules:"
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.house.counts import product_files
from tests import ROOT

# Rooms in which some module has neither. A room that has them all leaves this list, and none is added.
OPEN = {
    "encoders", "encoders/families", "encoders/kernels", "encoders/prompt", "encoders/reduction",
    "epd", "epd/client", "epd/kv", "epd/models",
    "serve_app", "serve_app/cli", "serve_app/files", "serve_app/http", "serve_app/http/answers",
    "serve_app/http/guard", "serve_app/http/requests", "serve_app/http/routes", "serve_app/local",
    "serve_app/media", "serve_app/network", "serve_app/orchestration", "serve_app/ray", "serve_app/worker",
    "stages", "stages/attention", "stages/connectors", "stages/decoder", "stages/encode", "stages/engine",
    "stages/kernels", "stages/loading", "stages/ranks", "stages/reduction",
}  # fmt: skip

_MARK = "Modules: `"


def mirrored(module: Path) -> Path:
    """Returns the place of a module's test: `epd/control/routing.py` has `tests/control/test_routing.py`."""
    room = module.parent.relative_to("epd") if module.parts[0] == "epd" else module.parent
    return Path("tests") / room / f"test_{module.name}"


def listed(docstring: str) -> list[str]:
    """Returns the modules that a test's docstring has behind "Modules:"."""
    found = re.search(r"^Modules: ((?:`[\w/]+\.py`,?\s*)+)\.$", docstring, flags=re.MULTILINE)
    return re.findall(r"`([\w/]+\.py)`", found[1]) if found else []


@cache
def covered() -> dict[str, Path]:
    """Returns the test file of each module that a docstring lists."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    docstrings = {path: ast.get_docstring(ast.parse(text)) for path, text in texts.items() if _MARK in text}
    return {module: path for path, text in docstrings.items() for module in listed(text or "")}


def without_test() -> list[str]:
    modules = [path.relative_to(ROOT) for path in product_files(ROOT) if not path.name.startswith("__")]
    return [
        str(each) for each in modules if not (ROOT / mirrored(each)).exists() and str(each) not in covered()
    ]


def test_each_module_has_a_test_to_be_found() -> None:
    assert [name for name in without_test() if str(Path(name).parent) not in OPEN] == []


def test_open_rooms_lack_some() -> None:
    assert OPEN - {str(Path(name).parent) for name in without_test()} == set(), "take these out of OPEN"


def test_listed_modules_exist() -> None:
    assert len(covered()) > 50
    assert [module for module in covered() if not (ROOT / module).exists()] == []


def test_no_module_is_listed_that_has_a_test_at_its_place() -> None:
    assert [module for module in covered() if (ROOT / mirrored(Path(module))).exists()] == []


@pytest.mark.parametrize(
    ("docstring", "modules"),
    [
        ("Some facts.\n\nModules: `epd/a.py`, `epd/b/c.py`.", ["epd/a.py", "epd/b/c.py"]),
        ("Modules: `epd/a.py`,\n`epd/b.py`.", ["epd/a.py", "epd/b.py"]),
        ("It tells of `epd/a.py`.", []),
    ],
)
def test_how_modules_are_listed(docstring: str, modules: list[str]) -> None:
    assert listed(docstring) == modules
