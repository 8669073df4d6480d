"""The command `epd verify`."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import epd
from epd import __version__, console
from epd.engine_config import EngineConfig
from epd.models import MODEL_HELP, model_folder
from epd.serve_app.cli.flags import with_fields_of
from epd.serve_app.cli.options import IsJson
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video

VERIFIED = ("device", "dtype", "num_threads", "model_impl", "revision", "hub", "num_kv_tokens")
_Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)]
_Media = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CLIP...", help="Images and short videos; by default a video is drawn."),
]
_Topologies = Annotated[
    list[str], typer.Option("--topology", metavar="T", help="Answer in this topology too; repeatable.")
]
_Question = Annotated[str, typer.Option(metavar="TEXT", help="What is asked.")]
_Frames = Annotated[int, typer.Option(metavar="N", help="Frames of each video.")]
_MaxTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of each answer.")]


@with_fields_of(EngineConfig, only=VERIFIED, defaults={"dtype": "float32", "num_kv_tokens": 16_384})
def verify(
    model: _Model = None,
    media: _Media = None,
    topology: _Topologies = ["1epd", "1e1p1d"],  # noqa: B006 # typer reads it, and nothing changes it
    question: _Question = "What is shown?",
    frames: _Frames = 4,
    max_tokens: _MaxTokens = 16,
    as_json: IsJson = False,
    **engine: Any,
) -> None:
    """Compare a checkpoint's answers with those of transformers.

    Asks a text, then a question about each clip. Compares prompts, the first layer that differs, logits,
    tokens, and the texts of topologies in this process. Both models are in memory. Exit status 1 means that
    something differs: attach the report to an issue.
    """
    config = EngineConfig.checked(engine)
    folder = model_folder(model, config.revision, config.hub)
    with _clips(media or ()) as clips:
        reports = epd.verify(
            folder,
            clips,
            question,
            num_frames=frames,
            max_tokens=max_tokens,
            topologies=topology,
            config=config,
        )
    is_equal = all(report.is_equal for report in reports)
    if as_json:
        about = {"model": folder.name, "epd": __version__, "python": platform.python_version()}
        found = {**about, "is_equal": is_equal, "cases": [asdict(report) for report in reports]}
        console.stream_text(json.dumps(found, indent=1) + "\n")
    else:
        for report in reports:
            console.stream_text("".join(f"{line}\n" for line in lines(report)))
        console.stream_text("equal\n" if is_equal else "DIFFERENT\n")
    raise typer.Exit(0 if is_equal else 1)


def lines(report: Any) -> Iterator[str]:
    """Yields the lines of a case."""
    yield f"{report.case}: {report.num_prompt_tokens} tokens of prompt, equal: {_yes(report.is_same_prompt)}"
    if report.has_own_positions:
        yield "  positions: those of the model's authors, which transformers got too"
    yield f"  largest difference of logits: {report.logit_difference:.2g}"
    yield f"  first layer that differs: {_layer(report.first_layer)}"
    yield f"  first token that differs: {'none' if report.first_token is None else report.first_token}"
    yield f"  generate: {report.seconds:.2f} s"
    for answer in report.answers:
        yield f"  {answer.topology}: {answer.seconds:.2f} s, same text: {_yes(answer.is_equal)}"


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "NO"


def _layer(number: int | None) -> str:
    return "none" if number is None else "the embeddings" if number < 0 else str(number)


@contextmanager
def _clips(media: Sequence[Path]) -> Iterator[Sequence[Path]]:
    """Provides the media of a user, or a drawn video."""
    if media:
        yield media
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "drawn.mp4")
        write_demo_video(path, make_scene(7, 8.0), fps=8, height=224, width=224)
        yield [path]
