"""Builds the application's ingress: an HTTP server over an orchestrator and its fleet, which it owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from epd.control.elasticity import ControllerConfig
from epd.errors import EPDError
from epd.sampling_params import SamplingParams
from serve_app.app_args import AppArgs
from serve_app.http.api import ApiSettings, create_api
from serve_app.orchestration.orchestrator import Orchestrator, OrchestratorConfig
from serve_app.orchestration.request_planner import RequestPlanner
from serve_app.ray.fleet import RayFleet, RayFleetConfig
from serve_app.worker.worker_stages import WorkerSettings
from video import FetchPolicy, MediaChildren


async def create_ingress(args: AppArgs) -> FastAPI:
    """Starts the service and returns the HTTP app over it; the service ends with the app. Raises EPDError."""
    _log_requests()
    fleet = RayFleet(
        RayFleetConfig(
            args.workers,
            hang_s=args.hang_s,
            num_threads=args.threads_per_worker,
            num_video_threads=args.num_video_threads,
        ),
        WorkerSettings(
            args.model_path,
            dtype=args.dtype,
            num_kv_tokens=args.num_kv_tokens,
            num_kv_pools=args.num_kv_pools,
            scheduler=args.scheduler(is_decode=False),
            max_batch_patches=args.max_batch_patches,
            skip_static=args.skip_static,
            decode_scheduler=args.scheduler(is_decode=True),
        ),
    )
    config = OrchestratorConfig(
        max_waiting=args.max_waiting,
        max_wait_s=args.max_wait_s,
        sharding=args.sharding,
        elastic=ControllerConfig() if args.elastic else None,
        retention=args.load_retention,
    )
    children = MediaChildren()
    planner = RequestPlanner(args.model_path, args.model_name, limits=args.limits, reader=children)
    service = Orchestrator(fleet, planner, config)
    app = create_api(service, _settings(args, planner), children)
    http_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with http_lifespan(app):
                yield
        finally:
            await service.close()
            children.close()

    app.router.lifespan_context = lifespan
    try:
        await asyncio.gather(service.start(), asyncio.to_thread(children.server.start))
    except EPDError:
        await service.close()
        children.close()
        raise
    return app


def _settings(args: AppArgs, planner: RequestPlanner) -> ApiSettings:
    """planner: has the limits, and the repetition penalty for requests that set none."""
    policy = FetchPolicy(
        allowed_hosts=args.allowed_media_hosts,
        media_folder=args.allowed_media_path,
        max_bytes=ApiSettings().fetch.max_bytes,
    )
    return ApiSettings(
        api_key=args.api_key.get_secret_value() if args.api_key else None,
        admin_api_key=args.admin_api_key.get_secret_value() if args.admin_api_key else None,
        fetch=policy,
        max_requests=args.max_requests,
        limits=planner.limits,
        default_params=SamplingParams(repetition_penalty=planner.settings.repetition_penalty),
        default_deadline_s=args.slo_ttft_s,
        default_reduction=args.reduction_policy,
        allowed_hosts=args.allowed_hosts,
        trace_dir=args.trace_dir,
        max_traces=args.max_traces,
        otlp_endpoint=args.otlp_endpoint,
    )


def _log_requests() -> None:
    """Logs a line for each finished request to stderr, which Ray writes to a file."""
    logger = logging.getLogger("serve_app")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
