"""Builds what a release publishes: a wheel, twice with equal bytes, and the source archive.

    python -m tests.deploy.release FOLDER     builds, and says what stands before the tag
    python -m tests.deploy.release --ready    says it alone; the exit status is 1 if there is something

Both are built from what git lists, as the last commit's time; other files of the folder are left out.
The wheel lists its dependencies in the versions that were tested, as CycloneDX, where PEP 770 has such lists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import Any

import epd
from tests import ROOT

_BUILD = "import sys; from setuptools import build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"
_ACROSS = re.MULTILINE | re.DOTALL


def listed() -> list[str]:
    """Returns the files of the repository, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if os.path.lexists(ROOT / name)]


def commit_time_s() -> int:
    """Returns the time of the last commit, in seconds since 1970."""
    command = ["git", "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def build(kind: str, folder: Path, time_s: int) -> Path:
    """Returns an archive that is built in a copy of its own. kind: wheel or sdist."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        source = Path(parent) / "source"
        for name in listed():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(ROOT / name, source / name)
        subprocess.run(
            [sys.executable, "-c", _BUILD, kind, str(folder.resolve())],
            cwd=source, env={**os.environ, "SOURCE_DATE_EPOCH": str(time_s)}, umask=0o022,
            stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    if kind == "wheel":
        _add_sbom(made)
    return made


def sbom() -> dict[str, Any]:
    """Returns what the wheel needs, without extras, in the versions of the image, as CycloneDX."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "constraints-hashes.txt").read_text().replace("_", "-")
    tested = dict(re.findall(r"^([^\s=]+)==([^\s;]+)", text, re.MULTILINE))
    needed = sorted(re.split(r"[<>=\[]", each)[0] for each in project["dependencies"])
    own = _component(project["name"], epd.__version__)
    components = [_component(name, tested[name]) for name in needed]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**own, "licenses": [{"license": {"id": project["license"]}}]}},
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _component(name: str, version: str) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


def _add_sbom(wheel: Path) -> None:
    """Adds the list to a wheel, and to the record of its files, which stays the last of them."""
    with zipfile.ZipFile(wheel) as archive:
        *files, (record, lines) = [(info, archive.read(info)) for info in archive.infolist()]
    added, text = copy(record), json.dumps(sbom(), indent=1).encode()
    added.filename = record.filename.replace("RECORD", "sboms/epd-vlm.cdx.json")
    digest = urlsafe_b64encode(sha256(text).digest()).rstrip(b"=").decode()
    lines += f"{added.filename},sha256={digest},{len(text)}\n".encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for info, data in (*files, (added, text), (record, lines)):
            archive.writestr(info, data)


def _copy(file: Path, target: Path) -> None:
    """Copies a file, or a link as a link. Rights are those that git knows: whether it is a program."""
    shutil.copy(file, target, follow_symlinks=False)
    if not target.is_symlink():
        target.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)


def twice(folder: Path, time_s: int) -> Path:
    """Returns a wheel that was built twice. Raises ValueError if two builds of it differ."""
    wheel = build("wheel", folder, time_s)
    with tempfile.TemporaryDirectory() as other:
        again = build("wheel", Path(other), time_s)
        if again.read_bytes() != wheel.read_bytes():
            raise ValueError(f"two builds of {wheel.name} differ: unpack both and compare them")
    return wheel


def before_the_tag(root: Path = ROOT) -> list[str]:
    """Returns a line for each thing that a release of this repository's version still lacks."""
    (version,) = re.findall(
        r'^__version__ = "(.*)"', (root / "epd" / "__init__.py").read_text(), re.MULTILINE
    )
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## \[(.+?)\](.*?)(?=^## |\Z)", changes, _ACROSS))
    unreleased = re.findall(r"^- ", sections.get("Unreleased", ""), re.MULTILINE)
    written = {
        "CITATION.cff": f"^version: {version}$",
        "docs/deploy/chart/Chart.yaml": f"^version: {version}$",
        "docs/openapi.json": f'"version": "{version}"',
    }
    lines = [
        f"{name} is of another version than {version}"
        for name, pattern in written.items()
        if not re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    if not re.match(r" - \d{4}-\d\d-\d\d\n", sections.get(version, "")):
        lines.append(f"CHANGELOG.md has no heading such as: ## [{version}] - 2026-01-31")
    if unreleased:
        lines.append(
            f"CHANGELOG.md lists {len(unreleased)} changes as unreleased: they belong below {version}"
        )
    if _git(root, "tag", "--list", "--no-contains", "HEAD", f"v{version}").strip():
        lines.append(f"v{version} is the tag of an older commit: raise the version")
    if _git(root, "status", "--porcelain", "--untracked-files=no").strip():
        lines.append("some files differ from the last commit")
    return lines


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where the archives go")
    parser.add_argument("--ready", action="store_true", help="build nothing")
    arguments = parser.parse_args()
    if not (arguments.ready or arguments.folder):
        parser.error("name the folder where the archives go, or --ready")
    for made in () if arguments.ready else _archives(arguments.folder):
        print(f"{made}  {made.stat().st_size:,} bytes  sha256 {sha256(made.read_bytes()).hexdigest()}")
    missing = before_the_tag()
    print("\n".join(f"before the tag: {line}" for line in missing))
    if not missing:
        print(f"ready: git tag v{epd.__version__} && git push origin v{epd.__version__}")
    sys.exit(bool(missing) if arguments.ready else 0)


def _archives(folder: Path) -> list[Path]:
    time_s = commit_time_s()
    return [twice(folder, time_s), build("sdist", folder, time_s)]


if __name__ == "__main__":
    main()
