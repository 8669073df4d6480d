"""What the orchestrator and the workers say to each other. Everything here can be pickled.

    orchestrator --Message-->  worker   answered by a reply of the type that the message names
                 <--WorkerReport--      tokens and events, several per report, whenever there are any

Bulk data, uint8 frames, travels beside a message as a NumPy array or as a fleet's handle on one.
A request is known to workers by an id of its own for each attempt, so that what comes late of an attempt
that was given up is told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from encoders.groups import MediaGroup
from epd.control.elasticity import StageSample
from epd.errors import EPDError
from epd.kv.kv_identity import TokenIdentity
from epd.sampling_params import SamplingParams
from epd.topology import Stage
from epd.transfer.connectors import KVTicket, Ticket
from epd.transfer.reception import Grant
from serve_app.service import StageSpan
from stages.engine.generation import GenerateRequest, TokenOutput
from video import FileIdentity

ReplyT = TypeVar("ReplyT")


def endpoint(worker: str, stage: Stage) -> str:
    """The name of a worker's end of a transport: each of its roles has its own."""
    return f"{worker}.{stage}"


class Message(Generic[ReplyT]):
    """Something for a worker, answered by a ReplyT, or by an EPDError that is raised at the sender."""

    __slots__ = ()


# To a worker that decodes video


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """A video and the frames of it that a stream gives, in groups.

    times_s: of all frames, in order. group_sizes: frames of each group. size: (height, width) of the frames.
    name: how errors call the source, which never show its path. identity: what the source must still be.
    """

    source: Path
    times_s: tuple[float, ...]
    group_sizes: tuple[int, ...]
    size: tuple[int, int]
    name: str = "the video"
    identity: FileIdentity | None = None

    def groups(self, start: int, stop: int | None = None) -> DecodeOrder:
        """Groups [start, stop) of it, by default to the end."""
        sizes = self.group_sizes[start:stop]
        first = sum(self.group_sizes[:start])
        return replace(self, times_s=self.times_s[first : first + sum(sizes)], group_sizes=sizes)


@dataclass(frozen=True, slots=True)
class ReadFrames(Message[int]):
    """Asks for the frames of one group, which is the bulk of the reply: uint8 [N, h, w, 3].

    The reply is the number of them that could not be decoded and show a neighbour.

    stream_id: one for each item of a request; asked in order, frames are decoded ahead.
    index: the group that is wanted.
    order: what the stream is; None in all messages but the first.
    """

    stream_id: str
    index: int
    order: DecodeOrder | None = None


@dataclass(frozen=True, slots=True)
class CloseStream(Message[None]):
    """No more frames are wanted. Unknown streams are ignored."""

    stream_id: str


# To an encode worker


@dataclass(frozen=True, slots=True)
class EncodeGroup(Message[bool]):
    """Asks for a group to be encoded for a ticket; its frames come as bulk, or not at all.

    The reply tells whether it was taken; without frames, it is refused unless it is in the encoder's cache.
    """

    request_id: str
    ticket: Ticket
    group: MediaGroup


@dataclass(frozen=True, slots=True)
class CancelTickets(Message[None]):
    """Nobody wants these any more."""

    transfer_ids: tuple[str, ...]


# To a prefill worker


@dataclass(frozen=True, slots=True)
class Prefill(Message[bool]):
    """A request with the groups of all its media. The reply tells whether there was room for it.

    ticket: at the decode worker that goes on with it; None where the roles are merged.
    """

    request: GenerateRequest
    groups: tuple[MediaGroup, ...]
    ticket: KVTicket | None


@dataclass(frozen=True, slots=True)
class Redirect(Message[bool]):
    """Hands a request over to another decode worker. False: it is not there any more, prefill it again."""

    request_id: str
    ticket: KVTicket


@dataclass(frozen=True, slots=True)
class Reissue(Message[None]):
    """The encoder of these tickets is gone or has failed: groups still wanted are granted anew."""

    transfer_ids: tuple[str, ...]


# To a decode worker


@dataclass(frozen=True, slots=True)
class Reserve(Message[KVTicket | None]):
    """Room for a request that the end point `sender` will send; None when there is none now."""

    request_id: str
    sender: str
    identity: TokenIdentity
    sampling: SamplingParams


# To any worker


@dataclass(frozen=True, slots=True)
class Abort(Message[None]):
    """Forgets requests, whatever state they are in. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerLost(Message[tuple[str, ...]]):
    """The worker `name` is gone with all its state: nothing more comes from it or is taken by it.

    The reply names requests that are lost by that here: at a prefill worker those it can hand over to
    another (`Redirect`), at a decode worker those that had not arrived whole, which it has forgotten.
    """

    name: str


@dataclass(frozen=True, slots=True)
class StagesClosed(Message[None]):
    """The worker `name` has none of these stages any more: what is on its way to them is taken by nobody."""

    name: str
    stages: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class SetRoles(Message[None]):
    """From now on the worker takes work of these roles only; what it has is brought to its end."""

    roles: frozenset[Stage]


# To a worker whose roles are being changed, in this order; `SetRoles`, new or former, ends it at any point


@dataclass(frozen=True, slots=True)
class Offload(Message[None]):
    """Until `SetRoles` it takes work of these roles only, and lets go of no stage."""

    roles: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What stages still have. is_over: nothing, and nobody reads their memory.

    waiting: not begun: requests at a prefill stage, transfers at an encode stage. arriving: requests reserved
    at a decode stage. running: all others, but for those that are on their way to another decode worker.
    """

    is_over: bool
    waiting: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskRemaining(Message[RemainingWork]):
    """What these stages still have."""

    stages: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class Pause(Message[TokenIdentity | None]):
    """Stops an answer, to be moved to another decode worker. The reply: its tokens that are to be sent.

    None: it is not here, or cannot be moved now, and goes on.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Move(Message[bool]):
    """Sends a paused request to where there is room for it. If that does not take it, it goes on here.

    False: it is not here any more.
    """

    request_id: str
    ticket: KVTicket


@dataclass(frozen=True, slots=True)
class Resume(Message[None]):
    """Goes on with a paused request that nobody else has room for. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class OnloadTimes:
    """Seconds of bringing up stages: weights_s of finding their weights, the rest is pools and queues."""

    weights_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Onload(Message[OnloadTimes]):
    """Brings up the stages of these roles beside those it has; takes no work for them before `SetRoles`."""

    roles: frozenset[Stage]


# From workers


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request has its blocks at the prefill worker. num_cached: prompt tokens that were there already."""

    request_id: str
    num_cached: int


@dataclass(frozen=True, slots=True)
class GroupsArrived:
    """The groups of these tickets are at the prefill worker; their encoders are done with them."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """An encoder could not make a group of a request: `Reissue` its ticket or abort the request."""

    request_id: str
    group: int
    transfer_id: str
    error: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A decode worker has the whole prompt and goes on with it alone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The worker cannot go on with a request, and has forgotten it.

    is_final: whether another worker could not either.
    """

    request_id: str
    error: EPDError
    is_final: bool


@dataclass(frozen=True, slots=True)
class SpanDone:
    """A piece of work on a request, for its timeline.

    service_s: seconds of work on it since its last span there. queued_s: how long it had waited for it.
    """

    request_id: str
    span: StageSpan
    service_s: float
    queued_s: float = 0.0


WorkerEvent = Admitted | Grant | GroupsArrived | GroupFailed | HandedOver | RequestFailed | SpanDone


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How a worker is. Usages: shares of its memory in use, None where it has none.

    seat_usage: share of the answers that it makes at once at most. counters: totals since its start, under
    names as in `ServiceStatus.counters`. stages: what its load is
    estimated from, for each role that it does.
    """

    num_waiting: int = 0
    num_running: int = 0
    kv_usage: float | None = None
    encoder_cache_usage: float | None = None
    num_role_switches: int = 0
    seat_usage: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[Stage, StageSample] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What has come of a worker's last steps: events in order, then tokens in order."""

    worker: str
    events: tuple[WorkerEvent, ...] = ()
    outputs: tuple[TokenOutput, ...] = ()
    load: WorkerLoad = field(default_factory=WorkerLoad)
