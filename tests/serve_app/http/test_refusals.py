"""Every error in OpenAI's shape with the status of its kind; a flood is turned away, a bug stays inside."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

import epd
from epd import errors
from epd.errors import EPDError, OverloadedError, exit_code, http_status
from epd.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from epd.serve_app.http.guard.body_reader import BodyLimits
from epd.serve_app.http.guard.http_guard import HeldRefusals
from tests.serve_app.conftest import JSON, QUESTION, Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.http.test_api_keys import ask
from tests.serve_app.http.test_api_keys import line as key_line
from tests.serve_app.server import wait_until


def of_parts(*parts: JSON) -> JSON:
    return {"messages": [{"role": "user", "content": list(parts)}]}


STATUS = {
    "EPDError": 500, "InputError": 400, "RequestError": 400, "RequestLimitError": 413,
    "RequestTimeoutError": 408,
    "RequestBudgetError": 400,
    "AuthenticationError": 401, "AdminRightError": 403, "NotFoundError": 404,
    "MediaError": 400, "MediaNotFoundError": 400, "MediaForbiddenError": 400, "MediaLimitError": 400,
    "UnsupportedMediaError": 400, "CorruptMediaError": 400, "ModelError": 400, "ModelNotFoundError": 404,
    "UnsupportedModelError": 400, "InfeasibleError": 422, "OverloadedError": 429, "UnavailableError": 503,
    "EncodeError": 500, "CancelledError": 499,
}  # fmt: skip


def all_errors(root: type[EPDError] = EPDError) -> Iterator[type[EPDError]]:
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


def ours() -> dict[str, type[EPDError]]:
    return {cls.__name__: cls for cls in all_errors() if cls.__module__ == errors.__name__}


@pytest.mark.parametrize("name", STATUS)
def test_the_table_of_errors(name: str) -> None:
    error = ours()[name]("what")
    assert http_status(error) == STATUS[name]
    assert exit_code(error) in (1, 2, 3)
    assert f"{name} " in f"{errors.__doc__} " or name in str(errors.__doc__)


def test_overload_tells_when_to_come_back_even_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(OverloadedError("busy", 2.5)))
    assert (str(error), error.retry_after_s) == ("busy", 2.5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [name for name in STATUS if name != "CancelledError"])
def test_an_error_of_the_service_has_its_status(
    run_front: Callable[..., Front], name: str, stream: bool
) -> None:
    """Also of a stream that has not begun: no 200 before the first word."""
    front = run_front(FakeService(error=ours()[name]("what was wrong")))
    response = front.ask(stream=stream)
    assert response.status_code == STATUS[name]
    error = response.json()["error"]
    assert error["message"] == "what was wrong"
    assert set(error) == {"message", "type", "param", "code"}
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))
    assert front.ask(stream=stream).status_code == STATUS[name]


def test_overload_says_when_to_try_again(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(error=OverloadedError("busy", 2.5)))
    response = front.ask()
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    with pytest.raises(openai.RateLimitError, match="busy"):
        front.openai.chat.completions.create(model="shapes-vl", **QUESTION)  # type: ignore[call-overload]


def test_an_error_in_the_middle_is_said_in_the_stream(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(error=errors.UnavailableError("all gone"), words_before_error=2))
    stream = front.openai.chat.completions.create(model="shapes-vl", stream=True, **QUESTION)  # type: ignore[call-overload]
    words = []
    with pytest.raises(openai.APIError, match="all gone"):
        words += [chunk.choices[0].delta.content for chunk in stream]
    response = front.ask(stream=True)
    assert "[DONE]" not in response.text
    last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "unavailable"


@pytest.mark.parametrize("words_before", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_shows_an_id_and_nothing_else(
    run_front: Callable[..., Front], caplog: pytest.LogCaptureFixture, stream: bool, words_before: int
) -> None:
    service = FakeService(error=KeyError("secret"), words_before_error=words_before)
    front = run_front(service)
    try:
        text = front.ask(stream=stream).text
    except httpx.RemoteProtocolError:  # a stream that broke off
        assert stream
        assert words_before
        text = ""
    assert "secret" not in text
    front.wait_until_empty()
    assert service.requests[0].request_id in text or (stream and words_before)
    assert service.requests[0].request_id in caplog.text


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "messages: Field required"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tools", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (of_parts(), "the question is empty"),
        (of_parts({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (of_parts({"type": "input_audio"}), "messages[0].content[0]"),
        (of_parts({"type": "image_url", "image_url": 5}), "messages[0].content[0].image_url"),
        ({**QUESTION, "temperature": "0.5"}, "temperature"),
        ({**QUESTION, "temperature": -1}, "temperature"),
        ({**QUESTION, "top_p": 0}, "top_p"),
        ({**QUESTION, "n": 0}, "n"),
        ({**QUESTION, "n": True}, "n"),
        ({**QUESTION, "max_tokens": 0}, "max_tokens"),
        ({**QUESTION, "max_tokens": 1.5}, "max_tokens"),
        ({**QUESTION, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({**QUESTION, "seed": 2**63}, "seed"),
        ({**QUESTION, "stop": [1]}, "stop[0]"),
        ({**QUESTION, "stream": 1}, "stream"),
        ({**QUESTION, "epd": {"fsp": 1}}, "epd.fsp"),
        ({**QUESTION, "epd": {"start_s": -1}}, "epd.start_s"),
        ({**QUESTION, "mm_processor_kwargs": {"min_pixels": 0}}, "mm_processor_kwargs.min_pixels"),
        ({**QUESTION, "media_io_kwargs": {"video": {"num_frames": -1}}}, "media_io_kwargs.video.num_frames"),
        ({**QUESTION, "media_io_kwargs": {"video": {"max_frames": 9}}}, "media_io_kwargs.video.max_frames"),
        ({**QUESTION, "media_io_kwargs": {"audio": {"sr": 9}}}, "media_io_kwargs.audio"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(front: Front, body: JSON, place: str) -> None:
    response = front.ask(body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert place in error["message"]
    assert error["type"] == "invalid_request_error"
    assert front.service.requests == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]: Field required"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05"),
        ({"logit_bias": {"5": 101}}, "less than or equal to 100"),
        ({"bad_words": ["red", " "]}, "more than spaces"),
        ({"bad_words": ["red"] * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": ["x" * (MAX_BAD_WORD_CHARS + 1)]}, f"{MAX_BAD_WORD_CHARS} characters"),
        ({"modalities": ["text", "audio"]}, "received modalities"),
        ({"top_logprobs": 2}, "top_logprobs without logprobs"),
        ({"epd": {"fps": 2}, "mm_processor_kwargs": {"fps": 3}}, "one of the two, once"),
        ({"epd": {"fps": 2}, "media_io_kwargs": {"video": {"num_frames": 3}}}, "one of the two, once"),
        ({"epd": {"fps": 2, "num_frames": 3}}, "one of the two, once"),
        ({"epd": {"start_s": 2, "end_s": 1.5}}, "the part from 2 to 1.5 s of a video; allowed: 0 <= start_s"),
        ({"stop": ""}, "stop must be strings of at least one character"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "none of the user"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(front: Front, more: JSON, words: str) -> None:
    response = front.ask(**more)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_what_is_not_asked_for_is_not_refused(front: Front) -> None:
    fine: JSON = {
        "tools": [],
        "response_format": {"type": "text"},
        "logit_bias": None,
        "modalities": ["text"],
    }
    assert front.ask(**fine).status_code == 200


def test_an_unknown_model(front: Front) -> None:
    with pytest.raises(openai.NotFoundError, match="allowed: shapes-vl, other/vl"):
        front.openai.chat.completions.create(model="gpt", **QUESTION)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError):
        front.openai.models.retrieve("gpt")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    ],
    ids=range(10),
)  # fmt: skip
def test_bodies_that_are_no_requests(front: Front, content: bytes) -> None:
    response = front.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_no_form_of_another_site_is_taken(front: Front, content_type: str) -> None:
    response = front.http.post(
        "/v1/chat/completions", content=json.dumps(QUESTION), headers={"content-type": content_type}
    )
    assert response.status_code == 400
    assert "allowed: application/json" in response.json()["error"]["message"]


def test_bodies_over_the_limit(run_front: Callable[..., Front]) -> None:
    front = run_front(max_body_bytes=1000)
    assert front.ask(user="x" * 2000).status_code == 413

    def chunks() -> Iterator[bytes]:
        yield from (b" " * 400 for _ in range(5))

    headers = {"content-type": "application/json"}
    response = front.http.post("/v1/chat/completions", content=chunks(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_limit"
    assert front.ask().status_code == 200


def test_bodies_of_all_requests_together_are_bounded(run_front: Callable[..., Front]) -> None:
    front = run_front(bodies=BodyLimits(max_held_bytes=1000, small_bytes=500))
    assert front.ask(user="x" * 2000).status_code == 429
    assert front.ask().status_code == 200


def test_a_flood_is_turned_away(run_front: Callable[..., Front]) -> None:
    front = run_front(service := FakeService(holds_after=1), max_requests=1)
    with front.http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        refused = front.ask()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        service.may_go_on.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_until(lambda: front.server.front.num_requests == 0)
    assert front.ask().status_code == 200


def test_a_client_that_does_not_wait_is_refused_when_it_was_told_to_ask_again(
    run_front: Callable[..., Front], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it takes no turns of the event loop by asking again at once. Others are refused at once."""
    file = tmp_path / "keys.jsonl"
    file.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    front = run_front(FakeService(error=OverloadedError("busy", 2.5)), api_keys_file=file)
    held_s: list[float] = []
    hold = HeldRefusals.hold

    async def noted(refusals: HeldRefusals, client: str, retry_after_s: float) -> None:
        start_s = time.monotonic()
        await hold(refusals, client, retry_after_s)
        held_s.append(time.monotonic() - start_s)

    monkeypatch.setattr(HeldRefusals, "hold", noted)
    start_s = time.monotonic()
    assert [ask(front, key).status_code for key in ("many", "one", "many")] == [429] * 3
    assert time.monotonic() - start_s >= 1.0
    first, other, again = held_s
    assert again > max(first, other)


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic right", "Bearer rightx", "right"]
)
def test_no_answer_without_the_key(run_front: Callable[..., Front], authorization: str | None) -> None:
    front = run_front(api_key="right")
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/shapes-vl"),
        ("GET", "/v1/epd/status"),
    ):
        response = front.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "right" not in response.text.replace("the right one", "")
    assert front.http.get("/health").status_code == 200


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
def test_a_ping_is_answered_as_health_is(
    run_front: Callable[..., Front], is_ready: bool, status: int
) -> None:
    front = run_front()
    front.service.is_ready = is_ready
    replies = [front.http.get("/health"), front.http.get("/ping"), front.http.post("/ping")]
    assert [reply.status_code for reply in replies] == [status] * 3
    assert front.http.get("/version").json() == {"version": epd.__version__}


def test_the_right_key_opens(run_front: Callable[..., Front]) -> None:
    front = run_front(api_key="schlüssel-1")
    headers = {"authorization": "bearer schlüssel-1".encode()}
    response = front.http.post("/v1/chat/completions", json=QUESTION, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    assert "schlüssel" not in repr(front.server.front.settings)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405)]
)
def test_other_paths_answer_in_the_same_shape(front: Front, method: str, path: str, status: int) -> None:
    response = front.http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]
    assert response.headers["x-request-id"]
