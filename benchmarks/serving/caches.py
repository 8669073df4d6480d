"""What caches save where media come again: the simulator beside `epd serve --local`, the same requests.

    python -m benchmarks.serving.caches [--profile FILE]    of app_profile, else measured first

A workload is asked at a rate that keeps the cores about a third busy. Hits must be equal: groups of media
that were encoded, and requests whose media were all in the prefix cache. Times are medians of requests with
new media and of the others, so that the gain can be compared; they need a machine with nothing else to do.
Results go to benchmarks/results/caches.{json,md}.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planning.planner import NUM_KV_TOKENS, deployment_of, rate_of
from benchmarks.reporting import Row, Section, run_sections, setting
from benchmarks.score.app_costs import median
from benchmarks.score.live_app import LiveApp, live_app
from benchmarks.score.shared_cores import HostedProfile, read_profile
from epd.bench.media import MediaLibrary
from epd.simulate import Job, JobMaker
from epd.video.demo_video import write_scene
from epd.workload.config import load_workload
from epd.workload.requests import Workload

TOPOLOGIES = ("1epd", "1e1p1d")
SEED, NUM_REQUESTS, LOAD = 31, 48, 0.35
# At least 32 visual tokens, and a short question: what is not cached tells whether the media were.
IMAGES: Row = {"images": "2..3", "image_size": "224x224", "text_tokens": "6..10", "output_tokens": 8}
VIDEOS: Row = {**IMAGES, "images": 0, "videos": 1, "video_s": "4..8", "video_size": "320x192"}
NEW_TOKENS = 30
_ENCODED = "epd_encoded_groups_total"
WORKLOADS: dict[str, Row] = {
    "images, half again": {"repeat_rate": 0.5, "mix": [IMAGES]},
    "images, half again, mostly the latest": {
        "repeat_rate": 0.5,
        "repeat_skew": 1.2,
        "mix": [IMAGES],
    },
    "videos, four questions each": {"questions_per_media": 4, "mix": [VIDEOS]},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what happened. new_s, known_s: median TTFT of requests with new media, and of the others."""

    num_encoded: int
    num_known: int
    new_s: float
    known_s: float


def workload_at(name: str, rate: float) -> Workload:
    fields = {**WORKLOADS[name], "rate": rate, "num_requests": NUM_REQUESTS}
    return load_workload(None, fields).resolve()


def simulated(profile: HostedProfile, topology: str, workload: Workload) -> Outcome:
    jobs = list(JobMaker(profile).jobs(workload.requests(SEED)))
    deployment = replace(deployment_of(topology), enable_prefix_caching=True)
    result = profile.simulation(deployment).run(jobs)
    num_new = result.rows["prompt_tokens"] - result.rows["cached_tokens"]
    return Outcome(result.num_encoded, int((num_new < NEW_TOKENS).sum()), *_times(jobs, list(result.ttft_s)))


def live(app: LiveApp, library: MediaLibrary, profile: HostedProfile, workload: Workload) -> Outcome:
    jobs = list(JobMaker(profile).jobs(workload.requests(SEED)))
    before = app.counter(_ENCODED)
    result = app.send(workload, library, seed=SEED)
    known = sum(each.prompt_tokens - each.cached_tokens < NEW_TOKENS for each in result.served)
    ttft_s = [record.token_times_s[0] - record.sent_s for record in result.records]
    return Outcome(app.counter(_ENCODED) - before, known, *_times(jobs, ttft_s))


def _times(jobs: Sequence[Job], ttft_s: Sequence[float]) -> tuple[float, float]:
    seen: set[int] = set()
    parts: dict[bool, list[float]] = {True: [], False: []}
    for job, seconds in zip(jobs, ttft_s, strict=True):
        parts[job.media_key in seen].append(float(seconds))
        seen.add(job.media_key)
    return median(parts[False]), median(parts[True])


# Results


def local_options(topology: str) -> list[str]:
    """Returns the options of `epd serve` for a layout in one process."""
    sizes = ["--num-threads", "1", "--num-kv-tokens", str(NUM_KV_TOKENS)]
    return ["--local", "--topology", topology, *sizes]


def rows_of(profile: HostedProfile) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="epd-caches-") as folder:
        library = MediaLibrary(Path(folder) / "media", write_scene)
        for topology in TOPOLOGIES:
            for name in WORKLOADS:  # each with caches that are empty
                with live_app(local_options(topology), Path(folder) / "serve.log") as app:
                    rows.append(_row(profile, app, library, topology, name))
    return rows


def _row(profile: HostedProfile, app: LiveApp, library: MediaLibrary, topology: str, name: str) -> Row:
    app.send(load_workload(None, {"num_requests": 4, "rate": 2.0}).resolve(), library, seed=SEED - 1)
    workload = workload_at(name, rate_of(profile, topology, WORKLOADS[name]["mix"][0], LOAD))
    there, here = live(app, library, profile, workload), simulated(profile, topology, workload)
    row: Row = {"topology": topology, "workload": name}
    row["groups encoded, live / simulated"] = f"{there.num_encoded} / {here.num_encoded}"
    row["requests whose media were known"] = f"{there.num_known} / {here.num_known}"
    for head, which in (("TTFT of new media, ms", "new_s"), ("of known media, ms", "known_s")):
        row[head] = f"{1e3 * getattr(there, which):.0f} / {1e3 * getattr(here, which):.0f}"
    shares = (each.known_s / each.new_s for each in (there, here))
    row["share of the TTFT that is left"] = " / ".join(f"{share:.2f}" for share in shares)
    print(row, file=sys.stderr, flush=True)
    return row


def profile_asked_for(description: str | None) -> HostedProfile:
    """Returns the profile that the command names, else measures one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="of benchmarks.score.app_profile")
    path = parser.parse_args().profile
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if path is not None:
        return read_profile(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "benchmarks.score.app_profile", "--out", str(file)]
        subprocess.run(command, check=True)
        return read_profile(file)


def main() -> None:
    profile = profile_asked_for(__doc__)
    title = f"{NUM_REQUESTS} requests, live / simulated"
    run_sections(
        "caches",
        "What caches save where media come again",
        {"caches": Section(title, lambda: rows_of(profile))},
        ["caches"],
        lambda: setting(("ray", "torch"), checkpoint="shapes-vl, float32", load=LOAD, requests=NUM_REQUESTS),
        save=True,
    )


if __name__ == "__main__":
    main()
