"""Headless Chromium, once for all tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from tests.serve_app.conftest import Front
from tests.serve_app.http.page_use import PATIENCE_MS

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# Set where Chromium was installed for these tests: then they may not be skipped.
REQUIRED = "EPD_REQUIRE_CHROMIUM"
# What a page keeps is that of its address, which is another test's too.
_FORGET = "localStorage.clear(); indexedDB.deleteDatabase('epd')"


@pytest.fixture(scope="module")  # its event loop runs in the test's thread: no other test may begin one
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        assert REQUIRED not in os.environ, f"{REQUIRED} is set, and there is no chromium on the PATH"
        pytest.skip("no chromium on the PATH")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=chromium,
            args=ARGUMENTS,
            viewport={"width": 1200, "height": 900},
        )
        yield context
        context.close()


@pytest.fixture
def open_page(browser: BrowserContext) -> Iterator[Callable[[Front], Page]]:
    """Opens the page of a front. It may not complain, and may ask nobody else."""
    complaints: list[str] = []
    pages: list[Page] = []

    def open_it(front: Front) -> Page:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.extend([message.text] * (message.type == "error")))
        page.on("request", lambda request: _check_origin(request, front, complaints))
        pages.append(page)
        page.goto(front.server.url)
        return page

    yield open_it
    for page in pages:
        page.evaluate(_FORGET)
        page.close()
    # What Chromium says of every refusal, and of a request that a test cuts.
    expected = ("the server responded with a status of", "net::ERR_CONNECTION_RESET")
    assert [one for one in complaints if not any(words in one for words in expected)] == []


def _check_origin(request: Any, front: Front, complaints: list[str]) -> None:
    if not request.url.startswith((front.server.url, "blob:", "data:")):
        complaints.append(f"asked {request.url}")
