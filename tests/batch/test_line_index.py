"""Lines are grouped by the content of their media, in one pass that holds none of them.

Modules: `epd/batch/media_names.py`.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.errors import RequestError


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def ask(line_id: Any, video: str, **more: Any) -> dict[str, Any]:
    return {"id": line_id, "video": video, "question": f"What of {line_id}?", **more}


@contextmanager
def indexed(path: Path, **defaults: Any) -> Iterator[LineIndex]:
    with closing(LineIndex(path, LineDefaults(path.parent, **defaults))) as index:
        index.build()
        yield index


def groups(index: LineIndex) -> list[list[Any]]:
    """The ids of each group's lines."""
    return [[line.line_id for line in index.lines(group)] for group in index.groups()]


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "a.mp4").write_bytes(b"one video")
    (tmp_path / "copy.mp4").write_bytes(b"one video")
    (tmp_path / "same_size.mp4").write_bytes(b"two video")
    (tmp_path / "b.mp4").write_bytes(b"another video")
    (tmp_path / "link.mp4").symlink_to(tmp_path / "a.mp4")
    return tmp_path


def test_equal_content_is_one_group_whatever_its_name(videos: Path) -> None:
    names = ["a.mp4", "b.mp4", "link.mp4", "./a.mp4", "copy.mp4", "same_size.mp4", "a.mp4"]
    path = write(videos / "in.jsonl", *(ask(number, name) for number, name in enumerate(names)))
    with indexed(path) as index:
        assert groups(index) == [[0, 2, 3, 4, 6], [1], [5]]
        assert [group.num_bytes for group in index.groups()] == [9, 13, 9]
        assert (index.num_lines, index.num_groups) == (7, 3)
        assert index.media.folder() == videos


def test_other_frames_of_a_video_are_another_group(videos: Path) -> None:
    path = write(videos / "in.jsonl", ask(1, "a.mp4"), ask(2, "a.mp4", num_frames=4), ask(3, "a.mp4", fps=1))
    with indexed(path) as index:
        assert groups(index) == [[1], [2], [3]]
    with indexed(path, num_frames=4) as index:
        assert groups(index) == [[1, 2], [3]]


def test_media_that_are_not_there_have_their_own_group(videos: Path) -> None:
    lines = [ask(1, "none.mp4"), ask(2, "nil.mp4"), ask(3, "none.mp4"), ask(4, "https://host/a.mp4")]
    with indexed(write(videos / "in.jsonl", *lines)) as index:
        assert groups(index) == [[1, 3], [2], [4]]


def test_blank_lines_are_no_lines_and_keep_the_numbers(videos: Path) -> None:
    path = write(videos / "in.jsonl", "", ask("a", "a.mp4"), "  ", "oops", {"id": "b"}, ask("c", "a.mp4"))
    with indexed(path) as index:
        assert [(line.number, line.line_id) for line in index.refused()] == [(4, None), (5, "b")]
        (group,) = index.groups()
        assert [line.number for line in index.lines(group)] == [2, 6]
        assert index.num_lines == 4


def test_an_id_twice_names_both_lines(videos: Path) -> None:
    path = write(videos / "in.jsonl", ask("x", "a.mp4"), ask("y", "a.mp4"), ask("x", "b.mp4"))
    with indexed(path) as index:
        (refused,) = index.refused()
        assert (refused.number, refused.line_id) == (3, None)
        assert refused.message == 'it has the id "x" of line 1; give each line its own'
        assert groups(index) == [["x", "y"]]


def test_what_is_done_is_left_out(videos: Path) -> None:
    path = write(videos / "in.jsonl", ask("1", "a.mp4"), ask(1, "b.mp4"), "oops", ask(2, "a.mp4"))
    with indexed(path) as index:
        assert index.forget(['"1"', "line 3", '"unknown"']) == 2
        assert groups(index) == [[1], [2]]
        assert list(index.refused()) == []
        assert index.has_questions
        assert index.forget(["1", "2"]) == 2
        assert not index.has_questions


def test_lines_of_many_pages_come_once_and_in_order(videos: Path) -> None:
    path = write(videos / "in.jsonl", *(ask(number, "ab"[number % 2] + ".mp4") for number in range(1500)))
    with indexed(path) as index:
        assert groups(index) == [list(range(0, 1500, 2)), list(range(1, 1500, 2))]


def test_memory_does_not_grow_with_the_file(videos: Path) -> None:
    def peak(num_lines: int) -> int:
        path = write(
            videos / "in.jsonl", *(ask(number, "a.mp4", answer="x" * 2000) for number in range(num_lines))
        )
        tracemalloc.start()
        try:
            with indexed(path) as index:
                assert sum(1 for group in index.groups() for _ in index.lines(group)) == num_lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    most = 1.3 * peak(1000)
    assert min(peak(4000) for _ in range(3)) < most, "whatever other threads allocated meanwhile"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nothing\.jsonl"):
        LineIndex(tmp_path / "nothing.jsonl", LineDefaults(tmp_path))
