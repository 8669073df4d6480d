"""Decodes the images of requests before planning: one after another, in threads shared fairly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from serve_app.media.fair_threads import FairThreads
from serve_app.media.spool_files import ByteBudget
from serve_app.orchestration.request_planner import RequestPlanner
from serve_app.service import AnswerRequest
from stages.media import PlannedMedia

# For all requests: images resized to their planned sizes, held until the request ends.
_MAX_PIXEL_BYTES = 2 << 30


class ImageLoader:
    """Decodes one image of a request at a time. Used from one event loop."""

    def __init__(self, planner: RequestPlanner, num_threads: int) -> None:
        self._planner = planner
        self._threads = FairThreads("image", num_threads, 1)
        self.budget = ByteBudget(_MAX_PIXEL_BYTES, "images")

    @asynccontextmanager
    async def loaded(self, request: AnswerRequest) -> AsyncIterator[Mapping[int, PlannedMedia]]:
        """Yields the images of a request by their place among its media, held until the block is left.

        Raises MediaError, RequestError, OverloadedError.
        """
        self._planner.check_images(request)
        places = [place for place, source in enumerate(request.media) if source.kind == "image"]
        taken = 0
        try:
            images = dict(zip(places, await self._load(request, places), strict=True))
            taken = self._take(images)
            yield images
        finally:
            self.budget.give_back(taken)

    async def _load(self, request: AnswerRequest, places: list[int]) -> list[PlannedMedia]:
        tasks = [
            asyncio.ensure_future(
                self._threads.run(request.request_id, partial(self._planner.image, request.media[place]))
            )
            for place in places
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _take(self, images: Mapping[int, PlannedMedia]) -> int:
        num_bytes = sum(each.image.nbytes for each in images.values() if each.image is not None)
        self.budget.take(num_bytes)
        return num_bytes

    def close(self) -> None:
        self._threads.close()
