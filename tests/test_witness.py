"""The frames that a model gets show the time that the plan says, read by tesseract; a wrong one is caught."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from benchmarks.witness import kinds, timecode
from benchmarks.witness.__main__ import Witness, report
from benchmarks.witness.clips import Clip, write
from benchmarks.witness.files import trim
from benchmarks.witness.handed import handed_by_ask
from benchmarks.witness.judge import Verdict
from epd.encoders import FrameSampling

REQUIRED = "EPD_REQUIRE_TESSERACT"
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "smolvlm")


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    if not timecode.is_installed():
        assert REQUIRED not in os.environ, f"{REQUIRED} is set, and there is no tesseract on the PATH"
        pytest.skip("no tesseract on the PATH, which reads the frames")
    witness = Witness(tmp_path_factory.mktemp("witness"), random.Random(3), FAMILIES)
    yield witness
    witness.close()


def clip_of(seconds: int, rate: int = 10) -> Clip:
    return Clip("mp4", "mp4", kinds.H264_B, (Fraction(1, rate),), seconds * rate)


def all_frames(witness: Witness, clip: Clip, path: Path) -> Verdict:
    """Judges every frame of the first two seconds."""
    return witness.asked(clip, path, FrameSampling(takes_all=True, end_s=2.0))


def test_frames_of_eight_containers_show_the_time_that_is_planned(witness: Witness) -> None:
    found = [(clip, witness.look_at(clip, 19)) for clip in kinds.few(random.Random(3))]
    assert len({clip.container for clip, _ in found}) == 8
    for clip, verdict in found:
        assert verdict.num_read >= 19, clip.name
        assert (verdict.num_wrong, verdict.num_unreadable) == (0, 0), (clip.name, verdict.reasons)


def test_the_frame_at_83_s_says_83(witness: Witness, tmp_path: Path) -> None:
    write(clip_of(90, rate=5), tmp_path / "clip.mp4")
    for model in witness.models:
        sampling = FrameSampling(takes_all=True, start_s=83.0, end_s=84.0)
        handed = handed_by_ask(model, tmp_path / "clip.mp4", sampling, model.pixels(5))
        assert timecode.read(handed.frames) == [83_000, 83_200, 83_400, 83_600, 83_800], model.family


def test_swapped_frames_are_caught(witness: Witness, tmp_path: Path) -> None:
    clip = clip_of(2)
    drawn = clip.drawn_ms
    drawn[7], drawn[8] = drawn[8], drawn[7]
    write(clip, tmp_path / "clip.mp4", drawn)
    verdict = all_frames(witness, clip, tmp_path / "clip.mp4")
    assert (verdict.num_read, verdict.num_wrong, verdict.num_unreadable) == (20, 2, 0), verdict.reasons
    assert "0.800 s is read, 0.700 s is on screen" in verdict.reasons[0]


def test_a_file_with_other_times_is_caught(witness: Witness, tmp_path: Path) -> None:
    clip = clip_of(4)
    write(replace(clip, gaps_s=(Fraction(1, 11),)), tmp_path / "clip.mp4", clip.drawn_ms)
    assert all_frames(witness, clip, tmp_path / "clip.mp4").num_wrong > 10


def test_a_frame_that_an_edit_list_hides_is_caught(witness: Witness, tmp_path: Path) -> None:
    trimmed = replace(clip_of(4), shown=((12, 40),), finish=trim)
    write(replace(trimmed, finish=None), tmp_path / "clip.mp4")
    assert all_frames(witness, trimmed, tmp_path / "clip.mp4").num_wrong > 10


def test_a_frame_that_cannot_be_read_is_not_counted_as_right(witness: Witness) -> None:
    frames = [timecode.draw(83_000), np.zeros((64, 320), np.uint8), timecode.draw(1_199_999)]
    assert witness.models
    assert timecode.read(frames) == [83_000, None, 1_199_999]


def test_what_is_drawn_says_the_time_in_seconds() -> None:
    assert timecode.text_of(83_000) == "0083.000 65"
    assert timecode.time_in("0083.000 65") == 83_000
    for place, digit in ((0, "1"), (3, "8"), (6, "6"), (10, "6")):
        text = "0083.000 65"
        assert timecode.time_in(text[:place] + digit + text[place + 1 :]) is None
    assert timecode.time_in("0083.00 65") is None


def test_the_catalogue_has_every_container_with_every_rate_that_it_can_state() -> None:
    clips = list(kinds.clips(random.Random(1)))
    rates = {clip.rate for clip in clips}
    assert rates == {f"{float(rate):.5g}" for rate in kinds.RATES.values()} | {"variable"}
    for container in ("mp4", "mov", "mkv", "webm", "ts", "flv"):
        assert {clip.rate for clip in clips if clip.container == container} == rates
    assert min(clip.duration_s for clip in clips if clip.kind == "plain") >= 1
    assert max(clip.duration_s for clip in clips) == 1200


def test_the_page_counts_and_names_what_is_wrong() -> None:
    right, wrong = Verdict(40), Verdict(20, 3, 1, ["frame 2: 1.000 s is read, 2.000 s is on screen"])
    page = report([(clip_of(2), right), (clip_of(3), wrong)], "the command")
    assert "- frames read: 60" in page
    assert "- wrong: 3" in page
    assert "60 (3, 1)" in page
    assert "1.000 s is read, 2.000 s is on screen" in page
