"""Prints one line for each module of the product, by room: `make modules`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import ROOT

PACKAGES = ("epd", "video", "encoders", "stages", "serve_app")


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, empty where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def page() -> str:
    """Returns the list of all modules in Markdown, a section for each folder."""
    lines = ["# Every module in one line"]
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            lines += [f"\n## `{folder.relative_to(ROOT)}`\n", f"{first_sentence(folder / '__init__.py')}\n"]
            modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.relative_to(ROOT)}`: {first_sentence(path)}" for path in modules]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
