"""Downloads a model of the Hugging Face Hub into the cache. Imports huggingface_hub: the first need does.

Only files that are read come: configurations, the tokenizer, and the weights that `folder.py` chooses.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download

from epd.errors import EPDError, ModelError, ModelNotFoundError, StorageFullError, UnsupportedModelError
from epd.models.folder import INDEX, SINGLE, format_of, indexed_files, is_shard
from epd.models.hub import SMALL, HubModel, cache_folder

_GB = 10**9


def download(model: HubModel) -> Path:
    """Returns the model's folder in the cache, complete. Raises EPDError as `HubModel.fetched`."""
    try:
        listed = HfApi().model_info(model.name, revision=model.revision, files_metadata=True).siblings
        sizes = {each.rfilename: int(each.size or 0) for each in listed or ()}
        folder = _got(model, [name for name in sizes if "/" not in name and name.endswith(SMALL)])
        weights = _weights(model, folder, sizes)
        _check_room(model, {name: sizes[name] for name in weights if not (folder / name).exists()})
        return _got(model, weights)
    except EPDError:
        raise
    except Exception as error:
        raise _explained(model, error) from error  # those of the hub's client have several roots


def _got(model: HubModel, names: Collection[str]) -> Path:
    """Downloads files, with the hub's bars on a terminal, and returns their folder."""
    return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=sorted(names)))


def _weights(model: HubModel, folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the weight files to get. Raises UnsupportedModelError for other formats."""
    if SINGLE in names:
        return (SINGLE,)
    weights = indexed_files(folder) if INDEX in names else tuple(filter(is_shard, names))
    if weights:
        return weights
    what = format_of(names) or "no model in Hugging Face layout"
    raise UnsupportedModelError(f"the model {model.name} of the hub is {what}")


def _check_room(model: HubModel, missing: Mapping[str, int]) -> None:
    """Says how much is about to come. Raises StorageFullError unless the disk has room for it."""
    needed, folder = sum(missing.values()), cache_folder()
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    room = shutil.disk_usage(there).free
    if needed > room:
        raise StorageFullError(
            f"the model {model.name} needs {needed / _GB:.1f} GB in '{folder}', where {room / _GB:.1f} GB "
            "are free; make room, or set HF_HOME to a folder on another disk"
        )
    if needed:
        print(f"downloads {model.name}, {needed / _GB:.1f} GB, to '{folder}'", file=sys.stderr)


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
