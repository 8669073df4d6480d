"""Lines of both forms become bodies of chat requests; what cannot be one is refused under its id.

Modules: `epd/batch/shared_prefix.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd.batch.lines import BatchLine, LineDefaults, LineError, parse_line
from epd.batch.shared_prefix import SharedPrefix, shared_prefix

FOLDER = Path("/data")
QUESTION = "How many shapes are there?"
VIDEO = {"type": "video_url", "video_url": {"url": "file:///data/clip.mp4"}}


def parsed(record: Any, **defaults: Any) -> BatchLine:
    return parse_line(json.dumps(record).encode(), 7, LineDefaults(FOLDER, **defaults))


def short(**more: Any) -> dict[str, Any]:
    return {"id": "a", "video": "clip.mp4", "question": QUESTION, **more}


def openai(*parts: Any, **more: Any) -> dict[str, Any]:
    content = parts or (VIDEO, {"type": "text", "text": QUESTION})
    body = {"messages": [{"role": "user", "content": list(content)}], **more}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_both_forms_ask_the_same() -> None:
    line, other = parsed(short(answer="3")), parsed(openai())
    assert line.body == other.body
    assert (line.form, line.expected, other.form, other.expected) == ("short", "3", "openai", None)
    assert line.key == other.key == '"a"'


def test_images_come_in_order_and_urls_stay_as_they_are() -> None:
    line = parsed({"id": 1, "images": ["b.png", "https://host/a.png"], "question": QUESTION})
    urls = ["file:///data/b.png", "https://host/a.png"]
    assert [part.get("image_url", {}).get("url") for part in line.body["messages"][0]["content"]] == [
        *urls,
        None,
    ]
    assert line.key == "1"


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (short(), {"max_tokens": 9, "epd": {"fps": 2.0}}),
        (short(num_frames=4, max_tokens=3), {"max_tokens": 3, "epd": {"num_frames": 4}}),
        (openai(max_completion_tokens=5), {"max_completion_tokens": 5, "epd": {"fps": 2.0}}),
        (
            openai(mm_processor_kwargs={"num_frames": 6}, stream=True),
            {"max_tokens": 9, "mm_processor_kwargs": {"num_frames": 6}},
        ),
        (
            openai(media_io_kwargs={"video": {"num_frames": 6}}),
            {"max_tokens": 9, "media_io_kwargs": {"video": {"num_frames": 6}}},
        ),
        (openai(epd={"retention_min": 0.5}), {"max_tokens": 9, "epd": {"retention_min": 0.5, "fps": 2.0}}),
    ],
)
def test_defaults_hold_where_a_line_does_not_say(record: dict[str, Any], options: dict[str, Any]) -> None:
    body = parsed(record, fps=2.0, max_tokens=9).body
    assert {name: value for name, value in body.items() if name != "messages"} == options


@pytest.mark.parametrize(
    ("record", "epd"),
    [
        (short(), {"retention": 0.25, "reduction": "evs"}),
        (short(retention=1), {"retention": 1, "reduction": "evs"}),
        (short(reduction="evs", fps=1), {"fps": 1, "retention": 0.25, "reduction": "evs"}),
        (openai(), {"retention": 0.25, "reduction": "evs"}),
        (openai(epd={"retention": 0.5}), {"retention": 0.5, "reduction": "evs"}),
        (short(start_s=1, end_s=2.5), {"start_s": 1, "end_s": 2.5, "retention": 0.25, "reduction": "evs"}),
        (openai(epd={"retention": None}), {"retention": 0.25, "reduction": "evs"}),
        (openai(epd=None), {"retention": 0.25, "reduction": "evs"}),
        (
            openai(mm_processor_kwargs={"fps": 2}, epd={"reduction": "random"}),
            {"retention": 0.25, "reduction": "random"},
        ),
    ],
)
def test_what_is_kept_is_as_the_line_says_or_else_the_default(
    record: dict[str, Any], epd: dict[str, Any]
) -> None:
    assert parsed(record, retention=0.25, reduction="evs").body["epd"] == epd
    said = parsed(record).body.get("epd") or {}
    assert {name: value for name, value in said.items() if value is not None}.items() <= epd.items()


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (short(), {"temperature": 0.5, "seed": 3, "epd": {"start_s": 1.0, "end_s": 9.0}}),
        (short(start_s=2), {"temperature": 0.5, "seed": 3, "epd": {"start_s": 2}}),
        (openai(seed=4), {"temperature": 0.5, "seed": 4, "epd": {"start_s": 1.0, "end_s": 9.0}}),
        (
            openai(temperature=0, seed=None, epd={"end_s": 3}),
            {"temperature": 0, "seed": 3, "epd": {"end_s": 3}},
        ),
    ],
)
def test_how_and_about_which_part_is_as_the_line_says_or_else_the_default(
    record: dict[str, Any], options: dict[str, Any]
) -> None:
    body = parsed(record, start_s=1.0, end_s=9.0, sampling={"temperature": 0.5, "seed": 3}).body
    assert {name: value for name, value in body.items() if name != "messages"} == options


def test_a_system_message_stands_before_lines_that_have_none() -> None:
    system = {"role": "system", "content": "Be brief."}
    for record in (short(), openai()):
        plain, told = parsed(record).body["messages"], parsed(record, system="Be brief.").body["messages"]
        assert told == [system, *plain]
    own = openai()
    own["body"]["messages"].insert(0, {"role": "developer", "content": "Be long."})
    assert parsed(own, system="Be brief.").body == parsed(own).body


def test_a_line_that_reads_other_frames_shares_no_prefix() -> None:
    few, many = (parsed(openai(media_io_kwargs={"video": {"num_frames": count}})).body for count in (4, 8))
    assert shared_prefix(few) != shared_prefix(many)


def test_a_line_with_other_variables_of_the_template_shares_no_prefix() -> None:
    plain, other = (
        parsed(openai(chat_template_kwargs=each)).body for each in (None, {"add_vision_id": True})
    )
    assert shared_prefix(plain) != shared_prefix(other)


def test_an_image_in_another_detail_shares_no_prefix() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "file:///data/a.png", "detail": detail}}
        for detail in ("low", "high", "high")
    ]
    low, high, same = (shared_prefix(parsed(openai(part)).body) for part in parts)
    assert low != high == same


def test_a_line_that_keeps_another_share_shares_no_prefix() -> None:
    plain, same, other = parsed(short()), parsed(short(retention=0.5)), parsed(short(retention=0.25))
    assert shared_prefix(plain.body) != shared_prefix(same.body) != shared_prefix(other.body)
    assert shared_prefix(parsed(short(), retention=0.5).body) == shared_prefix(same.body)


@pytest.mark.parametrize(
    ("record", "words", "line_id"),
    [
        ([1], "list", None),
        (short(id=True), "True", None),
        (short(id=""), "''", None),
        ({"video": "a.mp4", "question": QUESTION}, "id is None", None),
        (short(num_frame=4), "'num_frame'", "a"),
        (short(question=" "), "question", "a"),
        (short(images=["a.png"]), "give one of the two", "a"),
        ({"id": "a", "question": QUESTION}, "give one of the two", "a"),
        (short(video=3), "a path for video", "a"),
        ({"id": "a", "images": [], "question": QUESTION}, "a list of paths", "a"),
        (short(answer=3), "put it in quotes", "a"),
        ({**openai(), "method": "GET"}, "'GET'", "a"),
        ({**openai(), "body": []}, "body is []", "a"),
        ({**openai(), "custom_id": None}, "custom_id is None", None),
    ],
)
def test_what_makes_no_sense_is_refused_under_its_id(record: Any, words: str, line_id: str | None) -> None:
    with pytest.raises(LineError, match=words.replace("[", r"\[").replace("]", r"\]")) as caught:
        parsed(record)
    assert caught.value.line_id == line_id


def test_a_line_that_is_no_json_is_refused() -> None:
    for text in (b"{", b"\xff", b"nothing"):
        with pytest.raises(LineError, match="not JSON"):
            parse_line(text, 1, LineDefaults(FOLDER))


def test_questions_after_equal_media_share_a_prefix() -> None:
    one, other = parsed(openai()), parsed(openai(VIDEO, {"type": "text", "text": "Which comes first?"}))
    assert shared_prefix(one.body) == shared_prefix(other.body)
    assert shared_prefix(one.body).urls == ("file:///data/clip.mp4",)


def test_what_stands_before_media_is_part_of_the_prefix() -> None:
    question = {"type": "text", "text": QUESTION}
    prefixes = {
        shared_prefix(parsed(openai(*parts, **more)).body).frame
        for parts, more in [
            ((VIDEO, question), {}),
            ((question, VIDEO), {}),
            (({"type": "text", "text": "Look:"}, VIDEO, question), {}),
            ((VIDEO, question), {"epd": {"num_frames": 4}}),
            ((VIDEO, VIDEO, question), {}),
        ]
    }
    assert len(prefixes) == 5


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 3},
        {"messages": [3, {"content": [None, {"type": "video_url"}]}]},
        {"messages": [{"content": "?"}]},
    ],
)
def test_bodies_without_media_share_nothing(body: dict[str, Any]) -> None:
    assert shared_prefix(body).urls == ()


def test_sound_that_came_in_lines_is_told_apart() -> None:
    def asked(data: str, question: str, kind: str = "wav") -> SharedPrefix:
        sound = {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
        parts = [sound, {"type": "text", "text": question}]
        return shared_prefix({"messages": [{"role": "user", "content": parts}]})

    first = asked("AAAA", "What?")
    assert first.urls == ("data:audio/wav;base64,AAAA",)
    assert "AAAA" not in first.frame
    assert asked("AAAA", "Who?") == first
    assert asked("BBBB", "What?") != first
