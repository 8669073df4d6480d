"""Defines the messages by which workers change roles.

A worker that changes gets, in this order: Offload, AskRemaining, Pause and Move, Onload. `SetRoles` ends it
at any point, with the new roles or the former ones. `StagesClosed` then goes to all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.prefix_cache import TokenIdentity
from epd.serve_app.messages import Message
from epd.topology import Stage
from epd.transfer.connectors import KVTicket


@dataclass(frozen=True, slots=True)
class StagesClosed(Message[None]):
    """Announces that worker `name` has closed these stages: data in transit to them will not be taken.

    incarnation: of that worker, as in `Reserve`
    """

    name: str
    stages: frozenset[Stage]
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class SetRoles(Message[None]):
    """Restricts new work to these roles; the worker completes what it has. lent: see `WorkerInfo`."""

    roles: frozenset[Stage]
    lent: frozenset[Stage] = frozenset()


@dataclass(frozen=True, slots=True)
class Offload(Message[None]):
    """Restricts new work to these roles until `SetRoles`, without closing any stage.

    leaving: stages that the worker gives up; see `WorkerInfo.leaving`
    """

    roles: frozenset[Stage]
    leaving: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The work that stages still have, of all orchestrators.

    is_over: no work of any is left, and their memory is not being read
    waiting: not begun: requests at a prefill stage, transfers at an encode stage
    arriving: requests reserved at a decode stage
    running: all others, except those in transit to another decode worker
    """

    is_over: bool
    waiting: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AskRemaining(Message[RemainingWork]):
    """Asks for the work that these stages still have."""

    stages: frozenset[Stage]


@dataclass(frozen=True, slots=True)
class Pause(Message[tuple[TokenIdentity, int] | None]):
    """Pauses a request, to move it to another decode worker.

    The reply: its tokens to be sent, and for how many more it needs room there.

    None: it is not here, or cannot be moved now and continues.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Move(Message[bool]):
    """Sends a paused request to reserved room. If it is not taken there, it continues here.

    Reply False: it is no longer here.
    incarnation: of the decode worker with the room, as in `Reserve`
    """

    request_id: str
    ticket: KVTicket
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Resume(Message[None]):
    """Continues a paused request that no other worker has room for. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class OnloadTimes:
    """Seconds spent starting stages: weights_s on loading their weights, the rest on pools and queues."""

    weights_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Onload(Message[OnloadTimes]):
    """Starts the stages of these roles beside the present ones, without taking work before `SetRoles`."""

    roles: frozenset[Stage]
