"""The command `epd bench`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from epd import console
from epd.bench.bench import BenchPlan, BenchResult, run_bench
from epd.bench.body import NEW_LIMIT, OLD_LIMIT
from epd.bench.media import ImageFormat, MediaLibrary
from epd.bench.report import dump_json, plot_result, print_result, result_record
from epd.client.endpoint import find_model, parse_endpoints
from epd.errors import RequestError
from epd.serve_app.cli.flags import with_options_of
from epd.serve_app.cli.options import JsonFile, Plot
from epd.serve_app.cli.traffic_options import (
    AskedModel,
    BenchKey,
    MediaDir,
    NumRequests,
    Rate,
    TrafficOptions,
)
from epd.video.demo_video import write_scene
from epd.workload.arrivals import ArrivalKind
from epd.workload.config import WorkloadConfig, load_workload
from epd.workload.metrics import SLO

_Urls = Annotated[
    list[str],
    typer.Option(
        "--url", metavar="[NAME=]URL", help="Server to measure, without /v1; several alternate in rounds."
    ),
]
_Arrival = Annotated[
    ArrivalKind | None,
    typer.Option(metavar="KIND", help="poisson, constant, bursty, ramp, trace, or closed (--concurrency)."),
]
_Burstiness = Annotated[
    float | None,
    typer.Option(metavar="B", help="For bursty arrivals: 1 is Poisson, lower values are burstier."),
]
_RampFrom = Annotated[
    float | None, typer.Option(metavar="R", help="Rate at the start of a ramp that ends at --rate.")
]
_Duration = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds of each round in which requests are sent.")
]
_Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", help="Closed loop: keep N requests in flight, whatever the arrival times."),
]
_TextTokens = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Tokens of a question, about: 32, 16..64 or 16|256.")
]
_MaxTokens = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Longest answer, in tokens, in the same notation.")
]
_Images = Annotated[str | None, typer.Option(metavar="SIZE", help="Images of a request that has images.")]
_ImageSize = Annotated[str | None, typer.Option(metavar="WxH", help="Size of images, in pixels.")]
_VideoSeconds = Annotated[str | None, typer.Option(metavar="SIZE", help="Length of videos, in seconds.")]
_VideoFps = Annotated[int | None, typer.Option(metavar="F", help="Frames per second of videos.")]
_VideoSize = Annotated[str | None, typer.Option(metavar="WxH", help="Size of videos, in pixels.")]
_IsPng = Annotated[bool, typer.Option("--png", help="Send images as PNG instead of JPEG.")]
_IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for answers of exactly --max-tokens, if the server can.")
]
_NewLimit = Annotated[
    bool,
    typer.Option(
        "--max-completion-tokens",
        help="Send the longest answer under this name, not as max_tokens; the warm-up finds out by itself.",
    ),
]
_ExtraBody = Annotated[str | None, typer.Option(metavar="JSON", help="Fields to add to every request.")]
_Rounds = Annotated[int, typer.Option(metavar="N", help="Rounds per server, each with new content.")]
_Warmup = Annotated[
    int, typer.Option(metavar="N", help="Uncounted requests to each server before its first round.")
]
_MaxInFlight = Annotated[
    int,
    typer.Option(metavar="N", help="Most requests in flight; others wait, which is reported as lateness."),
]
_Timeout = Annotated[float, typer.Option(metavar="S", help="Longest time for one request, in seconds.")]
_SloE2e = Annotated[
    float | None,
    typer.Option("--slo-e2e-s", metavar="S", help="Objective: time for a whole answer, in seconds."),
]


@with_options_of(TrafficOptions)
def bench(
    url: _Urls,
    arrival: _Arrival = None,
    rate: Rate = None,
    burstiness: _Burstiness = None,
    ramp_from: _RampFrom = None,
    num_requests: NumRequests = None,
    duration: _Duration = None,
    concurrency: _Concurrency = None,
    text_tokens: _TextTokens = None,
    max_tokens: _MaxTokens = None,
    images: _Images = None,
    image_size: _ImageSize = None,
    video_seconds: _VideoSeconds = None,
    video_fps: _VideoFps = None,
    video_size: _VideoSize = None,
    png: _IsPng = False,
    media_dir: MediaDir = None,
    model: AskedModel = "",
    api_key: BenchKey = None,
    ignore_eos: _IgnoreEos = False,
    max_completion_tokens: _NewLimit = False,
    extra_body: _ExtraBody = None,
    rounds: _Rounds = 1,
    warmup: _Warmup = 1,
    max_in_flight: _MaxInFlight = 512,
    timeout: _Timeout = 600.0,
    slo_e2e_s: _SloE2e = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Measure latency, goodput and SLO attainment of servers.

    Works with any server of the OpenAI chat API. An open loop: requests are sent at their times, however slow
    the answers are. Every request has new content, so caches are cold. Without --workload, sends text.
    """
    asked = TrafficOptions(**options)
    if concurrency is not None:
        arrival, max_in_flight = ArrivalKind.CLOSED, concurrency
    when = _given(arrival=arrival, rate=rate, burstiness=burstiness, ramp_from=ramp_from, trace=asked.trace)
    how_long = _given(num_requests=num_requests, duration_s=duration)
    what = _given(text_tokens=text_tokens, output_tokens=max_tokens, images=images, image_size=image_size)
    videos = _given(video_s=video_seconds, video_fps=video_fps, video_size=video_size)
    fields = {**when, **how_long, **_given(**asked.repeats)}
    config = _workload_config(asked.workload, fields, {**what, **videos})
    plan = BenchPlan(
        config.resolve(),
        tuple(parse_endpoints(url, model=model, api_key=api_key)),
        SLO(asked.slo_ttft_s, asked.slo_tpot_s, slo_e2e_s),
        rounds=rounds,
        warmup=warmup,
        seed=asked.seed,
        max_in_flight=max_in_flight,
        timeout_s=timeout,
        extra=_extra_fields(extra_body, ignore_eos),
        limit_field=NEW_LIMIT if max_completion_tokens else OLD_LIMIT,
    )
    result = _run(plan, media_dir, "png" if png else "jpeg")
    _report(result, config, json_file, plot)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; a workload keeps its own values for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _workload_config(
    source: str | None, fields: dict[str, Any], part_fields: dict[str, Any]
) -> WorkloadConfig:
    fields = dict(fields)
    if "duration_s" in fields:
        # A preset's number of requests must not cut the duration short.
        fields.setdefault("num_requests", None)
    for option, kind in (("burstiness", ArrivalKind.BURSTY), ("ramp_from", ArrivalKind.RAMP)):
        if option in fields:
            fields.setdefault("arrival", kind)
    if source is None and "trace" not in fields:
        source = "text"
    return load_workload(source, fields, part_fields)


def _extra_fields(extra_body: str | None, ignore_eos: bool) -> dict[str, Any]:
    try:
        extra = json.loads(extra_body or "{}")
    except ValueError as error:
        raise RequestError(f"--extra-body is {extra_body!r}, which is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise RequestError(f"--extra-body is {extra_body!r}, it must be a JSON object of fields")
    return {**extra, "ignore_eos": True} if ignore_eos else extra


def _run(plan: BenchPlan, media_dir: Path | None, image_format: ImageFormat) -> BenchResult:
    """Looks up the models, draws the media, and runs the rounds."""
    endpoints = tuple(replace(one, model=one.model or find_model(one)) for one in plan.endpoints)
    plan = replace(plan, endpoints=endpoints)
    folder = nullcontext(media_dir) if media_dir else tempfile.TemporaryDirectory(prefix="epd-bench-")
    with folder as name, _Progress() as progress:
        library = MediaLibrary(Path(name), write_scene, image_format=image_format)
        with console.progress_bar("drawing frames") as show:
            library.draw(plan.all_requests(), show)
        return asyncio.run(run_bench(plan, library, progress.start))


class _Progress(ExitStack):
    """A bar on stderr for the current part of the run."""

    def start(self, title: str, num_requests: int) -> Callable[[], None]:
        """Replaces the bar by one for another part; returns what to call after each of its requests."""
        self.close()
        show = self.enter_context(console.progress_bar(title))
        ended = iter(range(1, num_requests + 1))
        return lambda: show(next(ended), num_requests)


def _report(result: BenchResult, config: WorkloadConfig, json_file: Path | None, plot: Path | None) -> None:
    text = dump_json(result_record(result, config.model_dump(mode="json")))
    if str(json_file) == "-":
        console.stream_text(text)
    else:
        print_result(result, console.stdout_console())
        if json_file is not None:
            json_file.write_text(text, encoding="utf-8")
    if plot is not None:
        plot_result(result, plot)
