"""Makes options of commands from the fields of records, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from epd.engine_config import ENGINE_FIELDS
from epd.pixel_settings import PIXEL_FIELDS

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_NONE: Mapping[str, Any] = {}

# Titles above options in the help of a command, where they are not of everyday use.
_RESEARCH = "Research: less work for a picture"
_PANELS: Mapping[str, Collection[str]] = {
    _RESEARCH: ("skip_static", "tower_share", "tower_merge_layer"),
    "Size of pictures": PIXEL_FIELDS,
    "How the model runs": [name for name in ENGINE_FIELDS if name not in ("revision", "hub")],
}


def with_fields_of(
    model: type[BaseModel],
    *,
    arguments: Mapping[str, str] = _NONE,
    variables: Mapping[str, str] = _NONE,
    only: Collection[str] | None = None,
    defaults: Mapping[str, object] = _NONE,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: each field of the model is an option of the field's name, default and description.

    The command gets them as keyword arguments; the model checks their values.
    arguments: metavars of the fields that are arguments instead of options.
    variables: names of environment variables, by field.
    only: the fields that the command has use for, by default all.
    defaults: of this command, where they are not the model's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = [
            _parameter(name, field, arguments.get(name), variables.get(name))
            for name, field in model.model_fields.items()
            if only is None or name in only
        ]
        return _extended(
            command,
            [each.replace(default=defaults.get(each.name, each.default)) for each in options],
        )

    return decorate


def with_options_of(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: each field of a dataclass is an option as its annotation says.

    The command gets them as keyword arguments, and makes the record of them.
    """
    kinds = get_type_hints(record, include_extras=True)
    options = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=kinds[each.name])
        for each in fields(record)
    ]
    return lambda command: _extended(command, options)


def _extended(command: Callable[..., None], options: Iterable[Parameter]) -> Callable[..., None]:
    """Lets a command that takes any keyword arguments have these options too."""
    own = signature(command, eval_str=True).parameters.values()
    named = [*(each for each in own if each.kind is not Parameter.VAR_KEYWORD), *options]
    command.__signature__ = Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in named}
    return command


def _parameter(name: str, field: FieldInfo, argument: str | None, variable: str | None) -> Parameter:
    """Numbers, paths and switches are parsed, sets and records are lists of text, all else is text."""
    kinds = [each for each in (get_args(field.annotation) or [field.annotation]) if each is not type(None)]
    kind: Any = kinds[0]
    default = field.default
    if get_origin(kind) is frozenset or field.default_factory is not None:
        kind, default = list[str], None
    elif kind not in (bool, int, float, Path):
        kind = str
    metavar = "VALUE" if kind == list[str] else None
    flag = f"--{name.replace('_', '-')}"
    if kind is bool and default is not False:
        flag += flag.replace("--", "/--no-", 1)
    panel = next((title for title, names in _PANELS.items() if name in names), None)
    info: Any = typer.Option(
        flag, metavar=metavar, help=field.description, envvar=variable, rich_help_panel=panel
    )
    if argument is not None:
        kind, info = str, typer.Argument(metavar=argument, help=field.description)
    kind = kind if kind is bool and default is not None else kind | None
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )
