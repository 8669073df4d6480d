"""The verb `epd bench`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epd import console
from epd.errors import RequestError
from epd.workload.arrivals import ArrivalKind

if TYPE_CHECKING:
    from epd.bench.bench import BenchPlan, BenchResult
    from epd.bench.endpoint import Endpoint
    from epd.bench.media import ImageFormat
    from epd.workload.config import WorkloadConfig
    from epd.workload.requests import VideoSpec

_Urls = Annotated[
    list[str],
    typer.Option(
        "--url", metavar="[NAME=]URL", help="Server to measure, without /v1; several are measured in turns."
    ),
]
_Workload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME",
        help="text, images, video, mixed, or a YAML or JSON file; by default text.",
    ),
]
_Arrival = Annotated[
    ArrivalKind | None,
    typer.Option(
        "--arrival",
        metavar="KIND",
        help="poisson, constant, bursty, ramp, trace, or closed (see --concurrency).",
    ),
]
_Rate = Annotated[
    float | None,
    typer.Option("--rate", metavar="R", help="Requests per second; of a trace, its mean after scaling."),
]
_Burstiness = Annotated[
    float | None,
    typer.Option("--burstiness", metavar="B", help="Of bursty arrivals: 1 is Poisson, less comes in bursts."),
]
_RampFrom = Annotated[
    float | None,
    typer.Option("--ramp-from", metavar="R", help="Rate at the start of a ramp that ends at --rate."),
]
_NumRequests = Annotated[int | None, typer.Option("--num-requests", metavar="N", help="Requests per round.")]
_Duration = Annotated[
    float | None,
    typer.Option("--duration", metavar="S", help="Seconds per round in which requests are sent."),
]
_Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", metavar="N", help="No clock: always N requests in flight (a closed loop)."),
]
_TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="CSV with the columns of the Azure LMM trace.")
]
_RepeatRate = Annotated[
    float | None,
    typer.Option(
        "--repeat-rate", metavar="P", help="Share of requests about media sent before; 0 is all cold."
    ),
]
_TextTokens = Annotated[
    str | None,
    typer.Option("--text-tokens", metavar="SIZE", help="Length of a question, about: 32, 16..64 or 16|256."),
]
_MaxTokens = Annotated[
    str | None,
    typer.Option("--max-tokens", metavar="SIZE", help="Longest answer, tokens, in the same notation."),
]
_Images = Annotated[
    str | None,
    typer.Option("--images", metavar="SIZE", help="Images per request, where the workload has some."),
]
_ImageSize = Annotated[
    str | None, typer.Option("--image-size", metavar="WxH", help="Size of images, pixels.")
]
_VideoSeconds = Annotated[
    str | None, typer.Option("--video-seconds", metavar="SIZE", help="Length of videos.")
]
_VideoFps = Annotated[
    int | None, typer.Option("--video-fps", metavar="F", help="Frames per second of video files.")
]
_VideoSize = Annotated[
    str | None, typer.Option("--video-size", metavar="WxH", help="Size of videos, pixels.")
]
_IsPng = Annotated[bool, typer.Option("--png", help="Images as PNG instead of JPEG.")]
_MediaDir = Annotated[
    Path | None,
    typer.Option(
        "--media-dir", metavar="DIR", help="Keep drawn media here, and use those of an earlier call."
    ),
]
_Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", help="Model to ask for; by default the first that the server lists."
    ),
]
_ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="EPD_BENCH_API_KEY", metavar="KEY", help="Sent to every server."),
]
_IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for answers of exactly --max-tokens, where the server can.")
]
_ExtraBody = Annotated[
    str | None, typer.Option("--extra-body", metavar="JSON", help="Fields to add to every request.")
]
_Rounds = Annotated[
    int, typer.Option("--rounds", metavar="N", help="Rounds per server, each with new content.")
]
_Warmup = Annotated[
    int,
    typer.Option(
        "--warmup", metavar="N", help="Requests to each server before its first round, not counted."
    ),
]
_Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="The same seed asks for the same things at the same times.")
]
_MaxInFlight = Annotated[
    int,
    typer.Option(
        "--max-in-flight", metavar="N", help="Most requests open at once; others wait, and that is reported."
    ),
]
_Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Longest time for one request.")]
_SloTtft = Annotated[
    float | None,
    typer.Option("--slo-ttft-s", metavar="S", help="Objective: time to first token."),
]
_SloTpot = Annotated[
    float | None,
    typer.Option("--slo-tpot-s", metavar="S", help="Objective: longest time per output token after it."),
]
_SloE2e = Annotated[
    float | None, typer.Option("--slo-e2e-s", metavar="S", help="Objective: longest time for a whole answer.")
]
_JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write everything here; - prints it instead of the tables."),
]
_PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw distributions here: png, svg or pdf.")
]


def bench(
    url: _Urls,
    workload: _Workload = None,
    arrival: _Arrival = None,
    rate: _Rate = None,
    burstiness: _Burstiness = None,
    ramp_from: _RampFrom = None,
    num_requests: _NumRequests = None,
    duration: _Duration = None,
    concurrency: _Concurrency = None,
    trace: _TraceFile = None,
    repeat_rate: _RepeatRate = None,
    text_tokens: _TextTokens = None,
    max_tokens: _MaxTokens = None,
    images: _Images = None,
    image_size: _ImageSize = None,
    video_seconds: _VideoSeconds = None,
    video_fps: _VideoFps = None,
    video_size: _VideoSize = None,
    png: _IsPng = False,
    media_dir: _MediaDir = None,
    model: _Model = "",
    api_key: _ApiKey = None,
    ignore_eos: _IgnoreEos = False,
    extra_body: _ExtraBody = None,
    rounds: _Rounds = 1,
    warmup: _Warmup = 1,
    seed: _Seed = 0,
    max_in_flight: _MaxInFlight = 512,
    timeout: _Timeout = 600.0,
    slo_ttft: _SloTtft = None,
    slo_tpot: _SloTpot = None,
    slo_e2e: _SloE2e = None,
    json_file: _JsonFile = None,
    plot_file: _PlotFile = None,
) -> None:
    """Measure latency, goodput and SLO attainment of servers.

    An open loop: requests go out at their times whatever becomes of the others. Content is drawn anew for
    every request, so that caches are cold.
    """
    from epd.bench.bench import BenchPlan
    from epd.bench.endpoint import parse_endpoints
    from epd.workload.metrics import SLO

    if concurrency is not None:
        arrival, max_in_flight = ArrivalKind.CLOSED, concurrency
    when = _given(arrival=arrival, rate=rate, burstiness=burstiness, ramp_from=ramp_from, trace=trace)
    how_long = _given(num_requests=num_requests, duration_s=duration)
    what = _given(text_tokens=text_tokens, output_tokens=max_tokens, images=images, image_size=image_size)
    videos = _given(video_s=video_seconds, video_fps=video_fps, video_size=video_size)
    fields = {**when, **how_long, **_given(repeat_rate=repeat_rate)}
    config = _workload_config(workload, fields, {**what, **videos})
    plan = BenchPlan(
        config.resolve(),
        tuple(parse_endpoints(url, model=model, api_key=api_key)),
        SLO(slo_ttft, slo_tpot, slo_e2e),
        rounds=rounds,
        warmup=warmup,
        seed=seed,
        max_in_flight=max_in_flight,
        timeout_s=timeout,
        extra=_extra_fields(extra_body, ignore_eos),
    )
    _check_outputs(json_file, plot_file)
    result = _run(plan, media_dir, "png" if png else "jpeg")
    _report(result, config, json_file, plot_file)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others leave a workload as it is."""
    return {name: value for name, value in options.items() if value is not None}


def _workload_config(
    source: str | None, fields: dict[str, Any], part_fields: dict[str, Any]
) -> WorkloadConfig:
    from epd.workload.config import load_workload

    fields = dict(fields)
    if "duration_s" in fields:
        # The length that was asked for is not to be cut by a preset's number of requests.
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


def _check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuses files that cannot be written before any load is sent."""
    from epd.bench.plots import check_plot_path

    if plot_file is not None:
        check_plot_path(plot_file)
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise RequestError(f"cannot write {str(json_file)!r}; give a file name in a folder that exists")


def _run(plan: BenchPlan, media_dir: Path | None, image_format: ImageFormat) -> BenchResult:
    """Asks for the models, draws what will be sent, and runs the rounds."""
    from epd.bench.bench import run_bench
    from epd.bench.media import MediaLibrary

    endpoints = asyncio.run(_with_models(plan.endpoints))
    plan = replace(plan, endpoints=endpoints)
    folder = nullcontext(media_dir) if media_dir else tempfile.TemporaryDirectory(prefix="epd-bench-")
    with folder as name, _Progress() as progress:
        library = MediaLibrary(Path(name), _write_video, image_format=image_format)
        with console.progress_bar("drawing frames") as show:
            library.draw(plan.all_requests(), show)
        return asyncio.run(run_bench(plan, library, progress.start))


async def _with_models(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    from epd.bench.endpoint import find_model

    return tuple([replace(one, model=one.model or await find_model(one)) for one in endpoints])


def _write_video(path: Path, seed: int, spec: VideoSpec, on_frame: Callable[[], None]) -> None:
    from epd.shapes import SceneRenderer, make_scene
    from video.demo_video import encode_h264

    size = spec.size
    renderer = SceneRenderer(make_scene(seed, spec.duration_s), size.height, size.width)

    def frames() -> Any:
        for index in range(spec.num_frames):
            yield renderer.frame(index / spec.fps)
            on_frame()

    encode_h264(path, frames(), fps=Fraction(spec.fps), height=size.height, width=size.width)


class _Progress(ExitStack):
    """A bar on stderr for the part of the run that is under way."""

    def start(self, title: str, num_requests: int) -> Callable[[], None]:
        """Replaces the bar by one for another part; returns what to call after each request of it."""
        self.close()
        show = self.enter_context(console.progress_bar(title))
        ended = iter(range(1, num_requests + 1))
        return lambda: show(next(ended), num_requests)


def _report(
    result: BenchResult, config: WorkloadConfig, json_file: Path | None, plot_file: Path | None
) -> None:
    from epd.bench.plots import plot_result
    from epd.bench.report import dump_json, print_result, result_record

    text = dump_json(result_record(result, config.model_dump(mode="json")))
    if str(json_file) == "-":
        console.stream_text(text)
    else:
        print_result(result, console.stdout_console())
        if json_file is not None:
            json_file.write_text(text, encoding="utf-8")
    if plot_file is not None:
        plot_result(result, plot_file)
