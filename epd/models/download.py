"""Downloads a model of a hub into its cache. Imports huggingface_hub: the first need does.

Only files that are read come: configurations, the tokenizer, and the weights that `folder.py` chooses.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download

from epd.errors import EPDError, ModelError, ModelNotFoundError
from epd.models import modelscope_download
from epd.models.hub import SMALL, HubModel, cache_folder, check_room, weights_of
from epd.models.modelscope import ModelScopeModel


def download(model: HubModel) -> Path:
    """Returns the model's folder in the cache, complete. Raises EPDError as `HubModel.fetched`."""
    if isinstance(model, ModelScopeModel):
        return modelscope_download.download(model)
    try:
        listed = HfApi().model_info(model.name, revision=model.revision, files_metadata=True).siblings
        sizes = {each.rfilename: int(each.size or 0) for each in listed or ()}
        folder = _got(model, [name for name in sizes if "/" not in name and name.endswith(SMALL)])
        weights = weights_of(model, folder, sizes)
        check_room(model, {name: sizes[name] for name in weights if not (folder / name).exists()}, "HF_HOME")
        return _got(model, weights)
    except EPDError:
        raise
    except Exception as error:
        raise _explained(model, error) from error  # those of the hub's client have several roots


def _got(model: HubModel, names: Collection[str]) -> Path:
    """Downloads files, with the hub's bars on a terminal, and returns their folder."""
    return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=sorted(names)))


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
