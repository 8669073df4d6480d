"""What tests of the page do with it, and services that say what they looked at."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
from playwright.sync_api import Page, expect

from epd.serve_app.service import AnswerItem, AnswerRequest, StageSpan
from epd.types import UInt8Array
from tests.serve_app.fakes import WORDS, FakeService
from tests.video.pictures import Item, box, coded, heif, ispe

TEXT = "".join(WORDS)
PATIENCE_MS = 120_000  # on a machine that may be busy
# Of the newest question.
ASKED, ANSWER, ERROR = (f".turn:last-child {part}" for part in (".asked", ".text", ".error"))
_DROP = """([base64, name, type]) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name, {type}));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const event = new DragEvent(kind, {dataTransfer, bubbles: true, cancelable: true});
    document.getElementById("drop").dispatchEvent(event);
  }
}"""


def drop(page: Page, path: Path, media_type: str) -> None:
    encoded = base64.b64encode(path.read_bytes()).decode()
    page.evaluate(_DROP, [encoded, path.name, media_type])


def ask(page: Page, question: str) -> None:
    page.get_by_role("textbox", name="question").fill(question)
    page.get_by_role("button", name="Ask").click()


def open_fold(page: Page, name: str) -> None:
    page.locator("summary").filter(has_text=name).click()


def sent_bytes(page: Page) -> list[int]:
    """The sizes of the questions to come."""
    sizes: list[int] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sizes.append(len(request.post_data_buffer or b""))

    page.on("request", note)
    return sizes


def eventually(page: Page, condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds, while the page goes on."""
    for _ in range(PATIENCE_MS // 50):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("waited in vain")


def until_kept(page: Page, num_turns: int) -> None:
    """Returns once the browser has so many turns of the conversation, which a reload then shows."""
    count = "async () => (await (await import('/page/kept.js')).kept()).length"
    eventually(page, lambda: bool(page.evaluate(count) == num_turns))


def asked(page: Page, question: str, *, answer: str = TEXT) -> None:
    """Asks, and waits until it is answered."""
    ask(page, question)
    expect(page.locator(ASKED)).to_contain_text(question)
    expect(page.locator(ANSWER)).to_have_text(answer)
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


class LookingService(FakeService):
    """Which says what it looked at in the first medium."""

    times_s: tuple[float, ...] = (0.25, 1.75, 3.5)

    async def _items(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        now_s = time.time()
        yield StageSpan("probe", "media", now_s, now_s, 0, frame_times_s=self.times_s)
        async for item in super()._items(request):
            yield item


class GroupedService(LookingService):
    """Which looks at two frames in each group."""

    async def _items(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        async for item in super()._items(request):
            is_group = isinstance(item, StageSpan) and item.stage == "encode"
            yield replace(item, num_frames=2) if is_group else item  # type: ignore[type-var]


def vp9_video(path: Path) -> Path:
    """Four seconds that grow lighter, in a codec that every build of Chromium can play."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libvpx-vp9", rate=4, width=64, height=48, pix_fmt="yuv420p")
        for number in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 16 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def avi_video(path: Path) -> Path:
    """Ten frames of MPEG-4 in an AVI, which Chromium does not show: red, and then blue."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=5, width=160, height=90, pix_fmt="yuv420p")
        for number in range(10):
            colour = (0, 0, 200) if number else (200, 0, 0)
            frame = av.VideoFrame.from_ndarray(np.full((90, 160, 3), colour, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def heic_image(path: Path, pixels: UInt8Array) -> Path:
    """A picture in HEVC, which Chromium does not show."""
    configuration, data = coded(pixels, "libx265", "yuv444p")
    height, width = pixels.shape[:2]
    path.write_bytes(heif([Item(b"hvc1", data, (ispe(width, height), box(b"hvcC", configuration)))]))
    return path
