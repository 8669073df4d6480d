"""What is built and installed works without the repository: modules, data files, program, README's commands.

A source archive is built from what git lists, a wheel from that archive, and the wheel is installed by
README's line in an environment of its own, which sees the packages of this one but not the repository that is
installed here. Programs start in a folder that holds packages with the names of ours, which fail when they
are imported; README's commands too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import epd
from tests import ROOT
from tests.hostile_packages import PACKAGES, write_hostile_packages
from tests.ports import kept_port

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_NAME = _PROJECT["name"]
_QUESTION = "Which shape appears first?"
_README = (ROOT / "README.md").read_text(encoding="utf-8")

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


def _in_wheel(name: str) -> str:
    """Where a file of the repository is installed: all below `epd`."""
    return name if name.startswith("epd/") else f"epd/{name}"


def _modules(names: list[str]) -> list[str]:
    found = [_in_wheel(name).removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")]
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

    def shell(self, script: str, folder: Path) -> str:
        """What bash prints of a script, with the programs of the environment; each must end well."""
        return _run("bash", "-euc", f'PATH="{self.environment / "bin"}:$PATH"\n{script}', cwd=folder)


def _without_ours() -> dict[str, str]:
    """The variables of this process, but for the repository on the path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "NO_PROXY": "127.0.0.1"}


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=_without_ours(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pip(*arguments: str, cwd: Path) -> None:
    options = ["--no-deps", "--no-index", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    _run(sys.executable, "-m", "pip", *arguments, *options, cwd=cwd)


def environment_beside(folder: Path) -> Path:
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
    for name in PACKAGES[1:]:
        (source / "epd" / name).symlink_to(f"../{name}")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", build, str(dist), cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", **_FILTER)
    (unpacked,) = (work / "unpacked").iterdir()
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(dist), str(unpacked), cwd=work)
    (wheel,) = dist.glob("*.whl")
    environment = environment_beside(work / "environment")
    (line,) = re.findall(r'`pip install "(.+)"`', _README)
    _pip("--python", str(environment / "bin" / "python"), "install", line, cwd=dist)
    write_hostile_packages(here)
    return Installed(sdist, wheel, environment, here)


def test_a_major_version_of_pyav_that_nobody_tried_is_not_installed() -> None:
    """PyAV 19 takes no `metadata_errors`, so no video could be opened by what pip installed."""
    (line,) = (each for each in _PROJECT["dependencies"] if each.startswith("av"))
    (tested,) = re.findall(r"^av==(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert line.endswith(f",<{int(tested) + 1}")


def test_every_file_of_the_packages_is_in_both_archives(installed: Installed) -> None:
    expected = {_in_wheel(name) for name in _listed(*PACKAGES)}
    assert {
        "epd/py.typed",
        "epd/serve_app/http/page/index.html",
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
    assert "epd.encoders.reduction.selection" in modules
    folder = f"{installed.environment}{os.sep}"
    assert installed.run("python", "-P", "-c", _IMPORT_ALL, folder, *modules) == ""


def test_the_distribution_has_the_version_of_the_package(installed: Installed) -> None:
    code = f"from importlib.metadata import version; print(version({_NAME!r}))"
    assert installed.run("python", "-P", "-c", code).strip() == epd.__version__


# What comes with a declared package by its own rules, and is imported by name.
_BROUGHT = {
    "grpcio": "ray",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "pydantic-core": "pydantic",
    "triton": "torch",  # by the one for GPUs: without them no kernel is imported
}
# Python 3.11.3 and older has none, and 3.12 asks for one.
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
_OPTIONAL = {"opentelemetry"}  # `--otlp-endpoint` says which package it needs


def test_what_is_imported_is_declared() -> None:
    """Else it works only where something else has brought it along."""
    extras = _PROJECT["optional-dependencies"]
    lines = [*_PROJECT["dependencies"], *extras["local"], *extras["serve"], *extras["cloud"], *extras["data"]]
    declared = {_normal(re.split(r"[\[><=; ]", line)[0]) for line in lines}
    known, ours = packages_distributions(), {*PACKAGES, *sys.stdlib_module_names, *_OPTIONAL}
    imported = {name for path in _listed(*PACKAGES) if path.endswith(".py") for name in _imports(ROOT / path)}
    assert {"torch", "av", "ray", "fastapi"} <= imported
    found = {name: {_normal(each) for each in known[name]} for name in imported - ours}
    missing = {name for name, by in found.items() if not declared & {_BROUGHT.get(each, each) for each in by}}
    assert missing == set()


def _normal(distribution: str) -> str:
    """A distribution's name as indexes compare it."""
    return distribution.lower().replace("_", "-")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


# README's commands, from the wheel, in a folder with nothing but hostile packages


def _block(text: str) -> str:
    """The README's block of code with this text in it."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", _README, flags=re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return str(found)


def _commands() -> set[str]:
    """Commands of the program that the README runs."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", _README, flags=re.MULTILINE | re.DOTALL)
    plain = [block for language, block in blocks if not language]
    return {line for block in plain for line in re.findall(r"^epd .+$", block, flags=re.MULTILINE)}


@contextmanager
def _serving(installed: Installed, command: str, folder: Path) -> Iterator[int]:
    """The port of a server that this command of the README starts, until it is asked to end."""
    program, *arguments = command.split()
    with kept_port() as port, subprocess.Popen(
        [str(installed.environment / "bin" / program), *arguments, "--port", str(port)],
        cwd=folder, env=_without_ours(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert any("ready in" in line for line in process.stdout), "it has ended"
            yield port
            process.terminate()
            assert process.wait() == 0
        finally:
            process.kill()


# As a shell does when TAB is pressed after these words.
_COMPLETE = """
export HOME=$PWD
epd --install-completion >&2
source .bash_completions/epd.sh
COMP_WORDS=(epd ch) COMP_CWORD=1
_epd_completion epd
echo "${COMPREPLY[@]}"
COMP_WORDS=(epd chat clip.mp4 --ret) COMP_CWORD=3
_epd_completion epd
echo "${COMPREPLY[@]}"
"""


def test_the_completion_that_is_installed_completes(installed: Installed, tmp_path: Path) -> None:
    assert "`epd --install-completion`" in _README
    assert installed.shell(_COMPLETE, tmp_path).split() == ["chat", "--retention"]


def test_readmes_commands_run_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    """In README's order, in a folder with nothing but hostile packages. The evaluation is of 2 questions, not
    60. `epd demo`, from the wheel too: `tests/deploy/test_image.py`.
    """
    write_hostile_packages(tmp_path)
    first, serve, batch, eval_ = map(_block, ("epd demo-video", "--local", "epd batch", "epd eval"))
    assert {line for block in (first, serve, batch, eval_) for line in block.splitlines()} >= _commands()
    chat = "epd chat clip.mp4"
    assert chat in first
    answers = installed.shell(first.replace(chat, f"printf '{_QUESTION}\\n/quit\\n' | {chat}"), tmp_path)
    assert '"answer"' in answers
    assert answers.splitlines()[-1] == answers.splitlines()[2]
    with _serving(installed, serve.strip(), tmp_path) as port:
        reply = json.loads(installed.shell(_block("curl -s").replace(":8000", f":{port}"), tmp_path))
        assert reply["choices"][0]["message"]["content"] in answers.split()
        ask = f'epd ask --url http://127.0.0.1:{port} clip.mp4 "{_QUESTION}"'
        assert installed.shell(ask, tmp_path).strip() == reply["choices"][0]["message"]["content"]
        client = tmp_path / "client.py"
        client.write_text(_block("from openai").replace(":8000", f":{port}"))
        assert installed.shell(f"python {client.name}", tmp_path).isdigit()
    installed.shell(batch, tmp_path)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
    table = installed.shell(eval_.replace("--demo 60", "--demo 2"), tmp_path)
    assert "0.25" in table
