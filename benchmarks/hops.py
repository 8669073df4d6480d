"""One hop between processes, and how soon a change of role is seen: a plain Ray actor against a Serve handle.

    python -m benchmarks.hops [--quick]

Both are asked by the same Serve replica, as the ingress of the application would ask them, in turns. A hop is
a call with a small message and a small reply; "at once" keeps 32 of them in flight. A change of role is
seen when a call for the new role has been answered by the worker that was told to have it. With actors the
caller notes the change itself when the worker confirms it; with Serve a request router chooses by what
replicas report in their routing statistics, every 0.1 s.
Results go to benchmarks/results/hops.{json,md}; docs/decisions/0005-plain-actors-for-workers.md uses them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from epd.machine import usable_cpus
from serve_app.ray.cluster import RaySettings, ray_cluster

ROOT = Path(__file__).resolve().parents[1]

RESULTS = ROOT / "benchmarks" / "results"
STATISTICS_S = 0.1
NUM_AT_ONCE = 32
LOOK_AGAIN_S = 0.002
TIMEOUT_S = 120.0
Row = dict[str, Any]
ONE_CPU: Row = {"num_cpus": 0}


class Worker:
    """What answers. role: it is asked for by this name."""

    def __init__(self, role: str = "") -> None:
        self.role = role

    async def hop(self, message: str, wanted: str = "") -> str:  # noqa: ARG002 - read by the router
        return self.role

    async def set_role(self, role: str) -> None:
        self.role = role

    def record_routing_stats(self) -> dict[str, str]:
        """Called by Serve on its replicas."""
        return {"role": self.role}


class ByRole(RequestRouter):
    """Replicas that have reported the role that the call wants, or all when it wants none."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.kwargs.get("wanted", "") if pending_request else ""
        if not wanted:
            return [candidate_replicas]
        return [[each for each in candidate_replicas if each.routing_stats.get("role") == wanted]]

    async def _choose_replica_for_request(
        self,
        pending_request: PendingRequest,
        *,
        is_retry: bool = False,  # noqa: ARG002
    ) -> RunningReplica:
        """The documented way matches calls by the request that they are made in, and then waits for ever."""
        num_tries = 0
        while True:
            for candidates in await self.choose_replicas(self._replicas_list, pending_request):
                chosen = await self._select_from_candidate_replicas(candidates, num_tries)
                if chosen is not None:
                    return chosen
            num_tries += 1
            await asyncio.sleep(LOOK_AGAIN_S)


@serve.deployment(ray_actor_options=ONE_CPU)
class Caller:
    """Measures from inside a replica. served, switched: handles on deployments of the same class."""

    def __init__(self, served: Any, switched: Any) -> None:
        self.served = served
        self.switched = switched
        actor = ray.remote(Worker).options(num_cpus=0, max_concurrency=1000)
        self.actor = actor.remote()
        self.actors = {"first": actor.remote(), "second": actor.remote()}

    async def hops(self, kind: str, num_calls: int) -> list[float]:
        """Microseconds of single calls, one after the other."""
        call = self.actor.hop if kind == "actor" else self.served.hop
        seconds = []
        for _ in range(num_calls):
            start = time.perf_counter()
            await call.remote("a small message")
            seconds.append(time.perf_counter() - start)
        return [1e6 * each for each in seconds]

    async def calls_per_s(self, kind: str, num_calls: int) -> float:
        call = self.actor.hop if kind == "actor" else self.served.hop

        async def some() -> None:
            for _ in range(num_calls // NUM_AT_ONCE):
                await call.remote("a small message")

        start = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(NUM_AT_ONCE)))
        return num_calls / (time.perf_counter() - start)

    async def actor_switches(self, num_switches: int) -> list[float]:
        """Milliseconds from the wish for a change until the right worker has answered a call by role."""
        roles = dict.fromkeys(self.actors, "")
        milliseconds = []
        for number in range(num_switches):
            name = ("first", "second")[number % 2]
            start = time.perf_counter()
            await self.actors[name].set_role.remote("decode")
            roles = {each: "decode" if each == name else "" for each in roles}
            chosen = next(each for each, role in roles.items() if role == "decode")
            assert await self.actors[chosen].hop.remote("a small message") == "decode"
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds

    async def serve_switches(self, num_switches: int) -> list[float]:
        """The same by routing statistics."""
        milliseconds = []
        for number in range(num_switches):
            role = f"role {number}"
            start = time.perf_counter()
            await self.switched.set_role.remote(role)
            assert await self.switched.hop.remote("a small message", wanted=role) == role
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds


def measure(is_quick: bool) -> list[Row]:
    """Rounds in turns; medians and 99th percentiles over all of them."""
    num_rounds, num_calls, num_switches = (1, 50, 5) if is_quick else (5, 200, 10)
    router = RequestRouterConfig(request_router_class=ByRole, request_routing_stats_period_s=STATISTICS_S)
    worker = serve.deployment(ray_actor_options=ONE_CPU, max_ongoing_requests=1000)(Worker)
    switched = worker.options(name="switched", request_router_config=router)
    app = Caller.bind(worker.options(name="served").bind(), switched.bind())
    caller = serve.run(app, name="hops", route_prefix=None)

    def ask(method: str, *arguments: Any) -> Any:
        return getattr(caller, method).remote(*arguments).result(timeout_s=TIMEOUT_S)

    kinds = ("actor", "serve")
    for kind in kinds:
        ask("hops", kind, 20)
    hops: dict[str, list[float]] = {kind: [] for kind in kinds}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    switches: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind in kinds:
            hops[kind] += ask("hops", kind, num_calls)
            rates[kind].append(ask("calls_per_s", kind, NUM_AT_ONCE * num_calls // 20))
            switches[kind] += ask(f"{kind}_switches", num_switches)
    names = {"actor": "plain actor", "serve": "Serve handle"}
    return [
        {
            "path": names[kind],
            "hop_p50_us": round(float(np.percentile(hops[kind], 50))),
            "hop_p99_us": round(float(np.percentile(hops[kind], 99))),
            "at_once_calls_per_s": round(float(np.median(rates[kind]))),
            "role_seen_p50_ms": round(float(np.percentile(switches[kind], 50)), 1),
            "role_seen_max_ms": round(max(switches[kind]), 1),
            "num_calls": len(hops[kind]),
            "num_switches": len(switches[kind]),
        }
        for kind in kinds
    ]


def environment() -> Row:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": usable_cpus(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "ray": version("ray"),
    }


def write(rows: list[Row], about: Row) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "hops.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = ["# A hop between processes", "", "`python -m benchmarks.hops`", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    (RESULTS / "hops.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few calls, nothing is written")
    is_quick = parser.parse_args().quick
    about = environment()
    with ray_cluster(RaySettings(namespace=f"epd-hops-{os.getpid()}")):
        serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "ERROR"})
        rows = measure(is_quick)
        serve.shutdown()
    if is_quick:
        print(json.dumps(rows, indent=1))
    else:
        write(rows, about)


if __name__ == "__main__":
    main()
