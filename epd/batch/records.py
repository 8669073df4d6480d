"""Writes the record of a line, in our short form or OpenAI's batch output, like the line itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from epd.batch.line_index import RefusedLine
from epd.batch.lines import JSON, BatchLine, Form, LineId, id_key
from epd.batch.media_names import local_path
from epd.batch.shared_prefix import shared_prefix
from epd.batch.tasks import Answered, Failed

_REFUSED_STATUS = 400


def is_same_answer(answer: str, expected: str) -> bool:
    """Compares answers, ignoring case, surrounding space and a final full stop."""
    return _normalised(answer) == _normalised(expected)


def _normalised(text: str) -> str:
    return text.strip().rstrip(".").casefold()


def result_record(outcome: Answered) -> JSON:
    """Returns one line of the results."""
    line, completion = outcome.line, outcome.completion
    if line.form == "openai":
        response = {
            "status_code": 200,
            "request_id": str(completion.get("id", "")),
            "body": completion,
        }
        return _openai(line.line_id, response, None)
    answer = answer_text(completion)
    choice = completion["choices"][0]
    record: JSON = {
        "id": line.line_id,
        **_asked(line),
        "answer": answer,
        "finish_reason": choice["finish_reason"],
    }
    record |= {name: completion[said] for name, said in MODEL_FACTS.items() if completion.get(said)}
    if line.expected is not None:
        record |= {"expected": line.expected, "is_right": is_same_answer(answer, line.expected)}
    return record | {"usage": completion.get("usage")} | reported(completion)


def _asked(line: BatchLine) -> JSON:
    """Returns the media and the question of a line in the short form; of media that it holds, their type."""
    question = line.body["messages"][-1]["content"][-1]["text"]
    return {"media": [_named(url) for url in shared_prefix(line.body).urls], "question": question}


def _named(url: str) -> str:
    if url.startswith("data:"):
        return url.partition(",")[0]
    path = local_path(url)
    return url if path is None else str(path)


# Fields about the model that has answered, and what a completion calls them.
MODEL_FACTS = {"model": "model", "model_digest": "system_fingerprint"}
_REPORTED = ("frames", "video_s", "substituted_frames", "unseen_frames", "cache")


def reported(completion: JSON) -> JSON:
    """Returns a record's fields about frames, and about what was found in caches, if any."""
    report = completion.get("epd")
    found = report if isinstance(report, dict) else {}
    events = [each for each in found.get("events") or () if isinstance(each, dict)]
    times_s = [at_s for each in events for at_s in each.get("frame_times_s") or ()]
    fields = {name: found[name] for name in _REPORTED if found.get(name)}
    return fields | ({"frame_times_s": times_s} if times_s else {})


def answer_text(completion: Mapping[str, Any]) -> str:
    """Returns the text of the first choice."""
    return str(completion["choices"][0]["message"]["content"] or "")


def error_record(outcome: Failed | RefusedLine) -> JSON:
    """Returns one line beside the results. A line without an id is named by its number."""
    if isinstance(outcome, Failed):
        line = outcome.line
        record = _error(line.line_id, line.number, line.form, outcome.kind, outcome.message, outcome.status)
        if line.form == "short":
            return {**record, **_asked(line)}
        if outcome.body is not None:
            record["response"]["body"] = outcome.body
        return record
    refused = (outcome.line_id, outcome.number, outcome.form)
    return _error(*refused, "RequestError", outcome.message, _REFUSED_STATUS)


def _error(line_id: LineId | None, number: int, form: Form, kind: str, message: str, status: int) -> JSON:
    if form == "openai":
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        response = {"status_code": status, "request_id": "", "body": body}
        return _openai(line_id, response, {"code": kind, "message": message}, number)
    return {"id": line_id, "line": number, "error": {"type": kind, "message": message, "status": status}}


def _openai(line_id: LineId | None, response: JSON, error: JSON | None, number: int | None = None) -> JSON:
    name = hashlib.blake2b(repr(line_id or number).encode(), digest_size=12).hexdigest()
    record: JSON = {"id": f"batch_req_{name}", "custom_id": line_id, "response": response, "error": error}
    return record if line_id is not None else {**record, "line": number}


def reason_of(record: JSON) -> tuple[str, str]:
    """Returns the name and the message of the error of a written record."""
    error = record.get("error")
    found = error if isinstance(error, dict) else {}
    return str(found.get("type") or found.get("code")), str(found.get("message"))


def key_of(record: JSON) -> str | None:
    """Returns the key of the line that a written record is about; None for foreign records."""
    line_id = record.get("custom_id") if "custom_id" in record else record.get("id")
    if line_id is not None:
        return id_key(line_id)
    return f"line {record['line']}" if isinstance(record.get("line"), int) else None
