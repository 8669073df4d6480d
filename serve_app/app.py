"""Defines the service as a Ray Serve application: fronts, media workers and stage workers.

    serve run epd.serve_app.app:build_app topology=2e1p1d        or with a file: serve run serve_config.yaml

Replica counts, resources and autoscaling are Serve's own fields of each deployment; where a file leaves the
counts out, the topology and `num_video_workers` set them.
"""

# No `from __future__ import annotations`: Serve reads the builder's annotation as a class.

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve

from epd.serve_app.app_args import MEDIA_FIELDS, STAGE_FIELDS, AppArgs
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.deployments import Media, Stage, create_front
from epd.serve_app.ray.front import OWNER, FrontListener, FrontReplica
from epd.serve_app.ray.gpus import cluster_gpus, gpus_by_class, on_given_devices

# Requests that Serve passes on concurrently: those being answered, those whose bodies are being read, and as
# many being refused. Health and metrics requests are included, so that nothing can take their place.
_MAX_ONGOING = 8192
# Additional requests that wait in the proxy; Serve refuses more with 503.
_MAX_QUEUED = 1024
# Of a graceful shutdown, beyond the grace period for requests in flight.
_CLOSE_S = 10.0


def build_app(args: AppArgs) -> serve.Application:
    """Builds the application without running it. Raises EPDError for an invalid model or topology."""
    return application(args)


def application(
    args: AppArgs, address: HttpAddress | None = None, *, owner: str = "", front_node: str = ""
) -> serve.Application:
    """Builds the application like `build_app`.

    address: at which each front listens itself; None: requests come through Serve's proxy
    owner: by which the command that deploys it knows it again
    front_node: address of the machine that all fronts are on; empty for any
    """
    args = args.with_keys_from(os.environ).resolved()
    options: dict[str, Any] = {
        "graceful_shutdown_timeout_s": args.drain_s + _CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": 0},
        # An update starts new replicas beside the old ones, which then complete their work.
        "max_surge_percent": 100,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": args.hang_s,
    }
    media = _deployment(Media, "Media", args.num_video_workers, options)
    front = _deployment(_front_class(args), "Front", args.num_fronts, options)
    front = front.options(
        max_ongoing_requests=args.max_requests + _MAX_ONGOING, max_queued_requests=_MAX_QUEUED
    )
    config = (address.config if address is not None else {}) | ({OWNER: owner} if owner else {})
    if config:
        front = front.options(user_config=config)
    if front_node:
        front = front.options(ray_actor_options={"num_cpus": 0, "resources": {f"node:{front_node}": 0.001}})
    return front.bind(*_stages(args, options), media.bind(args.for_workers(*MEDIA_FIELDS)))


def _stages(args: AppArgs, options: Mapping[str, Any]) -> Iterator[serve.Application]:
    """Yields the deployment `Stage`, and `Stage-NAME` of each class of workers."""
    by_class = gpus_by_class(args, cluster_gpus())
    args = on_given_devices(args, by_class).for_workers(*STAGE_FIELDS)
    for name, part in args.parts.items():
        own = args.worker_classes.get(name)
        asked = {"num_cpus": 0, "num_gpus": by_class[name], **(own.ray_actor_options if own else {})}
        stage = _deployment(Stage, f"Stage-{name}" if name else "Stage", part.num_workers, options)
        yield stage.options(ray_actor_options=asked).bind(args, *([name] if name else []))


def _deployment(
    replica: type[Any], name: str, num_replicas: int, options: Mapping[str, Any]
) -> serve.Deployment:
    return serve.deployment(name=name, num_replicas=num_replicas, **options)(replica)


def _front_class(args: AppArgs) -> Any:
    made: list[FastAPI] = []

    class Front(FrontReplica):
        """Created before Serve asks for the HTTP app, so that a failure here is reported to the deployer."""

        async def __init__(self, *_deployments: Any) -> None:  # type: ignore[misc] # Serve awaits it
            app = await create_front(args)
            self.listener = FrontListener(app, args.drain_s)
            made.append(app)

    def api() -> FastAPI:
        return made.pop()

    return serve.ingress(api)(Front)
