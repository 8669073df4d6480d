"""M-RoPE positions against positions worked out by hand, and against what keys and values are known by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.encoders import FrameSampling, PositionLayout, VideoFacts, load_adapter
from epd.encoders.groups import prompt_identity
from epd.encoders.prompt.prompt import LAYOUTS, VisualSpan, mrope_positions
from epd.encoders.reduction.reading import reduce_prompt
from epd.errors import ModelError
from epd.models import embedded_model_path
from epd.reduction import ReductionPolicy
from epd.types import PlaceholderRange
from tests.encoders.families import Family
from tests.positions import adapter_like_transformers

DRAWN = settings(max_examples=60, deadline=None)


def span(
    offset: int, frames: int, rows: int, columns: int, *, gap_s: float = 1.0, rate: float = 1.0
) -> VisualSpan:
    place = PlaceholderRange(offset, frames * rows * columns)
    return VisualSpan(place, frames, rows, columns, gap_s, rate)


def rows_of(num_tokens: int, spans: list[VisualSpan], layout: PositionLayout) -> tuple[list[list[int]], int]:
    positions, following = mrope_positions(num_tokens, spans, layout)
    assert positions.dtype == np.int64
    return positions.tolist(), following


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_counts_on(layout: PositionLayout) -> None:
    assert rows_of(3, [], layout) == ([[0, 1, 2]] * 3, 3)
    assert rows_of(0, [], layout) == ([[]] * 3, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_behind_an_image_goes_on_after_its_larger_side(layout: PositionLayout) -> None:
    image = span(1, 1, 2, 3)
    assert rows_of(9, [image], layout) == (
        [
            [0, 1, 1, 1, 1, 1, 1, 4, 5],
            [0, 1, 1, 1, 2, 2, 2, 4, 5],
            [0, 1, 2, 3, 1, 2, 3, 4, 5],
        ],
        6,
    )


def test_text_behind_a_video_goes_on_after_its_last_instant() -> None:
    """Three frames of 2 x 2, a second apart at two positions a second."""
    video = span(2, 3, 2, 2, rate=2.0)
    assert rows_of(16, [video], "authors") == (
        [
            [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8],
            [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 7, 8],
            [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 7, 8],
        ],
        9,
    )


def test_under_the_switch_it_goes_on_after_rows_and_columns_and_the_answer_after_the_largest() -> None:
    video = span(2, 3, 2, 2, rate=2.0)
    assert rows_of(16, [video], "transformers") == (
        [
            [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 4, 5],
            [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 4, 5],
            [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5],
        ],
        7,
    )


def test_the_example_in_the_authors_documentation() -> None:
    """25 positions a second, two frames a patch at 1 fps: patches at 0, 50, 100, text from 101 on."""
    video = span(0, 3, 2, 2, gap_s=2.0, rate=25.0)
    assert rows_of(17, [video], "authors") == (
        [
            [0, 0, 0, 0, 50, 50, 50, 50, 100, 100, 100, 100, 101, 102, 103, 104, 105],
            [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 101, 102, 103, 104, 105],
            [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 101, 102, 103, 104, 105],
        ],
        106,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_video_of_tall_frames_ends_with_its_rows(layout: PositionLayout) -> None:
    video = span(1, 2, 4, 1)
    assert rows_of(10, [video], layout) == (
        [
            [0, 1, 1, 1, 1, 2, 2, 2, 2, 5],
            [0, 1, 2, 3, 4, 1, 2, 3, 4, 5],
            [0, 1, 1, 1, 1, 1, 1, 1, 1, 5],
        ],
        6,
    )


def test_several_media_each_start_behind_the_one_before() -> None:
    """Image, video, video with nothing between, and an image: the second video takes 1.4 s a patch."""
    spans = [
        span(1, 1, 1, 2),
        span(4, 2, 1, 1, rate=10.0),
        span(6, 3, 1, 1, gap_s=1.4, rate=2.0),
        span(10, 1, 2, 1),
    ]
    assert rows_of(13, spans, "authors") == (
        [
            # text, image, text, video 0 and 10, video 0, 2, 5, text, image, text
            [0, 1, 1, 3, 4, 14, 15, 17, 20, 21, 22, 22, 24],
            [0, 1, 1, 3, 4, 4, 15, 15, 15, 21, 22, 23, 24],
            [0, 1, 2, 3, 4, 4, 15, 15, 15, 21, 22, 22, 24],
        ],
        25,
    )


@pytest.mark.parametrize(
    ("gap_s", "rate", "times"),
    [
        (0.5, 2.0, [0, 1, 2, 3]),
        (0.7, 2.0, [0, 1, 2, 4, 5, 7]),
        (2 / 3, 2.0, [0, 1, 2, 4]),
        (0.3, 2.0, [0, 0, 1, 1, 2, 3]),
        (0.083, 2.0, [0, 0, 0, 0, 0, 0, 0, 1]),
        (0.3, 25.0, [0, 7, 15, 22]),
        # 4.2 s is a little less in float32, and stays so when it is multiplied by 25.
        (1.4, 25.0, [0, 35, 70, 104]),
    ],
)
def test_fractions_of_a_position_are_cut_off(gap_s: float, rate: float, times: list[int]) -> None:
    video = span(0, len(times), 1, 1, gap_s=gap_s, rate=rate)
    positions, following = rows_of(len(times) + 1, [video], "authors")
    assert positions[0] == [*times, max(times) + 1]
    assert following == max(times) + 2


def test_transformers_multiplies_in_another_order() -> None:
    positions, _ = rows_of(4, [span(0, 4, 1, 1, gap_s=1.4, rate=25.0)], "transformers")
    assert positions[0] == [0, 35, 70, 105]


@pytest.mark.parametrize(
    ("sampling", "times"),
    [
        (FrameSampling(fps=1.0), [0, 4, 8, 12]),  # two frames a patch: 2 s, at two positions a second
        (FrameSampling(num_frames=6), [0, 5, 10]),  # 8 s in three patches: 2.67 s
        (FrameSampling(num_frames=4, start_s=2.0), [0, 6]),
        (FrameSampling(fps=8.0, end_s=1.0), [0, 0, 1, 1]),
    ],
)
def test_a_planned_prompt_has_its_text_behind_the_videos_time(
    sampling: FrameSampling, times: list[int]
) -> None:
    """15 tokens a patch, 3 x 5, of shapes-vl: the prompt around them counts on by one."""
    adapter = load_adapter(embedded_model_path(), positions="authors")
    prompt = adapter.plan_prompt([adapter.plan_video(VideoFacts(64, 8.0, 360, 640), sampling)], "Is it red?")
    first, stop = prompt.media[0].units[0].offset, prompt.prefix_length

    assert prompt.positions[0, first:stop].tolist() == [first + time for time in times for _ in range(15)]
    behind = first + max(times[-1], 4) + 1
    for row in prompt.positions.tolist():
        assert row[:first] == list(range(first))
        assert row[stop:] == list(range(behind, behind + len(prompt) - stop))
    assert prompt.next_position == behind + len(prompt) - stop


@st.composite
def sampled_videos(draw: st.DrawFn) -> tuple[VideoFacts, FrameSampling]:
    """Few lengths, rates and parts, so that two draws often have frames in common."""
    facts = VideoFacts(draw(st.sampled_from([40, 41, 80])), 8.0, 60, 90)
    fps, num_frames = draw(st.sampled_from([(1.0, None), (2.0, None), (None, 4), (None, 8), (None, 10)]))
    return facts, FrameSampling(fps, num_frames, end_s=draw(st.sampled_from([None, 4.5, 4.9, 5.0])))


@given(video=sampled_videos(), name=st.sampled_from(["qwen2_5_vl", "qwen3_vl"]))
@DRAWN
def test_both_layouts_are_one_without_time_in_positions(
    families: dict[str, Family], video: tuple[VideoFacts, FrameSampling], name: str
) -> None:
    """Qwen3-VL tells the time in words, and a still has one instant."""
    adapters = [families[name].adapter, adapter_like_transformers(families[name].path)]
    plans = [adapters[0].plan_image(60, 90)]
    if name == "qwen3_vl":
        plans.append(adapters[0].plan_video(*video))
    first, second = (adapter.plan_prompt(plans, "?") for adapter in adapters)
    assert np.array_equal(first.positions, second.positions)
    assert first.next_position == second.next_position


@given(
    videos=st.lists(sampled_videos(), min_size=2, max_size=2),
    questions=st.lists(st.sampled_from(["a?", "ab?"]), min_size=2, max_size=2),
    images=st.lists(st.integers(0, 1), min_size=2, max_size=2),
    retention=st.sampled_from([1.0, 0.3]),
)
@DRAWN
def test_what_is_known_as_the_same_tokens_has_the_same_positions(
    families: dict[str, Family],
    videos: list[tuple[VideoFacts, FrameSampling]],
    questions: list[str],
    images: list[int],
    retention: float,
) -> None:
    """Keys hold their positions: two prompts that share a block of them must have it in one place."""
    adapter = families["qwen2_5_vl"].adapter
    prompts = []
    for video, question, num_images in zip(videos, questions, images, strict=True):
        plans = [adapter.plan_video(*video), *[adapter.plan_image(60, 90)] * num_images]
        whole = adapter.plan_prompt(plans, question)
        prompts.append(reduce_prompt(whole, ReductionPolicy(retention=retention)))
    rows = [prompt_identity(prompt, ["same"] * len(prompt.media)).rows for prompt in prompts]
    length = min(map(len, rows))
    is_equal = np.all(rows[0][:length] == rows[1][:length], axis=1)
    shared = length if is_equal.all() else int(is_equal.argmin())
    assert np.array_equal(prompts[0].positions[:, :shared], prompts[1].positions[:, :shared])


def test_a_checkpoint_may_name_the_layout_that_it_was_trained_with(checkpoints: dict[str, Path]) -> None:
    """The tiny one names none, and has the authors'; shapes-vl saw mostly the other."""
    for name, layout in zip(("qwen2_5_vl", "shapes-vl"), LAYOUTS, strict=True):
        silent, switched = load_adapter(checkpoints[name]), load_adapter(checkpoints[name], positions=layout)
        plans = [silent.plan_video(VideoFacts(64, 8.0, 360, 640), FrameSampling(fps=1.0))]
        first, second = (adapter.plan_prompt(plans, "?") for adapter in (silent, switched))
        assert np.array_equal(first.positions, second.positions)


def test_an_unknown_layout_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen2_5_vl"], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "position_layout": "other"}))
    with pytest.raises(
        ModelError, match=r"received position_layout 'other' .* allowed: authors, transformers"
    ):
        load_adapter(tmp_path / "model")
