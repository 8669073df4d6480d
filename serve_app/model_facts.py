"""Reads the limits of a model from the JSON files of its folder, without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd.control.request_budget import RequestLimits
from epd.errors import ModelError
from epd.serve_app.app_args import AppArgs

# Keys under which configurations describe the language model; older ones do so at the top level.
_TEXT_CONFIGS = ("text_config", "llm_config")


def limits_of(args: AppArgs) -> RequestLimits:
    """Returns the limits of one request in the running application. Raises ModelError."""
    context_tokens = context_tokens_of(args.model_path)
    if context_tokens is None:
        return args.limits
    return args.limits.for_model(context_tokens, longest_token_bytes(args.model_path))


def model_type_of(model: Path) -> str:
    """Returns the family's name in config.json. Raises ModelError."""
    return str(_read(model / "config.json").get("model_type"))


def context_tokens_of(model: Path) -> int | None:
    """Returns the maximum tokens of prompt and answer together; None if the model sets no limit.

    Raises ModelError for a configuration that cannot be read.
    """
    config = _read(model / "config.json")
    places = (*(config.get(name) or {} for name in _TEXT_CONFIGS), config)
    named = [place["max_position_embeddings"] for place in places if place.get("max_position_embeddings")]
    return int(named[0]) if named else _default_context_tokens(model)


def _default_context_tokens(model: Path) -> int | None:
    """Returns the default limit of a configuration's class."""
    config = _loaded("AutoConfig", model).get_text_config()
    found = getattr(config, "max_position_embeddings", None)
    return int(found) if found else None


def longest_token_bytes(model: Path) -> int:
    """Returns the UTF-8 bytes of the longest token of the vocabulary. Raises ModelError."""
    return max(len(token.encode()) for token in _tokens(model))


def _tokens(model: Path) -> Iterator[str]:
    path = model / "tokenizer.json"
    if not path.is_file():
        yield from _loaded("AutoTokenizer", model).get_vocab()
        return
    tokenizer = _read(path)
    vocabulary: dict[str, int] | list[list[Any]] = tokenizer["model"]["vocab"]  # a list holds [token, score]
    yield from (one if isinstance(one, str) else str(one[0]) for one in vocabulary)
    yield from (str(added["content"]) for added in tokenizer.get("added_tokens", ()))


def _loaded(class_name: str, model: Path) -> Any:
    import transformers  # takes a second, and most models do not need it

    return getattr(transformers, class_name).from_pretrained(model, local_files_only=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"cannot read '{path}': {reason}; copy the model again") from error
    return found
