"""Defines the ingress replica of the application on Ray: the HTTP app over a fleet of worker processes."""

from __future__ import annotations

import logging

from fastapi import FastAPI

from serve_app.app_args import AppArgs
from serve_app.composition import create_app, log_requests, media_settings, worker_settings
from serve_app.ray.fleet import RayFleet, RayFleetConfig


async def create_ingress(args: AppArgs) -> FastAPI:
    """Creates the app with its workers, which are then running and end with it. Raises EPDError."""
    log_requests()  # Ray keeps stderr in a file, and shows it on request
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    config = RayFleetConfig(
        args.workers,
        hang_s=args.hang_s,
        num_threads=args.threads_per_worker,
        media=media_settings(args),
    )
    return await create_app(args, RayFleet(config, worker_settings(args)))
