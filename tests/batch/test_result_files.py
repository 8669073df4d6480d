"""Results are whole lines, written once, whatever a killed run left behind.

Modules: `epd/batch/records.py`.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from epd.batch.line_index import RefusedLine
from epd.batch.lines import BatchLine
from epd.batch.records import error_record, is_same_answer, key_of, result_record
from epd.batch.result_files import ResultFiles, errors_path
from epd.batch.tasks import Answered, Failed, outcome_of
from epd.errors import MediaNotFoundError, RequestError

COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1",
    "choices": [{"message": {"role": "assistant", "content": " Blue. "}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def line(line_id: str | int = "a", form: Any = "short", expected: str | None = None) -> BatchLine:
    parts = [
        {"type": "video_url", "video_url": {"url": "file:///a%20b.mp4"}},
        {"type": "text", "text": "Why?"},
    ]
    return BatchLine(4, line_id, form, {"messages": [{"role": "user", "content": parts}]}, expected)


def test_a_short_line_gets_its_answer_and_whether_it_is_right() -> None:
    record = result_record(Answered(line(expected="blue"), COMPLETION))
    assert record == {
        "id": "a",
        "media": ["/a b.mp4"],
        "question": "Why?",
        "answer": " Blue. ",
        "finish_reason": "stop",
        "expected": "blue",
        "is_right": True,
        "usage": COMPLETION["usage"],
    }
    assert "is_right" not in result_record(Answered(line(), COMPLETION))


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"), [("Blue.", "blue", True), (" 3 ", "3", True), ("30", "3", False)]
)
def test_answers_are_compared_without_case_space_and_full_stop(
    answer: str, expected: str, is_right: bool
) -> None:
    assert is_same_answer(answer, expected) is is_right


def test_an_openai_line_gets_openais_batch_output() -> None:
    record = result_record(Answered(line(form="openai"), COMPLETION))
    assert record["custom_id"] == "a"
    assert record["response"] == {"status_code": 200, "request_id": "chatcmpl-1", "body": COMPLETION}
    assert record["error"] is None
    assert record["id"].startswith("batch_req_")


def test_failures_name_their_line_type_and_message() -> None:
    failed = Failed.of(line(), MediaNotFoundError("no file\nhere"))
    error = {"type": "MediaNotFoundError", "message": "no file here", "status": 400}
    asked = {"media": ["/a b.mp4"], "question": "Why?"}
    assert error_record(failed) == {"id": "a", "line": 4, "error": error, **asked}
    record = error_record(Failed(line(form="openai"), "X", "why", 404))
    assert record["response"]["status_code"] == 404
    assert record["response"]["body"]["error"] == {"message": "why", "type": "X", "param": None, "code": None}
    assert record["error"] == {"code": "X", "message": "why"}


def test_a_failure_at_a_server_has_the_body_that_the_server_gave() -> None:
    body = {"error": {"message": "no\nmodel", "type": "NotFoundError", "param": "model", "code": "no_model"}}
    asked = line(form="openai")
    record = error_record(outcome_of(asked, 404, body))
    assert record["response"] == {"status_code": 404, "request_id": "", "body": body}
    assert record["error"] == {"code": "no_model", "message": "no model"}
    without = error_record(outcome_of(asked, 502, {"detail": "x"}))
    assert without["response"]["body"]["error"]["type"] == "server_error"


def test_keys_of_records_are_those_of_their_lines() -> None:
    answered = [Answered(line(each, form), COMPLETION) for each in ("1", 1) for form in ("short", "openai")]
    assert [key_of(result_record(each)) for each in answered] == [each.line.key for each in answered]
    refused = [RefusedLine(9, None, form, "no JSON") for form in ("short", "openai")]  # type: ignore[arg-type]
    assert [key_of(error_record(each)) for each in refused] == ["line 9", "line 9"]
    assert key_of({"something": "else"}) is None


def test_errors_lie_beside_the_results() -> None:
    assert errors_path(Path("/x/out.jsonl")) == Path("/x/out.errors.jsonl")
    assert errors_path(Path("answers")) == Path("answers.errors")


@pytest.mark.parametrize("torn", ["{", '{"id": "c", "ans', '{"id": "c' + "x" * 200_000])
def test_a_torn_last_line_is_cut_off_and_the_rest_is_done(tmp_path: Path, torn: str) -> None:
    out = tmp_path / "out.jsonl"
    with closing(ResultFiles(out)) as files:
        files.add([{"id": "a", "is_right": True}, {"id": 1, "is_right": False}], [{"id": "b", "line": 3}])
    whole = out.read_bytes()
    with out.open("a") as file:
        file.write(torn)
    with closing(ResultFiles(out)) as files:
        assert list(files.done()) == ['"a"', "1", '"b"']
        files.add([{"id": "c"}], [])
        tally = files.tally
    assert out.read_bytes() == whole + b'{"id": "c"}\n'
    assert (tally.num_answered, tally.num_failed, tally.num_checked, tally.num_right) == (3, 1, 2, 1)


def test_a_file_of_nothing_but_a_torn_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"id"')
    with closing(ResultFiles(tmp_path / "out.jsonl")) as files:
        assert list(files.done()) == []
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with closing(ResultFiles(out)), pytest.raises(RequestError, match="another run writes"):
        ResultFiles(out)
    ResultFiles(out).close()


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("dear diary\n" + json.dumps([1]) + "\n")
    with closing(ResultFiles(out)) as files, pytest.raises(RequestError, match="dear diary"):
        list(files.done())
    out.write_text("no full line")
    with pytest.raises(RequestError, match="no full"):
        ResultFiles(out)
    assert out.read_text() == "no full line"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere"):
        ResultFiles(tmp_path / "nowhere" / "out.jsonl")


def test_frames_that_were_not_seen_are_in_the_record() -> None:
    report = {"frames": 1, "video_s": 0.0, "substituted_frames": 0, "unseen_frames": 23}
    record = result_record(Answered(line(), COMPLETION | {"epd": report}))
    assert (record["frames"], record["unseen_frames"]) == (1, 23)
    assert "substituted_frames" not in record
