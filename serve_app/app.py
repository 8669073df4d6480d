"""The whole service as a Ray Serve application: HTTP front, orchestrator, a fleet of worker processes.

    serve run serve_app.app:build_app topology=2e1p1d        or with a file: serve run serve_config.yaml

One replica is the ingress: it answers HTTP, plans, and owns the fleet. It comes with its workers and goes
with them.
"""

# No `from __future__ import annotations`: Serve reads the builder's annotation as a class.

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from ray import serve

from epd.errors import ModelNotFoundError
from epd.models import embedded_model_path
from epd.routing import Stage
from epd.topology import parse_topology
from serve_app.api import ApiSettings, create_api
from serve_app.orchestrator import Orchestrator, OrchestratorConfig
from serve_app.planning import Planner
from serve_app.ray_fleet import RayFleet, RayFleetConfig
from serve_app.worker_stages import WorkerSettings
from video import FetchPolicy

API_KEY_VARIABLE = "EPD_API_KEY"
# Requests that Serve lets in beyond those that are answered: so many are refused by us, with a reason.
_MAX_REFUSING = 64


class AppArgs(BaseModel):
    """What the application is made of.

    model: a folder in Hugging Face layout, by default the embedded shapes-vl. model_name: asked for under it.
    topology: see `epd.topology`. num_video_workers: that decode video, with num_video_threads each.
    api_key: by default what EPD_API_KEY is set to; without one everybody is let in.
    allowed_media_path: folder that file:// media may be read from. allowed_media_hosts: see `FetchPolicy`.
    num_kv_tokens: room for keys and values at each worker. max_requests: answered at once.
    max_waiting, max_wait_s: for room at the workers. hang_s: without a sign of life a worker is lost after.
    drain_s: that requests are given to end when the application does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Path | None = None
    model_name: str | None = None
    topology: str = "1e1p1d"
    dtype: str = "float32"
    num_video_workers: int = Field(default=1, ge=1, le=64)
    num_video_threads: int = Field(default=2, ge=1, le=64)
    num_kv_tokens: int | None = Field(default=None, ge=1)
    api_key: SecretStr | None = None
    allowed_media_path: Path | None = None
    allowed_media_hosts: frozenset[str] | None = None
    max_requests: int = Field(default=512, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=120.0, gt=0)
    hang_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)

    @property
    def model_path(self) -> Path:
        """Raises ModelNotFoundError when there is no model."""
        path = self.model or embedded_model_path()
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"received the model '{path}', where there is no config.json; give a folder in Hugging Face "
                "layout, or leave it out for the embedded model"
            )
        return path

    @property
    def workers(self) -> Mapping[str, frozenset[Stage]]:
        """Roles by name. Raises RequestError for what is no topology."""
        workers = {worker.name: worker.roles for worker in parse_topology(self.topology).workers()}
        return workers | {f"v{number}": _VIDEO for number in range(self.num_video_workers)}


_VIDEO: frozenset[Stage] = frozenset({"video"})


def build_app(args: AppArgs) -> serve.Application:
    """The application, not running yet. Raises EPDError for a model or topology that cannot be."""
    args = _with_key(args)
    workers, model_path = args.workers, args.model_path.resolve()

    def api() -> FastAPI:
        return _create(args, workers, model_path)

    deployment = serve.deployment(
        name="ingress",
        max_ongoing_requests=args.max_requests + _MAX_REFUSING,
        graceful_shutdown_timeout_s=args.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress(api)()).bind()


def _with_key(args: AppArgs) -> AppArgs:
    key = os.environ.get(API_KEY_VARIABLE)
    return args if args.api_key or not key else args.model_copy(update={"api_key": SecretStr(key)})


def _create(args: AppArgs, workers: Mapping[str, frozenset[Stage]], model_path: Path) -> FastAPI:
    """In the ingress: the front over its service, which starts and ends with it."""
    _log_requests()
    fleet = RayFleet(
        RayFleetConfig(workers, hang_s=args.hang_s, num_video_threads=args.num_video_threads),
        WorkerSettings(model_path, dtype=args.dtype, num_kv_tokens=args.num_kv_tokens),
    )
    config = OrchestratorConfig(max_waiting=args.max_waiting, max_wait_s=args.max_wait_s)
    service = Orchestrator(fleet, Planner(model_path, args.model_name), config)
    app = create_api(service, _settings(args))
    front_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
            async with front_lifespan(app):
                yield
        finally:
            await service.close()

    app.router.lifespan_context = lifespan
    return app


def _settings(args: AppArgs) -> ApiSettings:
    policy = FetchPolicy(
        allowed_hosts=args.allowed_media_hosts,
        media_folder=args.allowed_media_path,
        max_bytes=ApiSettings().fetch.max_bytes,
    )
    return ApiSettings(
        api_key=args.api_key.get_secret_value() if args.api_key else None,
        fetch=policy,
        max_requests=args.max_requests,
    )


def _log_requests() -> None:
    """A line for every finished request on stderr, which Ray keeps in a file, and shows if it is asked."""
    logger = logging.getLogger("serve_app")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
