"""Reads frames of single groups of videos on demand, decoded ahead of ordered requests, and decodes images.

groups of the item   |  0  |  1  |  2  |  3  |  4  |
requested               ^           ^     ^           the stream starts at the first and skips the others
requested again         ^                             groups behind the stream are decoded separately

Images are decoded at their planned sizes, and clips of sound, in threads that requests share fairly. Small
pictures of media are drawn for people, where a browser cannot show the format.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from epd import video
from epd.encoders import Adapter, MediaPlan, load_adapter
from epd.errors import CancelledError, MediaError, RequestError, UnavailableError
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.serve_app.fair_threads import FairThreads
from epd.serve_app.media.media_spool import FetchedFile
from epd.serve_app.media.spool_files import ByteBudget
from epd.serve_app.media_messages import CloseStream, CompressVideo, DecodeOrder, ReadFrames, ReadPicture
from epd.serve_app.messages import Message
from epd.serve_app.service import HeldItem
from epd.stages.media import PlannedMedia, audio_part, plan_clip, plan_pixels
from epd.types import Float32Array, Frames, UInt8Array

# Names of closed streams are kept for reads that were sent before the close and run after it.
_MAX_CLOSED = 4096


class FrameStream(Protocol):
    """Provides the decoded groups of one video, in order."""

    def read(self) -> Frames:
        """Returns the next group. Blocks until it is decoded. Raises MediaError, CancelledError."""
        ...

    def close(self) -> None:
        """Stops decoding, and any waiting `read`. Does not block."""
        ...


# Starts decoding. May block. Raises MediaError.
Opener = Callable[[DecodeOrder], FrameStream]


@dataclass(slots=True)
class _Stream:
    """One item of a request.

    order: of all groups
    next_index: of the group that comes next from `groups`, which is None until opened
    lock: held by the thread that opens and reads
    """

    order: DecodeOrder
    next_index: int
    groups: FrameStream | None = None
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FrameReader:
    """Reads streams of any number of items, each one group at a time. May be used by several threads."""

    def __init__(self, opener: Opener) -> None:
        """Starts without streams."""
        self._open = opener
        self._streams: dict[str, _Stream] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._began_s: dict[int, float] = {}  # of reads in progress, by thread

    def handle(self, message: Message[Any]) -> tuple[int | None, UInt8Array | None]:
        """Returns the reply, and its bulk for ReadFrames. Blocks until decoded. Raises MediaError."""
        match message:
            case ReadFrames():
                frames = self._timed(message)
                return frames.num_substituted, frames.data
            case CloseStream():
                self.close_stream(message.stream_id)
                return None, None
            case _:
                raise TypeError(f"a video decoder takes no {type(message).__name__}")

    def _timed(self, message: ReadFrames) -> Frames:
        thread = threading.get_ident()
        self._began_s[thread] = time.monotonic()
        try:
            return self._read(message)
        finally:
            del self._began_s[thread]

    @property
    def busy_s(self) -> float:
        """Returns seconds that the oldest read in progress has taken; 0 without any."""
        return max(0.0, time.monotonic() - min(list(self._began_s.values()), default=math.inf))

    def _read(self, message: ReadFrames) -> Frames:
        stream = self._stream_of(message)
        with stream.lock:
            if message.index < stream.next_index:
                return self._alone(stream.order, message.index)
            groups = stream.groups or self._opened(stream, message.stream_id)
            while True:
                frames = groups.read()
                stream.next_index += 1
                if stream.next_index > message.index:
                    return frames

    def _stream_of(self, message: ReadFrames) -> _Stream:
        with self._lock:
            if message.stream_id in self._closed:
                raise _closed(message.stream_id)
            if message.stream_id not in self._streams:
                if message.order is None:
                    raise UnavailableError(f"stream '{message.stream_id}' is not open here; open another")
                self._streams[message.stream_id] = _Stream(message.order, message.index)
            return self._streams[message.stream_id]

    def _opened(self, stream: _Stream, stream_id: str) -> FrameStream:
        """Opens the groups of a stream, which may be closed meanwhile."""
        groups = self._open(stream.order.groups(stream.next_index))
        with self._lock:
            if not stream.is_closed:
                stream.groups = groups
                return groups
        groups.close()
        raise _closed(stream_id)

    def _alone(self, order: DecodeOrder, index: int) -> Frames:
        """Decodes one group that is behind the stream."""
        groups = self._open(order.groups(index, index + 1))
        try:
            return groups.read()
        finally:
            groups.close()

    def close_stream(self, stream_id: str) -> None:
        """Closes a stream without blocking on the threads that read."""
        with self._lock:
            stream = self._streams.pop(stream_id, None)
            self._closed[stream_id] = None
            if len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)
            if stream is None:
                return
            stream.is_closed = True
            groups = stream.groups
        if groups is not None:
            groups.close()

    def close(self) -> None:
        """Stops all decoding."""
        for stream_id in list(self._streams):
            self.close_stream(stream_id)

    def __len__(self) -> int:
        """Returns the number of open streams."""
        return len(self._streams)


def _closed(stream_id: str) -> CancelledError:
    return CancelledError(f"stream '{stream_id}' is closed; open another")


# Starts decoding an open file, which it takes over; name: of the source in errors. Raises MediaError.
Decoder = Callable[[video.OpenFile, str, DecodeOrder], FrameStream]


class _StreamHere:
    """Decodes in threads of this process. Raises MediaError."""

    def __init__(self, file: video.OpenFile, name: str, order: DecodeOrder) -> None:
        self._file = file
        try:
            media = video.Media(file.source, name)
            self._groups = video.stream(media, order.times_s, order.size, group_sizes=order.group_sizes)
        except BaseException:
            file.close()
            raise

    def read(self) -> Frames:
        return next(self._groups).frames

    def close(self) -> None:
        self._groups.close()
        self._file.close()


def stream_here(file: video.OpenFile, name: str, order: DecodeOrder) -> FrameStream:
    """Decodes in threads of this process. Raises MediaError."""
    return _StreamHere(file, name, order)


def child_decoder(children: video.MediaChildren) -> Decoder:
    """Returns a decoder by media children: see `video.MediaChildren`."""

    def started(file: video.OpenFile, name: str, order: DecodeOrder) -> FrameStream:
        return video.ChildStream(children, file, name, order.times_s, order.size, order.group_sizes)

    return started


# For all requests: images resized to their planned sizes and samples of clips, held until they are released.
_MAX_PIXEL_BYTES = 2 << 30
_COMPRESSED_TOGETHER = 8  # frames


class ImagePlanner:
    """Decodes one image or clip of a request at a time. Used from one event loop."""

    def __init__(
        self,
        model: Path,
        reader: video.MediaReader,
        num_threads: int,
        pixels: PixelSettings = AUTHORS_LIMITS,
        *,
        opens_early: bool = True,
    ) -> None:
        """Opens the model's folder in the background; an error is raised when the first image is planned.

        opens_early: whether now, instead of with the first image
        """
        self._reader = reader
        self._threads = FairThreads("image", num_threads, 1)
        self.budget = ByteBudget(_MAX_PIXEL_BYTES, "images")
        self._load = partial(load_adapter, model, pixels=pixels)
        if opens_early:
            _ = self._adapter

    @cached_property
    def _adapter(self) -> Future[Adapter]:
        opening = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        adapter = opening.submit(self._load)
        opening.shutdown(wait=False)
        return adapter

    async def planned(
        self, owner: object, files: Sequence[FetchedFile], client: str = ""
    ) -> list[PlannedMedia]:
        """Returns images with pixels, and clips with samples, which the caller gives back by `give_back`.

        owner: the request. client: whose it is. Raises MediaError, OverloadedError.
        """
        tasks = [
            asyncio.ensure_future(self._threads.run(owner, partial(self._planned, file), client=client))
            for file in files
        ]
        try:
            images = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self.budget.take(num_bytes(images))
        return images

    def give_back(self, images: Mapping[int, PlannedMedia]) -> None:
        """Notes that the images are dropped."""
        self.budget.give_back(num_bytes(list(images.values())))

    def _planned(self, file: FetchedFile) -> PlannedMedia:
        with file.open() as opened:
            if file.facts.kind == "audio":
                samples = self._samples(file, opened)
            else:
                pixels = self._reader.load_image(opened, file.label)
        adapter = self._adapter.result()
        with _labelled(file):
            if file.facts.kind == "audio":
                return plan_clip(adapter, file.path, samples, file.start_s)
            return plan_pixels(adapter, file.path, pixels, file.pixels)

    def _samples(self, file: FetchedFile, opened: video.OpenFile) -> Float32Array:
        with _labelled(file):
            part = audio_part(self._adapter.result(), file.start_s, file.end_s)
        return self._reader.load_audio(opened, file.label, part)

    def compressed(self, message: CompressVideo, opener: Opener) -> tuple[MediaPlan, None]:
        """Completes the plan of a video by its frames, some at a time. Blocks. Raises MediaError."""
        plan, adapter = message.plan, self._adapter.result()
        starts = range(0, plan.num_frames, _COMPRESSED_TOGETHER)
        sizes = tuple(min(_COMPRESSED_TOGETHER, plan.num_frames - start) for start in starts)
        with closing(opener(DecodeOrder(message.source, plan.times_s, sizes, plan.size))) as frames:
            return adapter.compressed(plan, (torch.from_numpy(frames.read().data) for _ in sizes)), None

    def close(self) -> None:
        self._threads.close()


@contextmanager
def _labelled(file: FetchedFile) -> Iterator[None]:
    """Names the medium in errors about it."""
    try:
        yield
    except MediaError as error:
        raise type(error)(f"{file.label}: {error}") from error


def num_bytes(images: Sequence[PlannedMedia]) -> int:
    """Returns the bytes of the pixels of images, and of the samples of clips."""
    return sum(each.image.nbytes for each in images if each.image is not None)


def picture_of(
    wanted: ReadPicture,
    file_of: Callable[[HeldItem], FetchedFile],
    reader: video.MediaReader,
    decoder: Decoder,
) -> tuple[int, UInt8Array]:
    """Returns the bytes of a JPEG of an image, or of a video's first frame, upright, and uint8 [N]. Blocks.

    Raises MediaError for what cannot be decoded, RequestError for sound.
    """
    file = file_of(wanted.source)
    if file.facts.kind == "audio":
        raise RequestError(
            f"{file.label} is sound, which has no picture; allowed: images and videos; play it instead"
        )
    if file.facts.kind == "image":
        with file.open() as opened:
            pixels = reader.load_image(opened, file.label)
    else:
        pixels = _first_frame(file, wanted, decoder)
    picture = Image.fromarray(pixels)
    picture.thumbnail((wanted.max_side, wanted.max_side))
    out = io.BytesIO()
    picture.save(out, "JPEG")
    jpeg = np.frombuffer(out.getvalue(), np.uint8)
    return len(jpeg), jpeg


def _first_frame(file: FetchedFile, wanted: ReadPicture, decoder: Decoder) -> UInt8Array:
    """Returns the frame at 0 s, small: uint8 [h, w, 3]."""
    height, width = file.facts.height, file.facts.width
    scale = min(1.0, wanted.max_side / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    order = DecodeOrder(wanted.source, (0.0,), (1,), size)
    with closing(decoder(file.open(), file.label, order)) as frames:
        pixels: UInt8Array = frames.read().data[0]
        return pixels
