"""Writes what epd-vlm[serve] and its image need, each package at its version and with its archive's hash.

    python -m tests.deploy.hashes constraints-hashes.txt

`pip install --require-hashes --no-deps -r FILE` then takes these archives and no others. They are those that
pip would take on this system, in the image's Python, from the index that it is configured for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import ROOT

HEAD = "# Archives of epd-vlm[serve] for Python 3.12 on Linux, x86-64; `make hashes` writes them.\n"
_PYTHON = "3.12"
_RESOLVE = ["install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]


def lines(report: dict[str, Any]) -> list[str]:
    """Returns a line for each package of pip's report but this project's own folder. Raises ValueError."""
    found = []
    for each in report["install"]:
        name, version = (each["metadata"][field] for field in ("name", "version"))
        source = each["download_info"]
        if "dir_info" in source:
            continue
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise ValueError(f"{name} {version} has no sha256; allowed: packages of an index")
        found.append(f"{name.lower()}=={version} --hash=sha256:{digest}")
    return sorted(found)


def resolved() -> dict[str, Any]:
    """Returns pip's report of what it would install."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        target = ["--python-version", _PYTHON, "--target", folder]
        options = [*target, "-c", "constraints.txt", "--report", str(path), ".[serve]", "uv"]
        subprocess.run([sys.executable, "-m", "pip", *_RESOLVE, *options], cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(HEAD + "\n".join(lines(resolved())) + "\n")
