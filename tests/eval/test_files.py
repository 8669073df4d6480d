"""Question files of the usual shapes, and one line for whatever is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InputError, MediaNotFoundError, RequestError
from epd.eval.files import read_videos
from epd.eval.items import EvalItem


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    """A question file beside two files a.mp4 and b.mp4."""
    for name in ("a.mp4", "b.mp4"):
        (folder / name).touch()
    path = folder / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_open_questions_are_grouped_by_video(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"video": "a.mp4", "question": "What colour is it?", "answer": "red", "kind": "colour"},
        {"video": "b.mp4", "question": "How many?", "answer": 3},
        "",
        {"video": "a.mp4", "question": "Is it there?", "answer": "yes", "id": 77, "unknown": [1]},
    )
    first, second = read_videos(path)
    assert first.source == str(tmp_path / "a.mp4")
    assert first.items == (
        EvalItem("line-1", "What colour is it?", "red", kind="colour"),
        EvalItem("77", "Is it there?", "yes"),
    )
    assert second.items == (EvalItem("line-2", "How many?", "3"),)


VIDEO_MME = {
    "videoID": "a",
    "question_id": "001-1",
    "task_type": "Counting Problem",
    "question": "How many cats?",
    "options": ["A. One.", "B. Two.", "C. None."],
    "answer": "B",
}


def test_a_line_of_video_mme(tmp_path: Path) -> None:
    (video,) = read_videos(write(tmp_path, VIDEO_MME))
    assert video.source == str(tmp_path / "a.mp4")
    assert video.items == (
        EvalItem("001-1", "How many cats?", "B", ("One.", "Two.", "None."), "Counting Problem"),
    )


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["One.", "Two.", "None."], "B"),
        (["One.", "Two.", "None."], "Two."),
        (["(A) One.", "(B) Two.", "(C) None."], "(B) Two."),
        ("A. One.\nB. Two.\nC. None.", "b"),
        ({"A": "One.", "B": "Two.", "C": "None."}, "B."),
    ],
)
def test_options_in_other_clothes(tmp_path: Path, options: Any, answer: str) -> None:
    (video,) = read_videos(write(tmp_path, {**VIDEO_MME, "options": options, "answer": answer}))
    assert (video.items[0].options, video.items[0].answer) == (("One.", "Two.", "None."), "B")


def test_options_that_only_begin_like_letters_keep_all_their_words(tmp_path: Path) -> None:
    options = ["B. Dylan", "A. Piazzolla"]
    (video,) = read_videos(write(tmp_path, {**VIDEO_MME, "options": options, "answer": "A"}))
    assert video.items[0].options == ("B. Dylan", "A. Piazzolla")


def test_videos_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    path = write(folder, {"video_path": "b.mp4", "question": "Q?", "answer": "yes"})
    moved = path.rename(tmp_path / "questions.jsonl")
    assert read_videos(moved, folder)[0].source == str(folder / "b.mp4")
    address = write(tmp_path, {"video": "https://host/x.mp4", "question": "Q?", "answer": "yes"})
    assert read_videos(address)[0].source == "https://host/x.mp4"


GOOD = {"video": "a.mp4", "question": "Q?", "answer": "yes"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{'video': 1}", "is not JSON"),
        ('["a.mp4"]', "is a JSON list"),
        ({"question": "Q?", "answer": "yes"}, "names no video, it has 'question', 'answer'"),
        ({**GOOD, "question": " "}, "has no question"),
        ({"video": "a.mp4", "question": "Q?"}, "has the answer None"),
        ({**GOOD, "answer": ["yes"]}, "has the answer ['yes']"),
        ({**GOOD, "options": ["x"], "answer": "A"}, "has the options ['x']"),
        (
            {**GOOD, "options": ["x", "y"], "answer": "C"},
            "has the answer 'C'; give the right option's letter",
        ),
        ({**GOOD, "options": ["x", "y"], "answer": "z"}, "A to B, or its words"),
        ({**GOOD, "id": "line-1"}, "has the id 'line-1' of line 1"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: dict[str, Any] | str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_videos(write(tmp_path, GOOD, line))
    assert words in str(caught.value)
    assert str(caught.value).startswith("line 2 of ")


def test_files_that_are_wrong_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_videos(tmp_path / "missing.jsonl")
    with pytest.raises(RequestError, match="has no questions"):
        read_videos(write(tmp_path, ""))
    with pytest.raises(MediaNotFoundError, match=r"line 1 .*c\.mp4.*--video-dir"):
        read_videos(write(tmp_path, {**GOOD, "video": "c.mp4"}))
    assert issubclass(MediaNotFoundError, InputError)
