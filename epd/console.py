"""What every verb shows: data on stdout, everything else on stderr, errors as one line.

rich is imported when something is drawn, so that `epd --help` stays quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Protocol

from epd.errors import EPDError
from epd.types import Answer, StageTimings, Usage

if TYPE_CHECKING:
    from rich.console import Console

    from epd.shapes import Question

_STAGES = {
    "probe_s": "probe",
    "decode_video_s": "decode video (wait)",
    "preprocess_s": "preprocess",
    "encode_s": "encode",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "total_s": "total",
}


class ShowProgress(Protocol):
    """Draws how much of some long work is done."""

    def __call__(self, num_done: int, num_all: int) -> None: ...


def stderr_console() -> Console:
    """A rich console on today's stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """A rich console on today's stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def error_line(error: EPDError) -> None:
    """Prints the error as one line on stderr."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)


def stream_text(piece: str) -> None:
    """Prints a piece of an answer on stdout at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def print_json(record: object) -> None:
    """Prints one JSON object on stdout."""
    print(json.dumps(record, ensure_ascii=False))


@contextmanager
def status(text: str) -> Iterator[None]:
    """Shows on a terminal that something is going on."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr_console().status(text):
        yield


@contextmanager
def progress_bar(description: str) -> Iterator[ShowProgress]:
    """A bar on stderr, on a terminal only, that goes away when all is done or the block is left."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task(description, total=None)

        def show(num_done: int, num_all: int) -> None:
            progress.update(task, completed=num_done, total=num_all)
            if num_done >= num_all:
                progress.stop()

        yield show


def answer_record(answer: Answer) -> dict[str, object]:
    """An answer as `--json` prints it. Times in seconds."""
    return {
        "answer": answer.text,
        "ttft_s": answer.ttft_s,
        "timings": asdict(answer.timings),
        "usage": asdict(answer.usage),
    }


def print_stage_table(timings: StageTimings) -> None:
    """Seconds spent on each stage, on stderr; of video decoding, what had to be waited for."""
    from rich.table import Table

    table = Table("stage", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    for field, name in _STAGES.items():
        table.add_row(name, f"{getattr(timings, field):.3f}", end_section=field == "decode_s")
    stderr_console().print(table)


def print_answer_cost(answer: Answer, num_units_skipped: int = 0) -> None:
    """The table of stages and what went through them, on stderr."""
    print_stage_table(answer.timings)
    usage = answer.usage
    is_whole = usage.visual_tokens == usage.visual_tokens_before
    visual = (
        f"{usage.visual_tokens}" if is_whole else f"{usage.visual_tokens} of {usage.visual_tokens_before}"
    )
    print(
        f"first token after {answer.ttft_s:.3f} s; "
        f"{usage.num_frames} frames, {visual} visual tokens, "
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"
        + (f"; {num_units_skipped} units of frames did not change" if num_units_skipped else "")
        + _substituted(usage),
        file=sys.stderr,
    )


def _substituted(usage: Usage) -> str:
    """The end of the line where frames of the media are damaged, else nothing."""
    num = usage.num_substituted_frames
    shows = "shows" if num == 1 else "show"
    return f"; {num} of {usage.num_frames} frames could not be decoded and {shows} a neighbour" if num else ""


def print_verdict(question: Question, answer: Answer) -> None:
    """The rest of a demo line, after the streamed answer: the truth and whether they agree, on stdout."""
    tick = "✓" if question.is_answered_by(answer.text) else "✗"
    space = " " * max(1, 12 - len(answer.text))
    print(f"{space}truth: {question.answer:<12} {tick}")


def print_demo_cost(media: StageTimings, answers: Sequence[Answer]) -> None:
    """Where the time of a demo went: the video once, then each question, on stdout."""
    from rich.table import Table

    table = Table("stage", box=None, pad_edge=False)
    table.add_column("video, once: s", justify="right")
    table.add_column(f"{len(answers)} questions: s", justify="right")
    for field, name in _STAGES.items():
        asked = sum(getattr(answer.timings, field) for answer in answers)
        table.add_row(name, f"{getattr(media, field):.3f}", f"{asked:.3f}", end_section=field == "decode_s")
    print()
    stdout_console().print(table)
    usage, ttft_s = answers[0].usage, median(answer.ttft_s for answer in answers)
    print(
        f"\n{usage.num_frames} frames, {usage.visual_tokens} visual tokens, "
        f"{usage.prompt_tokens} prompt tokens; a question's first token after {ttft_s:.3f} s"
    )
