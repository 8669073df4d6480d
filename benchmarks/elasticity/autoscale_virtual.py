"""Whether the number of stage workers follows waves of videos, beside every fixed number, in virtual time.

    python -m benchmarks.elasticity.autoscale_virtual [--seeds 1 2 3 4 5] [--workers auto 3 4 5 6]

The real application runs: planning, schedulers, pools, transfers, the estimator, the advice on replicas, the
policy that Serve calls, and the controller of roles. Workers are paced as A100s of a profile, and a pass
computes nothing (`benchmarks/epd_pays/virtual_workers.py`). Serve itself is not there: a replica runs START_S
after the policy wants it, gets its roles as the board gives them, and one that is no longer wanted leaves as
a replica does, its work taken elsewhere by the orchestrator.
Requests arrive at random, at rates that rise, stay and fall again (RAMP). All runs of a seed get the same.
A patch or token of the embedded model stands for SCALE of the device's: fewer are moved, and each costs more.
Writes benchmarks/results/autoscale_virtual.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.epd_pays.virtual_workers import run_virtual, virtual_workers
from benchmarks.reporting import RESULTS, Row, markdown
from epd.chat import ChatMessage, ContentPart
from epd.control.elasticity.assignment import roles_for_newcomer
from epd.control.elasticity.controller import ControllerConfig
from epd.encode.sharding import GROUP_TOKENS
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.errors import EPDError
from epd.kv.pass_limits import PassLimits
from epd.models import embedded_model_path
from epd.planning.replay import scaled
from epd.profiles.files import load_profile
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import WorkerBack, WorkerChanged, WorkerLost
from epd.serve_app.local.fleet import LocalFleet, LocalFleetConfig
from epd.serve_app.local.pacing import Pace
from epd.serve_app.media.media_worker import MediaSettings
from epd.serve_app.messages import endpoint
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.ray.autoscaling import ADVISED, stage_replicas
from epd.serve_app.service import AnswerRequest, MediaReference, TokenDelta
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.topology import ROLE_LETTERS, parse_topology
from epd.video import FetchPolicy
from tests.faults.pool import read_once
from tests.media import write_video

MODEL, PROFILE = embedded_model_path(), "qwen2.5-vl-7b@a100-80gb"
SCALE = 128
NUM_TOKENS, NUM_FRAMES, FPS, SIDE = 10, 16, 10, 64  # of an answer, and of a video
TTFT_SLO_S, TPOT_SLO_S = 3.1, 0.04
BATCH_PATCHES, CHUNK_TOKENS, NUM_SEQS = 8192 // SCALE, 2048 // SCALE, 64
NUM_CACHED = 32_768  # tokens, and embeddings: never what binds
TOPOLOGY, MIN_WORKERS, MAX_WORKERS = "1e1p1d", 3, 6
START_S, LEAVE_S = 20.0, 5.0
# Requests in a second, at seconds from the start; on straight lines between them.
RAMP = ((0.0, 0.7), (20.0, 0.7), (80.0, 3.0), (140.0, 3.0), (160.0, 0.7))
# Workers leave when the peak of three minutes would leave fewer of them spare time for one.
BUSY_S, END_S = (20.0, 160.0), 480.0
AUTO = "auto"
ABOUT = (
    "A worker is paced as an A100 with Qwen2.5-VL-7B. A request is a video. attained: the first token within "
    f"{TTFT_SLO_S} s and {TPOT_SLO_S} s a token after it; of all requests in {END_S:g} s, and of those that "
    f"came from {BUSY_S[0]:g} s to {BUSY_S[1]:g} s, when many came. A replica starts in {START_S:g} s. "
    f"Autoscaling has {MIN_WORKERS} to {MAX_WORKERS} workers. Roles follow the load in all runs."
)
WHY = """
## Why seeds differ

The rate is known too late, where more requests come than the ramp has on average.

- From 60 s to 90 s the ramp has 82 requests on average. Seeds 1 to 5 have 84, 77, 88, 67 and 106.
- In seed 5 requests are missed from 35 s on. A fourth worker is advised at 53 s, and runs at 73 s: the
  estimator's memory is 20 s, a need must last for 5 s, and a replica starts in 20 s. The next ones run at
  91 s and 110 s.
- Seed 5 misses 8 requests from 35 s to 40 s and 112 from 55 s to 95 s, and none later. The bound of 6 workers
  and the rule for fewer workers have no part in it: the first worker leaves after 380 s.

Runs of newer code than that of the tables, on 2026-11-29. Five workers attain 1 of seed 5 in it.

| change | seed 1 | seed 2 | seed 3 | seed 4 | seed 5 |
|---|---|---|---|---|---|
| none | .958 | .976 | .947 | .982 | .795 |
| waiting work is gone in 20 s, not 60 s | | | | | .827 |
| memory of 10 s, not 20 s | | | | | .971 |

The memory stays at 20 s. With 10 s, two tests of long waves and slow ramps fail
(`tests/control/elasticity/test_replicas.py`).
"""


Media = Mapping[str, MediaReference]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. at_s: from the start."""

    at_s: float
    name: str


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one answer; infinite where there was none."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, sent_s: float, tokens_s: Sequence[float]) -> Times:
        if len(tokens_s) < NUM_TOKENS:
            return cls(float("inf"), float("inf"))
        return cls(tokens_s[0] - sent_s, (tokens_s[-1] - tokens_s[0]) / (NUM_TOKENS - 1))


class _Fleet(LocalFleet):
    """Adds and gives up workers while it runs."""

    def num_there(self) -> int:
        return len(self._staying())

    def _staying(self) -> list[WorkerInfo]:
        infos = self.workers.values()
        return [
            each for each in infos if "video" not in each.roles and each.is_alive and not each.is_draining
        ]

    async def add(self, name: str) -> None:
        present = [each.roles for each in self._staying()]
        self._infos[name] = WorkerInfo(name, roles_for_newcomer(parse_topology(TOPOLOGY), present))
        await self._start(name)
        self._events.put_nowait(WorkerBack(name))

    async def remove(self) -> None:
        """Gives up the worker that came last."""
        info = self._staying()[-1]
        self._infos[info.name] = replace(info, closed=info.roles, leaving=EVERY_STAGE)
        self._events.put_nowait(WorkerChanged(info.name))
        await asyncio.sleep(LEAVE_S)
        self._infos[info.name] = replace(self._infos[info.name], is_alive=False)
        self._threads.pop(info.name).lose(f"worker '{info.name}' has left")
        for stage in ROLE_LETTERS:
            self._hubs.close(endpoint(info.name, stage))
        self._events.put_nowait(WorkerLost(info.name, "it has left", info.incarnation, is_planned=True))


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave. workers: how many ran, every second."""

    arrivals: Sequence[Arrival]
    times: Sequence[Times]
    workers: Sequence[int]

    def row(self, seed: int, workers: str) -> Row:
        busy = [
            is_met(each) for arrival, each in zip(self.arrivals, self.times, strict=True) if in_wave(arrival)
        ]
        ttfts = sorted(each.ttft_s for each in self.times)
        return {
            "seed": seed,
            "workers": workers,
            "requests": len(self.times),
            "attained": round(statistics.mean(map(is_met, self.times)), 3),
            "attained, busy": round(statistics.mean(busy), 3),
            "TTFT p50, s": round(ttfts[len(ttfts) // 2], 2),
            "TTFT p99, s": round(ttfts[len(ttfts) * 99 // 100], 2),
            "mean workers": round(statistics.mean(self.workers), 2),
            "least to most": f"{min(self.workers)} to {max(self.workers)}",
            "ups": sum(a < b for a, b in pairwise(self.workers)),
            "downs": sum(a > b for a, b in pairwise(self.workers)),
        }


def is_met(times: Times) -> bool:
    return times.ttft_s <= TTFT_SLO_S and times.tpot_s <= TPOT_SLO_S


def in_wave(arrival: Arrival) -> bool:
    return BUSY_S[0] <= arrival.at_s < BUSY_S[1]


def waves(seed: int) -> list[Arrival]:
    """A Poisson process of the highest rate, thinned out."""
    draws, at_s, found = random.Random(seed), 0.0, list[Arrival]()
    starts_s, rates = zip(*RAMP, strict=True)
    while (at_s := at_s + draws.expovariate(max(rates))) < END_S:
        if draws.random() * max(rates) < np.interp(at_s, starts_s, rates):
            found.append(Arrival(at_s, f"{seed}-{len(found)}"))
    return found


async def scaled_as_by_serve(service: Orchestrator, fleet: _Fleet, seen: list[int]) -> None:
    """Does what Serve does, once a second."""
    service.elastic.advisor.follow({"Stage": (MIN_WORKERS, MAX_WORKERS)}, TOPOLOGY)
    target, number = fleet.num_there(), 0
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(1.0)
            wanted = _wanted(service, target)
            for _ in range(wanted - target):
                number += 1
                group.create_task(_started(fleet, f"n{number}"))
            for _ in range(target - wanted):
                group.create_task(fleet.remove())
            target = wanted
            seen.append(fleet.num_there())


async def _started(fleet: _Fleet, name: str) -> None:
    await asyncio.sleep(START_S)
    await fleet.add(name)


def _wanted(service: Orchestrator, target: int) -> int:
    """What the policy of Serve says about the newest advice."""
    advice = service.elastic.advisor.advice.get("Stage")
    points = [] if advice is None else [SimpleNamespace(timestamp=0.0, value=float(advice.num_replicas))]
    context: Any = SimpleNamespace(
        raw_metrics={ADVISED: {"a replica": points}},
        current_time=0.0,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=MIN_WORKERS,
        capacity_adjusted_max_replicas=MAX_WORKERS,
    )
    return stage_replicas(context)[0]


async def watched(fleet: _Fleet, seen: list[int]) -> None:
    while True:
        await asyncio.sleep(1.0)
        seen.append(fleet.num_there())


async def sent(service: Orchestrator, media: Media, arrivals: Sequence[Arrival]) -> list[Times]:
    """Sends requests at their times, and waits for their answers."""
    asking, start_s = list[asyncio.Task[Times]](), time.perf_counter()
    for each in arrivals:
        await asyncio.sleep(max(0.0, start_s + each.at_s - time.perf_counter()))
        asking.append(asyncio.create_task(_asked(service, media, each.name, start_s + each.at_s)))
    return list(await asyncio.gather(*asking))


async def _asked(service: Orchestrator, media: Media, name: str, sent_s: float) -> Times:
    message = ChatMessage("user", (ContentPart("video"), ContentPart("text", f"What is {name}?")))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    frames, tokens_s = FrameSampling(num_frames=NUM_FRAMES), list[float]()
    try:
        async with service.media.sources(name, [media[name]]) as sources:
            request = AnswerRequest(name, "shapes-vl", (message,), sources, params, frames)
            async with aclosing(service.answer(request)) as answer:
                async for items in answer:
                    for item in items:
                        if isinstance(item, TokenDelta):
                            tokens_s += [time.perf_counter()] * len(item.token_ids)
    except EPDError as error:
        print(f"{name}: {error}", flush=True)
    return Times.of(sent_s, tokens_s)


def drawn(arrivals: Sequence[Arrival], folder: Path) -> Media:
    """Writes a video for each request, unlike all others."""
    found = {}
    for each in arrivals:
        path = folder / f"{each.name}.mp4"
        seed = crc32(path.name.encode())
        write_video(path, num_frames=NUM_FRAMES, fps=FPS, seed=seed, height=SIDE, width=SIDE)
        found[each.name] = MediaReference("video", path.as_uri(), "video")
    return found


def fleet_in(folder: Path) -> _Fleet:
    """Returns paced workers that are not started. folder: of the media."""
    workers = {worker.name: worker.roles for worker in parse_topology(TOPOLOGY).workers()}
    workers["v0"] = frozenset({"video"})
    settings = WorkerSettings(
        MODEL,
        EngineConfig(num_kv_tokens=NUM_CACHED),
        num_embeddings=NUM_CACHED,
        scheduler=PassLimits(max(CHUNK_TOKENS, NUM_SEQS), NUM_SEQS, CHUNK_TOKENS),
        max_batch_patches=BATCH_PATCHES,
        encode_beside=False,  # a worker's stages share its device, and a pause is no work beside others
        pace=Pace(scaled(load_profile(PROFILE), SCALE, SCALE), 1.0),
    )
    media = MediaSettings(MODEL, FetchPolicy(media_folder=folder))
    return _Fleet(LocalFleetConfig(workers, media=media, hang_s=60.0), settings)


async def run(workers: str, arrivals: Sequence[Arrival], folder: Path, media: Media) -> Run:
    """workers: a number, or auto."""
    fleet, seen = fleet_in(folder), list[int]()
    planner = RequestPlanner(MODEL, "shapes-vl", group_tokens=max(1, GROUP_TOKENS // SCALE))
    config = OrchestratorConfig(
        max_waiting=4096, max_wait_s=600, stall_timeout_s=180, sharding="groups", elastic=ControllerConfig()
    )
    service = Orchestrator(fleet, planner, config)
    await service.start()
    try:
        if workers != AUTO:
            for number in range(int(workers) - fleet.num_there()):
                await fleet.add(f"n{number}")
        watching = asyncio.create_task(
            scaled_as_by_serve(service, fleet, seen) if workers == AUTO else watched(fleet, seen)
        )
        times = await sent(service, media, arrivals)
        assert not watching.done(), watching.result()
        watching.cancel()
        return Run(arrivals, times, seen)
    finally:
        await service.close()


def measured(seeds: Sequence[int], counts: Sequence[str]) -> Iterator[Row]:
    with read_once(), virtual_workers():
        for seed in seeds:
            arrivals = waves(seed)
            with tempfile.TemporaryDirectory() as name:
                media = drawn(arrivals, Path(name))
                for workers in counts:
                    work = partial(run, workers, arrivals, Path(name), media)
                    yield run_virtual(work, seed).row(seed, workers)


def saved(new: Row) -> None:
    """Puts a row in the place of an earlier one of the same run. Rows of other settings go."""
    path = RESULTS / "autoscale_virtual.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"setting": {}, "rows": []}
    rows = before["rows"] if before["setting"].get("about") == ABOUT else []
    key = itemgetter("seed", "workers")
    rows = sorted([each for each in rows if key(each) != key(new)] + [new], key=key)
    results = {"setting": {"about": ABOUT}, "shares": shares(rows), "rows": rows}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    titles = {"shares": "Autoscaling beside the best fixed number (aim: .9)", "rows": "Runs"}
    command = "python -m benchmarks.elasticity.autoscale_virtual"
    text = markdown("Replicas that follow a ramp, in virtual time", command, results, titles)
    path.with_suffix(".md").write_text(text + WHY, encoding="utf-8")


def shares(rows: Sequence[Row]) -> list[Row]:
    """What autoscaling attained over what the best fixed number did, and the workers that each took."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        fixed = [row for row in rows if row["seed"] == seed and row["workers"] != AUTO]
        auto = [row for row in rows if row["seed"] == seed and row["workers"] == AUTO]
        if fixed and auto:
            best = max(fixed, key=itemgetter("attained"))
            share = {name: round(auto[0][name] / best[name], 3) for name in ("attained", "attained, busy")}
            taken = {"workers, mean": auto[0]["mean workers"], "best fixed number": best["workers"]}
            found.append({"seed": seed, **share, **taken})
    return [*found, *_spread(found)]


def _spread(found: Sequence[Row]) -> Iterator[Row]:
    """Yields the median of the seeds, and the least and the most of them."""
    kinds: Mapping[str, Callable[[list[float]], float]] = {
        "median": statistics.median,
        "least": min,
        "most": max,
    }
    names = ("attained", "attained, busy", "workers, mean")
    for kind, of in kinds.items():
        if len(found) > 1:
            shares = {name: round(of([row[name] for row in found]), 3) for name in names}
            yield {"seed": kind, **shares, "best fixed number": ""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--workers", nargs="+", default=[AUTO, "3", "4", "5", "6"])
    given = parser.parse_args()
    for row in measured(given.seeds, given.workers):
        print(json.dumps(row), flush=True)
        saved(row)


if __name__ == "__main__":
    main()
