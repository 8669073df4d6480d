"""Delivers messages between workers over a transport that may lose, repeat or reorder them. No I/O.

    push  ->  due: number, message  -- may be lost -->  take  ->  messages in order, each once
              kept until acknowledged  <-- may be lost --  next: all numbers below have been taken

A channel connects one epoch of a worker with one epoch of another. Time is passed in, seconds on any one
clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Kept(Generic[T]):
    """Holds a message that is not acknowledged. due_s: when it is sent next."""

    message: T
    due_s: float = float("-inf")
    num_sent: int = 0


class OutgoingChannel(Generic[T]):
    """Sends messages. They are numbered from 0, without gaps."""

    def __init__(self, *, max_in_flight: int = 64, resend_s: float = 1.0, max_resend_s: float = 8.0) -> None:
        """Begins empty.

        max_in_flight: messages that are sent before the first of them is acknowledged.
        resend_s: until one is sent again, twice as long each time, up to max_resend_s.
        """
        self._max_in_flight = max_in_flight
        self._resend_s = resend_s
        self._max_resend_s = max_resend_s
        self._kept: dict[int, _Kept[T]] = {}  # in order of their numbers
        self._num_pushed = 0

    def __len__(self) -> int:
        """Returns how many messages are not acknowledged."""
        return len(self._kept)

    def push(self, message: T) -> None:
        """Takes a message to be sent."""
        self._kept[self._num_pushed] = _Kept(message)
        self._num_pushed += 1

    def due(self, now_s: float) -> list[tuple[int, T]]:
        """Returns the messages to be sent now, with their numbers; they count as sent."""
        return list(self._due(now_s))

    def _due(self, now_s: float) -> Iterator[tuple[int, T]]:
        for position, (number, kept) in enumerate(self._kept.items()):
            if position >= self._max_in_flight:
                return
            if kept.due_s <= now_s:
                kept.due_s = now_s + min(self._resend_s * 2**kept.num_sent, self._max_resend_s)
                kept.num_sent += 1
                yield number, kept.message

    def acknowledge(self, next_number: int) -> None:
        """Drops all numbers below, which the receiver has taken. Late or repeated calls are ignored."""
        for number in [number for number in self._kept if number < next_number]:
            del self._kept[number]


class IncomingChannel(Generic[T]):
    """Receives messages. next: the acknowledgement, all numbers below have been taken."""

    def __init__(self, *, max_early: int = 64) -> None:
        """Begins empty. max_early: messages that are kept until those before them have come."""
        self.next = 0
        self._max_early = max_early
        self._early: dict[int, T] = {}

    def take(self, number: int, message: T) -> list[T]:
        """Returns the messages that can be read now, in order; early and repeated ones give none."""
        if self.next <= number < self.next + self._max_early:
            self._early.setdefault(number, message)
        taken = []
        while self.next in self._early:
            taken.append(self._early.pop(self.next))
            self.next += 1
        return taken
