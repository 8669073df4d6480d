"""A dry run says what the run then takes, and asks nothing. At a terminal a sample says it before a run.

Modules: `epd/serve_app/local/own_batch.py`.
"""

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
from tests.batch.fakes import completion
from tests.batch.test_http_backend import KEY, FakeServer, Reply, serving

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
    assert shown.startswith("1 line; 0 would fail\n")  # and none is about media elsewhere
    assert "time on one device: unknown; --profile adds it" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", PROFILE], "received --profile without --dry-run"),
        (["--media-in-flight", "3"], "received --media-in-flight and no running server"),
    ],
)
def test_what_makes_no_sense_is_refused(source: Path, options: list[str], words: str) -> None:
    refused = batch(source, source.parent / "out.jsonl", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


class Estimating(FakeServer):
    """Says of each medium what it would take, by its name."""

    looked_at: list[str]

    def reply(self, body: dict[str, Any]) -> Reply:
        video, question = body["messages"][0]["content"]
        name = video["video_url"]["url"].rpartition("/")[2]
        if not self.path.endswith("/estimate"):
            return 200, completion(question["text"], {"completion_tokens": 4})
        self.looked_at.append(name)
        if name == "0.mp4":
            return 404, {"error": {"code": "MediaNotFoundError", "message": "no file"}}
        if name == "8.mp4":
            return 200, {"fits": False, "reason": "too long"}
        numbers = {"prompt_tokens": 30, "frames": 8, "video_s": 900.0, "visual_tokens": 20}
        more = {"visual_tokens_before_reduction": 40, "max_completion_tokens": 1000}
        return 200, {"fits": True, **numbers, **more, "media": [{"kind": "video"}]}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two questions about each of 64 videos of another machine, and a line that is none."""
    lines: list[Any] = [
        {"id": f"{place} {number}", "video": f"https://host/{place}.mp4", "question": "Why?"}
        for place in range(64)
        for number in range(2)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "none"}]))
    return path


def test_a_server_looks_at_media_that_are_not_here(table: Path, tmp_path: Path) -> None:
    with serving(Estimating()) as server:
        server.looked_at = []
        said = json.loads(
            batch(table, tmp_path / "o.jsonl", *options_of(server), "--dry-run", "--json").stdout
        )
    assert len(server.looked_at) == said["num_sampled"] == said["num_groups"] == 64
    assert (said["num_lines"], said["num_media"], said["video_hours"]) == (129, 62, 62 * 0.25)
    assert (said["visual_tokens"], said["answer_tokens"]) == (62 * 20, 62 * 2 * 16)
    failing = {kind: reason["num_lines"] for kind, reason in said["reasons"].items()}
    assert failing == {"MediaNotFoundError": 2, "RequestBudgetError": 2, "RequestError": 1}
    profile = load_profile(PROFILE)
    encode_s = profile.encode.cost.seconds(40 * profile.media.merge**2, 1)
    prefill = profile.prefill.cost
    token_s = profile.decode.cost.seconds(32, 32 * 30) / 32
    each_s = (
        encode_s + prefill.seconds(20, 210) + 2 * (prefill.seconds(10, 10 * (20 + 31) / 2) + 16 * token_s)
    )
    assert said["device_s"] == pytest.approx(62 * each_s)
    assert said["time_s"] == pytest.approx(said["device_s"] / 8)
    assert said["price"] == pytest.approx(2.5 * said["time_s"] / 3600)


def options_of(server: FakeServer) -> list[str]:
    told = ["--url", server.url, "--api-key", KEY, "--max-tokens", "16", "--profile", PROFILE]
    return [*told, "--num-devices", "8", "--hourly-price", "2.5"]


@pytest.mark.parametrize("said", ["y", "n"])
def test_at_a_terminal_a_sample_says_it_and_somebody_decides(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Every second medium is looked at. The sums are about all."""
    monkeypatch.setattr("epd.serve_app.cli.batch._has_terminal", lambda: True)
    with serving(Estimating()) as server:
        server.looked_at = []
        words = ["batch", str(table), str(tmp_path / "o.jsonl"), *options_of(server)]
        asked = CliRunner().invoke(app, words, input=f"{said}\n")
        assert len(server.looked_at) == 32
        assert "129 lines; 9 would fail; an estimate by 32 of 64 media\n" in asked.stderr
        assert "60 media, 15.00 hours of video, 480 frames" in asked.stderr
        assert "time on 8 devices: " in asked.stderr
        assert "price: " in asked.stderr
        assert "Begin? [Y/n]:" in asked.stderr
        assert asked.exit_code == 1
        lines = (tmp_path / "o.jsonl").read_text().splitlines()
        assert len(lines) == (128 if said == "y" else 0)
        again = CliRunner().invoke(app, [*words[:-6], "--num-devices", "8", "--yes"])
        assert len(server.looked_at) == 32
        assert "Begin?" not in again.stderr


def test_a_short_run_and_one_without_a_terminal_are_not_asked_about(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Estimating()) as server:
        server.looked_at = []
        told = ["--url", server.url, "--api-key", KEY]
        assert batch(table, tmp_path / "o.jsonl", *told, "--allow-failures").exit_code == 0
        monkeypatch.setattr("epd.serve_app.cli.batch._has_terminal", lambda: True)
        table.write_text("".join(table.read_text().splitlines(keepends=True)[:99]))
        assert batch(table, tmp_path / "p.jsonl", *told).exit_code == 0
        assert server.looked_at == []
