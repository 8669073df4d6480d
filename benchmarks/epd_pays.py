"""Whether splitting pays at equal devices: the same workers split and colocated, each as if it had a device.

    python -m benchmarks.epd_pays [--quick] [--requests KIND] [--rate R ...] [--topology T ...] [--slow N]

Workers are threads of the real app with shapes-vl. A pass lasts as long as the profile says for the work that
the live scheduler put into it, times N, so that the cores of this machine can compute it meanwhile; passes
that took longer are counted as late. For the same reason a patch and a token of a prompt stand for SCALE of
the device's, in costs and in the limits of a pass. Tokens, queues, batches and transfers are real, the speed
of the devices is not.
Requests arrive at random (Poisson), each with new media and an answer of a fixed length; all topologies get
the same arrivals, one after the other. Cases that are not measured stay in the results as they were. Times
are divided by N: seconds of the device. Objectives: TTFT_SLO_S, and for each token TPOT_SLO passes of eight
decodes. Goodput is the highest rate at which 90 % of the requests meet both, on a line between measured
rates. Results go to benchmarks/results/epd_pays.{json,md,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
import torch

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from encoders import FrameSampling
from encoders.prompt.chat import ChatMessage, ContentPart
from epd.bench.media import draw_image
from epd.kv.scheduler_output import Chunk
from epd.kv.scheduling import SchedulerConfig
from epd.models import embedded_model_path
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.sampling_params import SamplingParams
from epd.topology import Stage, parse_topology
from epd.workload.requests import Resolution
from serve_app.local.fleet import LocalFleet, LocalFleetConfig
from serve_app.media.media_worker import MediaSettings
from serve_app.orchestration.orchestrator import Orchestrator
from serve_app.orchestration.request_planner import RequestPlanner
from serve_app.service import AnswerRequest, MediaReference, TokenDelta
from serve_app.worker.worker_core import WorkerCore
from serve_app.worker.worker_stages import WorkerSettings
from tests.media import write_video
from video import FetchPolicy

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MODEL = embedded_model_path()
TTFT_SLO_S, TPOT_SLO, ATTAINED = 1.0, 3.0, 0.9
SCALE = 32


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that arrive at random.

    side: pixels of the square images or frames, before the processor makes them smaller
    seconds: of arrivals, on the device's clock
    num_frames: of a video, which stands in the place of the images; 0 for none
    one_in: each so many requests have media, the others are texts
    """

    num_images: int
    side: int
    num_tokens: int
    seconds: float
    num_frames: int = 0
    one_in: int = 1


TRAFFICS: Mapping[str, Traffic] = {
    "two large images": Traffic(num_images=2, side=224, num_tokens=40, seconds=12.0),
    "a small image": Traffic(num_images=1, side=84, num_tokens=40, seconds=6.0),
    "texts, each sixth a video": Traffic(0, 64, num_tokens=60, seconds=16.0, num_frames=64, one_in=6),
}
RATES: Mapping[str, Sequence[float]] = {
    "two large images": (3.0, 5.0, 7.0, 10.0, 13.0),
    "a small image": (10.0, 20.0, 30.0),
    "texts, each sixth a video": (3.0, 5.0, 7.0),
}
# The first of as many workers is what others are compared with.
TOPOLOGIES = ("3epd", "1e1p1d", "1ep2d", "1e2pd")


class Pace:
    """Lets the passes of all workers last as long as on the devices of a profile, times a factor."""

    def __init__(self, profile: Profile, factor: float) -> None:
        self.num_passes = self.num_late = 0
        self._encode = profile.encode.cost
        self._prefill, self._decode = profile.prefill.cost, profile.decode.cost
        self._factor = factor
        self._lock = threading.Lock()

    def encoder(self, stage: Any) -> Callable[[], Any]:
        """Returns the step of an encode stage."""
        step = stage.step

        def paced() -> Any:
            start, before = time.perf_counter(), stage.counts.num_patches
            num_groups = step()
            if num_patches := stage.counts.num_patches - before:
                self._wait(start, self._encode.seconds(SCALE * num_patches, num_groups))
            return num_groups

        return paced

    def engine(self, engine: Any) -> Callable[[], Any]:
        """Returns the step of a language engine, whose scheduler says what is in each pass."""
        step, schedule, costs = engine.step, engine.scheduler.schedule, list[float]()

        def noted() -> Any:
            output = schedule()
            costs.append(self._pass_s(output.chunks))
            return output

        def paced() -> Any:
            start = time.perf_counter()
            costs.clear()
            result = step()
            if sum(costs):
                self._wait(start, sum(costs))
            return result

        engine.scheduler.schedule = noted
        return paced

    def _pass_s(self, chunks: Sequence[Chunk]) -> float:
        """Returns the seconds of a pass, as the simulator counts them: decodes ride with prefill."""
        prefills = [(chunk.start, chunk.stop) for chunk in chunks if not chunk.request.is_decoding]
        decodes = [chunk.stop for chunk in chunks if chunk.request.is_decoding]
        context = SCALE * sum(decodes)
        if not prefills:
            return self._decode.seconds(len(decodes), context) if decodes else 0.0
        num_tokens = SCALE * sum(stop - start for start, stop in prefills)
        pairs = SCALE**2 * sum(stop * (stop + 1) - start * (start + 1) for start, stop in prefills) // 2
        riding = self._decode.per_unit_s * len(decodes) + self._decode.per_item_s * context
        return self._prefill.seconds(num_tokens, pairs) + riding

    def _wait(self, start: float, seconds: float) -> None:
        left = seconds * self._factor - (time.perf_counter() - start)
        with self._lock:
            self.num_passes += 1
            self.num_late += left < 0
        time.sleep(max(0.0, left))


@contextmanager
def paced_workers(pace: Pace) -> Iterator[None]:
    """Paces all workers that are built meanwhile."""
    build = WorkerCore._build

    def build_paced(core: WorkerCore, stage: Stage) -> Any:
        role: Any = build(core, stage)
        if stage == "encode":
            role.stage.step = pace.encoder(role.stage)
        else:
            role.stage.engine.step = pace.engine(role.stage.engine)
        return role

    WorkerCore._build = build_paced  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        WorkerCore._build = build  # type: ignore[method-assign]


@dataclass(slots=True)
class Times:
    """When the tokens of an answer came. sent_s: when it was asked for."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)


class Load:
    """Sends requests to one app. folder: for images, which are new for every request."""

    def __init__(self, service: Orchestrator, folder: Path) -> None:
        self._service = service
        self._folder = folder
        self._num_sent = 0

    async def run(self, traffic: Traffic, per_s: float, seconds: float, seed: int) -> list[Times]:
        """Sends requests for so long, by this machine's clock, and waits for their answers."""
        draws, asking = random.Random(seed), list[asyncio.Task[Times]]()
        due = start = time.perf_counter()
        while (due := due + draws.expovariate(per_s)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.append(asyncio.create_task(self._ask(traffic, due, seed)))
        return list(await asyncio.gather(*asking))

    async def _ask(self, traffic: Traffic, sent_s: float, seed: int) -> Times:
        self._num_sent += 1
        name, times = f"q{seed}-{self._num_sent}", Times(sent_s)
        media = [] if self._num_sent % traffic.one_in else await asyncio.to_thread(self._drawn, traffic, name)
        parts = (*(ContentPart(each.kind) for each in media), ContentPart("text", f"What is {name}?"))
        message = ChatMessage("user", parts)
        params = SamplingParams(max_tokens=traffic.num_tokens, ignore_eos=True)
        frames = FrameSampling(num_frames=traffic.num_frames or None)
        async with self._service.media.sources(name, media) as sources:
            request = AnswerRequest(name, "shapes-vl", (message,), sources, params, frames)
            async with aclosing(self._service.answer(request)) as answer:
                async for items in answer:
                    now_s = time.perf_counter()
                    for item in items:
                        if isinstance(item, TokenDelta):
                            times.tokens_s += [now_s] * len(item.token_ids)
        return times

    def _drawn(self, traffic: Traffic, name: str) -> list[MediaReference]:
        """Writes new media. Returns what refers to them."""
        if traffic.num_frames:
            path = self._folder / f"{name}.mp4"
            write_video(
                path,
                num_frames=traffic.num_frames,
                height=traffic.side,
                width=traffic.side,
                seed=crc32(name.encode()),
            )
            return [MediaReference("video", path.as_uri(), "video")]
        paths = [self._folder / f"{name}-{index}.png" for index in range(traffic.num_images)]
        for path in paths:
            draw_image(path, crc32(path.name.encode()), Resolution(traffic.side, traffic.side), "png")
        return [MediaReference("image", path.as_uri(), "image") for path in paths]


async def _rows_of(
    topology: str, name: str, rates: Sequence[float], profile: Profile, slow: float, seconds: float
) -> list[Row]:
    traffic, pace, rows = TRAFFICS[name], Pace(profile, slow), list[Row]()
    workers = {worker.name: worker.roles for worker in parse_topology(topology).workers()}
    workers["v0"] = frozenset({"video"})
    limit = SchedulerConfig().max_num_batched_tokens // SCALE
    settings = WorkerSettings(
        MODEL,
        num_kv_tokens=32_768,
        num_embeddings=32_768,
        scheduler=SchedulerConfig(max_num_batched_tokens=limit, max_chunk_tokens=limit),
        max_batch_patches=4096 // SCALE,
    )
    with tempfile.TemporaryDirectory() as folder, paced_workers(pace):
        media = MediaSettings(MODEL, FetchPolicy(media_folder=Path(folder)))
        fleet = LocalFleet(LocalFleetConfig(workers, media=media), settings)
        service = Orchestrator(fleet, RequestPlanner(MODEL, "shapes-vl"))
        await service.start()
        try:
            load = Load(service, Path(folder))
            await load.run(traffic, 1 / slow, 3 * slow, seed=0)
            for number, rate in enumerate(rates, 1):
                pace.num_passes = pace.num_late = 0
                times = await load.run(traffic, rate / slow, seconds * slow, seed=number)
                rows.append(_row(topology, name, rate, times, pace, profile, slow))
                print(rows[-1], flush=True)
        finally:
            await service.close()
    return rows


def _row(
    topology: str, name: str, rate: float, times: Sequence[Times], pace: Pace, profile: Profile, slow: float
) -> Row:
    ttft, tpot = (np.array([getattr(each, key) for each in times]) / slow for key in ("ttft_s", "tpot_s"))
    allowed = TPOT_SLO * profile.decode.cost.seconds(8)
    met = (ttft <= TTFT_SLO_S) & (tpot <= allowed)
    figures = {
        f"{key}_{percent}_ms": round(1000 * float(np.percentile(values, int(percent[1:]))), 1)
        for key, values in (("ttft", ttft), ("tpot", tpot))
        for percent in ("p50", "p99")
    }
    late = pace.num_late / max(1, pace.num_passes)
    row: Row = {"requests": name, "topology": topology, "rate": rate, "answers": len(times)}
    return row | figures | {"attained": round(float(met.mean()), 3), "late_passes": round(late, 3)}


def goodput(points: Sequence[tuple[float, float]]) -> float:
    """Returns the highest rate at which enough requests meet the objectives.

    points: (rate, share that met them), by rate
    """
    best, last_rate, last = 0.0, 0.0, 1.0
    for rate, attained in points:
        if attained >= ATTAINED:
            best = rate
        elif last >= ATTAINED:
            best = last_rate + (rate - last_rate) * (last - ATTAINED) / (last - attained)
        last_rate, last = rate, attained
    return best


def goodput_rows(rows: Sequence[Row]) -> list[Row]:
    """Compares goodput, and the p99 of TPOT at the highest common rate, at equal numbers of workers."""
    found: list[Row] = []
    for name in dict.fromkeys(row["requests"] for row in rows):
        bases: dict[int, list[Row]] = {}
        for topology in dict.fromkeys(row["topology"] for row in rows if row["requests"] == name):
            own = [row for row in rows if (row["requests"], row["topology"]) == (name, topology)]
            base = bases.setdefault(sum(1 for _ in parse_topology(topology).workers()), own)
            figure, figure_of_base = (
                goodput([(row["rate"], row["attained"]) for row in some]) for some in (own, base)
            )
            rate = max({row["rate"] for row in own} & {row["rate"] for row in base})
            theirs, ours = (next(row for row in some if row["rate"] == rate) for some in (base, own))
            found.append(
                {
                    "requests": name,
                    "topology": topology,
                    "goodput_per_s": round(figure, 2),
                    "over_merged": round(figure / figure_of_base, 2) if figure_of_base else "",
                    "at_rate": rate,
                    "merged_tpot_p99_over": round(theirs["tpot_p99_ms"] / ours["tpot_p99_ms"], 2),
                }
            )
    return found


def earlier_rows(path: Path, conditions: Row) -> list[Row]:
    """Returns what earlier runs under the same conditions have measured."""
    results: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    is_same = conditions.items() <= results.get("setting", {}).items()
    return list(results["live"]) if is_same else []


def merged(rows: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Returns all rows in the order of the tables above, each case as it was measured last."""
    cases = {(row["requests"], row["topology"], row["rate"]): row for row in (*rows, *measured)}
    order = (list(TRAFFICS), TOPOLOGIES)
    return sorted(
        cases.values(),
        key=lambda row: (order[0].index(row["requests"]), order[1].index(row["topology"]), row["rate"]),
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    names = list(dict.fromkeys(row["requests"] for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(5 * len(names), 7), squeeze=False)
    for column, name in enumerate(names):
        for topology in dict.fromkeys(row["topology"] for row in rows):
            own = [row for row in rows if (row["requests"], row["topology"]) == (name, topology)]
            rates = [row["rate"] for row in own]
            axes[0][column].plot(rates, [row["attained"] for row in own], marker="o", label=topology)
            axes[1][column].plot(rates, [row["tpot_p99_ms"] for row in own], marker="o", label=topology)
        axes[0][column].set(title=name, ylabel="share that meets both objectives", ylim=(0, 1.05))
        axes[0][column].axhline(ATTAINED, color="grey", linewidth=0.8)
        axes[1][column].set(xlabel="requests per second of the device", ylabel="TPOT p99, ms", yscale="log")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate and short runs; results are not kept")
    parser.add_argument(
        "--profile", default="qwen2.5-vl-7b@a100-80gb", help="of the devices (default: %(default)s)"
    )
    parser.add_argument("--slow", type=float, default=4.0, help="factor of all costs (default: %(default)s)")
    parser.add_argument("--topology", action="append", help=f"default: {', '.join(TOPOLOGIES)}")
    parser.add_argument("--rate", type=float, action="append", help="per second of the device")
    parser.add_argument("--requests", action="append", choices=list(TRAFFICS), help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    profile = load_profile(options.profile)
    conditions: Row = {"profile": options.profile, "slow": options.slow, "scale": SCALE}
    rows = [] if options.quick else earlier_rows(RESULTS / "epd_pays.json", conditions)

    def live_rows() -> list[Row]:
        for name in options.requests or TRAFFICS:
            rates = options.rate or (RATES[name][1:2] if options.quick else RATES[name])
            seconds = 2.0 if options.quick else TRAFFICS[name].seconds
            for topology in options.topology or TOPOLOGIES:
                measured = asyncio.run(_rows_of(topology, name, rates, profile, options.slow, seconds))
                rows[:] = merged(rows, measured)
        return rows

    sections = {
        "live": Section("Live, paced workers", live_rows),
        "goodput": Section(
            "Goodput, and TPOT p99 at one rate, beside merged workers", lambda: goodput_rows(rows)
        ),
    }
    run_sections(
        "epd_pays",
        "Split and colocated, at equal devices",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **conditions),
        save=not options.quick,
    )
    if not options.quick:
        draw(rows, RESULTS / "epd_pays.png")


if __name__ == "__main__":
    main()
