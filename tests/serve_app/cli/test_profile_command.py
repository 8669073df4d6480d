"""The command `epd profile`: the embedded model measured on this machine, and used by the simulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epd.profiles.files import load_profile
from epd.profiles.measuring import measured, measurement
from epd.profiles.profile import Profile
from epd.serve_app.cli.program import app
from tests import ROOT


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "mine.json"
    app(["profile", "shapes-vl", "--repeats", "1", "--out", str(path)], standalone_mode=False)
    return path


@pytest.fixture(scope="module")
def mine(path: Path) -> Profile:
    return load_profile(str(path))


def test_every_stage_is_measured(mine: Profile) -> None:
    assert not mine.is_analytic
    assert (mine.device, mine.dtype) == ("this-machine", "float32")
    stages = [mine.encode, mine.prefill, mine.decode, mine.transfer, mine.video["h264"], mine.images]
    for stage in stages:
        assert stage is not None
        assert len({(point.units, point.items) for point in stage.measurements}) >= 3
        assert all(stage.is_valid(point.units, point.items) for point in stage.measurements)
    assert mine.encode.cost.seconds(1024) > mine.encode.cost.seconds(16)
    assert mine.prefill.cost.seconds(512, 512 * 256) > mine.prefill.cost.seconds(32, 32 * 16)
    assert mine.memory.kv_bytes_per_token > 0
    assert 0 < mine.switch_s != type(mine).__dataclass_fields__["switch_s"].default
    assert 1_000 < mine.memory.encode_bytes_per_patch < 50_000
    assert 1_000 < mine.memory.prefill_bytes_per_token < 50_000
    assert mine.memory.vision_weight_bytes < mine.memory.language_weight_bytes


# What earlier tests of a process left resident is no growth, so this is measured in one of its own.
_RUNTIME = """
import torch
from epd.models import embedded_model_path
from epd.stages.profiling import Profiler
with torch.inference_mode():
    print(Profiler(embedded_model_path(), 1).memory().fixed_bytes)
"""


def test_the_runtime_of_a_process_is_measured() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _RUNTIME], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert 10**6 < float(run.stdout) < 10**9


def test_values_in_8_bits_are_measured_as_such(mine: Profile) -> None:
    """Passes run over a cache of such values, and a token's room is that of the cache."""
    from epd.models import embedded_model_path
    from epd.stages.profiling import Profiler

    profiler = Profiler(embedded_model_path(), 1, kv_cache_dtype="int8_values")
    (group,) = profiler.engine.pools.groups
    assert group.layout.int8_values
    with torch.inference_mode():
        kv_bytes = profiler.memory().kv_bytes_per_token
    assert kv_bytes == group.layout.bytes_per_token < mine.memory.kv_bytes_per_token


def test_media_become_what_the_adapter_plans(mine: Profile) -> None:
    """The rule that was read off a few plans equals the adapter's plans of others."""
    from epd.encoders import FrameSampling, VideoFacts, load_adapter
    from epd.models import embedded_model_path
    from epd.workload.requests import Resolution, VideoSpec

    adapter = load_adapter(embedded_model_path())
    plan = adapter.plan_video(VideoFacts(720, 24.0, 360, 640), FrameSampling())
    groups = mine.media.video(VideoSpec(30.0, 24, Resolution(640, 360)))
    assert sum(group.num_tokens for group in groups) == pytest.approx(plan.num_tokens, rel=0.25)
    image = adapter.plan_image(448, 448)
    assert mine.media.image(Resolution(448, 448)).num_tokens == pytest.approx(image.num_tokens, rel=0.25)


def test_a_measured_profile_can_be_simulated_and_planned(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.planning.asked.MOST_REQUESTS", 30)
    app(
        ["simulate", "--profile", str(path), "--workload", "video", "--rate", "1", "--num-requests", "10"],
        standalone_mode=False,
    )
    assert "10 requests" in capsys.readouterr().out
    app(
        ["plan", "--profile", str(path), "--workload", "video", "--gpus", "2", "--slo-ttft-s", "5"],
        standalone_mode=False,
    )
    assert capsys.readouterr().out.startswith("run ")


def test_a_model_that_hears_is_measured_with_clips(audio_checkpoint: Path, tmp_path: Path) -> None:
    from benchmarks.score.calibrating import simulated_figures
    from epd.encoders import load_adapter
    from epd.simulate import Deployment
    from epd.topology import parse_topology
    from epd.workload.config import load_workload
    from epd.workload.requests import AudioClip

    path = tmp_path / "hears.json"
    app(["profile", str(audio_checkpoint), "--repeats", "1", "--out", str(path)], standalone_mode=False)
    found, adapter = load_profile(str(path)), load_adapter(audio_checkpoint)
    assert found.audio is not None
    assert (found.video, found.images) == ({}, None)
    assert 0 < found.memory.vision_weight_bytes < found.memory.language_weight_bytes
    for seconds in (0.5, 1.0, 1.7):
        plan, work = adapter.plan_audio(round(seconds * 16_000)), found.media.audio(AudioClip(seconds))
        assert work.num_patches == plan.grid.num_patches
        assert work.num_tokens == pytest.approx(plan.num_tokens, abs=1)
    part = {"audios": 2, "audio_s": 1, "output_tokens": 2}
    workload = load_workload(None, {"rate": 0.1, "num_requests": 3, "mix": [part]}).resolve()
    figures = simulated_figures(found, Deployment(parse_topology("1e1p1d")), workload, 0)
    assert figures.encode_s > 0
    assert figures.ttft_s > found.audio.cost.seconds(1.0) + found.encode.cost.seconds(100)


def test_a_computed_profile_is_printed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    app(["profile", "qwen3-vl-8b@h200"], standalone_mode=False)
    assert "nothing was measured" in capsys.readouterr().out
    app(["profile", "qwen3-vl-8b@h200", "--kv-cache-dtype", "int8_values"], standalone_mode=False)
    assert "values in 8 bits are read at the same bandwidth" in capsys.readouterr().out
    app(["profile", "qwen3-vl-8b@h200", "--quantization", "fp8"], standalone_mode=False)
    assert "products in FP8 are computed as fast as in 16 bits" in capsys.readouterr().out
    assert app(["profile", "--repeats", "0"], standalone_mode=False) == 2


def test_points_are_measured_in_turns_after_one_run_that_does_not_count() -> None:
    calls: list[str] = []
    points = [(1.0, 0.0, lambda: calls.append("a")), (2.0, 0.0, lambda: calls.append("b"))]
    found = measured(points, num_repeats=2)
    assert calls == ["a", "b"] * 3
    assert [(point.units, point.num_repeats) for point in found] == [(1.0, 2), (2.0, 2)]


def test_a_measurement_is_the_median_and_the_quartiles() -> None:
    point = measurement(4, 1, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert (point.median_s, point.spread_s, point.num_repeats) == (3.0, 2.0, 5)
