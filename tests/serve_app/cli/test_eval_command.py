"""`epd eval` as a user meets it: rows, tables, pictures, going on after a kill, one line for errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.eval.plan import demo_cases
from epd.eval.verdicts import Verdict, VerdictLog
from epd.serve_app.cli import own_model
from epd.serve_app.cli.own_model import open_model
from epd.serve_app.cli.program import app
from epd.serve_app.local.own_service import OwnService
from epd.shapes import Scene
from epd.video.demo_video import write_demo_video

# One video of 8 seconds and all five questions about it.
ONE_VIDEO = ("--demo", "5", "--frames", "8", "--ttft-videos", "1", "--num-threads", "1")


def run(*options: str | Path) -> int:
    """With the model whose visual tokens are counted below, unless another is given."""
    model = () if "--model" in options else ("--model", "shapes-vl")
    return app(["eval", *model, *map(str, options)], standalone_mode=False) or 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verdicts of one video, two methods and two retentions."""
    out = tmp_path_factory.mktemp("eval") / "verdicts.jsonl"
    assert (
        run(
            *ONE_VIDEO,
            "--method",
            "random",
            "--method",
            "uniform",
            "--retention",
            "1.0",
            "--retention",
            "0.25",
            "--out",
            out,
        )
        == 0
    )
    return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups of frames the model of each command has encoded, in the end."""
    encoded: list[int] = []

    @contextmanager
    def counted(*args: Any, **options: Any) -> Iterator[OwnService]:
        with open_model(*args, **options) as service:
            yield service
            encoded.append(int(service.counters().get("encoded_groups", 0)))

    monkeypatch.setattr("epd.serve_app.cli.evaluation.open_model", counted)
    return encoded


def test_every_question_is_judged_with_every_setting(finished: Path) -> None:
    log = VerdictLog.read(finished)
    items = [item for case in demo_cases(5, [8], 0) for item in case.video.items]
    settings = {(verdict.method, verdict.retention) for verdict in log.verdicts}
    assert settings == {("full", 1.0), ("random", 0.25), ("uniform", 0.25)}
    assert len(log.verdicts) == 3 * len(items)
    full = {verdict.item_id: verdict for verdict in log.verdicts if verdict.method == "full"}
    assert {item.item_id: item.answer for item in items} == {key: each.truth for key, each in full.items()}
    assert all(verdict.is_right for verdict in full.values()), full
    assert {(sample.method, sample.retention) for sample in log.samples} == settings
    assert all(0 < sample.prefill_s < sample.ttft_s for sample in log.samples)


def test_what_is_kept_falls_as_planned(finished: Path) -> None:
    kept = {(each.method, each.retention): each for each in VerdictLog.read(finished).verdicts}
    assert kept["full", 1.0].visual_tokens == 60
    assert kept["random", 0.25].visual_tokens == kept["uniform", 0.25].visual_tokens == 15
    assert kept["random", 0.25].kv_bytes < kept["full", 1.0].kv_bytes


def test_rows_are_printed_for_machines_as_asked_for(
    finished: Path, calls: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--retention",
        "1.0",
        "--retention",
        "0.25",
        "--method",
        "uniform",
        "--out",
        finished,
        "--json",
    )
    assert run(*ONE_VIDEO, *options) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["retention"]) for row in rows] == [("uniform", 1.0), ("uniform", 0.25)]
    assert [(row["num_frames"], row["num_questions"], row["visual_tokens"]) for row in rows] == [
        (8, 5, 60),
        (8, 5, 15),
    ]
    assert rows[0]["accuracy"] == 1.0
    assert all(row["ttft_s"] > 0 for row in rows)
    assert calls == [0]


def test_a_killed_evaluation_does_only_what_is_missing(
    finished: Path, tmp_path: Path, calls: list[int]
) -> None:
    """Killed in the middle of the line that came after the first setting's verdicts."""
    out = tmp_path / "verdicts.jsonl"
    lines = finished.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:6]) + lines[6][:40])
    options = (*ONE_VIDEO, "--method", "random", "--method", "uniform", "--retention", "0.25", "--out", out)
    assert run(*options, "--ttft-videos", "0") == 0
    assert run(*ONE_VIDEO, "--retention", "1.0", "--ttft-videos", "0") == 0
    two_settings, one_setting = calls
    assert two_settings == one_setting > 0, "the video is encoded once"
    assert _answers(out) == _answers(finished)


def _answers(path: Path) -> dict[tuple[str, float, str], str]:
    def key(verdict: Verdict) -> tuple[str, float, str]:
        return verdict.method, verdict.retention, verdict.item_id

    return {key(verdict): verdict.answer for verdict in VerdictLog.read(path).verdicts}


def test_a_table_and_a_picture_of_what_is_known(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert run("--table", finished, "--plot", plot) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["8", "frames,", "5", "questions,", "1", "videos"] in lines
    firsts = [line[:3] for line in lines if line and line[0] in ("full", "random", "uniform")]
    assert firsts == [["full", "1", "60"], ["random", "0.25", "15"], ["uniform", "0.25", "15"]]
    picture = plot.read_text(encoding="utf-8")
    assert picture.startswith("<?xml")
    assert run("--table", finished, "--json", "--against", "random") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["random", "random", "uniform", "uniform"]
    assert all(row["against"] == "random" for row in rows)
    assert (rows[1]["wins"], rows[1]["losses"]) == (0, 0)


def test_a_file_of_open_and_multiple_choice_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = demo_cases(5, [8], seed=4)
    assert isinstance(case.video.source, Scene)
    write_demo_video(tmp_path / "a.mp4", case.video.source, fps=2, height=360, width=640)
    colour = next(item for item in case.video.items if item.kind == "colour")
    others = [name for name in ("red", "green", "purple", "white") if name != colour.answer]
    lines = [
        {"video": "a.mp4", "question": colour.question, "answer": colour.answer},
        {"videoID": "a", "question": "Is it there?", "options": ["A. yes", "B. no"], "answer": "A"},
        {"video": "a.mp4", "question": colour.question, "options": others, "answer": "C", "task_type": "mc"},
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "verdicts.jsonl"
    options = ("--frames", "8", "--retention", "1.0", "--ttft-videos", "0", "--num-threads", "1", "--json")
    assert run(data, *options, "--out", out) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["num_questions"], row["num_videos"], row["ttft_s"]) == (3, 1, None)
    verdicts = VerdictLog.read(out).verdicts
    assert verdicts[0].is_right, verdicts[0]
    assert [(verdict.truth, verdict.kind) for verdict in verdicts[1:]] == [("A", ""), ("C", "mc")]


def test_any_supported_model_can_be_asked(
    checkpoints: dict[str, Path], media: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "questions.jsonl", tmp_path / "verdicts.jsonl"
    line = {"video": str(media["video"]), "question": "Which?", "options": ["one", "two"], "answer": "A"}
    data.write_text(json.dumps(line))
    options = (
        "--frames",
        "4",
        "--retention",
        "1.0",
        "--retention",
        "0.25",
        "--num-threads",
        "1",
        "--ttft-videos",
        "0",
        "--json",
    )
    assert run(data, "--model", checkpoints["qwen3_vl"], *options, "--max-tokens", "3", "--out", out) == 0
    full, reduced = json.loads(capsys.readouterr().out)
    assert (full["num_questions"], reduced["num_questions"]) == (1, 1)
    assert reduced["visual_tokens"] == round(full["visual_tokens"] / 4)
    assert [verdict.truth for verdict in VerdictLog.read(out).verdicts] == ["A", "A"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--demo", "5", "--method", "best"], "'best'"),
        (["--demo", "5", "--against", "best"], "'best'"),
        (["--demo", "5", "--retention", "1.5"], "1.5"),
        (["--demo", "5", "--retention", "0"], "0"),
        (["--demo", "5", "--frames", "0"], "--frames is 0"),
        (["--demo", "0"], "--demo is 0"),
        (["--demo", "5", "--per-kind", "0"], "--per-kind 0"),
        (["--demo", "5", "--max-tokens", "0"], "--max-tokens is 0"),
        (["--demo", "5", "--out", "/nowhere/at/all.jsonl"], "cannot write"),
        (["--demo", "5", "--plot", "plot.txt"], "cannot plot"),
        ([], "got no questions; give one of"),
        (["some.jsonl", "--demo", "5"], "got QUESTIONS and --demo; give one of"),
        (["some.jsonl"], "cannot be read"),
        (["--table", "some.jsonl"], "cannot be read"),
        (["--table", "some.jsonl", "--by", "colour"], "--by is 'colour'; give one of kind, duration"),
        (["--demo", "5", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_before_a_model_is_loaded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--model" not in options:
        monkeypatch.delattr(own_model, "own_service")
    assert run(*options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
