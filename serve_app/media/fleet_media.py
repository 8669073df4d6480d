"""Keeps the media of one front's requests at media workers: chooses them, and fetches again what is lost.

    fetched    at the worker with the fewest media, or the one that had the same before
    worker lost while it fetches        ->  fetched at another one
    worker lost before frames are read  ->  fetched again, by path or URL; the content must be the same
    needed at one more worker           ->  opened there by path, else its bytes come from one that has it
    came by a name that is known        ->  fetched once its frames are needed

A `data:` URL is kept until all media of its request are fetched, and counts against the memory of request
bodies until then; a medium that came as one and is lost later must be sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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


class _Holds:
    """Fetches media at media workers, which keep them by holds until the request ends.

    had: the last worker of contents and URLs
    tasks: what releases holds at the workers
    """

    def __init__(self, fleet: Fleet, router: Router, owner: str, patience_s: float) -> None:
        """Arguments as of `FleetMedia`."""
        self.fleet = fleet
        self.had: Recent[int | str, str] = Recent(_MAX_REMEMBERED)
        self._router = router
        self._owner = owner
        self._patience_s = patience_s
        self._numbers = count(1)
        self._of: dict[str, list[_Hold]] = {}  # by request
        self.tasks = Tasks()

    @contextmanager
    def of_request(self, request_id: str) -> Iterator[str]:
        """Yields a key for the holds of a request, which are released when the block is left."""
        key = f"{request_id}~{next(self._numbers)}"
        self._of[key] = []
        try:
            yield key
        finally:
            for hold in self._of.pop(key):
                self._release(hold)

    def new_name(self, key: str) -> str:
        """Returns a name that no hold has had."""
        return f"{self._owner}/{key}#{next(self._numbers)}"

    async def fetch(
        self, key: str, references: tuple[MediaReference, ...], mm_hash: str = ""
    ) -> tuple[_Hold, tuple[FetchedItem, ...]]:
        """Fetches references at one worker. mm_hash: their content, if it is known."""
        known_as = mm_hash or hash(references[0].url)
        lost: set[str] = set()
        for _ in range(_MAX_LOSSES):
            hold = self.at(await self._choose(known_as, lost), key, len(references))
            try:
                items = await self.fleet.send("video", hold.worker, FetchMedia(hold.name, references))
            except WorkerLostError:
                lost.add(hold.worker)
            else:
                self.had.set(known_as, hold.worker)
                return hold, items
        raise UnavailableError(
            f"the media could not be fetched: {_MAX_LOSSES} times the worker was lost; retry later"
        )

    def at(self, worker: str, key: str, num_media: int) -> _Hold:
        """Returns a new hold at a worker. Raises NotHeldError if the request has ended."""
        if key not in self._of:
            raise NotHeldError("the request has ended; ask again")
        hold = _Hold(self.new_name(key), worker, self.fleet.workers[worker].incarnation, num_media)
        self._of[key].append(hold)
        self._router.add(worker, num_videos=num_media)
        return hold

    async def _choose(self, known_as: int | str, avoid: Collection[str]) -> str:
        """Returns the media worker to ask. Raises UnavailableError if none is alive for too long."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._patience_s
        while True:
            names = [info.name for info in self.fleet.workers.values() if info.takes("video")]
            if names:
                others = [name for name in names if name not in avoid]
                return self._router.video(others or names, self.had.get(known_as))
            if clock() > end_s:
                raise UnavailableError("no video worker is alive; retry")
            await asyncio.sleep(_RETRY_S)

    def _release(self, hold: _Hold) -> None:
        self._router.add(hold.worker, num_videos=-hold.num_media)
        if self.is_there(hold):
            message = ReleaseMedia(hold.name)
            self.tasks.spawn(send_surely(self.fleet, "video", hold.worker, message))

    def is_there(self, hold: _Hold) -> bool:
        """Returns whether the worker still has what it holds."""
        info = self.fleet.workers.get(hold.worker)
        return info is not None and info.is_alive and info.incarnation == hold.incarnation


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
        self._holds = _Holds(fleet, router, owner, patience_s)
        self._loads = {} if loads is None else loads
        self._media: dict[HeldItem, _Medium] = {}
        self.reading: Counter[str] = Counter()  # streams of this front, by worker

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
                await self._holds.tasks.wait()

    @asynccontextmanager
    async def sources(
        self, request_id: str, references: Sequence[MediaReference]
    ) -> AsyncIterator[tuple[MediaSource, ...]]:
        """See `MediaService`. A request without media asks no worker."""
        if not references:
            yield ()
            return
        with self._holds.of_request(request_id) as key:
            fetching = _fetched(self._holds, key, tuple(references))
            del references  # a data: URL holds a whole medium
            media: list[_Medium] = []
            try:
                media = await fetching
                self._media |= {each.source.held: each for each in media}
                yield tuple(each.source for each in media)
            finally:
                for each in media:
                    del self._media[each.source.held]

    async def place(self, source: MediaSource) -> tuple[str, HeldItem]:
        """Returns a worker that has a medium of a request in flight, and its name there.

        A lost medium is fetched again. Raises MediaError if it is another one now; UnavailableError if it
        cannot be fetched again; NotHeldError if the request has ended.
        """
        medium = self._medium(source)
        async with medium.lock:
            return await _place(self._holds, medium)

    def spare_workers(self, source: MediaSource) -> list[str]:
        """Returns workers that could read a medium beside the one that has it: they read nothing now."""
        medium = self._media.get(source.held)
        if medium is None:
            return []
        home = next((name for name, (hold, _) in medium.places.items() if self._holds.is_there(hold)), None)
        names = [info.name for info in self._holds.fleet.workers.values() if info.takes("video")]
        spare = [name for name in names if name != home and self.reading[name] == 0]
        return spare[: _MAX_READERS - 1]

    async def lend(self, source: MediaSource, worker: str) -> HeldItem | None:
        """Returns the name of a medium at one more worker, which gets it if need be; None if it cannot."""
        medium = self._medium(source)
        if worker in medium.places:
            hold, held = medium.places[worker]
            return held if self._holds.is_there(hold) else None
        for way in (_by_path, _by_bytes):
            with suppress(EPDError):  # others can read it
                found = await way(self._holds, medium, worker)
                if found is not None and found[1].mm_hash == source.mm_hash:
                    medium.places[worker] = (found[0], HeldItem(found[0].name, 0))
                    return medium.places[worker][1]
        return None

    async def picture(self, source: MediaSource, max_side: int) -> bytes:
        """See `MediaService`."""
        worker, held = await self.place(source)
        _, jpeg = await self._holds.fleet.fetch("video", worker, ReadPicture(held, max_side))
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
                worker, held = await _place(self._holds, medium)
                try:
                    if held not in medium.planned:
                        await self._holds.fleet.send("video", worker, PlanImages(held.hold, (held.item,)))
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
            places = {number: await self.place(source) for number, source in missing.items()}
            worker, first = next(iter(places.values()))
            items = {held.item: number for number, (_, held) in places.items() if held.hold == first.hold}
            try:
                found = await self._holds.fleet.send("video", worker, PlanImages(first.hold, tuple(items)))
            except (WorkerLostError, NotHeldError):
                num_losses += 1
                if num_losses >= _MAX_LOSSES:
                    raise
                for number in items.values():
                    self.leave(missing[number], worker)
                continue
            for (item, number), plan in zip(items.items(), found, strict=True):
                plans[number] = plan
                self._medium(missing.pop(number)).planned.add(HeldItem(first.hold, item))
        return plans

    def _medium(self, source: MediaSource) -> _Medium:
        medium = self._media.get(source.held)
        if medium is None:
            raise NotHeldError(f"{source.label} is not held any more; ask again")
        return medium


async def _fetched(holds: _Holds, key: str, references: tuple[MediaReference, ...]) -> list[_Medium]:
    """Fetches media, but those that are known. Returns all of them, in order."""
    wanted = tuple(each for each in references if not _is_known(each))
    fetched = iter(await _fetched_now(holds, key, wanted) if wanted else ())
    return [_known(holds, key, each) if _is_known(each) else next(fetched) for each in references]


async def _fetched_now(holds: _Holds, key: str, references: tuple[MediaReference, ...]) -> list[_Medium]:
    hold, items = await holds.fetch(key, references)
    media = []
    for number, (item, reference) in enumerate(zip(items, references, strict=True)):
        source = _source(item, reference, HeldItem(hold.name, number))
        medium = _Medium(key, source, None if _is_data(reference) else reference)
        medium.places[hold.worker] = (hold, source.held)
        holds.had.set(item.mm_hash, hold.worker)
        media.append(medium)
    return media


def _known(holds: _Holds, key: str, reference: MediaReference) -> _Medium:
    """Returns a medium that no worker has yet."""
    assert reference.known is not None
    source = _source(reference.known, reference, HeldItem(holds.new_name(key), 0))
    return _Medium(key, source, reference if reference.url else None, is_named=True)


async def _place(holds: _Holds, medium: _Medium) -> tuple[str, HeldItem]:
    """Returns as `FleetMedia.place`; the caller has the lock."""
    for worker, (hold, held) in medium.places.items():
        if holds.is_there(hold):
            return worker, held
    return await _fetched_again(holds, medium)


async def _fetched_again(holds: _Holds, medium: _Medium) -> tuple[str, HeldItem]:
    source = medium.source
    if medium.reference is None and medium.is_named:
        raise _unknown(source, "not all of the medium's frames are kept")
    if medium.reference is None:
        raise UnavailableError(
            f"{source.label}: the worker that had it is lost, and it came in the request itself; "
            "send the request again"
        )
    hold, [item] = await holds.fetch(medium.request_id, (medium.reference,), source.mm_hash)
    if item.mm_hash != source.mm_hash and medium.is_named:
        raise _unknown(source, "another medium is at its URL now")
    if item.mm_hash != source.mm_hash:
        raise MediaError(
            f"{source.label} was changed during the request; allowed: media that stay as they are; ask again"
        )
    held = HeldItem(hold.name, 0)
    medium.places[hold.worker] = (hold, held)
    return hold.worker, held


def _unknown(source: MediaSource, reason: str) -> UnknownUuidError:
    return UnknownUuidError(
        f"{source.label}: received a uuid without a URL, and {reason}; allowed: with its URL; send it again "
        "with that"
    )


async def _by_path(holds: _Holds, medium: _Medium, worker: str) -> tuple[_Hold, FetchedItem] | None:
    """Lets a worker open the file itself; None for a medium that is not a file."""
    file = medium.reference
    if file is None or not (file.is_upload or file.url[:5].lower() == "file:"):
        return None
    hold = holds.at(worker, medium.request_id, 1)
    [item] = await holds.fleet.send("video", worker, FetchMedia(hold.name, (file,)))
    return hold, item


async def _by_bytes(holds: _Holds, medium: _Medium, worker: str) -> tuple[_Hold, FetchedItem]:
    """Sends a worker the bytes from one that has them, which do not pass through this process."""
    async with medium.lock:
        home, held = await _place(holds, medium)
    hold = holds.at(worker, medium.request_id, 1)
    source, start = medium.source, 0
    while True:
        num_bytes, chunk = await holds.fleet.fetch("video", home, ReadFile(held, start))
        message = StoreFile(hold.name, source.kind, source.label, num_bytes, start)
        item = await holds.fleet.send("video", worker, message, chunk)
        del chunk
        if item is not None:
            return hold, item
        start += FILE_CHUNK_BYTES
        if start >= num_bytes:
            raise NotHeldError(f"{source.label} has not arrived whole; ask again")


def _is_data(reference: MediaReference) -> bool:
    return reference.url[:5].lower() == "data:"


def _is_known(reference: MediaReference) -> bool:
    """Returns whether it need not be fetched before its frames are needed."""
    return reference.known is not None and not _is_data(reference)


def _source(item: FetchedItem, reference: MediaReference, held: HeldItem) -> MediaSource:
    return MediaSource(item.facts, item.mm_hash, item.num_bytes, reference.label, held, reference.pixels)
