"""Decodes images at their planned sizes, and clips of sound, in threads that requests share fairly.

Draws small pictures of media for people, where a browser cannot show the format.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from epd import video
from epd.encoders import Adapter, MediaPlan, load_adapter
from epd.errors import MediaError, RequestError
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.serve_app.fair_threads import FairThreads
from epd.serve_app.media.frame_reader import Decoder, Opener
from epd.serve_app.media.media_spool import FetchedFile
from epd.serve_app.media.spool_files import ByteBudget
from epd.serve_app.media_messages import CompressVideo, DecodeOrder, ReadPicture
from epd.serve_app.service import HeldItem
from epd.stages.media import PlannedMedia, audio_part, plan_clip, plan_pixels
from epd.types import Float32Array, UInt8Array

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
    with closing(decoder(file.open(), file.label, order, float(height * width))) as frames:
        pixels: UInt8Array = frames.read().data[0]
        return pixels
