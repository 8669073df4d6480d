"""Users read the words of the field (attempt, heartbeat, preempted), not private ones for the same things."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

_PACKAGES = ("epd", "video", "encoders", "stages", "serve_app", "training")
# what users must not read: the field's word for it
INSTEAD: dict[str, str] = {
    r"tries|done again": "attempts, retried",
    r"giv(e|es|en|ing) way|victims?": "preempted",
    r"signs? of life": "heartbeat",
    r"desks?|dealt": "dispatcher, dispatched",
    r"news|told|tells": "reports, says, shows",
    r"mails?": "messages",
    r"books|booked": "in-flight counts, reserved",
    r"seats?": "sequence slots",
    r"joiners?": "splicer",
    r"verbs?": "command",
    r"tides?|outlook": "load wave, forecast",
    r"mend(s|ed|ing)?": "change, correct",
    r"once more": "again",
    r"so (long|many|much)(?! (as|that))": "a time limit, a number",
    r"whoever|goes on|going down|later may help": "the caller, continues, shutting down, retryable",
}
FORBIDDEN = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)


def visible_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields every string of several words with its line; docstrings only of commands and routes."""
    tree = ast.parse(source)
    hidden = {id(docstring) for node in ast.walk(tree) if (docstring := _hidden_docstring(node))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield from [(node.lineno, node.value)] if " " in node.value.strip() else []


def _hidden_docstring(node: ast.AST) -> ast.expr | None:
    """Returns the docstring of a node, unless a decorator like `@app.command()` shows it to users."""
    decorators = getattr(node, "decorator_list", [])
    if any(isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) for one in decorators):
        return None
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    first = node.body[0] if node.body else None
    return first.value if isinstance(first, ast.Expr) else None


def found_in(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    strings = visible_strings(text) if path.suffix == ".py" else enumerate(text.splitlines(), start=1)
    return [
        f"{path.relative_to(ROOT)}:{line}: {match.group()!r} in {' '.join(string.split())[:90]!r}"
        for line, string in strings
        for match in FORBIDDEN.finditer(string)
    ]


def read_by_users() -> list[Path]:
    """Returns the product's code, its page, and every document that is not a history."""
    code = [path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")]
    page = [path for path in (ROOT / "serve_app/http/page").iterdir() if path.suffix in (".html", ".js")]
    exempt = {ROOT / name for name in ("CHANGELOG.md", "docs/log.md")}
    exempt.update((ROOT / "docs" / "log").iterdir())
    return sorted({*code, *page, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - exempt)


def test_users_read_the_words_of_the_field() -> None:
    paths = read_by_users()
    assert len(paths) > 250
    assert [entry for path in paths for entry in found_in(path)] == []


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ('raise ValueError(f"{x} is outside; mend start_s")', 1),
        ('_log.info("the worker gave a sign of life")', 1),
        ('x = typer.Option(help="To search at most so long.")', 1),
        ('@app.command()\ndef f():\n    """Books a seat."""', 2),
        ('def f():\n    """Told once more."""', 0),
        ('raise ValueError("as long as it is retried; the front page")', 0),
    ],
)
def test_the_rule_itself(source: str, num_found: int) -> None:
    assert sum(len(FORBIDDEN.findall(text)) for _, text in visible_strings(source)) == num_found
