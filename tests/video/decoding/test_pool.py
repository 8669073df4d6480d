"""The pool: most urgent first, one step at a time, parked tasks hold no thread."""

from __future__ import annotations

import threading

from epd.video.decoding.pool import DecodePool, StepResult


class Recorded:
    """A task of some steps that writes its name at each."""

    def __init__(self, name: str, deadline_s: float, steps: list[StepResult], log: list[str]) -> None:
        self.name, self.deadline_s = name, deadline_s
        self._steps, self._log = steps, log
        self.finished = threading.Event()

    def step(self) -> StepResult:
        self._log.append(self.name)
        result = self._steps.pop(0)
        if result != "again":
            self.finished.set()
        return result


def test_the_most_urgent_task_passes_between_two_steps_of_another() -> None:
    log: list[str] = []
    pool = DecodePool(1)
    urgent = Recorded("urgent", 1.0, ["done"], log)
    leisurely = Recorded("leisurely", 3.0, ["done"], log)

    class Slow(Recorded):
        def step(self) -> StepResult:
            if not log:
                pool.submit(leisurely)
                pool.submit(urgent)
            return super().step()

    slow = Slow("slow", 2.0, ["again", "again", "done"], log)
    pool.submit(slow)
    assert leisurely.finished.wait(60)
    pool.close()
    assert log == ["slow", "urgent", "slow", "slow", "leisurely"]


def test_a_parked_task_goes_on_when_it_is_submitted_again() -> None:
    log: list[str] = []
    pool = DecodePool(1)
    parked = Recorded("parked", 1.0, ["parked", "done"], log)
    pool.submit(parked)
    assert parked.finished.wait(60)
    other = Recorded("other", 2.0, ["done"], log)
    pool.submit(other)
    assert other.finished.wait(60)
    parked.finished.clear()
    pool.submit(parked)
    assert parked.finished.wait(60)
    pool.close()
    assert log == ["parked", "other", "parked"]


def test_as_many_threads_as_waiting_tasks_and_no_more_than_allowed() -> None:
    pool = DecodePool(3)
    barrier = threading.Barrier(3, timeout=60)

    class Meeting(Recorded):
        def step(self) -> StepResult:
            barrier.wait()
            return super().step()

    tasks = [Meeting(str(i), 0.0, ["done"], []) for i in range(3)]
    for task in tasks:
        pool.submit(task)
    assert all(task.finished.wait(60) for task in tasks)
    pool.close()
