"""Runs an encode stage's calls of the tower: in the worker's turn, or beside it in a thread of their own.

    worker's thread   | turn: start --+ | decodes | decodes | turn: finish, commit, offer
    encoding thread                   +--> tower, pool ... wakes the worker

On a GPU the thread has a stream of its own. What it runs waits for all that the worker had launched before,
and is told to be over once the device has done it: nothing launched later can see half of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from statistics import quantiles
from typing import Any, Generic, TypeVar

import torch

from epd.profiles.measuring import Action, timed
from epd.stages.placement import use_own_threads

_JOIN_S = 5.0  # a batch takes less, unless it hangs

T = TypeVar("T")
Work = Callable[[], T]


class InTurn(Generic[T]):
    """Runs work when it is started."""

    def __init__(self) -> None:
        self._result: T | None = None

    def start(self, work: Work[T]) -> None:
        self._result = work()

    def finish(self) -> T | None:
        result, self._result = self._result, None
        return result


class _Done(Generic[T]):
    """Holds what work has returned or raised."""

    def __init__(self, result: T | None, error: BaseException | None) -> None:
        self.result, self.error = result, error


class BesideThread(Generic[T]):
    """Runs work in a thread of its own; used by one other thread.

    wake: called once work is over, in the thread that did it.
    """

    def __init__(
        self, name: str, device: torch.device, wake: Callable[[], None], num_threads: int | None = None
    ) -> None:
        """num_threads: of torch, for this thread; None for the process' number"""
        self._num_threads = num_threads
        self._stream = EncodeStream(device) if device.type == "cuda" else None
        self._wake = wake
        self._inbox: SimpleQueue[tuple[Work[T], Any] | None] = SimpleQueue()
        self._done: _Done[T] | None = None
        self._is_busy = False
        self._started_s = 0.0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Returns the seconds that the work has taken so far; 0 if there is none. Thread-safe."""
        return time.monotonic() - self._started_s if self._is_busy and self._done is None else 0.0

    def start(self, work: Work[T]) -> None:
        launched = self._stream.launched() if self._stream else None
        self._started_s, self._is_busy = time.monotonic(), True
        self._inbox.put((work, launched))

    def finish(self) -> T | None:
        done = self._done
        if done is None:
            return None
        self._is_busy = False  # first: see `busy_s`
        self._done = None
        if done.error is not None:
            raise done.error
        return done.result

    def close(self) -> None:
        """Ends the thread after the work it has; waits no longer than a batch takes."""
        self._inbox.put(None)
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        use_own_threads(self._num_threads)
        while (order := self._inbox.get()) is not None:
            self._done = self._run(*order)
            self._wake()

    def _run(self, work: Work[T], launched: Any) -> _Done[T]:
        scope: AbstractContextManager[None] = self._stream.after(launched) if self._stream else nullcontext()
        try:
            with scope:
                result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            return _Done(None, error)
        return _Done(result, None)


class EncodeStream:
    """Is a CUDA stream beside that of the worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launched(self) -> torch.cuda.Event:
        """Returns an event behind all that the calling thread has launched."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextmanager
    def after(self, launched: torch.cuda.Event) -> Iterator[None]:
        """Launches on this stream what the block launches, behind an event; then waits until it is done."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            yield
            self._stream.record_event().synchronize()


def beside_of(
    encode: Action, step: Action, device: torch.device, num_rounds: int, clock: Callable[[], float]
) -> float:
    """Returns how many times as long both take while both run, 1 to 2: the lower quartile of rounds.

        alone    | pass | pass | pass | pass |           | batch .... |
        beside   | pass  | pass  | pass  | pass  |       in turns, so that a slow moment is in all three
                 | batch .......................... |

    By wall time, since a thread that waits for Python's lock takes no CPU time.

    Others on the machine only slow what runs together, and above 2 turns would be as good.

    encode, step: a batch of the tower, and a decode pass, many of which fit into the batch.
    clock: wall time; on a GPU, once what was launched is over.
    """
    lane = BesideThread[bool]("profile encode", device, lambda: None)
    try:
        rounds = [_one_round(encode, step, lane, clock) for _ in range(num_rounds + 1)]
    finally:
        lane.close()
    return min(2.0, max(1.0, quantiles(rounds[1:], n=4)[0]))  # the first round does not count


def _one_round(encode: Action, step: Action, lane: BesideThread[bool], clock: Callable[[], float]) -> float:
    """Returns the mean of how many times as long the batch takes, and the passes."""
    encode_s = timed(encode, clock)
    start_s, num_steps = clock(), 0
    lane.start(lambda: _encoded(encode))
    while lane.finish() is None:
        step()
        num_steps += 1
    both_s = clock() - start_s
    steps_s = timed(lambda: [step() for _ in range(num_steps)], clock)
    return (both_s / encode_s + both_s / steps_s) / 2


def _encoded(encode: Action) -> bool:
    with torch.inference_mode():
        encode()
    return True


def wall_clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock for `beside_of`."""

    def completed() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return completed if device.type == "cuda" else time.perf_counter
