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
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from epd.batch.shared_prefix import SAMPLING_PLACES, value_at
from epd.client.body import question_content
from epd.errors import RequestError

JSON = dict[str, Any]
Form = Literal["short", "openai"]
LineId = str | int

CHAT_URL = "/v1/chat/completions"
SHORT_KEYS = (
    "id", "video", "images", "question", "answer", "fps", "num_frames", "start_s", "end_s", "max_tokens",
    "retention", "reduction", "compute_share", "max_visual_tokens",
)  # fmt: skip
_OPENAI_KEYS = ("custom_id", "method", "url", "body")
URL_PREFIXES = ("http://", "https://", "data:", "file:", "s3://", "gs://")
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
_RATES = ("fps", "num_frames")
_PART = ("start_s", "end_s")
_REDUCTION = ("retention", "reduction", "compute_share", "max_visual_tokens")
# Of one line: as much as a server takes as one body.
MAX_LINE_BYTES = 128 << 20
_MAX_DEPTH = 100  # lists and objects in each other: parsers end at about 200
BOM = b"\xef\xbb\xbf"
_SURROGATES = range(0xD800, 0xE000)
# The id of a line that cannot be parsed, where it comes first.
_FIRST_ID = re.compile(
    rb'\s*\{\s*"(?:custom_)?id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.){1,256}"|-?\d{1,18})\s*[,}]'
)


class LineError(RequestError):
    """Reports a line that cannot be asked. line_id: if it is known."""

    def __init__(self, message: str, line_id: LineId | None = None, form: Form = "short") -> None:
        super().__init__(message)
        self.line_id = line_id
        self.form = form


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """Sets defaults for fields that lines leave out.

    folder: where the short form's relative paths begin; the URI of one in an object store.
    retention, reduction: share of the visual tokens that is kept, and the method; None leaves them to the
        backend.
    compute_share: of lines without a retention or reduction of their own.
    max_visual_tokens: that frames and retention are chosen for.
    events: whether answers say what the stages did, which has the times of frames.
    start_s, end_s: the part of the media, of lines that name none.
    system: message before those of a line that has none.
    sampling: temperature, seed and response_format, as bodies have them.
    url: the only one that OpenAI's form may have.
    least_priority: of every request; None leaves priorities as they are.
    is_from_client: of a server: of OpenAI's form alone, and no file that lines name is looked at.
    max_line_bytes: longer lines are not read.
    """

    folder: Path | str
    fps: float | None = None
    num_frames: int | None = None
    max_tokens: int | None = None
    retention: float | None = None
    reduction: str | None = None
    compute_share: float | None = None
    max_visual_tokens: int | None = None
    events: bool | None = None
    start_s: float | None = None
    end_s: float | None = None
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    url: str = CHAT_URL
    least_priority: int | None = None
    is_from_client: bool = False
    max_line_bytes: int = MAX_LINE_BYTES


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


def id_key(line_id: LineId) -> str:
    return json.dumps(line_id)


def parse_line(text: bytes, number: int, defaults: LineDefaults) -> BatchLine:
    """Parses one line. Raises LineError for an unknown form or a request that makes no sense."""
    form: Form = "openai" if defaults.is_from_client else "short"
    if len(text) > defaults.max_line_bytes:
        raise LineError(
            f"this line has more than {defaults.max_line_bytes} bytes; allowed that many; give media by URL",
            _first_id(text),
            form,
        )
    try:
        record = _parsed(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise LineError(
            f"this line is not JSON: {reason}; give one object on each line", _first_id(text), form
        ) from None
    if not isinstance(record, dict):
        raise LineError(f"this line is a JSON {type(record).__name__}; give an object", form=form)
    if "custom_id" in record:
        return _parse_openai(record, number, defaults)
    if defaults.is_from_client:
        raise LineError(
            f"this line has no custom_id; the fields are {', '.join(_OPENAI_KEYS)}", form="openai"
        )
    return _parse_short(record, number, defaults)


def _parsed(text: bytes) -> Any:
    """Parses JSON as its standard has it. Raises ValueError, RecursionError.

    Python's parser takes NaN, infinite numbers, halves of surrogate pairs and fields that come twice: none of
    them can be sent on, or means one thing.
    """
    record = json.loads(
        text.removeprefix(BOM).decode(),
        parse_constant=_no_constant,
        parse_float=_finite,
        object_pairs_hook=_object,
    )
    if text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_deep(record):
        raise RecursionError
    if b"\\u" in text and (half := _half_character(json.dumps(record, ensure_ascii=False))):
        raise ValueError(f"{half} is half of a character")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> JSON:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twin, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {reprlib.repr(twin)} comes twice")
    return found


def _is_deep(value: Any) -> bool:
    """Returns whether lists and objects lie too deep in each other, without recursion."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [each for each in level if isinstance(each, list | dict)]
        level = [part for each in containers for part in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _half_character(text: str) -> str:
    """Returns the first half of a surrogate pair in a text as an escape, empty without any."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return ""
    return next(f"\\u{ord(char):04x}" for char in text if ord(char) in _SURROGATES)


def _first_id(text: bytes) -> LineId | None:
    """Returns the id of a line that is no JSON, if it comes first and can be read."""
    found = _FIRST_ID.match(text.removeprefix(BOM)[:1024])
    if found is None:
        return None
    try:
        line_id: LineId = _parsed(found[1])
    except ValueError:
        return None
    return line_id


def _parse_short(record: JSON, number: int, defaults: LineDefaults) -> BatchLine:
    line_id = _checked_id(record.get("id"), "id", "short")
    try:
        _check_keys(record, SHORT_KEYS)
        expected = record.get("answer")
        if expected is not None and not isinstance(expected, str):
            raise RequestError(f"answer is {reprlib.repr(expected)}; allowed: a text; put it in quotes")
        return BatchLine(number, line_id, "short", _short_body(record, defaults), expected)
    except RequestError as error:
        raise LineError(str(error), line_id) from None


def _short_body(record: JSON, defaults: LineDefaults) -> JSON:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise RequestError(f"question is {reprlib.repr(question)}; allowed: a text; ask something")
    content = question_content(list(_media_parts(record, defaults.folder)), question)
    body: JSON = {"messages": [{"role": "user", "content": content}]}
    names = (*_RATES, *_PART, *_REDUCTION)
    options = {name: record[name] for name in names if record.get(name) is not None}
    if options:
        body["epd"] = options
    if record.get("max_tokens") is not None:
        body["max_tokens"] = record["max_tokens"]
    return _with_defaults(body, defaults)


def _media_parts(record: JSON, folder: Path | str) -> Iterator[JSON]:
    video, images = record.get("video"), record.get("images")
    if (video is None) == (images is None):
        raise RequestError(
            f"video is {reprlib.repr(video)} and images is {reprlib.repr(images)}; give one of the two"
        )
    if isinstance(video, str) and video:
        yield _part("video_url", media_url(video, folder))
    elif isinstance(images, list) and images and all(isinstance(each, str) and each for each in images):
        yield from (_part("image_url", media_url(each, folder)) for each in images)
    else:
        name, value = ("images", images) if video is None else ("video", video)
        raise RequestError(
            f"{name} is {reprlib.repr(value)}; allowed: a path for video, a list of paths for images"
        )


def _part(kind: str, url: str) -> JSON:
    return {"type": kind, kind: {"url": url}}


def media_url(source: str, folder: Path | str) -> str:
    """Returns a URL as it is, a path as a file: URL; a relative path begins at `folder`."""
    if source.startswith(URL_PREFIXES):
        return source
    if isinstance(folder, str):
        return f"{folder}/{source}"
    try:
        return (folder / source).absolute().as_uri()
    except ValueError as error:
        raise RequestError(
            f"{reprlib.repr(source)} is not a path ({error}); give the path of a file"
        ) from None


def _parse_openai(record: JSON, number: int, defaults: LineDefaults) -> BatchLine:
    line_id = _checked_id(record["custom_id"], "custom_id", "openai")
    try:
        _check_keys(record, _OPENAI_KEYS)
        if (record.get("method"), record.get("url")) != ("POST", defaults.url):
            raise RequestError(
                f"received {reprlib.repr(record.get('method'))} {reprlib.repr(record.get('url'))}; "
                f"allowed: 'POST' {defaults.url!r}"
            )
        body = record.get("body")
        if not isinstance(body, dict):
            raise RequestError(
                f"body is {reprlib.repr(body)}; allowed: an object, the body of a chat request"
            )
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
        raise LineError(
            f"{name} is {reprlib.repr(value)}; allowed: a text or a whole number; name the line", None, form
        )
    return value


def _check_keys(record: JSON, known: tuple[str, ...]) -> None:
    unknown = next((name for name in record if name not in known), None)
    if unknown is not None:
        raise RequestError(f"there is no field {reprlib.repr(unknown)}; the fields are {', '.join(known)}")


def _with_defaults(body: JSON, defaults: LineDefaults) -> JSON:
    """Returns the body with the defaults where it is silent.

    A rate or number of frames excludes both, a start or end too. A retention or reduction has a compute_share
    of its own.
    """
    if defaults.max_tokens is not None and all(body.get(name) is None for name in _TOKEN_LIMITS):
        body = {**body, "max_tokens": defaults.max_tokens}
    body = {**body, **{name: value for name, value in defaults.sampling.items() if body.get(name) is None}}
    messages = body.get("messages")
    if defaults.system is not None and isinstance(messages, list) and not any(map(_is_system, messages)):
        body = {**body, "messages": [{"role": "system", "content": defaults.system}, *messages]}
    places = [place for names in SAMPLING_PLACES if isinstance(place := value_at(body, names), dict)]
    has_rate = any(place.get(name) for place in places for name in _RATES)
    has_rate = has_rate or any(place.get("do_sample_frames") is False for place in places)
    ours = body["epd"] if isinstance(body.get("epd"), dict) else {}
    reduces = ours.get("retention") is not None or ours.get("reduction") is not None
    is_part = any(ours.get(name) is not None for name in _PART)
    reduction = [name for name in _REDUCTION if name != "compute_share" or not reduces]
    added = {
        name: value
        for name in (*(() if has_rate else _RATES), *(() if is_part else _PART), *reduction, "events")
        if (value := getattr(defaults, name)) is not None and ours.get(name) is None
    }
    return {**body, "epd": {**ours, **added}} if added else body


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")
