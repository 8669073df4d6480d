"""Tables in Parquet become lines, a few rows in memory at a time.

Modules: `epd/batch/places.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epd.batch import places
from epd.batch.folder import is_lines, write_lines
from epd.errors import RequestError
from tests import ROOT
from tests.batch.parquet import write_table


def lines_of(source: Path, *asked: str) -> list[dict[str, Any]]:
    out = source.parent / "lines"
    write_lines(out, source, asked)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_columns_of_parquet_are_the_fields_of_lines(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "rows.parquet",
        [
            {"id": 7, "video": "a.mp4", "images": None, "question": "Who?", "fps": 0.5, "note": b"\xff"},
            {"id": None, "video": None, "images": ["p.png", "s3://b/q.png"], "question": "Why?", "fps": None},
        ],
    )
    assert not is_lines(path, has_questions=False)
    assert lines_of(path) == [
        {"id": 7, "video": str(tmp_path / "a.mp4"), "question": "Who?", "fps": 0.5},
        {"id": 2, "images": [str(tmp_path / "p.png"), "s3://b/q.png"], "question": "Why?"},
    ]


def test_a_list_of_questions_is_a_line_for_each(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "video": "a.mp4", "questions": ["One, {id}?", "Two?"]},
        {"id": "y", "video": "b.mp4", "questions": []},
    ]
    found = lines_of(write_table(tmp_path / "rows.parquet", rows))
    assert [(each["id"], each["question"]) for each in found] == [("x#1", "One, {id}?"), ("x#2", "Two?")]


def test_a_template_names_columns_of_any_type(tmp_path: Path) -> None:
    rows = [{"video": "a.mp4", "year": 1999, "who": None}]
    [line] = lines_of(write_table(tmp_path / "rows.parquet", rows), "What of {year}{who}?")
    assert (line["id"], line["question"]) == (1, "What of 1999?")


def test_a_folder_of_parts_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    for name, place in (("b.parquet", "b"), ("a.parquet", "a"), ("deep/c.parquet", "c"), ("_x.parquet", "x")):
        write_table(folder / name, [{"video": f"{place}.mp4", "question": "?"}])
    assert [(each["id"], Path(each["video"]).name) for each in lines_of(folder)] == [
        (1, "a.mp4"), (2, "b.mp4"), (3, "c.mp4")
    ]  # fmt: skip


def test_a_folder_of_videos_with_results_in_it_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "answers.parquet").mkdir()
    assert [each["id"] for each in lines_of(tmp_path, "What?")] == ["a.mp4#1"]


@pytest.mark.parametrize(
    ("data", "words"),
    [(None, "cannot use"), (b"PAR1", "cannot use"), ({"video": ["a"]}, "has no column question")],
)
def test_a_table_that_is_wrong_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "rows.parquet"
    if isinstance(data, dict):
        pq.write_table(pa.table(data), path)
    elif data is not None:
        path.write_bytes(data)
    with pytest.raises(RequestError, match=r"^[^\n]*$") as caught:
        lines_of(path)
    assert words in str(caught.value)


def test_columns_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    """A column of large values costs nothing: memory grows by far less than one row group of it."""
    path = tmp_path / "rows.parquet"
    blob = pa.array([bytes([number]) * (8 << 20) for number in range(16)], pa.large_binary())
    pq.write_table(
        pa.table({"video": ["a.mp4"] * 16, "question": ["?"] * 16, "blob": blob}), path, compression="none"
    )
    del blob
    program = (
        "import pyarrow as pa, sys; from pathlib import Path; from epd.batch.folder import write_lines;"
        "path = Path(sys.argv[1]); write_lines(path.parent / 'lines', path, []);"
        "print(pa.default_memory_pool().max_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 8 << 20


def test_without_pyarrow_a_table_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    for place in ("s3://bucket/rows.parquet", str(tmp_path)):
        with pytest.raises(RequestError, match=r"pip install 'epd-vlm\[cloud\]'"):
            places.Folder(place)
