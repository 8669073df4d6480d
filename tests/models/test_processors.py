"""Published processor files: what is planned by default, beside transformers, and with each option."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from benchmarks.encode.published_processors import (
    LENGTHS_S,
    PAGE,
    SIZES,
    Group,
    facts,
    groups,
    opened,
    plans,
    section,
)
from epd.encoders import OWN_LIMITS, FrameSampling, PixelLimits, VideoFacts, load_adapter
from epd.errors import RequestError
from epd.pixel_settings import AUTHORS, AUTHORS_LIMITS, BARE_PROCESSOR, PixelSettings
from epd.reduction import KEEP_ALL, VisualBudget
from epd.stages.media import PromptRoom, plan_within
from tests.models.processors import PROCESSORS
from tests.models.published import PUBLISHED
from tests.models.real_tokenizer import NUM_MERGED, qwen_tokenizer, qwen_words
from tests.models.their_videos import their_frames, their_video
from training.checkpoint import SPECIAL_TOKENS

AS_EVER = FrameSampling()
# One checkpoint of each processor that differs.
QWEN_2_5, QWEN_3 = "Qwen2.5-VL-7B", "Qwen3-VL-8B"
OTHERS = ("InternVL3-8B", "LLaVA-OneVision-7B", "SmolVLM2-256M", "SmolVLM2-2.2B")
DIFFERENT = (QWEN_2_5, QWEN_3, *OTHERS)
FRAME_PIXELS = {QWEN_2_5: 768 * 28 * 28, QWEN_3: 768 * 32 * 32}
EVALUATED_TOKENS = 24_576
MINUTE = VideoFacts(1800, 30.0, 1080, 1920)
# Facts of the published tokenizer: ids of a text, and of the tokens that prompts have.
KNOWN_IDS = {"Hello world": [9707, 1879], "1 + 1 = 2": [16, 488, 220, 16, 284, 220, 17]}


class Opened:
    """A checkpoint's published files, opened by us and by transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.adapter = opened(name, folder)
        self.processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)

    def plan(
        self,
        video: VideoFacts,
        pixels: PixelSettings = AUTHORS_LIMITS,
        asked: PixelLimits = OWN_LIMITS,
        sampling: FrameSampling = AS_EVER,
    ) -> Any:
        self.adapter.checkpoint = replace(self.adapter.checkpoint, pixels=pixels)
        return self.adapter.plan_video(video, sampling, asked)

    def image(self, height: int, width: int, pixels: PixelSettings = AUTHORS_LIMITS) -> Any:
        self.adapter.checkpoint = replace(self.adapter.checkpoint, pixels=pixels)
        return self.adapter.plan_image(height, width)


@pytest.fixture(scope="module")
def opened_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Opens a checkpoint when it is first asked for: its tokenizers take 2 s of CPU."""
    return cache(lambda name: Opened(name, tmp_path_factory.mktemp("published")))


@pytest.fixture(scope="module", params=DIFFERENT)
def model(request: pytest.FixtureRequest, opened_once: Callable[[str], Opened]) -> Opened:
    return opened_once(request.param)


@pytest.fixture(scope="module", params=[QWEN_2_5, QWEN_3])
def qwen(request: pytest.FixtureRequest, opened_once: Callable[[str], Opened]) -> Opened:
    return opened_once(request.param)


def test_every_checkpoint_has_files_and_one_processor_of_those_that_are_opened() -> None:
    assert PROCESSORS.keys() == PUBLISHED.keys()
    differing = {json.dumps(PROCESSORS[name].files, sort_keys=True) for name in DIFFERENT}
    assert differing == {json.dumps(each.files, sort_keys=True) for each in PROCESSORS.values()}
    assert {name for group in groups() for name in group.members} == PUBLISHED.keys()


def test_the_tokenizer_is_the_published_one() -> None:
    tokenizer = qwen_tokenizer()
    assert len(tokenizer) == NUM_MERGED + len(SPECIAL_TOKENS)
    for text, ids in KNOWN_IDS.items():
        assert tokenizer(text)["input_ids"] == ids
    config = PUBLISHED[QWEN_2_5].config
    for token, name in (("<|image_pad|>", "image_token_id"), ("<|video_pad|>", "video_token_id")):
        assert tokenizer.convert_tokens_to_ids(token) == config[name]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"]
    words = qwen_words()  # stand in for it where the texts around frames are counted
    for text in (*KNOWN_IDS, "<123.5 seconds>", "Frame12: ", "You are a helpful assistant.", "user\n"):
        assert words(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_minute_of_1080p_as_the_authors_of_qwen2_5_evaluate(opened_once: Callable[[str], Opened]) -> None:
    plan = opened_once(QWEN_2_5).plan(MINUTE)
    assert plan.num_frames == 120  # two a second
    assert math.prod(plan.size) <= FRAME_PIXELS[QWEN_2_5]
    assert 0.9 * EVALUATED_TOKENS <= plan.num_tokens <= EVALUATED_TOKENS


@pytest.mark.parametrize("seconds", [1, 10, 60, 600, 3600, 36_000])
@pytest.mark.parametrize(
    ("height", "width"), [(360, 640), (1080, 1920), (1920, 1080), (2160, 3840), (480, 480)]
)
def test_no_video_has_more_than_the_authors_give_it(
    model: Opened, seconds: int, height: int, width: int
) -> None:
    limits = AUTHORS[PUBLISHED[model.name].config["model_type"]]
    plan = model.plan(VideoFacts(seconds * 30, 30.0, height, width))
    assert plan.num_frames <= (limits.max_frames or 768)
    assert plan.num_tokens <= EVALUATED_TOKENS
    if limits.frame_tokens:
        assert math.prod(plan.size) <= FRAME_PIXELS[model.name]
    assert plan.num_tokens < PUBLISHED[model.name].context_tokens


@pytest.mark.parametrize("length", LENGTHS_S)
@pytest.mark.parametrize("size", SIZES)
def test_the_bare_processor_is_transformers(model: Opened, length: str, size: str) -> None:
    plan = model.plan(facts(length, size), BARE_PROCESSOR)
    assert (plan.num_frames, plan.num_tokens) == their_video(model.processor, facts(length, size))


@pytest.mark.parametrize("length", LENGTHS_S)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_request", [False, True])
def test_a_bare_cap_is_transformers_own(qwen: Opened, length: str, size: str, by_request: bool) -> None:
    pixels = BARE_PROCESSOR if by_request else PixelSettings(bare_processor=True, cap_pixels_per_frame=True)
    asked = PixelLimits(cap_pixels_per_frame=True if by_request else None)
    plan = qwen.plan(facts(length, size), pixels, asked)
    theirs = their_video(qwen.processor, facts(length, size), cap_pixels_per_frame=True)
    assert (plan.num_frames, plan.num_tokens) == theirs


@pytest.mark.parametrize("length", LENGTHS_S)
@pytest.mark.parametrize("size", SIZES)
def test_the_default_is_transformers_with_the_authors_figures(qwen: Opened, length: str, size: str) -> None:
    """Both processors can be told the figures; Qwen2.5-VL's takes nine tenths of its tokens."""
    call: dict[str, Any] = {"cap_pixels_per_frame": True}
    if qwen.name == QWEN_2_5:
        call["size"] = {"shortest_edge": 3136, "longest_edge": FRAME_PIXELS[QWEN_2_5]}
        qwen.processor.video_processor.max_video_tokens = EVALUATED_TOKENS / 0.9
    try:
        theirs = their_video(qwen.processor, facts(length, size), **call)
    finally:
        if qwen.name == QWEN_2_5:
            qwen.processor.video_processor.max_video_tokens = 128_000
    plan = qwen.plan(facts(length, size))
    assert (plan.num_frames, plan.num_tokens) == theirs


@pytest.mark.parametrize("pixels", [PixelSettings(cap_pixels_per_frame=False), PixelSettings()])
def test_a_cap_that_is_refused_leaves_frames_to_the_file(qwen: Opened, pixels: PixelSettings) -> None:
    asked = PixelLimits(cap_pixels_per_frame=None if pixels.given else False)
    plan = qwen.plan(facts("10 s", "1080p"), pixels, asked)
    assert plan.num_tokens == their_video(qwen.processor, facts("10 s", "1080p"))[1]


def test_a_file_that_says_something_of_the_cap_is_followed(tmp_path: Path) -> None:
    for says in (False, True):
        folder = tmp_path / str(says)
        folder.mkdir()
        opened(QWEN_2_5, folder)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"cap_pixels_per_frame": says}))
        adapter = load_adapter(folder)
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        plan = adapter.plan_video(facts("10 min", "1080p"), FrameSampling())
        theirs = their_video(processor, facts("10 min", "1080p"), cap_pixels_per_frame=says)
        assert (plan.num_frames, plan.num_tokens) == theirs


@pytest.mark.parametrize("most", [50_000, 100_000, 602_112, 1_000_000])
def test_a_frames_pixels_are_those_given(qwen: Opened, most: int) -> None:
    plan = qwen.plan(facts("10 s", "4K"), PixelSettings(video_max_pixels=most, video_max_tokens=10**6))
    assert 0.75 * most < math.prod(plan.size) <= most
    small = qwen.plan(facts("10 min", "4K"), PixelSettings(video_max_pixels=most))
    assert small.num_tokens <= EVALUATED_TOKENS


@pytest.mark.parametrize("most", [2_000, 8_000])
@pytest.mark.parametrize("length", ["10 s", "1 min"])
def test_a_videos_tokens_are_those_given(model: Opened, most: int, length: str) -> None:
    unlimited, given = (
        model.plan(facts(length, "4K"), pixels)
        for pixels in (PixelSettings(), PixelSettings(video_max_tokens=most))
    )
    assert given.num_tokens <= most
    assert given.num_tokens >= min(unlimited.num_tokens, 0.75 * most)


def test_a_request_has_its_own_size_within_the_videos_tokens(opened_once: Callable[[str], Opened]) -> None:
    model = opened_once(QWEN_2_5)
    asked = PixelLimits(max_pixels=1_500_000)
    large = model.plan(facts("10 s", "4K"), asked=asked)
    assert FRAME_PIXELS[QWEN_2_5] < math.prod(large.size) <= 1_500_000
    assert model.plan(facts("1 min", "4K"), asked=asked).num_tokens <= EVALUATED_TOKENS
    free = replace(asked, cap_pixels_per_frame=False)
    assert model.plan(facts("1 min", "4K"), asked=free).num_tokens > EVALUATED_TOKENS


def test_frames_that_a_request_counts_are_all_taken(model: Opened) -> None:
    """The authors' number of frames is for requests that leave it open."""
    plan = model.plan(facts("10 min", "360p"), sampling=FrameSampling(num_frames=100))
    assert plan.num_frames == 100
    assert plan.num_tokens <= 100 * 256 + 1


@pytest.mark.parametrize("most", [3_000, 6_000, 10_000])
def test_a_budget_takes_fewer_frames_of_the_same_size(qwen: Opened, most: int) -> None:
    """Where all frames share a limit, fewer of them would otherwise be larger, and have as many tokens."""
    video = facts("10 min", "1080p")
    whole = qwen.plan(video)
    made = plan_within(
        [lambda sampling: qwen.plan(video, sampling=sampling)],
        AS_EVER,
        KEEP_ALL,
        VisualBudget(max_tokens=most),
        PromptRoom(PUBLISHED[qwen.name].context_tokens),
        lambda media: qwen.adapter.plan_prompt(media, "What is shown?"),
    )
    (plan,) = made.plans
    assert plan.size == whole.size
    assert made.reduction.retention == 1.0
    assert 0.95 * most <= made.prompt.num_visual_tokens <= most


@pytest.mark.parametrize(
    ("height", "width"), [(150, 170), (1080, 1920), (3000, 4000), (20_000, 700), (6000, 8000)]
)
def test_images_keep_the_published_limits(model: Opened, height: int, width: int) -> None:
    plan = model.image(height, width)
    if model.name.startswith("SmolVLM"):
        assert plan.num_units == model.processor.image_processor.get_number_of_image_patches(height, width)[0]
    else:
        call = {"crop_to_patches": True} if model.name.startswith("InternVL") else {}  # as its call has it
        theirs = model.processor._get_num_multimodal_tokens(image_sizes=[(height, width)], **call)
        num_marks = 2 if call else 0
        assert plan.num_tokens == theirs.num_image_tokens[0] - num_marks
    assert plan == model.image(height, width, BARE_PROCESSOR)


@pytest.mark.parametrize("most", [100_000, 1_003_520, 20_000_000])
def test_an_images_pixels_are_those_given(qwen: Opened, most: int) -> None:
    plan = qwen.image(6000, 8000, PixelSettings(max_pixels=most))
    assert 0.9 * most < math.prod(plan.size) <= most
    qwen.adapter.check_pixels([("image", PixelLimits(max_pixels=most))], None)
    with pytest.raises(RequestError, match=f"allowed: at most {most:,} pixels"):
        qwen.adapter.check_pixels([("image", PixelLimits(max_pixels=most + 1))], None)


@pytest.mark.parametrize("field", ["max_pixels", "video_max_pixels", "cap_pixels_per_frame"])
def test_settings_that_change_nothing_are_refused(model: Opened, field: str) -> None:
    pixels = PixelSettings.checked({field: 1})
    if model.name in FRAME_PIXELS:
        load_adapter(model.folder, pixels=pixels)
        return
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(
        RequestError, match=f"received {field} for a .* fixed size; allowed: .* leave {option} out"
    ):
        load_adapter(model.folder, pixels=pixels)


def test_the_line_says_what_was_chosen_and_by_whom(model: Opened) -> None:
    family = PUBLISHED[model.name].config["model_type"]
    assert AUTHORS[family].source in PixelSettings().line(family)
    assert "transformers" in BARE_PROCESSOR.line(family)
    assert "video_max_tokens=7" in PixelSettings(video_max_tokens=7).line(family)
    plan = model.plan(MINUTE)
    assert f"{plan.num_frames} frames of " in plan.line
    assert f"{plan.num_tokens:,} tokens" in plan.line


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.name)
def test_rows_of_the_page(group: Group, opened_once: Callable[[str], Opened]) -> None:
    adapter, processor = opened_once(group.name).adapter, opened_once(group.name).processor
    assert section(group, adapter) in PAGE.read_text(encoding="utf-8"), (
        "run benchmarks.encode.published_processors"
    )
    for (length, size), plan in plans(adapter, AUTHORS_LIMITS).items():
        assert plan.num_frames <= their_frames(processor, facts(length, size))
        assert plan.num_tokens <= their_video(processor, facts(length, size))[1]
