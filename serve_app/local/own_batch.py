"""Answers `epd batch` with a model of this process, as `--url` does with a server. Imports torch, httpx.

Before that, looks at lines as this model would take them: the headers of media, no frame.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import httpx
from pydantic import ValidationError

from epd import video
from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import InFlight, media_at_once
from epd.batch.lines import BatchLine
from epd.batch.media_names import local_path
from epd.batch.tasks import BackendCounts, Failed
from epd.encoders import MediaPlan
from epd.errors import EPDError, UnsupportedMediaError, http_status
from epd.pixel_settings import PixelSettings
from epd.reduction import KEEP_ALL
from epd.sampling_params import SamplingParams
from epd.serve_app.http.requests.answer_format import no_turns
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import (
    conversation,
    describe,
    heard_part,
    pixel_limits,
    reduction_policy,
    sampling_params,
    video_sampling,
    visual_budget,
)
from epd.serve_app.local.dry_run import Look, Looked
from epd.serve_app.local.own_service import HERE, OwnService
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, HeldItem, MediaReference, MediaSource


class OwnBackend(HttpBackend):
    """Answers batches with a model of this process. Lines without a seed get one of their own."""

    def __init__(self, service: OwnService, *, max_requests: int, lines_per_medium: float = math.inf) -> None:
        """Takes max_requests: in flight. lines_per_medium: mean of the input."""
        super().__init__(
            HERE,
            transport=_OwnTransport(service),
            in_flight=InFlight(media_at_once(max_requests, lines_per_medium), max_requests),
            has_seeds=True,
            signs=True,
        )
        self._service = service

    def counts(self) -> BackendCounts:
        num_skipped = int(self._service.counters().get("units_skipped", 0))
        return BackendCounts(super().counts().num_encoded, num_skipped)


class _OwnTransport(httpx.AsyncBaseTransport):
    """Passes chat requests to the service of this process."""

    def __init__(self, service: OwnService) -> None:
        self._service = service

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200)
        try:
            return httpx.Response(200, json=await self._service.completion(json.loads(request.content)))
        except EPDError as error:
            told = {"message": str(error), "code": type(error).__name__}
            return httpx.Response(http_status(error), json={"error": told})


def own_look(model: Path, pixels: PixelSettings) -> Look:
    """Returns how lines are looked at here. pixels: sizes that the model gets media in. Raises ModelError."""
    planner = RequestPlanner(model, pixels=pixels)

    def look(line: BatchLine) -> Looked | Failed | None:
        try:
            return _planned(planner, line)
        except ValidationError as error:
            return Failed.of(line, describe(error))
        except EPDError as error:
            return Failed.of(line, error)

    return look


def _planned(planner: RequestPlanner, line: BatchLine) -> Looked | None:
    """Plans a line; None where a medium is not here. Raises EPDError, and ValidationError for its body."""
    chat = ChatRequest.model_validate_json(json.dumps(line.body))
    messages, references = conversation(chat.messages, no_turns(chat), pixel_limits(chat), heard_part(chat))
    sources: list[MediaSource] = []
    images: dict[int, MediaPlan] = {}
    for place, reference in enumerate(references):
        source = _source(place, reference)
        if source is None:
            return None
        sources.append(source)
        if source.kind == "image":
            facts = source.facts
            images[place] = planner.adapter.plan_image(facts.height, facts.width, reference.pixels)
    request = AnswerRequest(
        request_id=line.key,
        model=planner.card.name,
        messages=messages,
        media=tuple(sources),
        sampling=sampling_params(chat, SamplingParams()),
        frame_sampling=video_sampling(chat, references),
        reduction=reduction_policy(chat, KEEP_ALL),
        budget=visual_budget(chat, None),
    )
    plan = planner.plan(request, images)
    usage, videos = plan.usage(0), [each.facts for each in sources if each.facts.kind == "video"]
    return Looked(
        num_media=len(sources),
        video_s=sum(each.num_frames / each.fps for each in videos),
        num_frames=usage.num_frames,
        visual_tokens=usage.visual_tokens,
        whole_tokens=usage.visual_tokens_before,
        prompt_tokens=plan.work.num_prompt_tokens,
        answer_tokens=plan.work.expected_tokens or plan.work.max_tokens,
        num_patches=plan.work.num_patches,
    )


def _source(place: int, reference: MediaReference) -> MediaSource | None:
    """Looks at a medium; None for one that is no file, and for sound. Raises MediaError."""
    path = local_path(reference.url)
    if path is None or reference.kind == "audio":
        return None
    facts = video.look(path).taken_as(reference.kind)
    if facts.kind != reference.kind:
        raise UnsupportedMediaError(
            f"{reference.label} is of the kind {facts.kind}; allowed: {reference.kind}; name it as it is"
        )
    num_bytes = path.stat().st_size
    return MediaSource(
        facts, reference.url, num_bytes, reference.label, HeldItem("", place), reference.pixels
    )
