"""A part of a video: its frames are those that a decoder gives for it, told as the whole video's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from epd.encoders import FrameSampling
from epd.encoders.families.qwen3_vl import Qwen3VLAdapter
from epd.encoders.groups import plan_groups
from epd.errors import RequestError
from epd.types import StageTimings
from tests.colocated import decode_groups, plan_media
from tests.encoders.families import QUESTION, Clip, Family
from tests.media import write_video
from tests.stages.encode.workers import noise

CLIP = Clip(noise(60, 56, 84, 3), 10.0)
# (start_s, end_s) and the frames that begin within, at 10 a second.
PARTS = (
    (0.0, None, 0, 60),
    (2.0, 4.0, 20, 40),
    (0.25, 3.05, 3, 31),
    (0.3, 0.7, 3, 7),
    (5.5, None, 55, 60),
    (5.5, 99.0, 55, 60),
    (5.5, 1e308, 55, 60),
    (1.0, 1.05, 10, 11),
)


@pytest.mark.parametrize(("start_s", "end_s", "first", "stop"), PARTS)
@pytest.mark.parametrize(
    "sampling", [FrameSampling(), FrameSampling(fps=2.0), FrameSampling(num_frames=6)], ids=str
)
def test_a_part_is_planned_as_a_video_of_its_own_at_the_whole_ones_times(
    family: Family, sampling: FrameSampling, start_s: float, end_s: float | None, first: int, stop: int
) -> None:
    plan = family.plan(CLIP, replace(sampling, start_s=start_s, end_s=end_s))
    alone = family.plan(replace(CLIP, frames=CLIP.frames[first:stop]), sampling)
    assert plan.frame_indices == tuple(first + index for index in alone.frame_indices)
    assert plan.times_s == pytest.approx([first / 10 + time_s for time_s in alone.times_s])
    assert (plan.size, plan.grid, plan.unit_span_s) == (alone.size, alone.grid, alone.unit_span_s)


def test_the_prompt_tells_times_of_the_whole_video(families: dict[str, Family]) -> None:
    family = families["qwen3_vl"]
    assert isinstance(family.adapter, Qwen3VLAdapter)
    sampling = FrameSampling(num_frames=4, start_s=4.0, end_s=4.4)
    prompt = family.adapter.plan_prompt([family.plan(CLIP, sampling)], QUESTION)
    text = family.adapter.tokenizer.decode(prompt.token_ids)
    assert "<4.0 seconds>" in text or "<4.1 seconds>" in text
    assert "<0." not in text


def test_parts_share_the_groups_that_show_the_same(families: dict[str, Family]) -> None:
    """And no others: keys are made of the frames' own times."""
    family = families["internvl"]

    def keys(start_s: float, end_s: float) -> set[object]:
        plan = family.plan(CLIP, FrameSampling(fps=10.0, start_s=start_s, end_s=end_s))
        groups = plan_groups([plan], ["a"], model="m", group_tokens=plan.tokens_per_unit)
        return {group.spec.key for group in groups}

    assert len(keys(1.0, 3.0) & keys(2.0, 4.0)) == 10
    assert not keys(1.0, 2.0) & keys(2.0, 3.0)


@pytest.mark.parametrize(
    ("start_s", "end_s", "first", "stop"), [(1.0, 2.5, 10, 25), (0.25, 3.05, 3, 31), (3.5, None, 35, 40)]
)
def test_frames_are_those_that_decoding_in_order_gives(
    families: dict[str, Family], tmp_path: Path, start_s: float, end_s: float | None, first: int, stop: int
) -> None:
    """Of a size that suits the model, so that no pixel is resized; B-frames, keyframes every two seconds."""
    path = write_video(tmp_path / "clip.mp4", height=56, width=84)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = [
            frame.to_ndarray(format="rgb24")
            for frame in container.decode(stream)
            if start_s <= frame.time < (99.0 if end_s is None else end_s)
        ]
    assert len(shown) == stop - first
    sampling = FrameSampling(fps=10.0, start_s=start_s, end_s=end_s)
    media = plan_media(families["smolvlm"].adapter, path, sampling)
    assert media.plan.size == (56, 84)
    groups = list(decode_groups([media], 256, StageTimings()))
    wanted = [shown[index - first] for index in media.plan.frame_indices]
    assert np.array_equal(np.concatenate([each.frames.numpy() for each in groups]), np.stack(wanted))
    assert len(wanted) > len(shown) // 2


@pytest.mark.parametrize(
    ("start_s", "end_s", "words"),
    [
        (-1.0, None, "the part from -1 to its end of a video; allowed: 0 <= start_s < end_s"),
        (2.0, 2.0, "the part from 2 to 2 s of a video; allowed: 0 <= start_s < end_s"),
        (3.0, 2.0, "the part from 3 to 2 s"),
        (float("nan"), 2.0, "the part from nan to 2 s"),
        (0.0, float("nan"), "the part from 0 to nan s"),
        (6.0, None, "[6, 6) s, in which no frame begins; allowed: parts of [0, 6) s, a frame every 0.1 s"),
        (7.0, 9.0, "the part [7, 9) s, in which no frame begins"),
        (1e308, None, "the part [1e+308, 6) s, in which no frame begins"),
        (1e300, 1e308, "the part [1e+300, 1e+308) s, in which no frame begins"),
        (0.11, 0.19, "the part [0.11, 0.19) s, in which no frame begins"),
    ],
)  # fmt: skip
def test_a_part_without_frames_is_refused(
    family: Family, start_s: float, end_s: float | None, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        family.plan(CLIP, FrameSampling(start_s=start_s, end_s=end_s))
    assert words in str(caught.value)
