"""The stages of a batch before the language model, each a thread: plan, decode, encode.

    plan    | v0 | v1 | v2 |
    decode       | v0 g0 | v0 g1 | v1 g0 | ...      by the process's pool of video threads, ahead of this
    encode               | v0 g0 | v0 g1 | v1 g0 | ...

Queues between them hold so many bytes, so that a stage that is faster waits. Media that cannot be read, or
not encoded, fail their own job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import nn

import video
from encoders import Adapter, Embeddings
from encoders.batch import FrameEncoder
from epd.errors import EPDError, UnsupportedMediaError
from epd.transfer.bounded_queue import BoundedQueue, BusyClock
from epd.types import StageTimings
from stages.batch.jobs import (
    DecodedRun,
    EmbeddingMail,
    EncodedRun,
    FailedJob,
    FrameMail,
    MediaJob,
    OpenedJob,
)
from stages.media import PlannedMedia, plan_known, unit_runs

logger = logging.getLogger(__name__)

# What a broken medium may make a stage raise, beside errors of our own.
_BREAKS = (EPDError, RuntimeError, ValueError, OSError)


class MediaStages:
    """Three threads' work. num_decoded, num_encoded: media that were begun, each time anew."""

    def __init__(
        self,
        adapter: Adapter,
        tower: nn.Module,
        *,
        group_tokens: int,
        max_planned: int,
        max_frame_bytes: int,
        max_embedding_bytes: int,
        skip_static: float | None = None,
    ) -> None:
        """skip_static: see `FrameEncoder`."""
        self.num_decoded = 0
        self.num_encoded = 0
        self.encode_clock = BusyClock()
        self._adapter = adapter
        self._encoder = FrameEncoder(adapter, tower, skip_static)
        self._group_tokens = group_tokens
        self.planned: BoundedQueue[OpenedJob | FailedJob] = BoundedQueue(max_planned)
        self.frames: BoundedQueue[FrameMail] = BoundedQueue(max_frame_bytes)
        self.embeddings: BoundedQueue[EmbeddingMail] = BoundedQueue(max_embedding_bytes)

    @property
    def num_units_skipped(self) -> int:
        """Units of frames that were not encoded, since they did not change."""
        return self._encoder.num_skipped

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
        for mail in self.planned:
            if isinstance(mail, FailedJob):
                self.frames.put(mail)
                continue
            self.frames.put(mail, mail.num_bytes)
            try:
                self._decode(mail)
            except _BREAKS as error:
                self.frames.put(_failed(mail.job, error))
        self.frames.end()

    def _decode(self, opened: OpenedJob) -> None:
        for item, media in enumerate(opened.media):
            self.num_decoded += 1
            with closing(unit_runs(media, self._group_tokens, StageTimings())) as runs:
                for run in runs:
                    if opened.job.is_failed:
                        return
                    opened.job.num_substituted_frames += run.num_substituted
                    self.frames.put(DecodedRun(opened, item, run), run.frames.nbytes)

    # Encode

    @torch.inference_mode()
    def encode(self) -> None:
        for mail in self.frames:
            if isinstance(mail, OpenedJob):
                self.embeddings.put(mail, mail.num_bytes)
            elif isinstance(mail, FailedJob):
                self.embeddings.put(mail)
            elif not mail.opened.job.is_failed:
                self._encode(mail)
        self.embeddings.end()

    def _encode(self, decoded: DecodedRun) -> None:
        run = decoded.run
        self.num_encoded += run.start == 0
        self.encode_clock.start()
        try:
            embeddings = self._embeddings(decoded)
        except _BREAKS as error:
            self.embeddings.put(_failed(decoded.opened.job, error))
            return
        finally:
            self.encode_clock.stop()
        encoded = EncodedRun(decoded.opened, decoded.item, run.start, run.stop, embeddings)
        self.embeddings.put(encoded, encoded.num_bytes)

    def _embeddings(self, decoded: DecodedRun) -> Embeddings:
        plan, run = decoded.opened.media[decoded.item].plan, decoded.run
        (encoded,) = self._encoder.encode([self._encoder.patches(run.frames, plan, run.start, run.stop)])
        return encoded


def _failed(job: MediaJob, error: Exception) -> FailedJob:
    job.is_failed = True
    if isinstance(error, EPDError):
        return FailedJob(job, error)
    logger.warning("media of %s: %s", job.name, error, exc_info=error)
    return FailedJob(job, EPDError(f"the media cannot be used: {type(error).__name__}: {error}"))
