"""From an empty folder to five right answers: by the wheel, the source archive, the image's steps.

    make release && python -m benchmarks.front.first_answer --python /path/to/python3.12 --by wheel --with uv

Each way has an environment of its own, which is removed when it was measured. Nothing is kept of downloads
but in the folder of `--cache`.
seconds: by the clock. cpu_s: user and system. found_s: to find and download packages, as pip's log tells, and
unpacked_s to unpack and compile them. again_s: `epd demo` once more. torch_s: the import of torch alone.
A row is printed as JSON. It needs no package but `epd`, so that any Python can run it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import ROOT
from tests.deploy.dockerfile import Image, stages
from tests.deploy.release import listed

WAYS = ("wheel", "sdist", "image")
_RIGHT = 5


class Clock:
    """Counts the seconds of commands, by the clock and of CPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        used = os.times()
        return time.monotonic(), used.children_user + used.children_system

    def lap(self, name: str) -> None:
        """Names what happened since the last lap."""
        now = self._now()
        self.seconds[name] = round(now[0] - self._begun[0], 1)
        self.cpu_s[name] = round(now[1] - self._begun[1], 1)
        self._begun = now


def pips_seconds(log: str) -> tuple[float, float]:
    """Returns the seconds in which pip downloaded, and unpacked and compiled, of all its runs."""
    found_s = unpacked_s = 0.0
    begun, ready = None, None
    for line in log.splitlines():
        told = re.match(r"(\d{4}-\d\d-\d\dT[\d:]+),(\d{3}) ?(.*)", line)
        if told is None:
            continue
        at_s = datetime.fromisoformat(told[1]).timestamp() + int(told[2]) / 1000
        begun = at_s if begun is None else begun
        if told[3].startswith("Installing collected packages"):
            found_s, ready = found_s + at_s - begun, at_s
        elif told[3].startswith("Successfully installed") and ready is not None:
            unpacked_s, begun, ready = unpacked_s + at_s - ready, None, None
    return round(found_s, 1), round(unpacked_s, 1)


def _environment(python: str, folder: Path) -> Path:
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder


@dataclass(frozen=True, slots=True)
class Trial:
    """by: one of WAYS. tool: pip or uv; images take pip. dist: where packages lie.

    cache: where downloads are kept, or None
    """

    python: str
    by: str
    tool: str
    dist: Path
    cache: Path | None


def installed(trial: Trial, work: Path) -> Image:
    """Returns what was installed, below an empty folder."""
    environment = _environment(trial.python, work / "environment")
    kept = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
    if trial.cache is not None:
        kept = {"PIP_CACHE_DIR": str(trial.cache / "pip"), "UV_CACHE_DIR": str(trial.cache / "uv")}
    variables = {**kept, "PIP_LOG": str(work / "pip.log")}
    image = Image(work / "root", environment, variables, online=True)
    if trial.by == "image":
        _follow(image, trial.python, work)
        return image
    (package,) = trial.dist.resolve().glob("*.tar.gz" if trial.by == "sdist" else "*.whl")
    if trial.tool == "uv":
        image.run(["pip", "install", "--quiet", "uv"])
        image.run(["uv", "pip", "install", "--python", f"{environment}/bin/python", str(package)])
    else:
        image.run(["pip", "install", "--quiet", str(package)])
    return image


def _follow(image: Image, python: str, work: Path) -> None:
    """Follows the steps of the image `cpu`."""
    context, made = work / "context", stages((ROOT / "Dockerfile").read_text())
    for name in listed():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, context / name, follow_symlinks=False)
    builder = Image(
        work / "wheel", _environment(python, work / "builder"), dict(image.variables), online=True
    )
    builder.follow(made["wheel"].steps, context, {})
    image.follow(made["cpu"].steps, context, {"wheel": builder})


def measured(trial: Trial, work: Path) -> dict[str, Any]:
    """Installs, asks, and returns the seconds of each part."""
    clock = Clock()
    image = installed(trial, work)
    clock.lap("install")
    right = image.run(["epd", "demo"]).count("✓")
    clock.lap("demo")
    image.run(["epd", "demo"])
    clock.lap("again")
    image.run(["python", "-c", "import torch"])
    clock.lap("torch")
    found_s, unpacked_s = pips_seconds((work / "pip.log").read_text(errors="replace"))
    version = image.run(["python", "-c", "import platform as p; print(p.python_version())"]).strip()
    site = next((image.environment / "lib").glob("python*/site-packages"))
    size = sum(file.lstat().st_size for file in site.rglob("*") if file.is_file())
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "python": version,
        "by": trial.by,
        "with": "uv" if trial.by == "image" else trial.tool,
        "downloads": "new" if trial.cache is None else "kept in a folder",
        "right": f"{right} of {_RIGHT}",
        "seconds": round(clock.seconds["install"] + clock.seconds["demo"], 1),
        "cpu_s": round(clock.cpu_s["install"] + clock.cpu_s["demo"], 1),
        "found_s": found_s,
        "unpacked_s": unpacked_s,
        **{f"{name}_s": value for name, value in clock.seconds.items()},
        **{f"{name}_cpu_s": value for name, value in clock.cpu_s.items()},
        "size_gb": round(size / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", required=True, help="an interpreter; may be repeated")
    parser.add_argument("--by", action="append", choices=WAYS, help="a way; may be repeated. Default: all")
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="where `make release` wrote packages"
    )
    parser.add_argument("--with", dest="tool", choices=("pip", "uv"), default="pip")
    parser.add_argument("--cache", type=Path, help="a folder for downloads, which later runs find")
    arguments = parser.parse_args()
    for python in arguments.python:
        for way in arguments.by or WAYS:
            with TemporaryDirectory() as work:
                trial = Trial(python, way, arguments.tool, arguments.dist, arguments.cache)
                print(json.dumps(measured(trial, Path(work))), flush=True)


if __name__ == "__main__":
    main()
