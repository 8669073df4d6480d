"""What is built and installed works without the repository: modules, data files, the program.

A source archive is built from what git lists, a wheel from that archive, and the wheel is installed in an
environment of its own, which sees the packages of this one but not the repository that is installed here.
Programs start in a folder that holds packages with the names of ours, which fail when they are imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import epd
from tests import ROOT
from tests.hostile_packages import PACKAGES, write_hostile_packages

_NAME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]

# Imports each module and prints those that do not come from the folder given, and those that fail.
_IMPORT_ALL = """
import importlib, sys
folder, *names = sys.argv[1:]
for name in names:
    try:
        file = importlib.import_module(name).__file__
    except Exception as error:
        print(name, repr(error))
    else:
        if not file.startswith(folder):
            print(name, file)
"""


def _listed(*folders: str) -> list[str]:
    """Files of the repository, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def _modules(names: list[str]) -> list[str]:
    found = [name.removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")]
    return [name.removesuffix(".__init__") for name in found]


@dataclass(frozen=True, slots=True)
class Installed:
    """environment: where the wheel is installed. here: a folder with nothing but hostile packages."""

    sdist: Path
    wheel: Path
    environment: Path
    here: Path

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints; it must end well."""
        return _run(str(self.environment / "bin" / program), *arguments, cwd=self.here)


def _run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pip(*arguments: str, cwd: Path) -> None:
    options = ["--no-deps", "--no-index", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    _run(sys.executable, "-m", "pip", *arguments, *options, cwd=cwd)


def _environment(folder: Path) -> Path:
    """An environment that sees what is installed here, but not where .pth files lead to, such as ours."""
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    added = Path(sysconfig.get_path("purelib", vars=paths)) / "dependencies.pth"
    added.write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    work = tmp_path_factory.mktemp("package")
    source, dist, here = (work / name for name in ("source", "dist", "here"))
    for name in _listed():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", build, str(dist), cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(dist), str(unpacked), cwd=work)
    (wheel,) = dist.glob("*.whl")
    environment = _environment(work / "environment")
    _pip("--python", str(environment / "bin" / "python"), "install", str(wheel), cwd=work)
    write_hostile_packages(here)
    return Installed(sdist, wheel, environment, here)


def test_every_file_of_the_packages_is_in_both_archives(installed: Installed) -> None:
    expected = set(_listed(*PACKAGES))
    assert {
        "epd/py.typed",
        "serve_app/http/page/index.html",
        "epd/models/shapes-vl/model.safetensors",
    } <= expected
    with zipfile.ZipFile(installed.wheel) as wheel:
        in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    with tarfile.open(installed.sdist) as sdist:
        in_sdist = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert in_wheel == expected
    assert expected - in_sdist == set()


def test_every_module_imports_from_the_wheel(installed: Installed) -> None:
    modules = _modules(_listed(*PACKAGES))
    assert "encoders.reduction.selection" in modules
    folder = f"{installed.environment}{os.sep}"
    assert installed.run("python", "-P", "-c", _IMPORT_ALL, folder, *modules) == ""


def test_the_distribution_has_the_version_of_the_package(installed: Installed) -> None:
    code = f"from importlib.metadata import version; print(version({_NAME!r}))"
    assert installed.run("python", "-P", "-c", code).strip() == epd.__version__


def test_the_demo_runs_among_hostile_packages(installed: Installed) -> None:
    assert installed.run("epd", "demo").count("✓") == 5
