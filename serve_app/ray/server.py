"""Serves the application on this machine: starts Ray and Serve, and ends them afterwards."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from epd import errors
from epd.client.endpoint import Endpoint, get
from epd.errors import EPDError, UnavailableError
from serve_app.app import application
from serve_app.app_args import AppArgs
from serve_app.http.address import HttpAddress
from serve_app.ray.cluster import RaySettings, ray_cluster
from serve_app.ray.gpus import with_gpus
from serve_app.ray.supervisor import supervised

APP_NAME = "epd"
# For fronts to find the workers, which are ready.
_FIND_S = 10.0
# The address for requests to a server that listens on every interface.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_RAISED = re.compile(r"^epd\.errors\.(\w+): (.+)", re.MULTILINE)


@contextmanager
def served_app(
    args: AppArgs, http: HttpAddress, cluster: RaySettings, *, ends_with_cluster: bool = False
) -> Iterator[None]:
    """Answers requests while open; at the end, requests in flight have `drain_s` to complete.

    ends_with_cluster: whether this process ends at once, with exit code 3, when the cluster is lost for good

    Raises EPDError for arguments that cannot be served.
    """
    # In a cluster of others, fronts may run on any of its machines: its proxy has an address known before.
    is_own = cluster.address is None
    address = http if is_own else None
    application(args, address)  # refuses what cannot be served before anything is started
    if is_own:
        _check_device(args.resolved())  # all workers are on this machine
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    watch = supervised(owns_cluster=is_own) if ends_with_cluster else nullcontext()
    with http.reserved() if is_own else nullcontext(), ray_cluster(cluster), watch:
        app = application(with_gpus(args), address)
        try:
            serve.start(
                http_options={"host": http.host, "port": http.port},
                proxy_location=ProxyLocation.Disabled if is_own else ProxyLocation.HeadOnly,
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            serve.run(app, name=APP_NAME, route_prefix="/")
        except (RayServeException, RayError, RuntimeError) as error:
            raise _start_error(error) from error
        try:
            _check_answers(http)
            yield
        finally:
            serve.delete(APP_NAME)


def _check_device(args: AppArgs) -> None:
    """Raises RequestError for a device or type that this machine does not have; every machine has `auto`."""
    if (args.device, args.dtype) != ("auto", "auto"):
        from stages.placement import Placement  # torch: half a gigabyte, for as long as the command runs

        Placement.resolve(args.device, args.dtype, args.model_path)


def _check_answers(address: HttpAddress) -> None:
    """Waits until the application can answer. Raises UnavailableError if nothing answers there."""
    host = _LOOPBACK.get(address.host, address.host)
    advice = "Serve runs on that cluster with other options; use its port, or shut it down"
    end_s = time.monotonic() + _FIND_S
    while True:
        try:
            get(Endpoint("app", HttpAddress(host, address.port).url), "/health", advice)
        except UnavailableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_FIND_S / 100)
        else:
            return


def _start_error(error: Exception) -> EPDError:
    """Returns the start error of a replica, if that was the cause: Serve reports it as a traceback text."""
    reason = str(error).partition("\n")[0]
    with suppress(RayServeException, RayError, KeyError):
        deployments = serve.status().applications[APP_NAME].deployments
        for message in [each.message for each in deployments.values()]:
            for name, text in reversed(_RAISED.findall(message)):
                kind = getattr(errors, name, None)
                if isinstance(kind, type) and issubclass(kind, EPDError):
                    return kind(text)
            if "Traceback" in message:
                reason = message.strip().rpartition("\n")[2]
    return UnavailableError(f"the application does not start: {reason}; see the logs in /tmp/ray")
