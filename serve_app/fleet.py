"""Defines the workers as the orchestrator sees them: names, roles, messages to one, reports from all.

A fleet starts its workers, reports when one is lost - dead, or killed after being silent for too long - and
restarts it under its old name without any of its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from epd.errors import EPDError, UnavailableError
from epd.serve_app.messages import Message, ReplyT, WorkerLoad, WorkerReport
from epd.serve_app.role_messages import Offload, SetRoles
from epd.serve_app.service_status import WorkerStatus
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage, role_letters

logger = logging.getLogger(__name__)

_NUM_SURE_TRIES = 3
_SURE_PAUSE_S = 0.1
_ALL_ROLES: frozenset[Stage] = frozenset({"video", "encode", "prefill", "decode"})
# A NumPy array, or a fleet's own handle to one elsewhere. The orchestrator only passes it on.
Bulk = object


class WorkerLostError(UnavailableError):
    """Raised when a worker is lost, or was when the message arrived: the message may have been handled."""


class FramesLostError(UnavailableError):
    """Raised by a worker for frames that are gone with the media worker that read them: read them again."""


def state_after(info: WorkerInfo, message: Message[Any]) -> WorkerInfo:
    """Returns a worker's state after it has been sent a message, as the next message will find it."""
    match message:
        case Offload():
            return replace(info, closed=info.roles - message.roles, leaving=message.leaving)
        case SetRoles():
            nothing = frozenset[Stage]()
            return replace(info, roles=message.roles, closed=nothing, leaving=nothing, lent=message.lent)
    return info


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Reports that all state of the worker is lost. No report of that incarnation follows.

    is_planned: it has drained and left for good, so that its loss is nobody's fault
    """

    name: str
    reason: str
    incarnation: int
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """Reports that a worker is alive without state, for the first time or again."""

    name: str


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """Reports that the roles of a worker have changed, or which of them it closes or leaves.

    Not needed for changes that the orchestrator itself has sent to the worker.
    """

    name: str


@dataclass(frozen=True, slots=True)
class FleetBroken:
    """Reports that a bug has ended a loop of the fleet for good: its workers are no longer watched."""

    loop: str


FleetEvent = WorkerReport | WorkerLost | WorkerBack | WorkerChanged | FleetBroken


class Fleet(Protocol):
    """Runs workers. Used from one event loop. A worker handles messages in the order they are sent.

    Several fleets, one for each orchestrator, may give access to the same workers: then reports hold the
    events and tokens of that orchestrator, see `epd.serve_app.messages.by_owner`, and the load of all. A
    fleet announces a loss before it sends anything to the next incarnation, and sends nothing to the lost
    one.
    """

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        """Returns all workers by name, including lost ones. They come and go while the fleet runs."""
        ...

    async def start(self) -> None:
        """Starts every worker and returns when all are ready. Raises EPDError if one cannot start."""
        ...

    async def close(self) -> None:
        """Ends every worker and frees what they shared. May be called again."""
        ...

    async def send(
        self, stage: Stage, target: str, message: Message[ReplyT], bulk: Bulk | None = None
    ) -> ReplyT:
        """Gives a message to the worker `target`, for its role `stage`, and waits for the reply.

        Once started it is delivered, even if the caller is cancelled while it waits.
        Raises what the worker raised, an EPDError, and WorkerLostError, also for a name that no worker has.
        If the worker was alive when the message was sent, its `WorkerLost` follows.
        """
        ...

    async def fetch(self, stage: Stage, target: str, message: Message[ReplyT]) -> tuple[ReplyT, Bulk]:
        """Sends as `send`, for a reply with bulk: returns when both are complete, the bulk left in place."""
        ...

    def events(self) -> AsyncIterator[FleetEvent]:
        """Yields reports, each worker's in order. For one consumer; ends when the fleet is closed."""
        ...


async def send_surely(fleet: Fleet, stage: Stage, target: str, message: Message[ReplyT]) -> ReplyT | None:
    """Sends a message that must take effect, a few times if a bug makes the worker fail.

    Returns None if the worker is lost, has no such role, or fails each time, which is logged.
    """
    for _ in range(_NUM_SURE_TRIES):
        try:
            return await fleet.send(stage, target, message)
        except UnavailableError:
            return None  # it is lost, with all its state
        except EPDError:
            logger.exception("worker %s failed on a %s", target, type(message).__name__)
            await asyncio.sleep(_SURE_PAUSE_S)
    return None


def has_all_roles(infos: Collection[WorkerInfo]) -> bool:
    """Returns whether every role that an answer needs has a live worker."""
    return {stage for info in infos if info.is_alive for stage in info.roles} >= _ALL_ROLES


def worker_statuses(
    infos: Collection[WorkerInfo], loads: Mapping[str, WorkerLoad], switching: Collection[str]
) -> tuple[WorkerStatus, ...]:
    """Returns the status of each worker. loads: their last reports. switching: those being switched here."""
    return tuple(_status(info, loads.get(info.name, WorkerLoad()), switching) for info in infos)


def _status(info: WorkerInfo, load: WorkerLoad, switching: Collection[str]) -> WorkerStatus:
    return WorkerStatus(
        name=info.name,
        roles=role_letters(info.roles),
        is_alive=info.is_alive,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        kv_usage=load.kv_usage,
        encoder_cache_usage=load.encoder_cache_usage,
        num_role_switches=load.num_role_switches,
        is_switching=info.name in switching or bool(info.leaving),
        transports=load.transports,
        memory=load.memory,
        walls=load.walls,
    )
