"""Folders, lists and tables become lines, with questions that name their columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from epd.batch.folder import is_lines, write_lines
from epd.batch.lines import LineDefaults, LineError, parse_line
from epd.errors import MediaNotFoundError, RequestError


def lines_of(source: Path, *asked: str) -> list[dict[str, Any]]:
    out = source.parent / "lines"
    num_lines = write_lines(out, source, asked)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == num_lines
    return lines


def table(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_bytes(text.encode())
    return path


def test_a_list_of_media_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "media.txt"
    path.write_text("a.mp4\n\n/b/c.PNG\nhttps://host/d.mp4?x=1\n")
    asked = lines_of(path, "What is in {name}?", "Is {stem} long?")
    assert [each["id"] for each in asked] == [
        "a.mp4#1",
        "a.mp4#2",
        "c.PNG#1",
        "c.PNG#2",
        "d.mp4#1",
        "d.mp4#2",
    ]
    assert [each["question"] for each in asked[::2]] == [
        "What is in a.mp4?", "What is in c.PNG?", "What is in d.mp4?"
    ]  # fmt: skip
    assert asked[1]["question"] == "Is a long?"
    assert (asked[0]["video"], asked[2]["images"]) == (str(tmp_path / "a.mp4"), ["/b/c.PNG"])
    assert asked[4]["video"] == "https://host/d.mp4?x=1"
    assert (is_lines(path, has_questions=True), is_lines(path, has_questions=False)) == (False, True)


def test_a_pattern_and_a_single_medium_are_asked_about(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.mp4", "c.png", "shot[1].png"):
        (tmp_path / name).touch()
    found = lines_of(tmp_path / "?.mp4", "What is {stem}?")
    assert [each["id"] for each in found] == ["a.mp4#1", "b.mp4#1"]
    assert [each["video"] for each in found] == [str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")]
    for name in ("c.png", "shot[1].png"):
        [picture] = lines_of(tmp_path / name, "What?")
        assert (picture["id"], picture["images"]) == (f"{name}#1", [str(tmp_path / name)])
        assert not is_lines(tmp_path / name, has_questions=False)
    with pytest.raises(MediaNotFoundError, match="no file matches"):
        lines_of(tmp_path / "*.mov", "What?")


def test_the_columns_of_a_table_are_the_fields_of_lines(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "\ufeffid,video,images,question,answer,fps,max_tokens,note\r\n"
        'x,a.mp4,,"Who, {then}?",,0.5,3,n\r\n'
        ',,p.png; /q.png,"two\nlines",yes,,,\r\n',
    )
    assert lines_of(path) == [
        {
            "id": "x",
            "video": str(tmp_path / "a.mp4"),
            "question": "Who, {then}?",
            "fps": 0.5,
            "max_tokens": 3,
        },
        {"id": 2, "images": [str(tmp_path / "p.png"), "/q.png"], "question": "two\nlines", "answer": "yes"},
    ]


def test_a_question_names_columns_of_the_row(tmp_path: Path) -> None:
    path = table(tmp_path, "video,Player Name,question\na.mp4,Ann {id},ignored\n")
    [line] = lines_of(path, "Where is {Player Name}?")
    assert (line["id"], line["question"]) == (1, "Where is Ann {id}?")
    assert [each["id"] for each in lines_of(path, "One?", "Two?")] == ["1#1", "1#2"]


@pytest.mark.parametrize(
    ("row", "words"),
    [("a.mp4,What?,1,more", "no field 'cells beyond the columns'"), ("a.mp4,,1", "question is None")],
)
def test_a_row_that_is_wrong_fails_alone(tmp_path: Path, row: str, words: str) -> None:
    bad, good = lines_of(table(tmp_path, f"video,question,start_s\n{row}\nb.mp4,Why?,x\n"))
    with pytest.raises(LineError, match=words) as caught:
        parse_line(json.dumps(bad).encode(), 1, LineDefaults(tmp_path))
    assert caught.value.line_id == 1
    body = parse_line(json.dumps(good).encode(), 2, LineDefaults(tmp_path)).body
    assert body["epd"]["start_s"] == "x"  # no number: refused where bodies are checked


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ("video,note\na.mp4,n\n", [], "has no column question"),
        ("clip,question\na.mp4,n\n", [], "has the columns clip, question; allowed: with video or images"),
        ("video\na.mp4\n", ["Who is {who}?"], "{who}; allowed: video; name one"),
        ('video,question\na.mp4,"x\n', [], "give a table in UTF-8 with commas"),
        ("", [], "has no column question"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(tmp_path: Path, text: str, asked: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=r"^[^\n]*$") as caught:
        lines_of(table(tmp_path, text), *asked)
    assert words in str(caught.value)


def test_a_table_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("video,question\na.mp4,Où?\n".encode("latin-1"))
    with pytest.raises(RequestError, match="give a table in UTF-8"):
        lines_of(path)


def test_other_readers_of_tables_keep_their_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    question = "x" * (before + 1)
    (line,) = lines_of(table(tmp_path, f"video,question\na.mp4,{question}\n"))
    assert line["question"] == question
    assert csv.field_size_limit() == before
