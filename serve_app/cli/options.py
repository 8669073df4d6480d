"""Options that several commands share, each declared once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from epd.errors import RequestError, check_file
from epd.models import MODEL_HELP, as_given
from epd.reduction import (
    DEFAULT_METHOD,
    METHODS,
    ReductionPolicy,
    VisualBudget,
)

_NONE: Mapping[str, Any] = {}
_FEWER = "Fewer visual tokens"
_PLOT_FORMATS = (".png", ".svg", ".pdf")


def _output(path: Path | None) -> Path | None:
    """Raises RequestError for a file that cannot be written, before any work is done for it."""
    if path is not None and str(path) != "-":
        check_file(path)
    return path


def _plot(path: Path | None) -> Path | None:
    """Raises RequestError for a file that cannot be written as a plot."""
    if path is not None and (path.suffix.lower() not in _PLOT_FORMATS or not path.parent.is_dir()):
        raise RequestError(
            f"cannot plot to {str(path)!r}; name a {', '.join(_PLOT_FORMATS)} file in a folder that exists"
        )
    return path


def seconds_of(text: str | float) -> float:
    """Returns a time from seconds, MM:SS or HH:MM:SS. Raises RequestError."""
    parts = str(text).split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(map(isfinite, numbers)) or any(each < 0 for each in numbers[1:]):
        raise RequestError(f"received the time {text!r}; allowed: seconds, or 1:30 for a minute and a half")
    return sum(number * float(60**power) for power, number in enumerate(reversed(numbers)))


def reduction_policy(
    method: str | None, retention: float | None, compute_share: float | None
) -> ReductionPolicy:
    """Returns the policy of the options, which keeps all tokens by default. Raises RequestError."""
    return ReductionPolicy(method or DEFAULT_METHOD, 1.0 if retention is None else retention, compute_share)


def check_numbers(fps: float | None, frames: int | None, max_tokens: int | None) -> None:
    """Raises RequestError for options that make every question fail."""
    if fps is not None and frames is not None:
        raise RequestError(f"received --fps {fps} and --frames {frames}; give one of the two")
    for name, value in (("--fps", fps), ("--frames", frames), ("--max-tokens", max_tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"received {name} {value}; allowed: more than 0")


def response_format(schema: Path | None) -> dict[str, Any] | None:
    """Returns the field of a request that holds answers to a schema's file. Raises RequestError."""
    if schema is None:
        return None
    try:
        found = json.loads(schema.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(f"cannot read '{schema}': {reason}; give a file with a JSON schema") from None
    if not isinstance(found, dict):
        raise RequestError(f"'{schema}' holds a {type(found).__name__}; allowed: a JSON schema, an object")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": found}}


def visual_budget(max_tokens: int | None, retention: float | None) -> VisualBudget:
    """Returns the budget of the two options. Raises RequestError."""
    return VisualBudget(max_tokens, retention is not None, retention or 0.0)


# What is asked
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        parser=as_given,
        help=MODEL_HELP,
    ),
]
Fps = Annotated[
    float | None,
    typer.Option(
        "--fps", metavar="F", help="Frames to sample per second of video; by default the model's rate."
    ),
]
Frames = Annotated[
    int | None,
    typer.Option("--frames", metavar="N", help="Frames to sample from each video, evenly; or use --fps."),
]
Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Videos, images and audio, in the order the model gets them."),
]
AsAudio = Annotated[
    bool, typer.Option("--audio", help="Hear the sound of each file, also of a video; for models that hear.")
]
Start = Annotated[
    float,
    typer.Option(
        "--start",
        metavar="TIME",
        parser=seconds_of,
        help="Start of the part of each video and audio: seconds, or 1:30.",
    ),
]
End = Annotated[
    float | None,
    typer.Option("--end", metavar="TIME", parser=seconds_of, help="End of that part; by default the end."),
]
Retention = Annotated[
    float | None,
    typer.Option(
        "--retention",
        metavar="R",
        rich_help_panel=_FEWER,
        help="Share of visual tokens kept, 0.05 to 1; by default 1.",
    ),
]
Reduction = Annotated[
    str | None,
    typer.Option(
        "--reduction",
        metavar="METHOD",
        rich_help_panel=_FEWER,
        help=f"How they are chosen: {', '.join(METHODS)}.",
    ),
]
ComputeShare = Annotated[
    float | None,
    typer.Option(
        "--compute-share",
        metavar="SHARE",
        rich_help_panel=_FEWER,
        help="Share of visual tokens that later layers of the language model compute, with --reduction "
        "fastkv; each keeps some of these. By default the retention.",
    ),
]
MaxVisualTokens = Annotated[
    int | None,
    typer.Option(
        "--max-visual-tokens",
        metavar="N",
        rich_help_panel=_FEWER,
        help="Visual tokens at most; frames and retention are chosen for it. By default what the context has "
        "room for.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", metavar="N", help="Longest answer, in tokens; by default the model's limit."
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="What the model is to keep to, before the first question."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        min=0,
        max=2,
        help="How freely words are chosen; 0 takes the likeliest, as ask does by default without --url.",
    ),
]
AnswerSeed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same answer.")
]
Schema = Annotated[
    Path | None,
    typer.Option("--schema", metavar="FILE", help="JSON schema for the answer to follow."),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="EPD_URL",
        metavar="URL",
        help="Use a running server of the OpenAI chat API; without /v1.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="EPD_API_KEY", metavar="KEY", help="Key to send to the server."),
]
Address = Annotated[
    str | None, typer.Option("--address", metavar="RAY", help="Address of a running Ray cluster.")
]
AppName = Annotated[
    str,
    typer.Option("--name", metavar="NAME", help="Name of the application among those of a Ray cluster."),
]

# What is drawn, and what it costs
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="The same seed gives the same requests or videos.")
]
Profile = Annotated[
    str,
    typer.Option(
        "--profile", metavar="FILE", help="File of epd profile, or MODEL@DEVICE to compute the costs."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Show frames, size and tokens of each medium, what the video is held to, and the time of each "
        "stage.",
    ),
]
# Output
IsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=_plot, help="Draw a plot: png, svg or pdf."),
]
AnswerFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", callback=_output, help="File for the answer, not stdout."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", callback=_output, help="File to write.")]
ChromeTrace = Annotated[
    Path | None,
    typer.Option(
        "--chrome-trace", metavar="FILE", callback=_output, help="Write a trace for chrome://tracing."
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_output,
        help="Write everything to this file; - prints it instead of the tables.",
    ),
]
