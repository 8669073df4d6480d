"""Implements the encode stage: frames of groups in, embeddings offered to receivers, each at most once.

submit -> waiting | schedule: one shape, patch budget, room | run: patches, tower | commit: pool, offer
                  | cached already: offer at once           |                     |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from encoders.adapter import MediaPlan
from encoders.batch import BatchEncoder, FrameEncoder
from epd.encode.encode_batching import pick_batch
from epd.encode.encoder_cache import EncoderCacheManager, GroupKey
from epd.errors import EPDError, InternalError
from epd.reduction import TowerMerge
from epd.transfer.connectors import EncoderConnector, Ticket
from epd.transfer.transfers import Outbox
from stages.encode.encoder_pool import EncoderPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Describes one group to be encoded for a ticket.

    plan: of the group alone.
    frames: gives uint8 [N, h, w, 3] of planned size; called only if the group has to be encoded.
    request_id: of the request that it is for.
    """

    ticket: Ticket
    plan: MediaPlan
    frames: Callable[[], Tensor]
    request_id: str = ""

    @property
    def num_patches(self) -> int:
        return self.plan.grid.num_patches

    @property
    def key(self) -> GroupKey:
        return self.ticket.key

    @property
    def shape(self) -> tuple[str | int, ...]:
        """Returns what jobs must have in common to share one call of the tower."""
        return (self.plan.kind, *self.plan.size, self.plan.grid.h, self.plan.grid.w)


@dataclass(slots=True)
class EncodeCounts:
    """Counts what a stage has done.

    num_batches: calls of the tower.
    num_patches: of the groups, those of units that were skipped too.
    num_units_skipped: see `FrameEncoder`.
    """

    num_batches: int = 0
    num_groups: int = 0
    num_patches: int = 0
    num_units_skipped: int = 0


class EncodeStage:
    """Runs one encode worker. Not thread-safe."""

    def __init__(
        self,
        adapter: BatchEncoder,
        tower: nn.Module,
        cache: EncoderCacheManager,
        pool: EncoderPool,
        connector: EncoderConnector,
        *,
        max_batch_patches: int,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
    ) -> None:
        """Creates a stage. skip_static, merge: see `FrameEncoder`."""
        self.cache = cache
        self.counts = EncodeCounts()
        self.outbox = Outbox(cache)
        self._encoder = FrameEncoder(adapter, tower, skip_static, merge)
        self._pool = pool
        self._connector = connector
        self._max_batch_patches = max_batch_patches
        self._waiting: list[EncodeJob] = []

    def submit(self, job: EncodeJob) -> None:
        """Queues a job. Raises InfeasibleError when its result would never fit."""
        self.cache.check_fits(job.ticket.target.num_embeddings)
        self._waiting.append(job)

    def cancel(self, transfer_id: str) -> None:
        """Forgets a job that has not been encoded yet; anything else is ended by the receiver's receipt."""
        self._waiting = [job for job in self._waiting if job.ticket.transfer_id != transfer_id]

    def cancel_requests(self, is_over: Callable[[str], bool]) -> None:
        """Forgets the jobs of requests that are over, as `cancel` does. is_over: asked with each's id."""
        self._waiting = [job for job in self._waiting if not is_over(job.request_id)]

    def drop_receiver(self, receiver: str) -> None:
        """Forgets all jobs and offers for a receiver that is gone; what is encoded stays cached."""
        self._waiting = [job for job in self._waiting if job.ticket.receiver != receiver]
        self._connector.forget(receiver)
        self.outbox.drop_receiver(receiver)

    def has_work(self) -> bool:
        """Reports whether jobs wait or offers are without a receipt."""
        return bool(self._waiting) or len(self.outbox) > 0

    @property
    def num_waiting(self) -> int:
        """Counts the jobs that have not been encoded."""
        return len(self._waiting)

    @property
    def waiting_transfers(self) -> list[str]:
        """Lists the transfers that wait for these jobs."""
        return [job.ticket.transfer_id for job in self._waiting]

    @property
    def outstanding_patches(self) -> int:
        """Counts the patches of the jobs that wait: what new work queues behind."""
        return sum(job.num_patches for job in self._waiting)

    @torch.inference_mode()
    def step(self) -> int:
        """Takes receipts, serves hits, encodes one batch. Returns the number of groups encoded."""
        self.outbox.close(self._connector.poll())
        self._serve_hits()
        batch = self._schedule()
        return self._run(batch) if batch else 0

    def _serve_hits(self) -> None:
        hits = [job for job in self._waiting if self.cache.is_ready(job.ticket.key)]
        self._waiting = [job for job in self._waiting if not self.cache.is_ready(job.ticket.key)]
        for job in hits:
            self._offer(job)

    def _schedule(self) -> list[EncodeJob]:
        """Takes jobs out of the queue for which room has been reserved."""
        batch = []
        for index in pick_batch(self._waiting, self._max_batch_patches):
            ticket = self._waiting[index].ticket
            if not self.cache.can_reserve(ticket.target.num_embeddings):
                break
            self.cache.reserve(ticket.key, ticket.target.num_embeddings, ticket.transfer_id)
            batch.append(self._waiting[index])
        taken = {job.ticket.transfer_id for job in batch}
        self._waiting = [job for job in self._waiting if job.ticket.transfer_id not in taken]
        return batch

    def _run(self, batch: Sequence[EncodeJob]) -> int:
        """Encodes and commits; if a batch of several fails, each alone, so that only the culprit does."""
        try:
            results = self._encoder.encode([self._encoder.patches(job.frames(), job.plan) for job in batch])
            places = [self.cache.get(job.ticket.key) for job in batch]
            for place, embeddings in zip(places, results, strict=True):
                self._pool.write(place, embeddings)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs the group that it belongs to
            if len(batch) > 1:
                return sum(self._run([job]) for job in batch)
            self._fail(batch[0], error)
            return 0
        self._commit(batch)
        return len(batch)

    def _commit(self, batch: Sequence[EncodeJob]) -> None:
        self.counts.num_batches += 1
        self.counts.num_groups += len(batch)
        self.counts.num_patches += sum(job.num_patches for job in batch)
        self.counts.num_units_skipped = self._encoder.num_skipped
        for job in batch:
            self.cache.commit(job.ticket.key)
            self._offer(job)
            self.cache.release(job.ticket.key, job.ticket.transfer_id)

    def _offer(self, job: EncodeJob) -> None:
        self.outbox.add(job.ticket)
        self._connector.send(job.ticket, self.cache.get(job.ticket.key))

    def _fail(self, job: EncodeJob, error: Exception) -> None:
        logger.warning("group of transfer %s not encoded", job.ticket.transfer_id, exc_info=error)
        self.cache.release(job.ticket.key, job.ticket.transfer_id)
        self._connector.send(job.ticket, None, _message_of(error))

    def check_integrity(self) -> None:
        """Raises AssertionError unless entries are held by open offers and by nothing else."""
        self.cache.check_integrity()
        self.outbox.check_integrity()
        if self.cache.num_held > len(self.outbox):
            raise AssertionError("an entry is held without an open offer")


def _message_of(error: Exception) -> str:
    """Returns the error sent to the receiver: all of an expected error, of a bug no more than its type."""
    if isinstance(error, RuntimeError | ValueError | EPDError):
        return f"{type(error).__name__}: {error}"
    return str(InternalError.of(error))
