"""Serves the application on Ray: in a cluster that starts and ends with it, or beside others in theirs.

Also as a backend of `epd batch`: newly started, or found on a cluster.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from pydantic import SecretStr
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import ProxyLocation

from epd import errors
from epd.batch.http_backend import HttpBackend
from epd.client.endpoint import Endpoint, get
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import CancelledError, EPDError, InfeasibleError, UnavailableError
from epd.serve_app.app import application
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.observability.logs import operation
from epd.serve_app.ray.cluster import RaySettings, ray_cluster, ray_folder, reason_of
from epd.serve_app.ray.gpus import with_gpus
from epd.serve_app.ray.supervisor import ends_once, supervised
from epd.serve_app.ray.tenancy import (
    APP_NAME,
    DELETING,
    Place,
    checked_name,
    cluster_now,
    free_place,
    is_left,
    is_of,
    is_taken,
    turn_to_deploy,
    url_at,
)

# For fronts to find the workers, which are ready.
_FIND_S = 10.0
_LOOK_EVERY_S = 0.2
# For replicas to end, after their requests. Those that still start are ended by Serve, who waits for them.
_END_S, _TAKE_BACK_S = 30.0, 15.0
_SEE_LOGS = f"see the logs in {ray_folder()}, or those of the cluster that was joined"
_RAISED = re.compile(r"^epd\.errors\.(\w+): (.+)", re.MULTILINE)
# What Serve says of a replica for which no machine has room, after half a minute.
_NO_ROOM = re.compile(
    r"Deployment '(\w+)'.* to be scheduled\..*required for each replica: (\{.*?\}), .*available: (\{.*?\})\.",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Configures how the application is served.

    http: where it is reached. name: that Serve knows it by
    ends_with_cluster: whether this process ends at once, with exit code 3, when the cluster is lost for
        good, or others have deleted the application
    stopping: once it is set, the start goes no further, and what was begun is taken back
    """

    http: HttpAddress
    name: str = APP_NAME
    ends_with_cluster: bool = False
    stopping: threading.Event | None = None

    def check_going_on(self) -> None:
        """Raises CancelledError once it is to stop."""
        if self.stopping is not None and self.stopping.is_set():
            raise CancelledError("stopped before it was ready")


_PLAIN_LINKS = (
    "links between the machines of a cluster are authenticated and not encrypted; keep them within one "
    "trusted network"
)


@contextmanager
def served_app(args: AppArgs, settings: ServeSettings, cluster: RaySettings) -> Iterator[None]:
    """Answers requests while open; at the end, requests in flight have `drain_s` to complete.

    Of a cluster of others, it touches its own application alone, and leaves none behind.
    Raises EPDError for arguments that cannot be served, and CancelledError for a start that was stopped.
    """
    checked_name(settings.name)
    http, is_own = settings.http, cluster.address is None
    application(args, http if is_own else None)  # refuses what cannot be served before anything is started
    if is_own:
        _check_device(args.resolved())  # all workers are on this machine
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    operation.info("starting Ray" if is_own else f"joining the Ray cluster at {cluster.address}")
    if not is_own:
        operation.warning(_PLAIN_LINKS)
    watch = supervised(owns_cluster=is_own) if settings.ends_with_cluster else nullcontext()
    with http.reserved() if is_own else nullcontext(), ray_cluster(cluster), watch:
        settings.check_going_on()
        owner = secrets.token_hex(8)
        try:
            with nullcontext() if is_own else turn_to_deploy():
                _deploy(args, settings, owner, is_own=is_own)
            operation.info("Ray runs; workers start and load the model")
            _wait_until_running(settings)
            operation.info("workers run; waiting for the first answer of %s/health", http.url)
            _check_answers(settings)
            with _held(settings, owner) if settings.ends_with_cluster and not is_own else nullcontext():
                yield
        except BaseException:
            with suppress(EPDError):  # the first one says more
                _delete(settings.name, owner, _TAKE_BACK_S)
            raise
        _delete(settings.name, owner, args.drain_s + _END_S)


def _held(settings: ServeSettings, owner: str) -> AbstractContextManager[None]:
    """Ends this process once others have deleted its application, or replaced it."""
    name = settings.name
    gone = f"the application '{name}' was deleted or replaced by others"
    return ends_once(lambda: is_taken(name, owner), gone)


def _deploy(args: AppArgs, settings: ServeSettings, owner: str, *, is_own: bool) -> None:
    """Deploys the application, and does not wait for it. Raises EPDError."""
    place = _place(settings, is_own=is_own)
    node = "" if is_own or place.fronts is None else _here()
    app = application(with_gpus(args), place.fronts, owner=owner, front_node=node)
    settings.check_going_on()
    http = settings.http
    with _as_unavailable():
        serve.start(
            http_options={"host": http.host, "port": http.port},
            proxy_location=ProxyLocation.Disabled if is_own else ProxyLocation.HeadOnly,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        settings.check_going_on()
        target = RunTarget(app, settings.name, place.route_prefix)
        serve.run_many([target], wait_for_applications_running=False)


def _place(settings: ServeSettings, *, is_own: bool) -> Place:
    """Returns where the application goes. Raises UnavailableError if that is another's."""
    http = settings.http
    if is_own:
        return Place(http.prefix, http)
    place = free_place(there := cluster_now(), settings.name, http)
    if place.fronts is not None:
        http.listen().close()
        proxy = "no proxy" if there.proxy is None else f"its proxy at {there.proxy.url}"
        said = f"the cluster's Serve has {proxy}, set by its first start: this application's fronts"
        print(f"{said} listen at {http.url} themselves, on this machine", file=sys.stderr)
    return place


def _here() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raises UnavailableError for what Ray or Serve raises."""
    try:
        yield
    except EPDError:
        raise
    except Exception as error:  # Ray's own are of any class
        raise UnavailableError(f"the application does not start: {reason_of(error)}; {_SEE_LOGS}") from error


def _delete(name: str, owner: str, within_s: float) -> None:
    """Ends this command's application, where it was deployed, and no other of the name.

    within_s: to wait until it is gone; later, Serve ends it without this process
    """
    with _as_unavailable():
        if is_of(cluster_now(), name, owner):
            serve.delete(name, _blocking=False)
            end_s = time.monotonic() + within_s
            while is_left(cluster_now(), name, owner) and time.monotonic() < end_s:
                time.sleep(_LOOK_EVERY_S)


def _check_device(args: AppArgs) -> None:
    """Raises RequestError for a device or type that this machine does not have; every machine has `auto`."""
    if (args.device, args.dtype) != ("auto", "auto"):
        from epd.stages.placement import Placement  # torch: half a gigabyte, for as long as the command runs

        Placement.resolve(args.device, args.dtype, args.model_path)


def _wait_until_running(settings: ServeSettings) -> None:
    """Raises EPDError with the reason where the application does not start."""
    while True:
        settings.check_going_on()
        with _as_unavailable():
            status = serve.status().applications.get(settings.name)
        if status is None or status.status == DELETING:
            raise UnavailableError(
                f"the application '{settings.name}' was deleted by others while it started"
            )
        if status.status == "RUNNING":
            return
        messages = [each.message for each in status.deployments.values()]
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise start_error(messages, status.message)
        check_room(messages)
        time.sleep(_LOOK_EVERY_S)


def check_room(messages: Sequence[str]) -> None:
    """Raises InfeasibleError where replicas wait for what is not there: Serve would wait without an end.

    messages: of Serve about deployments
    """
    for found in filter(None, map(_NO_ROOM.search, messages)):
        with suppress(ValueError):  # resources that Serve does not know yet
            wanted, free = json.loads(found[2]), json.loads(found[3])
            short = {name: amount for name, amount in wanted.items() if amount > free.get(name, 0)}
            if short:
                raise InfeasibleError(
                    f"received a replica of {found[1]} that asks for {_amounts(short)}; the cluster has "
                    f"{_amounts({name: free.get(name, 0) for name in short})} free; choose a smaller "
                    "topology, wait for others to end, or add machines"
                )


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _check_answers(settings: ServeSettings) -> None:
    """Waits until the application can answer. Raises UnavailableError if nothing answers there."""
    advice = "Serve runs on that cluster with other options; use its port, or shut it down"
    end_s = time.monotonic() + _FIND_S
    while True:
        settings.check_going_on()
        try:
            get(Endpoint("app", settings.http.own_url), "/health", advice)
        except UnavailableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_FIND_S / 100)
        else:
            return


def start_error(messages: Sequence[str], said: str) -> EPDError:
    """Returns the error of a replica, if that was the cause: Serve reports it as a traceback text.

    messages: of the deployments. said: of the application
    """
    reason = said
    for message in messages:
        for name, text in reversed(_RAISED.findall(message)):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, EPDError):
                return kind(text)
        if "Traceback" in message:
            reason = message.strip().rpartition("\n")[2]
    return UnavailableError(f"the application does not start: {reason_of(RuntimeError(reason))}; {_SEE_LOGS}")


@contextmanager
def started_backend(
    model: Path | None,
    topology: str,
    media_folder: Path | None,
    config: EngineConfig = DEFAULT_ENGINE,
    lines_per_medium: float = math.inf,
) -> Iterator[HttpBackend]:
    """Starts a private application on this machine, protected by a key, with its own workers.

    media_folder: the folder that files are read from. lines_per_medium: mean of the input.
    Raises EPDError if it cannot be served.
    """
    key = secrets.token_hex(16)
    args = AppArgs(
        model=model,
        topology=topology,
        api_key=SecretStr(key),
        allowed_media_path=media_folder,
        **config.given,
    )
    http = HttpAddress.free()
    with (
        served_app(args.resolved(), ServeSettings(http), RaySettings()),
        HttpBackend.open(http.url, key, has_seeds=True, lines_per_medium=lines_per_medium) as backend,
    ):
        yield backend


def url_of_app(address: str, name: str = APP_NAME) -> str:
    """Returns the URL of an application on a Ray cluster. Raises UnavailableError if it is not running."""
    with ray_cluster(RaySettings(address=address)):
        there = cluster_now()
    head = address.partition("://")[2].rpartition(":")[0] or address.rpartition(":")[0] or "127.0.0.1"
    url = url_at(there, name, head)
    if url is None:
        names = ", ".join(f"'{each.name}'" for each in there.tenants) or "none"
        raise UnavailableError(
            f"no application '{name}' answers on '{address}', which has {names}; start it with epd serve "
            f"--address {address} --name {name}, or give the --name of another"
        )
    return url
