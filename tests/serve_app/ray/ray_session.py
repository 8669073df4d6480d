"""Ray, started once for all tests that need it, and what is run on it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import ProxyLocation

from epd.serve_app.app import application
from epd.serve_app.app_args import AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.network.members import Member, ProcessAddress, Purpose
from epd.serve_app.network.memory import orphans
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.ray.board import RayBoard
from epd.serve_app.ray.cluster import RaySettings, ray_cluster
from tests.ports import free_port
from tests.serve_app.deployments import NEVER_S, Deployment, patient
from tests.serve_app.ray.held_app import HELD_FILE, build_app

# What Ray and Serve do in this process is not ours to mend.
IGNORED = (
    "ignore::DeprecationWarning:ray",
    "ignore::FutureWarning:ray",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@dataclass(frozen=True, slots=True)
class RaySession:
    """port: of the HTTP proxy. held_file: while it is there, answers are held; see `held_app.py`."""

    port: int
    held_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Answers stay in their middle while the block runs, or until the file is removed in it."""
        self.held_file.touch()
        try:
            yield
        finally:
            self.held_file.unlink(missing_ok=True)


@contextmanager
def ray_with_serve() -> Iterator[RaySession]:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    held_file = Path(tempfile.gettempdir()) / f"epd-tests-held-{os.getpid()}"
    os.environ[HELD_FILE] = str(held_file)
    port = free_port()
    with ray_cluster(RaySettings(namespace=f"epd-tests-{os.getpid()}")):
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            proxy_location=ProxyLocation.HeadOnly,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        yield RaySession(port, held_file)
        serve.shutdown()


def delete_app(name: str, drain_s: float, late_s: float = 600.0) -> None:
    """Deletes an application, and returns when it is gone. Raises TimeoutError that says who is left.

    Serve's own `delete` waits for a minute, less than a drain may take. A front was seen to wait for a
    request that had ended: its client left in just that moment, and the proxy's cancel was lost in Ray.

    drain_s: after which its replicas end, whatever they do
    late_s: what a busy machine may take beyond that
    """
    serve.delete(name, _blocking=False)
    end_s = time.monotonic() + drain_s + late_s
    while name in serve.status().applications:
        if time.monotonic() > end_s:
            actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
            left = [each for each in actors if f"::{name}#" in each]
            raise TimeoutError(f"{name} is not gone after {drain_s + late_s:.0f} s: {left} are left")
        time.sleep(0.1)


@contextmanager
def running_app(
    session: RaySession, address: HttpAddress | None = None, *, name: str = "epd", **args: Any
) -> Iterator[str]:
    """The application, alone or under a name of its own; its URL. It may leave no file of a pool behind.

    address: where its fronts listen themselves; None: behind the session's proxy
    """
    before = orphans()
    app_args = AppArgs(**args)
    serve.run(application(app_args, address), name=name, route_prefix="/" if name == "epd" else f"/{name}")
    try:
        yield session.url if address is None else address.url
    finally:
        delete_app(name, app_args.drain_s)
    assert set(orphans()) <= set(before)


class RayDeployment(Deployment):
    """A front of this process, over the workers of an application on Ray.

    It is patient: a busy machine may take minutes to start lost workers again.
    """

    def __init__(self, path: Path) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        place, purpose = ProcessAddress("127.0.0.1", node_id), Purpose(str(path.resolve()))
        self.ray_fleet = RemoteFleet(RayBoard("epd"), place, purpose)
        planner = RequestPlanner(path, "tiny", group_tokens=16)
        config = patient({"max_wait_s": NEVER_S})
        self.service = Orchestrator(self.ray_fleet, planner, config, owner=self.ray_fleet.owner)

    def member(self, name: str) -> Member:
        return self.ray_fleet.member(name)

    async def until_ready(self) -> None:
        while not (await self.service.status()).is_ready:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def ray_front(path: Path) -> AsyncIterator[RayDeployment]:
    """A front of this process over the workers of the application, which runs."""
    deployment = RayDeployment(path)
    try:
        await deployment.service.start()
        await deployment.until_ready()
        yield deployment
    finally:
        await deployment.service.close()


@asynccontextmanager
async def ray_deployed(
    path: Path, topology: str, *, hang_s: float = 10.0, **args: Any
) -> AsyncIterator[RayDeployment]:
    """Also an application, the only one. args: of it"""
    args = {"model": path, "num_kv_tokens": 16_384, "allowed_media_path": Path("/"), **args}
    app_args = AppArgs(topology=topology, hang_s=hang_s, **args)
    await asyncio.to_thread(serve.run, build_app(app_args), name="epd", route_prefix="/")
    try:
        async with ray_front(path) as deployment:
            yield deployment
    finally:
        await asyncio.to_thread(delete_app, "epd", app_args.drain_s)
