"""Makes a site of the documents where they lie, from README to the Python API: `make site`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(Path(__file__).parent)]

from contents import listed, pages  # noqa: E402 # it lies beside this file

import epd  # noqa: E402 # of this repository, whatever is installed

project = "epd"
author = "The epd maintainers"
version = release = epd.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "docs/site/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/**/*.md",
    "benchmarks/results/*.md",
    "epd/models/*/MODEL_CARD.md",
]
exclude_patterns = ["CHANGELOG.md"]  # a section for each version says "Added"
html_theme = "furo"
html_title = f"epd {version}"
templates_path = ["templates"]  # names the page of all versions
html_show_copyright = False
html_extra_path = ["../openapi.json", "../notebooks"]
myst_heading_anchors = 4
# Links to source files and folders are for readers of the repository.
suppress_warnings = ["myst.xref_missing", "myst.header", "toc.not_included", "misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def _as_written(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Shows a docstring as it is: its first sentence as text, and what its parameters mean as a block."""
    first, rest = lines[:1], lines[1:]
    lines[:] = [*first, "", "::", "", *(f"    {line}" for line in rest)] if any(rest) else first


_FIRST = (
    '<!doctype html><meta http-equiv="refresh" content="0; url=docs/site/index.html"><title>epd</title>\n'
)


def _beside_pages(app: Any, error: Exception | None) -> None:
    """Writes index.html, llms.txt, a list of the pages, and llms-full.txt, all pages behind each other."""
    if error is None:
        out = Path(app.outdir)
        (out / "index.html").write_text(_FIRST, encoding="utf-8")
        (out / "llms.txt").write_text(listed(), encoding="utf-8")
        whole = (f"<!-- {page}.md -->\n{(_ROOT / f'{page}.md').read_text('utf-8')}" for page in pages())
        (out / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("build-finished", _beside_pages)
