"""The program `epd`: its commands in groups, each with its module and one line of help.

A command's module is imported when the command is run or its help is shown, so that `epd --help` is quick.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from epd import __version__
from epd.errors import EPDError, RequestError, exit_code
from epd.serve_app.cli.usage import GroupedCommand, usage_in_one_line

_ABOUT = "Answers questions about images and long videos with vision-language models."
# Group: command: (module of this folder and object, the first line of its help).
_GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Answer questions": {
        "ask": ("ask:ask", "Answer a question about videos, images and audio."),
        "chat": ("ask:chat", "Answer questions about videos and images in a dialogue."),
        "serve": ("serve:serve", "Serve a model with an OpenAI-compatible API."),
        "batch": ("batch:batch", "Answer a file of questions about videos and images."),
    },
    "Measure and plan": {
        "bench": ("bench:bench", "Measure latency, goodput and SLO attainment of servers."),
        "bench compare": ("compare:compare", "Compare layouts of equal devices under the same traffic."),
        "profile": ("profile:profile", "Measure what each stage costs on this machine."),
        "profile import": (
            "profile:import_tables",
            "Make a profile from published tables of measured kernels.",
        ),
        "simulate": ("simulate:simulate", "Simulate a fleet."),
        "plan": ("plan:plan", "Search for the devices and the topology of your traffic."),
    },
    "Try and evaluate": {
        "demo": ("demo:demo", "Draw a video and check five answers about it."),
        "demo-video": ("demo:demo_video", "Draw a video whose contents are known."),
        "eval": ("eval:evaluate", "Measure what token reduction costs in accuracy."),
    },
    "Operate": {
        "verify": (
            "verify:verify",
            "Compare a checkpoint's answers with those of transformers.",
        ),
        "models": (
            "models:models",
            "List the model families that load, and who computes each.",
        ),
        "status": ("status:status", "Show the workers, queues and traffic of a server."),
        "config": ("config:config", "Show the resolved configuration of a server."),
        "keys": ("keys:keys", "Make keys for the clients of a server."),
        "cache": ("cache:cache", "List or remove what --cache-dir keeps."),
    },
}
_COMMANDS = {name: entry for group in _GROUPS.values() for name, entry in group.items()}
_COMPLETE = "_EPD_COMPLETE"  # set by the scripts that shells have for completion
_LOCAL = "[serve], or with [local] where Ray is not needed"
# Packages that only an extra of the distribution brings: that extra.
_EXTRAS = {
    "fastapi": _LOCAL,
    "starlette": _LOCAL,
    "uvicorn": _LOCAL,
    "prometheus_client": _LOCAL,
    "ray": "[serve]",
}
_HELP_OPTIONS = {"help_option_names": ["--help", "-h"]}
_STYLE: dict[str, Any] = {
    "context_settings": _HELP_OPTIONS,
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _LazyCommands(Mapping[str, Any]):
    """The commands by name; one is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


@cache
def _load(name: str) -> Any:
    module, _, attribute = _COMMANDS[name][0].partition(":")
    found = getattr(import_module(f"epd.serve_app.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(**_STYLE)
        found.command(name, cls=GroupedCommand, context_settings=_HELP_OPTIONS)(function)
    return typer.main.get_command(found)


class _Program(TyperGroup):
    """Ends a command that raises an EPDError with one line on stderr and the error's exit code."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = _LazyCommands()  # type: ignore[assignment]  # nothing is added to them

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in _COMMANDS else args)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in group.items()], col_max=14)

    def make_context(self, info_name: str | None, *args: Any, **extra: Any) -> Any:
        name = "epd" if info_name is None or "python" in info_name else info_name
        return super().make_context(name, *args, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        with _told():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _told(), _imports_told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    """Ends the command where the block raises an EPDError, or has words that the command does not know."""
    try:
        with usage_in_one_line():
            yield
    except EPDError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error


@contextmanager
def _imports_told() -> Iterator[None]:
    """Raises RequestError where the block needs an extra's package, or a library that does not load."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise RequestError(
            f"this command needs the package {package}, which is not installed; "
            f"install epd-vlm with {_EXTRAS[package]}"
        ) from error
    except ImportError as error:
        if "shared object" not in str(error):
            raise
        raise RequestError(
            f"a library cannot be loaded ({error}); where ulimit -v limits "
            "memory, raise it; else install the library that it names"
        ) from error


app = typer.Typer(cls=_Program, name="epd", help=_ABOUT, **{**_STYLE, "add_completion": True})


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"epd {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
]


@app.callback(help=_ABOUT)
def _program(version: _Version = False) -> None:  # noqa: ARG001 - its callback has acted
    # Threads of torch that wait by spinning would take the cores from those that decode video.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Entry point of the program: runs a command and ends the process."""
    if _COMPLETE in os.environ:
        os.environ["COLUMNS"] = "1000"  # a help text that is wrapped becomes several completions in fish
    if sys.argv[1:2] == ["serve"]:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _end_early)
    elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ends: list[SystemExit] = []
    atexit.register(_end_process, ends)  # before the command registers anything, so that it is called last
    try:
        app()
    except SystemExit as end:
        ends.append(end)
        raise


def _end_early(_number: int, _frame: FrameType | None) -> None:
    """Ends a server that has only imported parts; then the command has handlers of its own.

    It raises nothing: an import may catch whatever comes in the middle of it, and go on.
    """
    os._exit(0)


def _end_process(ends: list[SystemExit]) -> None:
    """Ends the process at once: freeing what torch and transformers made takes Python 0.5 to 1 s.

    Does nothing where Python has more to say: an uncaught exception, a message as the code, failing output.
    """
    code = ends[-1].code if ends else ""
    if hasattr(sys, "last_value") or not isinstance(code, int | None):
        return
    logging.shutdown()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before Python began
            stream.flush()
    except OSError:
        return
    os._exit(code or 0)
