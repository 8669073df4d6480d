"""The program `epd`: the composition root.

The one file of this package that may import upward, and only inside functions, so that `epd --help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from epd import console
from epd.errors import EPDError, exit_code
from epd.models import embedded_model_path


class _Verbs(TyperGroup):
    """Ends a verb that raises an EPDError with one line on stderr and the error's exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EPDError as error:
            console.error_line(error)
            raise typer.Exit(exit_code(error)) from error


app = typer.Typer(
    cls=_Verbs,
    name="epd",
    help="Answers questions about images and long videos.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _program() -> None:
    """Answers questions about images and long videos with vision-language models."""


@app.command()
def ask(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Videos and images, in the order the model sees them."),
    ],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask, in quotes.")],
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a model in Hugging Face layout; by default the embedded shapes-vl."),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="Frames to look at per second of video; by default as the model's processor."
        ),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(metavar="N", help="Frames to look at in each video, evenly spread; or use --fps."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Longest answer, tokens; by default as the model's settings say."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object with answer, ttft_s, timings and usage instead.")
    ] = False,
) -> None:
    """Ask a question about videos and images.

    The answer streams to stdout; then stderr shows what each stage took.
    """
    pipeline = _open_pipeline(paths, question, model)
    with console.progress_bar("frames") as show:
        answer = pipeline.ask(
            paths,
            question,
            fps=fps,
            num_frames=frames,
            max_tokens=max_tokens,
            on_text=None if as_json else console.stream_text,
            progress=show,
        )
    if as_json:
        console.print_json(console.answer_record(answer))
        return
    console.stream_text("\n")
    console.print_answer_cost(answer)


def _open_pipeline(paths: list[str], question: str, model: Path | None) -> Any:
    """The pipeline of a model folder; input that cannot work is refused before weights are loaded."""
    with console.status("loading the model"):
        import video
        from encoders import check_question
        from stages.colocated import ColocatedPipeline

        check_question(question)
        for path in paths:
            video.media_kind(path)
        return ColocatedPipeline.load(model or embedded_model_path())


def main() -> None:
    """Entry point of the program."""
    app()
