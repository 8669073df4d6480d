"""Profiles: the cost formula, its fit, JSON, and what is computed for devices that are not at hand.

Modules: `epd/profiles/cost.py`, `epd/profiles/files.py`, `epd/profiles/media.py`, `epd/profiles/profile.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epd.encoders.groups import plan_groups
from epd.encoders.plans import Grid, MediaPlan
from epd.errors import RequestError
from epd.profiles.analytic import Efficiency, analytic_profile
from epd.profiles.catalogue import MODELS
from epd.profiles.cost import Measurement, StageCost, fit_table
from epd.profiles.files import dump_profile, load_profile, parse_profile
from epd.profiles.media import MediaRule, MediaWork
from epd.profiles.memory import MemoryLimits
from epd.workload.requests import AudioClip, Resolution, VideoSpec

FOUR_K = Resolution(4032, 3024)


def test_a_cost_is_a_roofline_and_a_slope() -> None:
    cost = StageCost(fixed_s=1.0, floor_s=2.0, per_unit_s=0.5, per_item_s=0.25)
    assert cost.seconds(1) == 3.0
    assert cost.seconds(10) == 6.0
    assert cost.seconds(10, 4) == 7.0
    assert StageCost(fixed_s=1.0).seconds(10, 4) == 1.0, "what is not given costs nothing"
    assert StageCost(floor_s=2.0, per_unit_s=0.5).seconds(1, 100) == 2.0
    with pytest.raises(ValueError, match="at least 0"):
        StageCost(fixed_s=-1.0)


@pytest.mark.parametrize(
    "truth", [StageCost(0.01, 0.0, 2e-4, 3e-6), StageCost(0.0, 0.0, 1e-3), StageCost(0.5)]
)
def test_a_fit_finds_the_cost_that_made_the_points(truth: StageCost) -> None:
    points = [
        Measurement(units, items, truth.seconds(units, items), 0.0, 3)
        for units in (16, 256, 1024)
        for items in (1, 500, 90_000)
    ]
    table = fit_table("new tokens", "token pairs", points)
    assert table.error < 1e-9
    for point in points:
        assert table.cost.seconds(point.units, point.items) == pytest.approx(point.median_s)
    assert table.is_valid(1024, 500)
    assert not table.is_valid(1025, 500)
    assert not table.is_valid(16, 0)


def test_a_fit_never_has_a_negative_coefficient() -> None:
    points = [Measurement(units, 1, seconds, 0.0, 3) for units, seconds in ((1, 0.5), (10, 0.45), (20, 0.4))]
    cost = fit_table("patches", "groups", points).cost
    assert min(cost.fixed_s, *cost.slopes) >= 0
    with pytest.raises(ValueError, match="at least 1 measurement"):
        fit_table("patches", "groups", [])


def test_json_keeps_everything() -> None:
    point = Measurement(16, 1, 0.5, 0.01, 3)
    profile = analytic_profile("h100", "qwen2.5-vl-7b")
    measured = replace(profile, is_analytic=False, encode=fit_table("patches", "groups", [point]))
    for each in (profile, measured):
        assert parse_profile(dump_profile(each)) == each
    assert "seconds" in json.loads(dump_profile(profile))["units"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"fixed_s"', '"fixed"', "profile.encode.cost.fixed"),
        ('"price_per_hour"', '"price"', "profile.price"),
        ('"epd profile, version 1"', '"something"', "format"),
        ('"per_unit_s": ', '"per_unit_s": -', "profile.encode.cost"),
        ("{", "[", "the file"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_place(old: str, new: str, words: str) -> None:
    text = dump_profile(analytic_profile("h100", "qwen2.5-vl-7b"))
    with pytest.raises(RequestError, match=words):
        parse_profile(text.replace(old, new, 1))


def test_profiles_by_name_and_by_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    profile = load_profile("qwen3-vl-8b@h200")
    assert profile.is_analytic
    assert any("nothing was measured" in line for line in profile.assumptions)
    path = tmp_path / "mine.json"
    path.write_text(dump_profile(profile))
    assert load_profile(str(path)) == profile
    for name in ("qwen3-vl-8b@abacus", "nothing@h100", "no-such-file.json"):
        with pytest.raises(RequestError, match=r"known are|neither"):
            load_profile(name)


@pytest.mark.parametrize(
    ("model", "billions", "vision_billions"),
    [
        ("minicpm-v-2.6", 7.6, 0.41),
        ("internvl2-8b", 7.7, 0.30),
        ("internvl2-26b", 19.9, 5.5),
        ("qwen2.5-vl-7b", 7.6, 0.67),
        ("qwen3-vl-4b", 4.0, 0.30),
        ("qwen3-vl-8b", 8.2, 0.41),
        ("videollama3-7b", 7.6, 0.41),
        ("gemma-4-e2b", 5.1 - 0.3 - 0.15, 0.15),  # of which it hears with 0.3
        ("gemma-4-e4b", 8.0 - 0.3 - 0.15, 0.15),
        ("gemma-4-26b-a4b", 25.2, 0.55),
        ("gemma-4-31b", 30.7, 0.55),
        ("glm-4.5v-106b-a12b", 106.0, 0.68),
    ],
)
def test_parameters_are_those_of_the_published_models(
    model: str, billions: float, vision_billions: float
) -> None:
    shape = MODELS[model]
    assert shape.language.num_parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert shape.vision.num_parameters / 1e9 == pytest.approx(vision_billions, rel=0.08)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("gemma-4-e2b", 2.3), ("gemma-4-e4b", 4.5), ("gemma-4-26b-a4b", 3.8), ("glm-4.5v-106b-a12b", 12.0)],
)
def test_a_token_computes_the_published_active_parameters(model: str, billions: float) -> None:
    """Each is two FLOPs, beside attention in windows; of GLM the page rounds down, or has no head."""
    of = MODELS[model].language
    windows = 4 * of.windowed.num_layers * of.num_heads * of.windowed.head_dim * of.windowed.window
    assert (of.flops_per_token - windows) / 2e9 == pytest.approx(billions, rel=0.07)


def test_a_decode_step_reads_the_weights_and_a_prefill_computes() -> None:
    """7.6 billion parameters in 16 bit over 70 % of 2.04 TB/s; 2 FLOPs each at half of 312 TFLOP/s."""
    efficiency = Efficiency(compute=0.5, launch_s=0.0, replay_s=0.0)
    profile = analytic_profile("a100-80gb", "qwen2.5-vl-7b", efficiency)
    assert profile.decode.cost.seconds(1) == pytest.approx(15.23e9 / (0.7 * 2.039e12), rel=0.01)
    assert profile.prefill.cost.seconds(4096) == pytest.approx(4096 * 2 * 7.07e9 / 156e12, rel=0.02)


def test_small_passes_wait_for_the_host_and_replayed_steps_do_not() -> None:
    """Our H100, measured (benchmarks/results/gpu_profile.md): 18.21 ms for 256 tokens, 6.24 ms for a step."""
    profile = analytic_profile("h100", "qwen2.5-vl-7b")
    assert profile.prefill.cost.seconds(1) == profile.prefill.cost.seconds(256) == pytest.approx(18.21e-3)
    assert profile.prefill.cost.seconds(2048, 2048 * 2049 / 2) == pytest.approx(47.61e-3, rel=0.01)
    assert profile.encode.cost.seconds(1) == pytest.approx(32 * 18.21e-3 / 28)
    assert profile.decode.cost.seconds(1, 2048) == pytest.approx(6.24e-3, rel=0.1)


def test_faster_devices_cost_less_time() -> None:
    names = ("a100-80gb", "h100", "h200")
    a100, h100, h200 = (analytic_profile(name, "qwen3-vl-8b") for name in names)
    assert a100.encode.cost.seconds(65536) > h100.encode.cost.seconds(65536)
    assert h100.decode.cost.seconds(64, 64_000) > h200.decode.cost.seconds(64, 64_000)
    limits = MemoryLimits()
    room = h100.memory.worker({"prefill"}, limits).kv_tokens
    assert h200.memory.worker({"prefill"}, limits).kv_tokens > room
    assert room > h100.memory.worker({"encode", "prefill"}, limits).kv_tokens


def test_media_become_the_patches_that_the_papers_state() -> None:
    """A 4032x3024 image: 10 tiles for MiniCPM-V, 13 for InternVL2 (EPD, section 4)."""
    assert MODELS["minicpm-v-2.6"].media.image(FOUR_K).num_patches == 10 * 1024
    assert MODELS["minicpm-v-2.6"].media.image(FOUR_K).num_tokens == 640
    assert MODELS["internvl2-8b"].media.image(FOUR_K).num_patches == 13 * 1024
    assert MODELS["minicpm-v-2.6"].media.image(Resolution(448, 448)).num_tokens == 64
    grid = MODELS["qwen2.5-vl-7b"].media.image(Resolution(1288, 728))
    assert (grid.num_patches, grid.num_tokens) == (92 * 52, 46 * 26)


def test_a_clip_is_padded_and_becomes_tokens_by_its_length() -> None:
    hears = MediaRule("clips", 1, tile_patches=1500)
    assert hears.audio(AudioClip(2.0)) == MediaWork(1500, 50)
    assert hears.audio(AudioClip(0.01)).num_tokens == 1
    with pytest.raises(RequestError, match="a model that hears"):
        hears.image(FOUR_K)
    with pytest.raises(RequestError, match="a model that hears"):
        hears.video(VideoSpec(10.0, 24, FOUR_K))
    with pytest.raises(RequestError, match="a model that sees"):
        MODELS["qwen2.5-vl-7b"].media.audio(AudioClip(2.0))


def test_a_video_becomes_groups_of_what_is_sampled() -> None:
    media = MODELS["qwen2.5-vl-7b"].media
    groups = media.video(VideoSpec(10.0, 24, Resolution(644, 364)))
    assert [group.num_frames for group in groups] == [8, 8, 4]
    assert [group.num_tokens for group in groups] == [4 * 23 * 13, 4 * 23 * 13, 2 * 23 * 13]
    assert media.num_sampled(VideoSpec(3600.0, 24, Resolution(644, 364))) == media.max_frames


@pytest.mark.parametrize("group_tokens", [256, 1000, 2048])
def test_a_video_is_cut_by_tokens_as_the_server_cuts_it(group_tokens: int) -> None:
    media = replace(MODELS["qwen2.5-vl-7b"].media, group_tokens=group_tokens)
    groups = media.video(VideoSpec(20.0, 24, Resolution(644, 364)))
    plan = MediaPlan(
        "video", (364, 644), Grid(20, 26, 46), 2, 23 * 13, tuple(0.5 * n for n in range(40)), unit_span_s=1.0
    )
    planned = plan_groups([plan], ["a"], model="m", group_tokens=group_tokens)
    assert [group.num_tokens for group in groups] == [group.spec.num_embeddings for group in planned]
    assert [group.num_frames for group in groups] == [group.num_frames for group in planned]
