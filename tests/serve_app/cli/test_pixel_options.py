"""One record of pixel settings reaches what plans: commands, the server, its estimate, and batches, alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from epd import video
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.engine_config import EngineConfig
from epd.pixel_settings import AUTHORS_LIMITS, BARE_PROCESSOR, PIXEL_FIELDS, PixelSettings
from epd.serve_app.app_args import MEDIA_FIELDS, STAGE_FIELDS, AppArgs
from epd.serve_app.cli.own_model import open_model
from epd.serve_app.cli.program import app
from epd.serve_app.composition import media_settings, worker_settings
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.own_batch import OwnBackend
from epd.serve_app.local.server import served_locally
from tests.encoders.tiny_tiles import BUILDERS
from tests.media import write_video
from tests.models.processors import qwen_bytes
from tests.models.shrunk import build_with_published_files
from tests.ports import free_port
from tests.serve_app.conftest import data_url, video_part
from tests.serve_app.local.test_batch import read, run

QUESTION = "What is shown?"
GIVEN = PixelSettings(video_max_tokens=600)
COMMANDS = ("ask", "chat", "batch", "eval", "serve")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny weights with the files that Qwen2.5-VL publishes, and bytes as tokens."""
    return build_with_published_files("Qwen2.5-VL-3B", tmp_path_factory.mktemp("published"), qwen_bytes)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of 720p."""
    folder = tmp_path_factory.mktemp("clip")
    return write_video(folder / "clip.mp4", num_frames=12, fps=6, height=720, width=1280)


def epd(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def planned(model: Path, clip: Path, pixels: PixelSettings) -> Any:
    info = video.look(clip)
    facts = VideoFacts(info.num_frames, float(info.fps), info.height, info.width)
    return load_adapter(model, pixels=pixels).plan_video(facts, FrameSampling())


def body_of(clip: Path, **more: Any) -> dict[str, Any]:
    parts = [video_part(data_url(clip, "video/mp4")), {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_options(command: str) -> None:
    shown = epd(command, "--help").stdout
    for name in PIXEL_FIELDS:
        assert f"--{name.replace('_', '-')}"[:20] in shown


def test_workers_and_media_get_what_the_server_got() -> None:
    args = AppArgs(video_max_tokens=600, bare_processor=True)
    expected = PixelSettings(video_max_tokens=600, bare_processor=True)
    assert args.pixels == expected
    assert worker_settings(args.for_workers(*STAGE_FIELDS)).engine.pixels == expected
    assert media_settings(args.for_workers(*MEDIA_FIELDS)).pixels == expected


def test_yaml_has_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("video_max_pixels: 100000\ncap_pixels_per_frame: false\n")
    record = json.loads(epd("config", "show", "--file", file, "--json").stdout)
    assert {name: record[name] for name in PIXEL_FIELDS} == {
        "max_pixels": None,
        "video_max_pixels": 100_000,
        "video_max_tokens": None,
        "cap_pixels_per_frame": False,
        "bare_processor": False,
        "model_impl": "auto",
    }


@pytest.mark.parametrize(
    ("options", "pixels"),
    [
        ((), AUTHORS_LIMITS),
        (("--video-max-tokens", "600"), GIVEN),
        (("--video-max-pixels", "200000"), PixelSettings(video_max_pixels=200_000)),
        (("--bare-processor",), BARE_PROCESSOR),
        (("--no-cap-pixels-per-frame",), PixelSettings(cap_pixels_per_frame=False)),
    ],
)
def test_ask_tells_what_was_chosen(
    model: Path, clip: Path, options: tuple[str, ...], pixels: PixelSettings
) -> None:
    result = epd("ask", clip, QUESTION, "--model", model, "--max-tokens", "1", "-v", *options)
    assert result.exit_code == 0, result.output
    plan = planned(model, clip, pixels)
    height, width = plan.size
    assert f"4 frames of {width}x{height} pixels: {plan.num_tokens:,} tokens" in result.stderr
    assert f"4 frames, {plan.num_tokens} visual tokens" in result.stderr
    assert ("qwen-vl-utils" in result.stderr) == (not options or options[0].startswith("--video"))
    assert result.stderr.count("limits of a video") == 1


def test_ask_says_nothing_of_it_unless_it_is_told_to(model: Path, clip: Path) -> None:
    result = epd("ask", clip, QUESTION, "--model", model, "--max-tokens", "1")
    assert "limits of a video" not in result.stderr


@pytest.mark.parametrize("pixels", [AUTHORS_LIMITS, GIVEN])
def test_estimate_answer_and_batch_agree(
    model: Path, clip: Path, tmp_path: Path, pixels: PixelSettings
) -> None:
    plan = planned(model, clip, pixels)
    address = HttpAddress(port=free_port())
    args = AppArgs(
        model=model, topology="1e1pd", num_kv_tokens=8192, num_threads=1, **pixels.given
    ).resolved()
    with (
        served_locally(args, address),
        httpx.Client(base_url=address.url, trust_env=False, timeout=200) as http,
    ):
        estimate = http.post("/v1/epd/estimate", json=body_of(clip)).json()
        answer = http.post("/v1/chat/completions", json=body_of(clip)).json()
        asked = {"cap_pixels_per_frame": False, "max_pixels": 50_000}
        smaller = http.post("/v1/epd/estimate", json=body_of(clip, mm_processor_kwargs=asked)).json()
    height, width = plan.size
    medium = {
        "kind": "video",
        "frames": 4,
        "height": height,
        "width": width,
        "visual_tokens": plan.num_tokens,
    }
    assert (estimate["frames"], estimate["visual_tokens"]) == (4, plan.num_tokens)
    assert estimate["media"] == [medium]
    assert answer["usage"]["prompt_tokens"] == estimate["prompt_tokens"]
    assert math.prod((smaller["media"][0]["height"], smaller["media"][0]["width"])) <= 50_000

    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body_of(clip)}
    with open_model(model, EngineConfig(num_kv_tokens=8192, **pixels.given)) as service:
        run(tmp_path, OwnBackend(service, max_requests=4), [line])
    usage = read(tmp_path / "out.jsonl")["a"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == estimate["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--video-max-pixels", "0"), "video_max_pixels"),
        (("--max-pixels", "-4"), "max_pixels"),
        (("--max-pixels", "1", "--url", "http://127.0.0.1:1"), "--max-pixels 1 for a running server"),
        (("--bare-processor", "--url", "http://127.0.0.1:1"), "--bare-processor True for a running server"),
    ],
)
def test_an_option_that_makes_no_sense_gives_one_line(
    clip: Path, options: tuple[str, ...], words: str
) -> None:
    result = epd("ask", clip, QUESTION, *options)
    assert result.exit_code != 0
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words.replace("_", "-") in result.stderr.replace("_", "-")


def test_a_family_whose_frames_have_one_size_names_its_option(clip: Path, tmp_path: Path) -> None:
    tiles = BUILDERS["internvl"](tmp_path / "model")
    result = epd("ask", clip, QUESTION, "--model", tiles, "--video-max-pixels", "9999")
    assert result.exit_code != 0
    assert "leave --video-max-pixels out" in result.stderr
    fewer = epd("ask", clip, QUESTION, "--model", tiles, "--video-max-tokens", "8", "--max-tokens", "1", "-v")
    assert "2 frames, 8 visual tokens" in fewer.stderr
