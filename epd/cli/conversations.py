"""Opens conversations with servers, for commands. Imports PyAV, which tells images from videos."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import video
from epd.client.conversation import Conversation, Medium
from epd.client.endpoint import find_model, parse_endpoints
from epd.types import MediaKind


def conversation_with(
    url: str, api_key: str | None, model: Path | None, paths: Sequence[str], options: Mapping[str, Any]
) -> Conversation:
    """Returns a conversation with a running server. Raises RequestError.

    model: the name of one of its models; by default the first
    paths: of files, or URLs, which the server fetches itself
    options: see `api_options`
    """
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    media = [Medium(_kind(path), path) for path in paths]
    return Conversation(endpoint, str(model or find_model(endpoint)), media, options)


def _kind(path: str) -> MediaKind:
    """Returns what a file is, or what the ending of a URL says; a video where it says nothing."""
    if "://" not in path:
        return video.media_kind(path)
    guessed, _ = mimetypes.guess_type(path.partition("?")[0])
    return "image" if (guessed or "").startswith("image/") else "video"


def api_options(
    fps: float | None,
    frames: int | None,
    start: float,
    end: float | None,
    retention: float | None,
    reduction: str | None,
    max_visual_tokens: int | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    """Returns the fields of a request that options of a command mean; those not given are absent."""
    own = {
        "fps": fps,
        "num_frames": frames,
        "start_s": start or None,
        "end_s": end,
        "retention": retention,
        "reduction": reduction,
        "max_visual_tokens": max_visual_tokens,
    }
    given = {name: value for name, value in own.items() if value is not None}
    return ({"epd": given} if given else {}) | ({} if max_tokens is None else {"max_tokens": max_tokens})
