"""Defines the deployments: a replica of `Stage` or `Media` is a worker, one of `Front` an HTTP server.

    Serve      places, watches, scales and updates replicas
    replicas   say what they are to the board, and talk to each other over links of their own

What a replica needs is imported when it starts: the deployer and Serve's controller import no torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve

from epd.colour import parse_colour
from epd.serve_app.app_args import AppArgs
from epd.serve_app.network.members import ProcessAddress, Purpose
from epd.serve_app.ray.autoscaling import advice_stats
from epd.serve_app.ray.board import RayBoard
from epd.serve_app.ray.cluster import LINK_HOST
from epd.serve_app.ray.gpus import worker_device
from epd.worker_classes import REST

if TYPE_CHECKING:
    from ray.serve.context import ReplicaContext

    from epd.serve_app.network.media_server import MediaServer
    from epd.serve_app.network.worker_server import WorkerServer

logger = logging.getLogger(__name__)

_EXIT_CODE = 1


class _Worker:
    """Holds what the replicas of both kinds of workers do for Serve."""

    _server: WorkerServer | MediaServer
    _drain_s: float

    async def check_health(self) -> None:
        if not self._server.is_healthy:
            raise RuntimeError("the worker has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the advice that the deployment's policy follows. Serve asks if it scales the deployment."""
        return _advised(self._server)

    async def __del__(self) -> None:  # Serve awaits it, before it ends the replica
        if hasattr(self, "_server"):
            await _ended(self._server, self._drain_s)


class Stage(_Worker):
    """Runs one stage worker. The board gives it its name and roles."""

    async def __init__(self, args: AppArgs, worker_class: str = REST) -> None:  # type: ignore[misc] # Serve awaits it
        """Starts a worker of a class; those of the rest have what the arguments say."""
        parts = _replica_parts()
        _quiet()
        own = args.of_class(worker_class)
        device = worker_device(own.device)
        parts.limit_memory(device, args.num_stage_workers)
        settings = parts.worker_settings(args, worker_class, device)
        purpose = replace(_purpose(args, worker_class), topology=str(args.parts[worker_class]))
        config = parts.WorkerServerConfig(
            settings, purpose, own.threads_per_worker, transport=parts.transport_config(args.connector)
        )
        self._drain_s = args.drain_s
        self._server = parts.WorkerServer(_board(), _place(), config)
        await _started(self._server)


class Media(_Worker):
    """Runs one media worker."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        parts = _replica_parts()
        _quiet()
        self._drain_s = args.drain_s
        parts.hide_process()  # from its own children, and all other processes of this user
        self._processes = parts.MediaProcesses(
            background=parse_colour(args.image_background),
            requires_walls=args.require_media_sandbox,
            device=args.video_device,
        )
        await asyncio.to_thread(self._processes.start)
        worker = parts.MediaWorker(parts.media_settings(args), self._processes)
        self._server = parts.MediaServer(_board(), _place(), worker, _purpose(args), args.num_video_threads)
        await _started(self._server)

    async def __del__(self) -> None:
        await super().__del__()
        if hasattr(self, "_processes"):
            self._processes.close()


async def create_front(args: AppArgs) -> FastAPI:
    """Creates the HTTP app of a front. Raises EPDError."""
    parts = _replica_parts()
    _quiet()
    # Ray keeps stderr in a file, and shows it on request.
    parts.write_logs(args.log_format, shows_requests=True)
    fleet = parts.RemoteFleet(_board(), _place(), _purpose(args))
    fleet.membership.on_ended = _end
    app: FastAPI = await parts.create_app(args, fleet, fleet.owner)
    parts.share_lead(app.state.server.service, fleet)
    parts.share_clients(app.state.server, fleet)
    return app


def _replica_parts() -> Any:
    """Returns the module of what replicas are built of, imported where one starts: it imports torch."""
    return import_module("epd.serve_app.ray.replica_parts")


async def _started(server: WorkerServer | MediaServer) -> None:
    server.membership.on_ended = _end
    try:
        await server.start()
    except BaseException:
        await server.close()
        raise


async def _ended(server: WorkerServer | MediaServer, drain_s: float) -> None:
    server.membership.on_ended = lambda _reason: None
    await server.drain(drain_s)
    await server.close()


def _advised(server: WorkerServer | MediaServer) -> dict[str, float]:
    context = serve.get_replica_context()
    bounds = _bounds(context)
    if bounds != server.membership.member.bounds:
        server.membership.set(bounds=bounds)
    advice = server.membership.view.advice.get(context.deployment)
    return advice_stats(None if advice is None else advice.num_replicas)


def _bounds(context: ReplicaContext) -> tuple[int, int] | None:
    """Returns between which numbers Serve scales the deployment; they may change without a restart."""
    config = context._deployment_config.autoscaling_config
    return None if config is None else (config.min_replicas, config.max_replicas)


def _end(reason: str) -> None:
    """Ends this process at once: others count it as lost, and Serve starts another one."""
    logger.error("this replica ends: %s", reason)
    logging.shutdown()
    os._exit(_EXIT_CODE)


def _board() -> RayBoard:
    return RayBoard(serve.get_replica_context().app_name)


def _place() -> ProcessAddress:
    own: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ProcessAddress(os.environ.get(LINK_HOST) or own, ray.get_runtime_context().get_node_id())


def _purpose(args: AppArgs, worker_class: str = REST) -> Purpose:
    described = args.model_dump_json() + worker_class
    release = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
    return Purpose(str(args.model), args.topology, release, args.hang_s, worker_class)


def _quiet() -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
