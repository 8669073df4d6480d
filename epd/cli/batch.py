"""The verb `epd batch`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epd import console
from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.reduction import DEFAULT_METHOD, METHODS, ReductionPolicy

if TYPE_CHECKING:
    from epd.batch.line_index import LineIndex
    from epd.batch.summary import Summary
    from epd.batch.tasks import Backend
    from epd.batch.utilisation import Utilisation

_Source = Annotated[
    Path, typer.Argument(metavar="IN", help="JSON lines, or a folder of videos with --questions.")
]
_Out = Annotated[
    Path, typer.Argument(metavar="OUT.jsonl", help="Results; failures go to OUT.errors.jsonl beside it.")
]
_Questions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="One question a line, each asked about every video of the folder IN."),
]
_Model = Annotated[
    Path | None,
    typer.Option(help="Folder of a model in Hugging Face layout; by default the embedded shapes-vl."),
]
_Fps = Annotated[
    float | None,
    typer.Option(metavar="F", help="Frames to look at per second of video, where a line does not say."),
]
_Frames = Annotated[
    int | None, typer.Option(metavar="N", help="Frames to look at in each video, where a line does not say.")
]
_MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Longest answer, tokens, where a line does not say.")
]
_Retention = Annotated[
    float | None,
    typer.Option(metavar="R", help="Share of the visual tokens that is kept, where a line does not say."),
]
_Reduction = Annotated[
    str | None,
    typer.Option(metavar="METHOD", help=f"How those are chosen, likewise: {', '.join(METHODS)}."),
]
_Topology = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="Start workers as `epd serve` does and ask those; by default one process does all."
    ),
]
_Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Ask a server that runs, of the OpenAI chat API, without /v1."),
]
_Address = Annotated[
    str | None, typer.Option(metavar="RAY", help="Ask the application that runs on this Ray cluster.")
]
_ApiKey = Annotated[
    str | None, typer.Option(envvar="EPD_API_KEY", metavar="KEY", help="Sent to the server that is asked.")
]
_KVTokens = Annotated[
    int | None, typer.Option("--num-kv-tokens", metavar="N", help="Room for keys and values.")
]
_SkipStatic = Annotated[
    float | None,
    typer.Option(
        "--skip-static",
        metavar="TOLERANCE",
        help="Do not encode frames that show what those before them showed, as epd serve has it.",
    ),
]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw how busy the stages were."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")]


@dataclass(frozen=True, slots=True)
class _Where:
    """Who is asked: a pipeline of this process unless topology, url or address says otherwise."""

    model: Path
    topology: str | None
    url: str | None
    address: str | None
    api_key: str | None
    num_kv_tokens: int | None
    skip_static: float | None

    def __post_init__(self) -> None:
        given = {"--topology": self.topology, "--url": self.url, "--address": self.address}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"received {' and '.join(names)}; allowed: one of them; leave out the rest")
        if self.skip_static is not None and (self.url, self.address) != (None, None):
            raise RequestError(
                f"received --skip-static {self.skip_static:g} for a server that runs; allowed: what it was "
                "started with; give it to epd serve"
            )


def batch(
    source: _Source,
    out: _Out,
    questions: _Questions = None,
    model: _Model = None,
    fps: _Fps = None,
    frames: _Frames = None,
    max_tokens: _MaxTokens = None,
    retention: _Retention = None,
    reduction: _Reduction = None,
    topology: _Topology = None,
    url: _Url = None,
    address: _Address = None,
    api_key: _ApiKey = None,
    num_kv_tokens: _KVTokens = None,
    skip_static: _SkipStatic = None,
    plot: _Plot = None,
    as_json: _Json = False,
) -> None:
    """Answer a file of questions about videos and images.

    Questions about the same video share its decoding, encoding and prefill. Run it again to go on where it
    was stopped.
    """
    from epd.batch.driver import BatchPlan, run_batch
    from epd.batch.lines import LineDefaults
    from epd.batch.progress import batch_bar
    from epd.batch.utilisation import Utilisation

    where = _Where(
        model or embedded_model_path(), topology, url, address, api_key, num_kv_tokens, skip_static
    )
    _check_options(fps, frames, max_tokens, skip_static, plot)
    ReductionPolicy(reduction or DEFAULT_METHOD, 1.0 if retention is None else retention)  # or RequestError
    utilisation = Utilisation()
    with ExitStack() as open_things:
        lines = open_things.enter_context(_lines_file(source, questions))
        defaults = LineDefaults(lines.parent.absolute(), fps, frames, max_tokens, retention, reduction)
        summary = run_batch(
            BatchPlan(lines, out, defaults),
            lambda index: _backend(where, index),
            indexing_bar=lambda: console.progress_bar("reading lines"),
            bar=batch_bar,
            utilisation=utilisation,
        )
    _report(summary, utilisation, plot, as_json=as_json)


def _check_options(
    fps: float | None,
    frames: int | None,
    max_tokens: int | None,
    skip_static: float | None,
    plot: Path | None,
) -> None:
    """Raises RequestError for options that would fail every line."""
    from epd.bench.plots import check_plot_path

    if fps is not None and frames is not None:
        raise RequestError(f"received --fps {fps} and --frames {frames}; give one of the two")
    for name, value in (("--fps", fps), ("--frames", frames), ("--max-tokens", max_tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"received {name} {value}; allowed: more than 0")
    if skip_static is not None:
        from encoders.reduction.static_units import check_tolerance

        check_tolerance(skip_static)
    if plot is not None:
        check_plot_path(plot)


@contextmanager
def _lines_file(source: Path, questions: Path | None) -> Iterator[Path]:
    """The input itself, or a file of lines made of a folder and its questions."""
    from epd.batch.folder import write_lines

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
def _backend(where: _Where, index: LineIndex) -> Iterator[Backend]:
    with ExitStack() as open_things:
        if where.topology is not None:
            yield open_things.enter_context(_started_app(where, index))
        elif where.url is not None or where.address is not None:
            yield open_things.enter_context(_running_app(where))
        else:
            yield _local(where)


def _local(where: _Where) -> Backend:
    # Threads of torch that wait by spinning would take the cores from those that decode video.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model"):
        from serve_app.local.batch import LocalBackend
        from serve_app.service import ModelCard
        from stages.batch.batch import BatchPipeline

        pipeline = BatchPipeline.load(
            where.model, num_kv_tokens=where.num_kv_tokens, skip_static=where.skip_static
        )
        return LocalBackend(pipeline, ModelCard(where.model.name, int(time.time())))


def _started_app(where: _Where, index: LineIndex) -> AbstractContextManager[Backend]:
    """The application with workers of its own on this machine."""
    from serve_app.ray.batch_app import started_backend

    return started_backend(
        where.model, where.topology or "", index.media.folder(), where.num_kv_tokens, where.skip_static
    )


def _running_app(where: _Where) -> AbstractContextManager[Backend]:
    from epd.batch.http_backend import HttpBackend

    url = where.url
    if url is None:
        from serve_app.ray.batch_app import url_of_app

        url = url_of_app(where.address or "")
    return HttpBackend.open(url, where.api_key)


def _report(summary: Summary, utilisation: Utilisation, plot: Path | None, *, as_json: bool) -> None:
    from epd.batch.plot import plot_utilisation

    if plot is not None:
        plot_utilisation(utilisation, plot)
    if as_json:
        console.print_json(summary.record())
    else:
        print(*summary.lines(), sep="\n")
