"""The command `epd eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from epd import console
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.eval.files import read_videos
from epd.eval.items import EvalCase
from epd.eval.plan import EvalPlan, demo_cases
from epd.eval.report import Part, as_part, plot_rows, print_rows
from epd.eval.rows import RowSelection, eval_rows, table_rows
from epd.eval.verdicts import DEMO, RunInfo, VerdictLog
from epd.models import DEFAULT_MODEL
from epd.reduction import METHODS, ReductionPolicy
from epd.serve_app.cli.flags import with_fields_of
from epd.serve_app.cli.options import IsJson, Model, Plot, Seed

_DEFAULT_FRAMES = [32]
_DEFAULT_RETENTIONS = [1.0, 0.25, 0.15, 0.1]

_Data = Annotated[
    Path | None,
    typer.Argument(
        metavar="QUESTIONS",
        help="File of questions: video, question, and answer, or options and a letter. JSON lines, a JSON "
        "array, or a table as .csv or .tsv; those of LongVideoBench and Video-MME as they are.",
    ),
]
_Demo = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Draw new videos of the shapes world instead, with N questions at each number of frames: about "
        "N/6 videos with one question of each kind (see --per-kind).",
    ),
]
_Frames = Annotated[
    list[int] | None,
    typer.Option(metavar="F", help="Frames to sample from each video; repeatable, by default 32."),
]
_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="For --demo: length of each video at every number of frames; by default a second a frame.",
    ),
]
_PerKind = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="For --demo: up to K questions of each kind about a video. More run faster, fewer are more "
        "independent.",
    ),
]
_Retention = Annotated[
    list[float] | None,
    typer.Option(
        metavar="R",
        help="Share of visual tokens to keep; repeatable, by default 1.0, 0.25, 0.15 and 0.1. Full retention "
        "is always measured too.",
    ),
]
_Method = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Reduction method; repeatable, or all; by default the default method."),
]
_VideoDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the videos of QUESTIONS; by default the one it is in."),
]
_MaxTokens = Annotated[
    int,
    typer.Option(metavar="N", help="Longest answer, in tokens."),
]
_TTFTVideos = Annotated[
    int,
    typer.Option(
        "--ttft-videos",
        metavar="N",
        help="Also measure the cold TTFT of each setting on the first N videos, and report the median.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Append verdicts here; a stopped run resumes from it."),
]
_Against = Annotated[
    str,
    typer.Option(metavar="NAME", help="Baseline of the tests: full, or a method at the same retention."),
]
_TableFile = Annotated[
    Path | None,
    typer.Option("--table", metavar="FILE.jsonl", help="Run nothing; show the results in an --out file."),
]
_By = Annotated[
    str | None,
    typer.Option(metavar="kind|duration", help="Also show accuracy by kind of question or length of video."),
]


@with_fields_of(EngineConfig)
def evaluate(
    data: _Data = None,
    demo: _Demo = None,
    frames: _Frames = None,
    seed: Seed = 0,
    seconds: _Seconds = None,
    per_kind: _PerKind = 1,
    retention: _Retention = None,
    method: _Method = None,
    model: Model = None,
    video_dir: _VideoDir = None,
    max_tokens: _MaxTokens = 16,
    ttft_videos: _TTFTVideos = 3,
    out: _Out = None,
    table: _TableFile = None,
    against: _Against = "full",
    by: _By = None,
    plot: Plot = None,
    as_json: IsJson = False,
    **engine: Any,
) -> None:
    """Measure what token reduction costs in accuracy.

    Compares accuracy and time to first token with those at full retention. Questions come from a file or,
    with --demo, from the shapes world that the embedded model knows.
    """
    _check_sources(data, demo, table)
    part = as_part(by) if by is not None else None
    config = EngineConfig.checked(engine)
    if table is not None:
        log = VerdictLog.read(table)
        _show(log, RowSelection.of(log, against), part, plot, as_json)
        return
    asked = _asked(method, retention or _DEFAULT_RETENTIONS, frames or _DEFAULT_FRAMES, against)
    from epd.serve_app.cli.evaluation import placement_of, run_evaluation  # torch

    placement = placement_of(config, model)
    drawn: dict[str, Any] = (
        {} if data else {"seed": seed, "duration_s": seconds or 0.0, "num_per_kind": per_kind}
    )
    run = RunInfo(
        str(data or DEMO),
        str(model or DEFAULT_MODEL),
        max_tokens,
        placement=str(placement),
        pixels=config.visual_text,
        **drawn,
    )
    cases = _cases(run, demo, asked.num_frames, video_dir)
    plan = EvalPlan(tuple(cases), asked.settings, max_tokens, ttft_videos)
    log = VerdictLog(run, out)
    run_evaluation(model, config, plan, log)
    _show(log, asked, part, plot, as_json)


def _check_sources(data: Path | None, demo: int | None, table: Path | None) -> None:
    sources = (("QUESTIONS", data), ("--demo", demo), ("--table", table))
    given = [name for name, value in sources if value is not None]
    if len(given) != 1:
        raise RequestError(
            f"got {' and '.join(given) or 'no questions'}; give one of QUESTIONS, --demo N and --table FILE"
        )


def _asked(
    methods: list[str] | None, retentions: list[float], frames: list[int], against: str
) -> RowSelection:
    """Raises RequestError for invalid methods, retentions and numbers of frames."""
    names = list(METHODS) if methods == ["all"] else methods or [ReductionPolicy().method]
    for name in names if against == "full" else [*names, against]:
        for retention in retentions:
            ReductionPolicy(name, retention)
    if min(frames) < 1:
        raise RequestError(f"--frames is {min(frames)}; sample 1 frame or more")
    once = (tuple(dict.fromkeys(names)), tuple(dict.fromkeys(retentions)), tuple(dict.fromkeys(frames)))
    return RowSelection(*once, against)


def _cases(
    run: RunInfo, num_questions: int | None, frames: tuple[int, ...], video_dir: Path | None
) -> list[EvalCase]:
    """num_questions: in a demo."""
    if num_questions is not None:
        duration_s = run.duration_s or None
        return demo_cases(num_questions, frames, run.seed, duration_s, run.num_per_kind)
    videos = read_videos(Path(run.data), video_dir)
    return [EvalCase(video, each) for each in frames for video in videos]


def _show(log: VerdictLog, asked: RowSelection, by: Part | None, plot: Path | None, as_json: bool) -> None:
    if as_json:
        console.print_json([row.record() for row in eval_rows(log, asked)])
    else:
        print_rows(table_rows(log, asked), console.stdout_console(), by)
    if plot is not None:
        plot_rows(table_rows(log, asked), plot)
