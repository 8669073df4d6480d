"""Finds what questions have in common, up to the last of their media: it is computed once for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]
# Where parts have their media, whatever their type is called.
_MEDIA_PLACES = ("image_url", "video_url", "audio_url", "input_audio")
SAMPLING_PLACES = (("epd",), ("mm_processor_kwargs",), ("media_io_kwargs", "video"))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Holds the prefix that a question may share with others.

    urls: of its media, in order; without any, nothing is shared.
    frame: JSON of everything else up to the last of the media, and of the options that change them.
    """

    urls: tuple[str, ...]
    frame: str


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
        *(value_at(body, names) for names in SAMPLING_PLACES),
    ]
    urls = tuple(url for message in common for url in _urls(message))
    return SharedPrefix(urls, json.dumps([options, _without_urls(common)], sort_keys=True))


def value_at(body: JSON, names: Sequence[str]) -> Any:
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
    """Returns the URL of a part's medium in any form that servers take; of sound, its bytes as one."""
    for name in _MEDIA_PLACES if isinstance(part, dict) else ():
        place = part.get(name)
        url = (place.get("url") or place.get("data")) if isinstance(place, dict) else place
        if isinstance(url, str):
            return f"data:audio/{place.get('format')};base64,{url}" if name == "input_audio" else url
    return None


def _without_urls(messages: list[Any]) -> list[Any]:
    """Returns the same messages with all but the URL of each medium."""
    return [
        {**message, "content": [part if _url_of(part) is None else _without_url(part) for part in content]}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _without_url(part: JSON) -> JSON:
    """Returns all but the URL of a part, and what each of its fields held: "url" for a URL by itself."""
    bare = {name: value for name, value in part.items() if name != "uuid"}
    for name in _MEDIA_PLACES:
        place = part.get(name)
        if isinstance(place, dict):
            bare[name] = {key: value for key, value in place.items() if key not in ("url", "data")}
        elif isinstance(place, str):
            bare[name] = "url"
    return bare
