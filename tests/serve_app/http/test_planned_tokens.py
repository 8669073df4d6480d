"""Tokens of drawn videos: what a plan counts with equals what a running server estimates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.profiles.analytic import analytic_profile
from epd.simulate.frame_choice import FrameChooser, VideoWishes
from epd.video.demo_video import write_scene
from epd.workload.requests import RequestShape, Resolution, VideoSpec
from tests import ROOT
from tests.serve_app.conftest import JSON, data_url, video_part
from tests.serve_app.real_app import RealApp, real_app


@pytest.fixture(scope="module", params=["shapes-vl", "shapes-vl-2"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Models of both Qwen families, whose files size and sample in ways of their own."""
    return ROOT / "epd" / "models" / request.param


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[RealApp]:
    with real_app(folder, "1epd") as app:
        yield app
        app.wait_until_empty()


@pytest.mark.parametrize(
    ("spec", "wishes"),
    [
        (VideoSpec(3.0, 12, Resolution(320, 240)), VideoWishes()),
        (VideoSpec(20.0, 6, Resolution(160, 96)), VideoWishes()),
        (VideoSpec(7.5, 10, Resolution(96, 160)), VideoWishes(num_frames=5)),
        (VideoSpec(5.0, 24, Resolution(192, 108)), VideoWishes(fps=2.0)),
        (VideoSpec(20.0, 6, Resolution(160, 96)), VideoWishes(max_visual_tokens=12)),
    ],
)
def test_a_plan_counts_the_tokens_that_the_server_estimates(
    app: RealApp, folder: Path, tmp_path: Path, spec: VideoSpec, wishes: VideoWishes
) -> None:
    path = tmp_path / "drawn.mp4"
    write_scene(path, 7, spec, lambda: None)
    epd = {"num_frames": wishes.num_frames, "fps": wishes.fps, "max_visual_tokens": wishes.max_visual_tokens}
    content: list[JSON] = [video_part(data_url(path, "video/mp4")), {"type": "text", "text": "how many?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "epd": {name: value for name, value in epd.items() if value is not None},
    }
    estimate = app.http.post("/v1/epd/estimate", json=body).json()
    profile = analytic_profile("h100", str(folder))
    chosen = FrameChooser(profile, wishes).chosen(RequestShape(2, 4, videos=(spec,)))
    groups = [group for groups in chosen.groups for group in groups]
    assert estimate["fits"], estimate
    assert profile.context_tokens == estimate["max_model_len"]
    assert sum(group.num_frames for group in groups) == estimate["frames"]
    assert sum(group.num_tokens for group in groups) == estimate["visual_tokens"]
    assert chosen.retention == estimate["retention"]
