"""A media worker: what it holds for a request is there until it is released, and then nowhere."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epd.encoders import load_adapter
from epd.encoders.plans import Grid, MediaPlan
from epd.errors import (
    CancelledError,
    CorruptMediaError,
    MediaError,
    MediaLimitError,
    OverloadedError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd.models import embedded_model_path
from epd.serve_app.media.image_planner import ImagePlanner
from epd.serve_app.media.media_spool import FetchedFile, SpoolLimits
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.media_messages import (
    CloseStream,
    DecodeOrder,
    FetchMedia,
    NotHeldError,
    PlanImages,
    ReadFile,
    ReadFrames,
    ReadImage,
    ReleaseMedia,
    StoreFile,
)
from epd.serve_app.service import HeldItem, MediaReference
from epd.stages.media import PlannedMedia, plan_pixels
from epd.types import MediaKind, content_hash
from epd.video import FetchPolicy, MediaFacts, load_image, open_file
from tests.serve_app.conftest import data_url
from tests.serve_app.server import NEVER_S, START_S, wait_until
from tests.video.plain_decoder import reference_decode

TIMES_S = (0.1, 0.4, 0.7, 1.0)


@pytest.fixture
def settings(tmp_path: Path) -> MediaSettings:
    return MediaSettings(
        embedded_model_path(), FetchPolicy(media_folder=Path("/")), spool_folder=tmp_path, num_read_threads=2
    )


@pytest.fixture
def worker(settings: MediaSettings) -> Iterator[MediaWorker]:
    worker = MediaWorker(settings)
    yield worker
    worker.close()
    assert list(settings.spool_folder.iterdir()) == []  # type: ignore[union-attr]


def reference(path: Path, *, as_data: bool = True) -> MediaReference:
    kind: MediaKind = "video" if path.suffix == ".mp4" else "image"
    return MediaReference(kind, data_url(path, f"{kind}/x") if as_data else path.as_uri(), f"{kind} 1")


def fetch(hold: str, *paths: Path) -> FetchMedia:
    return FetchMedia(hold, tuple(map(reference, paths)))


def frames_of(hold: str, index: int, *, order: bool = True, stream: str = "s") -> ReadFrames:
    asked = DecodeOrder(HeldItem(hold, 0), TIMES_S, (2, 2), (32, 32))
    return ReadFrames(f"{hold}/{stream}", index, asked if order else None)


def assert_empty(worker: MediaWorker) -> None:
    wait_until(lambda: (worker.num_holds, worker.num_streams, worker.num_pixel_bytes) == (0, 0, 0))
    wait_until(lambda: worker.spool.budget.num_taken == 0 and not list(worker.spool.path.iterdir()))


@pytest.mark.parametrize("as_data", [True, False])
def test_frames_equal_sequential_decoding(worker: MediaWorker, media: dict[str, Path], as_data: bool) -> None:
    message = FetchMedia("h", (reference(media["video"], as_data=as_data),))
    [item], _ = pickle.loads(pickle.dumps(worker.handle(pickle.loads(pickle.dumps(message)))))
    assert item.mm_hash == content_hash(media["video"])
    assert (item.facts.kind, item.num_bytes) == ("video", media["video"].stat().st_size)
    wanted = reference_decode(media["video"], TIMES_S, size=(32, 32)).data
    first, second = worker.handle(frames_of("h", 0)), worker.handle(frames_of("h", 1, order=False))
    again = worker.handle(frames_of("h", 0, order=False))
    assert (first[0], second[0]) == (0, 0)
    assert np.array_equal(np.concatenate([np.array(first[1]), np.array(second[1])]), wanted)
    assert np.array_equal(np.array(first[1]), np.array(again[1]))
    worker.handle(CloseStream("h/s"))
    assert worker.num_streams == 0
    worker.handle(ReleaseMedia("h"))
    assert_empty(worker)


def test_images_are_planned_once_and_their_pixels_stay(worker: MediaWorker, media: dict[str, Path]) -> None:
    paths = (media["image"], media["video"], media["wide_image"])
    worker.handle(fetch("h", *paths))
    plans, _ = worker.handle(PlanImages("h", (0, 2)))
    adapter = load_adapter(embedded_model_path())
    wanted = [plan_pixels(adapter, path, load_image(path)) for path in (paths[0], paths[2])]
    assert list(plans) == [each.plan for each in wanted]
    taken = worker.num_pixel_bytes
    assert taken == sum(each.image.nbytes for each in wanted if each.image is not None) > 0
    for item, each in zip((0, 2), wanted, strict=True):
        assert each.image is not None
        num, pixels = worker.handle(ReadImage(HeldItem("h", item), 0, len(each.image)))
        assert num == 0
        assert pixels is not None
        assert np.array_equal(pixels, each.image.numpy())
    assert worker.handle(PlanImages("h", (0, 2)))[0] == plans
    assert worker.num_pixel_bytes == taken
    worker.handle(ReleaseMedia("h"))
    assert_empty(worker)


def test_what_is_released_is_not_found(worker: MediaWorker, media: dict[str, Path]) -> None:
    worker.handle(fetch("h", media["video"]))
    worker.handle(frames_of("h", 0))
    worker.handle(ReleaseMedia("h"))
    for message in (PlanImages("h", (0,)), ReadImage(HeldItem("h", 0), 0, 1), frames_of("h", 0, stream="t")):
        with pytest.raises(UnavailableError):
            worker.handle(message)
    with pytest.raises(CancelledError):  # its stream was closed with it
        worker.handle(frames_of("h", 1, order=False))
    assert_empty(worker)


def test_a_release_that_comes_first_cancels_the_fetch(worker: MediaWorker, media: dict[str, Path]) -> None:
    worker.handle(ReleaseMedia("h"))
    with pytest.raises(CancelledError):
        worker.handle(fetch("h", media["video"]))
    assert_empty(worker)


def test_the_error_of_a_caller_that_left_is_not_reported(worker: MediaWorker, media: dict[str, Path]) -> None:
    """Asyncio reports an error that nobody reads, with a traceback for each client that leaves."""
    reported: list[dict[str, Any]] = []

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        asked = loop.create_task(worker.answer(fetch("h", media["video"])))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await worker.answer(ReleaseMedia("h"))
        with pytest.raises(NotHeldError):  # comes after the end of the fetch
            await worker.answer(PlanImages("h", (0,)))
        gc.collect()

    asyncio.run(leave())
    assert reported == []
    assert_empty(worker)


def test_a_front_that_is_lost_leaves_nothing_and_others_keep_theirs(
    worker: MediaWorker, media: dict[str, Path]
) -> None:
    for owner in ("a", "b"):
        worker.handle(fetch(owner, media["image"], media["video"]), owner)
        worker.handle(PlanImages(owner, (0,)), owner)
        order = DecodeOrder(HeldItem(owner, 1), TIMES_S, (2, 2), (32, 32))
        worker.handle(ReadFrames(f"{owner}/s", 0, order), owner)
    worker.drop_owner("a")
    wait_until(lambda: (worker.num_holds, worker.num_streams) == (1, 1))
    assert len(list(worker.spool.path.iterdir())) == 1
    assert worker.handle(ReadFrames("b/s", 1))[1] is not None
    worker.drop_owner("b")
    assert_empty(worker)


def store(hold: str, start: int, num_bytes: int) -> StoreFile:
    return StoreFile(hold, "video", "video 1", num_bytes, start)


@pytest.fixture
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("epd.serve_app.media.media_worker.FILE_CHUNK_BYTES", 3000)
    return 3000


def test_another_worker_gets_the_bytes(
    worker: MediaWorker, settings: MediaSettings, media: dict[str, Path], chunk_bytes: int
) -> None:
    data, [there] = media["video"].read_bytes(), worker.handle(fetch("h", media["video"]))[0]
    other, item, starts = MediaWorker(settings), None, range(0, len(data), chunk_bytes)
    for start in starts:
        assert item is None
        num_bytes, chunk = worker.handle(ReadFile(HeldItem("h", 0), start))
        assert (num_bytes, np.array(chunk).tobytes()) == (len(data), data[start : start + chunk_bytes])
        item, _ = other.handle(store("i", start, num_bytes), bulk=chunk)
        assert other.spool.budget.num_taken == len(data)
    assert item == there
    assert len(starts) > 2
    frames = [each.handle(frames_of(hold, 1))[1] for each, hold in ((worker, "h"), (other, "i"))]
    assert np.array_equal(np.array(frames[0]), np.array(frames[1]))
    for each, hold in ((worker, "h"), (other, "i")):
        each.handle(ReleaseMedia(hold))
        assert_empty(each)
    other.close()


def test_bytes_that_do_not_fit_are_refused_and_leave_nothing(
    worker: MediaWorker, settings: MediaSettings, media: dict[str, Path]
) -> None:
    chunk = np.frombuffer(media["video"].read_bytes()[:100], np.uint8)
    worker.handle(store("a", 0, 1000), bulk=chunk)
    with pytest.raises(NotHeldError, match="a part of the medium is missing"):
        worker.handle(store("a", 500, 1000), bulk=chunk)
    assert_empty(worker)
    with pytest.raises(MediaLimitError, match="more bytes than were announced"):
        worker.handle(store("b", 0, 99), bulk=chunk)
    with pytest.raises(NotHeldError):
        worker.handle(store("c", 100, 1000), bulk=chunk)
    with pytest.raises(MediaLimitError, match="allowed"):
        worker.handle(store("d", 0, settings.fetch.max_bytes + 1), bulk=chunk)
    with pytest.raises(MediaError):  # complete, but no video
        worker.handle(store("e", 0, 100), bulk=chunk)
    assert_empty(worker)
    worker.handle(store("f", 0, 1000), bulk=chunk)
    worker.handle(ReleaseMedia("f"))
    with pytest.raises(NotHeldError):
        worker.handle(store("f", 100, 1000), bulk=chunk)
    assert_empty(worker)


class SlowReader:
    """Looks at a medium once it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def look(self, *_: object, **__: object) -> MediaFacts:
        self.has_begun.set()
        assert self.may_go_on.wait(NEVER_S)
        return MediaFacts("image", 8, 8)

    def load_image(self, *_: object) -> Any:
        raise AssertionError


@pytest.mark.parametrize("end", ["release", "drop", "close"])
def test_a_fetch_in_progress_ends(
    settings: MediaSettings, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    reader = SlowReader()
    monkeypatch.setattr("epd.video.OwnReader", lambda: reader)
    worker = MediaWorker(settings)
    fetching: Future[Any] = worker.submit(fetch("h", media["image"]), "front")
    assert reader.has_begun.wait(NEVER_S)
    assert worker.load().spooled_bytes > 0
    {
        "release": lambda: worker.handle(ReleaseMedia("h")),
        "drop": lambda: worker.drop_owner("front"),
        "close": worker.close,
    }[end]()
    assert isinstance(fetching.exception(START_S), CancelledError)
    reader.may_go_on.set()
    if end != "close":
        assert_empty(worker)
    worker.close()
    with pytest.raises(CancelledError):
        worker.handle(fetch("i", media["image"]))


def test_errors_are_those_of_the_spool(worker: MediaWorker, media: dict[str, Path], tmp_path: Path) -> None:
    broken = MediaReference("image", "data:image/png;base64,@@@", "image, number 1 of the media")
    with pytest.raises(UnsupportedMediaError, match=r"^image, number 1 of the media: received a data: URI"):
        worker.handle(FetchMedia("a", (broken,)))
    with pytest.raises(UnsupportedMediaError, match="send it as video_url"):
        worker.handle(FetchMedia("b", (replace(reference(media["video"]), kind="image"),)))
    cut = tmp_path / "cut.png"
    cut.write_bytes(media["image"].read_bytes()[:200])
    worker.handle(fetch("c", cut))
    with pytest.raises(CorruptMediaError, match=r"^image 1"):
        worker.handle(PlanImages("c", (0,)))
    assert worker.num_pixel_bytes == 0
    worker.handle(ReleaseMedia("c"))
    cut.unlink()
    assert_empty(worker)


def test_a_file_that_was_replaced_is_not_read(
    worker: MediaWorker, media: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(media["video"].read_bytes())
    worker.handle(FetchMedia("h", (reference(path, as_data=False),)))
    other = tmp_path / "other"
    other.write_bytes(media["video"].read_bytes())
    other.rename(path)
    with pytest.raises(MediaError, match="video 1 was changed during the request"):
        worker.handle(frames_of("h", 0))
    path.unlink()
    worker.handle(ReleaseMedia("h"))


def test_the_share_of_a_request_holds(settings: MediaSettings, media: dict[str, Path]) -> None:
    size = media["image"].stat().st_size
    worker = MediaWorker(replace(settings, limits=SpoolLimits(max_spooled_bytes=size * 3 // 2)))
    with pytest.raises(OverloadedError):
        worker.handle(fetch("a", media["image"], media["image"]))
    worker.handle(fetch("b", media["image"]))
    worker.handle(ReleaseMedia("b"))
    assert_empty(worker)
    worker.close()


# Images, in turn and within their budget

PLAN = MediaPlan("image", (8, 8), Grid(1, 2, 2), 1, 1)


@pytest.fixture
def named(media: dict[str, Path]) -> Callable[[str, int], list[FetchedFile]]:
    with open_file(media["image"], "it") as opened:
        identity = opened.identity

    def files(name: str, num: int) -> list[FetchedFile]:
        facts = MediaFacts("image", 8, 8)
        return [
            FetchedFile(media["image"], f"{name}{number}", "hash", facts, identity) for number in range(num)
        ]

    return files


class SlowImages:
    """Decodes images named slow once it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_go_on = threading.Event()

    def look(self, *_: object, **__: object) -> MediaFacts:
        raise AssertionError

    def load_image(self, _file: object, name: str) -> Any:
        self.begun.append(name)
        if name.startswith("slow"):
            assert self.may_go_on.wait(NEVER_S)
        return np.zeros((8, 8, 3), np.uint8)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images keep their size."""
    monkeypatch.setattr(
        "epd.serve_app.media.image_planner.plan_pixels",
        lambda _, path, image, __: PlannedMedia(path, PLAN, torch.from_numpy(image)[None]),
    )


@pytest.mark.usefixtures("unplanned")
def test_sixteen_images_hold_up_no_other_request(named: Callable[[str, int], list[FetchedFile]]) -> None:
    async def run() -> list[str]:
        reader = SlowImages()
        images = ImagePlanner(embedded_model_path(), reader, num_threads=2)
        slow = asyncio.create_task(images.planned("a", named("slow", 16)))
        while not reader.begun:
            await asyncio.sleep(0.01)
        assert len(await images.planned("b", named("quick", 3))) == 3
        begun = list(reader.begun)
        reader.may_go_on.set()
        assert len(await slow) == 16
        images.close()
        return begun

    assert asyncio.run(run()) == ["slow0", "quick0", "quick1", "quick2"]


@pytest.mark.usefixtures("unplanned")
def test_memory_of_images_has_a_budget(
    monkeypatch: pytest.MonkeyPatch, named: Callable[[str, int], list[FetchedFile]]
) -> None:
    monkeypatch.setattr("epd.serve_app.media.image_planner._MAX_PIXEL_BYTES", 3 * 8 * 8 * 3)

    async def run() -> None:
        images = ImagePlanner(embedded_model_path(), SlowImages(), num_threads=2)
        held = dict(enumerate(await images.planned("a", named("a", 2))))
        assert images.budget.num_taken == 2 * 8 * 8 * 3
        with pytest.raises(OverloadedError):
            await images.planned("b", named("b", 2))
        images.give_back(held)
        assert images.budget.num_taken == 0
        images.close()

    asyncio.run(run())
