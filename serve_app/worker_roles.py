"""Encode and decode as a worker runs them: a stage, the messages it takes, the news it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from epd.connectors import KVTicket, TransferOutcome
from epd.errors import EncodeError, UnavailableError
from epd.types import UInt8Array
from serve_app.messages import (
    EncodeGroup,
    HandedOver,
    Reserve,
    SpanDone,
    WorkerEvent,
    WorkerLoad,
    endpoint,
)
from serve_app.service import StageSpan
from stages.decode import DecodeStage
from stages.encode import EncodeJob, EncodeStage
from stages.generation import TokenOutput

Clock = Callable[[], float]


@dataclass(slots=True)
class News:
    """What the next report will tell."""

    events: list[WorkerEvent] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)


class Role(Protocol):
    """One role of a worker."""

    def step(self, news: News) -> bool:
        """Moves everything on by one step. Returns whether anything has moved."""
        ...

    def has_work(self) -> bool:
        """Whether there is anything that is not over."""
        ...

    def abort(self, request_ids: Sequence[str], news: News) -> None:
        """Forgets requests. Unknown ids are ignored."""
        ...

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        """Another worker is gone: see `serve_app.messages.PeerLost`."""
        ...

    def load(self) -> WorkerLoad: ...

    def check_integrity(self) -> None:
        """Raises AssertionError unless all books agree."""
        ...


@dataclass(slots=True)
class _Job:
    message: EncodeGroup
    submitted_s: float
    started_s: float = 0.0


class EncodeRole:
    """Groups in, offers of embeddings out."""

    def __init__(self, worker: str, stage: EncodeStage, clock: Clock) -> None:
        self.stage = stage
        self._worker = worker
        self._clock = clock
        self._begun: list[_Job] = []

    def submit(self, message: EncodeGroup, frames: UInt8Array | None) -> bool:
        """See `EncodeGroup`. Raises InfeasibleError."""
        if frames is None and not self.stage.cache.is_ready(message.ticket.key):
            return False
        job = _Job(message, self._clock())
        self.stage.submit(
            EncodeJob(
                message.ticket, message.plan, message.start, message.stop, lambda: self._begin(job, frames)
            )
        )
        return True

    def _begin(self, job: _Job, frames: UInt8Array | None) -> Tensor:
        if frames is None:
            raise EncodeError("the group has left the encoder's cache; send its frames")
        job.started_s = self._clock()
        self._begun.append(job)
        return _tensor(frames)

    def cancel(self, transfer_ids: Sequence[str]) -> None:
        for transfer_id in transfer_ids:
            self.stage.cancel(transfer_id)

    def step(self, news: News) -> bool:
        was_busy = self.stage.outstanding_patches > 0
        self.stage.step()
        begun, self._begun = self._begun, []
        news.events += [self._span(job) for job in begun]
        return was_busy

    def _span(self, job: _Job) -> SpanDone:
        message, now_s = job.message, self._clock()
        span = StageSpan("encode", self._worker, job.started_s, now_s, item=message.item, group=message.group)
        return SpanDone(message.request_id, span, now_s - job.started_s, job.started_s - job.submitted_s)

    def has_work(self) -> bool:
        return self.stage.has_work()

    def abort(self, request_ids: Sequence[str], news: News) -> None:
        """Nothing: the receiver tells which tickets are not wanted any more."""

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        self.stage.drop_receiver(endpoint(worker, "prefill"))
        return ()

    def load(self) -> WorkerLoad:
        cache, counts = self.stage.cache, self.stage.counts
        return WorkerLoad(
            num_waiting=self.stage.num_waiting,
            num_running=len(self.stage.outbox),
            encoder_cache_usage=1 - cache.num_free_blocks / cache.num_blocks,
            counters={
                "encoded_groups": counts.num_groups,
                "encoded_patches": counts.num_patches,
                "encode_batches": counts.num_batches,
            },
        )

    def check_integrity(self) -> None:
        self.stage.check_integrity()


class DecodeRole:
    """Reserved requests in, tokens out."""

    def __init__(self, stage: DecodeStage) -> None:
        self.stage = stage

    def reserve(self, message: Reserve) -> KVTicket | None:
        """See `Reserve`. Raises InfeasibleError."""
        return self.stage.reserve(message.request_id, message.sender, message.identity, message.sampling)

    def step(self, news: News) -> bool:
        result = self.stage.step()
        news.outputs += result.outputs
        # Those that failed are told by the prefill worker, which knows whether that matters.
        news.events += [
            HandedOver(end.request_id) for end in result.handovers if end.outcome is TransferOutcome.DELIVERED
        ]
        return bool(result.num_tokens or result.handovers or result.admissions)

    def has_work(self) -> bool:
        return self.stage.has_work()

    def abort(self, request_ids: Sequence[str], news: News) -> None:  # noqa: ARG002 - has nothing to tell
        for request_id in request_ids:
            self.stage.abort(request_id)

    def drop_peer(self, worker: str) -> tuple[str, ...]:
        return tuple(self.stage.fail_sender(endpoint(worker, "prefill")))

    def load(self) -> WorkerLoad:
        engine = self.stage.engine
        return WorkerLoad(
            num_waiting=len(engine.scheduler.waiting) + len(self.stage.reception),
            num_running=len(engine.scheduler.running),
            kv_usage=engine.kv.usage,
            counters={
                "generated_tokens": engine.counts.num_generated_tokens,
                "preemptions": engine.scheduler.num_preempted,
            },
        )

    def check_integrity(self) -> None:
        self.stage.check_integrity()


def _tensor(frames: UInt8Array) -> Tensor:
    """uint8 [N, h, w, 3]. Copied if it is a view of memory that may not be written, which torch warns of."""
    return torch.from_numpy(frames if frames.flags.writeable else frames.copy())


def lost_stage(stage: str) -> UnavailableError:
    """For a message to a role that the worker does not have."""
    return UnavailableError(f"the worker has no role '{stage}' now; send to another")
