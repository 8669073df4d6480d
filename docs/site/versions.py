"""Lists the versions of the documents that lie in a folder: `python docs/site/versions.py build/site`.

Each version has a folder of its own, such as 0.2.0. `index.html` leads to the newest of them, and
`versions.html`, which each page of the site names, lists all.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

_NUMBER = re.compile(r"\d+(\.\d+)*")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">{head}
<title>epd: versions of the documents</title>
<h1>Versions of the documents</h1>
<ul>
{items}
</ul>
</html>
"""


def versions(folder: Path) -> list[str]:
    """Returns the versions in a folder, the newest first."""
    names = [each.name for each in folder.iterdir() if (each / "index.html").exists()]
    found = [name for name in names if _NUMBER.fullmatch(name)]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")], reverse=True)


def write(folder: Path) -> None:
    """Writes the two pages of a folder. Raises ValueError where it has no version."""
    found = versions(folder)
    if not found:
        raise ValueError(f"no version of the site lies in {folder}: run `make site`")
    items = "\n".join(f'<li><a href="{escape(each)}/index.html">{escape(each)}</a></li>' for each in found)
    newest = f'\n<meta http-equiv="refresh" content="0; url={escape(found[0])}/index.html">'
    (folder / "index.html").write_text(_PAGE.format(head=newest, items=items), encoding="utf-8")
    (folder / "versions.html").write_text(_PAGE.format(head="", items=items), encoding="utf-8")
    (folder / ".nojekyll").touch()  # else GitHub leaves out folders such as _static


if __name__ == "__main__":
    write(Path(sys.argv[1]))
