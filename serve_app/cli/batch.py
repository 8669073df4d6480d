"""The command `epd batch`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer

from epd import console
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import TABLE_SUFFIX, folder_of, is_lines, is_table, read_questions, write_lines
from epd.batch.http_backend import HttpBackend
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.places import copied, is_remote
from epd.batch.progress import StatusFile, batch_bar
from epd.batch.result_files import errors_path, write_table
from epd.batch.result_parts import PartsFolder
from epd.batch.summary import Summary
from epd.batch.tables import PARQUET_SUFFIX
from epd.batch.tasks import Backend
from epd.batch.utilisation import Utilisation, plot_utilisation
from epd.control.request_budget import RequestLimits
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.models import model_folder
from epd.profiles.files import load_profile
from epd.serve_app.cli.early_checks import STDIN, as_path, stdin_file
from epd.serve_app.cli.flags import with_fields_of, with_options_of
from epd.serve_app.cli.options import (
    Address,
    ApiKey,
    AppName,
    IsJson,
    Model,
    Plot,
    System,
)
from epd.serve_app.cli.question_options import QuestionOptions

_Source = Annotated[
    str,
    typer.Argument(
        metavar="IN",
        help="JSON lines, a .csv or Parquet; with --question(s) also media: one, a pattern in quotes, a "
        "folder of videos, a .txt of them. A path, - for lines from stdin, s3:// or gs://.",
    ),
]
_Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="Results: OUT.jsonl or OUT.csv, failures go to OUT.errors.jsonl; or a folder of Parquet, a name "
        "that ends in / or .parquet, s3:// or gs://.",
    ),
]
_Questions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="One question per line, asked about every medium or row of IN."),
]
_Question = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Question about every medium or row of IN; {name}, {stem}, {path} or a {COLUMN} are filled in.",
    ),
]
_RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", "--retry-quarantined", help="Ask all lines again that have failed.")
]
_MaxAttempts = Annotated[
    int,
    typer.Option(
        min=1,
        help="With results in Parquet: runs that ask a line that the server could not answer.",
    ),
]
_AllowFailures = Annotated[
    bool, typer.Option("--allow-failures", help="Exit with 0 even when lines failed, instead of 1.")
]
_StatusFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file to keep up to date with how far the run is."),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what the batch would take: media, tokens, time. Ask nothing.")
]
_Profile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="With --dry-run: file of epd profile, or MODEL@DEVICE, for the time."),
]
_HourlyPrice = Annotated[
    float | None,
    typer.Option(min=0, help="What the hardware costs an hour: the summary has the price of 1,000 lines."),
]
_Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        envvar="EPD_URL",
        metavar="URL",
        help="Use running servers of the OpenAI chat API, without /v1; of several, each medium goes to one.",
    ),
]
_SOME_FAILED = 1
_OUT_SUFFIXES = (".jsonl", ".ndjson", TABLE_SUFFIX)
_Topology = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="Start workers as epd serve does; by default one process does all the work."
    ),
]
# In one process: media of a line, lines in flight, and how long one waits for room, since nobody does.
_MAX_MEDIA, _MAX_REQUESTS, _MAX_WAIT_S = 1024, 56, 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Target:
    """What answers: a pipeline in this process unless topology, url or address says otherwise."""

    model: Path | None
    topology: str | None
    urls: tuple[str, ...] | None
    address: str | None
    name: str
    api_key: str | None
    config: EngineConfig

    def __post_init__(self) -> None:
        given = {"--topology": self.topology, "--url": self.urls, "--address": self.address}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"received {' and '.join(names)}; allowed: one of them; leave out the rest")
        if (self.urls, self.address) != (None, None):
            self.config.check_at_server()


@with_fields_of(EngineConfig)
@with_options_of(QuestionOptions)
def batch(
    source: _Source,
    out: _Out,
    question: _Question = None,
    questions: _Questions = None,
    model: Model = None,
    topology: _Topology = None,
    url: _Urls = None,
    address: Address = None,
    name: AppName = "epd",
    api_key: ApiKey = None,
    system: System = None,
    retry_failed: _RetryFailed = False,
    max_attempts: _MaxAttempts = 3,
    allow_failures: _AllowFailures = False,
    status_file: _StatusFile = None,
    dry_run: _DryRun = False,
    profile: _Profile = None,
    hourly_price: _HourlyPrice = None,
    plot: Plot = None,
    as_json: IsJson = False,
    **options: Any,
) -> None:
    """Answer a file of questions about videos and images.

    Questions about the same video share its decoding, encoding and prefill. Values in a line take precedence
    over the options. Run the same command again to resume a stopped batch. With --address, uses the
    application on that cluster. Exits with 1 when a line failed.
    """
    asked, config = QuestionOptions.parted(options)
    source = as_path(source)
    target = _Target(model, topology, tuple(url) if url else None, address, name, api_key, config)
    utilisation, results = Utilisation(), _results_place(out, max_attempts)
    _check_dry_run(target, profile, is_dry=dry_run)
    status = None if status_file is None else StatusFile(status_file)
    with ExitStack() as stack:
        lines, folder = stack.enter_context(_lines_file(source, _asked(question, questions)))
        if status is not None:
            stack.enter_context(status.of_run())
        defaults = LineDefaults(
            folder,
            asked.fps,
            asked.frames,
            asked.max_tokens,
            asked.retention,
            asked.reduction,
            asked.compute_share,
            asked.max_visual_tokens,
            start_s=asked.start or None,
            end_s=asked.end,
            system=system,
            sampling=asked.sampling,
        )
        if dry_run:
            failed = _look(lines, defaults, target, profile, as_json=as_json)
            raise typer.Exit(_SOME_FAILED if failed and not allow_failures else 0)
        summary = run_batch(
            BatchPlan(lines, results, defaults, retries_failed=retry_failed),
            lambda index: _backend(target, index),
            indexing_bar=lambda: console.progress_bar("reading lines"),
            bar=batch_bar if status is None else partial(status.told, batch_bar),
            utilisation=utilisation,
        )
    summary = replace(summary, hourly_price=hourly_price)
    if isinstance(results, Path) and PurePath(out).suffix.lower() == TABLE_SUFFIX:
        write_table(Path(out), results)
    if status is not None:
        status.write("done", **summary.record())
    _report(summary, utilisation, plot, as_json=as_json)
    where = results.failures if isinstance(results, PartsFolder) else errors_path(results)
    for line in summary.failure_lines(where):
        print(line, file=sys.stderr)
    if summary.tally.num_failed and not allow_failures:
        raise typer.Exit(_SOME_FAILED)


@contextmanager
def _lines_file(source: str, asked: list[str]) -> Iterator[tuple[Path, str | Path]]:
    """Yields the input itself, or lines made of it and the questions asked; where its paths begin."""
    is_ready = is_lines(source, has_questions=bool(asked))
    if source == STDIN and not asked:
        with stdin_file() as lines:
            yield lines, Path.cwd()
        return
    if is_ready and asked:
        raise RequestError(
            f"received no media, list or table, '{source}', and questions; allowed: --question or "
            "--questions with media, a folder, a .txt of media, a .csv or Parquet, or a file of lines without"
        )
    if is_ready and not is_remote(source):
        yield Path(source), folder_of(source)
        return
    if not (is_ready or asked or is_table(source)):
        raise RequestError(
            f"received media, '{source}', and no question; allowed: with --question or --questions; give "
            "one of them"
        )
    with tempfile.TemporaryDirectory(prefix="epd-batch-") as name:
        if is_ready:
            yield copied(source, Path(name)), folder_of(source)
            return
        lines = Path(name) / "lines.jsonl"
        write_lines(lines, source, asked)
        yield lines, folder_of(source)


def _asked(question: str | None, questions: Path | None) -> list[str]:
    if question is not None and questions is not None:
        raise RequestError("received --question and --questions; allowed: one of them; leave one out")
    if question is not None:
        return [question]
    return [] if questions is None else read_questions(questions)


def _results_place(out: str, max_attempts: int) -> Path | PartsFolder:
    """Returns the file of results, of a .csv that beside it, or the folder of parts. Raises RequestError."""
    suffix = PurePath(out).suffix.lower()
    if out.endswith("/") or suffix == PARQUET_SUFFIX or is_remote(out):
        return PartsFolder(out, max_attempts)
    if suffix not in _OUT_SUFFIXES:
        raise RequestError(
            f"received '{out}' for the results; allowed: a name that ends in {' or '.join(_OUT_SUFFIXES)}, "
            f"or a folder of Parquet that ends in / or {PARQUET_SUFFIX}; rename it"
        )
    return Path(out).with_suffix(".jsonl") if suffix == TABLE_SUFFIX else Path(out)


@contextmanager
def _backend(target: _Target, index: LineIndex) -> Iterator[Backend]:
    if target.urls is not None:
        with HttpBackend.open(target.urls, target.api_key) as backend:
            yield backend
    elif target.topology is not None or target.address is not None:
        from epd.serve_app.ray.server import started_backend, url_of_app  # Ray

        opened = (
            HttpBackend.open(url_of_app(target.address, target.name), target.api_key)
            if target.address is not None
            else started_backend(target.model, target.topology or "", index.media.folder(), target.config)
        )
        with opened as backend:
            yield backend
    else:
        from epd.serve_app.cli.own_backend import OwnBackend, open_model  # torch

        limits = RequestLimits(max_media=_MAX_MEDIA)
        with open_model(target.model, target.config, limits=limits, max_wait_s=_MAX_WAIT_S) as service:
            yield OwnBackend(service, max_requests=_MAX_REQUESTS)


def _check_dry_run(target: _Target, profile: str | None, *, is_dry: bool) -> None:
    if profile is not None and not is_dry:
        raise RequestError("received --profile without --dry-run; allowed: with it; add --dry-run")
    if is_dry and (target.urls, target.address) != (None, None):
        raise RequestError(
            "received --dry-run and a running server; allowed: with the model's folder; give --model instead"
        )


def _look(lines: Path, defaults: LineDefaults, target: _Target, profile: str | None, *, as_json: bool) -> int:
    """Says what the batch would take. Writes no results. Returns how many lines would fail."""
    from epd.serve_app.local.dry_run import dry_run  # torch

    costs = None if profile is None else load_profile(profile)
    model = model_folder(target.model, target.config.revision, target.config.hub)
    with closing(LineIndex(lines, defaults)) as index, console.progress_bar("looking at media") as show:
        index.build()
        found = dry_run(index, model, target.config.pixels, costs, show)
    if as_json:
        console.print_json(found.record())
    else:
        print(*found.lines(), sep="\n")
    for kind, reason in found.reasons.items():
        print(f"would fail: {reason.num_lines} {kind}, such as: {reason.example}", file=sys.stderr)
    return found.num_failing


def _report(summary: Summary, utilisation: Utilisation, plot: Path | None, *, as_json: bool) -> None:
    if plot is not None:
        plot_utilisation(utilisation, plot)
    if as_json:
        console.print_json(summary.record())
    else:
        print(*summary.lines(), sep="\n")
