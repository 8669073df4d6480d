"""The command `epd serve`: its options are the fields of `AppArgs` and the few declared here."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Annotated, Any, Literal, Self

import typer
from pydantic import ValidationError

from epd import __version__
from epd.client.endpoint import Endpoint, get
from epd.errors import CancelledError, EPDError, RequestError
from epd.models import knowledge_line, served_name
from epd.planning.files import load_plan
from epd.serve_app.app_args import ENVIRONMENT, AppArgs
from epd.serve_app.cli.config import limits_of, model_type_of, parse_values
from epd.serve_app.cli.flags import with_fields_of
from epd.serve_app.cli.options import AppName
from epd.serve_app.http.address import ROOT, HttpAddress, checked_prefix, names_for
from epd.serve_app.observability.logs import operation, with_fields, write_logs
from epd.serve_app.ray.process_tree import adopt_orphans, end_process
from epd.serve_app.worker_info import MemoryUse

_Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")]
_Port = Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")]
_Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="RAY_ADDRESS",
        metavar="RAY",
        help="HOST:PORT of a running Ray cluster, or auto for this machine's; local, or none, starts one.",
    ),
]
_RoutePrefix = Annotated[
    str, typer.Option(metavar="PATH", help="Beginning of the path of every request, such as /team.")
]
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
    address: _Address = None,
    name: AppName = "epd",
    route_prefix: _RoutePrefix = ROOT,
    plan: _Plan = None,
    local: _Local = False,
    verbose: _Verbose = False,
    **options: Any,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Each worker is a process on Ray, or with --local a thread of this process. Prints a line when the server
    is ready. On SIGINT or SIGTERM it finishes the requests in flight and exits; it exits with code 3 when
    Ray's processes are gone for good, or a cluster that is named does not take the application.
    Options that hold several values are repeated: --limits max_frames=4096 --limits max_media=8.
    """
    start_s = time.monotonic()
    with Signals() as signals:
        target = _Target.of(context, address, name, is_local=local)
        args = _app_args(options | (_planned(plan, options, context) if plan else {}), host)
        where = HttpAddress(host, port, checked_prefix(route_prefix))
        if target.address is None:
            where.listen().close()  # a port that is taken is told before a model is loaded
        write_logs(args.log_format, shows_requests=verbose)
        _say_start(args, where)
        served = partial(_served_locally if local else _served_on_ray, args, where, target, verbose)

        def say_ready() -> None:
            operation.info("limits of one request: %s; epd config show has all", limits_of(args).line())
            operation.info(args.pixels.line(model_type_of(args.model_path)))
            _say_room(args, where)
            if (line := knowledge_line(args.model, "epd serve")) is not None:
                operation.info(line)
            seconds = time.monotonic() - start_s
            print(
                f"ready in {seconds:.1f} s: {where.url}/v1 serves {args.served_name} on {args.topology}",
                flush=True,
            )

        serve_until_signal(served, signals, say_ready, end_process, is_alone=target.address is None)


def _say_start(args: AppArgs, where: HttpAddress) -> None:
    """Says what is starting, before anything slow is done."""
    fields = {
        "version": __version__,
        "model": args.served_name,
        "model_type": model_type_of(args.model_path),
        "dtype": args.dtype,
        "device": args.device,
        "topology": args.topology,
        "url": where.url,
    }
    operation.info(
        "epd {version} starts: model {model} ({model_type}), dtype {dtype}, device {device}, topology "
        "{topology}, at {url}".format(**fields),
        extra=with_fields("start", fields),
    )


def _say_room(args: AppArgs, where: HttpAddress) -> None:
    """Says what each worker has room for; nothing where the server does not tell."""
    key = args.api_key.get_secret_value() if args.api_key else None
    with suppress(EPDError):
        status = get(Endpoint("server", where.own_url, api_key=key), "/v1/epd/status", "").json()
        for worker in status["workers"]:
            if (memory := worker["memory"]) is not None:
                name, room = worker["name"], MemoryUse(**memory).line()
                fields = with_fields("worker", {"worker": name, "roles": worker["roles"], **memory})
                operation.info("%s has %s", name, room, extra=fields)


@dataclass(frozen=True, slots=True)
class _Target:
    """Says where the application runs. address: of a cluster of others; None for processes of its own."""

    address: str | None
    name: str

    @classmethod
    def of(cls, context: typer.Context, address: str | None, name: str, *, is_local: bool) -> _Target:
        """Raises RequestError where a process of its own is wanted, and a cluster or a name on one too."""
        sources = {each: context.get_parameter_source(each) for each in ("address", "name")}
        given = {each: source.name for each, source in sources.items() if source is not None}
        for option, value in (("address", address), ("name", name)):
            if is_local and given.get(option) == "COMMANDLINE":
                raise RequestError(
                    f"received --local and --{option} {value}; allowed: one of them; leave one out"
                )
        address = None if is_local or address in ("", "local") else address
        if address is not None and given.get("address") == "ENVIRONMENT":
            print(
                f"joins the Ray cluster at {address}, as RAY_ADDRESS says; --address local starts one",
                file=sys.stderr,
            )
        return cls(address, name)


def _planned(path: Path, options: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The options that a plan decides and the user does not. Raises RequestError."""
    plan = load_plan(path)
    plan.check_model(options["model_name"] or served_name(options["model"]).rpartition("/")[2])
    sources = {name: context.get_parameter_source(name) for name in plan.app_options()}
    return {
        name: value
        for name, value in plan.app_options().items()
        if (source := sources[name]) is None or source.name == "DEFAULT"
    }


def _app_args(options: Mapping[str, Any], host: str) -> AppArgs:
    """The application's checked arguments. Raises EPDError."""
    has_key = bool(options["api_key"] or options["api_keys_file"])
    names = names_for(host, options["allowed_hosts"] or (), has_key=has_key)
    limits = parse_values(f"limits.{one}" for one in options["limits"] or ()).get("limits", {})
    repeated = {"allowed_hosts": names, "allowed_media_hosts": options["allowed_media_hosts"] or None}
    try:
        return AppArgs(**{**options, **repeated, "limits": limits}).resolved()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise RequestError(f"{place}: {first['msg']}") from None


def _served_on_ray(
    args: AppArgs, where: HttpAddress, target: _Target, verbose: bool, stopping: threading.Event
) -> AbstractContextManager[None]:
    if target.address is not None:
        from epd.serve_app.ray.gcs_address import checked_gcs  # gRPC, which Ray brings

        checked_gcs(target.address)  # before Ray is imported, so that a wrong address is told at once
    # Ray would print a stack trace at each signal. Its processes, which start later, are to keep theirs.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray would write codes of colours into a file
    from epd.serve_app.ray import cluster, server  # Ray

    del os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"]
    adopt_orphans()
    settings = server.ServeSettings(where, target.name, ends_with_cluster=True, stopping=stopping)
    return server.served_app(args, settings, cluster.RaySettings(address=target.address, shows_logs=verbose))


@contextmanager
def _served_locally(
    args: AppArgs, where: HttpAddress, _target: _Target, _verbose: bool, _stopping: threading.Event
) -> Iterator[None]:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave the cores to others
    from epd.serve_app.local import server  # torch

    adopt_orphans()
    with server.with_files(args) as with_files, server.served_locally(with_files, where):
        yield


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130
# What a start in a cluster of others has to take back what it had begun.
_TAKE_BACK_S = 90.0
# The longest that a signal is noticed late.
_TURN_S = 0.2
_Event = Literal["signal", "ready", "ended"]


class Signals:
    """Notes SIGINT and SIGTERM while it is open."""

    def __init__(self) -> None:
        self.events: SimpleQueue[_Event] = SimpleQueue()  # its `put` may interrupt its `get`

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.events.put("signal")

    def next(self, within_s: float = math.inf) -> _Event:
        """Returns what happens next; `ended` if nothing does in time.

        A wait without an end can miss a signal that comes just before it: the interpreter runs handlers only
        between its own steps. So it waits in short turns.
        """
        end_s = time.monotonic() + within_s
        while (left_s := end_s - time.monotonic()) > 0:
            with suppress(Empty):
                return self.events.get(timeout=min(left_s, _TURN_S))
        return "ended"


def serve_until_signal(
    served: Callable[[threading.Event], AbstractContextManager[None]],
    signals: Signals,
    on_ready: Callable[[], None],
    end_process: Callable[[int], None],
    *,
    is_alone: bool,
) -> None:
    """Serves in another thread, and returns when that has ended; raises its error.

    served: given what is set when the server is to stop, even before it is ready
    end_process: ends this process with a code, and all below it
    is_alone: whether nothing but these processes is to be cleaned up, so that a start can be cut off
    """
    server = _Server(served, signals)
    server.start()
    event = signals.next()
    if event == "ready":
        on_ready()
        if signals.next() == "signal":
            operation.info("draining; press Ctrl-C again to stop immediately")
            server.stopping.set()
            if signals.next() == "signal":
                end_process(_INTERRUPTED)
            operation.info("drained and stopped")
    elif event == "signal":
        operation.info("stopped before it was ready")
        if is_alone:
            end_process(0)
        server.stopping.set()
        while signals.next(_TAKE_BACK_S) != "ended":
            continue
    server.join(_TAKE_BACK_S if event == "signal" else None)
    if server.is_alive():
        end_process(0)
    if server.error is not None and not (event == "signal" and isinstance(server.error, CancelledError)):
        raise server.error


class _Server(threading.Thread):
    """error: with which it ended."""

    def __init__(
        self, served: Callable[[threading.Event], AbstractContextManager[None]], signals: Signals
    ) -> None:
        super().__init__(name="server", daemon=True)
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._served = served
        self._signals = signals

    def run(self) -> None:
        try:
            with self._served(self.stopping):
                self._signals.events.put("ready")
                self.stopping.wait()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.error = error
        finally:
            self._signals.events.put("ended")
