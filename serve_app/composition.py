"""Builds the application from its arguments and a fleet, both on Ray and in one process."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI

from epd.control.admission import QueueSummary
from epd.control.elasticity import ControllerConfig
from epd.errors import UnavailableError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.fleet import Fleet
from epd.serve_app.http.api import ApiSettings, create_api
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.network.members import Kind, Member, View
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.orchestration.role_switch import SwitchRequest
from epd.serve_app.service import RoleSwitch
from epd.serve_app.worker.worker_stages import WorkerSettings

# Deployments whose replicas are workers, by the kind of member.
_SCALED: Mapping[Kind, str] = {"stage": "Stage", "media": "Media"}


async def create_app(args: AppArgs, fleet: Fleet, owner: str = "") -> FastAPI:
    """Starts the fleet and returns the HTTP app over it. The app's lifespan closes both. Raises EPDError.

    owner: by which the fleet's workers know the requests of this app
    """
    planner = RequestPlanner(
        args.model_path,
        args.served_name,
        group_tokens=args.group_tokens,
        limits=args.limits,
        pixels=args.pixels,
    )
    service = Orchestrator(fleet, planner, _orchestrator_config(args), owner=owner)
    app = create_api(service, service.media, replace(_api_settings(args, planner), front=owner))
    api_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with api_lifespan(app):
                yield
        finally:
            await service.close()

    app.router.lifespan_context = lifespan
    try:
        await service.start()
    except BaseException:
        await service.close()
        raise
    return app


def share_lead(service: Orchestrator, fleet: RemoteFleet) -> None:
    """Lets one front at a time switch roles, whom the others ask to, and has all of them queue as one."""

    def follow(view: View) -> None:
        fronts = _other_fronts(view, fleet)
        service.leads = view.leader == fleet.owner
        service.share(_waiting_at(fronts))
        service.losses.follow({each.epoch: each.losses for each in fronts} or None)
        service.isolation.share([each.claims for each in fronts] or None)
        service.arrivals.follow(time.time(), {each.epoch: each.traffic for each in fronts})
        _follow_advice(service, view, fleet)

    def describe() -> Mapping[str, Any]:
        queue = service.queue.summary()
        return {
            "num_waiting": queue.num_waiting,
            "oldest_s": queue.oldest_s,
            "claims": service.isolation.claims,
            "traffic": service.arrivals.published(time.time(), len(service.queue)),
            "advice": service.elastic.advisor.advice if service.leads else {},
        }

    async def answer(asked: SwitchRequest) -> RoleSwitch:
        if not service.leads:
            raise UnavailableError("another replica of the server switches roles by now; send it again")
        return await service.switch_roles(asked.worker, asked.roles)

    service.ask_leader, fleet.on_ask = fleet.ask_leader, answer
    service.losses.on_recorded = lambda: fleet.publish(losses=service.losses.report())
    service.isolation.on_claimed = lambda: fleet.publish(claims=service.isolation.claims)
    fleet.on_view, fleet.membership.describe = follow, describe
    follow(fleet.membership.view)


def _other_fronts(view: View, fleet: RemoteFleet) -> list[Member]:
    """Returns the other fronts over the same workers."""
    model = fleet.membership.purpose.model
    return [each for each in view.of_kind("front") if each.epoch != fleet.owner and each.model == model]


def _waiting_at(fronts: Sequence[Member]) -> QueueSummary | None:
    """Returns what waits at fronts; None without any."""
    if not fronts:
        return None
    arrivals = [each.oldest_s for each in fronts if each.oldest_s is not None]
    return QueueSummary(sum(each.num_waiting for each in fronts), min(arrivals, default=None))


def _follow_advice(service: Orchestrator, view: View, fleet: RemoteFleet) -> None:
    """Takes the bounds within which Serve scales, if it scales any deployment, and the leader's advice."""
    bounds = {name: found for kind, name in _SCALED.items() if (found := view.bounds(kind))}
    advisor = service.elastic.advisor
    if not bounds and not service.elastic.is_running:
        return
    service.elastic.start()
    advisor.follow(bounds, fleet.membership.purpose.topology)
    if not service.leads:
        advisor.stop(view.advice)


def worker_settings(args: AppArgs) -> WorkerSettings:
    return WorkerSettings(
        args.model_path,
        args.engine,
        num_embeddings=args.num_embeddings,
        num_kv_pools=args.num_kv_pools,
        tensor_parallel=args.tensor_parallel,
        encode_beside=args.encode_beside,
        is_alone=args.num_stage_workers == 1,
        scheduler=args.scheduler(is_decode=False),
        max_batch_patches=args.max_batch_patches,
        max_resize_pixels=args.limits.max_resize_pixels,
        decode_scheduler=args.scheduler(is_decode=True),
    )


def media_settings(args: AppArgs) -> MediaSettings:
    default = MediaSettings(args.model_path)
    fetch = replace(
        default.fetch, allowed_hosts=args.allowed_media_hosts, media_folder=args.allowed_media_path
    )
    return replace(default, fetch=fetch, num_read_threads=args.num_video_threads, pixels=args.pixels)


def _orchestrator_config(args: AppArgs) -> OrchestratorConfig:
    return OrchestratorConfig(
        max_waiting=args.max_waiting,
        max_wait_s=args.max_wait_s,
        sharding=args.sharding,
        elastic=ControllerConfig() if args.elastic else None,
        retention=args.load_retention,
    )


def _api_settings(args: AppArgs, planner: RequestPlanner) -> ApiSettings:
    """Returns the settings of the HTTP server.

    planner: supplies the checkpoint's own sampling and the model's limits
    """
    return ApiSettings(
        api_key=args.api_key.get_secret_value() if args.api_key else None,
        admin_api_key=args.admin_api_key.get_secret_value() if args.admin_api_key else None,
        max_requests=args.max_requests,
        limits=planner.limits,
        default_params=planner.settings.sampling,
        default_deadline_s=args.slo_ttft_s,
        default_reduction=args.reduction_policy,
        max_visual_tokens=args.max_visual_tokens,
        allowed_hosts=args.allowed_hosts,
        trace_dir=args.trace_dir,
        max_traces=args.max_traces,
        otlp_endpoint=args.otlp_endpoint,
        files=_file_settings(args),
    )


def _file_settings(args: AppArgs) -> FileSettings | None:
    if args.files_dir is None:
        return None
    return FileSettings(
        args.files_dir,
        max_file_bytes=args.max_file_bytes,
        max_folder_bytes=args.max_files_bytes,
        max_files=args.max_files,
        max_batches=args.max_batches,
        max_lines=args.max_batch_lines,
        num_in_flight=args.batch_concurrency,
    )


def log_requests() -> None:
    """Writes a line for each finished request to stderr."""
    logger = logging.getLogger("epd.serve_app")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
