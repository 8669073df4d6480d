"""Defines the messages between the orchestrator and the workers. Everything here can be pickled.

    orchestrator --Message-->  worker   answered by a reply of the type that the message names
                 <--WorkerReport--      tokens and events, several per report, as soon as any exist

Bulk data, uint8 frames, travels beside a message as a NumPy array or as a fleet's handle to one.
Workers know a request by a separate id for each attempt, so that late results of an abandoned attempt can be
recognised. The id begins with the request's owner: several orchestrators may share the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from epd.control.elasticity.cluster import MediaSample, StageSample
from epd.control.routing import InFlight
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import ItemReduction
from epd.errors import EPDError
from epd.kv.prefix_cache import TokenIdentity
from epd.sampling_params import SamplingParams
from epd.serve_app.service import StageSpan
from epd.serve_app.worker_info import MemoryUse
from epd.stages.engine.generation import GenerateRequest, TokenOutput
from epd.topology import Stage
from epd.transfer.connectors import KVTicket, Ticket
from epd.transfer.transfers import Grant
from epd.types import Reuse

ReplyT = TypeVar("ReplyT")


def endpoint(worker: str, stage: Stage) -> str:
    """Returns the name of a worker's end of a transport: each of its roles has its own."""
    return f"{worker}.{stage}"


def worker_of(name: str) -> str:
    """Returns the worker of an end point."""
    return name.rpartition(".")[0]


def attempt_id(owner: str, request_id: str, number: int) -> str:
    """Returns the id by which workers know an attempt. owner: the orchestrator's, without "/"."""
    return f"{owner}/{request_id}#{number}"


def owner_of(attempt_id: str) -> str:
    """Returns the owner of an attempt, from its id or from one that begins with it, such as a stream's."""
    return attempt_id.partition("/")[0]


class Message(Generic[ReplyT]):
    """A message to a worker, answered by a ReplyT, or by an EPDError that is raised at the sender."""

    __slots__ = ()


# To an encode worker


@dataclass(frozen=True, slots=True)
class EncodeGroup(Message[bool]):
    """Asks for a group to be encoded for a ticket; its frames come as bulk, or not at all.

    The reply is whether it was taken; without frames, it is refused unless it is in the encoder's cache.
    incarnation: of the prefill worker, as in `Reserve`
    reading: if the ticket is for what is kept, with the group that the reading begins with; the other groups
        of the reading must come to the same encoder, in any order
    frames_s: without frames, the seconds in which they would come; None if that is not known
    """

    request_id: str
    ticket: Ticket
    group: MediaGroup
    incarnation: int = 0
    reading: ItemReduction | None = None
    frames_s: float | None = None


@dataclass(frozen=True, slots=True)
class CancelTickets(Message[None]):
    """Cancels tickets that are no longer needed.

    request_id: of a request that has ended; "" if it continues
    """

    transfer_ids: tuple[str, ...]
    request_id: str = ""


# To a prefill worker


@dataclass(frozen=True, slots=True)
class Prefill(Message[bool]):
    """Submits a request with the groups of all its media. The reply is whether there was room for it.

    ticket: at the decode worker that continues it; None if the roles are merged, or it is to come
    awaits_ticket: whether a `Redirect` will bring the ticket, since room is reserved at the same time
    incarnation: of that worker, as in `Reserve`
    wants_kept: whether encoders can send only what is kept of its groups
    """

    request: GenerateRequest
    groups: tuple[MediaGroup, ...]
    ticket: KVTicket | None
    incarnation: int = 0
    wants_kept: bool = False
    awaits_ticket: bool = False


@dataclass(frozen=True, slots=True)
class Redirect(Message[bool]):
    """Hands a request over to a first or another decode worker. Reply False: it is gone here.

    incarnation: of the decode worker, as in `Reserve`
    """

    request_id: str
    ticket: KVTicket
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Reissue(Message[None]):
    """Grants groups that are still needed again, as the encoder of these tickets is lost or has failed."""

    transfer_ids: tuple[str, ...]


# To a decode worker


@dataclass(frozen=True, slots=True)
class Reserve(Message[KVTicket | None]):
    """Reserves room for a request that the end point `sender` will send. Reply None: no room now.

    incarnation: of the sender's worker; 0 if unknown. The message is refused if that is lost
    num_dropped: of the prompt, see `PromptPlan.num_dropped`
    num_output_tokens: room for its answers, of one that is moved; 0 for the first token of each
    """

    request_id: str
    sender: str
    identity: TokenIdentity
    sampling: SamplingParams
    incarnation: int = 0
    num_dropped: int = 0
    num_output_tokens: int = 0


# To any worker


@dataclass(frozen=True, slots=True)
class Abort(Message[None]):
    """Drops requests in any state. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropOwner(Message[None]):
    """Drops all requests of an owner that is gone. Groups that other requests want are granted again."""

    owner: str


@dataclass(frozen=True, slots=True)
class PeerLost(Message[tuple[str, ...]]):
    """Announces that an incarnation of worker `name` is lost with all its state: it sends and takes no more.

    The reply names requests that this loses here: at a prefill worker those it can hand over to another
    (`Redirect`), at a decode worker those that had not arrived completely, which it has dropped. A loss is
    handled once, however often it is announced; each gets the same reply. Later incarnations lose nothing.
    """

    name: str
    incarnation: int


# From workers


@dataclass(frozen=True, slots=True)
class Admitted:
    """Reports that a request has its blocks at the prefill worker. num_cached: prompt tokens found cached.

    reused: where they were, unless in memory
    """

    request_id: str
    num_cached: int
    reused: tuple[Reuse, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingsReused:
    """Reports what an encoder had on disk of a group. item, group: their numbers."""

    request_id: str
    item: int
    group: int
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class GroupsArrived:
    """Reports that the groups of these tickets are at the prefill worker and have left their encoders."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """Reports that an encoder failed on a group: `Reissue` its ticket or abort the request."""

    request_id: str
    group: int
    transfer_id: str
    error: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Reports that a decode worker has the whole prompt and continues alone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Reports that the worker cannot continue a request and has dropped it.

    is_final: whether other workers could not continue it either
    """

    request_id: str
    error: EPDError
    is_final: bool


@dataclass(frozen=True, slots=True)
class SpanDone:
    """A piece of work on a request, for its timeline.

    service_s: seconds of work on it since its last span there. queued_s: seconds it had waited before.
    """

    request_id: str
    span: StageSpan
    service_s: float
    queued_s: float = 0.0


WorkerEvent = (
    Admitted | EmbeddingsReused | Grant | GroupsArrived | GroupFailed | HandedOver | RequestFailed | SpanDone
)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker. Usages: shares of its memory in use, None if it has no such memory.

    seq_usage: answers it is generating, as a share of the most it can generate at once, max_num_seqs
    counters: totals since its start, under names as in `ServiceStatus.counters`
    spooled_bytes, num_downloads: at a media worker, files of requests in flight and downloads in progress
    transports: the way that its data last took to other workers, by name
    stages: samples from which its load is estimated, for each of its roles
    work: what it has of everybody, in the units in which a router counts; None if it does not say
    media: the same of a media worker
    memory: what it has on its device; None if it has no stage
    walls: around its processes that read media, by `epd.video.children.walls`; None if it has none
    """

    num_waiting: int = 0
    num_running: int = 0
    kv_usage: float | None = None
    encoder_cache_usage: float | None = None
    num_role_switches: int = 0
    seq_usage: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    spooled_bytes: int = 0
    num_downloads: int = 0
    transports: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[Stage, StageSample] = field(default_factory=dict)
    work: InFlight | None = None
    media: MediaSample | None = None
    memory: MemoryUse | None = None
    walls: tuple[str, ...] | None = None
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The results of a worker's last steps: events in order, then tokens in order."""

    worker: str
    events: tuple[WorkerEvent, ...] = ()
    outputs: tuple[TokenOutput, ...] = ()
    load: WorkerLoad = field(default_factory=WorkerLoad)


def by_owner(report: WorkerReport, owners: Collection[str]) -> dict[str, WorkerReport]:
    """Splits a report into one for each owner: its own events and tokens, and the load.

    `GroupsArrived` goes to each, as any may have sent the group. What belongs to others is dropped.
    owners: those that follow the worker; one without events gets just the load
    """
    events: dict[str, list[WorkerEvent]] = {owner: [] for owner in owners}
    outputs: dict[str, list[TokenOutput]] = {owner: [] for owner in owners}
    for event in report.events:
        to = owners if isinstance(event, GroupsArrived) else {owner_of(event.request_id)}
        for owner in events.keys() & to:
            events[owner].append(event)
    for output in report.outputs:
        owner = owner_of(output.request_id)
        if owner in outputs:
            outputs[owner].append(output)
    return {
        owner: replace(report, events=tuple(events[owner]), outputs=tuple(outputs[owner])) for owner in owners
    }
