"""Connects workers of one process: mailboxes are queues, and pools are reached directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from epd.stages.connectors.mailbox import MailboxConnector, Message, Pool
from epd.transfer.connectors import Offer, SourceT, TicketT


class InProcessHub:
    """Registers the workers of this process by name. One that takes embeddings and KV has a hub for each."""

    def __init__(self) -> None:
        self._ends: dict[str, InProcessConnector[Any, Any]] = {}
        self._num_connected = 0

    def connect(
        self, name: str, pool: Pool[TicketT, SourceT], on_message: Callable[[], None] | None = None
    ) -> InProcessConnector[TicketT, SourceT]:
        """Creates a worker's end, which replaces a worker of the same name.

        on_message: called by the sender of each message, for workers in threads that sleep.
        """
        self._num_connected += 1
        end = InProcessConnector(name, pool, f"{name} {self._num_connected}", self, on_message)
        self._ends[name] = end
        return end

    def disconnect(self, name: str) -> None:
        """Removes the worker with its messages and its pool. Unknown names are ignored."""
        self._ends.pop(name, None)

    def find(self, name: str) -> InProcessConnector[Any, Any] | None:
        return self._ends.get(name)


class InProcessConnector(MailboxConnector[TicketT, SourceT]):
    """Connects one worker; created by `InProcessHub.connect`."""

    def __init__(
        self,
        name: str,
        pool: Pool[TicketT, SourceT],
        pool_id: str,
        hub: InProcessHub,
        on_message: Callable[[], None] | None,
    ) -> None:
        super().__init__(name, pool, pool_id)
        self.inbox: deque[Message] = deque()
        self.on_message = on_message
        self.receivers: set[str] = set()  # that anything was offered to
        self._hub = hub

    def offer(self, receiver: str, offer: Offer[SourceT]) -> None:
        self.receivers.add(receiver)
        super().offer(receiver, offer)

    def put(self, name: str, message: Message) -> None:
        end = self._hub.find(name)
        if end is not None:
            end.inbox.append(message)
            if end.on_message is not None:
                end.on_message()

    def messages(self) -> Iterator[Message]:
        while self.inbox:
            yield self.inbox.popleft()

    def pool_of(self, offer: Offer[SourceT]) -> Pool[TicketT, SourceT] | None:
        end = self._hub.find(offer.sender)
        return end.pool if end is not None and end.pool_id == offer.pool_id else None
