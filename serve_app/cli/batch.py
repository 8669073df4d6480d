"""The command `epd batch`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import ModuleType
from typing import Annotated, Any

import typer

from epd import console
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import TABLE_SUFFIX, folder_of, is_lines, is_table, read_questions, write_lines
from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import OWN_REQUESTS
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.places import check_apart, copied, is_remote
from epd.batch.progress import StatusFile, batch_bar
from epd.batch.result_files import errors_path, write_table
from epd.batch.result_parts import PartsFolder
from epd.batch.summary import Hardware, Summary
from epd.batch.tables import PARQUET_SUFFIX
from epd.batch.tasks import Backend
from epd.batch.utilisation import Utilisation, plot_utilisation
from epd.control.request_budget import RequestLimits
from epd.engine_config import EngineConfig
from epd.errors import RequestError, check_file
from epd.models import model_folder
from epd.profiles.files import load_profile
from epd.serve_app.cli.early_checks import STDIN, as_path, is_terminal, stdin_file
from epd.serve_app.cli.flags import with_fields_of, with_options_of
from epd.serve_app.cli.options import Address, ApiKey, AppName, IsJson, Model, Plot, System
from epd.serve_app.cli.question_options import QuestionOptions
from epd.serve_app.local.dry_run import DryRun, Look, dry_run, server_look

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
_FrameTimes = Annotated[
    bool, typer.Option("--frame-times", help="Results have the times of the frames that were looked at.")
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
_IsAgreed = Annotated[
    bool, typer.Option("--yes", "-y", help="On a terminal, begin without an estimate and a question.")
]
_Profile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Of an estimate: file of epd profile, or MODEL@DEVICE, for the time."),
]
_HourlyPrice = Annotated[
    float | None,
    typer.Option(min=0, help="What the hardware costs an hour: the summary has the price of 1,000 lines."),
]
_NumDevices = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Devices of the hardware, for hours of video of each.")
]
_MediaInFlight = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Media that running servers are asked about at once; by default by workers."
    ),
]
_EngineRate = Annotated[
    float | None,
    typer.Option(
        "--engine-tokens-per-s",
        metavar="RATE",
        min=0,
        help="Output tokens a second of the engine alone, for requests of this shape: the summary has the "
        "share that was reached.",
    ),
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
# Lines of a run from which on a terminal asks, and media that are looked at for its estimate.
_MANY, _SAMPLE = 100, 32
# In one process: media of a line, and how long one waits for room, since nobody does.
_MAX_MEDIA, _MAX_WAIT_S = 1024, 7 * 24 * 3600.0


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
    media_in_flight: int | None = None

    def __post_init__(self) -> None:
        given = {"--topology": self.topology, "--url": self.urls, "--address": self.address}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"received {' and '.join(names)}; allowed: one of them; leave out the rest")
        if self.media_in_flight is not None and not self.is_server:
            raise RequestError(
                "received --media-in-flight and no running server; allowed: with --url or --address; add one"
            )
        if self.is_server:
            self.config.check_at_server()

    @property
    def is_server(self) -> bool:
        """Returns whether a server that runs answers."""
        return (self.urls, self.address) != (None, None)


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
    frame_times: _FrameTimes = False,
    retry_failed: _RetryFailed = False,
    max_attempts: _MaxAttempts = 3,
    allow_failures: _AllowFailures = False,
    status_file: _StatusFile = None,
    is_dry: _DryRun = False,
    profile: _Profile = None,
    yes: _IsAgreed = False,
    hourly_price: _HourlyPrice = None,
    num_devices: _NumDevices = None,
    engine_tokens_per_s: _EngineRate = None,
    media_in_flight: _MediaInFlight = None,
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
    urls = tuple(url) if url else None
    target = _Target(model, topology, urls, address, name, api_key, config, media_in_flight)
    if is_table(source):
        check_apart(out, source)
    utilisation, results = Utilisation(), _results_place(out, max_attempts)
    hardware = Hardware(hourly_price, num_devices, engine_tokens_per_s)
    estimate = _Estimate(target, profile, hardware, is_asked=not yes and not is_dry and _has_terminal())
    estimate.check(is_dry=is_dry)
    status = None if status_file is None else StatusFile(status_file)
    with ExitStack() as stack:
        lines, folder = stack.enter_context(_lines_file(source, _asked(question, questions)))
        if status is not None:
            stack.enter_context(status.of_run())
        defaults = asked.for_lines(folder, system=system, events=frame_times or None)
        if is_dry:
            raise _ended(estimate.dry_run(lines, defaults, as_json=as_json), is_allowed=allow_failures)
        summary = run_batch(
            BatchPlan(lines, results, defaults, retry_failed, hardware),
            lambda index: _backend(target, index, estimate),
            indexing_bar=lambda: console.progress_bar("reading lines"),
            bar=batch_bar if status is None else partial(status.told, batch_bar),
            utilisation=utilisation,
        )
    if isinstance(results, Path) and PurePath(out).suffix.lower() == TABLE_SUFFIX:
        write_table(Path(out), results)
    if status is not None:
        status.write("done", **summary.record())
    if plot is not None:
        plot_utilisation(utilisation, plot)
    _report(summary, results, as_json=as_json)
    raise _ended(summary.tally.num_failed, is_allowed=allow_failures)


def _ended(num_failed: int, *, is_allowed: bool) -> typer.Exit:
    return typer.Exit(_SOME_FAILED if num_failed and not is_allowed else 0)


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
    if suffix == TABLE_SUFFIX:
        check_file(Path(out))
        return Path(out).with_suffix(".jsonl")
    return Path(out)


def _has_terminal() -> bool:
    """Returns whether somebody can be asked, and sees the question."""
    return is_terminal() and sys.stderr.isatty()


def _ray_server() -> ModuleType:
    """Returns the module that starts and finds applications."""
    from epd.serve_app.ray import server  # Ray

    return server


@contextmanager
def _server(target: _Target, lines_per_medium: float) -> Iterator[HttpBackend]:
    """Opens the servers that run. Raises UnavailableError where none answers."""
    urls = target.urls
    if urls is None:
        urls = (_ray_server().url_of_app(target.address, target.name),)
    with HttpBackend.open(urls, target.api_key, target.media_in_flight, lines_per_medium) as backend:
        yield backend


@contextmanager
def _backend(target: _Target, index: LineIndex, estimate: _Estimate) -> Iterator[Backend]:
    """Opens what answers, once somebody at a terminal has agreed."""
    if target.is_server:
        with _server(target, index.lines_per_medium) as backend:
            estimate.ask(index, lambda: server_look(backend))
            yield backend
        return
    estimate.ask(index, estimate.own_look)
    if target.topology is not None:
        started = _ray_server().started_backend(
            target.model, target.topology, index.media.folder(), target.config, index.lines_per_medium
        )
        with started as backend:
            yield backend
    else:
        from epd.serve_app.cli.own_model import open_model  # torch
        from epd.serve_app.local.own_batch import OwnBackend

        limits = RequestLimits(max_media=_MAX_MEDIA)
        with open_model(target.model, target.config, limits=limits, max_wait_s=_MAX_WAIT_S) as service:
            yield OwnBackend(service, max_requests=OWN_REQUESTS, lines_per_medium=index.lines_per_medium)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Says what a batch would take. is_asked: whether somebody at a terminal decides if it begins."""

    target: _Target
    profile: str | None
    hardware: Hardware
    is_asked: bool

    def check(self, *, is_dry: bool) -> None:
        if self.profile is not None and not (is_dry or self.is_asked):
            raise RequestError(
                "received --profile without --dry-run, and no question at a terminal; allowed: with one of "
                "them; add --dry-run"
            )

    def dry_run(self, lines: Path, defaults: LineDefaults, *, as_json: bool) -> int:
        """Says what all lines would take. Writes no results. Returns how many lines would fail."""
        with ExitStack() as stack:
            index = stack.enter_context(closing(LineIndex(lines, defaults)))
            index.build()
            look = (
                server_look(stack.enter_context(_server(self.target, index.lines_per_medium)))
                if self.target.is_server
                else self.own_look()
            )
            found = self._found(index, look, None)
        if as_json:
            console.print_json(found.record())
        else:
            print(*found.lines(), sep="\n")
        _tell_failures(found)
        return found.num_failing

    def ask(self, index: LineIndex, look: Callable[[], Look]) -> None:
        """Asks whether a run of many lines is to begin, by a sample of its media. Raises Abort."""
        if not self.is_asked or index.num_lines < _MANY:
            return
        found = self._found(index, look(), _SAMPLE)
        print(*found.lines(), sep="\n", file=sys.stderr)
        _tell_failures(found)
        if not typer.confirm("Begin?", default=True, err=True):
            raise typer.Abort

    def own_look(self) -> Look:
        from epd.serve_app.local.own_batch import own_look  # torch

        config = self.target.config
        return own_look(model_folder(self.target.model, config.revision, config.hub), config.pixels)

    def _found(self, index: LineIndex, look: Look, max_groups: int | None) -> DryRun:
        costs = None if self.profile is None else load_profile(self.profile)
        with console.progress_bar("looking at media") as show:
            return dry_run(index, look, costs, show, hardware=self.hardware, max_groups=max_groups)


def _tell_failures(found: DryRun) -> None:
    for kind, reason in found.reasons.items():
        print(f"would fail: {reason.num_lines} {kind}, such as: {reason.example}", file=sys.stderr)


def _report(summary: Summary, results: Path | PartsFolder, *, as_json: bool) -> None:
    if as_json:
        console.print_json(summary.record())
    else:
        print(*summary.lines(), sep="\n")
    where = results.failures if isinstance(results, PartsFolder) else errors_path(results)
    for line in summary.failure_lines(where):
        print(line, file=sys.stderr)
