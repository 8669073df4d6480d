"""Finds a model by its name at the Hugging Face Hub: in the cache of this machine, else by a download.

    OWNER/NAME -> refs/main -> snapshots/COMMIT      the cache of huggingface_hub, which its tools share

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` act as with every tool of the hub.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from epd.errors import EPDError, ModelError, ModelNotFoundError, StorageFullError, UnsupportedModelError
from epd.late_module import LateModule
from epd.models.folder import INDEX, SINGLE, check_folder, format_of, indexed_files, is_shard, weight_files

if TYPE_CHECKING:
    import huggingface_hub
    from huggingface_hub import errors
else:  # it takes a quarter of a second
    huggingface_hub, errors = LateModule("huggingface_hub"), LateModule("huggingface_hub.errors")

_FOLDER = "models--"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
_GB = 10**9
# Ends of the names of the small files that are read.
SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".ttf")
INCLUDED = " ".join(f'"*{end}"' for end in (*SMALL, ".safetensors"))
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
        revision = "" if self.revision == MAIN else f" --revision {self.revision}"
        return f"hf download {self.name}{revision} --include {INCLUDED}"

    @property
    def cache(self) -> Path:
        """Returns the folder that models of this hub are kept in."""
        return cache_folder()

    @property
    def _folder(self) -> Path:
        return cache_folder() / f"{_FOLDER}{self.name.replace('/', '--')}"

    def cached(self) -> Path | None:
        """Returns the model's folder in the cache; None unless all of its files are there."""
        ref = self._folder / "refs" / self.revision
        is_commit = _COMMIT.fullmatch(self.revision) is not None
        commit = self.revision if is_commit else ref.read_text().strip() if ref.is_file() else None
        found = self._folder / "snapshots" / str(commit)
        return found if is_whole(found) else None

    def pinned(self, folder: Path) -> str:
        """Returns the revision that names what a folder holds, for machines with caches of their own."""
        return folder.name

    def fetched(self) -> Path:
        """Returns the model's folder, after a download if it is not in the cache.

        Raises ModelError for a name, revision or format that is none, ModelNotFoundError where the hub cannot
        be reached, StorageFullError where the disk has no room.
        """
        return self.cached() or self.downloaded()

    def downloaded(self) -> Path:
        """Returns the model's folder in the cache, complete. Raises as `fetched`.

        Only files that are read come: configurations, tokenizer, and the weights that `folder.py` chooses.
        """
        try:
            model = huggingface_hub.HfApi().model_info(self.name, revision=self.revision, files_metadata=True)
            sizes = {each.rfilename: int(each.size or 0) for each in model.siblings or ()}
            folder = _got(self, [name for name in sizes if "/" not in name and name.endswith(SMALL)])
            weights = weights_of(self, folder, sizes)
            missing = {name: sizes[name] for name in weights if not (folder / name).exists()}
            check_room(self, missing, "HF_HOME")
            return _got(self, weights)
        except EPDError:
            raise
        except Exception as error:
            raise _explained(self, error) from error  # those of the hub's client have several roots


def is_name(text: str) -> bool:
    """Returns whether a text names a model of a hub: a path has several parts, or leads into a folder."""
    return _NAME.fullmatch(text) is not None and not Path(Path(text).parts[0]).is_dir()


def name_of(folder: Path) -> str:
    """Returns the name at its hub of a model's folder in a cache; of another folder, the folder's own."""
    above = folder.parent.parent.name.removeprefix(_FOLDER)
    return above.replace("--", "/") if folder.parent.name == "snapshots" else folder.name


def cache_folder() -> Path:
    """Returns the folder that huggingface_hub keeps models in."""
    own, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    every = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or (Path(home or f"{every}/huggingface") / "hub")).expanduser()


def is_whole(folder: Path) -> bool:
    """Returns whether a folder is there with all files of a model."""
    try:
        check_folder(folder)
        weight_files(folder)
    except ModelError:
        return False
    return any((folder / name).is_file() for name in _TOKENIZERS)


def weights_of(model: HubModel, folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the weight files to get. Raises UnsupportedModelError for other formats.

    folder: has the model's small files
    names: of all files that the hub has
    """
    if SINGLE in names:
        return (SINGLE,)
    weights = indexed_files(folder) if INDEX in names else tuple(filter(is_shard, names))
    if weights:
        return weights
    what = format_of(names) or "no model in Hugging Face layout"
    raise UnsupportedModelError(f"the model {model.name} of the hub is {what}")


def check_room(model: HubModel, missing: Mapping[str, int], variable: str) -> None:
    """Says how much is about to come. Raises StorageFullError unless the disk has room for it.

    missing: bytes of each file
    variable: of the environment, which moves the cache
    """
    needed, folder = sum(missing.values()), model.cache
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    room = shutil.disk_usage(there).free
    if needed > room:
        raise StorageFullError(
            f"the model {model.name} needs {needed / _GB:.1f} GB in '{folder}', where {room / _GB:.1f} GB "
            f"are free; make room, or set {variable} to a folder on another disk"
        )
    if needed:
        print(f"downloads {model.name}, {needed / _GB:.1f} GB, to '{folder}'", file=sys.stderr)


def _got(model: HubModel, names: Collection[str]) -> Path:
    """Downloads files, with the hub's bars on a terminal, and returns their folder."""
    return Path(
        huggingface_hub.snapshot_download(model.name, revision=model.revision, allow_patterns=sorted(names))
    )


def _explained(model: HubModel, error: Exception) -> ModelError:
    """Returns the error to raise for one of the hub's client."""
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"the model {model.name} wants its terms accepted; do that on its page at the hub, and set "
            "HF_TOKEN to a token of your account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"the model {model.name} has no revision {model.revision!r}; allowed: its branches, tags and "
            "commits; leave --revision out for the main branch"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"there is no folder '{model.name}', and the hub has no model of that name, or a private one; "
            "check the spelling, or set HF_TOKEN"
        )
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ModelNotFoundError(
        f"there is no folder '{model.name}', no such model in '{cache_folder()}', and the hub did not give "
        f"it ({reason}); give a folder, or run this where the hub can be reached: {model.command}"
    )
