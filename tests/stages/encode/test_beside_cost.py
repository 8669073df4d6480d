"""The measure of how much encoding and decoding slow each other, by a clock of its own."""

from __future__ import annotations

import threading

import pytest
import torch

from epd.stages.encode import beside
from epd.stages.encode.beside import BesideThread, T

NUM_STEPS = 10
SOON_S = 60.0


class Worker:
    """Encodes in 80 ms, steps in 10 ms; beside a batch, into which 10 fit, a step takes as long as said."""

    def __init__(self, step_beside_s: float) -> None:
        self.now_s = 0.0
        self._step_beside_s = step_beside_s
        self._num_left = 0
        self._is_begun, self._is_encoded = threading.Event(), threading.Event()
        self._is_over = threading.Event()

    def encode(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.now_s += 0.08
            self._num_left = NUM_STEPS  # the next one is beside steps
            return
        self._is_begun.set()
        assert self._is_encoded.wait(SOON_S)
        self._is_encoded.clear()

    def step(self) -> None:
        if not self._num_left:
            self.now_s += 0.01
            return
        assert self._is_begun.wait(SOON_S)
        self._num_left -= 1
        self.now_s += self._step_beside_s
        if not self._num_left:
            self._is_begun.clear()
            self._is_encoded.set()
            assert self._is_over.wait(SOON_S)  # so that the end of the batch is seen before another step
            self._is_over.clear()

    def lane(self) -> type[BesideThread[T]]:
        """Returns the thread that tells this worker when a batch is over."""
        wake = self._is_over.set

        class Lane(BesideThread[T]):
            def __init__(self, name: str, device: torch.device, _wake: object) -> None:
                super().__init__(name, device, wake)

        return Lane


@pytest.mark.parametrize(("step_beside_s", "factor"), [(0.015, (150 / 80 + 1.5) / 2), (0.001, 1.0)])
def test_both_take_as_many_times_as_long_as_the_mean_of_what_is_measured(
    step_beside_s: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(step_beside_s)
    monkeypatch.setattr(beside, "BesideThread", worker.lane())
    found = beside.beside_of(worker.encode, worker.step, torch.device("cpu"), 3, lambda: worker.now_s)
    assert found == pytest.approx(factor)
