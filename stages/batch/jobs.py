"""Defines what goes from stage to stage in a batch: media with their questions, and their current state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from encoders import FrameSampling
from encoders.prompt.chat import ChatMessage
from epd.errors import EPDError
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.types import MediaKind, Usage
from stages.engine.generation import TokenOutput
from stages.media import DecodedGroup, EncodedGroup, PlannedMedia


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Holds one question.

    messages: with its media.
    sampling: max_tokens may be open.
    seed: of draws.
    """

    request_id: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    seed: int = 0


@dataclass(slots=True, eq=False)
class MediaJob:
    """Holds media and the conversations that begin with them.

    name: unique.
    sources: files, in order, of these kinds.
    requests: taken one by one, by one thread.
    reduction: which of the visual tokens are kept.
    is_failed: set by the stage that gives it up; the others leave it alone from then on.
    is_done: set by the last stage when nothing is left to report.
    num_substituted_frames: of its media, those that show a neighbour; the decode stage counts them.
    """

    name: str
    sources: Sequence[Path]
    kinds: Sequence[MediaKind]
    frame_sampling: FrameSampling
    requests: Iterator[TextRequest]
    reduction: ReductionPolicy = KEEP_ALL
    is_failed: bool = False
    is_done: bool = False
    num_substituted_frames: int = 0


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Holds an answered request.

    outputs: tokens of all sequences, sequence by sequence.
    num_cached: prompt tokens that were there already.
    first_s: when the first came, on `perf_counter`.
    """

    request_id: str
    outputs: Sequence[TokenOutput]
    usage: Usage
    num_cached: int
    first_s: float


class BatchSink(Protocol):
    """Receives the outcomes of requests and jobs from one thread, which it may make wait."""

    def answered(self, answer: BatchAnswer) -> None: ...

    def failed(self, request_id: str, error: EPDError) -> None: ...

    def job_done(self, job: MediaJob) -> None:
        """Reports that nothing of the job is left anywhere."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """Reports that no job is left, or that nothing can continue."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """Holds a job whose media are planned."""

    job: MediaJob
    media: tuple[PlannedMedia, ...]

    @property
    def num_bytes(self) -> int:
        """Estimates the memory: pixels of images, and times of frames."""
        images = sum(each.image.nbytes for each in self.media if each.image is not None)
        return images + sum(128 * each.plan.num_frames for each in self.media) + 4096


@dataclass(frozen=True, slots=True)
class FailedJob:
    """Marks a job that a stage has given up."""

    job: MediaJob
    error: EPDError


# A job that is opened, then all of its groups, then the next job; a stage that gives a job up reports it.
FrameItem = OpenedJob | DecodedGroup | FailedJob
EmbeddingItem = OpenedJob | EncodedGroup | FailedJob
