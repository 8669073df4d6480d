"""The command `epd config`, and the limits that a model's folder names, read without loading it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from pydantic import ValidationError

from epd import console
from epd.control.request_budget import RequestLimits
from epd.errors import ModelError, RequestError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.options import IsJson
from epd.serve_app.cli.usage import GroupedCommand, nearest

config = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_LIMIT = "limits."
_Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE...",
        help="Arguments of the application as serve run takes them, limits.NAME for a limit; they take "
        "precedence over the file.",
    ),
]
_File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="YAML file of arguments, or a configuration of serve deploy that has them."
    ),
]


@config.callback()
def _config() -> None:
    """Show the resolved configuration of a server."""


@config.command(cls=GroupedCommand)
def show(values: _Values = None, file: _File = None, as_json: IsJson = False) -> None:
    """Show every argument of the application and the limits of one request, resolved for the model.

    Starts nothing. Keys are shown as set or not set.
    """
    args = _checked(_merged(read_args(file) if file else {}, parse_values(values or ())))
    args = args.with_keys_from(os.environ).resolved()
    record = _record(args, limits_of(args).record())
    if as_json:
        console.print_json(record)
        return
    limits = record.pop("limits")
    _print_rows(record)
    print("\nlimits of one request, lowered to what fits the model:")
    _print_rows(limits)


def _checked(values: Mapping[str, Any]) -> AppArgs:
    """The application's arguments. Raises RequestError."""
    try:
        return AppArgs(**values)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        if first["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
            raise RequestError(f"{place}: {first['msg']}; epd config show has all names") from None
        known = [*AppArgs.model_fields, *(f"limits.{each.name}" for each in fields(RequestLimits))]
        meant = nearest(place.replace("-", "_"), known) or "; epd config show has all names"
        raise RequestError(f"there is no argument {place}{meant}") from None


def parse_values(values: Iterable[str]) -> dict[str, Any]:
    """Parses arguments from NAME=VALUE, limits.NAME under `limits`. Raises RequestError."""
    args: dict[str, Any] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name.strip():
            raise RequestError(f"received {value[:100]!r}; allowed: NAME=VALUE; write an equals sign")
        if name.startswith(_LIMIT):
            args.setdefault("limits", {})[name.removeprefix(_LIMIT)] = text
        else:
            args[name] = text
    return args


def read_args(path: Path) -> dict[str, Any]:
    """The arguments in a YAML file, its own or those of the application in a configuration of Ray Serve.

    Raises RequestError.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"cannot read '{path}': {reason}; give a YAML file") from None
    if isinstance(found, dict) and found.get("applications"):
        found = found["applications"][0].get("args") or {}
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise RequestError(f"'{path}' holds a {kind}; allowed: names and values; change the file")
    return found


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merges arguments and their limits; the second takes precedence."""
    merged = {**first, **second}
    if "limits" in merged:
        merged["limits"] = {**(first.get("limits") or {}), **(second.get("limits") or {})}
    return merged


def _record(args: AppArgs, limits: Mapping[str, int | None]) -> dict[str, Any]:
    shown: dict[str, Any] = args.model_dump(mode="json", exclude={"limits"})
    keys = {name: "set" if shown[name] else None for name in ("api_key", "admin_api_key")}
    return shown | keys | {"num_threads": args.threads_per_worker, "limits": dict(limits)}


def _print_rows(rows: Mapping[str, Any]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


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
