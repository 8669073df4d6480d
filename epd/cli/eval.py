"""The verb `epd eval`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from epd import console
from epd.errors import RequestError
from epd.models import embedded_model_path

if TYPE_CHECKING:
    from epd.eval.items import EvalCase
    from epd.eval.plan import EvalPlan
    from epd.eval.rows import Asked
    from epd.eval.verdicts import RunInfo, VerdictLog

_DEFAULT_FRAMES = [32]
_DEFAULT_RETENTIONS = [1.0, 0.25, 0.15, 0.1]

_Data = Annotated[
    Path | None,
    typer.Argument(
        metavar="DATA.jsonl",
        help="Questions, one JSON object a line: video, question, and answer, or options and a letter.",
    ),
]
_Demo = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Draw fresh shapes-world videos instead, with N questions in all at each number of frames: "
        "about N/6 videos, and one question of every kind about each (see --per-kind).",
    ),
]
_Frames = Annotated[
    list[int] | None,
    typer.Option(
        metavar="F...", help="Frames to look at in each video, one or several numbers; by default 32."
    ),
]
_Seed = Annotated[int, typer.Option(metavar="S", help="Of --demo: the same seed draws the same videos.")]
_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Of --demo: length of every video, the same ones for each number of frames; "
        "by default one second for each frame.",
    ),
]
_PerKind = Annotated[
    int,
    typer.Option(
        "--per-kind",
        metavar="K",
        help="Of --demo: up to K questions of every kind about each video. More make it quicker, fewer make "
        "the questions more independent.",
    ),
]
_Retention = Annotated[
    list[float] | None,
    typer.Option(
        metavar="R...",
        help="Shares of visual tokens to keep, by default 1.0 0.25 0.15 0.1. All tokens are always "
        "measured too: every test is against them.",
    ),
]
_Method = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME...", help="Ways to reduce, one or several, or all; by default the default one."
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option(help="Folder of a model in Hugging Face layout; by default the embedded shapes-vl."),
]
_VideoDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where the videos of DATA.jsonl are; by default beside it."),
]
_MaxTokens = Annotated[int, typer.Option(metavar="N", help="Longest answer, tokens.")]
_TTFTVideos = Annotated[
    int,
    typer.Option(
        "--ttft-videos",
        metavar="N",
        help="The first N videos are also asked cold with every setting, in turns; TTFT is the median.",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Append every verdict here; a run that was stopped goes on."),
]
_Against = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="What rows are tested against: full, or a method at the same retention."
    ),
]
_TableFile = Annotated[
    Path | None,
    typer.Option("--table", metavar="FILE.jsonl", help="Ask nothing, show what an --out file holds."),
]
_PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw accuracy against retention: png, svg or pdf."),
]
_Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Threads of torch; by default OMP_NUM_THREADS or all cores.")
]
_IsJson = Annotated[bool, typer.Option("--json", help="Print a list of rows instead of tables.")]


# Options that take several values; whether those are numbers.
_MANY = {"--frames": True, "--retention": True, "--method": False}


class ManyValues(TyperCommand):
    """The verb with options that take several values at once: `--frames 32 128`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, list(spread_values(args)))
        return parsed


def spread_values(args: Sequence[str]) -> Iterator[str]:
    """`--frames 32 128` as `--frames 32 --frames 128`, which is what the parser takes.

    What cannot be another value stays where it is: the next option, text after numbers, and .jsonl files.
    """
    option, has_value = "", False
    for arg in args:
        if arg.startswith("--"):
            option, has_value = arg if arg in _MANY else "", False
        elif option and not has_value:
            has_value = True
        elif option and _may_be_value(arg, is_number=_MANY[option]):
            yield option
        else:
            option = ""
        yield arg


def _may_be_value(arg: str, *, is_number: bool) -> bool:
    if is_number:
        return arg.replace(".", "", 1).isdigit()
    return not arg.startswith("-") and not arg.endswith((".jsonl", ".json"))


def evaluate(
    data: _Data = None,
    demo: _Demo = None,
    frames: _Frames = None,
    seed: _Seed = 0,
    seconds: _Seconds = None,
    per_kind: _PerKind = 1,
    retention: _Retention = None,
    method: _Method = None,
    model: _Model = None,
    video_dir: _VideoDir = None,
    max_tokens: _MaxTokens = 16,
    ttft_videos: _TTFTVideos = 3,
    out: _Out = None,
    table: _TableFile = None,
    against: _Against = "full",
    plot: _PlotFile = None,
    threads: _Threads = None,
    as_json: _IsJson = False,
) -> None:
    """Measure what reducing visual tokens costs: accuracy and time to first token, against all tokens.

    Questions come from a file or, with --demo, from the shapes world that the embedded model knows.
    """
    from epd.eval.plan import EvalPlan
    from epd.eval.rows import Asked
    from epd.eval.verdicts import VerdictLog

    _check_sources(data, demo, table)
    if plot is not None:
        from epd.bench.plots import check_plot_path

        check_plot_path(plot)
    if table is not None:
        log = VerdictLog.read(table)
        _show(log, Asked.of(log, against), plot, as_json)
        return
    asked = _asked(method, retention or _DEFAULT_RETENTIONS, frames or _DEFAULT_FRAMES, against)
    run = _run_info(data, model, max_tokens, seed, seconds, per_kind)
    cases = _cases(run, demo, asked.num_frames, video_dir)
    plan = EvalPlan(tuple(cases), asked.settings, max_tokens, ttft_videos)
    log = VerdictLog(run, out)
    _run(plan, log, model, threads)
    _show(log, asked, plot, as_json)


def _check_sources(data: Path | None, demo: int | None, table: Path | None) -> None:
    given = [
        name
        for name, value in (("DATA.jsonl", data), ("--demo", demo), ("--table", table))
        if value is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"got {' and '.join(given) or 'no questions'}; give one of DATA.jsonl, --demo N and --table FILE"
        )


def _asked(methods: list[str] | None, retentions: list[float], frames: list[int], against: str) -> Asked:
    """Raises RequestError for methods, retentions and numbers of frames that there cannot be."""
    from epd.eval.rows import Asked
    from epd.reduction import METHODS, ReductionPolicy

    names = list(METHODS) if methods == ["all"] else methods or [ReductionPolicy().method]
    for name in names if against == "full" else [*names, against]:
        for retention in retentions:
            ReductionPolicy(name, retention)
    if min(frames) < 1:
        raise RequestError(f"--frames is {min(frames)}; look at 1 frame or more")
    once = (tuple(dict.fromkeys(names)), tuple(dict.fromkeys(retentions)), tuple(dict.fromkeys(frames)))
    return Asked(*once, against)


def _run_info(
    data: Path | None, model: Path | None, max_tokens: int, seed: int, seconds: float | None, per_kind: int
) -> RunInfo:
    from epd.eval.verdicts import DEMO, RunInfo

    name = "shapes-vl" if model is None else str(model)
    if data is not None:
        return RunInfo(str(data), name, max_tokens)
    return RunInfo(DEMO, name, max_tokens, seed, seconds or 0.0, per_kind)


def _cases(
    run: RunInfo, num_questions: int | None, frames: Sequence[int], video_dir: Path | None
) -> list[EvalCase]:
    """num_questions: of a demo."""
    from epd.eval.demo import demo_cases
    from epd.eval.files import read_videos
    from epd.eval.items import EvalCase

    if num_questions is not None:
        return demo_cases(num_questions, frames, run.seed, run.duration_s or None, run.num_per_kind)
    videos = read_videos(Path(run.data), video_dir)
    return [EvalCase(video, each) for each in frames for video in videos]


def _run(plan: EvalPlan, log: VerdictLog, model: Path | None, threads: int | None) -> None:
    # Threads of torch that wait by spinning would take the cores from those that decode video.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model"):
        from stages.colocated import ColocatedPipeline
        from stages.evaluation import evaluate

        pipeline = ColocatedPipeline.load(model or embedded_model_path(), num_threads=threads)
    with console.progress_bar("settings x videos") as show:
        evaluate(pipeline, plan, log, show)


def _show(log: VerdictLog, asked: Asked, plot: Path | None, as_json: bool) -> None:
    from epd.eval.rows import eval_rows, table_rows

    if as_json:
        console.print_json([row.record() for row in eval_rows(log, asked)])
    else:
        from epd.eval.report import print_rows

        print_rows(table_rows(log, asked), console.stdout_console())
    if plot is not None:
        from epd.eval.report import plot_rows

        plot_rows(table_rows(log, asked), plot)
