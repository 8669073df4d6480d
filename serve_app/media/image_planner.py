"""Decodes images and resizes them to their planned sizes, in threads that requests share fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import video
from encoders import load_adapter
from epd.errors import MediaError
from serve_app.media.fair_threads import FairThreads
from serve_app.media.media_spool import FetchedFile
from serve_app.media.spool_files import ByteBudget
from stages.media import PlannedMedia, plan_pixels

# For all requests: images resized to their planned sizes, held until they are released.
_MAX_PIXEL_BYTES = 2 << 30


class ImagePlanner:
    """Decodes one image of a request at a time. Used from one event loop."""

    def __init__(self, model: Path, reader: video.MediaReader, num_threads: int) -> None:
        """Opens the model's folder in the background; an error is raised when the first image is planned."""
        self._reader = reader
        self._threads = FairThreads("image", num_threads, 1)
        self.budget = ByteBudget(_MAX_PIXEL_BYTES, "images")
        opening = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._adapter = opening.submit(load_adapter, model)
        opening.shutdown(wait=False)

    async def planned(self, owner: object, files: Sequence[FetchedFile]) -> list[PlannedMedia]:
        """Returns the images with their pixels, which the caller gives back by `give_back`.

        owner: the request. Raises MediaError, OverloadedError.
        """
        tasks = [
            asyncio.ensure_future(self._threads.run(owner, partial(self._image, file))) for file in files
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

    def _image(self, file: FetchedFile) -> PlannedMedia:
        with file.open() as opened:
            pixels = self._reader.load_image(opened, file.label)
        try:
            return plan_pixels(self._adapter.result(), file.path, pixels, file.pixels)
        except MediaError as error:
            raise type(error)(f"{file.label}: {error}") from error

    def close(self) -> None:
        self._threads.close()


def num_bytes(images: Sequence[PlannedMedia]) -> int:
    """Returns the bytes of the images' pixels."""
    return sum(each.image.nbytes for each in images if each.image is not None)
