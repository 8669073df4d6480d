"""Environments of the clients, made once: their packages may not agree with ours, nor with each other."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Installed together; a load generator has an environment of its own.
PACKAGES: dict[str, tuple[str, ...]] = {
    "libraries": ("openai", "litellm", "langchain-openai", "llama-index-llms-openai-like", "instructor"),
    "guidellm": ("guidellm[vision]",),
    "AIPerf": ("aiperf",),
}
VLLM_VARIABLE = "EPD_VLLM_ENVIRONMENT"
FOLDER_VARIABLE = "EPD_CLIENTS_FOLDER"


class NotInstalledError(Exception):
    """A client cannot be installed here; the message is the reason."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    def version(self, package: str) -> str:
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return _output([str(self.programs / "python"), "-c", code]).strip()


def cache_folder() -> Path:
    """Returns where environments are kept: $EPD_CLIENTS_FOLDER, else a folder for caches of this user."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "epd-clients"


def environment(name: str) -> Environment:
    """Returns an environment, and installs it where it is missing. Raises NotInstalledError."""
    if name not in PACKAGES:
        return _of_vllm()
    folder = cache_folder() / name
    stamp, packages = folder / "installed.txt", PACKAGES[name]
    if not stamp.exists() or stamp.read_text(encoding="utf-8").split() != list(packages):
        print(f"installing {', '.join(packages)} in {folder}", file=sys.stderr)
        _output([sys.executable, "-m", "venv", str(folder)])
        _output([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages])
        stamp.write_text("\n".join(packages), encoding="utf-8")
    return Environment(folder)


def _of_vllm() -> Environment:
    folder = os.environ.get(VLLM_VARIABLE)
    if not folder or not (Path(folder) / "bin" / "vllm").exists():
        raise NotInstalledError(f"no vLLM: {VLLM_VARIABLE} must name an environment that has it")
    return Environment(Path(folder))


def _output(command: list[str]) -> str:
    """Raises NotInstalledError with the last line of what the command wrote."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalledError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return done.stdout
