"""The command `epd serve`: its options are the fields of `AppArgs` and the few declared here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from epd.cli.config import parse_values
from epd.cli.options import Address, with_fields_of
from epd.errors import RequestError
from epd.models import model_folder
from epd.planning.files import load_plan
from serve_app.app_args import ENVIRONMENT, AppArgs
from serve_app.http.address import HttpAddress
from serve_app.http.guard.host_check import names_for
from serve_app.model_facts import limits_of

_Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")]
_Port = Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")]
_Plan = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of epd plan --out; options given beside it take precedence."),
]
_Local = Annotated[
    bool, typer.Option("--local", help="Run all workers as threads of this process, without Ray.")
]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Show the logs, a line for each request.")]


@with_fields_of(AppArgs, arguments={"model": "[MODEL]"}, variables=ENVIRONMENT)
def serve(
    context: typer.Context,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    address: Address = None,
    plan: _Plan = None,
    local: _Local = False,
    verbose: _Verbose = False,
    **options: Any,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Each worker is a process on Ray, or with --local a thread of this process. Prints a line when the server
    is ready. On SIGINT or SIGTERM it finishes the requests in flight and exits; it exits with code 3 when
    Ray's processes are gone for good.
    Options that hold several values are repeated: --limits max_frames=4096 --limits max_media=8.
    """
    start_s = time.monotonic()
    args = _app_args(options | (_planned(plan, options, context) if plan else {}), host)
    where = HttpAddress(host, port)
    served = _served_locally if local else _served_on_ray
    with served(args, where, address, verbose):
        name = args.model_name or args.model_path.name
        print(f"limits of one request: {limits_of(args).line()}; epd config show has all", file=sys.stderr)
        seconds = time.monotonic() - start_s
        print(f"ready in {seconds:.1f} s: {where.url}/v1 serves {name} on {args.topology}", flush=True)
        _wait_for_signal()
        print("draining; press Ctrl-C again to stop immediately", file=sys.stderr)


def _planned(path: Path, options: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The options that a plan decides and the user does not. Raises RequestError."""
    plan = load_plan(path)
    plan.check_model(options["model_name"] or model_folder(options["model"]).resolve().name)
    sources = {name: context.get_parameter_source(name) for name in plan.app_options()}
    return {
        name: value
        for name, value in plan.app_options().items()
        if (source := sources[name]) is None or source.name == "DEFAULT"
    }


def _app_args(options: Mapping[str, Any], host: str) -> AppArgs:
    """The application's checked arguments. Raises EPDError."""
    names = names_for(host, options["allowed_hosts"] or (), has_key=bool(options["api_key"]))
    limits = parse_values(f"limits.{one}" for one in options["limits"] or ()).get("limits", {})
    repeated = {"allowed_hosts": names, "allowed_media_hosts": options["allowed_media_hosts"] or None}
    try:
        return AppArgs(**{**options, **repeated, "limits": limits}).resolved()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise RequestError(f"{place}: {first['msg']}") from None


def _served_on_ray(
    args: AppArgs, where: HttpAddress, address: str | None, verbose: bool
) -> AbstractContextManager[None]:
    from serve_app.ray import cluster, server  # Ray

    settings = cluster.RaySettings(address=address, shows_logs=verbose)
    return server.served_app(args, where, settings, ends_with_cluster=True)


def _served_locally(
    args: AppArgs, where: HttpAddress, address: str | None, verbose: bool
) -> AbstractContextManager[None]:
    """Raises RequestError where a cluster is named too."""
    if address is not None:
        raise RequestError(f"received --local and --address {address}; allowed: one of them; leave one out")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the cores to others
    from serve_app.local import server  # torch

    if verbose:
        server.log_requests()
    return server.served_locally(args, where)


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
