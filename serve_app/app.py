"""The whole service as a Ray Serve application: HTTP front, orchestrator, a fleet of worker processes.

    serve run serve_app.app:build_app topology=2e1p1d        or with a file: serve run serve_config.yaml

One replica is the ingress: it answers HTTP, plans, and owns the fleet. It comes with its workers and goes
with them.
"""

# No `from __future__ import annotations`: Serve reads the builder's annotation as a class.

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import SecretStr
from ray import serve

from serve_app.api import ApiSettings, create_api
from serve_app.app_args import AppArgs
from serve_app.orchestrator import Orchestrator, OrchestratorConfig
from serve_app.planning import Planner
from serve_app.ray_fleet import RayFleet, RayFleetConfig
from serve_app.worker_stages import WorkerSettings
from video import FetchPolicy

API_KEY_VARIABLE = "EPD_API_KEY"
# Requests that Serve lets in beyond those that are answered: so many are refused by us, with a reason.
_MAX_REFUSING = 64


def build_app(args: AppArgs) -> serve.Application:
    """The application, not running yet. Raises EPDError for a model or topology that cannot be."""
    args = _with_key(args).resolved()

    def api() -> FastAPI:
        return _create(args)

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


def _create(args: AppArgs) -> FastAPI:
    """In the ingress: the front over its service, which starts and ends with it."""
    _log_requests()
    fleet = RayFleet(
        RayFleetConfig(args.workers, hang_s=args.hang_s, num_video_threads=args.num_video_threads),
        WorkerSettings(args.model_path, dtype=args.dtype, num_kv_tokens=args.num_kv_tokens),
    )
    config = OrchestratorConfig(max_waiting=args.max_waiting, max_wait_s=args.max_wait_s)
    service = Orchestrator(fleet, Planner(args.model_path, args.model_name), config)
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
