"""Queues that hold so much and no more; how busy stages were, in few samples."""

from __future__ import annotations

import threading
import time

import pytest

from epd.batch.utilisation import Utilisation
from epd.transfer.bounded_queue import BoundedQueue, BusyClock, QueueClosed


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
    time.sleep(0.05)
    assert put == [0, 1]
    assert list(queue) == [0, 1, 2, 3, 4]
    producer.join(5)
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


def test_a_clock_counts_what_is_under_way() -> None:
    clock = BusyClock()
    assert clock.total_s == 0
    clock.start()
    time.sleep(0.02)
    assert clock.total_s >= 0.02
    clock.stop()
    stopped_s = clock.total_s
    time.sleep(0.02)
    assert clock.total_s == stopped_s


def test_shares_count_from_the_first_answer_on() -> None:
    utilisation = Utilisation()
    assert utilisation.shares(1.0, {"decode": 1.0}) == {}
    utilisation.mark_warm(10.0, {"decode": 5.0})
    utilisation.mark_warm(12.0, {"decode": 7.0})
    assert utilisation.shares(20.0, {"decode": 13.0, "encode": 1.0}) == {"decode": 0.8, "encode": 0.1}


def test_samples_stay_few_and_add_up_to_all_that_was_done() -> None:
    utilisation = Utilisation(max_samples=16)
    for tick in range(1001):
        utilisation.add(tick / 10, {"decode": tick / 20})
    assert len(utilisation.samples) <= 16
    steps = utilisation.steps()
    assert all(shares["decode"] == pytest.approx(0.5) for _, shares in steps)
    assert utilisation.samples[0].time_s == 0
    assert utilisation.samples[-1].time_s > 80
    assert utilisation.recent(100.0, {"decode": 50.0})["decode"] == pytest.approx(0.5)
