"""A second life over a disk: what is chosen is about as quick as the best of the three ways alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from epd.profiles.analytic import analytic_profile
from epd.simulate import Deployment, Job, JobMaker, Simulation
from epd.simulate.clock import ticks_of
from epd.simulate.kept_media import WAYS, KeptMedia, Way
from epd.topology import parse_topology
from epd.workload.requests import PlannedRequest, RequestShape, Resolution, VideoSpec

PROFILE = analytic_profile("h100", "qwen2.5-vl-7b")
SPEEDS = {"NVMe": 5e9, "object store": 1e9, "network": 1.5e8}


def job(minutes: float) -> Job:
    video = VideoSpec(60 * minutes, 30, Resolution(1280, 720))
    shape = RequestShape(32, 8, videos=(video,))
    return JobMaker(PROFILE).job(PlannedRequest(0, 0.0, shape, 7, 1000))


def first_token_s(work: Job, kept: KeptMedia | None, topology: str = "1e1p1d") -> float:
    deployment = Deployment(parse_topology(topology), enable_prefix_caching=True, kept=kept)
    simulation = Simulation(PROFILE, deployment)
    result = simulation.run([work])
    for worker in simulation._workers.values():
        assert not worker.has_work()
    return float(result.seconds("due", "first_token")[0])


@pytest.mark.parametrize("topology", ["1e1p1d", "1epd"])
@pytest.mark.parametrize("disk", SPEEDS)
@pytest.mark.parametrize("minutes", [1, 10, 60])
def test_the_choice_is_near_the_best_way_alone(minutes: int, disk: str, topology: str) -> None:
    """Within 5 %, the bar of the feature."""
    work = job(minutes)
    alone = {way: first_token_s(work, KeptMedia(SPEEDS[disk], ways=(way,)), topology) for way in WAYS}
    chosen = first_token_s(work, KeptMedia(SPEEDS[disk]), topology)
    assert chosen <= 1.05 * min(alone.values()), alone


def best(minutes: float, bytes_per_s: float) -> Way:
    work = job(minutes)
    return min(WAYS, key=lambda way: first_token_s(work, KeptMedia(bytes_per_s, ways=(way,))))


def test_each_way_is_the_best_somewhere() -> None:
    """Else a test of the choice would show nothing."""
    assert best(10, 5e9) == "kv"
    assert best(10, 1.5e8) == "embeddings"
    assert best(10, 1e5) == "media"


def test_nothing_is_read_where_all_is_computed() -> None:
    work = job(1)
    assert first_token_s(work, KeptMedia(1.0)) == first_token_s(work, None)


def test_ways_are_mixed_where_that_is_quicker() -> None:
    """Some embeddings are read while the frames of others are decoded."""
    work = job(1)
    gains = []
    for bytes_per_s in (1e8, 1.5e8, 1e9):
        alone = min(first_token_s(work, KeptMedia(bytes_per_s, ways=(way,))) for way in WAYS)
        gains.append(alone / first_token_s(work, KeptMedia(bytes_per_s)))
    assert max(gains) > 1.01, gains
    assert min(gains) > 0.95, gains


@pytest.mark.parametrize("values", [(0.0, WAYS), (math.nan, WAYS), (1e9, ()), (1e9, ("disk",))])
def test_what_no_disk_is_is_refused(values: tuple[float, tuple[Way, ...]]) -> None:
    with pytest.raises(ValueError, match="a disk reads above 0 bytes a second"):
        KeptMedia(*values)


def second_of(kept: KeptMedia | None, gap_s: float = 100.0) -> tuple[float, float]:
    """The seconds to the first tokens of two questions about a video, in a pool with room for one at a time.

    Another video comes between them.
    """
    jobs = []
    for index, media_key in enumerate((7, 8, 7)):
        made = replace(job(10), index=index, due=ticks_of(gap_s * index), media_key=media_key, text_key=index)
        jobs.append(made)
    room = jobs[0].num_prompt_tokens + 1000
    deployment = Deployment(
        parse_topology("1epd"),
        enable_prefix_caching=True,
        kept=kept,
        kv_tokens=room,
        num_embeddings=jobs[0].num_visual_tokens,
    )
    seconds = Simulation(PROFILE, deployment).run(jobs).seconds("due", "first_token")
    return float(seconds[0]), float(seconds[2])


def test_media_that_came_before_are_read_where_memory_has_no_room() -> None:
    without = second_of(None)
    assert without[1] > 0.9 * without[0], "it was evicted"
    first, second = second_of(KeptMedia(5e9, has_all=False))
    assert first == without[0]
    assert second < 0.5 * without[1]
    assert second_of(KeptMedia(5e9))[0] < 0.5 * first, "an earlier life had it"


def test_media_are_not_read_before_they_are_computed() -> None:
    """All come at once, before any is over."""
    assert second_of(KeptMedia(5e9, has_all=False), gap_s=0.0) == second_of(None, gap_s=0.0)
