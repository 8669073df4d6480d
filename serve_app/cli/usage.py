"""Says in one line what is wrong with the words of a command. Shows the options of a command in groups."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand

from epd.errors import RequestError

_NEARLY = 0.9  # of a name that differs in a letter
# The class that errors of usage have in typer, which does not export it.
_UsageError: Any = typer.BadParameter.mro()[1]
# Options of other programs, by the names of ours. None: the question and the media have no option.
_ELSEWHERE: Mapping[str, str | None] = {
    "--prompt": None,
    "--question": None,
    "--video": None,
    "--image": None,
    "--media": None,
    "--input": None,
    "--media-folder": "--allowed-media-path",
    "--media-path": "--allowed-media-path",
    "--allowed-local-media-path": "--allowed-media-path",
    "--max-new-tokens": "--max-tokens",
    "--max-output-tokens": "--max-tokens",
    "--max-completion-tokens": "--max-tokens",
    "--num-frames": "--frames",
    "--nframes": "--frames",
    "--max-frames": "--frames",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--served-model-name": "--model-name",
    "--root-path": "--route-prefix",
    "--model-path": "--model",
    "--base-url": "--url",
    "--server": "--url",
    "--key": "--api-key",
    "--gpu": "--device",
    "--precision": "--dtype",
    "--system-prompt": "--system",
    "--json-schema": "--schema",
    "--guided-json": "--schema",
    "--begin": "--start",
    "--from": "--start",
    "--to": "--end",
    "--output": "--out",
}
_EXTRA_URL = re.compile(r"extra argument.*\((https?://\S+)\)")
# A type as typer shows it for a value without a name of its own, and what it is called instead.
_TYPE = re.compile(r"<([A-Za-z\[\] ]+)>")
_VALUES: Mapping[str, str] = {"str": "TEXT", "int": "N", "int range": "N", "float": "X", "float range": "X"}


@contextmanager
def usage_in_one_line() -> Iterator[None]:
    """Raises RequestError for words that a command does not have, with the nearest that it has."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without words shows its help
            raise
        raise RequestError(_line(error)) from None


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns "; did you mean ...?" for what is nearly one of the names, else nothing."""
    found = get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _line(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "epd"
    has_all = f"; {command} --help has all"
    if type(error).__name__ == "NoSuchOption":
        return f"{command} has no option {error.option_name}{_meant(error.option_name, error.ctx) or has_all}"
    if type(error).__name__ == "MissingParameter" and error.param is not None:
        what = str(error.param.help).removesuffix(".")
        option = f"{error.param.opts[0]} " if error.param.param_type_name == "option" else ""
        return f"{command} lacks {option}{error.param.metavar or error.param.name}: {what}{has_all}"
    said, _, meant = " ".join(error.format_message().split()).partition(" Did you mean ")
    names = meant.replace("'", "").removesuffix("?").split(", ") if meant else []
    names = [name for name in names if " " not in name] or names  # `bench`, without `bench compare`
    tail = f"; did you mean {', '.join(names)}?" if names else has_all
    url = _EXTRA_URL.search(said)
    if url and error.ctx is not None and "--url" in _options(error.ctx):
        tail = f"; did you mean --url {url[1]}?"
    return f"{said[0].lower()}{said[1:].rstrip('.')}{tail}"


def _meant(name: str, context: Any) -> str:
    """Says which option is meant: of that name in another program, of that spelling, or none."""
    params = context.command.get_params(context) if context is not None else []
    own = [] if context is None else _options(context)
    plain = name.lower().replace("_", "-")
    if plain in own:
        return f"; did you mean {plain}?"
    arguments = {each.name for each in params if each.param_type_name == "argument"}
    if plain in ("--model", "--model-path") and "model" in arguments:
        return f"; write the model without a name: {context.command_path} MODEL"
    if plain in _ELSEWHERE and plain not in own:
        meant = _ELSEWHERE[plain]
        if meant is None and not get_close_matches(plain, own, cutoff=_NEARLY):
            return "; write the media and then the question, without names"
        if meant in own:
            return f"; did you mean {meant}?"
    begun = {each for each in own if each.startswith(plain)}
    if len(begun) == 1:
        return f"; did you mean {begun.pop()}?"
    is_long, is_group = name.startswith("--"), hasattr(context and context.command, "commands")
    if is_long and is_group and not get_close_matches(plain, own, cutoff=_NEARLY):
        return f"; options stand behind the command: {context.command_path} COMMAND {name}"
    return nearest(plain, own)


def _options(context: Any) -> list[str]:
    params = context.command.get_params(context)
    return [
        each for param in params for each in (*param.opts, *param.secondary_opts) if each.startswith("--")
    ]


def _arguments(context: Any) -> list[Any]:
    return [each for each in context.command.get_params(context) if each.param_type_name == "argument"]


def _shown(argument: Any) -> str:
    """Returns an argument as a line of usage has it: in brackets where it may be left out."""
    name = re.sub(r"[][]", "", argument.metavar or argument.name.upper())
    name += "..." * (argument.nargs == -1 and "..." not in name)
    return name if argument.required else f"[{name}]"


class GroupedCommand(TyperCommand):
    """Shows options in the groups that their `rich_help_panel` names, without frames around them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            error.ctx = error.ctx or ctx  # an option without its value is raised without
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *map(_shown, _arguments(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                is_option = param.param_type_name == "option"
                title = getattr(param, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
                name = _TYPE.sub(lambda found: _VALUES.get(found[1], found[1].upper()), row[0])
                groups[title].append((name if is_option else _TYPE.sub("", row[0]).rstrip(), row[1]))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
