"""The verb `epd serve`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from epd.cli.config import parse_values
from epd.errors import RequestError
from epd.reduction import DEFAULT_METHOD, METHODS

_Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]", help="Folder in Hugging Face layout; by default the embedded shapes-vl."
    ),
]
_Topology = Annotated[
    str,
    typer.Option(
        metavar="T",
        help="Numbers of workers, each before what they do: encode, prefill, decode; 1epd is one for all.",
    ),
]
_Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")]
_Port = Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")]
_ModelName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What requests call the model; by default its folder's name."),
]
_ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="EPD_API_KEY", metavar="KEY", help="What clients must send; by default everybody is let in."
    ),
]
_AdminApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="EPD_ADMIN_API_KEY",
        metavar="KEY",
        help="What lets a client change roles and come before others; by default nobody may.",
    ),
]
_MediaPath = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder that file:// media may be in; by default none are read."),
]
_MediaHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-media-host",
        metavar="HOST",
        help="Host to fetch media from, even a private one; repeat it. By default every public host.",
    ),
]
_Address = Annotated[
    str | None,
    typer.Option(metavar="RAY", help="Address of a running Ray cluster; by default one is started here."),
]
_VideoThreads = Annotated[int, typer.Option(metavar="N", min=1, help="Videos decoded at once.")]
_KVTokens = Annotated[
    int | None, typer.Option("--num-kv-tokens", metavar="N", help="Room for keys and values at each worker.")
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--num-threads",
        metavar="N",
        min=1,
        help="Threads of torch in each worker; by default the machine's cores shared out among them.",
    ),
]
_Dtype = Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")]
_Retention = Annotated[
    float,
    typer.Option(
        metavar="R", help="Share of the visual tokens that is kept where a request says nothing, 0.05 to 1."
    ),
]
_Reduction = Annotated[
    str, typer.Option(metavar="METHOD", help=f"How those are chosen: {', '.join(METHODS)}.")
]
_RetentionMin = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Let retention fall to this while first tokens would miss --slo-ttft; by default it stays.",
    ),
]
_SkipStatic = Annotated[
    float | None,
    typer.Option(
        "--skip-static",
        metavar="TOLERANCE",
        help="Do not encode frames that show what those before them showed: no preprocessed value differs by "
        "more than this; 0 for exactly equal. By default all are encoded.",
    ),
]
_SloTTFT = Annotated[
    float | None,
    typer.Option(
        "--slo-ttft",
        metavar="S",
        help="Seconds in which the first token must come: requests that cannot make it are refused with 429.",
    ),
]
_Elastic = Annotated[
    bool, typer.Option("--elastic", help="Let workers of one role take others as the load changes.")
]
_Drain = Annotated[
    float, typer.Option("--drain", metavar="S", help="Seconds for requests to end at the end.")
]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Name that clients may call the server by, beside its address; repeat it. By default any, but "
        "for a server on loopback without a key.",
    ),
]
_TraceDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for a Chrome trace of each request.")
]
_MaxTraces = Annotated[int, typer.Option(metavar="N", min=1, help="Traces kept there, the latest.")]
_OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT", metavar="URL", help="Collector of OpenTelemetry traces."
    ),
]
_PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Plan of epd plan --out to serve by; options that are given win over it.",
    ),
]
_Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        help="Ceiling of one request, such as max_frames=4096; repeat it. epd config show has all names.",
    ),
]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Show what the processes log, a line per request.")]


def serve(
    context: typer.Context,
    model: _Model = None,
    topology: _Topology = "1e1p1d",
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    model_name: _ModelName = None,
    api_key: _ApiKey = None,
    admin_api_key: _AdminApiKey = None,
    allowed_media_path: _MediaPath = None,
    allowed_media_host: _MediaHosts = None,
    address: _Address = None,
    video_threads: _VideoThreads = 2,
    num_threads: _Threads = None,
    num_kv_tokens: _KVTokens = None,
    dtype: _Dtype = "float32",
    slo_ttft: _SloTTFT = None,
    retention: _Retention = 1.0,
    reduction: _Reduction = DEFAULT_METHOD,
    retention_min: _RetentionMin = None,
    skip_static: _SkipStatic = None,
    drain: _Drain = 30.0,
    allowed_host: _AllowedHosts = None,
    trace_dir: _TraceDir = None,
    max_traces: _MaxTraces = 256,
    otlp_endpoint: _OtlpEndpoint = None,
    verbose: _Verbose = False,
    elastic: _Elastic = False,
    plan: _PlanFile = None,
    limit: _Limits = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API, its stages on processes of their own.

    Prints a line when it is ready. SIGINT or SIGTERM ends it when the requests under way have been answered.
    It ends by itself, with exit code 3, when Ray's processes under it are gone for good.
    """
    from serve_app.model_facts import limits_of

    start_s = time.monotonic()
    options = {
        "model": model,
        "model_name": model_name,
        "topology": topology,
        "dtype": dtype,
        "num_video_threads": video_threads,
        "num_threads": num_threads,
        "num_kv_tokens": num_kv_tokens,
        "api_key": api_key,
        "admin_api_key": admin_api_key,
        "allowed_media_path": allowed_media_path,
        "allowed_media_hosts": allowed_media_host or None,
        "slo_ttft_s": slo_ttft,
        "elastic": elastic,
        "retention": retention,
        "reduction": reduction,
        "retention_min": retention_min,
        "skip_static": skip_static,
        "drain_s": drain,
        "served_hosts": _served_hosts(host, allowed_host or (), has_key=bool(api_key)),
        "trace_dir": trace_dir,
        "max_traces": max_traces,
        "otlp_endpoint": otlp_endpoint,
        **parse_values(f"limits.{one}" for one in limit or ()),
    }
    if plan is not None:
        options = _planned(plan, options, context)
    args = _app_args(options)
    ceilings = limits_of(args).line()
    with _served(args, host, port, address, verbose) as url:
        name = model_name or args.model_path.name
        print(f"a request may have {ceilings}; epd config show has all limits", file=sys.stderr)
        seconds = time.monotonic() - start_s
        print(f"ready in {seconds:.1f} s: {url}/v1 serves {name} on {args.topology}", flush=True)
        _wait_for_signal()
        print("draining; once more ends at once", file=sys.stderr)


def _served_hosts(host: str, allowed: Sequence[str], *, has_key: bool) -> frozenset[str] | None:
    """The names to answer to, the bound one included; None: it depends on the address a request comes to."""
    from serve_app.http.host_check import checked_hosts, is_address

    if allowed or not (has_key or is_address(host)):
        return checked_hosts(allowed) | {host.lower()}
    return None


# Arguments of the application whose option has another name.
_OPTION_NAMES = {"num_video_threads": "video_threads", "slo_ttft_s": "slo_ttft"}


def _planned(path: Path, options: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """The options with what a plan decides, but for those that were given. Raises RequestError."""
    from epd.models import embedded_model_path
    from epd.planning.files import load_plan

    plan = load_plan(path)
    plan.check_model(options["model_name"] or (options["model"] or embedded_model_path()).resolve().name)
    decided = {
        name: value
        for name, value in plan.app_options().items()
        if _is_default(context, _OPTION_NAMES.get(name, name))
    }
    return options | decided


def _is_default(context: typer.Context, option: str) -> bool:
    """Whether an option was left out; what is no option of the verb was."""
    source = context.get_parameter_source(option)
    return source is None or source.name == "DEFAULT"


def _app_args(options: dict[str, Any]) -> Any:
    """The application's checked arguments. Raises EPDError."""
    from pydantic import ValidationError

    from serve_app.app_args import AppArgs

    try:
        return AppArgs(**options).resolved()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise RequestError(f"{place}: {first['msg']}") from None


@contextlib.contextmanager
def _served(args: Any, host: str, port: int, address: str | None, verbose: bool) -> Iterator[str]:
    """The URL of the running server."""
    from serve_app.ray.cluster import RaySettings
    from serve_app.ray.server import HttpSettings, served_app

    http = HttpSettings(host, port)
    cluster = RaySettings(address=address, shows_logs=verbose)
    with served_app(args, http, cluster, ends_with_cluster=True):
        yield http.url


def _wait_for_signal() -> None:
    """Returns on SIGINT or SIGTERM; the next one is a KeyboardInterrupt."""
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        stopped.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    stopped.wait()
