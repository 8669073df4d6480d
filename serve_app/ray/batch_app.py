"""Provides the application on Ray as a backend of `epd batch`: newly started, or found on a cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from epd.batch.http_backend import HttpBackend
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import UnavailableError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.cluster import RaySettings, ray_cluster
from epd.serve_app.ray.server import ServeSettings, served_app
from epd.serve_app.ray.tenancy import APP_NAME, cluster_now, url_at


@contextmanager
def started_backend(
    model: Path | None, topology: str, media_folder: Path | None, config: EngineConfig = DEFAULT_ENGINE
) -> Iterator[HttpBackend]:
    """Starts a private application on this machine, protected by a key, with its own workers.

    media_folder: the folder that files are read from.
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
        HttpBackend.open(http.url, key, has_seeds=True) as backend,
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
