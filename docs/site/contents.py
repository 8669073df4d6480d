"""Reads which pages the site has, from the lists in index.md."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[1]
_ENTRY = re.compile(r"^(/?[\w/*.-]+)$", re.MULTILINE)


def pages() -> list[str]:
    """Returns the pages in the order of the site, as paths below the repository without their suffix."""
    text = (_FOLDER / "index.md").read_text("utf-8")
    entries = [
        entry
        for block in re.findall(r"```{toctree}(.*?)```", text, re.DOTALL)
        for entry in _ENTRY.findall(block)
    ]
    found = [page for entry in entries for page in _named(entry)]
    return [page for page in found if page != "docs/site/python"]


def _named(entry: str) -> list[str]:
    pattern = entry.removeprefix("/") if entry.startswith("/") else f"docs/site/{entry}"
    return sorted(str(path.relative_to(_ROOT).with_suffix("")) for path in _ROOT.glob(f"{pattern}.md"))


def listed() -> str:
    """Returns the pages as llms.txt lists them: a summary, and a link with the first words of each."""
    readme = (_ROOT / "README.md").read_text("utf-8")
    summary = readme.split("\n\n")[1].replace("\n", " ")
    return f"# epd\n\n> {summary}\n\n## Pages\n\n" + "".join(map(_line, pages()))


def _line(page: str) -> str:
    title, _, rest = (_ROOT / f"{page}.md").read_text("utf-8").partition("\n")
    paragraphs = (part for part in rest.split("\n\n") if part.strip() and part.strip()[0].isalpha())
    first = next(paragraphs, "").strip().replace("\n", " ").partition(". ")[0].rstrip(".:")
    return f"- [{title.removeprefix('# ')}]({page}.html)" + (f": {first}.\n" if first else "\n")
