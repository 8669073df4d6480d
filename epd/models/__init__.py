"""The embedded models, shipped as package data, and where a model's folder is."""

from collections.abc import Mapping
from pathlib import Path

from epd.errors import ModelNotFoundError, RequestError
from epd.models.folder import check_folder
from epd.models.hub import HubModel, is_name
from epd.models.modelscope import ModelScopeModel

DEFAULT_MODEL = "shapes-vl-2"
# Of the hub, small, for who looks for a model that knows real pictures.
EXAMPLE_MODEL = "Qwen/Qwen3-VL-2B-Instruct"
MODEL_HELP = (
    "Folder of a model in Hugging Face layout, its name at the Hugging Face Hub, or the name of an embedded "
    f"one; by default {DEFAULT_MODEL}."
)
HUBS: Mapping[str, type[HubModel]] = {"huggingface": HubModel, "modelscope": ModelScopeModel}
DEFAULT_HUB = "huggingface"
_KNOWS = "knows: "
_FOLDER = Path(__file__).parent


def embedded_models() -> list[str]:
    """Returns the names of the models in this package."""
    return sorted(config.parent.name for config in _FOLDER.glob("*/config.json"))


def embedded_model_path(name: str = "shapes-vl") -> Path:
    """Returns an embedded model's folder: weights, tokenizer, chat template and processor configuration.

    name: by default that of the model which most figures are of
    """
    return _FOLDER / name


def as_given(model: str | Path) -> Path:
    """Returns a path or name as it is kept: ./a/b is made absolute, since a/b would be a name of the hub."""
    text = str(model)
    return Path(text).expanduser().absolute() if text.startswith(("./", "../", "~")) else Path(text)


def find_model(
    model: Path | str | None, revision: str | None = None, hub: str = DEFAULT_HUB
) -> Path | HubModel:
    """Returns what a user means by a path or name, without a look into it: a folder, else a model of the hub.

    A folder of that name comes first, then an embedded model. None is the default model.
    Raises RequestError for a revision or another hub of a folder.
    """
    text = DEFAULT_MODEL if model is None else str(model)
    is_there = model is not None and Path(text).exists()
    if not is_there and text not in embedded_models() and is_name(text):
        return HUBS[hub](text) if revision is None else HUBS[hub](text, revision)
    given = f"revision {revision!r}" if revision is not None else f"hub {hub!r}" if hub != DEFAULT_HUB else ""
    if given:
        raise RequestError(f"received the {given} of '{text}', which is no model of the hub; leave it out")
    return Path(text) if is_there or text not in embedded_models() else embedded_model_path(text)


def model_folder(model: Path | str | None, revision: str | None = None, hub: str = DEFAULT_HUB) -> Path:
    """Returns the folder of the model that a user means, after a download if it has to come from the hub.

    Raises EPDError as `check_folder` and `HubModel.fetched`.
    """
    found = find_model(model, revision, hub)
    path = found if isinstance(found, Path) else found.fetched()
    try:
        check_folder(path)
    except ModelNotFoundError as error:
        names = ", ".join(embedded_models())
        raise ModelNotFoundError(f"{error}, or a name: {names}, or of the hub as {EXAMPLE_MODEL}") from error
    return path


def knowledge_of(folder: Path) -> str | None:
    """Returns what a model knows, where that is little: the field `knows` of its MODEL_CARD.md."""
    card = folder / "MODEL_CARD.md"
    if not card.is_file():
        return None
    fields = card.read_text(encoding="utf-8").partition("\n---")[0].splitlines()
    return next((line.removeprefix(_KNOWS) for line in fields if line.startswith(_KNOWS)), None)


def knowledge_line(model: Path | str | None, way: str = "--model") -> str | None:
    """Returns what a user should be told of a model that knows little; None of any other.

    way: what stands before another model's name
    """
    found = find_model(model)
    knows = knowledge_of(found) if isinstance(found, Path) else None
    return told_knowledge(served_name(model), knows, way)


def told_knowledge(name: str, knows: str | None, way: str) -> str | None:
    """Returns the line for a model's name and what it knows; None where that is not little."""
    return knows and f"{name} knows {knows}; for real pictures: {way} {EXAMPLE_MODEL}"


def served_name(model: Path | str | None) -> str:
    """Returns how requests call a model unless told otherwise: its name at the hub, or its folder's."""
    found = find_model(model)
    return found.resolve().name if isinstance(found, Path) else found.name
