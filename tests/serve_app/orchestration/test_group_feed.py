"""Which media worker an item's frames come from: the one that has it, or another once that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.recent import Pace
from epd.control.routing import InFlight, Router
from epd.encoders import FrameSampling
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import ItemReduction
from epd.errors import UnavailableError
from epd.models import embedded_model_path
from epd.reduction import ReductionPolicy
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media_messages import CloseStream, FetchMedia, PlanImages, ReadFrames, ReadImage
from epd.serve_app.orchestration.group_feed import GroupFeed, GroupRun, ItemFrames, _num_read, plan_runs
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.live_answer import AnswerPlan, LiveAnswer
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.orchestration.requests import Attempt
from epd.serve_app.service import MediaReference
from tests.serve_app.conftest import data_url
from tests.serve_app.deployments import NEVER_S, Question
from tests.serve_app.media_fleet import MediaFleet, image_pixels, reference_to
from tests.serve_app.orchestration.parts import shared_parts
from tests.video.plain_decoder import reference_decode


class NoLosses:
    async def check(self, request: object) -> None:
        """Nobody is to blame."""


class Feed:
    """The media of one question, and how their frames are read."""

    def __init__(self, fleet: MediaFleet, media: FleetMedia, plan: AnswerPlan, request: Any) -> None:
        shared, losses = shared_parts(fleet), cast(LossCounter, NoLosses())
        attempt = Attempt(1, cast(LiveAnswer, SimpleNamespace(plan=plan, request=request)), shared.router)
        self.plan = plan
        parts = shared, media, losses, Isolation(shared), attempt
        self.items = [ItemFrames(*parts, item) for item in range(len(plan.media))]

    def groups(self, item: int) -> list[MediaGroup]:
        return [group for group in self.plan.groups if group.item == item]

    async def read(self, item: int, number: int = 0) -> np.ndarray:
        num, frames = await self.items[item].read(self.groups(item)[number], NEVER_S)
        assert num == 0
        assert isinstance(frames, np.ndarray)
        return frames


@pytest.fixture
def fleet() -> Iterator[MediaFleet]:
    fleet = MediaFleet(names=("v0", "v1"))
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def planner() -> RequestPlanner:
    return RequestPlanner(embedded_model_path(), group_tokens=8)


@asynccontextmanager
async def feeding(
    fleet: MediaFleet, planner: RequestPlanner, *references: MediaReference, paths: tuple[Path, ...]
) -> AsyncIterator[tuple[Feed, FleetMedia]]:
    anything: Any = fleet
    router = Router()
    media = FleetMedia(anything, router, patience_s=NEVER_S)
    async with media.sources("r", references) as sources:
        question = Question(paths, frame_sampling=FrameSampling(num_frames=6))
        plan = planner.plan(question.request(sources), await media.plan_images(sources))
        feed = Feed(fleet, media, plan, question.request(sources))
        yield feed, media
        for each in feed.items:
            await each.close()
    await media.close()
    for name, worker in fleet.media.items():
        assert router.in_flight(name) == InFlight()
        if fleet.workers[name].is_alive:
            assert (worker.num_holds, worker.num_streams, worker.num_pixel_bytes) == (0, 0, 0)


def test_groups_come_from_the_worker_that_has_the_item(
    fleet: MediaFleet, planner: RequestPlanner, media: dict[str, Path]
) -> None:
    paths = (media["video"], media["wide_image"])

    async def run() -> None:
        async with feeding(fleet, planner, *map(reference_to, paths), paths=paths) as (feed, _):
            plan = feed.plan.media[0]
            whole = reference_decode(paths[0], plan.times_s, size=plan.size).data
            frames = [await feed.read(0, number) for number in range(len(feed.groups(0)))]
            assert len(frames) > 1
            assert np.array_equal(np.concatenate(frames), whole)
            pixels = image_pixels(embedded_model_path(), paths[1])[1]
            units = [await feed.read(1, number) for number in range(len(feed.groups(1)))]
            assert np.array_equal(np.concatenate(units), pixels)
        kinds = [kind for _, kind in fleet.asked]
        assert kinds[:2] == [FetchMedia, PlanImages]
        assert kinds.count(ReadFrames) == len(frames)
        assert kinds.count(ReadImage) == len(units)
        assert kinds.count(CloseStream) == 1
        assert len({name for name, _ in fleet.asked}) == 1

    asyncio.run(run())


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_item_whose_worker_is_lost_is_fetched_again(
    fleet: MediaFleet, planner: RequestPlanner, media: dict[str, Path], comes_back: bool
) -> None:
    """Its image too, in the middle of the video's groups."""
    paths = (media["video"], media["wide_image"])

    async def run() -> None:
        async with feeding(fleet, planner, *map(reference_to, paths), paths=paths) as (feed, _):
            plan = feed.plan.media[0]
            whole = reference_decode(paths[0], plan.times_s, size=plan.size).data
            frames = [await feed.read(0)]
            fleet.lose(fleet.asked[0][0], comes_back=comes_back)
            frames += [await feed.read(0, number) for number in range(1, len(feed.groups(0)))]
            assert np.array_equal(np.concatenate(frames), whole)
            pixels = image_pixels(embedded_model_path(), paths[1])[1]
            assert np.array_equal(
                await feed.read(1), pixels[feed.groups(1)[0].start : feed.groups(1)[0].stop]
            )
        assert [kind for _, kind in fleet.asked].count(FetchMedia) == 3

    asyncio.run(run())


def test_what_came_in_the_request_must_be_sent_again(
    fleet: MediaFleet, planner: RequestPlanner, media: dict[str, Path]
) -> None:
    paths = (media["video"],)
    reference = MediaReference("video", data_url(paths[0], "video/mp4"), "video, number 1 of the media")

    async def run() -> None:
        async with feeding(fleet, planner, reference, paths=paths) as (feed, _):
            await feed.read(0)
            fleet.lose(fleet.asked[0][0])
            with pytest.raises(UnavailableError, match=r"number 1 of the media: .*send the request again"):
                await feed.read(0, 1)

    asyncio.run(run())


def test_a_worker_that_is_alone_is_asked_again(planner: RequestPlanner, media: dict[str, Path]) -> None:
    fleet, paths = MediaFleet(), (media["video"],)
    fetch, num_failures = fleet.fetch, 2

    async def failing(stage: Any, target: str, message: Any, *bulk: Any) -> Any:
        nonlocal num_failures
        if isinstance(message, ReadFrames) and num_failures:
            num_failures -= 1
            raise UnavailableError("busy") if num_failures else WorkerLostError("gone for a moment")
        return await fetch(stage, target, message, *bulk)

    fleet.fetch = failing  # type: ignore[method-assign]

    async def run() -> None:
        async with feeding(fleet, planner, *map(reference_to, paths), paths=paths) as (feed, _):
            assert len(await feed.read(0)) == feed.groups(0)[0].num_frames

    asyncio.run(run())
    assert num_failures == 0
    fleet.close()


@given(st.integers(0, 400), st.integers(0, 9))
def test_runs_cover_all_groups_once_and_in_order(num_groups: int, num_readers: int) -> None:
    runs = plan_runs(num_groups, num_readers)
    assert [group for run in runs for group in range(run.start, run.stop)] == list(range(num_groups))
    assert all(num in run for run in runs for num in range(run.start, run.stop))
    assert {run.reader for run in runs} <= set(range(max(1, num_readers)))
    assert all(run.stop - run.start <= 16 for run in runs) or len(runs) == 1


def test_long_videos_use_every_reader_and_short_ones_one() -> None:
    assert plan_runs(16, 2) == (GroupRun(0, 4, 0), GroupRun(4, 8, 1), GroupRun(8, 12, 0), GroupRun(12, 16, 1))
    assert plan_runs(7, 2) == (GroupRun(0, 7, 0),)
    assert plan_runs(100, 1) == (GroupRun(0, 100, 0),)
    assert plan_runs(9, 3) == (GroupRun(0, 4, 0), GroupRun(4, 8, 1), GroupRun(8, 9, 2))
    assert [run.stop - run.start for run in plan_runs(200, 2)[:2]] == [16, 16]


def of_group(unit_span_s: float) -> Any:
    """16 patches of a group, whose source has a frame a second."""
    plan = SimpleNamespace(unit_span_s=unit_span_s, source_fps=1.0)
    return SimpleNamespace(item=0, index=0, spec=SimpleNamespace(num_patches=16), plan=plan)


def test_frames_that_are_far_apart_take_longer_to_come() -> None:
    """All those between them are decoded. An image has none."""
    reading = Pace()
    requests = SimpleNamespace(clock=lambda: 1.0)
    shared = SimpleNamespace(reading=reading, requests=requests, dispatcher=None, fleet=None)
    parts: list[Any] = [shared, None, None, None, None]
    feed = GroupFeed(*parts)
    reading.add(_num_read(of_group(unit_span_s=2.0)), 0.0, 1.0)
    assert feed._frames_s(of_group(unit_span_s=20.0)) == pytest.approx(10.0)
    assert feed._frames_s(of_group(unit_span_s=0.0)) == pytest.approx(0.5)


class KeepsApart:
    """Lets a suspect go to e1 alone."""

    def allowed(self, _attempt: object, _place: object, workers: list[str]) -> list[str]:
        return [each for each in workers if each == "e1"]


class TakesAll:
    """Two encoders, neither of which is known to have a group. given: those that were given one."""

    def __init__(self) -> None:
        self.encoders = self
        self.given: list[str] = []

    def with_group(self, _group: MediaGroup) -> None:
        """None has it in memory."""

    async def next(self, _wanted: str | None, allowed: Any = list, **_: Any) -> str:
        return str(allowed(["e0", "e1"])[0])

    def record(self, worker: str, *_: object) -> None:
        self.given.append(worker)

    async def give(self, *_: object) -> bool:
        return True


def test_a_suspect_asks_for_what_is_on_disk_only_where_it_may_go() -> None:
    group = of_group(unit_span_s=2.0)
    plan = SimpleNamespace(groups=[group], prompt=None)
    dispatcher = TakesAll()
    shared = SimpleNamespace(
        config=SimpleNamespace(cache_dir=Path("kept"), sharding="groups"),
        dispatcher=dispatcher,
        fleet=None,
        reading=Pace(),
        requests=SimpleNamespace(clock=lambda: 0.0),
    )
    attempt = SimpleNamespace(id="r", answer=SimpleNamespace(plan=plan), readers={}, prefill_worker="p0")
    parts: list[Any] = [shared, None, None, KeepsApart(), attempt]
    feed = GroupFeed(*parts)
    ticket = SimpleNamespace(key=SimpleNamespace(reading=""))
    granted: Any = SimpleNamespace(group=0, ticket=ticket)
    assert asyncio.run(feed._from_cache(granted))
    assert dispatcher.given == ["e1"]


@pytest.mark.parametrize("method", ["balanced", "uniform"])
def test_every_group_is_looked_at_once_for_the_readings_of_an_item(
    method: str, planner: RequestPlanner, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a reading is asked for; it is the one that begins with the group, of all behind it."""
    monkeypatch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", 16)
    question = Question((media["video"], media["video"]), frame_sampling=FrameSampling(num_frames=40))
    plan = planner.plan(question.request(reduction=ReductionPolicy(method, 0.5)), {})
    readings = [ItemReduction.of(plan.prompt, plan.groups[number:]) for number in range(len(plan.groups))]
    looked_at, reading_of = list[MediaGroup](), ItemReduction.of

    def noted(prompt: Any, groups: Sequence[MediaGroup]) -> ItemReduction | None:
        looked_at.extend(groups)
        return reading_of(prompt, groups)

    monkeypatch.setattr(ItemReduction, "of", noted)
    shared, answer = SimpleNamespace(dispatcher=None, fleet=None), SimpleNamespace(plan=plan)
    parts: list[Any] = [shared, None, None, None, SimpleNamespace(answer=answer)]
    feed = GroupFeed(*parts)

    def reading(number: int, name: str) -> ItemReduction | None:
        granted: Any = SimpleNamespace(
            group=number, ticket=SimpleNamespace(key=SimpleNamespace(reading=name))
        )
        return feed._readings.beginning_with(granted)

    for number, expected in enumerate(readings):
        assert reading(number, "") is None  # the group is wanted whole
        for _ in range(3):
            found = reading(number, "a reading")
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert (found.item, found.num_groups) == (expected.item, expected.num_groups)
    assert len(readings) - readings.count(None) > 2
    assert looked_at == list(plan.groups)
