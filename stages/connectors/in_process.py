"""Workers of one process: mailboxes are queues, and pools are reached directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from epd.connectors import Offer
from stages.connectors.mailbox import MailboxConnector, Message
from stages.encoder_pool import EncoderPool


class InProcessHub:
    """Knows the workers of this process by name."""

    def __init__(self) -> None:
        self._ends: dict[str, InProcessConnector] = {}

    def connect(self, name: str, pool: EncoderPool) -> InProcessConnector:
        """A worker's end; a worker of the same name that was there before is gone."""
        self._ends[name] = InProcessConnector(name, pool, self)
        return self._ends[name]

    def disconnect(self, name: str) -> None:
        """The worker is gone, with its mail and its pool."""
        del self._ends[name]

    def find(self, name: str) -> InProcessConnector | None:
        return self._ends.get(name)


class InProcessConnector(MailboxConnector):
    """Made by `InProcessHub.connect`."""

    def __init__(self, name: str, pool: EncoderPool, hub: InProcessHub) -> None:
        super().__init__(name, pool)
        self.mail: deque[Message] = deque()
        self._hub = hub

    def put(self, name: str, message: Message) -> None:
        end = self._hub.find(name)
        if end is not None:
            end.mail.append(message)

    def messages(self) -> Iterator[Message]:
        while self.mail:
            yield self.mail.popleft()

    def pool_of(self, offer: Offer) -> EncoderPool | None:
        end = self._hub.find(offer.sender)
        return end.pool if end is not None else None
