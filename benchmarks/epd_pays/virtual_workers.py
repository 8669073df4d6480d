"""Runs the real application in virtual time: the code of its worker threads as it is, one of them at a time.

A thread that sleeps, or waits to be woken, gives its turn back to the event loop, whose clock moves when
nothing is left to do. So a pass that is paced takes its time, whatever the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from epd.serve_app.local import fleet
from epd.serve_app.media.media_worker import Answer, MediaWorker
from epd.stages.engine.model_runner import ModelRunner
from tests.faults.exact_model import exact_model
from tests.faults.virtual_time import Clock, VirtualLoop, decided

_T = TypeVar("_T")

_LEAST_WAIT_S = 0.2  # every message wakes: looking more often only takes real time
_PATIENCE_S = 60.0  # real time that media threads get, in which virtual time stands still
_CLOSE_S = 5.0
_LETTER = 65  # a token that is text by itself
_real_sleep = time.sleep


class _Loop(VirtualLoop):
    """Does the work of threads at once, in no time."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits the thread gets it
            future.set_exception(error)
        return future


class VirtualThread:
    """A thread that runs only while the event loop waits for it. Has what a worker needs of `Thread`."""

    by_id: dict[int, VirtualThread] = {}  # noqa: RUF012 - of this process

    def __init__(self, loop: VirtualLoop, target: Callable[[], None]) -> None:
        self._loop, self._target = loop, target
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._loop.call_soon(self.resume)

    def join(self, _timeout_s: float) -> None:
        """Lets it run to its end, which it was asked for."""
        while not self._is_over:
            self.resume()

    def _run(self) -> None:
        self._mine.acquire()
        self.by_id[threading.get_ident()] = self
        try:
            self._target()
        finally:
            del self.by_id[threading.get_ident()]
            self._is_over = True
            self._theirs.release()

    def resume(self) -> None:
        """Runs it until it waits for something. Called by the loop."""
        if not self._is_over:
            self._mine.release()
            self._theirs.acquire()

    def pause(self) -> None:
        """Lets the loop go on. Called by the thread itself, when it is sure to be resumed."""
        self._theirs.release()
        self._mine.acquire()

    def sleep(self, seconds: float) -> None:
        self._loop.call_later(seconds, self.resume)
        self.pause()


class _Wake:
    """Stands for the event that a worker's thread waits for."""

    def __init__(self, loop: VirtualLoop, thread: VirtualThread) -> None:
        self._loop, self._thread = loop, thread
        self._is_set = False
        self._timer: Any = None  # while it is waited for

    def set(self) -> None:
        self._is_set = True
        self._end_wait()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout_s: float) -> None:
        if not self._is_set:
            self._timer = self._loop.call_later(max(timeout_s, _LEAST_WAIT_S), self._end_wait)
            self._thread.pause()

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.call_soon(self._thread.resume)


class _Worker(fleet._LocalWorker):
    """Is a worker of a local fleet on a virtual thread."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        loop: Any = self._loop
        thread = VirtualThread(loop, self._run)
        self._thread: Any = thread
        self._wake: Any = _Wake(loop, thread)


class _Media(MediaWorker):
    """Is a media worker whose answers take no time."""

    async def answer(self, message: Any, owner: str = "", bulk: Any = None) -> Answer:
        return self.submit(message, owner, bulk).result(_PATIENCE_S)


def _sleep(seconds: float) -> None:
    thread = VirtualThread.by_id.get(threading.get_ident())
    if thread is None:
        _real_sleep(seconds)
    elif seconds > 0:
        thread.sleep(seconds)


def _run_packed(runner: ModelRunner, packed: Any, _visual: Any, _token_ids: Any = None) -> Tensor:
    """Stands for a pass. Returns logits [R, V] of one and the same letter: only its time is of interest."""
    logits = np.zeros((len(packed.logit_rows), runner._embed.num_embeddings), np.float32)
    logits[:, _LETTER] = 1.0
    return torch.from_numpy(logits)


@contextmanager
def virtual_workers() -> Iterator[None]:
    """Lets local fleets of this process run in virtual time, with a model that computes nothing."""
    with (
        exact_model(),
        mock.patch.object(ModelRunner, "run_packed", _run_packed),
        mock.patch.object(fleet, "_LocalWorker", _Worker),
        mock.patch.object(fleet, "MediaWorker", _Media),
        mock.patch.object(time, "sleep", _sleep),
    ):
        yield


def run_virtual(work: Callable[[], Coroutine[Any, Any, _T]], seed: int) -> _T:
    """Runs what a coroutine function returns, in virtual time. To be used within `virtual_workers`."""
    clock = Clock()
    with decided(clock):
        loop = _Loop(clock, seed)
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(work())
        finally:
            with suppress(Exception):
                loop.end()
            asyncio.set_event_loop(None)
