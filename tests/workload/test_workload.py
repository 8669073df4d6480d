"""Workloads: spreads, mixes, repeats, seeds; presets, files and traces.

Modules: `epd/workload/config.py`, `epd/workload/distributions.py`, `epd/workload/requests.py`.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.workload.arrivals import ArrivalKind, BurstyArrivals, RampArrivals, poisson_arrivals
from epd.workload.config import PRESETS, load_workload
from epd.workload.distributions import SizeDistribution
from epd.workload.requests import (
    Mix,
    PlannedRequest,
    RequestShape,
    Resolution,
    ShapeClass,
    VideoSpec,
    Workload,
)
from epd.workload.trace import parse_mooncake, parse_trace

TRACE = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15 00:00:10.5000000,2,700,112
2024-10-15 00:00:10.0000000,0,300,5
2024-10-15 00:00:14.0000000,1,100,0
"""


def workload(repeat_rate: float = 0.0, rate: float = 5.0) -> Workload:
    mix = Mix((ShapeClass(weight=1), ShapeClass(images=SizeDistribution.of(1, 3), weight=3)))
    return Workload("test", poisson_arrivals(rate), mix, num_requests=400, repeat_rate=repeat_rate)


# Spreads.


@pytest.mark.parametrize("text", ["32", "16..64", "1|4|8", "1*3|4..8*1"])
def test_a_spread_reads_what_it_writes(text: str) -> None:
    assert str(SizeDistribution.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a", "1..", "4..2", "1|", "-3", "1*0", "1...2"])
def test_what_is_no_spread_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        SizeDistribution.parse(text)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 2**32))
def test_a_spread_stays_within_its_ends(low: int, more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = SizeDistribution.of(low, low + more)
    assert all(low <= spread.draw_count(rng) <= low + more for _ in range(20))
    assert low <= spread.draw(rng) <= low + more


def test_a_spread_draws_by_weight() -> None:
    rng = np.random.default_rng(3)
    spread = SizeDistribution.parse("1*3|4..5*1")
    counts = Counter(spread.draw_count(rng) for _ in range(4000))
    assert spread.mean == pytest.approx(0.75 * 1 + 0.25 * 4.5)
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)
    assert counts[4] / 4000 == pytest.approx(0.125, abs=0.03)


# Requests.


def test_the_same_seed_and_round_give_the_same_requests() -> None:
    assert list(workload().requests(7, 1)) == list(workload().requests(7, 1))
    assert list(workload().requests(7, 1)) != list(workload().requests(8, 1))


def content(requests: list[PlannedRequest]) -> set[int]:
    return {request.media_seed for request in requests} | {request.text_seed for request in requests}


def test_every_round_and_copy_has_content_of_its_own() -> None:
    drawn = [list(workload().requests(7, *which)) for which in ((0, 0), (1, 0), (0, 1))]
    contents = [content(requests) for requests in drawn]
    assert [len(seeds) for seeds in contents] == [800, 800, 800]
    assert len(set.union(*contents)) == 2400


def times_and_shapes(requests: list[PlannedRequest]) -> list[object]:
    return [(request.due_s, request.shape) for request in requests]


def test_copies_share_times_and_shapes() -> None:
    first, other = (list(workload().requests(7, 0, copy)) for copy in (0, 1))
    assert times_and_shapes(first) == times_and_shapes(other)


def test_another_rate_asks_for_the_same_things() -> None:
    slow, quick = (list(workload(rate=rate).requests(7)) for rate in (1.0, 10.0))
    assert [request.shape for request in slow] == [request.shape for request in quick]
    assert content(slow) == content(quick)
    assert slow[-1].due_s == pytest.approx(10 * quick[-1].due_s)


def test_a_workload_ends_by_number_or_time() -> None:
    assert len(list(workload().requests(0))) == 400
    brief = Workload("brief", poisson_arrivals(5.0), Mix((ShapeClass(),)), duration_s=20.0)
    requests = list(brief.requests(0))
    assert 60 < len(requests) < 140
    assert requests[-1].due_s < 20


def test_a_mix_follows_its_weights() -> None:
    requests = list(workload().requests(0))
    assert sum(request.shape.has_media for request in requests) / 400 == pytest.approx(0.75, abs=0.08)


def test_sound_is_drawn_last_and_only_where_it_is_wanted() -> None:
    silent = {"images": "1..3", "videos": "0..1", "video_s": "1..9"}
    drawn = [
        list(load_workload(None, {"num_requests": 50, "mix": [part]}).resolve().requests(5))
        for part in (silent, {**silent, "audios": "0"}, {**silent, "audios": "1..2", "audio_s": "0.5..8"})
    ]
    assert drawn[0] == drawn[1]
    clips = [each.shape.audios for each in drawn[2]]
    assert {len(each) for each in clips} == {1, 2}
    assert all(0.5 <= clip.duration_s <= 8 for each in clips for clip in each)
    assert drawn[2][0].shape.images == drawn[0][0].shape.images  # of the first, nothing was drawn before
    config = load_workload(None, {"repeat_rate": 0.9, "num_requests": 50, "mix": [{"audios": 1}]})
    again = [each for each in config.resolve().requests(5) if each.repeat_of is not None]
    assert again
    assert all(each.shape.audios for each in again)


def test_repeats_ask_anew_about_known_media() -> None:
    requests = list(workload(repeat_rate=0.4).requests(0))
    repeats = [request for request in requests if request.repeat_of is not None]
    assert len(repeats) / 400 == pytest.approx(0.4, abs=0.08)
    for request in repeats:
        assert request.repeat_of is not None
        first = requests[request.repeat_of]
        assert first.index < request.index
        assert first.repeat_of is None
        assert (first.media_seed, first.shape.images) == (request.media_seed, request.shape.images)
        assert (first.text_seed == request.text_seed) is not request.shape.has_media


def test_a_skew_prefers_the_latest_media() -> None:
    """How far back the media of a repeat lie, among those with media: half of 256, or a few."""

    def distances(skew: float) -> list[int]:
        drawn = replace(workload(repeat_rate=0.5), num_requests=2000, repeat_skew=skew).requests(0)
        new: list[int] = []
        found = []
        for request in drawn:
            if request.shape.has_media and request.repeat_of is not None:
                found.append(len(new) - new.index(request.repeat_of))
            elif request.shape.has_media:
                new.append(request.index)
        return found

    even, skewed = distances(0.0), distances(1.5)
    assert 80 < median(even[len(even) // 2 :]) < 180
    assert median(skewed) <= 3
    assert max(skewed) > 30


def test_each_medium_is_asked_about_as_often_as_said() -> None:
    drawn = list(replace(workload(), num_requests=1200, questions_per_media=4).requests(3))
    counts = Counter(request.media_seed for request in drawn if request.shape.has_media)
    assert max(counts.values()) == 4
    assert sum(count == 4 for count in counts.values()) > 0.9 * len(counts)
    assert all(request.repeat_of is None for request in drawn if not request.shape.has_media)
    firsts = {request.index: request for request in drawn if request.repeat_of is None}
    for request in drawn:
        if request.repeat_of is not None:
            assert firsts[request.repeat_of].shape.images == request.shape.images
    neighbours = [one.media_seed == two.media_seed for one, two in pairwise(drawn)]
    assert sum(neighbours) < 0.2 * len(drawn)  # mixed with those about others


def test_repeats_are_given_in_one_way() -> None:
    with pytest.raises(RequestError, match="only one of the two"):
        replace(workload(repeat_rate=0.5), questions_per_media=2)
    with pytest.raises(RequestError, match="skew"):
        replace(workload(repeat_rate=0.5), repeat_skew=-1.0)
    assert not workload().has_repeats
    assert replace(workload(), questions_per_media=2).has_repeats


def test_repeating_leaves_the_others_content_as_it_was() -> None:
    plain, repeating = (list(workload(repeat_rate=rate).requests(0)) for rate in (0.0, 0.4))
    new = [request for request in repeating if request.repeat_of is None]
    assert all(request == plain[request.index] for request in new)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Resolution(31, 64),
        lambda: Resolution.parse("640"),
        lambda: ShapeClass(weight=0.0),
        lambda: ShapeClass(video_s=SizeDistribution.of(0)),
        lambda: ShapeClass(video_fps=0),
        lambda: Mix(()),
        lambda: workload(repeat_rate=1.1),
        lambda: Workload("x", poisson_arrivals(1.0), Mix((ShapeClass(),)), num_requests=0),
        lambda: Workload("x", poisson_arrivals(1.0), Mix((ShapeClass(),)), duration_s=-1.0),
        lambda: next(workload().requests(-1)),
        lambda: next(
            Workload(
                "x", poisson_arrivals(1.0), Mix((ShapeClass(text_tokens=SizeDistribution.of(0)),)), 1
            ).requests(0)
        ),
    ],
)
def test_what_makes_no_sense_is_refused(build: object) -> None:
    with pytest.raises(RequestError):
        build()  # type: ignore[operator]


# Presets and files.


@pytest.mark.parametrize("name", PRESETS)
def test_presets_draw_what_they_are_called(name: str) -> None:
    shapes = [request.shape for request in load_workload(name).resolve().requests(0)]
    has_images = any(shape.images for shape in shapes)
    has_videos = any(shape.videos for shape in shapes)
    assert (has_images, has_videos) == (name in ("images", "mixed"), name in ("video", "mixed"))


def test_options_replace_fields_of_every_part_that_has_them() -> None:
    config = load_workload(
        "mixed",
        {"num_requests": 200},
        {"images": "2", "image_size": "64x32", "video_s": "5", "output_tokens": "3"},
    )
    shapes = [request.shape for request in config.resolve().requests(0)]
    assert len(shapes) == 200
    assert {shape.output_tokens for shape in shapes} == {3}
    assert {shape.images for shape in shapes} == {(), (Resolution(64, 32),) * 2}
    assert {shape.videos for shape in shapes} == {(), (VideoSpec(5.0, 24, Resolution(640, 360)),)}


FILE = {
    "arrival": "bursty",
    "rate": 3,
    "burstiness": 0.5,
    "duration_s": 10,
    "mix": [{"weight": 2, "images": "1|4", "image_size": ["64x64", "128x96"], "text_tokens": 9}],
}
YAML = """
arrival: bursty
rate: 3
burstiness: 0.5
duration_s: 10
mix:
  - {weight: 2, images: 1|4, image_size: [64x64, 128x96], text_tokens: 9}
"""


def test_a_file_in_json_or_yaml_is_a_workload(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(FILE))
    (tmp_path / "mine.yaml").write_text(YAML)
    as_json, as_yaml = (load_workload(str(tmp_path / f"mine.{end}")) for end in ("json", "yaml"))
    assert as_json == as_yaml
    assert as_json.name == "mine"
    resolved = as_json.resolve()
    assert resolved.arrivals == BurstyArrivals(3.0, 0.5)
    images = {size for request in resolved.requests(0) for size in request.shape.images}
    assert images == {Resolution(64, 64), Resolution(128, 96)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not YAML or JSON"),
        ("[]", "mapping"),
        ('{"rat": 1}', "rat is 1"),
        ('{"mix": [{"pictures": 1}]}', "mix.0.pictures"),
        ('{"rate": "fast"}', "rate is 'fast'"),
        ('{"mix": 3}', "mix is 3"),
    ],
)
def test_a_file_that_makes_no_sense_gives_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=words):
        load_workload(str(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_requests": None}, "no end"),
        ({"arrival": "trace"}, "no trace"),
        ({"arrival": "ramp", "trace": "x.csv"}, "leave one"),
        ({"arrival": "closed", "num_requests": None, "duration_s": 5.0}, "closed loop"),
        ({"trace": "/no/such/trace.csv"}, "cannot be read"),
    ],
)
def test_fields_that_contradict_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load_workload("text", fields).resolve()


def test_a_ramp_lasts_as_long_as_the_run() -> None:
    by_number = load_workload(
        "text", {"arrival": ArrivalKind.RAMP, "rate": 4.0, "num_requests": 100}
    ).resolve()
    assert by_number.arrivals == RampArrivals(0.0, 4.0, 50.0)
    by_time = load_workload("text", {"arrival": "ramp", "rate": 4.0, "duration_s": 30.0}).resolve()
    assert by_time.arrivals == RampArrivals(0.0, 4.0, 30.0)


# Traces.


def test_a_trace_is_sorted_and_starts_at_zero() -> None:
    rows = parse_trace(TRACE.splitlines())
    assert [row.time_s for row in rows] == pytest.approx([0.0, 0.5, 4.0])
    assert [row.num_images for row in rows] == [0, 2, 1]
    assert [row.context_tokens for row in rows] == [300, 700, 100]
    assert len(parse_trace(TRACE.splitlines(), max_rows=2)) == 2


def test_seconds_and_other_columns_will_do() -> None:
    text = "user,generatedtokens, timestamp ,ContextTokens,VideoSeconds\nann,3,17.5,40,2.5\nbob,4,18,41,"
    rows = parse_trace(text.splitlines())
    assert [(row.time_s, row.num_images, row.video_s) for row in rows] == [(0.0, 0, 2.5), (0.5, 0, 0.0)]


@pytest.mark.parametrize("end", ["csv", "csv.gz"])
def test_a_trace_file_is_a_workload(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"trace.{end}"
    path.write_bytes(gzip.compress(TRACE.encode()) if end == "csv.gz" else TRACE.encode())
    config = load_workload(None, {"trace": str(path), "rate": 4.0}, {"image_size": "64x64"})
    requests = list(config.resolve().requests(0))
    # Two gaps at a mean rate of 4 per second: 0.5 s in all.
    assert [request.due_s for request in requests] == pytest.approx([0.0, 0.0625, 0.5])
    assert [request.shape.text_tokens for request in requests] == [300, 700 - 2 * 256, 1]
    assert [request.shape.output_tokens for request in requests] == [5, 112, 1]
    assert [len(request.shape.images) for request in requests] == [0, 2, 1]
    assert requests[1].shape.images == (Resolution(64, 64),) * 2


def test_a_trace_of_mooncake_is_texts_alone(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 500, "input_length": 12, "output_length": 0, "hash_ids": []},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    requests = list(load_workload(None, {"trace": str(path)}).resolve().requests(0))
    assert [(one.due_s, one.shape) for one in requests] == [
        (0.0, RequestShape(12, 1)),
        (2.5, RequestShape(6955, 52)),
    ]


@pytest.mark.parametrize(
    "line", ["{", '{"timestamp": 1}', '{"timestamp": 1, "input_length": "x", "output_length": 2}']
)
def test_a_damaged_trace_of_mooncake_is_named_by_line(line: str) -> None:
    good = '{"timestamp": 1, "input_length": 2, "output_length": 3}'
    with pytest.raises(RequestError, match="line 2 of the trace"):
        parse_mooncake([good, line])
    with pytest.raises(RequestError, match=r"line 1 of the trace: received -2; allowed: 0 to "):
        parse_mooncake([good.replace("2", "-2")])


def test_token_counts_that_are_given_cap_those_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    fields = {"trace": str(tmp_path / "trace.csv")}
    config = load_workload(None, fields, {"text_tokens": "100", "output_tokens": "10"})
    shapes = [request.shape for request in config.resolve().requests(0)]
    assert [(shape.text_tokens, shape.output_tokens) for shape in shapes] == [(100, 5), (100, 10), (1, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns none"),
        ("TIMESTAMP,ContextTokens\n1,2", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\nyesterday,2,3", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,-3", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2", "line 2"),
    ],
)
def test_a_damaged_trace_is_named_by_line(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_trace(text.splitlines())
