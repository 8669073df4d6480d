"""A bounded queue makes its producer wait; a clock counts the time something is under way."""

from __future__ import annotations

import threading
import time

import pytest

from epd.transfer.bounded_queue import BoundedQueue, QueueClosed


def test_a_queue_holds_so_much_and_then_its_producer_waits() -> None:
    queue: BoundedQueue[int] = BoundedQueue(10)
    put: list[int] = []

    def produce() -> None:
        for number in range(5):
            queue.put(number, 4)
            put.append(number)
        queue.end()

    producer = threading.Thread(target=produce)
    producer.start()
    while len(put) < 2:
        time.sleep(0.001)
    time.sleep(0.05)  # in which it would put a third
    assert put == [0, 1]
    assert list(queue) == [0, 1, 2, 3, 4]
    producer.join()
    with pytest.raises(QueueClosed):
        queue.get()


def test_what_is_larger_than_the_queue_goes_in_alone() -> None:
    queue: BoundedQueue[str] = BoundedQueue(10)
    queue.put("huge", 1000)
    assert queue.get() == "huge"
    assert queue.get(0.01) is None


def test_closing_wakes_who_waits_to_put_and_drops_the_rest() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    queue.put(1, 1)
    closer = threading.Timer(0.05, queue.close)
    closer.start()
    with pytest.raises(QueueClosed):
        queue.put(2, 1)
    assert list(queue) == []
    closer.join()
