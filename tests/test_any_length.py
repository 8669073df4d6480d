"""Videos of a second to hours, asked about with no option: by `ask`, by a batch and by a server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from epd.models import embedded_model_path
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.program import app
from epd.serve_app.http.address import HttpAddress
from epd.serve_app.local.server import served_locally
from tests.media import write_long_video
from tests.ports import kept_port

QUESTION = "What is shown?"
# Less than the default 768 frames take; an hour and ten of them have as many.
CONTEXT = 1024
SECONDS = (1, 60, 3600, 36_000)
# In the model's own context ten hours take as long as one: `make soak`.
IN_WHOLE_CONTEXT = SECONDS if "EPD_SOAK" in os.environ else SECONDS[:-1]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The videos, by name; and a folder of the embedded model with a small context."""
    folder = tmp_path_factory.mktemp("lengths")
    for seconds in SECONDS:
        write_long_video(folder / f"{seconds}.mp4", seconds)
    return folder


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(embedded_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config).replace(
        '"max_position_embeddings": 32768', f'"max_position_embeddings": {CONTEXT}'
    )
    (folder / "config.json").write_text(text)
    return folder


def asked(path: Path, *options: object) -> dict[str, Any]:
    result = run("ask", path, QUESTION, "--json", "--max-tokens", 2, *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("seconds", IN_WHOLE_CONTEXT)
def test_any_length_is_answered_as_it_was_before(folder: Path, seconds: int) -> None:
    """The embedded model's context has room for its 768 frames: nothing is chosen."""
    video = folder / f"{seconds}.mp4"
    found = asked(video)
    usage = found["usage"]
    assert usage["visual_tokens"] == usage["visual_tokens_before"]
    assert usage["num_frames"] == min(768, seconds)
    if 1 < seconds <= 60:  # its own rate, asked for
        same = asked(video, "--fps", 1)
        assert (same["answer"], same["usage"]) == (found["answer"], usage)


@pytest.mark.parametrize("seconds", SECONDS)
def test_any_length_is_answered_in_a_small_context(folder: Path, small_model: Path, seconds: int) -> None:
    result = run("ask", folder / f"{seconds}.mp4", QUESTION, "--max-tokens", 2, "--model", small_model)
    assert result.exit_code == 0, result.output
    assert ("chose " in result.stderr) == (seconds > 60)
    if seconds > 60:
        assert "of 768 frames at retention 1: " in result.stderr


def test_a_budget_makes_frames_thin_or_few(folder: Path) -> None:
    usage = asked(folder / "3600.mp4", "--max-visual-tokens", 100)["usage"]
    assert 50 <= usage["visual_tokens"] <= 100 < usage["visual_tokens_before"]
    few = asked(folder / "60.mp4", "--max-visual-tokens", 100)["usage"]
    assert few["visual_tokens"] == few["visual_tokens_before"] <= 100
    assert few["num_frames"] < 60


def test_what_cannot_fit_is_one_line(folder: Path, small_model: Path) -> None:
    video = folder / "3600.mp4"
    too_many = run("ask", video, QUESTION, "--model", small_model, "--frames", 2000)
    assert too_many.exit_code == 2
    assert "visual tokens" in too_many.stderr
    assert "ask for fewer frames" in too_many.stderr
    assert run("ask", video, QUESTION, "--max-visual-tokens", 0).exit_code == 2


def test_a_batch_answers_any_length(folder: Path, small_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text(f"{QUESTION}\nHow many?\n")
    options = ("--model", small_model, "--max-tokens", 2, "--json", "--questions", questions)
    result = run("batch", folder, tmp_path / "out.jsonl", *options)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(records) == 2 * len(SECONDS)
    assert all(record["error"] is None for record in records if "error" in record)


@pytest.fixture(scope="module")
def client(folder: Path, small_model: Path) -> Iterator[httpx.Client]:
    args = AppArgs(model=small_model, topology="1epd", allowed_media_path=folder, max_visual_tokens=600)
    with (
        kept_port() as port,
        served_locally(args, address := HttpAddress(port=port)),
        httpx.Client(base_url=address.url, trust_env=False, timeout=None) as client,
    ):
        yield client


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("most", [None, 50, 5000])
def test_a_server_answers_any_length_as_it_estimates(
    client: httpx.Client, folder: Path, seconds: int, most: int | None
) -> None:
    url = {"url": (folder / f"{seconds}.mp4").as_uri()}
    parts = [{"type": "video_url", "video_url": url}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    body |= {} if most is None else {"epd": {"max_visual_tokens": most}}
    estimate = client.post("/v1/epd/estimate", json=body).json()
    answer = client.post("/v1/chat/completions", json=body).json()
    report = answer["epd"]
    for name in ("frames", "visual_tokens", "visual_tokens_before_reduction", "retention"):
        assert estimate[name] == report[name], name
    assert estimate["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert report["visual_tokens"] <= min(most or 600, 600), "the server's own limit holds, too"
    if seconds >= 3600:
        assert report["visual_tokens"] > min(most or 600, 600) - 16
