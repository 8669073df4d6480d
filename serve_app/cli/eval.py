"""The command `epd eval`, which prints the rows of an evaluation, and plots accuracy against retention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from epd import console
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.eval.files import read_videos
from epd.eval.items import FULL, EvalCase
from epd.eval.plan import EvalPlan, demo_cases
from epd.eval.rows import EvalRow, Interval, RowSelection, eval_rows, table_rows
from epd.eval.verdicts import DEMO, RunInfo, VerdictLog
from epd.models import DEFAULT_MODEL
from epd.picture import picture
from epd.reduction import METHODS, ReductionPolicy
from epd.serve_app.cli.flags import with_fields_of
from epd.serve_app.cli.options import IsJson, Model, Plot, Seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = Literal["kind", "duration"]

_COLUMNS = ("kept", "tokens", "KV MB", "right", "95 %", "of full", "won", "lost", "p", "TTFT")
# Methods that look at nothing: the baseline for any other.
_CONTROLS = ("random", "uniform")
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


def as_part(name: str) -> Part:
    """Returns the name as that of a part. Raises RequestError for an unknown one."""
    for part in get_args(Part):
        if name == part:
            known: Part = part
            return known
    raise RequestError(f"--by is {name!r}; give one of {', '.join(get_args(Part))}")


def print_rows(rows: Sequence[EvalRow], console: Console, by: Part | None = None) -> None:
    """Prints a table for each number of frames, with a line for each row. by: print accuracy by it, too."""
    for num_frames in sorted({row.num_frames for row in rows}):
        mine = [row for row in rows if row.num_frames == num_frames]
        table = Table("method", box=None, pad_edge=False, collapse_padding=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for row in mine:
            table.add_row(row.method, *_cells(row))
        console.print(
            f"{num_frames} frames, {mine[0].num_questions} questions, {mine[0].num_videos} videos\n"
        )
        console.print(table)
        console.print()
        if by is not None:
            _print_parts(mine, by, console)
    console.print("kept: share of visual tokens. right: % of answers, with its 95 % interval.")
    other = {row.against for row in rows} - {FULL.method}
    against = f"with {other.pop()}" if other else "with all tokens"
    console.print("of full: % of the accuracy with all tokens. TTFT: cold, s.")
    console.print(f"won, lost: right only here, only {against}. p: exact McNemar test of these.")


def _print_parts(rows: Sequence[EvalRow], by: Part, console: Console) -> None:
    """Prints the accuracy of each part of the questions, part by part, with a line for each row.

    F1: of the facts of descriptions, each of which is right with all facts and no other.
    """
    lines = [(part, row) for row in rows for part in (row.kinds if by == "kind" else row.duration_groups)]
    names = list(dict.fromkeys(part.name for part, _ in lines))
    table = Table(by, "method", box=None, pad_edge=False, collapse_padding=True)
    for name in ("kept", "questions", "right", "95 %", "F1"):
        table.add_column(name, justify="right")
    for part, row in sorted(lines, key=lambda line: names.index(line[0].name)):
        right = _percent(part.accuracy, part.interval)
        facts = "" if part.facts_f1 is None else f"{part.facts_f1:.3f}"
        table.add_row(part.name, row.method, f"{row.retention:g}", str(part.num_questions), *right, facts)
    console.print(table if names else f"no question names its {by}")
    console.print()


def _percent(accuracy: float, interval: Interval) -> tuple[str, str]:
    return f"{accuracy * 100:.1f}", f"{interval.low * 100:.1f}-{interval.high * 100:.1f}"


def _cells(row: EvalRow) -> list[str]:
    is_full = row.method == FULL.method
    return [
        f"{row.retention:g}",
        str(row.visual_tokens),
        f"{row.kv_bytes / 1e6:.3g}",
        *_percent(row.accuracy, row.interval),
        "" if is_full or row.relative_accuracy is None else f"{row.relative_accuracy * 100:.1f}",
        "" if is_full else str(row.wins),
        "" if is_full else str(row.losses),
        "" if is_full or row.p_value is None else f"{row.p_value:.1g}",
        "" if row.ttft_s is None else f"{row.ttft_s:.3f}",
    ]


def plot_rows(rows: Sequence[EvalRow], path: Path) -> None:
    """Writes one picture: a panel for each number of frames, a line for each method."""
    frames = sorted({row.num_frames for row in rows})
    with picture(path, 5.5 * len(frames), 4.5) as figure:
        axes = figure.subplots(1, len(frames), squeeze=False, sharey=True)
        for panel, num_frames in zip(axes[0], frames, strict=True):
            _plot_panel(panel, [row for row in rows if row.num_frames == num_frames])
            panel.set_title(f"{num_frames} frames")
        axes[0][0].set_ylabel("accuracy")
        axes[0][-1].legend(loc="lower right")


def _plot_panel(axes: Axes, rows: Sequence[EvalRow]) -> None:
    full = [row for row in rows if row.retention == 1.0][:1]
    for row in full:
        axes.axhline(row.accuracy, color="black", linestyle=":", label="all tokens")
    for method in dict.fromkeys(row.method for row in rows if row.method != FULL.method):
        mine = sorted(
            [*full, *(row for row in rows if row.method == method and row.retention < 1.0)],
            key=lambda row: row.retention,
        )
        _plot_line(axes, method, mine)
    axes.set(xlabel="share of visual tokens kept", xscale="log")
    ticks = sorted({row.retention for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _plot_line(axes: Any, method: str, rows: Sequence[EvalRow]) -> None:
    is_control = method in _CONTROLS
    below = [row.accuracy - row.interval.low for row in rows]
    above = [row.interval.high - row.accuracy for row in rows]
    axes.errorbar(
        [row.retention for row in rows],
        [row.accuracy for row in rows],
        yerr=[below, above],
        label=f"{method} (control)" if is_control else method,
        linestyle="--" if is_control else "-",
        color={"random": "0.6", "uniform": "0.4"}.get(method),
        marker="o",
        markersize=4,
        capsize=2,
        elinewidth=0.6,
    )
