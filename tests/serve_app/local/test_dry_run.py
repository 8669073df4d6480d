"""A dry run says what the run then takes, and asks nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from epd.encoders import FrameSampling, load_adapter
from epd.profiles.files import load_profile
from epd.serve_app.cli.program import app
from epd.stages.media import plan_video
from epd.video import look

PROFILE = "qwen2.5-vl-7b@h100"


def batch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path, media: dict[str, Path]) -> Path:
    """Two questions about a video, one about an image, and lines that fail in four ways."""
    lines: list[Any] = [
        {"id": 1, "video": str(media["video"]), "question": "Why?"},
        {"id": 2, "video": str(media["video"]), "question": "Why?"},
        {"id": 3, "images": [str(media["image"])], "question": "Who?"},
        {"id": 4, "video": "lost.mp4", "question": "Why?"},
        {"id": 5, "video": str(media["image"]), "question": "Why?"},
        {"id": 6, "video": str(media["video"]), "question": ""},
        {"id": 7, "video": str(media["video"]), "question": "Why?", "fps": "fast"},
        {"id": 8, "video": "https://elsewhere/a.mp4", "question": "Why?"},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_says_what_the_run_takes(
    source: Path, media: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--model", str(checkpoints["qwen2_5_vl"]), "--max-tokens", "3", "--frames", "4"]
    dry = batch(source, out, *options, "--dry-run", "--json")
    assert dry.exit_code == 1, dry.output
    said = json.loads(dry.stdout)
    assert not out.exists()
    assert (said["num_lines"], said["num_failing"], said["num_not_looked_at"]) == (8, 4, 1)
    assert said["reasons"].keys() == {"MediaNotFoundError", "UnsupportedMediaError", "RequestError"}
    assert said["device_s"] is None
    facts = look(media["video"])
    assert said["video_hours"] == pytest.approx(facts.num_frames / facts.fps / 3600)

    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:3]))
    assert batch(source, out, *options, "--num-kv-tokens", "4096").exit_code == 0
    usage = {record["id"]: record["usage"] for record in map(json.loads, out.read_text().splitlines())}
    assert said["prompt_tokens"] == sum(each["prompt_tokens"] for each in usage.values())
    adapter, image = load_adapter(checkpoints["qwen2_5_vl"]), look(media["image"])
    plans = (
        plan_video(adapter, facts, FrameSampling(num_frames=4)),
        adapter.plan_image(image.height, image.width),
    )
    assert said["visual_tokens"] == sum(plan.num_tokens for plan in plans)
    assert said["answer_tokens"] == 9


def test_the_time_is_that_of_the_profile(source: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Of one question without media around: by hand."""
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3}}) + "\n")  # fmt: skip
    options = ["--model", str(checkpoints["qwen2_5_vl"]), "--dry-run"]
    said = json.loads(batch(source, tmp_path / "o.jsonl", *options, "--json", "--profile", PROFILE).stdout)
    profile, tokens = load_profile(PROFILE), said["prompt_tokens"]
    prefill_s = profile.prefill.cost.seconds(tokens, tokens * (tokens + 1) / 2)
    assert said["device_s"] == pytest.approx(
        prefill_s + 3 * profile.decode.cost.seconds(32, 32 * tokens) / 32
    )
    shown = batch(source, tmp_path / "o.jsonl", *options).stdout
    assert "1 line, 0 would fail, 0 about media elsewhere" in shown
    assert "time on one device: unknown: give --profile" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", PROFILE], "received --profile without --dry-run"),
        (["--dry-run", "--url", "http://x"], "received --dry-run and a running server"),
    ],
)
def test_what_makes_no_sense_is_refused(source: Path, options: list[str], words: str) -> None:
    refused = batch(source, source.parent / "out.jsonl", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
