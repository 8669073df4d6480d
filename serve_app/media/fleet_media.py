"""Keeps the media of one front's requests at media workers: chooses them, and fetches again what is lost.

    fetched    at the worker with the fewest media, or the one that had the same before
    worker lost while it fetches        ->  fetched at another one
    worker lost before frames are read  ->  fetched again, by path or URL; the content must be the same
    needed at one more worker           ->  opened there by path, else its bytes come from one that has it

A `data:` URL is kept until all media of its request are fetched, and counts against the memory of request
bodies until then; a medium that came as one and is lost later must be sent again.

A medium that came by its name alone, and that is known, is fetched once its frames are needed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from epd.control.recent import Recent
from epd.control.routing import Router
from epd.encoders import MediaPlan
from epd.errors import EPDError, MediaError, UnavailableError, UnknownUuidError
from epd.serve_app.fleet import Fleet, WorkerLostError, send_surely
from epd.serve_app.media_messages import (
    FILE_CHUNK_BYTES,
    FetchMedia,
    NotHeldError,
    PlanImages,
    ReadFile,
    ReadPicture,
    ReleaseMedia,
    StoreFile,
)
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.service import FetchedItem, HeldItem, MediaReference, MediaSource
from epd.serve_app.task_group import Tasks

_MAX_LOSSES = 3  # of workers, for one fetch or one plan
_RETRY_S = 0.05  # between looks whether a media worker is there
_MAX_READERS = 4  # of one video
_MAX_REMEMBERED = 4096  # contents and URLs whose last worker is known
_CLOSE_S = 2.0
_DATA, _FILE = "data:", "file:"
_NOT_KEPT = (
    "received a uuid without a URL, and not all of the medium's frames are kept; allowed: with its URL; send "
    "it again with that"
)
_CHANGED = (
    "received a uuid without a URL, and another medium is at its URL now; allowed: with its "
    "URL; send it again with that"
)


@dataclass(frozen=True, slots=True)
class _Hold:
    """What was fetched at once. incarnation: of the worker. num_media: for the router's counts."""

    name: str
    worker: str
    incarnation: int
    num_media: int


@dataclass(slots=True, eq=False)
class _Medium:
    """One medium of a request.

    reference: to fetch it again; None if that was a data: URL, or its name is all that came
    is_named: whether it came by its name alone
    places: where it is, by worker
    planned: those of the places where an image or a clip has been planned
    """

    request_id: str
    source: MediaSource
    reference: MediaReference | None
    is_named: bool = False
    places: dict[str, tuple[_Hold, HeldItem]] = field(default_factory=dict)
    planned: set[HeldItem] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class FleetMedia:
    """Implements MediaService over the media workers of a fleet. Used from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        loads: Mapping[str, WorkerLoad] | None = None,
        *,
        owner: str = "",
        patience_s: float = 60.0,
    ) -> None:
        """Starts without media.

        loads: what workers have reported. owner: see `Orchestrator`
        patience_s: how long to wait while no media worker is alive
        """
        self._fleet = fleet
        self._router = router
        self._loads = {} if loads is None else loads
        self._owner = owner
        self._patience_s = patience_s
        self._numbers = count(1)
        self._media: dict[HeldItem, _Medium] = {}
        self._holds: dict[str, list[_Hold]] = {}  # by request
        self.reading: Counter[str] = Counter()  # streams of this front, by worker
        self._had: Recent[int | str, str] = Recent(_MAX_REMEMBERED)
        self._tasks = Tasks()

    @property
    def num_spooled_bytes(self) -> int:
        return sum(load.spooled_bytes for load in self._loads.values())

    @property
    def num_downloads(self) -> int:
        return sum(load.num_downloads for load in self._loads.values())

    @property
    def num_held(self) -> int:
        """Returns the number of media of requests in flight."""
        return len(self._media)

    async def close(self) -> None:
        """Returns when what was released is released at the workers too, as far as they answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._tasks.wait()

    # Fetching

    @asynccontextmanager
    async def sources(
        self, request_id: str, references: Sequence[MediaReference]
    ) -> AsyncIterator[tuple[MediaSource, ...]]:
        """See `MediaService`. A request without media asks no worker."""
        if not references:
            yield ()
            return
        hold_key = f"{request_id}~{next(self._numbers)}"
        self._holds[hold_key] = []
        fetching = self._fetched(hold_key, tuple(references))
        del references  # a data: URL holds a whole medium
        media: list[_Medium] = []
        try:
            media = await fetching
            self._media |= {each.source.held: each for each in media}
            yield tuple(each.source for each in media)
        finally:
            for each in media:
                del self._media[each.source.held]
            for hold in self._holds.pop(hold_key):
                self._release(hold)

    async def _fetched(self, key: str, references: tuple[MediaReference, ...]) -> list[_Medium]:
        """Fetches media, but those that are known. Returns all of them, in order."""
        wanted = tuple(each for each in references if not _is_known(each))
        fetched = iter(await self._fetched_now(key, wanted) if wanted else ())
        return [self._known(key, each) if _is_known(each) else next(fetched) for each in references]

    async def _fetched_now(self, key: str, references: tuple[MediaReference, ...]) -> list[_Medium]:
        hold, items = await self._fetch(key, references)
        media = []
        for number, (item, reference) in enumerate(zip(items, references, strict=True)):
            source = _source(item, reference, HeldItem(hold.name, number))
            medium = _Medium(key, source, None if _is_data(reference) else reference)
            medium.places[hold.worker] = (hold, source.held)
            self._had.set(item.mm_hash, hold.worker)
            media.append(medium)
        return media

    def _known(self, key: str, reference: MediaReference) -> _Medium:
        """Returns a medium that no worker has yet."""
        assert reference.known is not None
        held = HeldItem(f"{self._owner}/{key}#{next(self._numbers)}", 0)
        source = _source(reference.known, reference, held)
        return _Medium(key, source, reference if reference.url else None, is_named=True)

    async def _fetch(
        self, key: str, references: tuple[MediaReference, ...], mm_hash: str = ""
    ) -> tuple[_Hold, tuple[FetchedItem, ...]]:
        """Fetches references at one worker. mm_hash: their content, if it is known."""
        known_as = mm_hash or hash(references[0].url)
        lost: set[str] = set()
        for _ in range(_MAX_LOSSES):
            hold = self._hold_at(await self._choose(known_as, lost), key, len(references))
            try:
                items = await self._fleet.send("video", hold.worker, FetchMedia(hold.name, references))
            except WorkerLostError:
                lost.add(hold.worker)
            else:
                self._had.set(known_as, hold.worker)
                return hold, items
        raise UnavailableError(
            f"the media could not be fetched: {_MAX_LOSSES} times the worker was lost; retry later"
        )

    def _hold_at(self, worker: str, key: str, num_media: int) -> _Hold:
        if key not in self._holds:
            raise NotHeldError("the request has ended; ask again")
        name = f"{self._owner}/{key}#{next(self._numbers)}"
        hold = _Hold(name, worker, self._fleet.workers[worker].incarnation, num_media)
        self._holds[key].append(hold)
        self._router.add(worker, num_videos=num_media)
        return hold

    async def _choose(self, known_as: int | str, avoid: Collection[str]) -> str:
        """Returns the media worker to ask. Raises UnavailableError if none is alive for too long."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._patience_s
        while True:
            names = [info.name for info in self._fleet.workers.values() if info.takes("video")]
            if names:
                others = [name for name in names if name not in avoid]
                return self._router.video(others or names, self._had.get(known_as))
            if clock() > end_s:
                raise UnavailableError("no video worker is alive; retry")
            await asyncio.sleep(_RETRY_S)

    def _release(self, hold: _Hold) -> None:
        self._router.add(hold.worker, num_videos=-hold.num_media)
        if self._is_there(hold):
            message = ReleaseMedia(hold.name)
            self._tasks.spawn(send_surely(self._fleet, "video", hold.worker, message))

    def _is_there(self, hold: _Hold) -> bool:
        info = self._fleet.workers.get(hold.worker)
        return info is not None and info.is_alive and info.incarnation == hold.incarnation

    # Places

    async def place(self, source: MediaSource) -> tuple[str, HeldItem]:
        """Returns a worker that has a medium of a request in flight, and its name there.

        A lost medium is fetched again. Raises MediaError if it is another one now; UnavailableError if it
        cannot be fetched again; NotHeldError if the request has ended.
        """
        medium = self._medium(source)
        async with medium.lock:
            return await self._place(medium)

    def spare_workers(self, source: MediaSource) -> list[str]:
        """Returns workers that could read a medium beside the one that has it: they read nothing now."""
        medium = self._media.get(source.held)
        if medium is None:
            return []
        home = next((name for name, (hold, _) in medium.places.items() if self._is_there(hold)), None)
        names = [info.name for info in self._fleet.workers.values() if info.takes("video")]
        spare = [name for name in names if name != home and self.reading[name] == 0]
        return spare[: _MAX_READERS - 1]

    async def lend(self, source: MediaSource, worker: str) -> HeldItem | None:
        """Returns the name of a medium at one more worker, which gets it if need be; None if it cannot."""
        medium = self._medium(source)
        if worker in medium.places:
            hold, held = medium.places[worker]
            return held if self._is_there(hold) else None
        for give in (self._by_path, self._by_bytes):
            with suppress(EPDError):  # others can read it
                found = await give(medium, worker)
                if found is not None:
                    hold, item = found
                    if item.mm_hash == source.mm_hash:
                        medium.places[worker] = (hold, HeldItem(hold.name, 0))
                        return medium.places[worker][1]
        return None

    async def _by_path(self, medium: _Medium, worker: str) -> tuple[_Hold, FetchedItem] | None:
        """Lets a worker open the file itself; None for a medium that is not a file."""
        if medium.reference is None or not _is_file(medium.reference):
            return None
        hold = self._hold_at(worker, medium.request_id, 1)
        [item] = await self._fleet.send("video", worker, FetchMedia(hold.name, (medium.reference,)))
        return hold, item

    async def _by_bytes(self, medium: _Medium, worker: str) -> tuple[_Hold, FetchedItem]:
        """Sends a worker the bytes from one that has them, which do not pass through this process."""
        home, held = await self.place(medium.source)
        hold = self._hold_at(worker, medium.request_id, 1)
        source, start = medium.source, 0
        while True:
            num_bytes, chunk = await self._fleet.fetch("video", home, ReadFile(held, start))
            message = StoreFile(hold.name, source.kind, source.label, num_bytes, start)
            item = await self._fleet.send("video", worker, message, chunk)
            del chunk
            if item is not None:
                return hold, item
            start += FILE_CHUNK_BYTES
            if start >= num_bytes:
                raise NotHeldError(f"{source.label} has not arrived whole; ask again")

    async def picture(self, source: MediaSource, max_side: int) -> bytes:
        """See `MediaService`."""
        worker, held = await self.place(source)
        _, jpeg = await self._fleet.fetch("video", worker, ReadPicture(held, max_side))
        return np.asarray(jpeg).tobytes()

    def leave(self, source: MediaSource, worker: str) -> None:
        """Notes that a worker has lost a medium."""
        if source.held in self._media:
            self._media[source.held].places.pop(worker, None)

    async def image(self, source: MediaSource) -> tuple[str, HeldItem]:
        """Returns as `place`, once the image is planned there."""
        medium = self._medium(source)
        async with medium.lock:
            for _ in range(_MAX_LOSSES):
                worker, held = await self._place(medium)
                try:
                    if held not in medium.planned:
                        await self._fleet.send("video", worker, PlanImages(held.hold, (held.item,)))
                except (WorkerLostError, NotHeldError):
                    medium.places.pop(worker)
                else:
                    medium.planned.add(held)
                    return worker, held
        raise UnavailableError(f"{source.label}: {_MAX_LOSSES} times the worker was lost; retry later")

    async def plan_images(self, sources: Sequence[MediaSource]) -> dict[int, MediaPlan]:
        """Returns the plans of the images and clips of a request, by place, which are kept decoded for it.

        Raises MediaError, OverloadedError, UnavailableError.
        """
        missing = {number: each for number, each in enumerate(sources) if each.kind != "video"}
        plans: dict[int, MediaPlan] = {}
        num_losses = 0
        while missing:
            worker, hold, items = await self._together(missing)
            try:
                found = await self._fleet.send("video", worker, PlanImages(hold, tuple(items)))
            except (WorkerLostError, NotHeldError):
                num_losses += 1
                if num_losses >= _MAX_LOSSES:
                    raise
                for number in items.values():
                    self.leave(missing[number], worker)
                continue
            for (item, number), plan in zip(items.items(), found, strict=True):
                plans[number] = plan
                self._medium(missing.pop(number)).planned.add(HeldItem(hold, item))
        return plans

    async def _together(self, images: Mapping[int, MediaSource]) -> tuple[str, str, dict[int, int]]:
        """Returns a worker, a hold there, and which images are in it: numbers in the request by item."""
        places = {number: await self.place(source) for number, source in images.items()}
        worker, first = next(iter(places.values()))
        items = {held.item: number for number, (_, held) in places.items() if held.hold == first.hold}
        return worker, first.hold, items

    def _medium(self, source: MediaSource) -> _Medium:
        medium = self._media.get(source.held)
        if medium is None:
            raise NotHeldError(f"{source.label} is not held any more; ask again")
        return medium

    async def _place(self, medium: _Medium) -> tuple[str, HeldItem]:
        for worker, (hold, held) in medium.places.items():
            if self._is_there(hold):
                return worker, held
        return await self._fetch_again(medium)

    async def _fetch_again(self, medium: _Medium) -> tuple[str, HeldItem]:
        source = medium.source
        if medium.reference is None and medium.is_named:
            raise UnknownUuidError(f"{source.label}: {_NOT_KEPT}")
        if medium.reference is None:
            raise UnavailableError(
                f"{source.label}: the worker that had it is lost, and it came in the request itself; "
                "send the request again"
            )
        hold, [item] = await self._fetch(medium.request_id, (medium.reference,), source.mm_hash)
        if item.mm_hash != source.mm_hash and medium.is_named:
            raise UnknownUuidError(f"{source.label}: {_CHANGED}")
        if item.mm_hash != source.mm_hash:
            raise MediaError(
                f"{source.label} was changed during the request; allowed: media that stay as they are; "
                "ask again"
            )
        held = HeldItem(hold.name, 0)
        medium.places[hold.worker] = (hold, held)
        return hold.worker, held


def _is_file(reference: MediaReference) -> bool:
    return reference.is_upload or reference.url[: len(_FILE)].lower() == _FILE


def _is_data(reference: MediaReference) -> bool:
    return reference.url[: len(_DATA)].lower() == _DATA


def _is_known(reference: MediaReference) -> bool:
    """Returns whether it need not be fetched before its frames are needed."""
    return reference.known is not None and not _is_data(reference)


def _source(item: FetchedItem, reference: MediaReference, held: HeldItem) -> MediaSource:
    return MediaSource(item.facts, item.mm_hash, item.num_bytes, reference.label, held, reference.pixels)
