"""`epd batch` as a user meets it: files, a folder, a summary, one line for what makes no sense."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from epd import console
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import read_questions, write_lines
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.progress import batch_bar
from epd.batch.tasks import Backend
from epd.errors import RequestError
from epd.serve_app.cli.program import app
from epd.stages.loading.weight_files import weights_revision
from tests.batch.fakes import FakeBackend
from tests.batch.parquet import committed_rows, write_table
from tests.batch.test_http_backend import KEY, FakeServer, Reply, serving
from tests.serve_app.cli.conftest import Dropped


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


@pytest.fixture
def lines(tmp_path: Path, media: dict[str, Path]) -> Path:
    path = tmp_path / "in.jsonl"
    records = [
        {"id": "a", "video": str(media["video"]), "question": "What is shown?", "answer": "x"},
        {"id": "b", "video": "nowhere.mp4", "question": "What?"},
        {"id": "c", "images": [str(media["image"])], "question": "What is shown?"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_is_answered_and_summed_up(lines: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "busy.png"
    options = [
        "--model",
        checkpoints["qwen2_5_vl"],
        "--max-tokens",
        3,
        "--frames",
        4,
        "--num-kv-tokens",
        4096,
    ]
    result = run(lines, out, *map(str, options), "--frame-times", "--plot", plot, "--json")
    assert result.exit_code == 1, result.output
    assert "1 line failed, see '" in result.stderr
    assert "1 MediaNotFoundError, such as: " in result.stderr
    assert "nowhere.mp4': cannot read the file: URL: No such file or directory" in result.stderr
    summary = json.loads(result.stdout)
    assert (summary["num_answered"], summary["num_failed"], summary["num_groups"]) == (2, 1, 3)
    assert summary["num_encoded"] == 2
    assert summary["accuracy"] == 0.0
    assert [json.loads(line)["id"] for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()] == [
        "b"
    ]
    found = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert found.keys() == {"a", "c"}
    times_s = found["a"]["frame_times_s"]
    assert len(times_s) == found["a"]["frames"] == 4
    assert times_s == sorted(times_s)
    assert times_s[-1] < found["a"]["video_s"]
    assert "frame_times_s" not in found["c"]
    assert {row["model_digest"] for row in found.values()} == {weights_revision(checkpoints["qwen2_5_vl"])}
    assert plot.stat().st_size > 1000
    again = run(lines, out, "--allow-failures")
    assert again.exit_code == 0
    assert again.stdout.startswith("2 of 3 lines answered, 1 failed, 3 of them before\n")


def test_processes_that_share_the_model_answer_as_one(
    lines: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = ["--model", checkpoints["qwen2_5_vl"], "--max-tokens", "6", "--num-kv-tokens", "4096"]
    answers = []
    for size in ("1", "2"):
        out = tmp_path / f"out-{size}.jsonl"
        result = run(lines, out, *options, "--tensor-parallel-size", size, "--allow-failures")
        assert result.exit_code == 0, result.output
        records = [json.loads(line) for line in out.read_text().splitlines()]
        answers.append({record["id"]: record["answer"] for record in records})
    assert answers[0] == answers[1]
    assert answers[0].keys() == {"a", "c"}


@pytest.mark.parametrize("method", ["evs", "mustdrop"])
def test_what_is_kept_is_as_the_options_say_where_lines_do_not(
    media: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path, dropped: Dropped, method: str
) -> None:
    """Also of lines that come later and are answered by a second run. MustDrop drops in all of its stages."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [
        {"id": name, "video": str(media["video"]), "question": "What?", "num_frames": 20, **said}
        for name, said in (("default", {}), ("all", {"retention": 1}), ("late", {}))
    ]
    options = ["--model", checkpoints["qwen2_5_vl"], "--max-tokens", "3", "--num-kv-tokens", "4096"]
    for num_lines in (2, 3):
        path.write_text("".join(json.dumps(record) + "\n" for record in records[:num_lines]))
        result = run(path, out, *options, "--retention", "0.25", "--reduction", method)
        assert result.exit_code == 0, result.output
    usage = {record["id"]: record["usage"] for record in map(json.loads, out.read_text().splitlines())}
    tokens = {name: each["prompt_tokens"] for name, each in usage.items()}
    assert tokens["default"] == tokens["late"] < tokens["all"]
    assert len(usage) == 3
    by_question = method == "mustdrop"
    assert dropped.tower == ({(8, 6)} if by_question else set())
    assert dropped.read == ([(60, 20, 20)] * 2 if by_question else [])
    fewer = {prompt: prompt - held for prompt, held in dropped.held if held < prompt}
    assert fewer == ({tokens["default"]: 40} if by_question else {})


def test_lines_come_from_stdin_and_options_are_those_of_a_question(
    media: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that writes down what it is asked. Relative paths begin where the user stands."""
    monkeypatch.chdir(media["video"].parent)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}')
    line = json.dumps({"id": 1, "video": media["video"].name, "question": "What?"})
    bodies = []

    class Listening(FakeServer):
        def reply(self, body: dict[str, Any]) -> Reply:
            bodies.append(body)
            return super().reply({**body, "messages": body["messages"][1:]})

    with serving(Listening()) as server:
        words = ["-", tmp_path / "out.jsonl", "--url", server.url, "--api-key", KEY, "--system", "Be brief."]
        more = ["--temperature", "0.5", "--seed", "3", "--start", "0:01", "--end", "1:30", "--schema", schema]
        done = CliRunner().invoke(app, ["batch", *map(str, words + more)], input=line)
    assert done.exit_code == 0, done.output
    [body] = bodies
    assert (body["temperature"], body["seed"]) == (0.5, 3)
    assert (body["epd"]["start_s"], body["epd"]["end_s"]) == (1, 90)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "string"}
    system, asked = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert asked["content"][0]["video_url"]["url"] == media["video"].as_uri()
    [record] = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert record["question"] == "What?"


def test_a_folder_and_questions_become_lines(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.MKV", "a.json", "notes.txt"):
        (tmp_path / name).touch()
    questions = tmp_path / "questions.txt"
    questions.write_text("How many?\n\n  Which first? \n")
    assert write_lines(tmp_path / "lines", tmp_path, read_questions(questions)) == 4
    records = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [record["id"] for record in records] == ["a.MKV#1", "a.MKV#2", "b.mp4#1", "b.mp4#2"]
    assert [record["question"] for record in records] == ["How many?", "Which first?"] * 2
    assert {Path(record["video"]) for record in records} == {tmp_path / "a.MKV", tmp_path / "b.mp4"}
    questions.write_text("\n")
    with pytest.raises(RequestError, match="no question"):
        read_questions(questions)


def test_a_table_goes_in_and_out(
    media: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Every row is in the result, answered or explained, and the status file says so too."""
    rows = [
        ["video", "thing", "max_tokens"],
        [str(media["video"]), "the red, round one", "2"],
        ["no.mp4", "x", ""],
    ]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    out, status = tmp_path / "out.csv", tmp_path / "status.json"
    options = ["--model", checkpoints["qwen2_5_vl"], "--num-kv-tokens", "4096", "--status-file", status]
    result = run(tmp_path / "in.csv", out, "--question", "Where is {thing}?", *options)
    assert result.exit_code == 1, result.output
    with out.open(newline="") as file:
        answered, failed = csv.DictReader(file)
    assert (answered["id"], answered["question"]) == ("1", "Where is the red, round one?")
    assert (answered["media"], answered["completion_tokens"]) == (str(media["video"]), "2")
    assert answered["answer"]
    assert (failed["id"], failed["question"], failed["error"]) == ("2", "Where is x?", "MediaNotFoundError")
    assert failed["answer"] == ""
    told = json.loads(status.read_text())
    assert (told["state"], told["num_answered"], told["num_failed"]) == ("done", 1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.csv", "out.csv", "out.errors.jsonl", "out.jsonl", "status.json"
    ]  # fmt: skip


def test_parquet_goes_in_and_out_at_servers(tmp_path: Path) -> None:
    """A line that fails is in the table too, and the summary says what the rest has cost."""
    rows = [
        {"id": "a", "video": "https://h/a.mp4", "questions": ["One?", "Two?"], "who": b"not read"},
        {"id": "b", "video": "https://h/b.mp4", "questions": [""], "who": None},
    ]
    write_table(tmp_path / "rows.parquet", rows)
    out = tmp_path / "answers.parquet"
    with serving(FakeServer(pause_s=0.0)) as one, serving(FakeServer(pause_s=0.0)) as other:
        urls = ["--url", one.url, "--url", other.url, "--api-key", KEY]
        result = run(tmp_path / "rows.parquet", out, *urls, "--hourly-price", "2", "--json")
        again = run(f"{tmp_path}/rows.parquet", out, *urls, "--allow-failures")
    assert result.exit_code == 1, result.output
    assert f"1 line failed, see '{out}/failed-*.parquet'; --retry-failed" in result.stderr
    assert json.loads(result.stdout)["price_per_1000"] > 0
    found = {row["id"]: row for row in committed_rows(out)}
    assert {key: row["answer"] for key, row in found.items()} == {"a#1": "One?", "a#2": "Two?", "b#1": None}
    assert found["b#1"]["error"]["message"].startswith("question is ''")
    assert again.stdout.startswith("2 of 3 lines answered, 1 failed, 3 of them before\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["in.jsonl", "out.jsonl", "--fps", "1", "--frames", "2"], "--fps 1.0 and --frames 2"),
        (["in.jsonl", "out.jsonl", "--frames", "0"], "--frames 0"),
        (["in.jsonl", "out.jsonl", "--skip-static", "-1"], "a skip_static of -1; allowed: 0 or more"),
        (["in.jsonl", "out.jsonl", "--skip-static", "0", "--url", "http://x"], "give it to epd serve"),
        (["in.jsonl", "out.jsonl", "--dtype", "bfloat16", "--url", "http://x"], "received --dtype bfloat16"),
        (["in.jsonl", "out.jsonl", "--device", "cpu", "--address", "auto"], "received --device cpu"),
        (["in.jsonl", "out.jsonl", "--device", "cuda:x"], "the device 'cuda:x'; allowed: auto, cpu"),
        (["in.jsonl", "out.jsonl", "--retention", "0.01"], "a retention of 0.01; allowed: 0.05 to 1"),
        (["in.jsonl", "out.jsonl", "--reduction", "best"], "the reduction method 'best'; allowed: "),
        (["in.jsonl", "out.jsonl", "--plot", "x.txt"], "x.txt"),
        (["in.jsonl", "out.jsonl", "--topology", "1epd", "--url", "http://x"], "--topology and --url"),
        (["in.jsonl", "out.jsonl", "--url", "http://x", "--tensor-parallel-size", "2"], "running server"),
        (["in.jsonl", "out.jsonl", "--url", "http://x", "--enforce-eager"], "received --enforce-eager"),
        (["in.jsonl", "out.jsonl", "--url", "x"], "not an endpoint"),
        (["nothing.jsonl", "out.jsonl"], "nothing.jsonl"),
        ([".", "out.jsonl"], "--questions"),
        (["in.jsonl", "out.jsonl", "--question", "What?"], "no media, list or table"),
        (["*.mov", "out.jsonl", "--question", "What?"], "no file matches '*.mov'"),
        (["a.mp4", "out.jsonl"], "received media, 'a.mp4', and no question"),
        (["in.jsonl", "out.jsonl", "--questions", "q.txt"], "cannot read 'q.txt'"),
        (["in.jsonl", "out.jsonl", "--questions", "q.txt", "--question", "What?"], "one of them"),
        (["in.jsonl", "out.xlsx"], "'out.xlsx' for the results; allowed: a name that ends in .jsonl"),
        (["rows.csv", "out.csv"], "cannot read 'rows.csv'"),
        (["rows.parquet", "out/"], "cannot use 'rows.parquet'"),
        (["s3://", "out/"], "cannot use 's3:"),
        (["in.jsonl", "in.jsonl/"], "cannot write"),
        (["in.jsonl", "out.jsonl", "--status-file", "no/status"], "cannot write 'no/status'"),
        (["in.jsonl", "in.jsonl"], "is the input"),
        (["in.jsonl", "no/out.jsonl"], "cannot write"),
        (["in.jsonl", "folder.csv"], "cannot write 'folder.csv'"),
        (["in.jsonl", "out.jsonl", "--model", "nowhere"], "nowhere"),
    ],
)
def test_what_makes_no_sense_gives_one_line(
    lines: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lines.parent)
    (lines.parent / "folder.csv").mkdir()
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["rows.csv"] * 2, ["rows.csv", "./rows.csv"], ["parts"] * 2])
def test_a_table_is_never_replaced_by_its_results(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do results become parts of a table in Parquet, which the next run would read as questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    for name in ("rows.csv", "parts/rows.parquet"):
        (tmp_path / name).write_text("id,video,question\n1,missing.mp4,What?\n")
    before = sorted(tmp_path.rglob("*"))
    source, out = arguments
    for place in (out, f"{out}/answers/") if source == "parts" else (out,):
        result = run(source, f"{place}/" if place == "parts" else place)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert "is the input, or a part of it" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "rows.csv").read_text().count("\n") == 2


def test_lines_are_answered_without_ray_and_web_server(lines: Path, tmp_path: Path) -> None:
    """By the embedded model, which starts without transformers."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('ray', 'fastapi', 'starlette', 'uvicorn'));"
        "from epd.serve_app.cli.program import main; main()"
    )
    options = ["--max-tokens", "2", "--num-kv-tokens", "4096"]
    command = [sys.executable, "-c", program, "batch", str(lines), str(tmp_path / "out.jsonl"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("2 of 3 lines answered, 1 failed\n")
    assert done.stderr.startswith("1 line failed, see ")
    assert "Traceback" not in done.stderr


def test_bars_are_shown_one_after_the_other_on_a_terminal(
    lines: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich refuses two at once. A narrow one shows all, too."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(console, "stderr_console", lambda: terminal)
    plan = BatchPlan(lines, tmp_path / "out.jsonl", LineDefaults(tmp_path))

    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        with console.status("loading"):
            pass
        yield FakeBackend(pause_s=0.15)

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    run_batch(plan, opened, indexing_bar=lambda: console.progress_bar("reading"), bar=batch_bar)
    assert "lines" in screen.getvalue()
    assert "language" in screen.getvalue()
    assert "/3" in screen.getvalue()
