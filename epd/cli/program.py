"""The program `epd`: the composition root.

This file and the verbs beside it, epd/cli_VERB.py, alone in this package may import upward, and only inside
functions, so that `epd --help` is quick.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from epd import console
from epd.cli.batch import batch
from epd.cli.bench import bench
from epd.cli.config import config
from epd.cli.eval import ManyValues, evaluate
from epd.cli.plan import plan
from epd.cli.profile import profile
from epd.cli.serve import serve
from epd.cli.simulate import simulate
from epd.cli.status import status
from epd.errors import EPDError, exit_code
from epd.models import embedded_model_path
from epd.reduction import DEFAULT_METHOD, METHODS, ReductionPolicy
from epd.types import Answer

if TYPE_CHECKING:
    from epd.shapes import Question


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
    start: Annotated[
        float, typer.Option(metavar="S", help="Look at each video from here on, seconds.")
    ] = 0.0,
    end: Annotated[
        float | None, typer.Option(metavar="S", help="And up to here, seconds; by default to its end.")
    ] = None,
    retention: Annotated[
        float, typer.Option(metavar="R", help="Share of the visual tokens that is kept, 0.05 to 1.")
    ] = 1.0,
    reduction: Annotated[
        str, typer.Option(metavar="METHOD", help=f"How those are chosen: {', '.join(METHODS)}.")
    ] = DEFAULT_METHOD,
    skip_static: Annotated[
        float | None,
        typer.Option(
            "--skip-static",
            metavar="TOLERANCE",
            help="Do not encode frames that show what those before them showed, as epd serve has it.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Longest answer, tokens; by default the model's own limit, else its context's end.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object with answer, ttft_s, timings and usage instead.")
    ] = False,
) -> None:
    """Ask a question about videos and images.

    The answer streams to stdout; then stderr shows what each stage took.
    """
    policy = ReductionPolicy(reduction, retention)
    pipeline = _open_pipeline(paths, question, model, skip_static)
    with console.progress_bar("frames") as show:
        answer = pipeline.ask(
            paths,
            question,
            fps=fps,
            num_frames=frames,
            start_s=start,
            end_s=end,
            reduction=policy,
            max_tokens=max_tokens,
            on_text=None if as_json else console.stream_text,
            progress=show,
        )
    if as_json:
        told = {} if skip_static is None else {"num_units_skipped": pipeline.num_units_skipped}
        console.print_json(console.answer_record(answer) | told)
        return
    console.stream_text("\n")
    console.print_answer_cost(answer, pipeline.num_units_skipped)


def _open_pipeline(
    paths: list[str], question: str, model: Path | None, skip_static: float | None = None
) -> Any:
    """The pipeline of a model folder; input that cannot work is refused before weights are loaded."""
    # Threads of torch that wait by spinning would take the cores from those that decode video.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model"):
        import video
        from encoders import check_question
        from encoders.reduction.static_units import check_tolerance
        from stages.colocated import ColocatedPipeline

        check_question(question)
        check_tolerance(skip_static)
        for path in paths:
            video.media_kind(path)
        return ColocatedPipeline.load(model or embedded_model_path(), skip_static=skip_static)


@app.command("demo-video")
def demo_video(
    out: Annotated[Path, typer.Argument(metavar="OUT.mp4", help="File to write; the truth goes beside it.")],
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of the video.")] = 30.0,
    fps: Annotated[int, typer.Option(metavar="F", help="Frames per second.")] = 24,
    size: Annotated[str, typer.Option(metavar="WxH", help="Width and height in pixels, even.")] = "640x360",
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed draws the same video.")] = 7,
) -> None:
    """Draw a video of the shapes world and write what is visible when beside it as JSON.

    Real H.264 with B-frames and a keyframe every two seconds. Prints the two files' names.
    """
    print(out, _write_demo_video(out, seconds, fps, size, seed), sep="\n")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to keep the video that is drawn.")] = Path(
        "demo-out/demo.mp4"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed draws another video.")] = 7,
) -> None:
    """Draw a 60-second video, ask the embedded model five questions about it, and check the answers."""
    out.parent.mkdir(parents=True, exist_ok=True)
    truth = _write_demo_video(out, 60.0, 24, "640x360", seed)
    questions = _demo_questions(truth)
    pipeline = _open_pipeline([str(out)], questions[0].text, None)
    with console.progress_bar("frames") as show:
        context = pipeline.prefill_media([str(out)], progress=show)
    print(f"{out}: 60 s of H.264, {context.num_frames} frames looked at\n")
    answers = [_answer_aloud(pipeline, context, question) for question in questions]
    console.print_demo_cost(context.timings, answers)


def _demo_questions(truth: Path) -> list[Question]:
    """The first question of each of five kinds, from a truth file."""
    from epd.shapes import Question, QuestionKind

    entries = {entry["kind"]: entry for entry in reversed(json.loads(truth.read_text())["questions"])}
    questions = [
        Question(QuestionKind(kind), entry["question"], entry["answer"]) for kind, entry in entries.items()
    ]
    return questions[-5:]


def _answer_aloud(pipeline: Any, context: Any, question: Question) -> Answer:
    console.stream_text(f"{question.text:<45} ")
    answer: Answer = pipeline.answer(context, question.text, on_text=console.stream_text)
    console.print_verdict(question, answer)
    return answer


def _write_demo_video(out: Path, seconds: float, fps: int, size: str, seed: int) -> Path:
    """Draws and writes one video; returns where its truth is. Raises RequestError for useless options."""
    from epd.shapes import make_scene
    from video.demo_video import parse_size, write_demo_video

    height, width = parse_size(size)
    scene = make_scene(seed, seconds)
    with console.progress_bar("drawing") as show:
        return write_demo_video(out, scene, fps=fps, height=height, width=width, progress=show)


app.command()(batch)
app.command()(bench)
app.command("eval", cls=ManyValues)(evaluate)
app.command()(serve)
app.command()(simulate)
app.command()(status)
app.command()(plan)
app.command()(profile)
app.add_typer(config, name="config")


def main() -> None:
    """Entry point of the program."""
    app()
