"""The page in headless Chromium: drop media, ask, watch tokens, timeline, workers; nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from epd.encoders import FrameSampling
from epd.errors import OverloadedError
from epd.reduction import KeptCells
from epd.serve_app.http import page as page_module
from epd.serve_app.service import AnswerItem, AnswerRequest, StageSpan
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import WORDS, FakeService
from tests.serve_app.http.page_use import (
    ANSWER,
    ERROR,
    TEXT,
    LookingService,
    ask,
    asked,
    drop,
    open_fold,
    sent_bytes,
    vp9_video,
)

PAGE_FOLDER = Path(page_module.__file__).parent
_HAS_RING = """() => {
  const focused = document.activeElement;
  return getComputedStyle(focused.id === "files" ? focused.parentElement : focused).outlineStyle !== "none";
}"""
# Of every element with text of its own: its contrast to what is behind it, by WCAG 2.1 (1.4.3).
_CONTRASTS = """() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [red, green, blue] = rgba(color).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (rgba(color)[3] > 128) return color;
    }
    return "white";
  };
  const hasText = ({childNodes}) => [...childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((each) => hasText(each) && each.checkVisibility() && !each.closest("svg") && !each.disabled)
    .map((each) => {
      const pair = [luminance(getComputedStyle(each).color), luminance(behind(each))];
      const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
      return {text: each.textContent.trim().slice(0, 40), contrast};
    });
}"""


def test_a_dropped_video_is_asked_about(
    front: Front, open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    page = open_page(front)
    drop(page, media["video"], "video/mp4")
    page.locator("#files").set_input_files(media["image"])
    expect(page.locator("#media li")).to_have_count(2)
    ask(page, "Which colour?")
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    expect(page.locator(".facts")).to_contain_text("48 → 24")

    request = front.service.requests[0]
    assert [source.kind for source in request.media] == ["video", "image"]
    assert front.service.files_seen[0] == [media["video"].read_bytes(), media["image"].read_bytes()]
    assert request.messages[0].parts[-1].text == "Which colour?"


def test_comments_in_a_stream_are_passed_over(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    page = open_page(run_front(FakeService(word_s=0.3), keep_alive_s=0.05))
    ask(page, "What?")
    expect(page.locator(ANSWER)).to_have_text(TEXT)


def test_the_timeline_shows_groups_by_stage_and_worker(
    front: Front, open_page: Callable[[Front], Page]
) -> None:
    page = open_page(front)
    open_fold(page, "Details")
    ask(page, "What?")
    expect(page.locator("#timeline rect")).to_have_count(9)
    names = page.locator("#timeline svg > text").all_text_contents()
    lanes = [name for name in names if "·" in name]
    assert lanes == [
        "decode video · v0", "encode · e0", "encode · e1", "prefill · p0", "answer · this page"
    ]  # fmt: skip
    expect(page.locator("#timeline line.token")).to_have_count(len(WORDS))
    assert "group 1 of item 0" in page.locator("#timeline rect.encode title").all_text_contents()[2]


def test_a_medium_is_sent_once(
    front: Front, open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    page = open_page(front)
    sizes = sent_bytes(page)
    drop(page, media["video"], "video/mp4")
    asked(page, "Which colour?")
    drop(page, media["image"], "image/png")
    asked(page, "And this?")
    asked(page, "And both?")
    of_video, of_image = (media[name].stat().st_size for name in ("video", "image"))
    assert sizes[0] > of_video > 2000 > sizes[2]
    assert of_image < sizes[1] < of_image * 4 / 3 + 2000
    both = [media["video"].read_bytes(), media["image"].read_bytes()]
    assert front.service.files_seen == [both[:1], both, both]


def test_a_medium_that_the_server_has_forgotten_is_sent_again(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    front = run_front(max_named_media=1)
    page = open_page(front)
    sizes = sent_bytes(page)
    drop(page, media["video"], "video/mp4")
    drop(page, media["image"], "image/png")
    asked(page, "Which colour?")
    asked(page, "And now?")
    assert len(sizes) == 3
    assert sizes[1] < 2000 < sizes[0] <= sizes[2]
    assert front.service.files_seen[1] == front.service.files_seen[0]
    expect(page.locator(ERROR)).to_have_count(0)


def test_what_is_refused_for_another_reason_is_not_sent_again(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    page = open_page(run_front())
    sizes = sent_bytes(page)
    drop(page, media["video"], "video/mp4")
    asked(page, "Which colour?")
    open_fold(page, "Options")
    page.locator("#temperature").evaluate("one => { one.max = 9; one.value = 9 }")
    asked(page, "And now?", answer="")
    expect(page.locator(ERROR)).to_contain_text("temperature")
    page.locator("#temperature").fill("")
    asked(page, "And then?")
    assert len(sizes) == 3
    assert max(sizes[1:]) < 2000 < sizes[0]


def test_a_dialogue_is_sent_whole_until_it_starts_over(
    front: Front, open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    page = open_page(front)
    over = page.get_by_role("button", name="Start over")
    drop(page, media["video"], "video/mp4")
    expect(over).to_be_hidden()
    asked(page, "First?")
    asked(page, "Second?")
    over.click()
    expect(over).to_be_hidden()
    expect(page.locator(".turn")).to_have_count(0)
    asked(page, "Third?")
    page.get_by_title("remove video.mp4").click()
    expect(page.locator("#turns")).to_contain_text("knows nothing of these")
    asked(page, "Fourth?")

    def turns(number: int) -> list[tuple[str, list[str]]]:
        messages = front.service.requests[number].messages
        return [(each.role, [part.text or part.kind for part in each.parts]) for each in messages]

    first = [("user", ["video", "First?"])]
    assert turns(0) == first
    assert turns(1) == [*first, ("assistant", [TEXT]), ("user", ["Second?"])]
    assert turns(2) == [("user", ["video", "Third?"])]
    assert turns(3) == [("user", ["Fourth?"])]


def test_an_answer_that_broke_off_is_no_turn(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    front = run_front(FakeService(error=OverloadedError("lost"), words_before_error=2))
    page = open_page(front)
    ask(page, "First?")
    expect(page.locator(ERROR)).to_have_text("lost")
    front.service.error = None
    asked(page, "Second?")
    assert len(front.service.requests[1].messages) == 1


def test_frames_that_were_looked_at_are_drawn(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page], tmp_path: Path
) -> None:
    """From the user's own file, which holds what its time says: dark first, then light."""
    page = open_page(run_front(LookingService()))
    drop(page, vp9_video(tmp_path / "clip.webm"), "video/webm")
    ask(page, "What?")
    expect(page.locator("#looked-at li")).to_have_count(3)
    assert page.locator("#looked-at li").all_text_contents() == ["0:00", "0:02", "0:04"]
    expect(page.locator("#looked-at")).to_contain_text("clip.webm: 3 frames")
    lights = page.locator("#looked-at canvas:not(.dropped)").evaluate_all(
        "all => all.map((one) => one.getContext('2d').getImageData(32, 32, 1, 1).data[0])"
    )
    assert lights == sorted(lights)
    assert lights[2] - lights[0] > 100
    ask(page, "And now?")
    expect(page.locator("#looked-at li")).to_have_count(3)


class DroppingService(LookingService):
    """Which keeps the left half of the first two frames, and the right half of the third."""

    chooses = True

    async def _items(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        num = 0
        async for item in super()._items(request):
            yield item
            num += 1
            if num == 1 and self.chooses:
                kept = KeptCells((0, 2), 2, (2, 4), bytes([0b11001100, 0b00110011]))
                yield StageSpan("prefill", "p0", 0, 0, 0, 0, kept=(kept,))


_SHADED = """all => all.map((one) => {
  const at = (x, y) => one.getContext("2d").getImageData(one.width * x, one.height * y, 1, 1).data[3] > 128;
  return !one.hidden && [0.1, 0.4, 0.6, 0.9].map((x) => [0.2, 0.8].map((y) => at(x, y)).join()).join(" ");
})"""


def test_what_was_dropped_is_shaded(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page], tmp_path: Path
) -> None:
    """In the frames of each unit, and again for a further question, for which nothing is chosen."""
    service = DroppingService()
    page = open_page(run_front(service))
    drop(page, vp9_video(tmp_path / "clip.webm"), "video/webm")
    left, right = "false,false false,false true,true true,true", "true,true true,true false,false false,false"
    shades = page.locator("#looked-at .dropped")

    def check(expected: list[str | bool]) -> None:
        expect(shades).to_have_count(3)
        expect(page.get_by_role("button", name="Ask")).to_be_enabled()
        assert shades.evaluate_all(_SHADED) == expected

    asked(page, "What?")
    check([left, left, right])
    expect(page.locator("#looked-at")).to_contain_text("what is shaded was dropped")
    expect(page.get_by_role("img", name="frame at 0:02, 4 of 8 tokens kept")).to_be_visible()
    shading = page.get_by_role("checkbox", name="shade what was dropped")
    shading.press("Space")
    expect(shades.first).to_be_hidden()
    shading.press("Space")
    expect(shades.first).to_be_visible()
    service.chooses = False
    asked(page, "And now?")
    check([left, left, right])
    service.times_s = (0.5, 1.0, 1.5)
    asked(page, "And others?")
    check([False, False, False])
    expect(page.get_by_role("img", name="frame at 0:01.5", exact=True)).to_be_visible()
    expect(shading).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(
    scheme: Any, run_front: Callable[..., Front], open_page: Callable[[Front], Page], media: dict[str, Path]
) -> None:
    page = open_page(run_front(LookingService()))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 740})
    drop(page, media["video"], "video/mp4")
    ask(page, "What?")
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(ANSWER).bounding_box()["y"] < 1200
    open_fold(page, "Details")
    open_fold(page, "Options")
    contrasts = page.evaluate(_CONTRASTS)
    assert len(contrasts) > 15
    assert [each for each in contrasts if each["contrast"] < 4.5] == []


def test_the_keyboard_is_enough(front: Front, open_page: Callable[[Front], Page]) -> None:
    """Every control is reached in the order of the page, and shows that it is; Enter asks."""
    page = open_page(front)
    page.locator("summary").filter(has_text="Options").focus()
    page.keyboard.press("Enter")
    reached = []
    page.get_by_role("heading", name="epd").click()  # from the top of the page on
    for _ in range(21):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
        )
        assert page.evaluate(_HAS_RING), reached
    assert reached == [
        "model", "sample", "Which shape appears first?", "How many shapes appear in the video?",
        "Which shape appears after the cross?", "question", "files", "address", "ask", "Options",
        "system", "fps", "frames", "retention", "reduction", "max-tokens", "temperature", "seed", "key",
        "schema", "Details: timeline and workers",
    ]  # fmt: skip
    page.locator("#question").focus()
    page.keyboard.type("What?")
    page.keyboard.press("Enter")
    expect(page.locator(ANSWER)).to_have_text(TEXT)


def test_a_question_stands_above_its_answer_and_the_newest_at_the_bottom(
    front: Front, open_page: Callable[[Front], Page]
) -> None:
    page = open_page(front)
    for number, question in enumerate(("First?", "Second?"), start=1):
        ask(page, question)
        expect(page.locator(".turn")).to_have_count(number)
        expect(page.locator("#question")).to_have_value("")
        expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    for number, question in enumerate(("First?", "Second?")):
        texts = page.locator(".turn").nth(number).locator(".asked, .text").all_text_contents()
        assert texts == [question, TEXT]
        expect(page.locator(".turn").nth(number)).to_contain_text("to the first token")
    tops = page.locator(".asked, .text, #question").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)


def test_words_show_while_more_are_to_come(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    front = run_front(FakeService(holds_after=3))
    page = open_page(front)
    ask(page, "What?")
    expect(page.locator(ANSWER)).to_have_text("".join(WORDS[:3]).strip())
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .note")).to_have_text("Stopped.")
    expect(page.locator(ERROR)).to_have_count(0)
    front.wait_until_empty()
    assert front.service.num_closed == 1


def test_workers_and_queues_are_live(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    front = run_front()
    page = open_page(front)
    expect(page.locator("#service")).to_have_text("ready, 0 requests")
    expect(page.locator("#topology")).to_have_text("2e1p1d")
    workers = page.locator(".worker")
    expect(workers).to_have_count(4)
    expect(workers.nth(0)).to_contain_text("0 running, 1 waiting")
    expect(workers.nth(1)).to_contain_text("gone")
    expect(workers.nth(2)).to_contain_text("50 %")
    expect(workers.nth(2).locator(".stage")).to_have_text("prefill")
    front.service.is_ready = False
    expect(page.locator("#service")).to_have_text("not ready")


def test_a_refusal_is_shown(run_front: Callable[..., Front], open_page: Callable[[Front], Page]) -> None:
    page = open_page(run_front(FakeService(error=OverloadedError("busy, try again later"))))
    ask(page, "What?")
    expect(page.locator(ERROR)).to_have_text("busy, try again later")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_an_error_in_the_middle_is_shown(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    page = open_page(run_front(FakeService(error=OverloadedError("lost"), words_before_error=2)))
    ask(page, "What?")
    expect(page.locator(ERROR)).to_have_text("lost")
    expect(page.locator(ANSWER)).to_have_text("".join(WORDS[:2]).strip())


def test_the_key_opens_the_page(run_front: Callable[..., Front], open_page: Callable[[Front], Page]) -> None:
    page = open_page(run_front(api_key="sesame"))
    expect(page.locator("#service")).to_contain_text("the server asks for an API key")
    open_fold(page, "Options")
    page.get_by_label("API key").fill("sesame")
    expect(page.locator("#service")).to_have_text("ready, 0 requests")
    ask(page, "What?")
    expect(page.locator(ANSWER)).to_have_text(TEXT)


def test_options_are_sent(front: Front, open_page: Callable[[Front], Page]) -> None:
    page = open_page(front)
    expect(page.locator("#model option")).to_have_count(2)
    open_fold(page, "Options")
    page.get_by_label("Model").select_option("other/vl")
    page.get_by_label("Frames per second").fill("0.5")
    page.get_by_label("Longest answer, tokens").fill("7")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Share of visual tokens kept").fill("0.25")
    ask(page, "What?")
    expect(page.locator(ANSWER)).to_have_text(TEXT)
    request = front.service.requests[0]
    assert (request.model, request.frame_sampling) == ("other/vl", FrameSampling(fps=0.5))
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.3)
    assert request.reduction.retention == 0.25


def test_what_is_no_medium_is_not_sent(
    front: Front, open_page: Callable[[Front], Page], tmp_path: Path
) -> None:
    page = open_page(front)
    (tmp_path / "notes.txt").write_text("x")
    drop(page, tmp_path / "notes.txt", "text/plain")
    expect(page.locator("#refused")).to_have_text("notes.txt is no video, image or sound.")
    expect(page.locator("#media li")).to_have_count(0)


def test_text_of_an_answer_is_text(
    run_front: Callable[..., Front], open_page: Callable[[Front], Page]
) -> None:
    evil = '<img src="x" onerror="alert(1)">'
    page = open_page(run_front(FakeService(words=(evil,))))
    ask(page, evil)
    expect(page.locator(ANSWER)).to_have_text(evil)
    expect(page.locator(".turn img")).to_have_count(0)


def test_the_api_is_described_from_its_own_schema(front: Front, open_page: Callable[[Front], Page]) -> None:
    page = open_page(front)
    page.get_by_role("link", name="API").click()
    chat = page.locator("section").filter(has=page.get_by_role("heading", name="POST /v1/chat/completions"))
    expect(chat.get_by_role("row", name="messages (required)")).to_be_visible()
    expect(page.get_by_role("heading", name="GET /health")).to_be_visible()


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_comes_with_its_rules(front: Front, path: str) -> None:
    response = front.http.get(path)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', response.text)) <= {
        "data:,", "page/style.css", "page/details.css", "page/app.js", "page/docs.js", "docs",
        "openapi.json", ".",
    }  # fmt: skip
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assets = [path.name for path in PAGE_FOLDER.iterdir() if path.suffix in {".css", ".js"}]
    assert {"style.css", "app.js", "upload.js"} < set(assets)
    for asset in assets:
        assert front.http.get(f"/page/{asset}").status_code == 200
        assert "//" not in front.http.get(f"/page/{asset}").text.replace("// ", "").replace(
            "http://www.w3.org", ""
        )
    assert front.http.get("/page/__init__.py").status_code == 404
