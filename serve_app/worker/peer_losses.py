"""Remembers which other workers are lost: each loss is handled once, and others may still ask about it.

    d0, incarnation 1   lost: handled, the reply kept   <- asked again by another orchestrator: the same reply
    d0, incarnation 2   its messages and rooms have nothing to do with the loss of 1

A message that names incarnation 2 shows that 1 is lost; one that names 1 after that comes too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.serve_app.messages import EncodeGroup, Message, Prefill, Redirect, Reserve, worker_of
from epd.serve_app.role_messages import Move, StagesClosed

_MAX_KEPT = 256  # losses of which the reply is kept


@dataclass(frozen=True, slots=True)
class NamedPeer:
    """Names another worker in one of its incarnations, from 1; 0 if the sender does not know it."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Loss:
    peer: NamedPeer
    request_ids: tuple[str, ...]


class PeerLosses:
    """Handles the losses of other workers, each once.

    drop: drops what one worker has of another, by name, and returns the lost requests
    """

    def __init__(self, drop: Callable[[str], tuple[str, ...]]) -> None:
        self._drop = drop
        self._latest: dict[str, int] = {}  # of each name, the last incarnation that is lost
        self._kept: deque[_Loss] = deque(maxlen=_MAX_KEPT)

    def lose(self, peer: NamedPeer) -> tuple[str, ...]:
        """Handles a loss, that of earlier incarnations included. Returns the same requests each time."""
        if not self.is_lost(peer):
            request_ids = self._drop(peer.name)
            self._kept.append(_Loss(peer, request_ids))
            self._latest[peer.name] = peer.incarnation
        return next((each.request_ids for each in self._kept if _covers(each.peer, peer)), ())

    def is_lost(self, peer: NamedPeer) -> bool:
        """Returns whether the loss of the peer has been handled."""
        return 0 < peer.incarnation <= self._latest.get(peer.name, 0)

    def meet(self, peer: NamedPeer) -> bool:
        """Handles the loss of earlier incarnations. Returns whether the peer itself is not lost."""
        if peer.incarnation > 1:
            self.lose(NamedPeer(peer.name, peer.incarnation - 1))
        return not self.is_lost(peer)


def _covers(handled: NamedPeer, asked: NamedPeer) -> bool:
    return handled.name == asked.name and handled.incarnation >= asked.incarnation


def named_peer(message: Message[Any]) -> NamedPeer | None:
    """Returns the other worker that a message refers to; None if there is none."""
    match message:
        case Reserve():
            return NamedPeer(worker_of(message.sender), message.incarnation)
        case Prefill() | Redirect() | Move() | EncodeGroup():
            ticket = message.ticket
            return None if ticket is None else NamedPeer(worker_of(ticket.receiver), message.incarnation)
        case StagesClosed():
            return NamedPeer(message.name, message.incarnation)
    return None


def refusal(message: Message[Any]) -> Any:
    """Returns the reply to a message that names a lost worker."""
    match message:
        case Reserve() | StagesClosed():
            return None
        case EncodeGroup():
            return True  # nobody waits for the group
    return False
