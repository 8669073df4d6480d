"""Images of requests are decoded in turn: many of one client hold up nobody else's."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from encoders.adapter import Grid, MediaPlan
from encoders.prompt.chat import ChatMessage, ContentPart
from epd.errors import OverloadedError
from serve_app.orchestration.image_loading import ImageLoader
from serve_app.orchestration.request_planner import RequestPlanner
from serve_app.service import AnswerRequest, MediaSource
from stages.media import PlannedMedia

PLAN = MediaPlan("image", (8, 8), Grid(1, 2, 2), 1, 1)


class SlowPlanner(RequestPlanner):
    """Decodes an image once it is let."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_go_on = threading.Event()

    def check_images(self, request: AnswerRequest) -> None:
        """All are taken."""

    def image(self, source: MediaSource) -> PlannedMedia:
        self.begun.append(source.mm_hash)
        if source.mm_hash.startswith("slow"):
            assert self.may_go_on.wait(10)
        return PlannedMedia(source.path, PLAN, torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


def request(name: str, num_images: int) -> AnswerRequest:
    parts = (*(ContentPart("image") for _ in range(num_images)), ContentPart("text", "What?"))
    media = tuple(MediaSource("image", Path("x"), f"{name}{number}", 1) for number in range(num_images))
    return AnswerRequest(name, "m", (ChatMessage("user", parts),), media)


def test_sixteen_images_hold_up_no_other_request() -> None:
    async def run() -> list[str]:
        planner = SlowPlanner()
        loader = ImageLoader(planner, num_threads=2)

        async def load(name: str, num_images: int) -> list[int]:
            async with loader.loaded(request(name, num_images)) as images:
                return list(images)

        slow = asyncio.create_task(load("slow", 16))
        while not planner.begun:
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(load("quick", 3), 5) == [0, 1, 2]
        begun = list(planner.begun)
        planner.may_go_on.set()
        assert await asyncio.wait_for(slow, 5) == list(range(16))
        assert loader.budget.num_taken == 0
        return begun

    assert asyncio.run(run()) == ["slow0", "quick0", "quick1", "quick2"]


def test_memory_of_images_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.orchestration.image_loading._MAX_PIXEL_BYTES", 3 * 8 * 8 * 3)

    async def run() -> None:
        loader = ImageLoader(SlowPlanner(), num_threads=2)
        async with loader.loaded(request("a", 2)):
            assert loader.budget.num_taken == 2 * 8 * 8 * 3
            with pytest.raises(OverloadedError):
                async with loader.loaded(request("b", 2)):
                    pass
        assert loader.budget.num_taken == 0

    asyncio.run(run())
