"""The command `epd batch`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from epd import console
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import write_lines
from epd.batch.http_backend import HttpBackend
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.plot import plot_utilisation
from epd.batch.progress import batch_bar
from epd.batch.summary import Summary
from epd.batch.tasks import Backend
from epd.batch.utilisation import Utilisation
from epd.control.request_budget import RequestLimits
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.serve_app.cli.options import (
    Address,
    ApiKey,
    AppName,
    ComputeShare,
    Fps,
    Frames,
    IsJson,
    MaxTokens,
    MaxVisualTokens,
    Model,
    Plot,
    Reduction,
    Retention,
    Url,
    check_numbers,
    reduction_policy,
    visual_budget,
    with_fields_of,
)

_Source = Annotated[
    Path, typer.Argument(metavar="IN", help="JSON lines, or a folder of videos with --questions.")
]
_Out = Annotated[
    Path, typer.Argument(metavar="OUT.jsonl", help="Results; failures go to OUT.errors.jsonl beside it.")
]
_Questions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="One question per line, asked about every video in the folder IN."),
]
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
    url: str | None
    address: str | None
    name: str
    api_key: str | None
    config: EngineConfig

    def __post_init__(self) -> None:
        given = {"--topology": self.topology, "--url": self.url, "--address": self.address}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"received {' and '.join(names)}; allowed: one of them; leave out the rest")
        if (self.url, self.address) != (None, None):
            self.config.check_at_server()


@with_fields_of(EngineConfig)
def batch(
    source: _Source,
    out: _Out,
    questions: _Questions = None,
    model: Model = None,
    fps: Fps = None,
    frames: Frames = None,
    max_tokens: MaxTokens = None,
    retention: Retention = None,
    reduction: Reduction = None,
    compute_share: ComputeShare = None,
    max_visual_tokens: MaxVisualTokens = None,
    topology: _Topology = None,
    url: Url = None,
    address: Address = None,
    name: AppName = "epd",
    api_key: ApiKey = None,
    plot: Plot = None,
    as_json: IsJson = False,
    **engine: Any,
) -> None:
    """Answer a file of questions about videos and images.

    Questions about the same video share its decoding, encoding and prefill. Values in a line take precedence
    over the options. Run the same command again to resume a stopped batch. With --address, uses the
    application on that cluster.
    """
    config = EngineConfig.checked(engine)
    target = _Target(model, topology, url, address, name, api_key, config)
    check_numbers(fps, frames, max_tokens)
    reduction_policy(reduction, retention, compute_share)
    visual_budget(max_visual_tokens, retention)
    utilisation = Utilisation()
    with ExitStack() as stack:
        lines = stack.enter_context(_lines_file(source, questions))
        defaults = LineDefaults(
            lines.parent.absolute(),
            fps,
            frames,
            max_tokens,
            retention,
            reduction,
            compute_share,
            max_visual_tokens,
        )
        summary = run_batch(
            BatchPlan(lines, out, defaults),
            lambda index: _backend(target, index),
            indexing_bar=lambda: console.progress_bar("reading lines"),
            bar=batch_bar,
            utilisation=utilisation,
        )
    _report(summary, utilisation, plot, as_json=as_json)


@contextmanager
def _lines_file(source: Path, questions: Path | None) -> Iterator[Path]:
    """The input itself, or a file of lines made of a folder and its questions."""
    if (questions is not None) != source.is_dir():
        raise RequestError(
            f"received {'a folder' if source.is_dir() else 'no folder'}, '{source}', and --questions "
            f"{questions}; allowed: a folder with --questions, or a file without"
        )
    if questions is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="epd-batch-") as folder:
        lines = Path(folder) / "lines.jsonl"
        write_lines(lines, source, questions)
        yield lines


@contextmanager
def _backend(target: _Target, index: LineIndex) -> Iterator[Backend]:
    if target.url is not None:
        with HttpBackend.open(target.url, target.api_key) as backend:
            yield backend
    elif target.topology is not None or target.address is not None:
        from epd.serve_app.ray.batch_app import started_backend, url_of_app  # Ray

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


def _report(summary: Summary, utilisation: Utilisation, plot: Path | None, *, as_json: bool) -> None:
    if plot is not None:
        plot_utilisation(utilisation, plot)
    if as_json:
        console.print_json(summary.record())
    else:
        print(*summary.lines(), sep="\n")
