"""Runs encode and decode in a worker: each a stage, the messages it takes, the reports it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from epd.control.elasticity.cluster import StageSample
from epd.control.routing import InFlight
from epd.errors import EncodeError, UnavailableError
from epd.serve_app.messages import (
    CancelTickets,
    EmbeddingsReused,
    EncodeGroup,
    HandedOver,
    RequestFailed,
    Reserve,
    SpanDone,
    WorkerEvent,
    WorkerLoad,
    endpoint,
    owner_of,
)
from epd.serve_app.role_messages import RemainingWork
from epd.serve_app.service import StageSpan
from epd.serve_app.worker.worker_stages import drafting_counters
from epd.stages.decode import DecodeStage
from epd.stages.encode.encoder import EncodeJob, EncodeStage
from epd.stages.engine.generation import TokenOutput
from epd.store.piece_files import StoreCounts
from epd.topology import Stage
from epd.transfer.connectors import KVTicket, TransferOutcome
from epd.types import Reuse, UInt8Array

Clock = Callable[[], float]


@dataclass(slots=True)
class ReportBuffer:
    """Collects the contents of the next report."""

    events: list[WorkerEvent] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)

    def take(self) -> tuple[tuple[WorkerEvent, ...], tuple[TokenOutput, ...]]:
        """Returns what has been collected, and begins anew."""
        taken = tuple(self.events), tuple(self.outputs)
        self.events.clear()
        self.outputs.clear()
        return taken


class _Stage(Protocol):
    """Has what every stage has."""

    def has_work(self) -> bool: ...

    def check_integrity(self) -> None: ...


class Role(ABC):
    """Runs one role of a worker. stage: has its work, and its state."""

    stage: _Stage

    @abstractmethod
    def step(self, reports: ReportBuffer) -> bool:
        """Advances all work by one step. Returns whether there was any progress."""

    def has_work(self) -> bool:
        """Returns whether any work is left."""
        return self.stage.has_work()

    @abstractmethod
    def abort(self, request_ids: Sequence[str], reports: ReportBuffer) -> None:
        """Drops requests. Unknown ids are ignored."""

    @abstractmethod
    def drop_owner(self, owner: str, reports: ReportBuffer) -> None:
        """Drops all requests of an owner: see `epd.serve_app.messages.DropOwner`."""

    @abstractmethod
    def drop_peer(self, worker: str) -> tuple[str, ...]:
        """Handles the loss of another worker: see `epd.serve_app.messages.PeerLost`."""

    @abstractmethod
    def drop_stages(self, worker: str, stages: frozenset[Stage], reports: ReportBuffer) -> None:
        """Drops transfers to stages that another worker has closed, as they will never be answered."""

    @abstractmethod
    def remaining(self) -> RemainingWork:
        """Returns the remaining work: see `epd.serve_app.role_messages.RemainingWork`."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """Returns its load, without samples."""

    @abstractmethod
    def samples(self) -> dict[Stage, StageSample]:
        """Returns samples of its stages, by which load is estimated."""

    def close(self) -> None:  # noqa: B027 - nothing runs beside decode
        """Ends what runs beside it."""

    def check_integrity(self) -> None:
        """Raises AssertionError unless its state is consistent."""
        self.stage.check_integrity()


@dataclass(slots=True)
class _Job:
    message: EncodeGroup
    submitted_s: float
    started_s: float = 0.0


@dataclass(slots=True)
class Rounds:
    """Totals of one kind of pass, for `epd.control.elasticity`: units done, passes, seconds."""

    done_units: float = 0.0
    num_rounds: int = 0
    busy_s: float = 0.0

    def add(self, num_units: float, seconds: float) -> None:
        """Adds a pass, if any unit was done in it."""
        if num_units:
            self.done_units += num_units
            self.num_rounds += 1
            self.busy_s += seconds

    def sample(self, num_requests: int, queued_units: float = 0.0) -> StageSample:
        return StageSample(num_requests, queued_units, self.done_units, self.num_rounds, self.busy_s)


class EncodeRole(Role):
    """Takes groups, and offers their embeddings."""

    def __init__(self, worker: str, stage: EncodeStage, clock: Clock) -> None:
        self.stage: EncodeStage = stage
        self._worker = worker
        self._clock = clock
        self._reused: deque[EmbeddingsReused] = deque()  # not reported yet
        self._busy_s = 0.0

    def submit(self, message: EncodeGroup, frames: UInt8Array | None) -> bool:
        """Submits a group, see `EncodeGroup`. Raises InfeasibleError."""
        group = message.group if message.ticket.key.reading else None
        key = message.ticket.key if group is None else group.spec.key
        plan, request_id = message.group.plan, message.request_id
        if frames is None and not self.stage.has(key, plan, message.frames_s):
            return False
        job = _Job(message, self._clock())
        self.stage.submit(
            EncodeJob(
                message.ticket,
                plan,
                lambda: self._begin(job, frames),
                request_id,
                group,
                message.reading,
                partial(self._note_reuse, message),
                has_frames=frames is not None,
                owner=job,
            )
        )
        return True

    def _note_reuse(self, message: EncodeGroup, reuse: Reuse) -> None:
        group = message.group
        self._reused.append(EmbeddingsReused(message.request_id, group.item, group.index, reuse))

    def _begin(self, job: _Job, frames: UInt8Array | None) -> Tensor:
        if frames is None:
            raise EncodeError("the group has left what the encoder keeps; send its frames")
        job.started_s = self._clock()
        return _tensor(frames)

    def cancel(self, message: CancelTickets) -> None:
        for transfer_id in message.transfer_ids:
            self.stage.cancel(transfer_id)
        if message.request_id:
            self.stage.end_readings(message.request_id)

    def step(self, reports: ReportBuffer) -> bool:
        was_busy = self.stage.can_step
        done = self.stage.step()
        while self._reused:
            reports.events.append(self._reused.popleft())
        for batch in done:
            if batch.num_encoded:
                self._busy_s += batch.seconds
            jobs = [each.owner for each in batch.jobs if isinstance(each.owner, _Job)]
            begun = [job for job in jobs if job.started_s]
            if begun:
                reports.events += _spans(self._worker, begun, batch.seconds)
        return bool(done) if self.stage.is_encoding else was_busy or bool(done)

    def abort(self, request_ids: Sequence[str], reports: ReportBuffer) -> None:
        """Does nothing: the receiver reports which tickets are no longer needed."""

    def drop_owner(self, owner: str, reports: ReportBuffer) -> None:  # noqa: ARG002 - has nothing to report
        """Drops its groups that are not encoded; the receiver answers for those that are."""
        self.stage.cancel_requests(lambda request_id: owner_of(request_id) == owner)

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        self.stage.drop_receiver(endpoint(worker, "prefill"))
        return ()

    def drop_stages(self, worker: str, stages: frozenset[Stage], reports: ReportBuffer) -> None:  # noqa: ARG002 - has nothing to report
        if "prefill" in stages:
            self.stage.drop_receiver(endpoint(worker, "prefill"))

    def remaining(self) -> RemainingWork:
        return RemainingWork(not self.has_work(), waiting=tuple(self.stage.waiting_transfers))

    def load(self) -> WorkerLoad:
        cache, counts, store = self.stage.cache, self.stage.counts, self.stage.store
        return WorkerLoad(
            num_waiting=self.stage.num_waiting,
            num_running=len(self.stage.outbox),
            encoder_cache_usage=1 - cache.num_free_blocks / cache.num_blocks,
            work=InFlight(encode_patches=self.stage.outstanding_patches),
            counters={
                "encoded_groups": counts.num_groups,
                "encoded_patches": counts.num_patches,
                "encode_batches": counts.num_batches,
                "units_skipped": counts.num_units_skipped,
                **({} if store is None else store_counters(store.units.counts, "store_read_embeddings")),
            },
        )

    def close(self) -> None:
        self.stage.close()

    def samples(self) -> dict[Stage, StageSample]:
        stage, counts = self.stage, self.stage.counts
        totals = counts.num_patches, counts.num_batches, self._busy_s
        return {"encode": StageSample(stage.num_waiting, stage.outstanding_patches, *totals)}


class DecodeRole(Role):
    """Takes reserved requests, and returns tokens."""

    def __init__(self, stage: DecodeStage, clock: Clock) -> None:
        self.stage: DecodeStage = stage
        self._clock = clock
        self._rounds = Rounds()

    def reserve(self, message: Reserve) -> KVTicket | None:
        """Reserves room, see `Reserve`. Raises InfeasibleError."""
        return self.stage.reserve(
            message.request_id,
            message.sender,
            message.identity,
            message.sampling,
            message.num_dropped,
            message.num_output_tokens,
        )

    def step(self, reports: ReportBuffer) -> bool:
        start_s = self._clock()
        result = self.stage.step()
        self._rounds.add(len(result.computed), self._clock() - start_s)
        reports.outputs += result.outputs
        # Failed transfers are reported by the prefill worker, which knows whether they matter.
        reports.events += [
            HandedOver(end.request_id) for end in result.handovers if end.outcome is TransferOutcome.DELIVERED
        ]
        reports.events += [
            RequestFailed(each.request_id, each.error, is_final=True) for each in result.faults
        ]
        return bool(result.num_tokens or result.handovers or result.admissions)

    def abort(self, request_ids: Sequence[str], reports: ReportBuffer) -> None:  # noqa: ARG002 - has nothing to report
        for request_id in request_ids:
            self.stage.abort(request_id)

    def drop_owner(self, owner: str, reports: ReportBuffer) -> None:
        self.abort([each for each in self.stage.request_ids if owner_of(each) == owner], reports)

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        self.stage.moving.drop_receiver(endpoint(worker, "decode"))
        senders = (endpoint(worker, "prefill"), endpoint(worker, "decode"))
        return tuple(lost for sender in senders for lost in self.stage.fail_sender(sender))

    def drop_stages(self, worker: str, stages: frozenset[Stage], reports: ReportBuffer) -> None:  # noqa: ARG002 - what was to be moved continues here
        if "decode" in stages:
            self.stage.moving.drop_receiver(endpoint(worker, "decode"))

    def remaining(self) -> RemainingWork:
        return RemainingWork(
            not self.has_work(), arriving=self.stage.arriving, running=tuple(self.stage.engine.request_ids)
        )

    def load(self) -> WorkerLoad:
        engine = self.stage.engine
        return WorkerLoad(
            num_waiting=len(engine.scheduler.waiting) + len(self.stage.reception),
            num_running=len(engine.scheduler.running),
            kv_usage=engine.kv.usage,
            work=InFlight(num_decodes=len(self.stage.request_ids)),
            seq_usage=min(1.0, self.stage.num_seqs / engine.scheduler.config.max_num_seqs),
            max_num_seqs=engine.scheduler.config.max_num_seqs,
            counters={
                "generated_tokens": engine.counts.num_generated_tokens,
                "preemptions": engine.scheduler.num_preempted,
                **drafting_counters(engine.counts),
            },
        )

    def samples(self) -> dict[Stage, StageSample]:
        scheduler = self.stage.engine.scheduler
        return {"decode": self._rounds.sample(len(scheduler.running) + len(scheduler.waiting))}


def _spans(worker: str, batch: Sequence[_Job], seconds: float) -> list[SpanDone]:
    """Returns spans; the groups of a request share the seconds of their batch."""
    start_s = batch[0].started_s
    stop_s = start_s + seconds
    num_groups = Counter(job.message.request_id for job in batch)
    return [
        SpanDone(
            job.message.request_id,
            StageSpan(
                "encode",
                worker,
                start_s,
                stop_s,
                item=job.message.group.item,
                group=job.message.group.index,
            ),
            (stop_s - start_s) / num_groups[job.message.request_id],
            start_s - job.submitted_s,
        )
        for job in batch
    ]


def _tensor(frames: UInt8Array) -> Tensor:
    """Returns a tensor, uint8 [N, h, w, 3]; a copy of read-only memory, of which torch would warn."""
    return torch.from_numpy(frames if frames.flags.writeable else frames.copy())


def store_counters(counts: StoreCounts, read: str) -> dict[str, float]:
    """Returns what was read and written of what is kept on disk. read: name of what is read."""
    return {
        read: counts.read_tokens,
        "store_read_bytes": counts.read_bytes,
        "store_read_objects_bytes": counts.objects_read_bytes,
        "store_written_bytes": counts.written_bytes,
        "store_written_objects_bytes": counts.objects_written_bytes,
        "store_failures": counts.num_failed,
        "store_left_tokens": counts.left_tokens,
    }


def lost_stage(stage: str) -> UnavailableError:
    """Returns the error for a message to a role that the worker does not have."""
    return UnavailableError(f"the worker has no role '{stage}' now; send to another")
