"""The commands `epd demo` and `epd demo-video`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from epd import console
from epd.client.conversation import Conversation
from epd.engine_config import DEFAULT_ENGINE
from epd.serve_app.cli.conversations import FrameProgress, open_conversation
from epd.serve_app.cli.options import Seed
from epd.shapes import Question, QuestionKind, make_scene
from epd.types import Answer
from epd.video.demo_video import parse_size, write_demo_video

_Out = Annotated[Path, typer.Option(metavar="FILE", help="Where to write the video.")]
_OutFile = Annotated[
    Path, typer.Argument(metavar="OUT.mp4", help="File to write; a JSON file with the truth goes beside it.")
]
_Seconds = Annotated[float, typer.Option(metavar="S", help="Length of the video.")]
_Fps = Annotated[int, typer.Option(metavar="F", help="Frames per second.")]
_Size = Annotated[str, typer.Option(metavar="WxH", help="Width and height in pixels, even.")]


def demo_video(
    out: _OutFile,
    seconds: _Seconds = 30.0,
    fps: _Fps = 24,
    size: _Size = "640x360",
    seed: Seed = 7,
) -> None:
    """Draw a video whose contents are known.

    Writes a scene of the shapes world as H.264, with B-frames and a keyframe every two seconds, and beside it
    a JSON file that says what is visible when. Prints the names of the two files.
    """
    print(out, _write_video(out, seconds, fps, size, seed), sep="\n")


def demo(out: _Out = Path("demo-out/demo.mp4"), seed: Seed = 7) -> None:
    """Draw a video and check five answers about it.

    Asks the embedded model five questions about a drawn video of 60 seconds and compares with the truth.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    questions = _questions(_write_video(out, 60.0, 24, "640x360", seed))
    own = (None, None)
    with open_conversation([str(out)], None, own, DEFAULT_ENGINE, is_greedy=True) as conversation:
        with console.progress_bar("frames") as show:
            seen = conversation.ask(questions[0].text, on_span=FrameProgress(show).take)
        print(f"{out}: 60 s of H.264, {seen.usage.num_frames} frames sampled\n")
        _print_cost(seen, [_answer_aloud(conversation, question) for question in questions])


def _questions(truth: Path) -> list[Question]:
    """The first question of each of five kinds, from a truth file."""
    entries = {entry["kind"]: entry for entry in reversed(json.loads(truth.read_text())["questions"])}
    questions = [
        Question(QuestionKind(kind), entry["question"], entry["answer"]) for kind, entry in entries.items()
    ]
    return questions[-5:]


def _answer_aloud(conversation: Conversation, question: Question) -> Answer:
    """Streams the answer to a first question, then prints the truth and whether they agree."""
    conversation.forget()
    console.stream_text(f"{question.text:<45} ")
    answer = conversation.ask(question.text, console.stream_text)
    tick = "✓" if question.is_answered_by(answer.text) else "✗"
    space = " " * max(1, 12 - len(answer.text))
    print(f"{space}truth: {question.answer:<12} {tick}")
    return answer


def _print_cost(seen: Answer, answers: list[Answer]) -> None:
    """Prints how long each stage took: for the video with its first answer, and for all questions after."""
    asked = sum((answer.timings for answer in answers[1:]), answers[0].timings)
    columns = {"video, once: s": seen.timings, f"{len(answers)} questions: s": asked}
    print()
    console.stdout_console().print(console.stage_table(columns))
    usage, ttft_s = answers[0].usage, median(answer.ttft_s for answer in answers)
    print(
        f"\n{usage.num_frames} frames, {usage.visual_tokens} visual tokens, "
        f"{usage.prompt_tokens} prompt tokens; a question's first token after {ttft_s:.3f} s"
    )


def _write_video(out: Path, seconds: float, fps: int, size: str, seed: int) -> Path:
    """Draws and writes a video; returns the file with its truth. Raises RequestError for useless options."""
    height, width = parse_size(size)
    scene = make_scene(seed, seconds)
    with console.progress_bar("drawing") as show:
        return write_demo_video(out, scene, fps=fps, height=height, width=width, progress=show)
