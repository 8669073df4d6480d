"""The command `epd ask`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from epd import console
from epd.cli.options import (
    Device,
    Draft,
    Dtype,
    Fps,
    Frames,
    IsJson,
    MaxDraft,
    MaxTokens,
    MaxVisualTokens,
    Model,
    Reduction,
    Retention,
    SkipStatic,
    draft_config,
    reduction_policy,
    visual_budget,
)
from epd.kv.drafting import DEFAULT_DRAFT, DEFAULT_MAX_DRAFT
from epd.types import Answer, Usage

_Paths = Annotated[
    list[str], typer.Argument(metavar="PATH", help="Videos and images, in the order the model sees them.")
]
_Question = Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask, in quotes.")]
_Start = Annotated[
    float, typer.Option("--start", metavar="S", help="Start of the part to sample from each video, seconds.")
]
_End = Annotated[
    float | None, typer.Option("--end", metavar="S", help="End of that part; by default the video's end.")
]


def ask(
    paths: _Paths,
    question: _Question,
    model: Model = None,
    fps: Fps = None,
    frames: Frames = None,
    start: _Start = 0.0,
    end: _End = None,
    retention: Retention = None,
    reduction: Reduction = None,
    max_visual_tokens: MaxVisualTokens = None,
    skip_static: SkipStatic = None,
    max_tokens: MaxTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    draft: Draft = DEFAULT_DRAFT,
    max_draft: MaxDraft = DEFAULT_MAX_DRAFT,
    as_json: IsJson = False,
) -> None:
    """Answer a question about videos and images.

    Streams the answer to stdout, then prints to stderr what each stage took. With --json, prints one object
    with answer, ttft_s, timings and usage.
    """
    from epd.cli.pipelines import open_pipeline  # torch

    policy, budget = reduction_policy(reduction, retention), visual_budget(max_visual_tokens, retention)
    drafting = draft_config(draft, max_draft)
    pipeline = open_pipeline(
        paths, question, model, skip_static, device=device, dtype=dtype, drafting=drafting
    )
    with console.progress_bar("frames") as show:
        answer = pipeline.ask(
            paths,
            question,
            fps=fps,
            num_frames=frames,
            start_s=start,
            end_s=end,
            reduction=policy,
            budget=budget,
            max_tokens=max_tokens,
            on_text=None if as_json else console.stream_text,
            progress=show,
            on_choice=_show_choice,
        )
    if as_json:
        skipped = {} if skip_static is None else {"num_units_skipped": pipeline.num_units_skipped}
        console.print_json(_record(answer) | skipped)
        return
    console.stream_text("\n")
    console.stderr_console().print(console.stage_table({"seconds": answer.timings}))
    print(_cost_line(answer, pipeline.num_units_skipped), file=sys.stderr)


def _show_choice(line: str) -> None:
    print(f"chose {line}", file=sys.stderr)


def _record(answer: Answer) -> dict[str, object]:
    """An answer as `--json` prints it. Times in seconds."""
    return {
        "answer": answer.text,
        "ttft_s": answer.ttft_s,
        "timings": asdict(answer.timings),
        "usage": asdict(answer.usage),
    }


def _cost_line(answer: Answer, num_units_skipped: int) -> str:
    usage = answer.usage
    is_whole = usage.visual_tokens == usage.visual_tokens_before
    visual = (
        f"{usage.visual_tokens}" if is_whole else f"{usage.visual_tokens} of {usage.visual_tokens_before}"
    )
    return (
        f"first token after {answer.ttft_s:.3f} s; "
        f"{usage.num_frames} frames, {visual} visual tokens, "
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"
        + (f"; {num_units_skipped} units of frames did not change" if num_units_skipped else "")
        + _substituted(usage)
    )


def _substituted(usage: Usage) -> str:
    """The end of the line where frames of the media are damaged, else nothing."""
    num = usage.num_substituted_frames
    shows = "shows" if num == 1 else "show"
    return f"; {num} of {usage.num_frames} frames could not be decoded and {shows} a neighbour" if num else ""
