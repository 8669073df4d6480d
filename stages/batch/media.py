"""Runs the stages of a batch before the language model, each in a thread: plan, decode, encode.

    plan    | v0 | v1 | v2 |
    decode       | v0 g0 | v0 g1 | v1 g0 | ...      by the process's pool of video threads, ahead of this
    encode               | v0 g0 | v0 g1 | v1 g0 | ...

Queues between them hold limited bytes, so that a faster stage waits. Media that cannot be read, or
not encoded, fail their own job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import video
from encoders import Adapter
from encoders.batch import FrameEncoder
from epd.errors import EPDError, UnsupportedMediaError
from epd.transfer.bounded_queue import BoundedQueue, BusyClock
from epd.types import StageTimings
from stages.batch.jobs import EmbeddingItem, FailedJob, FrameItem, MediaJob, OpenedJob
from stages.media import DecodedGroup, PlannedMedia, decode_groups, encode_group, plan_known

logger = logging.getLogger(__name__)

# A broken medium may make a stage raise these, beside errors of our own.
_BREAKS = (EPDError, RuntimeError, ValueError, OSError)


class MediaStages:
    """Runs three threads. num_decoded, num_encoded: media that were begun, counted from zero each time."""

    def __init__(
        self,
        adapter: Adapter,
        encoder: FrameEncoder,
        *,
        group_tokens: int,
        max_planned: int,
        max_frame_bytes: int,
        max_embedding_bytes: int,
    ) -> None:
        self.num_decoded = 0
        self.num_encoded = 0
        self.encode_clock = BusyClock()
        self._adapter = adapter
        self._encoder = encoder
        self._group_tokens = group_tokens
        self.planned: BoundedQueue[OpenedJob | FailedJob] = BoundedQueue(max_planned)
        self.frames: BoundedQueue[FrameItem] = BoundedQueue(max_frame_bytes)
        self.embeddings: BoundedQueue[EmbeddingItem] = BoundedQueue(max_embedding_bytes)

    def close(self) -> None:
        for queue in (self.planned, self.frames, self.embeddings):
            queue.close()

    # Plan

    def plan(self, jobs: Iterator[MediaJob]) -> None:
        for job in jobs:
            try:
                media = tuple(self._planned(job))
            except _BREAKS as error:
                self.planned.put(_failed(job, error), 1)
            else:
                self.planned.put(OpenedJob(job, media), 1)
        self.planned.end()

    def _planned(self, job: MediaJob) -> Iterator[PlannedMedia]:
        for source, kind in zip(job.sources, job.kinds, strict=True):
            facts = video.look(source)
            if facts.kind != kind:
                raise UnsupportedMediaError(
                    f"'{source}' is a {facts.kind}; allowed here: {kind}s; name it as {facts.kind}"
                )
            yield plan_known(self._adapter, source, facts, job.frame_sampling)

    # Decode

    def decode(self) -> None:
        for item in self.planned:
            if isinstance(item, FailedJob):
                self.frames.put(item)
                continue
            self.frames.put(item, item.num_bytes)
            try:
                self._decode(item)
            except _BREAKS as error:
                self.frames.put(_failed(item.job, error))
        self.frames.end()

    def _decode(self, opened: OpenedJob) -> None:
        job = opened.job
        with closing(decode_groups(opened.media, self._group_tokens, StageTimings())) as groups:
            for decoded in groups:
                self.num_decoded += decoded.group.index == 0
                if job.is_failed:
                    return
                job.num_substituted_frames += decoded.num_substituted
                self.frames.put(decoded, decoded.frames.nbytes)

    # Encode

    def encode(self) -> None:
        job: MediaJob | None = None
        for item in self.frames:
            if isinstance(item, OpenedJob):
                job = item.job
                self.embeddings.put(item, item.num_bytes)
            elif isinstance(item, FailedJob):
                self.embeddings.put(item)
            elif job is not None and not job.is_failed:
                self._encode(job, item)
        self.embeddings.end()

    def _encode(self, job: MediaJob, decoded: DecodedGroup) -> None:
        self.num_encoded += decoded.group.index == 0
        self.encode_clock.start()
        try:
            encoded = encode_group(self._encoder, decoded, StageTimings())
        except _BREAKS as error:
            self.embeddings.put(_failed(job, error))
            return
        finally:
            self.encode_clock.stop()
        self.embeddings.put(encoded, encoded.num_bytes)


def _failed(job: MediaJob, error: Exception) -> FailedJob:
    job.is_failed = True
    if isinstance(error, EPDError):
        return FailedJob(job, error)
    logger.warning("media of %s: %s", job.name, error, exc_info=error)
    return FailedJob(job, EPDError(f"the media cannot be used: {type(error).__name__}: {error}"))
