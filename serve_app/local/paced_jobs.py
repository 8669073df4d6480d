"""Plans requests as the server does, and describes them to the simulator: by the small model that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from epd.bench.body import question_text
from epd.chat import ChatMessage, ContentPart
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.adapter import Adapter, MediaPlan
from epd.encoders.groups import plan_groups
from epd.models import embedded_model_path
from epd.profiles.media import MediaWork
from epd.simulate.clock import ticks_of
from epd.simulate.requests import GroupWork, Job
from epd.workload.requests import PlannedRequest, RequestShape

MODEL = embedded_model_path()


class PacedJobs:
    """Makes jobs of images, videos and text; media are there at once.

    The template before the media counts as text behind them, although a server computes it while it reads.
    """

    def __init__(self, model: Path, group_tokens: int) -> None:
        self._model = model
        self._group_tokens = group_tokens
        self._groups: dict[RequestShape, tuple[list[MediaPlan], tuple[GroupWork, ...]]] = {}

    @cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self._model)

    def jobs(self, requests: Sequence[PlannedRequest]) -> list[Job]:
        return [self._job(each) for each in requests]

    def _job(self, request: PlannedRequest) -> Job:
        shape = request.shape
        plans, groups = self._media(shape)
        parts = [ContentPart("image")] * len(shape.images) + [ContentPart("video")] * len(shape.videos)
        text = ContentPart("text", question_text(request.text_seed, shape.text_tokens))
        prompt = self._adapter.plan_chat(plans, (ChatMessage("user", (*parts, text)),))
        num_text = len(prompt) - sum(each.num_tokens for each in plans)
        return Job(
            request.index,
            ticks_of(request.due_s),
            groups,
            num_text,
            shape.output_tokens,
            request.media_seed,
            request.text_seed,
        )

    def _media(self, shape: RequestShape) -> tuple[list[MediaPlan], tuple[GroupWork, ...]]:
        if shape not in self._groups:
            plans = list(self._plans(shape))
            works = tuple(
                GroupWork(MediaWork(group.spec.num_patches, group.spec.num_embeddings), 0, is_video=is_video)
                for place, plan in enumerate(plans)
                for is_video in [place >= len(shape.images)]
                for group in plan_groups([plan], [""], model="", group_tokens=self._group_tokens)
            )
            self._groups[shape] = plans, works
        return self._groups[shape]

    def _plans(self, shape: RequestShape) -> Iterator[MediaPlan]:
        for size in shape.images:
            yield self._adapter.plan_image(size.height, size.width)
        for video in shape.videos:
            facts = VideoFacts(video.num_frames, video.fps, video.size.height, video.size.width)
            yield self._adapter.plan_video(facts, FrameSampling())
