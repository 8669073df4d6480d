"""Serves the HTTP app over a service in memory on Ray Serve, for `front_cost`: what Serve itself costs.

    python -m benchmarks.front.front_cost_serve 127.0.0.1 8000 --groups 8

Prints the replica's process and port, then waits until standard input ends. Streams are in groups; each group
gets a token every 1 / --rate seconds, as from a decode worker of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray import serve
    from ray.serve.config import ProxyLocation

from fastapi import FastAPI

from benchmarks.front.front_cost_layers import MemoryService, api_over
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.ray.cluster import RaySettings, ray_cluster
from epd.serve_app.ray.front import FrontListener, FrontReplica


class RatedService:
    """Services in memory, each for a group of streams, that give tokens at a rate."""

    def __init__(self, num_groups: int, rate: float) -> None:
        self._groups = [MemoryService() for _ in range(num_groups)]
        self._rate = rate
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.models = self._groups[0].models

    def answer(self, request: Any) -> Any:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(self._groups))]
        self._number += 1
        return self._groups[self._number % len(self._groups)].answer(request)

    async def _run(self, number: int) -> None:
        loop, group = asyncio.get_running_loop(), self._groups[number]
        due_s = loop.time() + number / len(self._groups) / self._rate
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            group.step()
            due_s = max(due_s + 1 / self._rate, loop.time())

    async def status(self) -> Any:
        return await self._groups[0].status()


def application(num_groups: int, rate: float, address: HttpAddress | None) -> serve.Application:
    """The app with an extra route that names its process. address: where it listens itself."""
    made: list[FastAPI] = []

    def api() -> FastAPI:
        return made.pop()

    def created() -> FastAPI:
        logging.basicConfig(level=logging.INFO, filename="/dev/null")
        folder = Path(tempfile.mkdtemp(prefix="front-cost-"))
        app = api_over(RatedService(num_groups, rate), folder)

        @app.get("/pid")
        async def pid() -> int:
            return os.getpid()

        return app

    class Front(FrontReplica):
        """The HTTP app alone."""

        def __init__(self) -> None:
            app = created()
            self.listener = FrontListener(app, 0.0)
            made.append(app)

    deployment = serve.deployment(
        name="front",
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
        num_replicas=1,
        user_config=address and address.config,
    )
    return deployment(serve.ingress(api)(Front)).bind()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--groups", type=int, default=8, help="groups of streams")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--listen", action="store_true", help="the app listens itself, without a proxy")
    args = parser.parse_args()
    address = HttpAddress(args.host, args.port) if args.listen else None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_cluster(RaySettings(namespace=f"front-cost-{os.getpid()}")):
        serve.start(
            http_options={"host": args.host, "port": args.port},
            proxy_location=ProxyLocation.Disabled if args.listen else ProxyLocation.HeadOnly,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run(application(args.groups, args.rate, address), name="cost", route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
        serve.shutdown()


if __name__ == "__main__":
    main()
