"""Opens conversations with servers, for commands. Imports PyAV, to tell images, videos and sound apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epd import console
from epd.client.conversation import JSON, Conversation, Medium, max_file_bytes
from epd.client.endpoint import Endpoint, ServedModel, Uploader, parse_endpoints, served_model
from epd.console import ShowProgress
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.models import knowledge_line, model_folder, told_knowledge
from epd.serve_app.cli.early_checks import as_path, check_media
from epd.serve_app.request_options import kind_of, request_fields


@contextmanager
def open_conversation(
    paths: Sequence[str],
    model: Path | None,
    server: tuple[str | None, str | None],
    config: EngineConfig,
    *,
    as_audio: bool = False,
    is_greedy: bool = False,
    **options: Any,
) -> Iterator[Conversation]:
    """Begins a conversation with a server, or with a model that is loaded into this process.

    server: its URL, None for this process, and its key
    is_greedy: whether answers of a model of this process are, instead of as the checkpoint has it
    options: of questions, see `request_fields`
    Raises EPDError.
    """
    url, api_key = server
    if url is not None:
        config.check_at_server()
        check_media(paths)
        yield conversation_with(url, api_key, model, paths, request_fields(**options), as_audio=as_audio)
        return
    paths = [as_path(path) for path in paths]
    check_media(paths)
    model_folder(model, config.revision, config.hub)
    with console.loading():
        from epd.serve_app.cli.own_model import OwnConversation, open_model  # torch

    with open_model(model, config, is_greedy=is_greedy) as service:
        yield OwnConversation(service, paths, audio=as_audio, note=knowledge_line(model), **options)


@dataclass(slots=True)
class FrameProgress:
    """Shows how many of the frames of a question are encoded."""

    show: ShowProgress
    num_frames: int = 0
    num_done: int = 0

    def take(self, span: JSON) -> None:
        """Takes what a stage has done, as `SpanReport` has it."""
        if span["stage"] == "probe":
            self.num_frames += span.get("frames") or 0
        elif span["stage"] == "encode":
            self.num_done += span.get("frames") or 0
            self.show(self.num_done, self.num_frames)

    def finish(self) -> None:
        """Shows that no frame is left: those that were found encoded have no span."""
        if self.num_frames:
            self.show(self.num_frames, self.num_frames)


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
    sent = _uploaded(endpoint, served, media)
    note = told_knowledge(served.name, served.knows, "epd serve")
    return Conversation(endpoint, served.name, sent, options, max_body_bytes=served.max_body_bytes, note=note)


def _uploaded(endpoint: Endpoint, served: ServedModel, media: Sequence[Medium]) -> Sequence[Medium]:
    """Uploads the files that are too large for one question together, where the server takes uploads."""
    num_bytes = sum(Path(each.name).stat().st_size for each in media if not each.is_url)
    if served.max_part_bytes is None or num_bytes <= max_file_bytes(served.max_body_bytes):
        return media
    uploader = Uploader(endpoint, served.max_part_bytes)
    with console.status("uploading"):
        return [
            each if each.is_url else replace(each, name=uploader.upload(Path(each.name)), is_uploaded=True)
            for each in media
        ]


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
