"""Opens conversations with servers, for commands. Imports PyAV, to tell images, videos and sound apart."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd import video
from epd.client.conversation import Conversation, Medium
from epd.client.endpoint import Endpoint, ServedModel, parse_endpoints, served_model
from epd.errors import RequestError
from epd.types import MediaKind


def conversation_with(
    url: str,
    api_key: str | None,
    model: Path | None,
    paths: Sequence[str],
    options: Mapping[str, Any],
    *,
    as_audio: bool = False,
) -> Conversation:
    """Returns a conversation with a running server. Raises RequestError.

    model: the name of one of its models; by default the first
    paths: of files, or URLs, which the server fetches itself
    options: see `api_options`
    as_audio: whether the sound alone is sent for
    """
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    media = [Medium("audio" if as_audio else _kind(path), path) for path in paths]
    has_files = any(not each.is_url for each in media)
    served = _served(endpoint, model, has_files=has_files)
    return Conversation(endpoint, served.name, media, options, max_body_bytes=served.max_body_bytes)


def _served(endpoint: Endpoint, model: Path | None, *, has_files: bool) -> ServedModel:
    """Asks the server for what the command does not know: a model's name, and how much may be sent."""
    if model is None:
        return served_model(endpoint)
    named = ServedModel(str(model))
    if not has_files:
        return named
    try:
        return served_model(endpoint, named.name)
    except RequestError:  # not every server lists its models
        return named


def _kind(path: str) -> MediaKind:
    """Returns what a file is, or what the ending of a URL says; a video where it says nothing."""
    if "://" not in path:
        return video.media_kind(path)
    guessed, _ = mimetypes.guess_type(path.partition("?")[0])
    kinds: dict[str, MediaKind] = {"image": "image", "audio": "audio"}
    return kinds.get((guessed or "").partition("/")[0], "video")


def api_options(
    fps: float | None,
    frames: int | None,
    start: float,
    end: float | None,
    retention: float | None,
    reduction: str | None,
    compute_share: float | None,
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
        "compute_share": compute_share,
        "max_visual_tokens": max_visual_tokens,
    }
    given = {name: value for name, value in own.items() if value is not None}
    return ({"epd": given} if given else {}) | ({} if max_tokens is None else {"max_tokens": max_tokens})
