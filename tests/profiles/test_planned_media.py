"""Media as a profile plans them, against the adapter that a server plans them with, over drawn media.

Modules: `epd/profiles/processor_files.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.encode.published_processors import opened
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.errors import RequestError
from epd.profiles.catalogue import MODELS
from epd.profiles.configurations import shape_in
from epd.workload.requests import Resolution, VideoSpec
from tests.encoders.tiny_gemma import build_gemma4
from tests.encoders.tiny_generic import build_glm4v, build_glm46v, build_glm_ocr, build_qwen2_vl
from tests.encoders.tiny_minicpm import build_minicpmv4_6, build_minicpmv4_7
from tests.encoders.tiny_molmo import build_molmo2
from tests.encoders.tiny_tiles import build_video_llama_3
from tests.models.tiny_ernie import build

# One of each processor that differs, and two of its other sizes.
NAMES = (
    "Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "InternVL3-8B", "LLaVA-OneVision-7B",
    "SmolVLM2-256M", "SmolVLM2-2.2B",
)  # fmt: skip
SIZES = ("64x48", "640x360", "1280x720", "720x1280", "1920x1080", "3840x2160", "1000x334", "32x32")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return request.param, opened(request.param, tmp_path_factory.mktemp("published"), has_words=True)


def drawn(draw: random.Random) -> tuple[VideoSpec, VideoFacts]:
    """A video as the planner has it, and as the server sees it."""
    size = Resolution.parse(draw.choice(SIZES))
    spec = VideoSpec(draw.choice([1.0, 1.5, 7.0, 10.0, 59.9, 60.0, 600.0, 3600.0]), draw.randint(1, 60), size)
    return spec, VideoFacts(spec.num_frames, float(spec.fps), size.height, size.width)


def asked(draw: random.Random) -> dict[str, Any]:
    """What a request says of its frames: nothing, a rate or a number."""
    return draw.choice(
        [{}, {}, {"fps": draw.choice([0.1, 0.5, 1.0, 4.0])}, {"num_frames": draw.randint(1, 90)}]
    )


def test_videos_have_the_frames_and_tokens_that_the_server_gives_them(model: tuple[str, Any]) -> None:
    name, adapter = model
    for seed in range(60):
        draw = random.Random(seed)
        spec, facts = drawn(draw)
        wanted = asked(draw)
        plan = adapter.plan_video(facts, FrameSampling(**wanted))
        rule = MODELS[name.lower()].media.asked(wanted.get("fps"), wanted.get("num_frames"))
        groups = rule.video(spec)
        shown = f"{spec} {wanted}"
        assert sum(group.num_frames for group in groups) == plan.num_frames, shown
        assert sum(group.num_tokens for group in groups) == plan.num_tokens, shown
        assert sum(group.num_patches for group in groups) == plan.grid.num_patches, shown


@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_videos_have_the_texts_between_frames(model: tuple[str, Any], seed: int) -> None:
    """Exact for Qwen, whose tokenizer is the published one; about as many for the others."""
    name, adapter = model
    spec, facts = drawn(random.Random(seed))
    plan = adapter.plan_video(facts, FrameSampling())
    text = len(adapter.plan_prompt([plan], "What?")) - plan.num_tokens
    alone = len(adapter.plan_prompt([], "What?"))
    planned = MODELS[name.lower()].media.text_tokens(spec)
    if name.startswith("Qwen3"):
        assert text - alone in (planned + 2, planned), "the marks around the whole, where a template has them"
    else:
        assert text - alone == pytest.approx(planned, rel=0.25, abs=40)


@pytest.mark.parametrize("size", [*SIZES, "448x448", "450x450", "1344x448", "900x1200"])
def test_images_have_the_tokens_that_the_server_gives_them(model: tuple[str, Any], size: str) -> None:
    """Of LLaVA-OneVision and SmolVLM2, tiles of images are counted by area: no figure to compare."""
    name, adapter = model
    if not name.startswith(("Qwen", "InternVL")):
        return
    resolution = Resolution.parse(size)
    plan = adapter.plan_image(resolution.height, resolution.width)
    work = MODELS[name.lower()].media.image(resolution)
    assert (work.num_tokens, work.num_patches) == (plan.num_tokens, plan.grid.num_patches)


def test_ten_minutes_fit_the_context() -> None:
    """23,040 visual tokens of Qwen2.5-VL, where a frame's own limit would give 276,480."""
    film = VideoSpec(600.0, 30, Resolution(1920, 1080))
    for name, tokens in (("qwen2.5-vl-7b", 23_040), ("qwen3-vl-8b", 10_752), ("internvl3-8b", 16_384)):
        shape = MODELS[name]
        assert sum(group.num_tokens for group in shape.media.video(film)) == tokens
        assert tokens + shape.media.text_tokens(film) < (shape.context_tokens or 0)


@pytest.mark.parametrize(
    "written",
    [
        *(build_qwen2_vl, build_molmo2, build, build_video_llama_3, build_gemma4),
        *(build_glm4v, build_glm46v, build_glm_ocr),
        *(partial(build_minicpmv4_6, mode="4x"), partial(build_minicpmv4_7, cuts_frames=True)),
    ],
    ids=lambda build: getattr(build, "func", build).__name__ + getattr(build, "func", build).__module__[-6:],
)
def test_a_folder_says_how_its_media_are_cut(written: Callable[[Path], Path], tmp_path: Path) -> None:
    """Tiny models with the rules of the published ones, and settings of their own in the processor's files.

    ERNIE's tower takes frames, whose grids an adapter counts by pairs. Molmo 2's adapter counts no patches.
    """
    folder = written(tmp_path / "model")
    adapter, rule = load_adapter(folder), shape_in(folder).media
    for text in (*SIZES, "90x120", "56x56"):
        size = Resolution.parse(text)
        assert rule.image(size).num_tokens == adapter.plan_image(size.height, size.width).num_tokens, text
    for seed in range(60):
        draw = random.Random(seed)
        (spec, facts), wanted = drawn(draw), asked(draw)
        if rule.sampling == "length" and spec.fps == 6:  # as many as ticks, which are sums of floats there
            continue
        if rule.sampling == "seconds" and "fps" in wanted:
            with pytest.raises(RequestError, match="the model's own, one frame a second") as refused:
                rule.asked(wanted["fps"], None)
            with pytest.raises(RequestError, match=re.escape(str(refused.value))):
                adapter.plan_video(facts, FrameSampling(**wanted))
            continue
        plan = adapter.plan_video(facts, FrameSampling(**wanted))
        groups = rule.asked(wanted.get("fps"), wanted.get("num_frames")).video(spec)
        shown = f"{spec} {wanted}"
        assert sum(group.num_frames for group in groups) == plan.num_frames, shown
        assert sum(group.num_tokens for group in groups) == plan.num_tokens, shown
        num_grids = rule.frames_per_unit if rule.has_frame_patches else 1
        patches = 64 * plan.num_frames if rule.is_whole else num_grids * plan.grid.num_patches
        assert sum(group.num_patches for group in groups) == patches, shown
