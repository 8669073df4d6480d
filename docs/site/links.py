"""Fails where a link of the site leads to no file, or to no place in it.

python docs/site/links.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """links: what a page names. places: what may stand behind a `#`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the links and places of a tag."""
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def dead(folder: Path) -> list[str]:
    """Returns a line for each link that leads nowhere. Links to other sites are not followed."""
    pages = {path.resolve(): _Page(path) for path in sorted(folder.rglob("*.html"))}
    return [
        f"{path.relative_to(folder.resolve())}: {link}"
        for path, page in pages.items()
        for link in dict.fromkeys(page.links)
        if not _leads_somewhere(path, link, pages)
    ]


def _leads_somewhere(path: Path, link: str, pages: dict[Path, _Page]) -> bool:
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return True
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if target.is_dir():
        target /= "index.html"
    if target not in pages or not url.fragment:
        return target.exists()
    return unquote(url.fragment) in pages[target].places


if __name__ == "__main__":
    lines = dead(Path(sys.argv[1]))
    print("\n".join(lines), file=sys.stderr)
    sys.exit(bool(lines))
