"""The site's lists of pages: each page of the documents stands in one, and llms.txt has them all."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))

from contents import listed, pages

ELSEWHERE = ("docs/decisions/", "docs/log/", "docs/site/")


def test_every_page_is_on_the_site_once() -> None:
    documents = {str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    expected = {page for page in documents if not page.startswith(ELSEWHERE)}
    found = pages()
    assert len(found) == len(set(found))
    assert expected - set(found) == set()
    assert [page for page in found if not Path(ROOT / f"{page}.md").exists()] == []


def test_models_read_what_each_page_is_for() -> None:
    text = listed()
    lines = [line for line in text.splitlines() if line.startswith("- [")]
    assert len(lines) == len(pages())
    assert text.startswith("# epd\n\n> Ask questions about images and long videos.")
    assert "- [Serve a model on one GPU](docs/how-to/serve-one-gpu.html): You have one GPU" in text
    assert [line for line in lines if line.endswith("): .")] == []
