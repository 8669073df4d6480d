"""The workers as the orchestrator sees them: names, roles, messages to one of them, news from all of them.

A fleet starts its workers, tells when one is lost - dead, or silent for too long, then it is killed - and
starts it again under its old name with all its state gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from epd.errors import EPDError, UnavailableError
from epd.topology import Stage
from serve_app.messages import Message, Offload, ReplyT, SetRoles, WorkerReport

logger = logging.getLogger(__name__)

_NUM_SURE_TRIES = 3
_SURE_PAUSE_S = 0.1
# A NumPy array, or a fleet's own handle on one that lies elsewhere. The orchestrator only passes it on.
Bulk = object


class WorkerLostError(UnavailableError):
    """The worker is gone, or was when the message came: nobody knows whether it was acted upon."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it is now. incarnation: how often it has been started, from 1.

    closed: roles that it gives up, or takes up anew, and gets no work for meanwhile.
    """

    name: str
    roles: frozenset[Stage]
    is_alive: bool = True
    incarnation: int = 1
    closed: frozenset[Stage] = frozenset()

    def takes(self, stage: Stage) -> bool:
        """Whether it can be given work for the role."""
        return self.is_alive and stage in self.roles and stage not in self.closed

    def told(self, message: Message[Any]) -> WorkerInfo:
        """What it is once it has been sent the message: the next one will find it so."""
        match message:
            case Offload():
                return replace(self, closed=self.roles - message.roles)
            case SetRoles():
                return replace(self, roles=message.roles, closed=frozenset())
        return self


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """All state of the worker is gone. No report of that incarnation comes after this."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """The worker is there, empty, with the roles that it had."""

    name: str


@dataclass(frozen=True, slots=True)
class FleetBroken:
    """A loop of the fleet has ended for good, by a bug: it does not look after its workers any more."""

    loop: str


FleetEvent = WorkerReport | WorkerLost | WorkerBack | FleetBroken


class Fleet(Protocol):
    """Used from one event loop. Messages to one worker are handled in the order in which they are sent."""

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        """All workers by name, lost ones too."""
        ...

    async def start(self) -> None:
        """Returns when every worker is ready. Raises EPDError when one cannot start."""
        ...

    async def close(self) -> None:
        """Ends every worker and frees what they shared. May be called again."""
        ...

    async def send(
        self, stage: Stage, target: str, message: Message[ReplyT], bulk: Bulk | None = None
    ) -> ReplyT:
        """Gives a message to the worker `target`, for its role `stage`, and waits for the reply.

        Once started it is delivered, even if the caller is cancelled while it waits.
        Raises what the worker raised, an EPDError, and WorkerLostError.
        """
        ...

    async def fetch(self, stage: Stage, target: str, message: Message[ReplyT]) -> tuple[ReplyT, Bulk]:
        """As `send`, for a message whose reply has bulk: returns when both are there, the bulk unmoved."""
        ...

    def events(self) -> AsyncIterator[FleetEvent]:
        """Reports from workers, each worker's in order. For one consumer; ends when the fleet is closed."""
        ...


async def send_surely(fleet: Fleet, stage: Stage, target: str, message: Message[ReplyT]) -> ReplyT | None:
    """Sends what must not be left undone, a few times if a bug keeps the worker from it.

    Returns None when the worker is gone, has no such role, or fails each time, which is logged.
    """
    for _ in range(_NUM_SURE_TRIES):
        try:
            return await fleet.send(stage, target, message)
        except UnavailableError:
            return None  # it is gone, and all it had with it
        except EPDError:
            logger.exception("worker %s failed on a %s", target, type(message).__name__)
            await asyncio.sleep(_SURE_PAUSE_S)
    return None
