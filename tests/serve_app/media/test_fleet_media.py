"""The media of a front's requests at media workers: which one has them, and what happens when it is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from epd.control.routing import InFlight, Router
from epd.errors import MediaError, MediaForbiddenError, UnavailableError
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media_messages import FetchMedia
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.service import MediaReference, MediaSource
from epd.types import content_hash
from epd.video import OwnReader
from tests.serve_app.conftest import data_url
from tests.serve_app.media_fleet import MediaFleet, reference_to
from tests.serve_app.server import NEVER_S, wait_until


@pytest.fixture
def fleet() -> Iterator[MediaFleet]:
    fleet = MediaFleet(names=("v0", "v1", "v2"))
    yield fleet
    fleet.close()


def over(fleet: MediaFleet, **options: Any) -> FleetMedia:
    anything: Any = fleet
    return FleetMedia(anything, Router(), **{"patience_s": NEVER_S, **options})


def in_data(path: Path) -> MediaReference:
    return MediaReference("image", data_url(path, "image/png"), "the medium")


def fetches(fleet: MediaFleet) -> list[str]:
    return [name for name, kind in fleet.asked if kind is FetchMedia]


def assert_empty(fleet: MediaFleet, media: FleetMedia) -> None:
    assert media.num_held == 0
    for name, worker in fleet.media.items():
        assert media._holds._router.in_flight(name) == InFlight()
        if fleet.workers[name].is_alive:
            wait_until(lambda worker=worker: worker.num_holds == worker.spool.budget.num_taken == 0)


def test_media_are_spread_and_what_is_known_goes_where_it_was(
    fleet: MediaFleet, media: dict[str, Path]
) -> None:
    async def run() -> None:
        front = over(fleet)
        references = [reference_to(media[name]) for name in ("video", "image", "wide_image")]
        async with (
            front.sources("a", references[:1]) as [video],
            front.sources("b", references[1:2]),
            front.sources("c", references[2:]),
        ):
            assert video.mm_hash == content_hash(media["video"])
            assert fetches(fleet) == ["v0", "v1", "v2"]
        for number in (1, 0, 2, 1):
            async with front.sources("d", [references[number]]):
                assert fetches(fleet)[-1] == f"v{number}"
        await front.close()
        assert_empty(fleet, front)

    asyncio.run(run())


def test_a_busy_worker_is_not_preferred(fleet: MediaFleet, media: dict[str, Path]) -> None:
    async def run() -> None:
        front = over(fleet)
        reference = reference_to(media["image"])
        async with front.sources("a", [reference] * 6), front.sources("b", [reference]):
            assert fetches(fleet) == ["v0", "v1"]
        await front.close()

    asyncio.run(run())


def test_totals_are_those_of_the_latest_reports(fleet: MediaFleet) -> None:
    loads: dict[str, WorkerLoad] = {}
    front = over(fleet, loads=loads)
    assert (front.num_spooled_bytes, front.num_downloads) == (0, 0)
    loads |= {f"v{number}": WorkerLoad(spooled_bytes=5, num_downloads=number) for number in range(3)}
    assert (front.num_spooled_bytes, front.num_downloads) == (15, 3)


def test_a_request_without_media_asks_nobody(fleet: MediaFleet) -> None:
    async def run() -> None:
        async with over(fleet).sources("a", ()) as sources:
            assert sources == ()

    asyncio.run(run())
    assert fleet.asked == []


def test_errors_come_as_they_are_and_leave_nothing(fleet: MediaFleet) -> None:
    async def run() -> None:
        front = over(fleet)
        with pytest.raises(MediaForbiddenError, match=r"^the medium: "):
            async with front.sources("a", [MediaReference("image", "http://127.0.0.1/x", "the medium")]):
                pass
        await front.close()
        assert_empty(fleet, front)

    asyncio.run(run())
    assert len(fetches(fleet)) == 1


class Waiting:
    """Looks at media once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Event()
        look = OwnReader.look

        def wait(reader: OwnReader, *arguments: Any, **options: Any) -> Any:
            self.begun.release()
            assert self.may_go_on.wait(NEVER_S)
            return look(reader, *arguments, **options)

        monkeypatch.setattr(OwnReader, "look", wait)

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=200)


async def fetched(front: FleetMedia, references: Sequence[MediaReference]) -> MediaSource:
    async with front.sources("a", references) as [source]:
        return source


def test_a_worker_lost_while_it_fetches(
    fleet: MediaFleet, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of data: URLs, which the request still has; three losses end it."""
    waiting = Waiting(monkeypatch)

    async def run(num_losses: int) -> MediaSource:
        front = over(fleet)
        fetching = asyncio.create_task(fetched(front, [in_data(media["image"])]))
        for _ in range(num_losses):
            await waiting.until_begun()
            fleet.lose(fetches(fleet)[-1], comes_back=True)
        if num_losses < 3:
            waiting.may_go_on.set()
        try:
            return await fetching
        finally:
            waiting.may_go_on.set()
            await front.close()
            assert_empty(fleet, front)

    with pytest.raises(UnavailableError, match="3 times the worker was lost; retry later"):
        asyncio.run(run(3))
    waiting.may_go_on.clear()
    fleet.asked.clear()
    assert asyncio.run(run(1)).mm_hash == content_hash(media["image"])
    assert len(set(fetches(fleet))) == 2


def test_a_client_that_leaves_ends_its_fetch(
    fleet: MediaFleet, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch)

    async def run() -> None:
        front = over(fleet)
        fetching = asyncio.create_task(fetched(front, [in_data(media["image"])]))
        await waiting.until_begun()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await front.close()
        assert front.num_held == 0
        assert all(worker.num_holds == 0 for worker in fleet.media.values())
        waiting.may_go_on.set()
        await asyncio.to_thread(assert_empty, fleet, front)

    asyncio.run(run())


def test_another_content_is_refused(fleet: MediaFleet, media: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(media["image"].read_bytes())

    async def run() -> None:
        front = over(fleet)
        async with front.sources("a", [reference_to(path)]) as [source]:
            worker, _ = await front.place(source)
            assert (await front.place(source))[0] == worker
            fleet.lose(worker)
            path.write_bytes(media["wide_image"].read_bytes())
            with pytest.raises(MediaError, match="the medium was changed during the request"):
                await front.place(source)
        await front.close()
        assert_empty(fleet, front)

    asyncio.run(run())


def test_nobody_is_there(fleet: MediaFleet, media: dict[str, Path]) -> None:
    for name in fleet.media:
        fleet.lose(name)

    async def run() -> None:
        front = over(fleet, patience_s=0.1)
        with pytest.raises(UnavailableError, match="no video worker is alive; retry"):
            await fetched(front, [reference_to(media["image"])])
        assert_empty(fleet, front)

    asyncio.run(run())


def test_images_are_planned_again_after_a_loss(fleet: MediaFleet, media: dict[str, Path]) -> None:
    """Before and after they were planned."""

    async def run() -> None:
        front = over(fleet)
        references = [reference_to(media[name]) for name in ("image", "video", "wide_image")]
        async with front.sources("a", references) as sources:
            fleet.lose(fetches(fleet)[0])
            plans = await front.plan_images(sources)
            assert sorted(plans) == [0, 2]
            worker, held = await front.image(sources[2])
            fleet.lose(worker)
            other, held = await front.image(sources[2])
            assert other != worker
            assert fleet.media[other].num_pixel_bytes > 0
            assert fleet.media[other].file_of(held).mm_hash == sources[2].mm_hash
        await front.close()
        assert_empty(fleet, front)

    asyncio.run(run())
