"""Defines the service as a Ray Serve application: HTTP server, orchestrator, a fleet of worker processes.

    serve run serve_app.app:build_app topology=2e1p1d        or with a file: serve run serve_config.yaml

One replica is the ingress: it answers HTTP, plans, and owns the fleet. It starts and ends with its workers.
"""

# No `from __future__ import annotations`: Serve reads the builder's annotation as a class.

import os

from fastapi import FastAPI
from ray import serve

from serve_app.app_args import AppArgs

# Requests that Serve passes on concurrently: those being answered, those whose bodies are being read, and as
# many being refused. Health and metrics requests are included, so that nothing can take their place.
_MAX_ONGOING = 8192
# Additional requests that wait in the proxy; Serve refuses more with 503.
_MAX_QUEUED = 1024


def build_app(args: AppArgs) -> serve.Application:
    """Builds the application without running it. Raises EPDError for an invalid model or topology."""
    args = args.with_keys_from(os.environ).resolved()

    made: list[FastAPI] = []

    class Ingress:
        """Created before Serve asks for the HTTP app, so that a failure here is reported to the deployer."""

        async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
            from serve_app.ray.app_ingress import create_ingress  # torch, which only the replica needs

            made.append(await create_ingress(args))

    def api() -> FastAPI:
        return made.pop()

    deployment = serve.deployment(
        name="ingress",
        max_ongoing_requests=args.max_requests + _MAX_ONGOING,
        max_queued_requests=_MAX_QUEUED,
        graceful_shutdown_timeout_s=args.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress(api)(Ingress)).bind()
