"""Finds a model by its name at the Hugging Face Hub: in the cache of this machine, else by a download.

    OWNER/NAME -> refs/main -> snapshots/COMMIT      the cache of huggingface_hub, which its tools share

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` act as with every tool of the hub.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from epd.errors import ModelError
from epd.models.folder import check_folder, weight_files

_FOLDER = "models--"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
# Ends of the names of the small files that are read.
SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
# Names of tokenizers, of which a model needs one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class HubModel:
    """Names a model of the hub. revision: a branch, tag or commit."""

    name: str
    revision: str = MAIN

    @property
    def command(self) -> str:
        """Returns what fetches the model on a machine that reaches the hub."""
        files = " ".join(f'"*{end}"' for end in (*SMALL, ".safetensors"))
        revision = "" if self.revision == MAIN else f" --revision {self.revision}"
        return f"hf download {self.name}{revision} --include {files}"

    @property
    def _folder(self) -> Path:
        return cache_folder() / f"{_FOLDER}{self.name.replace('/', '--')}"

    def cached(self) -> Path | None:
        """Returns the model's folder in the cache; None unless all of its files are there."""
        ref = self._folder / "refs" / self.revision
        is_commit = _COMMIT.fullmatch(self.revision) is not None
        commit = self.revision if is_commit else ref.read_text().strip() if ref.is_file() else None
        found = self._folder / "snapshots" / str(commit)
        return found if found.is_dir() and _is_whole(found) else None

    def fetched(self) -> Path:
        """Returns the model's folder, after a download if it is not in the cache.

        Raises ModelError for a name, revision or format that is none, ModelNotFoundError where the hub cannot
        be reached, StorageFullError where the disk has no room.
        """
        found = self.cached()
        if found is None:
            from epd.models.download import download  # huggingface_hub, a quarter of a second

            found = download(self)
        return found


def hub_model(text: str, revision: str | None = None) -> HubModel | None:
    """Returns the model of the hub that a text names; None for a path: of several parts, or into a folder."""
    if _NAME.fullmatch(text) is None or Path(Path(text).parts[0]).is_dir():
        return None
    return HubModel(text, revision or MAIN)


def name_of(folder: Path) -> str:
    """Returns the name at the hub of a model's folder in a cache; of another folder, the folder's own."""
    above = folder.parent.parent.name
    return above.removeprefix(_FOLDER).replace("--", "/") if above.startswith(_FOLDER) else folder.name


def cache_folder() -> Path:
    """Returns the folder that huggingface_hub keeps models in."""
    own, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    every = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or (Path(home or f"{every}/huggingface") / "hub")).expanduser()


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
        weight_files(folder)
    except ModelError:
        return False
    return any((folder / name).is_file() for name in _TOKENIZERS)
