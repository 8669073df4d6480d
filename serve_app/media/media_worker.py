"""Runs a media worker: fetches media, plans images, and reads frames, for the requests of several fronts.

    FetchMedia    a hold: files, facts, hashes        in the worker's event loop, work in fair threads
    PlanImages    pixels, kept with the hold          "
    ReadImage     units of a planned image            at once
    ReadFrames    groups of a video's stream          in threads that read
    CompressVideo which tokens of a video are kept    "; ReadPicture gives a small picture of a medium
    ReadFile      the bytes of a medium, in chunks    "; StoreFile takes them at another media worker
    ReleaseMedia  the hold and all of this is dropped; a fetch in progress ends

A hold belongs to the front, its owner, that asked for it, and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from epd import video
from epd.encoders import MediaPlan
from epd.errors import CancelledError, EPDError
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.serve_app.media.frame_reader import FrameReader, FrameStream, stream_here
from epd.serve_app.media.image_planner import ImagePlanner, picture_of
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_spool import FetchedFile, Hold, MediaSpool, SpoolLimits
from epd.serve_app.media_messages import (
    FILE_CHUNK_BYTES,
    CompressVideo,
    DecodeOrder,
    FetchMedia,
    NotHeldError,
    PlanImages,
    ReadFile,
    ReadFrames,
    ReadImage,
    ReadPicture,
    ReleaseMedia,
    StoreFile,
)
from epd.serve_app.messages import DropOwner, Message, WorkerLoad, owner_of
from epd.serve_app.service import FetchedItem, HeldItem, MediaReference
from epd.types import UInt8Array
from epd.video import FetchPolicy

logger = logging.getLogger(__name__)

# Names of released holds are kept for fetches that come after their release.
_MAX_RELEASED = 4096
_CLOSE_S = 5.0
_NUM_IMAGE_THREADS = 2
# The reply, and its bulk.
Answer = tuple[Any, UInt8Array | None]


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Configures a media worker.

    model: folder of the model that images are planned for
    fetch: where media may come from, and the maximum size of one
    spool_folder: where the spool is made; None is the system's temporary folder
    num_read_threads: groups of frames read at once
    pixels: of images and frames
    opens_early: whether the model's folder is opened before the first image comes
    """

    model: Path
    fetch: FetchPolicy = field(default_factory=lambda: FetchPolicy(max_bytes=512 << 20))
    limits: SpoolLimits = field(default_factory=SpoolLimits)
    spool_folder: Path | None = None
    num_read_threads: int = 4
    pixels: PixelSettings = AUTHORS_LIMITS
    opens_early: bool = True


class MediaWorker:
    """Handles the messages to one media worker. May be called from any thread."""

    def __init__(self, settings: MediaSettings, processes: MediaProcesses | None = None) -> None:
        """Starts without media. processes: read the media; by default this process does."""
        self._processes = processes
        self._reader = reader = processes.reader if processes else video.OwnReader()
        self._decoder = processes.decoder if processes else stream_here
        self._spool = MediaSpool(
            settings.fetch, parent=settings.spool_folder, limits=settings.limits, reader=reader
        )
        self._images = ImagePlanner(
            settings.model,
            reader,
            _NUM_IMAGE_THREADS,
            settings.pixels,
            opens_early=settings.opens_early,
        )
        self._frames = FrameReader(self._open)
        self._holds: dict[str, Hold] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._is_closed = False
        self._lock = threading.Lock()  # of the three above, and of each hold's streams
        self._readers = ThreadPoolExecutor(settings.num_read_threads, thread_name_prefix="media-read")
        self._loop = self._begun_loop()

    def _begun_loop(self) -> asyncio.AbstractEventLoop:
        """Begins the event loop, in a thread of its own."""
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="media", daemon=True)
        self._thread.start()
        return loop

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def handle(self, message: Message[Any], owner: str = "", bulk: UInt8Array | None = None) -> Answer:
        """Handles a message and returns its reply and bulk. Blocks; raises as `submit`'s future does."""
        return self.submit(message, owner, bulk).result()

    def submit(
        self, message: Message[Any], owner: str = "", bulk: UInt8Array | None = None
    ) -> Future[Answer]:
        """Begins to handle a message, without blocking.

        owner: the front that sent it, by default as ids say
        bulk: of the message, only for StoreFile

        The future raises EPDError, or any error of a bug; CancelledError if the hold or stream was released
        meanwhile. It is never cancelled itself.
        """
        if self._is_closed:
            return _failed(_released())
        match message:
            case FetchMedia():
                return self._begin(self._fetch(message, owner))
            case PlanImages():
                return self._begin(self._plan(message))
            case ReleaseMedia():
                return self._begin(self._release(message.hold))
            case DropOwner():
                return self._begin(self._drop_owner(message.owner))
            case StoreFile():
                return self._begin(self._store(message, owner, bulk))
            case ReadFile():
                return self._readers.submit(self._chunk, message)
            case ReadFrames():
                return self._readers.submit(self._read, message)
            case ReadPicture():
                return self._readers.submit(picture_of, message, self.file_of, self._reader, self._decoder)
            case CompressVideo():
                return self._readers.submit(self._images.compressed, message, self._open)
            case _:
                return self._at_once(message)

    async def answer(self, message: Message[Any], owner: str = "", bulk: UInt8Array | None = None) -> Answer:
        """Handles a message, completely even if the caller is cancelled. Raises as `submit`'s future does."""
        answered = asyncio.wrap_future(self.submit(message, owner, bulk))
        try:
            return await asyncio.shield(answered)
        except asyncio.CancelledError:
            answered.add_done_callback(_unheard)
            raise

    def drop_owner(self, owner: str) -> None:
        """Drops all holds of a front that is lost. Does not wait for it."""
        self._begin(self._drop_owner(owner))

    def close(self) -> None:
        """Drops everything; calls in progress raise CancelledError."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        ending.result(_CLOSE_S)
        self._end_loop()
        self._frames.close()
        self._readers.shutdown(wait=False)
        self._images.close()
        self._spool.close()

    # State

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    @property
    def num_streams(self) -> int:
        return len(self._frames)

    @property
    def num_pixel_bytes(self) -> int:
        """Returns the bytes of planned images."""
        return self._images.budget.num_taken

    @property
    def busy_s(self) -> float:
        """Returns seconds that the oldest read in progress has taken; 0 without any."""
        return self._frames.busy_s

    @property
    def spool(self) -> MediaSpool:
        return self._spool

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=self.num_streams,
            spooled_bytes=self._spool.budget.num_taken,
            num_downloads=self._spool.num_downloads,
            walls=None if self._processes is None else self._processes.walls,
        )

    def file_of(self, item: HeldItem) -> FetchedFile:
        """Returns the file of a medium. Raises UnavailableError for one that is not held here."""
        return self._files_of(self._held(item.hold))[item.item]

    def _held(self, name: str) -> Hold:
        hold = self._holds.get(name)
        if hold is None:
            raise NotHeldError("the media are not held by this worker; fetch them again")
        return hold

    def _files_of(self, hold: Hold) -> tuple[FetchedFile, ...]:
        if hold.files is None:
            raise NotHeldError("the media have not been fetched yet; wait for them")
        return hold.files

    # In the event loop

    def _begin(self, work: Coroutine[Any, Any, Any]) -> Future[Answer]:
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(_answered(work), self._loop)
        work.close()
        return _failed(_released())

    async def _fetch(self, message: FetchMedia, owner: str) -> tuple[FetchedItem, ...]:
        name = message.hold
        hold = self._new_hold(name, owner or owner_of(name))
        hold.client = next((each.client for each in message.references), "")
        fetching = self._spool.fetch(message.references, hold.folder)
        del message  # a data: URL holds a whole medium
        try:
            files: tuple[FetchedFile, ...] = await self._in_hold(hold, fetching)
        except BaseException:
            self._drop(hold)
            raise
        if self._holds.get(name) is not hold:
            raise _released()
        hold.files = files
        return tuple(each.found for each in files)

    def _new_hold(self, name: str, owner: str, *, is_copy: bool = False) -> Hold:
        with self._lock:
            if name in self._released or name in self._holds:
                raise CancelledError(f"the hold '{name}' is not new; fetch under another name")
            hold = self._holds[name] = Hold(owner, self._spool.new_folder(is_copy=is_copy))
            return hold

    async def _in_hold(self, hold: Hold, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits work that ends when the hold is released."""
        task = asyncio.ensure_future(work)
        hold.tasks[task] = None
        try:
            return await task
        finally:
            hold.tasks.pop(task, None)

    async def _plan(self, message: PlanImages) -> tuple[MediaPlan, ...]:
        hold = self._held(message.hold)
        files = self._files_of(hold)
        missing = [item for item in message.items if item not in hold.images]
        planning = self._images.planned(hold, [files[item] for item in missing], hold.client)
        images = dict(zip(missing, await self._in_hold(hold, planning), strict=True))
        if self._holds.get(message.hold) is not hold:
            self._images.give_back(images)
            raise _released()
        hold.images |= images
        return tuple(hold.images[item].plan for item in message.items)

    async def _store(self, message: StoreFile, owner: str, chunk: UInt8Array | None) -> FetchedItem | None:
        if chunk is None:
            raise NotHeldError("the bytes of the medium did not come with the message; send them again")
        if message.start == 0:
            hold = self._new_hold(message.hold, owner or owner_of(message.hold), is_copy=True)
        else:
            hold = self._held(message.hold)
        try:
            if hold.incoming is None:
                reference = MediaReference(message.kind, "", message.label)
                hold.incoming = self._spool.incoming(reference, message.num_bytes, hold.folder)
            if hold.incoming.num_written != message.start:
                raise NotHeldError("a part of the medium is missing; send it again from its start")
            file: FetchedFile | None = await self._in_hold(hold, self._spool.append(hold.incoming, chunk))
        except BaseException:
            self._drop(hold)
            raise
        if file is None:
            return None
        hold.files = (file,)
        return file.found

    async def _release(self, name: str) -> None:
        with self._lock:
            self._released[name] = None
            if len(self._released) > _MAX_RELEASED:
                self._released.popitem(last=False)
            hold = self._holds.get(name)
        if hold is not None:
            self._drop(hold)

    async def _end_all(self) -> None:
        for hold in list(self._holds.values()):
            self._drop(hold)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _drop_owner(self, owner: str) -> None:
        for name in [name for name, hold in self._holds.items() if hold.owner == owner]:
            await self._release(name)

    def _drop(self, hold: Hold) -> None:
        """Frees everything that a hold has. May be called again."""
        with self._lock:
            for name in [name for name, each in self._holds.items() if each is hold]:
                del self._holds[name]
            streams, hold.streams = hold.streams, set()
        for task in hold.tasks:
            task.cancel()
        for stream_id in streams:
            self._frames.close_stream(stream_id)
        self._images.give_back(hold.images)
        hold.images = {}
        hold.folder.close()

    # In threads

    def _read(self, message: ReadFrames) -> Answer:
        if message.order is not None:
            with self._lock:
                self._held(message.order.source.hold).streams.add(message.stream_id)
        return self._frames.handle(message)

    def _chunk(self, message: ReadFile) -> Answer:
        with self.file_of(message.source).open() as file:
            data = os.pread(file.descriptor, FILE_CHUNK_BYTES, message.start)
            return file.identity.num_bytes, np.frombuffer(data, np.uint8)

    def _open(self, order: DecodeOrder) -> FrameStream:
        file = self.file_of(order.source)
        span_s = order.times_s[-1] - order.times_s[0]
        pixels = file.facts.height * file.facts.width * max(1.0, span_s * file.facts.fps)
        return self._decoder(file.open(), file.label, order, pixels)

    # At once: these are quick, and every thread may be reading

    def _at_once(self, message: Message[Any]) -> Future[Answer]:
        done: Future[Answer] = Future()
        try:
            done.set_result(
                (0, self._pixels(message)) if isinstance(message, ReadImage) else self._frames.handle(message)
            )
        except Exception as error:  # noqa: BLE001 - the future raises it
            return _failed(error)
        return done

    def _pixels(self, message: ReadImage) -> UInt8Array:
        """Returns uint8 [N, h, w, 3], a view of the kept image."""
        image = self._held(message.source.hold).images.get(message.source.item)
        if image is None or image.image is None:
            raise NotHeldError("the image has not been planned here; plan it first")
        pixels: UInt8Array = image.image[message.start : message.stop].numpy()
        return pixels


def _unheard(answered: asyncio.Future[Answer]) -> None:
    """Takes the answer to a caller that has left. Only a bug is worth a line: asyncio would log any error."""
    error = None if answered.cancelled() else answered.exception()
    if error is not None and not isinstance(error, EPDError):
        logger.error("a message whose sender has left failed", exc_info=error)


async def _answered(work: Coroutine[Any, Any, Any]) -> Answer:
    try:
        return await work, None
    except asyncio.CancelledError:
        raise _released() from None


def _released() -> CancelledError:
    return CancelledError("the media were released while they were fetched; fetch them again")


def _failed(error: Exception) -> Future[Answer]:
    failed: Future[Answer] = Future()
    failed.set_exception(error)
    return failed
