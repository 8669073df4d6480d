"""Reads a Dockerfile, and runs its steps on this machine: no Docker, no network.

Paths of an image lie below a folder. `pip` and `uv` are those of an environment which sees the packages of
this one, so that they download nothing. What changes a system (`apt-get`, `useradd`) is written down and
not done.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w.$}*-])/(?=[a-z])")
_NOT_DONE = """
apt-get() { echo "apt-get $*" >> "$DONE"; }
useradd() { echo "useradd $*" >> "$DONE"; }
install() { echo "install $*" >> "$DONE"; mkdir -p "${@: -1}"; }
"""


@dataclass(frozen=True, slots=True)
class Step:
    """keyword: such as RUN. rest: all behind it."""

    keyword: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Its words, or the texts of its JSON list."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass(frozen=True, slots=True)
class Stage:
    """base: the image or the stage that it begins with."""

    base: str
    steps: list[Step] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """Returns the stages of a Dockerfile by their names, each with the steps of those it begins with."""
    found: dict[str, Stage] = {}
    for step in _steps(text):
        if step.keyword == "FROM":
            base, _, name = step.words
            steps = found[base].steps if base in found else []
            found[name] = Stage(base, list(steps))
        elif found:
            found[next(reversed(found))].steps.append(step)
    return found


def _steps(text: str) -> Iterator[Step]:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            keyword, _, rest = line.partition(" ")
            yield Step(keyword, rest.strip())


def last(steps: list[Step], keyword: str) -> Step:
    """Returns the step that counts of those with one keyword."""
    return next(step for step in reversed(steps) if step.keyword == keyword)


@dataclass(slots=True)
class Image:
    """What the steps have made. root: its folder `/`. environment: where its `pip` installs.

    variables: of its processes. work: the folder that its steps and its program start in. online: whether
    `pip` downloads what is needed
    """

    root: Path
    environment: Path
    variables: dict[str, str] = field(default_factory=dict)
    work: str = "/"
    online: bool = False

    @property
    def done(self) -> str:
        """The commands that were written down."""
        return (self.root / "done").read_text()

    def path(self, name: str) -> Path:
        return self.root / (Path("/") / self.work / name).relative_to("/")

    def follow(self, steps: list[Step], context: Path, others: Mapping[str, Image]) -> None:
        """context: the folder that is built. others: stages that were made before."""
        for step in steps:
            if step.keyword == "RUN":
                self.run(["bash", "-euc", _NOT_DONE + _ABSOLUTE.sub(f"{self.root}/", step.rest)])
            elif step.keyword == "COPY":
                self._copy(step.words, context, others)
            elif step.keyword == "ENV":
                self.variables |= dict(word.split("=", 1) for word in step.words)
            elif step.keyword == "WORKDIR":
                self.work = step.rest

    def _copy(self, words: list[str], context: Path, others: Mapping[str, Image]) -> None:
        *sources, target = [word for word in words if not word.startswith("--")]
        stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        for name in sources:
            source = others[stage].path(name) if stage else context / name
            if source.is_dir():
                shutil.copytree(source, self.path(target), symlinks=True, dirs_exist_ok=True)
            else:
                self.path(target).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.path(target))

    def _offline(self) -> dict[str, str]:
        """Settings of pip and uv with which they install an archive alone."""
        settings = self.environment / "uv.toml"
        settings.write_text("offline = true\n[pip]\nno-deps = true\n")
        return {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "UV_CONFIG_FILE": str(settings)}

    def run(self, command: list[str]) -> str:
        """Returns what a program of the image prints; it must end well."""
        folder = self.path(".")
        folder.mkdir(parents=True, exist_ok=True)
        known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.environment / 'bin'}:{known['PATH']}"
        pip = {} if self.online else self._offline()
        variables = known | pip | self.variables | {"PATH": path, "DONE": str(self.root / "done")}
        ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout
