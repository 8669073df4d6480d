"""Builds what a release publishes: a wheel, twice with equal bytes, and the source archive.

    python -m tests.deploy.release FOLDER

Both are built from what git lists, as the last commit's time; other files of the folder are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT

_BUILD = "import sys; from setuptools import build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"


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
    return made


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the archives go")
    folder = parser.parse_args().folder
    time_s = commit_time_s()
    print(twice(folder, time_s))
    print(build("sdist", folder, time_s))


if __name__ == "__main__":
    main()
