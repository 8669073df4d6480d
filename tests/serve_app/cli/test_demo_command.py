"""`epd demo-video` and `epd demo`: files, refusals, and five right answers from the embedded model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd.serve_app.cli.program import app


def test_demo_video_writes_the_video_and_its_truth(tmp_path: Path) -> None:
    out = tmp_path / "clip.mp4"
    options = ["--seconds", "4", "--fps", "6", "--size", "96x64", "--seed", "3"]
    result = CliRunner().invoke(app, ["demo-video", str(out), *options])
    assert result.exit_code == 0
    assert result.stdout.split() == [str(out), str(out.with_suffix(".json"))]
    truth = json.loads(out.with_suffix(".json").read_text())
    assert (truth["seed"], truth["duration_s"], truth["fps"], truth["width"], truth["height"]) == (
        3,
        4,
        6,
        96,
        64,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "97x64"], "even numbers"),
        (["--size", "wide"], "even numbers"),
        (["--size", "999999x64"], "even numbers"),
        (["--fps", "0"], "it must be 1 to"),
        (["--seconds", "0"], "ask for up to"),
        (["--seconds", "nan"], "ask for up to"),
    ],
)
def test_useless_options_are_refused_in_one_line(tmp_path: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo-video", str(tmp_path / "clip.mp4"), *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo-video", str(tmp_path / "nowhere" / "clip.mp4")])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_demo_asks_five_kinds_and_every_answer_is_right(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo.mp4")])
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "truth: " in line]
    assert len(lines) == 5
    assert [line for line in lines if not line.endswith("✓")] == []
    assert re.search(r"^prefill +\d", result.stdout, flags=re.MULTILINE)
    assert "60 frames" in result.stdout
