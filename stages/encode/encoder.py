"""Implements the encode stage: frames of groups in, embeddings offered to receivers, each at most once.

submit -> waiting | schedule: one shape, patch budget, room | run: patches, tower | commit: pool, offer
                  | cached already: offer at once           |                     |

The tower runs in the stage's turn, or beside it in a thread (`stages/encode/beside.py`): then a turn starts a
batch, and a later one commits it. Only what is in the tower is touched by both: the pool's rows it reserved.

Of a group of a reading, what is kept is chosen once it is encoded and earlier groups are read; it is written
to an entry of its own and offered alone. The whole group stays cached, for other requests.

Of reduced items, the readings of a worker say which tokens it sends, group by group:

first group -> open -> next group, next group, ... -> last group: over
                  later groups that are encoded early wait for those before them
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup, EncoderCacheManager, GroupKey
from epd.encode.sharding import DEFAULT_BATCH_PATCHES, pick_batch
from epd.encoders.adapter import Embeddings
from epd.encoders.groups import FrameEncoder, MediaGroup
from epd.encoders.plans import MediaPlan
from epd.encoders.reduction.reading import ItemReduction
from epd.errors import EPDError, InternalError
from epd.stages.encode.beside import BesideThread, InTurn
from epd.stages.encode.embedding_store import EmbeddingStore, Found, Looks
from epd.stages.encode.encoder_pool import EncoderPool
from epd.stages.encode.readings import Readings
from epd.store.piece_files import PieceFiles
from epd.store.write_behind import ReadPaces
from epd.transfer.connectors import EncoderConnector, Ticket
from epd.transfer.transfers import Outbox
from epd.types import Reuse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Describes one group to be encoded for a ticket.

    plan: of the group alone.
    frames: gives uint8 [N, h, w, 3] of planned size; called only if the group has to be encoded.
    request_id: of the request that it is for.
    group: if the ticket is of a reading, the whole group.
    reading: what that is; with the group that it begins with.
    on_reuse: told what was kept of it, in a thread.
    has_frames: whether `frames` can give any.
    found: what is kept of it, once that was looked for.
    owner: of whoever submits it, to know it again.
    """

    ticket: Ticket
    plan: MediaPlan
    frames: Callable[[], Tensor]
    request_id: str = ""
    group: MediaGroup | None = None
    reading: ItemReduction | None = None
    on_reuse: Callable[[Reuse], None] = lambda _: None
    has_frames: bool = True
    found: Found | None = None
    owner: object = None

    @property
    def num_patches(self) -> int:
        return self.plan.grid.num_patches

    @property
    def key(self) -> GroupKey:
        """Returns what is encoded: a group whole, although only some of it may be sent."""
        return self.ticket.key if self.group is None else self.group.spec.key

    @property
    def num_embeddings(self) -> int:
        """Counts what is encoded."""
        return self.ticket.target.num_embeddings if self.group is None else self.group.spec.num_embeddings

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns what jobs must have in common to share one call of the tower."""
        return (self.plan.kind, self.plan.size, self.plan.grid.cut(1), self.key.tower_share)


@dataclass(slots=True)
class EncodeCounts:
    """Counts what a stage has done.

    num_batches: calls of the tower.
    num_patches: that were encoded; of units that were skipped, too.
    num_units_skipped: see `FrameEncoder`.
    """

    num_batches: int = 0
    num_groups: int = 0
    num_patches: int = 0
    num_units_skipped: int = 0


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Describes a batch that has been encoded.

    num_encoded: of its jobs, those that did not fail. seconds: that it took
    """

    jobs: tuple[EncodeJob, ...]
    num_encoded: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Call:
    """Holds the jobs of one call of the tower, the patches that it took, and why it failed."""

    jobs: Sequence[EncodeJob]
    num_patches: int = 0
    error: Exception | None = None


_Run = tuple[Sequence[_Call], float]  # the calls that a batch took, and their seconds


class EncodeStage:
    """Runs one encode worker. Not thread-safe.

    lane: where the tower runs; may be replaced while nothing is encoded.
    """

    def __init__(
        self,
        encoder: FrameEncoder,
        cache: EncoderCacheManager,
        pool: EncoderPool,
        connector: EncoderConnector,
    ) -> None:
        """Creates a stage whose batches are of as many patches as the encoder takes together."""
        self.cache = cache
        self.counts = EncodeCounts()
        self.store: EmbeddingStore | None = None
        self._looks: Looks[EncodeJob] | None = None
        self.outbox = Outbox(cache)
        self._encoder = encoder
        self._pool = pool
        self._connector = connector
        self._max_batch_patches = encoder.max_patches or DEFAULT_BATCH_PATCHES
        self._readings = Readings(encoder.family.join)
        self._waiting: list[EncodeJob] = []
        self._unread: list[EncodeJob] = []  # encoded, of readings
        self._running: list[EncodeJob] = []  # in the tower
        self._unwanted: set[str] = set()  # transfers of those that were forgotten meanwhile
        self.lane: InTurn[_Run] | BesideThread[_Run] = InTurn()

    def keep_in(self, files: PieceFiles, paces: ReadPaces | None = None) -> None:
        """Keeps embeddings in files, from now on, and takes them from there. paces: see `WriteBehind`."""
        self.store = EmbeddingStore(files, self._pool.layout, self._encoder, paces)
        self._looks = Looks(self.store)

    def has(self, key: GroupKey, plan: MediaPlan, frames_s: float | None = None) -> bool:
        """Returns whether a group is to be offered without its frames. frames_s: see `KeptUnits.has`."""
        return self.cache.is_ready(key) or (
            self.store is not None and self.store.units.has(key, plan, frames_s)
        )

    def close(self) -> None:
        """Ends what runs beside it."""
        if self.store is not None:
            self.store.close()

    def submit(self, job: EncodeJob) -> None:
        """Queues a job. Raises InfeasibleError when its result would never fit."""
        self.cache.check_fits(job.num_embeddings)
        self._readings.open(job)
        if self._looks is None or self.cache.is_ready(job.key):
            self._waiting.append(job)
        else:
            self._looks.add(job)

    def _take_looks(self) -> None:
        """Queues the jobs that were looked for, in order, with what was found."""
        for job, looked in () if self._looks is None else self._looks.take(is_idle=not self.can_step):
            if looked is None:
                self._waiting.append(job)
            elif (error := looked.exception()) is not None:
                self._send_failure(job, error)
            else:
                self._waiting.append(replace(job, found=looked.result()))

    @property
    def _looked_for(self) -> list[EncodeJob]:
        return [] if self._looks is None else self._looks.groups

    def cancel(self, transfer_id: str) -> None:
        """Forgets a job that has not been offered yet; anything else is ended by the receiver's receipt."""
        self._forget(lambda job: job.ticket.transfer_id == transfer_id)

    def end_readings(self, request_id: str) -> None:
        """Forgets what was read for a request, and what waits for its turn. Unknown ids are ignored."""
        self._forget(lambda job: job.group is not None and job.request_id == request_id)
        self._readings.drop_requests(lambda each: each == request_id)

    def cancel_requests(self, is_over: Callable[[str], bool]) -> None:
        """Forgets the jobs and readings of requests that are over. is_over: asked with each's id."""
        self._forget(lambda job: is_over(job.request_id))
        self._readings.drop_requests(is_over)

    def drop_receiver(self, receiver: str) -> None:
        """Forgets all jobs and offers for a receiver that is gone; what is encoded stays cached."""
        self._forget(lambda job: job.ticket.receiver == receiver)
        self._readings.drop_receiver(receiver)
        self._connector.forget(receiver)
        self.outbox.drop_receiver(receiver)

    def _forget(self, is_over: Callable[[EncodeJob], bool]) -> None:
        if self._looks is not None:
            self._looks.forget(is_over)
        self._waiting = [job for job in self._waiting if not is_over(job)]
        self._unread = [job for job in self._unread if not is_over(job)]
        self._unwanted |= {job.ticket.transfer_id for job in self._running if is_over(job)}

    def has_work(self) -> bool:
        """Reports whether jobs wait or run, readings are not over or offers are without a receipt."""
        has_jobs = bool(self._waiting or self._running or self._unread or self._readings or self._looked_for)
        return has_jobs or len(self.outbox) > 0

    @property
    def is_encoding(self) -> bool:
        """Returns whether a batch is in the tower."""
        return bool(self._running)

    @property
    def num_waiting(self) -> int:
        """Counts the jobs of which nothing has been offered."""
        return len(self._waiting) + len(self._running) + len(self._unread) + len(self._looked_for)

    @property
    def num_readings(self) -> int:
        """Counts the readings that are not over."""
        return len(self._readings)

    @property
    def waiting_transfers(self) -> list[str]:
        """Lists the transfers that wait for jobs which are not in the tower."""
        return [job.ticket.transfer_id for job in (*self._waiting, *self._unread, *self._looked_for)]

    @property
    def outstanding_patches(self) -> int:
        """Counts the patches of the jobs that are not encoded: what new work queues behind."""
        return sum(job.num_patches for job in (*self._waiting, *self._running, *self._looked_for))

    @property
    def can_step(self) -> bool:
        """Returns whether jobs wait for a step, and not for a disk."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self) -> list[EncodedBatch]:
        """Takes receipts, serves hits, encodes one batch. Returns the batches that are over."""
        self.outbox.close(self._connector.poll())
        done = self._finish()
        self._take_looks()
        self._serve_hits()
        self._read()
        if not self._running and (batch := self._schedule()):
            self._start(batch)
            done += self._finish()
        self._read()
        return done

    def _serve_hits(self) -> None:
        hits = [job for job in self._waiting if self.cache.is_ready(job.key)]
        self._waiting = [job for job in self._waiting if not self.cache.is_ready(job.key)]
        for job in hits:
            self._pass_on(job)

    def _pass_on(self, job: EncodeJob) -> None:
        """Offers an encoded group, or has it read."""
        if job.group is None:
            self._offer(job)
        else:
            self._unread.append(job)

    def _read(self) -> None:
        """Offers what readings keep of encoded groups whose turn it is. What was evicted is encoded again."""
        jobs = [(job.group, job) for job in self._unread if job.group is not None]
        for group, job in sorted(jobs, key=lambda each: each[0].index):
            if not self._readings.has_turn(job, group):
                continue
            if not self.cache.is_ready(job.key):
                self._unread.remove(job)
                self._waiting.append(job)
            elif self.cache.can_reserve(job.ticket.target.num_embeddings):
                self._unread.remove(job)
                self._offer_kept(job, group)

    def _offer_kept(self, job: EncodeJob, group: MediaGroup) -> None:
        ticket = job.ticket
        whole = self._pool.read(self.cache.get(job.key))
        target = self.cache.reserve(ticket.key, ticket.target.num_embeddings, ticket.transfer_id)
        try:
            kept, places = self._readings.read(job, group, whole)
            self._pool.write(target, kept)
            self.cache.commit(ticket.key, places)
            self._offer(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs the group that it belongs to
            self._send_failure(job, error)
        finally:
            self.cache.release(ticket.key, ticket.transfer_id)

    def _schedule(self) -> list[EncodeJob]:
        """Takes jobs out of the queue for which room has been reserved."""
        batch = []
        for index in pick_batch(self._waiting, self._max_batch_patches):
            job = self._waiting[index]
            if not self.cache.can_reserve(job.num_embeddings):
                break
            self.cache.reserve(job.key, job.num_embeddings, job.ticket.transfer_id)
            batch.append(job)
        taken = {job.ticket.transfer_id for job in batch}
        self._waiting = [job for job in self._waiting if job.ticket.transfer_id not in taken]
        return batch

    def _start(self, batch: list[EncodeJob]) -> None:
        places = [self.cache.get(job.key) for job in batch]
        self._running = batch
        self.lane.start(lambda: self._run(batch, places))

    @torch.inference_mode()
    def _run(self, batch: Sequence[EncodeJob], places: Sequence[CachedGroup]) -> _Run:
        start_s = time.perf_counter()
        calls = self._calls(batch, places)
        return calls, time.perf_counter() - start_s

    def _calls(self, batch: Sequence[EncodeJob], places: Sequence[CachedGroup]) -> list[_Call]:
        """Encodes into the pool; if a batch of several fails, each alone, so that only the culprit does."""
        try:
            results, num_patches = self._encode(batch)
            for place, embeddings in zip(places, results, strict=True):
                self._pool.write(place, embeddings)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs the group that it belongs to
            if len(batch) > 1:
                alone = zip(batch, places, strict=True)
                return [call for job, place in alone for call in self._calls([job], [place])]
            return [_Call(batch, error=error)]
        return [_Call(batch, num_patches)]

    def _encode(self, batch: Sequence[EncodeJob]) -> tuple[list[Embeddings], int]:
        """Returns embeddings, and how many patches were encoded for them."""
        if self.store is not None:
            return self.store.encode(batch)
        runs = [self._encoder.patches(job.frames(), job.plan) for job in batch]
        return self._encoder.encode(runs, batch[0].key.tower_share), sum(job.num_patches for job in batch)

    def _finish(self) -> list[EncodedBatch]:
        """Commits the batch that was in the tower, if it is over."""
        if (run := self.lane.finish()) is None:
            return []
        (calls, seconds), batch, self._running = run, self._running, []
        if self.store is not None and (num_patches := sum(call.num_patches for call in calls)):
            self.store.units.note_encoded(num_patches, seconds)
        for call in calls:
            if call.error is None:
                self._commit(call)
            else:
                self._fail(call.jobs[0], call.error)
        self._unwanted.clear()
        num_encoded = sum(len(call.jobs) for call in calls if call.error is None)
        return [EncodedBatch(tuple(batch), num_encoded, seconds)]

    def _commit(self, call: _Call) -> None:
        self.counts.num_batches += 1
        self.counts.num_groups += len(call.jobs)
        self.counts.num_patches += call.num_patches
        self.counts.num_units_skipped = self._encoder.num_skipped
        for job in call.jobs:
            self.cache.commit(job.key)
            if job.ticket.transfer_id not in self._unwanted:
                self._pass_on(replace(job, found=None))
            self.cache.release(job.key, job.ticket.transfer_id)

    def _offer(self, job: EncodeJob) -> None:
        self.outbox.add(job.ticket)
        self._connector.send(job.ticket, self.cache.get(job.ticket.key))

    def _fail(self, job: EncodeJob, error: Exception) -> None:
        self.cache.release(job.key, job.ticket.transfer_id)
        if job.ticket.transfer_id not in self._unwanted:
            self._send_failure(job, error)

    def _send_failure(self, job: EncodeJob, error: BaseException) -> None:
        logger.warning("group of transfer %s not encoded", job.ticket.transfer_id, exc_info=error)
        self._connector.send(job.ticket, None, _message_of(error))

    def check_integrity(self) -> None:
        """Raises AssertionError unless entries are held by open offers, or by jobs in the tower."""
        self.cache.check_integrity()
        self.outbox.check_integrity()
        if self.cache.num_held > len(self.outbox) + len(self._running):
            raise AssertionError("an entry is held without an open offer")
        if not self._unwanted <= {job.ticket.transfer_id for job in self._running}:
            raise AssertionError("transfers are unwanted that are not in the tower")


def _message_of(error: BaseException) -> str:
    """Returns the error sent to the receiver: all of an expected error, of a bug no more than its type."""
    if isinstance(error, RuntimeError | ValueError | EPDError):
        return f"{type(error).__name__}: {error}"
    return str(InternalError.of(error))
