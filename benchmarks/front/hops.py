"""One hop between processes: a plain Ray actor, a Serve handle, and sockets of our own.

    python -m benchmarks.front.hops [--quick]

All are asked by the same Serve replica, as a front of the application would ask them, in turns. A hop is
a call with a report of some tokens, about 250 bytes, and the same as reply; "at once" keeps 32 of them in
flight, and the CPU time of both processes is divided by the calls (not that of Ray's own daemons).

    plain actor     a call of an actor's method
    Serve handle    a call through a request router of our own
    socket          length-prefixed pickles over TCP (`socket_hops.py`): the least that a hop costs
    link            the application's own (`serve_app/network`): the same with proof of a key, calls, buffers
    ZeroMQ          DEALER and ROUTER over TCP, if pyzmq is installed, which nothing here requires

A change of role is seen when a call for the new role has been answered by the worker that was asked to take
it. With actors the caller notes the change itself when the worker confirms it; with Serve a request router
chooses by what replicas report in their routing statistics, every 0.1 s.
Results go to benchmarks/results/hops.{json,md}; docs/decisions/0012-serve-places-sockets-carry.md uses them.
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

from benchmarks.front.socket_hops import LINKS, MESSAGE, Ask, serve_hops
from epd.machine import usable_cpus
from epd.serve_app.ray.cluster import RaySettings, ray_cluster

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "benchmarks" / "results"
STATISTICS_S = 0.1
NUM_AT_ONCE = 32
LOOK_AGAIN_S = 0.002
TIMEOUT_S = 120.0
Row = dict[str, Any]
ONE_CPU: Row = {"num_cpus": 0}
NAMES = {"actor": "plain actor", "serve": "Serve handle"}


class Worker:
    """What answers. role: it is asked for by this name."""

    def __init__(self, role: str = "") -> None:
        self.role = role

    async def hop(self, message: Row) -> Row:
        return message

    async def which(self, wanted: str = "") -> str:  # noqa: ARG002 - read by the router
        return self.role

    async def listen(self, kind: str) -> int:
        """Returns the port at which hops of this kind are answered."""
        return await serve_hops(kind)

    async def cpu_s(self) -> float:
        return time.process_time()

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
        self.listener = actor.remote()  # a process of its own, so that its CPU time is that of sockets
        self.actors = {"first": actor.remote(), "second": actor.remote()}
        self.asks: dict[str, Ask] = {
            "actor": lambda: self.actor.hop.remote(MESSAGE),
            "serve": lambda: self.served.hop.remote(MESSAGE),
        }

    async def connect(self) -> list[str]:
        """Returns the kinds of hops, sockets included."""
        for kind, open_link in LINKS.items():
            self.asks[kind] = await open_link(await self.listener.listen.remote(kind))
        return list(self.asks)

    async def hops(self, kind: str, num_calls: int) -> list[float]:
        """Microseconds of single calls, one after the other."""
        ask, seconds = self.asks[kind], []
        for _ in range(num_calls):
            start = time.perf_counter()
            await ask()
            seconds.append(time.perf_counter() - start)
        return [1e6 * each for each in seconds]

    async def _cpu_s(self, kind: str) -> tuple[float, float]:
        """CPU seconds of this process and of the one that answers."""
        answers = {"actor": self.actor, "serve": self.served}.get(kind, self.listener)
        there = await answers.cpu_s.remote()
        return time.process_time(), there

    async def at_once(self, kind: str, num_calls: int) -> tuple[float, float, float]:
        """Calls per second, and microseconds of CPU for each, here and there."""
        ask = self.asks[kind]

        async def some() -> None:
            for _ in range(num_calls // NUM_AT_ONCE):
                await ask()

        before, start = await self._cpu_s(kind), time.perf_counter()
        await asyncio.gather(*(some() for _ in range(NUM_AT_ONCE)))
        seconds = time.perf_counter() - start
        after = await self._cpu_s(kind)
        here_us, there_us = (1e6 * (new - old) / num_calls for old, new in zip(before, after, strict=True))
        return num_calls / seconds, here_us, there_us

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
            assert await self.actors[chosen].which.remote() == "decode"
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds

    async def serve_switches(self, num_switches: int) -> list[float]:
        """The same by routing statistics."""
        milliseconds = []
        for number in range(num_switches):
            role = f"role {number}"
            start = time.perf_counter()
            await self.switched.set_role.remote(role)
            assert await self.switched.which.remote(wanted=role) == role
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds


def measure(is_quick: bool) -> list[Row]:
    """Rounds in turns; medians and 99th percentiles over all of them."""
    num_rounds, num_calls, num_switches = (1, 50, 5) if is_quick else (5, 400, 10)
    router = RequestRouterConfig(request_router_class=ByRole, request_routing_stats_period_s=STATISTICS_S)
    worker = serve.deployment(ray_actor_options=ONE_CPU, max_ongoing_requests=1000)(Worker)
    switched = worker.options(name="switched", request_router_config=router)
    app = Caller.bind(worker.options(name="served").bind(), switched.bind())
    caller = serve.run(app, name="hops", route_prefix=None)

    def ask(method: str, *arguments: Any) -> Any:
        return getattr(caller, method).remote(*arguments).result(timeout_s=TIMEOUT_S)

    kinds = ask("connect")
    for kind in kinds:
        ask("hops", kind, 20)
    hops: dict[str, list[float]] = {kind: [] for kind in kinds}
    at_once: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    switches: dict[str, list[float]] = {kind: [] for kind in ("actor", "serve")}
    for _ in range(num_rounds):
        for kind in kinds:
            hops[kind] += ask("hops", kind, num_calls)
            at_once[kind].append(ask("at_once", kind, NUM_AT_ONCE * num_calls // 5))
            if kind in switches:
                switches[kind] += ask(f"{kind}_switches", num_switches)
    return [row_of(kind, hops[kind], at_once[kind], switches.get(kind, [])) for kind in kinds]


def row_of(
    kind: str, hops: list[float], at_once: list[tuple[float, float, float]], switches: list[float]
) -> Row:
    """One path. Links have no roles of their own: a caller knows them from the board."""
    rate, here_us, there_us = np.median(np.array(at_once), axis=0)
    return {
        "path": NAMES.get(kind, kind),
        "hop_p50_us": round(float(np.percentile(hops, 50))),
        "hop_p99_us": round(float(np.percentile(hops, 99))),
        "at_once_calls_per_s": round(float(rate)),
        "cpu_us_caller": round(float(here_us)),
        "cpu_us_worker": round(float(there_us)),
        "role_seen_p50_ms": round(float(np.percentile(switches, 50)), 1) if switches else "",
        "role_seen_max_ms": round(max(switches), 1) if switches else "",
        "num_calls": len(hops),
    }


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
    lines = ["# A hop between processes", "", "`python -m benchmarks.front.hops`", ""]
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
