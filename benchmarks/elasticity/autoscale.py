"""Whether the number of stage workers follows a ramp of videos on Ray Serve, beside every fixed number.

    python -m benchmarks.elasticity.autoscale --encoders auto
    python -m benchmarks.elasticity.autoscale --encoders 1 2 3

The application is deployed with Serve's autoscaling and the policy of `serve_app/ray/autoscaling.py`, or with
a fixed number of encoders. Videos that are all different arrive at random (Poisson), at rates that rise, stay
and fall again (RAMP); all runs get the same, but fixed numbers are not watched for long after it. Encoders
are paced (`paced_app.py`), so that three of them on two cores are three times one. All else is
real: replicas that start and stop, roles, links, HTTP.
A request meets its objective if it is answered whole and its first token comes within TTFT_SLO_S. Each run
replaces its row in benchmarks/results/autoscale.{json,md}, and --encoders auto its picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.elasticity.paced_app import GROUP_S
from benchmarks.reporting import RESULTS, Row, markdown, setting
from epd.models import embedded_model_path
from tests import ROOT
from tests.media import write_video
from tests.serve_app.conftest import video_part
from tests.serve_app.ray.declared_app import DeclaredApp, declared_app
from tests.serve_app.ray.ray_session import ray_with_serve

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TTFT_SLO_S = 2.5
MAX_ENCODERS = 3
POLICY = {
    "min_replicas": 3,
    "initial_replicas": 3,
    "max_replicas": MAX_ENCODERS + 2,
    "upscale_delay_s": 0,
    "downscale_delay_s": 0,
    "metrics_interval_s": 2,
    "look_back_period_s": 10,
    "policy": {"policy_function": "epd.serve_app.ray.autoscaling:stage_replicas"},
}
ABOUT = (
    f"An encoder takes at least {GROUP_S} s for a video. attained: answered whole, the first token within "
    f"{TTFT_SLO_S} s; of all requests, and of those that came while many came. workers: mean number of stage "
    "workers, one prefill and one decode worker among them."
)


# Requests in a second, at seconds from the start; on straight lines between them.
RAMP = ((0.0, 0.4), (20.0, 0.4), (80.0, 4.2), (140.0, 4.2), (160.0, 0.4))
BUSY_S = (20.0, 160.0)
# Replicas stop when the peak of three minutes would leave fewer of them spare time for one.
END_S, FIXED_END_S = 500.0, 165.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. at_s: from the start of the run. ttft_s: None without a whole answer."""

    at_s: float
    ttft_s: float | None

    @property
    def is_attained(self) -> bool:
        return self.ttft_s is not None and self.ttft_s <= TTFT_SLO_S


@dataclass(slots=True)
class Run:
    """What was seen. looks: (seconds, stage workers that run), every second."""

    asked: list[Asked] = field(default_factory=list)
    looks: list[tuple[float, int]] = field(default_factory=list)

    def row(self, name: str) -> Row:
        numbers = [number for _, number in self.looks]
        ttfts = sorted(each.ttft_s for each in self.asked if each.ttft_s is not None)
        busy = [each for each in self.asked if BUSY_S[0] <= each.at_s < BUSY_S[1]]
        return {
            "encoders": name,
            "requests": len(self.asked),
            "not whole": len(self.asked) - len(ttfts),
            "attained": _share(self.asked),
            "attained, busy": _share(busy),
            "TTFT p50, s": round(ttfts[len(ttfts) // 2], 2),
            "TTFT p99, s": round(ttfts[len(ttfts) * 99 // 100], 2),
            "workers": round(sum(numbers) / len(numbers), 2),
            "least to most": f"{min(numbers)} to {max(numbers)}",
            "changes": sum(a != b for a, b in pairwise(numbers)),
        }


def _share(asked: Sequence[Asked]) -> float:
    return round(sum(each.is_attained for each in asked) / len(asked), 3)


def arrivals(end_s: float, seed: int) -> Iterator[float]:
    """Yields the seconds at which requests come: a Poisson process of the highest rate, thinned out."""
    draws, at_s = random.Random(seed), 0.0
    starts_s, rates = zip(*RAMP, strict=True)
    while (at_s := at_s + draws.expovariate(max(rates))) < end_s:
        if draws.random() * max(rates) < np.interp(at_s, starts_s, rates):
            yield at_s


async def measure(app: DeclaredApp, videos: Sequence[Path], times_s: Sequence[float]) -> Run:
    run, start_s = Run(), time.monotonic()
    looking = asyncio.create_task(_look(app, run, start_s))
    asking = []
    async with app.http() as http:
        for at_s, video in zip(times_s, videos, strict=True):
            await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
            asking.append(asyncio.create_task(_ask(http, video, at_s)))
        run.asked = await asyncio.gather(*asking)
    looking.cancel()
    return run


async def _look(app: DeclaredApp, run: Run, start_s: float) -> None:
    while True:
        replicas = await asyncio.to_thread(app.replicas, "Stage")
        if not run.looks or run.looks[-1][1] != len(replicas):
            advice = (await app.status())["advice"].get("Stage", {}).get("reason", "")
            print(f"{time.monotonic() - start_s:6.1f} s: {len(replicas)} stage workers; {advice}", flush=True)
        run.looks.append((time.monotonic() - start_s, len(replicas)))
        await asyncio.sleep(1.0)


async def _ask(http: Any, video: Path, at_s: float) -> Asked:
    content = [video_part(video.as_uri()), {"type": "text", "text": "What is shown?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": True}
    sent_s, ttft_s = time.monotonic(), None
    async with http.stream(
        "POST", "/v1/chat/completions", json=body | {"epd": {"num_frames": 4}}
    ) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return Asked(at_s, ttft_s)
            if ttft_s is None and line.startswith("data: ") and _has_text(json.loads(line[6:])):
                ttft_s = time.monotonic() - sent_s
    return Asked(at_s, None)


def _has_text(chunk: Row) -> bool:
    """Returns whether tokens have come: the first chunk of an answer names its role alone."""
    return any(choice["delta"].get("content") for choice in chunk.get("choices", ()))


def run_once(encoders: str, folder: Path, seed: int) -> Run:
    """encoders: a number, or "auto"."""
    times_s = list(arrivals(END_S if encoders == "auto" else FIXED_END_S, seed))
    videos = [
        write_video(folder / f"{number}.mp4", seed=number, height=64, width=64)
        for number in range(len(times_s))
    ]
    stage = {"autoscaling_config": POLICY} if encoders == "auto" else {"num_replicas": int(encoders) + 2}
    topology = f"{'1' if encoders == 'auto' else encoders}e1p1d"
    with (
        ray_with_serve() as session,
        declared_app(
            session, {"Stage": stage}, import_path="benchmarks.elasticity.paced_app:build_app",
            elastic=encoders == "auto", model=embedded_model_path(), topology=topology,
            allowed_media_path=folder, num_kv_tokens=1 << 15,
        ) as app,
    ):  # fmt: skip
        return asyncio.run(measure(app, videos, times_s))


def picture(run: Run, path: Path) -> None:
    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(8, 5))
    upper.step(*zip(*run.looks, strict=True), where="post")
    upper.set_ylabel("stage workers")
    upper.set_ylim(0)
    there = [(each.at_s, each.ttft_s) for each in run.asked if each.ttft_s is not None]
    lower.plot(*zip(*there, strict=True), ".", markersize=3)
    lower.axhline(TTFT_SLO_S, linewidth=0.8, linestyle="--")
    lower.set(xlabel="seconds", ylabel="first token after, s")
    for axes in (upper, lower):
        axes.axvspan(*BUSY_S, alpha=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def save(row: Row) -> None:
    path = RESULTS / "autoscale.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = sorted(
        [each for each in rows if each["encoders"] != row["encoders"]] + [row],
        key=lambda r: str(r["encoders"]),
    )
    results = {"setting": setting(("ray",)) | {"about": ABOUT}, "rows": rows}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = markdown(
        "Replicas that follow a ramp", "python -m benchmarks.elasticity.autoscale", results, {"rows": "Runs"}
    )
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--encoders", nargs="+", default=["auto", "1", "2", "3"], help="auto, or fixed numbers"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for encoders in options.encoders:
        with tempfile.TemporaryDirectory() as folder:
            run = run_once(encoders, Path(folder), options.seed)
        print(json.dumps(run.row(encoders), indent=1), flush=True)
        if not options.no_save:
            save(run.row(encoders))
            if encoders == "auto":
                picture(run, RESULTS / "autoscale.png")


if __name__ == "__main__":
    main()
