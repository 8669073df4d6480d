"""How large groups of a video and batches of an encoder should be on a GPU, by the simulator.

    python -m benchmarks.encode.group_sizes

The analytic profile of a 7B model on an H100, with the seconds that launching a call of the tower and a pass
of prefill were estimated to take; videos of 448x252 at one frame of two, read by 16 threads or by none.
Time to first token, median of six videos, seconds. Results go to benchmarks/results/group_sizes.{json,md}.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.reporting import Row, Section, run_sections
from epd.profiles.cost import StageCost
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.simulate import Deployment, JobMaker, Simulation
from epd.topology import parse_topology
from epd.workload.requests import PlannedRequest, RequestShape, Resolution, VideoSpec

PROFILE = load_profile("qwen2.5-vl-7b@h100")
TOWER_CALL_S, PREFILL_PASS_S = 0.020, 0.010
SIZES = ((256, 4096), (256, 16_384), (512, 16_384), (1024, 16_384), (2048, 16_384), (2048, 32_768))
_NUM_VIDEOS = 6


class Videos(NamedTuple):
    """Says which videos come. gap_s: from one to the next."""

    num_frames: int
    gap_s: float


TRAFFIC = (Videos(64, 10.0), Videos(64, 0.2), Videos(600, 20.0), Videos(600, 2.0))


def _profile(group_tokens: int, *, is_read: bool) -> Profile:
    """Returns the costs. is_read: whether frames have to be decoded."""
    encode = replace(PROFILE.encode, cost=replace(PROFILE.encode.cost, fixed_s=TOWER_CALL_S))
    prefill = replace(PROFILE.prefill, cost=replace(PROFILE.prefill.cost, fixed_s=PREFILL_PASS_S))
    made = replace(
        PROFILE, media=replace(PROFILE.media, group_tokens=group_tokens), encode=encode, prefill=prefill
    )
    if is_read:
        return made
    return replace(made, video={name: replace(each, cost=StageCost()) for name, each in made.video.items()})


def ttft_s(profile: Profile, topology: str, videos: Videos, batch_patches: int) -> float:
    """Returns the median time to first token."""
    spec = VideoSpec(videos.num_frames / 2, 24, Resolution(448, 252))
    shape = RequestShape(60, 16, videos=(spec,))
    requests = [PlannedRequest(i, i * videos.gap_s, shape, i, i) for i in range(_NUM_VIDEOS)]
    deployment = Deployment(parse_topology(topology), max_batch_patches=batch_patches, cpu_threads=16)
    result = Simulation(profile, deployment).run(JobMaker(profile).jobs(requests), None)
    return float(np.median(result.ttft_s))


def rows(*, is_read: bool) -> list[Row]:
    """Simulates all sizes, for each topology and each traffic."""
    found = []
    for topology in ("1epd", "1e1p1d"):
        for videos in TRAFFIC:
            row: Row = {"topology": topology, "frames": videos.num_frames, "one_every_s": videos.gap_s}
            for tokens, patches in SIZES:
                profile = _profile(tokens, is_read=is_read)
                row[f"{tokens} / {patches}"] = round(ttft_s(profile, topology, videos, patches), 2)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.parse_args()
    unit = "tokens of a group / patches of a batch"
    sections = {
        "read": Section(f"Frames decoded by 16 threads, {unit}", lambda: rows(is_read=True)),
        "free": Section(f"Frames that cost no time, {unit}", lambda: rows(is_read=False)),
    }
    run_sections(
        "group_sizes",
        "Groups and batches on a GPU, simulated",
        sections,
        list(sections),
        lambda: {"profile": PROFILE.name, "tower_call_s": TOWER_CALL_S, "prefill_pass_s": PREFILL_PASS_S},
    )


if __name__ == "__main__":
    main()
