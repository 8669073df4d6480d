"""Opens conversations with servers, for commands. Imports PyAV, to tell images, videos and sound apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epd.client.conversation import Conversation, Medium
from epd.client.endpoint import Endpoint, ServedModel, parse_endpoints, served_model
from epd.errors import RequestError
from epd.serve_app.request_options import kind_of


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
    options: see `request_fields`
    as_audio: whether the sound alone is sent for
    """
    (endpoint,) = parse_endpoints([url], api_key=api_key)
    media = [Medium("audio" if as_audio else kind_of(path), path) for path in paths]
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
