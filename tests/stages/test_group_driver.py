"""Media on their way to the language model: each with its groups, in order, in one thread or in several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.stages import group_driver
from epd.stages.batch.ahead import Ahead, MediaThreads
from epd.stages.colocated import ColocatedPipeline
from epd.stages.group_driver import FailedJob, GroupDriver, MediaJob
from epd.transfer.bounded_queue import QueueClosed
from epd.types import MediaKind
from tests.video.pictures import Part, gif

GROUP_TOKENS = 1  # a unit in each group


@pytest.fixture(scope="module")
def pipeline() -> ColocatedPipeline:
    return ColocatedPipeline.load(embedded_model_path(), EngineConfig(num_threads=1))


@pytest.fixture
def driver(pipeline: ColocatedPipeline) -> GroupDriver[MediaJob]:
    return GroupDriver(pipeline.adapter, pipeline.encoder, GROUP_TOKENS)


def job_of(source: Path, kind: MediaKind | None = None) -> MediaJob:
    return MediaJob(sources=[source], kinds=kind and [kind], frame_sampling=FrameSampling(num_frames=8))


def jobs_of(media: dict[str, Path], folder: Path) -> list[MediaJob]:
    (folder / "text.mp4").write_text("no video\n" * 99)
    video, image = media["video"], media["image"]
    return [job_of(video), job_of(folder / "text.mp4"), job_of(image, "video"), job_of(image), job_of(video)]


def story(items: Iterator[object]) -> list[str]:
    """What comes, in order: a job, the units of a group, or why a job has failed."""
    said = []
    for item in items:
        if isinstance(item, FailedJob):
            said.append(type(item.error).__name__)
        else:
            said.append("job" if isinstance(item, MediaJob) else f"{item[0].start}-{item[0].stop}")  # type: ignore[index]
    return said


def test_each_job_comes_before_its_groups_and_a_broken_one_costs_itself_alone(
    media: dict[str, Path], tmp_path: Path, driver: GroupDriver[MediaJob]
) -> None:
    jobs = jobs_of(media, tmp_path)
    found = story(driver.run(jobs))
    groups = found[1 : found.index("UnsupportedMediaError")]
    assert len(groups) > 2
    assert found == [
        "job",
        *groups,
        "UnsupportedMediaError",
        "UnsupportedMediaError",
        "job",
        "0-1",
        "job",
        *groups,
    ]
    assert [job.is_failed for job in jobs] == [False, True, True, False, False]
    assert (driver.num_decoded, driver.num_encoded) == (3, 3)
    assert jobs[0].timings.encode_s > 0 < jobs[0].timings.probe_s


def test_threads_between_the_stages_change_nothing(
    media: dict[str, Path], tmp_path: Path, pipeline: ColocatedPipeline, driver: GroupDriver[MediaJob]
) -> None:
    alone = list(driver.run(jobs_of(media, tmp_path)))
    other = GroupDriver[MediaJob](pipeline.adapter, pipeline.encoder, GROUP_TOKENS)
    threads = MediaThreads(other, iter(jobs_of(media, tmp_path)))  # type: ignore[arg-type]
    together = list(threads.embeddings)
    threads.close()
    assert story(iter(together)) == story(iter(alone))
    for ours, theirs in zip(together, alone, strict=True):
        if isinstance(ours, tuple) and isinstance(theirs, tuple):
            torch.testing.assert_close(ours[1].rows, theirs[1].rows, rtol=0, atol=0)


def test_a_group_that_cannot_be_encoded_ends_its_job(
    media: dict[str, Path], driver: GroupDriver[MediaJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = group_driver.encode_group

    def broken(encoder: object, decoded: object, timings: object) -> object:
        if decoded.group.index == 1:  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return encode(encoder, decoded, timings)  # type: ignore[arg-type]

    monkeypatch.setattr(group_driver, "encode_group", broken)
    found = story(driver.run([job_of(media["video"]), job_of(media["image"])]))
    assert found[0] == "job"
    assert found[2:] == ["RuntimeError", "job", "0-1"]


def test_who_leaves_early_ends_the_decoder(media: dict[str, Path], driver: GroupDriver[MediaJob]) -> None:
    before = set(threading.enumerate())
    items = driver.run([job_of(media["video"])])
    next(items), next(items)
    items.close()
    left = {thread for thread in threading.enumerate() if thread not in before and not thread.daemon}
    assert not left


def test_a_stage_ahead_is_bounded_and_ends_with_its_reader() -> None:
    begun: list[int] = []
    is_closed = threading.Event()

    def numbers() -> Iterator[int]:
        try:
            for number in range(100):
                begun.append(number)
                yield number
        finally:
            is_closed.set()

    stage = Ahead("numbers", numbers(), 3, lambda _: 1)  # type: ignore[arg-type]
    assert stage.get() == 0
    stage.close()
    assert is_closed.wait(10)
    assert len(begun) <= 6
    with pytest.raises(QueueClosed):
        stage.get()


def test_what_a_stage_raises_comes_behind_what_it_has_done() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("a bug")

    stage = Ahead("numbers", numbers(), 3, lambda _: 1)  # type: ignore[arg-type]
    assert stage.get() == 1
    with pytest.raises(ZeroDivisionError, match="a bug"):
        stage.get()


def test_an_animated_picture_is_a_video_or_the_first_of_its_frames(
    tmp_path: Path, driver: GroupDriver[MediaJob]
) -> None:
    """What is not seen of it is counted, for the answer to say."""
    slides = [Part(np.full((64, 64, 4), (level, 0, 0, 255), np.uint8)) for level in (0, 80, 160, 240)]
    path = tmp_path / "clip.gif"
    path.write_bytes(gif((64, 64), slides))
    jobs = [job_of(path), job_of(path, "video"), job_of(path, "image")]
    list(driver.run(jobs))
    assert [job.plans[0].kind for job in jobs] == ["video", "video", "image"]
    assert [job.num_unseen_frames for job in jobs] == [0, 0, 3]
