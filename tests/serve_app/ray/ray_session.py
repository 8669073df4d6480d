"""Ray, started once for all tests that need it, and what is run on it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation

from serve_app.app import build_app
from serve_app.app_args import AppArgs
from serve_app.media.media_worker import MediaSettings
from serve_app.network.memory import orphans
from serve_app.orchestration.orchestrator import Orchestrator, OrchestratorConfig
from serve_app.orchestration.request_planner import RequestPlanner
from serve_app.ray.cluster import RaySettings, ray_cluster
from serve_app.ray.fleet import RayFleet, RayFleetConfig
from serve_app.worker.worker_stages import WorkerSettings
from tests.serve_app.deployments import Deployment, workers_of
from tests.serve_app.media_fleet import ANY_FILE

# What Ray and Serve do in this process is not ours to mend.
IGNORED = (
    "ignore::DeprecationWarning:ray",
    "ignore::FutureWarning:ray",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@dataclass(frozen=True, slots=True)
class RaySession:
    """port: of the HTTP proxy."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def ray_with_serve() -> Iterator[RaySession]:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ray_cluster(RaySettings(namespace=f"epd-tests-{os.getpid()}")):
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            proxy_location=ProxyLocation.HeadOnly,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        yield RaySession(port)
        serve.shutdown()


@contextmanager
def running_app(session: RaySession, **args: Any) -> Iterator[str]:
    """The application on the session's port, alone; its URL. It may leave no file of a pool behind."""
    before = orphans()
    serve.run(build_app(AppArgs(**args)), name="epd", route_prefix="/")
    try:
        yield session.url
    finally:
        serve.delete("epd")
    assert set(orphans()) <= set(before)


class RayDeployment(Deployment):
    """An orchestrator of this process over worker processes."""

    def __init__(self, path: Path, topology: str, fleet: dict[str, Any]) -> None:
        settings = WorkerSettings(path, num_kv_tokens=16_384, num_embeddings=8192, max_batch_patches=512)
        self.ray_fleet = RayFleet(
            RayFleetConfig(workers_of(topology), media=MediaSettings(path, ANY_FILE), **fleet), settings
        )
        planner = RequestPlanner(path, "tiny", group_tokens=16)
        self.service = Orchestrator(self.ray_fleet, planner, OrchestratorConfig())


@asynccontextmanager
async def ray_deployed(path: Path, topology: str, **fleet: Any) -> AsyncIterator[RayDeployment]:
    """fleet: options of RayFleetConfig."""
    deployment = RayDeployment(path, topology, fleet)
    try:
        await deployment.service.start()
        yield deployment
    finally:
        await deployment.service.close()
