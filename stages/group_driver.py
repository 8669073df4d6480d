"""Drives media through planning, decoding and encoding, group by group, on the way to the language model.

    planned    | v0 | v1 | v2 |
    decoded       | v0 | v0 g0 | v0 g1 | v1 | v1 g0 | ...    by a pool of video threads, ahead of this
    encoded            | v0 | v0 g0 | v0 g1 | v1 | v1 g0 | ...

Each stage is a generator over the items of the stage before it. `run` draws all of them in the caller's
thread; a batch gives each its own (`stages/batch/media.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from epd import video
from epd.chat import ChatMessage, one_turn
from epd.encoders import OWN_LIMITS, Adapter, FrameSampling, MediaPlan, PixelLimits
from epd.encoders.adapter import PromptPlan
from epd.encoders.batch import FrameEncoder
from epd.errors import EPDError, RequestError, UnsupportedMediaError
from epd.kv.answer_length import TYPICAL_TOKENS
from epd.reduction import KEEP_ALL, ReductionPolicy, VisualBudget
from epd.stages.frame_budget import PromptRoom, plan_within
from epd.stages.media import (
    DecodedGroup,
    EncodedGroup,
    FoundVideo,
    PlannedMedia,
    decode_groups,
    encode_group,
    plan_known,
)
from epd.stages.timing import busy
from epd.transfer.bounded_queue import BusyClock
from epd.types import MediaKind, StageTimings

# A broken medium may make a stage raise these, beside errors of our own.
_BREAKS = (EPDError, RuntimeError, ValueError, OSError)


@dataclass(slots=True, eq=False, kw_only=True)
class MediaJob:
    """Holds the media of one question, or of several about the same media, on their way through the stages.

    sources: files, in order.
    kinds: what each of them must be; None for anything.
    pixels: what each of them is resized within; empty for the processor's own limits.
    messages: the first conversation about the media; by default the media and `question`.
    question: the first one, where it is known before the media are planned.
    reduction: which of the visual tokens are kept; once planned, as many as have room.
    budget: what they are held to; None takes frames as they are asked for, whether they have room or not.
    num_answer_tokens: room that is left to an answer where not all frames have room.
    choice: what was chosen, for people; empty where all is as it was asked for.
    media: their plans, once there are any.
    num_substituted_frames: those decoded so far that show a neighbour.
    num_unseen_frames: of animated pictures that are taken as images, all but the first of each.
    timings: seconds that each stage has spent on them.
    is_failed: set by the stage that gives the job up; the others leave it alone from then on.
    """

    sources: Sequence[str | Path]
    frame_sampling: FrameSampling
    kinds: Sequence[MediaKind] | None = None
    pixels: Sequence[PixelLimits] = ()
    messages: Sequence[ChatMessage] = ()
    question: str = ""
    reduction: ReductionPolicy = KEEP_ALL
    budget: VisualBudget | None = None
    num_answer_tokens: int = TYPICAL_TOKENS
    choice: str = ""
    media: tuple[PlannedMedia, ...] = ()
    num_substituted_frames: int = 0
    num_unseen_frames: int = 0
    timings: StageTimings = field(default_factory=StageTimings)
    is_failed: bool = False

    @property
    def plans(self) -> tuple[MediaPlan, ...]:
        return tuple(each.plan for each in self.media)

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of the plans: pixels of images, and times of frames."""
        images = sum(each.image.nbytes for each in self.media if each.image is not None)
        return images + sum(128 * plan.num_frames for plan in self.plans) + 4096


JobT = TypeVar("JobT", bound=MediaJob)


@dataclass(frozen=True, slots=True)
class FailedJob(Generic[JobT]):
    """Marks a job that a stage has given up."""

    job: JobT
    error: Exception


class GroupDriver(Generic[JobT]):
    """Runs the stages before the language model.

    A stage yields each job, then its groups, then the next job; in the place of what it cannot do, a
    `FailedJob`. A bug ends it instead.

    num_decoded, num_encoded: media that were begun.
    encode_clock: of the encode stage.
    """

    def __init__(
        self,
        adapter: Adapter,
        encoder: FrameEncoder,
        group_tokens: int,
        *,
        context_tokens: int | None = None,
        layout_adapter: Adapter | None = None,
    ) -> None:
        """Starts without media.

        context_tokens: of the model, for jobs with a budget.
        layout_adapter: of the planning thread, if others use the tokenizer of `adapter` meanwhile.
        """
        self.num_decoded = 0
        self.num_encoded = 0
        self.encode_clock = BusyClock()
        self._adapter = adapter
        self._encoder = encoder
        self._group_tokens = group_tokens
        self._context_tokens = context_tokens
        self._layout_adapter = layout_adapter or adapter

    def run(self, jobs: Iterable[JobT]) -> Generator[JobT | EncodedGroup | FailedJob[JobT], None, None]:
        """Runs all stages, one group at a time. To stop early, close the generator."""
        with (
            closing(self.planned(jobs)) as planned,
            closing(self.decoded(planned)) as decoded,
            closing(self.encoded(decoded)) as encoded,
        ):
            yield from encoded

    def planned(self, jobs: Iterable[JobT]) -> Generator[JobT | FailedJob[JobT], None, None]:
        for job in jobs:
            try:
                with busy(job.timings, "probe_s"):
                    job.media = self._plan(job)
            except _BREAKS as error:
                yield _failed(job, error)
            else:
                yield job

    def _plan(self, job: MediaJob) -> tuple[PlannedMedia, ...]:
        if job.budget is None:
            return tuple(
                plan_known(self._adapter, source, facts, job.frame_sampling, pixels)
                for source, facts, pixels in _looked(job)
            )
        known = [self._known(job, *each) for each in _looked(job)]
        made = plan_within(
            [each.plan if isinstance(each, PlannedMedia) else each.plan_of(self._adapter) for each in known],
            job.frame_sampling,
            job.reduction,
            job.budget,
            PromptRoom(self._context_tokens, job.num_answer_tokens),
            lambda plans: self._laid_out(job, plans),
        )
        job.reduction, job.choice = made.reduction, made.line
        return tuple(
            each if isinstance(each, PlannedMedia) else PlannedMedia(each.source, plan)
            for each, plan in zip(known, made.plans, strict=True)
        )

    def _known(
        self, job: MediaJob, source: str | Path, facts: video.MediaFacts, pixels: PixelLimits
    ) -> PlannedMedia | FoundVideo:
        """Plans an image or a clip; a video is planned when the number of its frames is known."""
        if facts.kind == "video":
            return FoundVideo(source, facts, pixels)
        return plan_known(self._adapter, source, facts, job.frame_sampling, pixels)

    def _laid_out(self, job: MediaJob, plans: Sequence[MediaPlan]) -> PromptPlan:
        """Lays out the first prompt about the media; one that cannot be asked fails later, by itself."""
        adapter = self._layout_adapter
        try:
            kinds = [plan.kind for plan in plans]
            messages = job.messages or (one_turn(kinds, job.question) if job.question else ())
            return adapter.plan_chat(plans, messages) if messages else adapter.plan_prefix(plans)
        except RequestError:
            return adapter.plan_prefix(plans, job.messages)

    def decoded(
        self, items: Iterable[JobT | FailedJob[JobT]]
    ) -> Generator[JobT | DecodedGroup | FailedJob[JobT], None, None]:
        for item in items:
            yield item
            if not isinstance(item, FailedJob):
                yield from self._decode(item)

    def _decode(self, job: JobT) -> Iterator[DecodedGroup | FailedJob[JobT]]:
        try:
            with closing(decode_groups(job.media, self._group_tokens, job.timings)) as groups:
                for decoded in groups:
                    self.num_decoded += decoded.group.index == 0
                    if job.is_failed:
                        return
                    job.num_substituted_frames += decoded.num_substituted
                    yield decoded
        except _BREAKS as error:
            yield _failed(job, error)

    def encoded(
        self, items: Iterable[JobT | DecodedGroup | FailedJob[JobT]]
    ) -> Generator[JobT | EncodedGroup | FailedJob[JobT], None, None]:
        job: JobT | None = None
        for item in items:
            if not isinstance(item, DecodedGroup):
                job = item if isinstance(item, MediaJob) else None
                yield item
            elif job is not None and not job.is_failed:
                yield self._encode(job, item)

    def _encode(self, job: JobT, decoded: DecodedGroup) -> EncodedGroup | FailedJob[JobT]:
        self.num_encoded += decoded.group.index == 0
        self.encode_clock.start()
        try:
            return encode_group(self._encoder, decoded, job.timings)
        except _BREAKS as error:
            return _failed(job, error)
        finally:
            self.encode_clock.stop()


def _looked(job: MediaJob) -> Iterator[tuple[str | Path, video.MediaFacts, PixelLimits]]:
    """Looks at each source, in order. Raises MediaError, UnsupportedMediaError for the wrong kind."""
    kinds = job.kinds or (None,) * len(job.sources)
    limits = job.pixels or (OWN_LIMITS,) * len(job.sources)
    for source, kind, pixels in zip(job.sources, kinds, limits, strict=True):
        facts = video.look(source, as_audio=kind == "audio").taken_as(kind)
        job.num_unseen_frames += facts.num_unseen
        if kind not in (None, facts.kind):
            raise UnsupportedMediaError(
                f"'{source}' is of kind {facts.kind}; allowed here: {kind}; name it as {facts.kind}"
            )
        yield source, facts, pixels


def _failed(job: JobT, error: Exception) -> FailedJob[JobT]:
    job.is_failed = True
    return FailedJob(job, error)
