"""Serves the application on this machine: Ray and Serve are started, and ended when it is over."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from epd import errors
from epd.bench.endpoint import Endpoint, get
from epd.errors import EPDError, RequestError, UnavailableError
from serve_app.app import build_app
from serve_app.app_args import AppArgs
from serve_app.ray.cluster import RaySettings, ray_cluster
from serve_app.ray.supervisor import supervised

APP_NAME = "epd"
# Where a server that listens everywhere is asked.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_RAISED = re.compile(r"^epd\.errors\.(\w+): (.+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def check_free(self) -> None:
        """Raises RequestError when the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise RequestError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}; give another --port"
            ) from error

    def check_answers(self) -> None:
        """Raises UnavailableError when the application is not there: Serve may listen elsewhere."""
        host = _LOOPBACK.get(self.host, self.host)
        advice = "Serve runs on that cluster with other options; use its port, or shut it down"
        get(Endpoint("app", replace(self, host=host).url), "/health", advice)


@contextmanager
def served_app(
    args: AppArgs, http: HttpSettings, cluster: RaySettings, *, ends_with_cluster: bool = False
) -> Iterator[None]:
    """While this is open, requests are answered; those under way at the end have `drain_s` to come to theirs.

    ends_with_cluster: this process ends at once, with exit code 3, when the cluster is gone for good.

    Raises EPDError for what cannot be served.
    """
    app = build_app(args)
    if cluster.address is None:
        http.check_free()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    watch = supervised(owns_cluster=cluster.address is None) if ends_with_cluster else nullcontext()
    with ray_cluster(cluster), watch:
        try:
            serve.start(
                http_options={"host": http.host, "port": http.port},
                proxy_location=ProxyLocation.HeadOnly,
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            serve.run(app, name=APP_NAME, route_prefix="/")
        except (RayServeException, RayError, RuntimeError) as error:
            raise _start_error(error) from error
        try:
            http.check_answers()
            yield
        finally:
            serve.delete(APP_NAME)


def _start_error(error: Exception) -> EPDError:
    """What the ingress raised while it started, if that was it: Serve tells it as the text of a traceback."""
    with suppress(RayServeException, RayError, KeyError):
        message = serve.status().applications[APP_NAME].deployments["ingress"].message
        for name, text in reversed(_RAISED.findall(message)):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, EPDError):
                return kind(text)
    first_line = str(error).partition("\n")[0]
    return UnavailableError(f"the application does not start: {first_line}; see the logs in /tmp/ray")
