"""Takes the pictures of the page that documents show, from a server with the embedded model.

    python -m tests.serve_app.http.page_pictures [FOLDER]

By default they go to docs/pictures. Look at them before you commit them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import av
from playwright.sync_api import Browser, Page, expect, sync_playwright

from epd.types import UInt8Array
from tests import ROOT
from tests.ports import free_port
from tests.serve_app.http.conftest import ARGUMENTS, PATIENCE_MS
from tests.serve_app.http.page_use import ANSWER, ask, drop, heic_image, open_fold

_FIRST, _COUNT = "Which shape appears first?", "How many shapes appear in the video?"


@contextmanager
def _server() -> Iterator[str]:
    """Yields the address of a server."""
    command = [sys.executable, "-m", "epd", "serve", "--local", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split(": ")[1].split("/v1")[0]
        process.terminate()


def _pixels(folder: Path) -> list[UInt8Array]:
    """Returns the frames of the first two seconds of a drawn video."""
    path = folder / "clip.mp4"
    words = ["demo-video", str(path), "--seconds", "4", "--seed", "5"]
    subprocess.run([sys.executable, "-m", "epd", *words], check=True, stdout=subprocess.DEVNULL)
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def _avi(path: Path, pixels: list[UInt8Array]) -> Path:
    """A video that Chromium does not show."""
    height, width = pixels[0].shape[:2]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25, width=width, height=height, pix_fmt="yuv420p")
        for each in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def _open(browser: Browser, url: str, width: int, height: int, *, is_dark: bool = False) -> Page:
    scheme = "dark" if is_dark else "light"
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    expect(page.get_by_text("ready, 0 requests")).to_be_visible()
    return page


def _answered(page: Page, number: int) -> None:
    expect(page.locator(".turn")).to_have_count(number)
    expect(page.locator(ANSWER)).not_to_be_empty()
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def main(out: Path) -> None:
    """Takes all pictures."""
    expect.set_options(timeout=PATIENCE_MS)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with TemporaryDirectory() as name, _server() as url, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = _open(browser, url, 1000, 620)
        page.screenshot(path=out / "page-first.png")

        page = _open(browser, url, 1000, 700, is_dark=True)
        open_fold(page, "Options")
        page.locator("#retention").fill("0.4")
        open_fold(page, "Options")
        open_fold(page, "Details")
        page.get_by_role("button", name=_COUNT).click()
        _answered(page, 1)
        page.get_by_title("play from 0:00").click()
        page.locator("#question").focus()
        page.screenshot(path=out / "page-dark.png", full_page=True)

        page = _open(browser, url, 390, 760)
        page.get_by_role("button", name=_FIRST).click()
        _answered(page, 1)
        ask(page, "What colour is the cross?")
        _answered(page, 2)
        page.locator("#question").scroll_into_view_if_needed()
        page.screenshot(path=out / "page-phone.png")

        pixels = _pixels(folder)
        page = _open(browser, url, 1000, 700, is_dark=True)
        drop(page, _avi(folder / "street.avi", pixels[:25]), "video/x-msvideo")
        drop(page, heic_image(folder / "garden.heic", pixels[-1]), "image/heic")
        expect(page.locator("#media li img")).to_have_count(2)
        page.locator("#address").fill("clip.mp4")
        page.keyboard.press("Enter")
        page.screenshot(path=out / "page-server.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
