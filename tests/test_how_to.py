"""The code of the documents runs as it is written, block after block, beside a drawn clip."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import subprocess
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray.scripts.scripts import cli
from typer.main import get_command

from epd.batch.folder import write_lines
from epd.batch.lines import LineDefaults, parse_line
from epd.batch.result_parts import PartsFolder, ResultParts
from epd.errors import RequestError
from epd.profiles import accelerators
from epd.serve_app.cli.program import app
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests import ROOT
from tests.profiles import test_catalogue

README, HOW_TO = ROOT / "README.md", ROOT / "docs" / "how-to"
# Keeps the words that it is called with in a file of its own. A line of a new batch is its own answer.
_CALLED = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$(mktemp "$CALLS/XXXXXX")"
if [ "$1" = batch ] && [ -f "$2" ] && [ ! -e "$3" ]; then cp "$2" "$3"; fi
"""


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """The blocks of Python of a document, each with the line that it begins at."""
    return _blocks(path, "python")


def _blocks(path: Path, language: str) -> list[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def calls_in_shell(page: Path, folder: Path) -> list[list[str]]:
    """Runs the shell blocks of a document in a folder. The calls of the programs that it names, sorted."""
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir()
    calls.mkdir()
    for name in ("epd", "pip", "ray"):
        (programs / name).write_text(_CALLED)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)}
    for _, block in _blocks(page, "bash"):
        subprocess.run(["bash", "-euc", block], cwd=folder, env=environment, check=True)
    return sorted(each.read_text().split("\0")[:-1] for each in calls.iterdir())


def check_call(program: str, words: list[str]) -> None:
    """Raises what the program itself would, for words that it does not take."""
    name, *rest = words
    if program == "pip":
        (extra,) = re.findall(r"^epd-vlm\[(\w+)\]$", rest[0])
        assert (name, rest[1:]) == ("install", [])
        assert (
            extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        )
        return
    group: Any = {"epd": get_command(app), "ray": cli}[program]
    command = group.get_command(group.make_context(program, words), name)
    assert command.make_context(name, rest).params


def run(path: Path, blocks: list[tuple[int, str]]) -> str:
    """What blocks print that share their names, as in one program. Errors show lines of the document."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for line, block in blocks:
            exec(compile("\n" * line + block, str(path), "exec"), names)
    return printed.getvalue()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The shape that appears first in clip.mp4, which lies in the folder that programs start in."""
    scene, folder = make_scene(3, 30.0), tmp_path_factory.mktemp("clips")
    write_demo_video(folder / "clip.mp4", scene, fps=8, height=180, width=320)
    with contextlib.chdir(folder):
        yield min(scene.objects, key=lambda each: each.start_s).shape


def test_the_page_about_python_runs(truth: str) -> None:
    page = HOW_TO / "python.md"
    printed = run(page, python_blocks(page))
    assert printed.startswith(f"{truth}\n")
    for line in ("How many shapes are there? ", "RequestError ", "missing.mp4"):
        assert line in printed


def test_the_table_of_the_page_about_clusters_is_one_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table is asked about, and its answers are read as the page reads them."""
    monkeypatch.chdir(tmp_path)
    page = HOW_TO / "answer-on-a-cluster.md"
    table, reads, pipeline = python_blocks(page)
    run(page, [table])
    assert write_lines(Path("lines.jsonl"), "rows.parquet", []) == 3
    with closing(ResultParts(PartsFolder("answers"))) as parts:
        parts.add([{"id": "ride#1", "answer": "At home."}], [])
    assert run(page, [reads]) == "[{'id': 'ride#1', 'answer': 'At home.'}]\n"
    assert "ask_videos(" in pipeline[1]  # tests/batch/test_ask.py runs it


@pytest.mark.parametrize(
    ("page", "programs"),
    [
        ("how-to/answer-on-a-cluster.md", {"epd batch": 1, "epd serve": 1, "pip install": 1, "ray start": 2}),
        ("how-to/answer-many-videos.md", {"epd batch": 6, "epd serve": 1}),
        ("batch.md", {"epd batch": 10}),
    ],
)
def test_each_shell_line_about_batches_is_one_of_its_program(
    page: str, programs: dict[str, int], tmp_path: Path
) -> None:
    """The shell is the real one. Each call is read as its program reads it. What it does stands elsewhere.

    Several Ray nodes: tests/serve_app/ray/test_faults.py. The application of `epd serve --address`, and the
    page's `epd batch` at it: tests/serve_app/ray/test_shared_cluster.py. A batch between stores:
    tests/batch/test_store_batch.py. Ray Data: tests/batch/test_ask.py.
    """
    lines = "".join(f'{{"id": {number}}}\n' for number in range(10))
    (tmp_path / "questions.jsonl").write_text(lines)
    calls = calls_in_shell(ROOT / "docs" / page, tmp_path)
    assert Counter(" ".join(words[:2]) for words in calls) == programs
    for program, *words in calls:
        check_call(program, words)
    if page == "how-to/answer-many-videos.md":  # what is divided over GPUs comes together again
        assert (tmp_path / "answers.jsonl").read_text() == lines
        parts = [words for words in calls if "--device" in words]
        assert [(words[2], words[-1]) for words in parts] == [
            (f"part.{gpu}", f"cuda:{gpu}") for gpu in range(4)
        ]


@pytest.mark.usefixtures("truth")
def test_lines_for_parts_of_videos_are_lines_of_a_batch() -> None:
    """The clip has 30 s: with parts of 12 s there are three."""
    Path("videos").mkdir()
    Path("videos", "clip.mp4").symlink_to(Path("clip.mp4").resolve())
    page = HOW_TO / "answer-many-videos.md"
    run(page, [(line, block.replace("PART_S = 600", "PART_S = 12")) for line, block in python_blocks(page)])
    written = Path("questions.jsonl").read_bytes().splitlines()
    lines = [parse_line(line, number, LineDefaults(Path())) for number, line in enumerate(written, start=1)]
    parts = [(line.body["epd"]["start_s"], line.body["epd"]["end_s"]) for line in lines]
    assert parts == [(0, 12), (12, 24), (24, 36)]


def test_the_readmes_python_runs(truth: str) -> None:
    blocks = [(line, block) for line, block in python_blocks(README) if "LLM" in block]
    assert run(README, blocks) == f"{truth}\n"


def test_the_first_change_fails_and_then_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING's test, in the file that it names, before and after its row, and the list beside it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    test, row = re.findall(r"^   ```python\n(.*?)^   ```$", text, flags=re.MULTILINE | re.DOTALL)
    facts = {**vars(test_catalogue)}
    exec(textwrap.dedent(test), facts)
    with pytest.raises(RequestError, match="l40"):
        facts["test_an_l40_decodes_as_an_l40s"]()
    rows = {**vars(accelerators)}
    exec(textwrap.dedent(row), rows)
    for module in (accelerators, test_catalogue):
        monkeypatch.setattr(module, "DEVICES", {**module.DEVICES, **rows["DEVICES"]})
    facts["test_an_l40_decodes_as_an_l40s"]()
    by_bandwidth = test_catalogue.test_more_bandwidth_decodes_faster_and_more_flops_prefill_faster
    with pytest.raises(AssertionError):
        by_bandwidth()
    assert 'Put `"l40"` before `"l40s"` in its first list' in text
    exec(inspect.getsource(by_bandwidth).replace('"l40s"', '"l40", "l40s"', 1), facts)
    facts["DEVICES"] = accelerators.DEVICES
    facts[by_bandwidth.__name__]()
