"""Parses a line of an input file, in our short form or OpenAI's batch form, decided line by line.

    {"id": 1, "video": "clip.mp4", "question": "How many shapes?", "answer": "3"}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Both become the body of a chat request. Questions share what they have in common up to the last of their
media:

    [system][media] | [question a]        equal prefixes: decoded, encoded and prefilled once
    [system][media] | [question b]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from epd.errors import RequestError

JSON = dict[str, Any]
Form = Literal["short", "openai"]
LineId = str | int

CHAT_URL = "/v1/chat/completions"
_SHORT_KEYS = (
    "id", "video", "images", "question", "answer", "fps", "num_frames", "start_s", "end_s", "max_tokens",
    "retention", "reduction", "compute_share", "max_visual_tokens",
)  # fmt: skip
_OPENAI_KEYS = ("custom_id", "method", "url", "body")
_URL_PREFIXES = ("http://", "https://", "data:", "file:")
_MEDIA_PARTS = ("image_url", "video_url", "audio_url")
_SOUND = "input_audio"  # has its bytes instead of a URL
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
_SAMPLING_PLACES = (("epd",), ("mm_processor_kwargs",), ("media_io_kwargs", "video"))
_RATES = ("fps", "num_frames")
_PART = ("start_s", "end_s")
_REDUCTION = ("retention", "reduction", "compute_share", "max_visual_tokens")


class LineError(RequestError):
    """Reports a line that cannot be asked. line_id: if it is known."""

    def __init__(self, message: str, line_id: LineId | None = None, form: Form = "short") -> None:
        super().__init__(message)
        self.line_id = line_id
        self.form = form


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """Sets defaults for fields that lines leave out.

    folder: where the short form's relative paths begin.
    retention, reduction: share of the visual tokens that is kept, and the method; None leaves them to the
        backend.
    compute_share: of lines without a retention or reduction of their own.
    max_visual_tokens: that frames and retention are chosen for.
    url: the only one that OpenAI's form may have.
    least_priority: of every request; None leaves priorities as they are.
    is_from_client: of a server: of OpenAI's form alone, and no file that lines name is looked at.
    """

    folder: Path
    fps: float | None = None
    num_frames: int | None = None
    max_tokens: int | None = None
    retention: float | None = None
    reduction: str | None = None
    compute_share: float | None = None
    max_visual_tokens: int | None = None
    url: str = CHAT_URL
    least_priority: int | None = None
    is_from_client: bool = False


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Holds one question.

    number: from 1, as editors count
    body: of a chat request
    expected: the right answer
    """

    number: int
    line_id: LineId
    form: Form
    body: JSON
    expected: str | None = None

    @property
    def key(self) -> str:
        """Returns the id as JSON: 1 and "1" are two ids."""
        return id_key(self.line_id)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Holds the prefix that a question may share with others.

    urls: of its media, in order; without any, nothing is shared.
    frame: JSON of everything else up to the last of the media, and of the options that change them.
    """

    urls: tuple[str, ...]
    frame: str


def id_key(line_id: LineId) -> str:
    return json.dumps(line_id, ensure_ascii=False)


def parse_line(text: bytes, number: int, defaults: LineDefaults) -> BatchLine:
    """Parses one line. Raises LineError for an unknown form or a request that makes no sense."""
    form: Form = "openai" if defaults.is_from_client else "short"
    try:
        record = json.loads(text)
    except ValueError as error:
        raise LineError(f"this line is not JSON: {error}; give one object on each line", form=form) from None
    if not isinstance(record, dict):
        raise LineError(f"this line is a JSON {type(record).__name__}; give an object", form=form)
    if "custom_id" in record:
        return _parse_openai(record, number, defaults)
    if defaults.is_from_client:
        raise LineError(
            f"this line has no custom_id; the fields are {', '.join(_OPENAI_KEYS)}", form="openai"
        )
    return _parse_short(record, number, defaults)


def _parse_short(record: JSON, number: int, defaults: LineDefaults) -> BatchLine:
    line_id = _checked_id(record.get("id"), "id", "short")
    try:
        _check_keys(record, _SHORT_KEYS)
        expected = record.get("answer")
        if expected is not None and not isinstance(expected, str):
            raise RequestError(f"answer is {expected!r}; allowed: a text; put it in quotes")
        return BatchLine(number, line_id, "short", _short_body(record, defaults), expected)
    except RequestError as error:
        raise LineError(str(error), line_id) from None


def _short_body(record: JSON, defaults: LineDefaults) -> JSON:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise RequestError(f"question is {question!r}; allowed: a text; ask something")
    parts: list[JSON] = list(_media_parts(record, defaults.folder))
    body: JSON = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]}
    names = (*_RATES, *_PART, *_REDUCTION)
    options = {name: record[name] for name in names if record.get(name) is not None}
    if options:
        body["epd"] = options
    if record.get("max_tokens") is not None:
        body["max_tokens"] = record["max_tokens"]
    return _with_defaults(body, defaults)


def _media_parts(record: JSON, folder: Path) -> Iterator[JSON]:
    video, images = record.get("video"), record.get("images")
    if (video is None) == (images is None):
        raise RequestError(f"video is {video!r} and images is {images!r}; give one of the two")
    if isinstance(video, str) and video:
        yield _part("video_url", media_url(video, folder))
    elif isinstance(images, list) and images and all(isinstance(each, str) and each for each in images):
        yield from (_part("image_url", media_url(each, folder)) for each in images)
    else:
        name, value = ("images", images) if video is None else ("video", video)
        raise RequestError(f"{name} is {value!r}; allowed: a path for video, a list of paths for images")


def _part(kind: str, url: str) -> JSON:
    return {"type": kind, kind: {"url": url}}


def media_url(source: str, folder: Path) -> str:
    """Returns a URL as it is, a path as a file: URL; a relative path begins at `folder`."""
    if source.startswith(_URL_PREFIXES):
        return source
    try:
        return (folder / source).absolute().as_uri()
    except ValueError as error:
        raise RequestError(f"{source!r} is not a path ({error}); give the path of a file") from None


def _parse_openai(record: JSON, number: int, defaults: LineDefaults) -> BatchLine:
    line_id = _checked_id(record["custom_id"], "custom_id", "openai")
    try:
        _check_keys(record, _OPENAI_KEYS)
        if (record.get("method"), record.get("url")) != ("POST", defaults.url):
            raise RequestError(
                f"received {record.get('method')!r} {record.get('url')!r}; allowed: 'POST' {defaults.url!r}"
            )
        body = record.get("body")
        if not isinstance(body, dict):
            raise RequestError(f"body is {body!r}; allowed: an object, the body of a chat request")
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        return BatchLine(number, line_id, "openai", _with_defaults(_ranked(body, defaults), defaults))
    except RequestError as error:
        raise LineError(str(error), line_id, "openai") from None


def _ranked(body: JSON, defaults: LineDefaults) -> JSON:
    """Returns the body with a priority that is not below the least."""
    least, own = defaults.least_priority, body.get("priority") or 0
    is_below = least is not None and isinstance(own, int) and own < least
    return {**body, "priority": least} if is_below else body


def _checked_id(value: Any, name: str, form: Form) -> LineId:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise LineError(f"{name} is {value!r}; allowed: a text or a whole number; name the line", None, form)
    return value


def _check_keys(record: JSON, known: tuple[str, ...]) -> None:
    unknown = next((name for name in record if name not in known), None)
    if unknown is not None:
        raise RequestError(f"there is no field {unknown!r}; the fields are {', '.join(known)}")


def _with_defaults(body: JSON, defaults: LineDefaults) -> JSON:
    """Returns the body with the defaults where it is silent.

    A rate or number of frames excludes both; a retention or reduction has a compute_share of its own.
    """
    if defaults.max_tokens is not None and all(body.get(name) is None for name in _TOKEN_LIMITS):
        body = {**body, "max_tokens": defaults.max_tokens}
    places = [place for names in _SAMPLING_PLACES if isinstance(place := _at(body, names), dict)]
    has_rate = any(place.get(name) for place in places for name in _RATES)
    has_rate = has_rate or any(place.get("do_sample_frames") is False for place in places)
    ours = body["epd"] if isinstance(body.get("epd"), dict) else {}
    reduces = ours.get("retention") is not None or ours.get("reduction") is not None
    reduction = [name for name in _REDUCTION if name != "compute_share" or not reduces]
    added = {
        name: value
        for name in (*(() if has_rate else _RATES), *reduction)
        if (value := getattr(defaults, name)) is not None and ours.get(name) is None
    }
    return {**body, "epd": {**ours, **added}} if added else body


def shared_prefix(body: JSON) -> SharedPrefix:
    """Returns the prefix of any body, also of an invalid one, which may share nothing."""
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    places = [place for place, message in enumerate(messages) if any(_urls(message))]
    if not places:
        return SharedPrefix((), "")
    before, last = messages[: places[-1]], messages[places[-1]]
    parts = last["content"]
    stop = 1 + max(place for place, part in enumerate(parts) if _url_of(part) is not None)
    common = [*before, {**last, "content": parts[:stop]}]
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    options = [
        body.get("model"),
        tools,
        body.get("chat_template_kwargs"),
        *(_at(body, names) for names in _SAMPLING_PLACES),
    ]
    urls = tuple(url for message in common for url in _urls(message))
    return SharedPrefix(urls, json.dumps([options, _without_urls(common)], sort_keys=True))


def _at(body: JSON, names: Sequence[str]) -> Any:
    """Returns what is at a place of a body, None for nothing."""
    found: Any = body
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _urls(message: Any) -> Iterator[str]:
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else ():
        url = _url_of(part)
        if url is not None:
            yield url


def _url_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    place = part.get(kind) if kind in (*_MEDIA_PARTS, _SOUND) else None
    if kind == _SOUND and isinstance(place, dict) and isinstance(place.get("data"), str):
        return f"data:audio/{place.get('format')};base64,{place['data']}"
    url = place.get("url") if isinstance(place, dict) else None
    return url if isinstance(url, str) else None


def _without_urls(messages: list[Any]) -> list[Any]:
    """Returns the same messages with all but the URL of each medium."""
    return [
        {**message, "content": [part if _url_of(part) is None else _without_url(part) for part in content]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _without_url(part: JSON) -> JSON:
    kind = part["type"]
    rest = {name: value for name, value in part[kind].items() if name not in ("url", "data")}
    return {**{name: value for name, value in part.items() if name != "uuid"}, kind: rest}
