"""The page as a tool, in Chromium: samples, what is kept, code, parts of videos, options, uploads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, Route, expect

from epd.encoders import FrameSampling
from epd.errors import OverloadedError
from epd.serve_app.files.settings import FileSettings
from epd.video import FetchPolicy
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.http.page_use import (
    ANSWER,
    ERROR,
    TEXT,
    GroupedService,
    LookingService,
    ask,
    asked,
    avi_video,
    drop,
    eventually,
    heic_image,
    open_fold,
    sent_bytes,
    until_kept,
    vp9_video,
)

OpenPage = Callable[[Front], Page]
MB = 1 << 20


def test_the_first_screen_has_a_sample_and_questions(front: Front, open_page: OpenPage) -> None:
    page = open_page(front)
    expect(page.locator(".example")).to_have_count(3)
    page.get_by_role("button", name="Which shape appears first?").click()
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    expect(page.locator("#first")).to_be_hidden()
    request = front.service.requests[0]
    assert [source.kind for source in request.media] == ["video"]
    assert front.service.files_seen[0] == [front.http.get("/page/sample.mp4").content]
    assert request.messages[0].parts[-1].text == "Which shape appears first?"


def test_the_page_says_what_the_model_knows(front: Front, open_page: OpenPage) -> None:
    def with_card(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["knows"] = "the shapes that `epd demo` draws, and nothing else"
        route.fulfill(json=models)

    page = open_page(front)
    expect(page.locator("#service")).to_contain_text("ready")
    expect(page.locator("#knows")).to_be_hidden()
    page.route("**/v1/models", with_card)
    page.reload()
    knows = "shapes-vl: the shapes that epd demo draws, and nothing else."
    expect(page.locator("#knows")).to_contain_text(knows)
    expect(page.locator("#knows code").first).to_have_text("epd demo")
    expect(page.locator("#knows")).to_contain_text("epd serve Qwen/")
    expect(page.locator("#knows")).to_be_visible()
    page.get_by_label("Model").select_option("other/vl")
    expect(page.locator("#knows")).to_be_hidden()


def test_a_conversation_outlives_a_reload(front: Front, open_page: OpenPage, media: dict[str, Path]) -> None:
    page = open_page(front)
    drop(page, media["video"], "video/mp4")
    asked(page, "First?")
    until_kept(page, 1)
    page.reload()
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    expect(page.locator(".facts")).to_contain_text("48 → 24")
    expect(page.locator("#media li")).to_have_count(1)
    asked(page, "Second?")
    messages = front.service.requests[1].messages
    texts = [[part.text or part.kind for part in each.parts] for each in messages]
    assert texts == [["video", "First?"], [TEXT], ["Second?"]]
    page.get_by_role("button", name="Start over").click()
    until_kept(page, 0)
    page.reload()
    expect(page.locator("#service")).to_contain_text("ready")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#first")).to_be_visible()


MARKDOWN = """# Title

Some *words*, **strong `code`** and 2 * 3 * 4.
- one <b>
- [a link](https://docs.example/a)

1. first

| a | b |
|---|---|
| c | d |

[none](javascript://x%0aalert)
```python
x = "<i>" * 2
```
"""


def test_markdown_is_shown_and_can_be_copied(run_front: Callable[..., Front], open_page: OpenPage) -> None:
    page = open_page(run_front(FakeService(words=tuple(MARKDOWN))))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "What?")
    expect(page.get_by_role("button", name="Copy", exact=True).first).to_be_visible()
    answer = page.locator(ANSWER)
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("em")).to_have_text("words")
    expect(answer.locator("strong code")).to_have_text("code")
    expect(answer.locator("ul li")).to_have_text(["one <b>", "a link"])
    expect(answer.locator("ol li")).to_have_text("first")
    expect(answer.locator("td")).to_have_text(["c", "d"])
    expect(answer.locator("pre")).to_have_text('x = "<i>" * 2')
    expect(answer.locator("a")).to_have_count(1)
    expect(answer.locator("a")).to_have_attribute("href", "https://docs.example/a")
    expect(answer).to_contain_text("2 * 3 * 4.")
    expect(answer).to_contain_text("[none](javascript://x%0aalert)")
    page.get_by_role("button", name="Copy", exact=True).first.click()
    eventually(page, lambda: bool(page.evaluate("navigator.clipboard.readText()") == MARKDOWN))


QUESTION = 'What\'s "in" `it` for $5 \\n?'


@pytest.mark.parametrize("kind", ["curl", "Python"])
def test_the_same_request_from_a_program(
    kind: str, front: Front, open_page: OpenPage, media: dict[str, Path], tmp_path: Path
) -> None:
    """What the page shows runs, beside the file, and asks the same."""
    page = open_page(front)
    name = "it's a $clip.mp4"
    (tmp_path / name).write_bytes(media["video"].read_bytes())
    drop(page, tmp_path / name, "video/mp4")
    open_fold(page, "Options")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Frames per second").fill("2")
    asked(page, "First?")
    asked(page, QUESTION)
    page.locator(".turn").last.get_by_role("button", name="As curl or Python").click()
    page.locator("#code").get_by_role("button", name=kind).click()
    code = page.locator("#code-text").text_content() or ""
    command = ["bash", "-c", code] if kind == "curl" else [sys.executable, "-c", code]
    environment = {**os.environ, "EPD_API_KEY": "none", "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert (
        json.loads(ran.stdout)["choices"][0]["message"]["content"] if kind == "curl" else ran.stdout.strip()
    ) == TEXT
    by_page, by_program = front.service.requests[1:]
    assert by_program.messages == by_page.messages
    assert by_program.sampling == by_page.sampling
    assert by_program.frame_sampling == by_page.frame_sampling == FrameSampling(fps=2)
    assert front.service.files_seen[2] == front.service.files_seen[1]


def test_a_part_of_a_video_is_asked_about(front: Front, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(front)
    expect(page.locator("#part")).to_be_hidden()
    drop(page, vp9_video(tmp_path / "clip.webm"), "video/webm")
    expect(page.locator("#part-shown")).to_have_text("all of it, 0:00 to 0:04")
    asked(page, "All?")
    page.get_by_role("slider", name="from").fill("1")
    page.get_by_role("slider", name="to").fill("2.5")
    expect(page.locator("#part-shown")).to_have_text("0:01 to 0:03")
    asked(page, "A part?")
    page.get_by_role("slider", name="from").fill("3.5")  # no handle passes the other
    asked(page, "And now?")
    found = [(each.frame_sampling.start_s, each.frame_sampling.end_s) for each in front.service.requests]
    assert found == [(0.0, None), (1.0, 2.5), (2.4, 2.5)]


def test_frames_are_one_row_that_seeks_a_player(
    run_front: Callable[..., Front], open_page: OpenPage, tmp_path: Path
) -> None:
    service = LookingService()
    service.times_s = tuple(number / 8 for number in range(30))
    page = open_page(run_front(service))
    page.set_viewport_size({"width": 700, "height": 800})
    drop(page, vp9_video(tmp_path / "clip.webm"), "video/webm")
    ask(page, "What?")
    frames = page.locator("#looked-at li button")
    expect(frames).to_have_count(30)
    tops = frames.evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    expect(page.locator("#player")).to_be_hidden()
    frames.nth(16).click()
    expect(page.locator("#player")).to_have_js_property("currentTime", 2)
    frames.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#player")).to_have_js_property("currentTime", 0.125)
    assert frames.evaluate_all("all => all.filter((one) => one.tabIndex === 0).length") == 1
    page.set_viewport_size({"width": 1200, "height": 900})


def test_the_timeline_seeks_the_player(
    run_front: Callable[..., Front], open_page: OpenPage, tmp_path: Path
) -> None:
    """A group's box, to the time of its first frame: two frames a group, the third begins with the fifth."""
    service = GroupedService()
    service.times_s = tuple(number / 2 for number in range(6))
    page = open_page(run_front(service))
    drop(page, vp9_video(tmp_path / "clip.webm"), "video/webm")
    open_fold(page, "Details")
    asked(page, "What?")
    expect(page.locator("#looked-at li")).to_have_count(6)
    expect(page.locator("#player")).to_be_hidden()
    page.locator("#timeline rect.encode", has_text="group 2 of").dispatch_event("click")
    expect(page.locator("#player")).to_have_js_property("currentTime", 2)
    page.locator("#timeline rect.decode_video", has_text="group 1 of").dispatch_event("click")
    expect(page.locator("#player")).to_have_js_property("currentTime", 1)


_COLOUR = """one => {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  context.drawImage(one, 0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => Math.round(value / 100));
}"""


def test_what_the_browser_cannot_show_comes_from_the_server(
    front: Front, open_page: OpenPage, tmp_path: Path
) -> None:
    """A HEIC and an AVI, which are sent once: for their pictures."""
    page = open_page(front)
    sizes = sent_bytes(page)
    drop(page, heic_image(tmp_path / "a.heic", np.full((64, 96, 3), (0, 200, 0), np.uint8)), "")
    drop(page, avi_video(tmp_path / "a.avi"), "video/x-msvideo")
    pictures = page.locator("#media img.from-server")
    expect(pictures).to_have_count(2)
    expect(pictures.first).to_have_js_property("complete", True)
    expect(pictures.last).to_have_js_property("complete", True)
    assert [shown.evaluate(_COLOUR) for shown in pictures.all()] == [[0, 2, 0], [2, 0, 0]]
    asked(page, "What are they?")
    assert sizes[0] < 2000
    assert [source.kind for source in front.service.requests[0].media] == ["image", "video"]
    (tmp_path / "b.avi").write_bytes(b"RIFF and no more")
    drop(page, tmp_path / "b.avi", "video/x-msvideo")
    expect(page.locator("#media .blank")).to_have_text("video, no preview")
    expect(page.locator("#media .blank")).to_have_attribute("title", re.compile("cannot be opened"))


def test_a_url_and_a_path_on_the_server_are_media(
    run_front: Callable[..., Front], open_page: OpenPage, media: dict[str, Path], tmp_path: Path
) -> None:
    """Enter in their field adds them, and asks nothing. What the server does not give is said at once."""
    folder = tmp_path / "films"
    folder.mkdir()
    (folder / "50% of a clip #1.mp4").write_bytes(media["video"].read_bytes())
    front = run_front(fetch=FetchPolicy(media_folder=folder))
    page = open_page(front)
    field = page.get_by_role("textbox", name="URL, or path on the server")
    page.get_by_role("textbox", name="question").fill("What is it?")
    field.fill(str(folder / "50% of a clip #1.mp4"))
    field.press("Enter")
    expect(field).to_have_value("")
    expect(page.locator("#media img.from-server")).to_have_count(1)
    assert front.service.requests == []
    asked(page, "What is it?")
    assert front.service.files_seen == [[media["video"].read_bytes()]]
    until_kept(page, 1)
    page.reload()  # its name is kept
    expect(page.locator("#media img.from-server")).to_have_count(1)
    asked(page, "And now?")
    assert front.service.files_seen[1] == front.service.files_seen[0]
    field.fill("film.mp4")
    field.press("Enter")
    expect(page.locator("#refused")).to_contain_text("film.mp4 is neither a URL nor a path on the server")
    field.fill(str(tmp_path / "other.png"))
    page.get_by_role("button", name="Start over").click()  # leaving the field adds it too
    expect(page.locator("#media li")).to_have_count(2)
    expect(page.locator("#refused")).to_contain_text("allowed")


def test_a_number_that_cannot_be_is_shown_where_it_stands(front: Front, open_page: OpenPage) -> None:
    """Though the fold that it stands in was closed since."""
    page = open_page(front)
    open_fold(page, "Options")
    page.get_by_label("Temperature").fill("9")
    open_fold(page, "Options")
    ask(page, "What?")
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert front.service.requests == []
    page.get_by_label("Temperature").fill("1")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(ANSWER)).to_have_text(TEXT)


def test_sound_is_a_medium(front: Front, open_page: OpenPage, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16000))
    page = open_page(front)
    drop(page, tmp_path / "a.wav", "audio/wav")
    asked(page, "What is heard?")
    assert [source.kind for source in front.service.requests[0].media] == ["audio"]


def test_more_options_and_the_values_that_hold_without(front: Front, open_page: OpenPage) -> None:
    page = open_page(front)
    open_fold(page, "Options")
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0")
    expect(page.get_by_label("Share of visual tokens kept")).to_have_attribute("placeholder", "1")
    expect(page.get_by_label("chosen by").locator("option").first).to_have_text("balanced, the server's")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("chosen by").select_option("uniform")
    page.get_by_label("JSON schema of the answer").fill("{")
    ask(page, "What?")
    expect(page.locator(ERROR)).to_contain_text("The schema in Options is no JSON")
    assert front.service.requests == []
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    page.get_by_role("button", name="Ask").click()  # the question is still there
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    request = front.service.requests[0]
    assert (request.messages[0].role, request.messages[0].parts[0].text) == ("system", "Be brief.")
    assert (request.sampling.seed, request.reduction.method) == (11, "uniform")
    assert "object" in request.sampling.grammar or request.sampling.grammar


def test_an_error_stands_beside_what_caused_it(
    run_front: Callable[..., Front], open_page: OpenPage, tmp_path: Path
) -> None:
    front = run_front(FakeService(error=OverloadedError("busy, retry later")))
    page = open_page(front)
    (tmp_path / "notes.txt").write_text("x")
    drop(page, tmp_path / "notes.txt", "text/plain")
    expect(page.locator("#refused li")).to_have_count(1)
    ask(page, "First?")
    expect(page.locator(ERROR)).to_have_text("busy, retry later")
    expect(page.locator("#refused li")).to_have_count(0)
    expect(page.locator("#question")).to_have_value("First?")
    front.service.error = None
    asked(page, "Second?")
    expect(page.locator(ERROR)).to_have_count(0)
    expect(page.locator(".turn").first).to_contain_text("busy, retry later")


def test_details_are_folded_until_they_are_wanted(front: Front, open_page: OpenPage) -> None:
    page = open_page(front)
    expect(page.locator("#workers")).to_be_hidden()
    open_fold(page, "Details")
    expect(page.locator(".worker").first).to_be_visible()
    page.reload()
    expect(page.locator(".worker").first).to_be_visible()
    ask(page, "What?")
    expect(page.locator("#timeline rect")).to_have_count(9)
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    page.wait_for_function(NO_LABEL_IS_CUT)  # in the last drawing, which follows a moment later
    expect(page.locator(".legend .stage")).to_have_count(5)


# ---- Large files


def padded(source: Path, path: Path, num_bytes: int) -> Path:
    """A video with a free box of zeros behind it, which no reader minds."""
    head = source.read_bytes()
    rest = num_bytes - len(head)
    path.write_bytes(head + rest.to_bytes(4, "big") + b"free" + bytes(rest - 8))
    return path


@pytest.fixture
def keeping(run_front: Callable[..., Front], tmp_path: Path) -> Front:
    """A front that takes files in parts of a mebibyte, up to 32."""
    files = FileSettings(tmp_path / "kept", max_part_bytes=MB, max_upload_bytes=32 * MB)
    return run_front(files=files, fetch=FetchPolicy(uploads_folder=files.files_folder))


NO_LABEL_IS_CUT = """() => {
  const place = document.querySelector("#timeline");
  const right = place.getBoundingClientRect().right;
  const labels = [...place.querySelectorAll("text")];
  return labels.length > 0 && labels.every((one) => one.getBoundingClientRect().right <= right);
}"""


def parts_in(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.suffix.startswith(".part")]


class Held:
    """Lets some parts through; the next one waits, so that a test can press a button meanwhile.

    is_open: all go through. num_sent: parts, with the one that waits.
    """

    def __init__(self, page: Page, num_passed: int) -> None:
        self._num_passed = num_passed
        self.num_sent = 0
        self.is_open = False
        page.route("**/parts", self._take)

    def _take(self, route: Route) -> None:
        self.num_sent += 1
        if self.is_open or self.num_sent <= self._num_passed:
            route.continue_()

    @property
    def is_waiting(self) -> bool:
        return self.num_sent > self._num_passed


def test_a_large_file_is_sent_in_parts_that_can_pause(
    keeping: Front, open_page: OpenPage, media: dict[str, Path], tmp_path: Path
) -> None:
    page = open_page(keeping)
    expect(page.locator("#service")).to_contain_text("ready")
    held = Held(page, 3)
    large = padded(media["video"], tmp_path / "large.mp4", 10 * MB)
    page.locator("#files").set_input_files(large)
    eventually(page, lambda: held.is_waiting)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    held.is_open = True
    page.wait_for_timeout(600)
    assert held.num_sent == 4, "nothing is sent meanwhile"
    ask(page, "What is it?")  # waits for the rest
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    expect(page.locator(".upload small")).to_have_text("sent")
    assert keeping.service.files_seen[0] == [large.read_bytes()]
    page.get_by_title("remove large.mp4").click()
    expect(page.locator("#media li")).to_have_count(0)
    eventually(page, lambda: keeping.http.get("/v1/files").json()["data"] == [])


def test_a_cut_upload_goes_on_from_its_last_part(
    keeping: Front, open_page: OpenPage, media: dict[str, Path], tmp_path: Path
) -> None:
    page = open_page(keeping)
    expect(page.locator("#service")).to_contain_text("ready")
    sent: list[str] = []

    def cut_from_sixth(route: Route) -> None:
        sent.append(route.request.url)
        if len(sent) == 6:
            route.abort("connectionreset")
        else:
            route.continue_()

    page.route("**/parts", cut_from_sixth)
    large = padded(media["video"], tmp_path / "large.mp4", 10 * MB)
    page.locator("#files").set_input_files(large)
    expect(page.locator(".upload small")).to_have_text("sent")
    assert len(sent) == 11, "the part that was cut, once more"
    page.unroute("**/parts")
    page.get_by_title("remove large.mp4").click()

    held = Held(page, 3)
    page.locator("#files").set_input_files(large)
    eventually(page, lambda: held.is_waiting)
    page.get_by_role("button", name="Pause").click()
    assert held.num_sent == 4
    held.is_open = True
    page.reload()  # the page has forgotten the file; it is chosen again
    expect(page.locator("#service")).to_contain_text("ready")
    page.locator("#files").set_input_files(large)
    expect(page.locator(".upload small")).to_have_text("sent")
    assert held.num_sent <= 11, "the parts that had arrived are not sent again"


def test_what_is_too_large_is_refused_before_it_is_sent(
    keeping: Front, open_page: OpenPage, media: dict[str, Path], tmp_path: Path
) -> None:
    page = open_page(keeping)
    expect(page.locator("#service")).to_contain_text("ready")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.locator("#files").set_input_files(padded(media["video"], tmp_path / "huge.mp4", 33 * MB))
    expect(page.locator("#refused")).to_have_text("huge.mp4 has 35 MB; this server takes 34 MB.")
    expect(page.locator("#media li")).to_have_count(0)
    assert sent == []
    held = Held(page, 1)
    page.locator("#files").set_input_files(padded(media["video"], tmp_path / "large.mp4", 10 * MB))
    expect(page.locator("#refused li")).to_have_count(0)
    expect(page.locator(".upload progress")).to_be_visible()
    eventually(page, lambda: held.is_waiting)
    page.get_by_title("remove large.mp4").click()
    kept = keeping.server.front.files.folder  # type: ignore[union-attr]
    eventually(page, lambda: not parts_in(kept))
    page.wait_for_timeout(500)
    assert not parts_in(kept), "a cancelled upload leaves nothing"
