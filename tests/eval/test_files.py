"""Question files of the usual shapes, and one line for whatever is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InputError, MediaNotFoundError, RequestError
from epd.eval.files import listed_texts, read_videos
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


# The fields of the data sets' own files, each with one question.
LONG_VIDEO_BENCH = {
    "video_id": "86CxyhFV9MI",
    "question": "Which subtitles appear with the man in grey?",
    "question_wo_referring_query": "Which subtitles appear at the same time?",
    "candidates": ["it has come to an end", "run away", "like a world", "captain of it"],
    "correct_choice": 1,
    "position": [856, 1150],
    "topic_category": "NP-News-Programs",
    "question_category": "TOS",
    "level": "L2-Relation",
    "id": "86CxyhFV9MI_0",
    "video_path": "86CxyhFV9MI.mp4",
    "subtitle_path": "86CxyhFV9MI_en.json",
    "duration_group": 600,
    "starting_timestamp_for_subtitles": 0,
    "duration": 190.16,
    "view_count": 259852,
}
LONG_VIDEO_BENCH_ITEM = EvalItem(
    "86CxyhFV9MI_0",
    "Which subtitles appear with the man in grey?",
    "B",
    ("it has come to an end", "run away", "like a world", "captain of it"),
    "TOS",
    "600",
)
VIDEO_MME_CSV = """\
video_id,duration,domain,sub_category,url,videoID,question_id,task_type,question,options,answer
001,short,Knowledge,Geography,https://www.youtube.com/watch?v=-fFjv93ACG,-fFjv93ACG,001-1,Counting Problem,\
"Which kind, of all, is most?","['A. Apples.' ""B. Candles' wax.""
 'C. Berries.']",C
"""
VIDEO_MME_BY_VIDEO = {
    "video_id": "002",
    "duration_category": "medium",
    "video_category": "Knowledge",
    "questions": [
        {
            "question_id": "002-1",
            "task_type": "OCR",
            "question": "Q?",
            "choices": ["A. x", "B. y"],
            "answer": "B",
        },
        {
            "question_id": "002-2",
            "task_type": "OCR",
            "question": "R?",
            "choices": ["A. x", "B. y"],
            "answer": "A",
        },
    ],
}
PUBLISHED: dict[str, tuple[str, str, list[EvalItem]]] = {
    "lvb_val.json": (
        json.dumps([LONG_VIDEO_BENCH], indent=4),
        "videos/86CxyhFV9MI.mp4",
        [LONG_VIDEO_BENCH_ITEM],
    ),
    "lvb.tsv": (
        "id\tvideo_path\tquestion\toption0\toption1\toption2\toption3\toption4\tcorrect_choice\tduration\t"
        "duration_group\tquestion_category\n"
        "86CxyhFV9MI_0\t86CxyhFV9MI.mp4\tWhich subtitles appear with the man in grey?\t"
        "it has come to an end\trun away\tlike a world\tcaptain of it\tN/A\t1\t190.16\t600\tTOS\n",
        "86CxyhFV9MI.mp4",
        [LONG_VIDEO_BENCH_ITEM],
    ),
    "videomme.csv": (
        VIDEO_MME_CSV,
        "data/-fFjv93ACG.mkv",
        [
            EvalItem(
                "001-1",
                "Which kind, of all, is most?",
                "C",
                ("Apples.", "Candles' wax.", "Berries."),
                "Counting Problem",
                "short",
            )
        ],
    ),
    "by_video.json": (
        json.dumps([VIDEO_MME_BY_VIDEO]),
        "video/002.mp4",
        [
            EvalItem("002-1", "Q?", "B", ("x", "y"), "OCR", "medium"),
            EvalItem("002-2", "R?", "A", ("x", "y"), "OCR", "medium"),
        ],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_data_sets_are_read_as_they_are_published(tmp_path: Path, name: str) -> None:
    text, video, items = PUBLISHED[name]
    (tmp_path / video).parent.mkdir(exist_ok=True)
    (tmp_path / video).touch()
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    (found,) = read_videos(tmp_path / name)
    assert found.source == str(tmp_path / video)
    assert found.items == tuple(items)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.parquet", "PAR1...", "is a Parquet file; write its rows as JSON lines first"),
        ("a.json", "[{]", "begins as a JSON array and is none"),
        ("a.json", "{\n", "line 1 of "),
        ("a.json", "[1]", "item 1 of "),
        ("a.json", '[{"video": "a.mp4", "questions": 3}]', "item 1 of "),
        ("a.json", '[{"video": "a.mp4", "questions": [3]}]', "item 1.1 of "),
        ("a.json", json.dumps([LONG_VIDEO_BENCH | {"correct_choice": 4}]), "has the correct_choice 4; give"),
        ("a.json", json.dumps([LONG_VIDEO_BENCH | {"correct_choice": -1}]), "index, 0 to 3"),
        (
            "a.json",
            json.dumps([LONG_VIDEO_BENCH | {"correct_choice": None}]),
            "without answers cannot be judged",
        ),
        ("a.csv", "video,question,answer\na.mp4,Q?,yes,no\n", "row 2 of "),
        ("a.csv", 'video,question,answer\na.mp4,"Q?" x,yes\n', "is not a table's"),
        ("a.csv", "video,question,answer\n", "has no questions"),
    ],
)
def test_files_in_other_forms_are_refused_in_one_line(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    for video in ("a.mp4", "86CxyhFV9MI.mp4"):
        (tmp_path / video).touch()
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        read_videos(tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("['A. x', 'B. y']", ["A. x", "B. y"]),
        ("['A. x'\n 'B. y']", ["A. x", "B. y"]),
        ('["A. it\'s", "B. \\"y\\""]', ["A. it's", 'B. "y"']),
        ("A. x\nB. y", None),
        ("[A. x, B. y]", None),
        ("['A. x', y]", None),
        (r"['\x']", None),
    ],
)
def test_lists_in_cells_are_told_from_other_texts(text: str, texts: list[str] | None) -> None:
    assert listed_texts(text) == texts


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
        ({**GOOD, "options": ["x", "y"], "answer": "z"}, "A to B, its words"),
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
