"""A line that is no request fails alone; a file that holds no lines is named for what it is.

Modules: `epd/batch/line_files.py`.
"""

from __future__ import annotations

import gzip
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from epd.batch.folder import read_questions, write_lines
from epd.batch.line_index import LineIndex
from epd.batch.lines import CHAT_URL, LineDefaults, LineError, parse_line
from epd.batch.media_names import local_path
from epd.batch.result_files import ResultFiles
from epd.errors import RequestError
from tests.batch.bad_lines import DRAWN_LINES, bad_lines

GOOD = b'{"id": "good %d", "images": ["i.png"], "question": "What?"}'
BAD = bad_lines()


def seen(path: Path, *lines: bytes, end: bytes = b"\n", **defaults: int) -> tuple[list[Any], list[Any]]:
    """Returns the ids of lines that can be asked, and the number, id and message of those that cannot."""
    path.write_bytes(end.join(lines))
    with closing(LineIndex(path, LineDefaults(path.parent, **defaults))) as index:  # type: ignore[arg-type]
        index.build()
        good = [line.line_id for group in index.groups() for line in index.lines(group)]
        return good, [(each.number, each.line_id, each.message) for each in index.refused()]


@pytest.mark.parametrize("name", BAD)
def test_a_line_that_is_no_request_fails_alone(tmp_path: Path, name: str) -> None:
    line, words, line_id = BAD[name]
    good, ((number, refused_id, message),) = seen(tmp_path / "in", GOOD % 0, line, GOOD % 1)
    assert good == ["good 0", "good 1"]
    assert (number, refused_id) == (2, line_id)
    assert words in message
    assert len(message) < 600
    first, _ = seen(tmp_path / "in", line, GOOD % 0, GOOD % 1)
    assert len(first) == 2, "it may come first"


@given(lines=DRAWN_LINES)
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
def test_whatever_stands_beside_them_good_lines_can_be_asked(tmp_path: Path, lines: list[bytes]) -> None:
    good, refused = seen(tmp_path / "in", GOOD % 0, *lines, GOOD % 1)
    assert {"good 0", "good 1"} <= set(map(str, good))
    blank = sum(not line.removeprefix(b"\xef\xbb\xbf").strip() for line in lines)
    assert len(good) + len(refused) == len(lines) + 2 - blank


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\n \n", b"\xef\xbb\xbf\r\n"])
def test_marks_and_ends_of_lines_are_no_part_of_them(tmp_path: Path, begin: bytes, end: bytes) -> None:
    text = '{"id": "\u2028 \x85", "images": ["i.png"], "question": "one\u2028two\u2029 \x0c?"}'.replace(
        "\x0c", "\\f"
    )
    good, refused = seen(
        tmp_path / "in", begin + GOOD % 0, text.encode(), b"\xef\xbb\xbf" + GOOD % 1, b"", end=end
    )
    assert (good, refused) == (["good 0", "\u2028 \x85", "good 1"], [])


def test_a_line_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    long = b'{"id": "long", ' + b" " * 5000 + b"}"
    good, refused = seen(tmp_path / "in", GOOD % 0, long, GOOD % 1, max_line_bytes=1000)
    assert good == ["good 0", "good 1"]
    assert refused == [
        (2, "long", "this line has more than 1000 bytes; allowed that many; give media by URL")
    ]
    assert seen(tmp_path / "in", long, max_line_bytes=1000)[1], "and where it is the last"


ARRAY = json.dumps([{"id": 1}, {"id": 2}])
FILES: dict[str, tuple[bytes, str]] = {
    "UTF-16, as PowerShell writes": (
        "\ufeff".encode("utf-16-le") + (GOOD % 0).decode().encode("utf-16-le"),
        "is UTF-16",
    ),
    "UTF-16, big": ("\ufeff\r\n".encode("utf-16-be") + (GOOD % 0).decode().encode("utf-16-be"), "is UTF-16"),
    "UTF-16 without its mark": ((GOOD % 0).decode().encode("utf-16-le") * 2, "is UTF-16"),
    "UTF-32": ((GOOD % 0).decode().encode("utf-32"), "is UTF-32"),
    "UTF-32, big, without its mark": ((GOOD % 0).decode().encode("utf-32-be"), "is UTF-32"),
    "an array in a line": (ARRAY.encode(), "holds a JSON array"),
    "an array of lines": (ARRAY.replace("},", "},\n").encode() + b"\n", "holds a JSON array"),
    "an array as editors write it": (json.dumps(json.loads(ARRAY), indent=2).encode(), "holds a JSON array"),
    "an object over lines": (json.dumps({"id": 1, "images": ["a"]}, indent=2).encode(), "over several lines"),
    "gzip": (gzip.compress(GOOD % 0), "gzip"),
    "a spreadsheet": (b"PK\x03\x04\x14\x00 xl/workbook.xml", "ZIP, as spreadsheets are"),
    "a table": (
        b'id,video,question\n1,a.mp4,"Who, what?"\n',
        "is a table with the header 'id,video,question'",
    ),
    "a table of Excel's": (b"\xef\xbb\xbfid;video;question\r\n1;a.mp4;Who\r\n", "is a table with the header"),
    "ends of old Macs": ((GOOD % 0) + b"\r" + (GOOD % 1) + b"\r", "with CR alone"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_lines_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    data, words = FILES[name]
    with pytest.raises(RequestError, match=r"^[^\n]*$") as caught:
        seen(tmp_path / "in.jsonl", data)
    assert words in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_an_id_twice_fails_the_second_line(tmp_path: Path) -> None:
    lines = [GOOD % 0, GOOD % 1, GOOD % 0, b'{"id": "good 1"', b'{"id": "good 2"', GOOD % 2]
    good, refused = seen(tmp_path / "in", *lines)
    assert sorted(map(str, good)) == ["good 0", "good 1", "good 2"]
    assert [each[:2] for each in refused] == [(3, None), (4, None), (5, None)]


def test_halves_of_characters_are_written_and_read_back(tmp_path: Path) -> None:
    """A server may answer them, and names of files may hold bytes that are no text."""
    records = [
        {"id": number, "answer": text} for number, text in enumerate(["\ud83d", "a\udcffb", "\u2028", "😀"])
    ]
    with closing(ResultFiles(tmp_path / "out.jsonl")) as files:
        files.add(records, [{"id": "e", "line": 9, "error": {"type": "x", "message": "\ud800"}}])
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == records
    with closing(ResultFiles(tmp_path / "out.jsonl")) as files:
        assert sorted(files.done()) == ['"e"', "0", "1", "2", "3"]


def test_videos_of_any_name_are_found_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    name = os.fsdecode(b"caf\xe9 100%.mp4")
    try:
        (folder / name).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes text alone")
    (tmp_path / "q.txt").write_bytes("\ufeffWhat?\r\n\r\nWho\u2028?\n".encode())
    assert write_lines(tmp_path / "in.jsonl", folder, read_questions(tmp_path / "q.txt")) == 2
    lines = (tmp_path / "in.jsonl").read_bytes().split(b"\n")[:-1]
    records = [parse_line(line, 1, LineDefaults(tmp_path)) for line in lines]
    parts = [record.body["messages"][0]["content"] for record in records]
    assert [part[1]["text"] for part in parts] == ["What?", "Who\u2028?"]
    path = local_path(parts[0][0]["video_url"]["url"])
    assert path is not None
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("name", ["id", "custom_id"])
@pytest.mark.parametrize("line_id", [{"a": ["b" * 10_000]}, ["b"] * 10_000, None, True, 1.5, ""])
def test_ids_that_are_none_are_shown_in_short(tmp_path: Path, name: str, line_id: object) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(json.dumps({name: line_id, "question": "x"}).encode(), 1, LineDefaults(tmp_path))
    assert len(str(caught.value)) < 300


def test_media_in_any_form_tell_lines_apart(tmp_path: Path) -> None:
    forms = [
        '{"type":"image_url","image_url":{"url":"%s"}}',
        '{"type":"image_url","image_url":"%s"}',
        '{"type":"input_image","image_url":"%s"}',
        '{"type":"video_url","video_url":"%s"}',
    ]
    lines = []
    for number, (form, role) in enumerate((form, role) for form in forms for role in ("user", "tool")):
        for place in range(2):
            content = [json.loads(form % f"file:///{place}.png"), {"type": "text", "text": "x"}]
            body = {"messages": [{"role": role, "content": content}]}
            line = {"custom_id": f"{number} {place}", "method": "POST", "url": CHAT_URL, "body": body}
            lines.append(json.dumps(line))
    path = tmp_path / "in"
    path.write_text("\n".join(lines))
    with closing(LineIndex(path, LineDefaults(tmp_path))) as index:
        index.build()
        groups = [[line.line_id for line in index.lines(group)] for group in index.groups()]
    assert len(groups) == len(lines), groups
