"""Serves the application on this machine: Ray and Serve are started, and ended when it is over."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from epd.errors import UnavailableError
from serve_app.app import build_app
from serve_app.app_args import AppArgs
from serve_app.ray_cluster import RaySettings, ray_cluster

APP_NAME = "epd"
_ERROR_LINE = re.compile(r"^(?:epd\.errors\.)?\w*Error: .+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@contextmanager
def served_app(args: AppArgs, http: HttpSettings, cluster: RaySettings) -> Iterator[None]:
    """While this is open, requests are answered; those under way at the end have `drain_s` to come to theirs.

    Raises EPDError for what cannot be served.
    """
    app = build_app(args)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_cluster(cluster):
        try:
            serve.start(
                http_options={"host": http.host, "port": http.port},
                proxy_location=ProxyLocation.HeadOnly,
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            serve.run(app, name=APP_NAME, route_prefix="/")
        except (RayServeException, RayError, RuntimeError) as error:
            raise UnavailableError(f"the application does not start: {_reason(error)}") from error
        try:
            yield
        finally:
            serve.delete(APP_NAME)


def _reason(error: Exception) -> str:
    """What is said last in a traceback that came as text, else the first line."""
    lines = _ERROR_LINE.findall(str(error))
    return lines[-1] if lines else str(error).partition("\n")[0]
