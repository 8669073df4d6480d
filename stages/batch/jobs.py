"""Defines what goes from stage to stage in a batch: media with their questions, and their current state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.chat import ChatMessage
from epd.errors import EPDError
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import TokenOutput
from epd.stages.group_driver import FailedJob, MediaJob
from epd.stages.media import EncodedGroup
from epd.types import Usage


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


@dataclass(slots=True, eq=False, kw_only=True)
class BatchJob(MediaJob):
    """Holds media and the conversations that begin with them.

    name: unique.
    messages: one of them; all begin as it does, up to the last of the media.
    requests: taken one by one, by one thread.
    is_done: set by the last stage when nothing is left to report.
    """

    name: str
    requests: Iterator[TextRequest]
    is_done: bool = False


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

    def job_done(self, job: BatchJob) -> None:
        """Reports that nothing of the job is left anywhere."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """Reports that no job is left, or that nothing can continue."""
        ...


# A job that is planned, then all of its groups, then the next job.
EmbeddingItem = BatchJob | EncodedGroup | FailedJob[BatchJob]
