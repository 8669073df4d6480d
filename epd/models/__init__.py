"""The embedded models, shipped as package data, and where a model's folder is."""

from pathlib import Path

DEFAULT_MODEL = "shapes-vl"
_FOLDER = Path(__file__).parent


def embedded_models() -> list[str]:
    """Returns the names of the models in this package."""
    return sorted(config.parent.name for config in _FOLDER.glob("*/config.json"))


def embedded_model_path(name: str = DEFAULT_MODEL) -> Path:
    """Returns an embedded model's folder: weights, tokenizer, chat template and processor configuration."""
    return _FOLDER / name


def model_folder(model: Path | str | None) -> Path:
    """Returns the folder that a user means by a path or by the name of an embedded model.

    A folder of that name comes first. None is shapes-vl. What does not exist is returned as it is, for the
    reader to refuse.
    """
    path = Path(DEFAULT_MODEL if model is None else model)
    is_embedded = str(path) in embedded_models() and (model is None or not path.exists())
    return embedded_model_path(str(path)) if is_embedded else path
