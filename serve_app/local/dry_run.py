"""Says what a batch would take, before anything is decoded: lines, media, hours, tokens, and device time.

Only the headers of media are read. Media of other machines are counted and not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from epd import video
from epd.batch.line_index import LineGroup, LineIndex
from epd.batch.lines import BatchLine
from epd.batch.media_names import local_path
from epd.batch.result_files import Reason
from epd.console import counted
from epd.control.arrivals import RequestWork
from epd.encoders import MediaPlan
from epd.errors import EPDError, UnsupportedMediaError
from epd.pixel_settings import PixelSettings
from epd.profiles.profile import Profile
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
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest, HeldItem, MediaReference, MediaSource

# Answers that are decoded together.
_BATCH = 32


@dataclass(slots=True)
class DryRun:
    """Sums up what a batch would take.

    num_not_looked_at: lines about media of other machines, which are in no other sum
    num_failing: lines that would fail, by `reasons`
    num_media: media of this machine, each once. video_hours: of those that are videos, whole
    visual_tokens: computed once for all questions about the same media
    prompt_tokens, answer_tokens: of all lines; of answers as many as are expected
    device_s: seconds of one device for all stages but the decoding of video; None without a profile
    """

    num_lines: int = 0
    num_not_looked_at: int = 0
    num_failing: int = 0
    num_media: int = 0
    video_hours: float = 0.0
    num_frames: int = 0
    visual_tokens: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    device_s: float | None = None
    reasons: dict[str, Reason] = field(default_factory=dict)

    def fail(self, num_lines: int, kind: str, message: str) -> None:
        self.num_failing += num_lines
        self.reasons.setdefault(kind, Reason(message)).num_lines += num_lines

    def lines(self) -> list[str]:
        """Returns the sums for people."""
        device = "unknown: give --profile" if self.device_s is None else _time(self.device_s)
        lines, frames = counted(self.num_lines, "line"), counted(self.num_frames, "frame")
        media = "1 medium" if self.num_media == 1 else f"{self.num_media} media"
        return [
            f"{lines}, {self.num_failing} would fail, {self.num_not_looked_at} about media elsewhere that "
            "were not looked at",
            f"{media}, {self.video_hours:.2f} hours of video, {frames}",
            f"{self.visual_tokens:,} visual tokens, each computed once; {self.prompt_tokens:,} tokens of "
            f"prompts, {self.answer_tokens:,} of answers expected",
            f"time on one device: {device}",
        ]

    def record(self) -> dict[str, Any]:
        """Returns the sums for `--json`."""
        return asdict(self)


def _time(seconds: float) -> str:
    shown = f"{seconds:.3g} s" if seconds < 60 else f"{seconds / 60:,.1f} min"
    return f"{shown}, {seconds / 3600:.3g} GPU hours, without the decoding of video"


def dry_run(
    index: LineIndex,
    model: Path,
    pixels: PixelSettings,
    profile: Profile | None,
    show: Callable[[int, int], None],
) -> DryRun:
    """Looks at all media of an index that is built. Raises ModelError.

    model, pixels: what would answer, and the sizes that it gets media in. profile: its costs
    show: called with the lines done, and all
    """
    planner = RequestPlanner(model, pixels=pixels)
    found = DryRun(num_lines=index.num_lines, device_s=None if profile is None else 0.0)
    for refused in index.refused():
        found.fail(1, "RequestError", refused.message)
    num_done = found.num_failing
    for group in index.groups():
        _add(found, planner, profile, group, next(index.lines(group)))
        num_done += group.num_lines
        show(num_done, found.num_lines)
    return found


def _add(
    found: DryRun, planner: RequestPlanner, profile: Profile | None, group: LineGroup, line: BatchLine
) -> None:
    """Adds a group, each of whose lines is taken to be as its first."""
    try:
        looked = _planned(planner, line)
    except ValidationError as error:
        found.fail(group.num_lines, "RequestError", str(describe(error)))
    except EPDError as error:
        found.fail(group.num_lines, type(error).__name__, str(error))
    else:
        if looked is None:
            found.num_not_looked_at += group.num_lines
        else:
            _add_plan(found, profile, group.num_lines, *looked)


def _add_plan(
    found: DryRun, profile: Profile | None, num_lines: int, plan: AnswerPlan, facts: list[video.MediaFacts]
) -> None:
    work, usage = plan.work, plan.usage(0)
    num_answer = work.expected_tokens or work.max_tokens
    found.num_media += len(facts)
    found.video_hours += sum(each.num_frames / each.fps for each in facts if each.kind == "video") / 3600
    found.num_frames += usage.num_frames
    found.visual_tokens += usage.visual_tokens
    found.prompt_tokens += num_lines * work.num_prompt_tokens
    found.answer_tokens += num_lines * num_answer
    if profile is not None:
        seconds = _device_s(profile, work, usage.visual_tokens, num_lines, len(plan.groups))
        found.device_s = (found.device_s or 0.0) + seconds


def _device_s(profile: Profile, work: RequestWork, num_visual: int, num_lines: int, num_groups: int) -> float:
    """Returns what a group of lines takes: its media once, each question and each answer."""
    num_prompt = work.num_prompt_tokens
    num_text = num_prompt - num_visual
    encode_s = profile.encode.cost.seconds(work.num_patches, num_groups) if num_groups else 0.0
    media_s = (
        profile.prefill.cost.seconds(num_visual, num_visual * (num_visual + 1) / 2) if num_visual else 0.0
    )
    question_s = profile.prefill.cost.seconds(num_text, num_text * (num_visual + num_prompt + 1) / 2)
    token_s = profile.decode.cost.seconds(_BATCH, _BATCH * num_prompt) / _BATCH
    return encode_s + media_s + num_lines * (question_s + (work.expected_tokens or work.max_tokens) * token_s)


def _planned(planner: RequestPlanner, line: BatchLine) -> tuple[AnswerPlan, list[video.MediaFacts]] | None:
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
    return planner.plan(request, images), [each.facts for each in sources]


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
