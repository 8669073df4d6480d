"""Asks a server of the OpenAI chat API about media, turn by turn: `epd ask --url`, `epd chat`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from epd.client.body import STREAM_HEADERS, MediaPart, SSEParser, body_of, media_part, question_content
from epd.client.endpoint import Endpoint, certificates
from epd.errors import RequestError, UnavailableError
from epd.late_module import LateModule
from epd.types import REUSE_KINDS, Answer, MediaKind, Reuse, StageTimings, Usage

if TYPE_CHECKING:
    import httpx
else:
    httpx = LateModule("httpx")

# Files of one question, before they are written as text, which takes a third more; for servers that do not
# say how large a body may be.
MAX_FILE_BYTES = 90 << 20
_BESIDE_FILES_BYTES = 64 << 10  # of a body, for what is asked
_CONNECT_S, _READ_S = 30.0, 3600.0
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Medium:
    """Names a medium of a conversation.

    name: a URL of any scheme that the server takes, or the path of a file
    is_uploaded: whether the name is the id of a file that the server has
    """

    kind: MediaKind
    name: str
    is_uploaded: bool = False

    @property
    def is_url(self) -> bool:
        return self.is_uploaded or "://" in self.name or self.name.startswith("data:")


class Conversation:
    """Holds the turns of a dialogue with one server. The media come with the first question, before it."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        media: Sequence[Medium],
        options: Mapping[str, Any],
        *,
        max_body_bytes: int | None = None,
        note: str | None = None,
    ) -> None:
        """Reads the files. Raises RequestError for files that cannot be read or are too large together.

        options: fields of every request, as the API names them
        max_body_bytes: of one request, None where the server does not say
        note: what a user should know of the model
        """
        self.note = note
        self._endpoint = endpoint
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options}
        self._files = _read([each for each in media if not each.is_url], max_body_bytes)
        files = iter(self._files)
        self._media = [_url_part(each) if each.is_url else media_part(next(files)) for each in media]
        self._turns: list[JSON] = []

    def instruct(self, text: str) -> None:
        """Puts a system message before all turns."""
        self._turns.insert(0, {"role": "system", "content": text})

    def counters(self) -> Mapping[str, float]:
        """Returns what the workers have counted; of a model of this process alone."""
        return {}

    def ask(
        self,
        question: str,
        on_text: Callable[[str], None] | None = None,
        on_span: Callable[[JSON], None] | None = None,
    ) -> Answer:
        """Asks the next question; turns that were answered are kept for later ones.

        on_text: gets pieces of the answer as they come
        on_span: gets what the stages have done, as it is done; of our servers alone
        Raises RequestError for what the server refuses, UnavailableError where it does not answer to the end.
        """
        asked = self._asked(question)
        fixed = self._fixed
        if on_span:
            fixed = fixed | {"epd": fixed.get("epd", {}) | {"events": True}}
        reply = _Reply(time.perf_counter(), on_text or (lambda _: None), on_span or (lambda _: None))
        for event in self._events(fixed | {"messages": [*self._turns, asked]}):
            reply.take(event)
        if not reply.finish_reason:
            raise UnavailableError(f"{self._endpoint.shown_url} ended before the answer did; ask again")
        self._turns += [asked, {"role": "assistant", "content": reply.text}]
        return reply.answer()

    def remember(self, turns: Sequence[tuple[str, str]]) -> None:
        """Goes on after questions and answers that were given before."""
        for question, answer in turns:
            self._turns += [self._asked(question), {"role": "assistant", "content": answer}]

    def forget(self) -> None:
        """Lets the next question be the first, about the same media."""
        self._turns = [turn for turn in self._turns if turn["role"] == "system"]

    def _asked(self, question: str) -> JSON:
        """Returns the message of the next question."""
        content: str | list[JSON] = question
        is_first = all(turn["role"] == "system" for turn in self._turns)
        if is_first and self._media:
            content = question_content(self._media, question)
        return {"role": "user", "content": content}

    def _events(self, body: JSON) -> Iterator[JSON]:
        """Asks the server; yields the events of the answer."""
        shown, whole = self._endpoint.shown_url, body_of(body, self._files)
        headers = {**self._endpoint.headers, **STREAM_HEADERS, "Content-Length": str(whole.num_bytes)}
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        try:
            with httpx.stream(
                "POST",
                f"{self._endpoint.url}/v1/chat/completions",
                content=iter(whole.pieces),
                headers=headers,
                timeout=timeout,
                trust_env=False,
                verify=certificates(),
            ) as answer:
                if answer.status_code != HTTPStatus.OK:
                    raise _refusal(shown, answer.status_code, answer.read())
                parser = SSEParser()
                for piece in answer.iter_raw():
                    for data in parser.feed(piece):
                        if data == "[DONE]":
                            return
                        yield _event(shown, data)
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"{shown} gave {type(error).__name__}; start the server there, or change --url"
            ) from None


@dataclass(slots=True)
class _Reply:
    """Collects an answer. sent_s: on the clock of `time.perf_counter`."""

    sent_s: float
    on_text: Callable[[str], None]
    on_span: Callable[[JSON], None]
    text: str = ""
    ttft_s: float = 0.0
    finish_reason: str = ""
    usage: JSON = field(default_factory=dict)
    report: JSON = field(default_factory=dict)

    def take(self, event: JSON) -> None:
        self.usage = event.get("usage") or self.usage
        report = event.get("epd") or {}
        for span in report.get("events") or ():
            self.on_span(span)
        if "events" not in report:
            self.report = report or self.report
        for choice in event.get("choices") or ():
            if piece := (choice.get("delta") or {}).get("content"):
                self.ttft_s = self.ttft_s or time.perf_counter() - self.sent_s
                self.text += piece
                self.on_text(piece)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def answer(self) -> Answer:
        """Returns the answer; what only our own server reports is 0 from others."""
        report, usage = self.report, self.usage
        seconds = {f"{name}_s": value for name, value in (report.get("stages_s") or {}).items()}
        seconds["total_s"] = time.perf_counter() - self.sent_s
        known = {each.name for each in fields(StageTimings)}
        reason: Literal["stop", "length"] = "length" if self.finish_reason == "length" else "stop"
        return Answer(
            self.text,
            (),
            reason,
            self.ttft_s or time.perf_counter() - self.sent_s,
            StageTimings(**{name: float(value) for name, value in seconds.items() if name in known}),
            Usage(
                num_frames=report.get("frames", 0),
                visual_tokens=report.get("visual_tokens", 0),
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=usage.get("completion_tokens", 0),
                visual_tokens_before=report.get("visual_tokens_before_reduction", 0),
                num_substituted_frames=report.get("substituted_frames", 0),
                num_unseen_frames=report.get("unseen_frames", 0),
                video_s=report.get("video_s", 0.0),
                **_reused(report.get("cache") or {}),
            ),
        )


def _reused(cache: JSON) -> dict[str, Any]:
    """Returns the fields of `Usage` for what a server of ours found in what it keeps."""
    found = tuple(
        Reuse(kind, tier, each["tokens"], each["bytes"])
        for kind in REUSE_KINDS
        for tier, each in (cache.get(kind) or {}).items()
    )
    return {"num_unread_frames": cache.get("frames", 0), "reused": found}


def completion(endpoint: Endpoint, body: JSON) -> JSON:
    """Returns the completion of one chat request, whole. Raises RequestError, UnavailableError."""
    shown, timeout = endpoint.shown_url, httpx.Timeout(_READ_S, connect=_CONNECT_S)
    url, headers = f"{endpoint.url}/v1/chat/completions", endpoint.headers
    try:
        answer = httpx.post(
            url, json=body, headers=headers, timeout=timeout, trust_env=False, verify=certificates()
        )
    except httpx.HTTPError as error:
        raise UnavailableError(f"{shown} gave {type(error).__name__}; ask again") from None
    if answer.status_code != HTTPStatus.OK:
        raise _refusal(shown, answer.status_code, answer.content)
    found: JSON = answer.json()
    return found


def _url_part(medium: Medium) -> JSON:
    kind = f"{medium.kind}_url"
    return {"type": kind, kind: {"url": medium.name}}


def max_file_bytes(max_body_bytes: int | None) -> int:
    """Returns how large the files of a question may be, whose base64 has 4 bytes for 3."""
    return MAX_FILE_BYTES if max_body_bytes is None else max(0, max_body_bytes - _BESIDE_FILES_BYTES) // 4 * 3


def _read(files: Sequence[Medium], max_body_bytes: int | None) -> list[MediaPart]:
    """Returns the files as they are sent. Raises RequestError."""
    allowed = max_file_bytes(max_body_bytes)
    try:
        num_bytes = sum(Path(file.name).stat().st_size for file in files)
        if num_bytes > allowed:
            raise RequestError(
                f"received files of {num_bytes:,} bytes; allowed {allowed:,} in one question to this "
                "server; give a URL that the server can read, as http://, https:// or file://"
            )
        return [_file_part(file) for file in files]
    except OSError as error:
        raise RequestError(f"cannot read '{error.filename}': {error.strerror}") from error


def _file_part(file: Medium) -> MediaPart:
    path = Path(file.name)
    mime = f"{file.kind}/{path.suffix[1:].lower() or 'x'}"
    return MediaPart(mime, base64.b64encode(path.read_bytes()))


def _event(shown: str, data: str) -> JSON:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise UnavailableError(f"{shown} sent an event that is no JSON object; is it a server of this API?")
    if error := event.get("error"):
        raise UnavailableError(f"{shown} ended the answer: {_message(error)}")
    return event


def _refusal(shown: str, status: int, body: bytes) -> RequestError | UnavailableError:
    """Returns the error for an answer that is none."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    said = f"{shown} gave status {status}" + (f": {_message(error)}" if error else "")
    if status == HTTPStatus.UNAUTHORIZED:
        return RequestError(f"{said}; give its --api-key")
    is_ours = status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _BUSY
    return RequestError(said) if is_ours else UnavailableError(said)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
