"""A day of ServeGen's clients, in folders written as its data are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving.servegen import draw_day
from epd.errors import RequestError
from epd.workload.requests import Resolution
from epd.workload.trace_media import TraceMedia

SILENT = dict.fromkeys(("text_tokens", "image_tokens", "image_count", "output_tokens"), "{0: 1.0}")
PICTURES = {
    "text_tokens": "{50: 0.25, 60: 0.75}",
    "image_tokens": "{16: 0.5, 64: 0.5}",
    "image_count": "{0: 0.5, 3: 0.5}",
    "output_tokens": "{12: 1.0}",
    "audio_count": "{0: 1.0}",
    "video_count": "{0: 1.0}",
}
LONG = {"output_tokens": "{13: 1.0}"}
CLIENTS = {
    0: (
        "0,2.0,1.0,Gamma,1.0,0.5\n600,1.0,1.0,Gamma,1.0,1.0\n1200,0,0,,0,0\n",
        {"0": PICTURES, "600": PICTURES | LONG},
    ),
    # It has sizes from 600 on, and sends before.
    1: (
        "0,0.5,1.0,Weibull,1.0,2.0\n600,0,0,,0,0\n1200,0.1,1.0,Weibull,1.0,10.0\n",
        {"0": SILENT, "600": PICTURES | {"text_tokens": "{7: 1.0}"}},
    ),
}


def write(folder: Path, clients: dict[int, tuple[str, dict[str, dict[str, str]]]] = CLIENTS) -> Path:
    for number, (windows, sizes) in clients.items():
        (folder / f"chunk-{number}-trace.csv").write_text(windows)
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(sizes))
    return folder


def test_each_client_sends_as_many_in_each_window(tmp_path: Path) -> None:
    day = draw_day(write(tmp_path))
    sent = Counter((one.text_tokens == 7, one.time_s // 600) for one in day)
    assert sent == {(False, 0): 1200, (False, 1): 600, (True, 0): 300, (True, 2): 60}
    times_s = [one.time_s for one in day]
    assert times_s == sorted(times_s)
    gaps = np.diff([one.time_s for one in day if one.text_tokens != 7 and one.time_s < 600])
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.1), "gaps of this shape are exponential"


def test_sizes_are_drawn_by_their_shares(tmp_path: Path) -> None:
    day = [one for one in draw_day(write(tmp_path)) if one.text_tokens != 7]
    assert Counter(len(one.image_tokens) for one in day).keys() == {0, 3}
    images = [number for one in day for number in one.image_tokens]
    assert set(images) == {16, 64}
    assert np.mean(images) == pytest.approx(40, rel=0.1)
    assert np.mean([one.text_tokens == 60 for one in day]) == pytest.approx(0.75, abs=0.05)
    assert {(one.output_tokens, one.time_s // 600) for one in day} == {(12, 0), (13, 1)}


def test_the_day_is_always_the_same_and_its_beginning_too(tmp_path: Path) -> None:
    day = draw_day(write(tmp_path))
    assert draw_day(tmp_path) == day
    assert draw_day(tmp_path, 100) == day[:100]


def test_images_become_as_many_tokens(tmp_path: Path) -> None:
    sizes = {size for one in draw_day(write(tmp_path)) for size in one.shape(TraceMedia()).images}
    assert sizes == {Resolution(112, 112), Resolution(224, 224)}


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (("0,1.0,1.0,Pareto,1.0,1.0\n", {"0": PICTURES}), "no window of Gamma or Weibull"),
        (("0,1.0\n", {"0": PICTURES}), "chunk-0-trace.csv of ServeGen cannot be read"),
        (("0,1.0,1,Gamma,1.0,1.0\n", {"0": PICTURES | {"video_count": "{1: 1.0}"}}), "video_count is above"),
        (("0,1.0,1.0,Gamma,1.0,1.0\n", {"0": PICTURES | {"image_count": "{}"}}), "'{}' is no distribution"),
        (("0,1.0,1.0,Gamma,1.0,1.0\n", {"0": {}}), "its two files must be as published"),
        (("0,0,0,,0,0\n600,0,0,,0,0\n", {"0": PICTURES}), "send no request"),
    ],
)
def test_files_that_make_no_sense_are_named(
    tmp_path: Path, client: tuple[str, dict[str, dict[str, str]]], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        draw_day(write(tmp_path, {0: client}))


def test_another_folder_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no clients of ServeGen; allowed: files chunk-N-trace\.csv"):
        draw_day(tmp_path)
