"""Runs one worker's stages in a thread, beside the event loop that sends it messages.

    event loop  --put-->  inbox  -->  thread: messages, step, report  --on_report, on_failure-->  event loop

A message that cannot be handled is refused: its sender gets the error. The worker ends when a step raises, or
when the state of its stages is inconsistent after a message was refused.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from epd.errors import EPDError, UnavailableError, WorkerFaultError
from epd.serve_app.messages import Message, WorkerLoad, WorkerReport
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import Transport, WorkerSettings
from epd.stages.placement import use_own_threads
from epd.topology import Stage
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # between steps of a worker with nothing to do
_MAX_SILENCE_S = 1.0  # of a worker that computes without an event, before it reports its load
_POLL_S = 0.01  # between steps of a worker that waits for others, in case it is not woken
# A pass gives up Python's lock at each operation of torch. Another thread, of a front or of media, may then
# keep it for so long while the pass waits; by default 5 ms, longer than most operations take.
_SWITCH_S = 0.0005


@dataclass(slots=True)
class Call:
    """A message that awaits a reply. reply: of the event loop."""

    message: Message[Any]
    bulk: UInt8Array | None
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class WorkerCallbacks:
    """Callbacks in the event loop. on_failure: gets the reason when a worker that was ready breaks."""

    on_report: Callable[[WorkerReport], None]
    on_failure: Callable[[str], None]


class WorkerThread:
    """Runs the stages in a thread; created, started and called by one event loop.

    beat_s: start of the last turn, on the monotonic clock. core: the stages, once loaded.
    """

    def __init__(
        self,
        name: str,
        roles: frozenset[Stage],
        settings: WorkerSettings,
        transport: Transport,
        listener: WorkerCallbacks,
    ) -> None:
        self.name = name
        self.core: WorkerCore | None = None
        self.beat_s = time.monotonic()
        self.is_stopped = False
        self._arguments = (name, roles, settings, transport)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Call] = deque()
        self._wake = threading.Event()
        self._is_busy = False
        self._reported_load, self._reported_s = WorkerLoad(), 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Starts the thread; returns once the weights are loaded. Raises EPDError if they cannot be.

        From then on threads of this process give up Python's lock sooner.
        """
        if sys.getswitchinterval() > _SWITCH_S:
            sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        await self._ready

    def put(self, call: Call) -> None:
        self._inbox.append(call)
        self._wake.set()

    def wake(self) -> None:
        """Wakes the thread, as something has arrived for the stages. Thread-safe."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after the current step; it reports nothing from now on."""
        self.is_stopped = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    @property
    def busy_s(self) -> float:
        """Returns seconds that the current turn, or a batch that is encoded beside it, has taken so far."""
        turn_s = time.monotonic() - self.beat_s if self._is_busy else 0.0
        return max(turn_s, self.core.encoding_s) if self.core is not None else turn_s

    def _run(self) -> None:
        try:
            use_own_threads(self._arguments[2].num_threads)
            self.core = WorkerCore(*self._arguments, wake=self.wake, tell=self._tell)
            self._post(_resolve, self._ready, None)
            while not self.is_stopped:
                self.turn(self.core)
        except EPDError as error:
            self._end(error, str(error))
        except Exception as error:  # the process boundary: the fleet ends this worker and starts another
            logger.exception("worker %s broke", self.name)
            reason = f"{type(error).__name__}: {error}"
            self._end(UnavailableError(reason), reason)
        finally:
            if self.core is not None:
                self.core.close()

    def _end(self, error: EPDError, reason: str) -> None:
        """Ends the worker: the caller of `start` gets the error, the listener the reason."""
        if self.core is None:
            self._post(_fail, self._ready, error)
        elif not self.is_stopped:
            self._post(self._listener.on_failure, reason)

    def turn(self, core: WorkerCore) -> None:
        """Handles messages, advances the stages by one step and reports."""
        self._wake.clear()
        self.beat_s, self._is_busy = time.monotonic(), True
        has_messages = bool(self._inbox)
        while self._inbox:
            self._answer(core, self._inbox.popleft())
        is_busy = core.step() or has_messages
        is_silent = self.beat_s - self._reported_s > _MAX_SILENCE_S
        report = core.take_report() or (self._changed_load(core) if is_silent or not is_busy else None)
        self._is_busy = False
        self._report(report)
        if not is_busy:
            self._wake.wait(_POLL_S if core.has_work() else IDLE_S)

    def _report(self, report: WorkerReport | None) -> None:
        if report is not None and not self.is_stopped:
            self._reported_load, self._reported_s = report.load, self.beat_s
            self._post(self._listener.on_report, report)

    def _tell(self) -> None:
        """Reports what a step has to tell so far."""
        if self.core is not None:
            self._report(self.core.take_news())

    def _changed_load(self, core: WorkerCore) -> WorkerReport | None:
        """Returns a report of only the load, if it has changed without an event, such as by a receipt."""
        load = core.load()
        return WorkerReport(core.name, load=load) if load != self._reported_load else None

    def _answer(self, core: WorkerCore, call: Call) -> None:
        """Answers a call. Raises AssertionError if one that failed has left the stages inconsistent."""
        try:
            value = core.handle(call.message, call.bulk)
        except EPDError as error:
            self._post(_fail, call.reply, error)
        except Exception as error:
            logger.exception("worker %s failed on a message", self.name)
            self._post(_fail, call.reply, fault_of(self.name, call.message, error))
            core.check_integrity()
        else:
            self._post(_resolve, call.reply, value)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function in the event loop; does nothing if that has ended, and the process with it."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def fault_of(worker: str, message: object, error: Exception) -> WorkerFaultError:
    """Returns the sender's error for a message on which a worker failed. Contains only the error's type."""
    return WorkerFaultError(
        f"worker '{worker}' failed on a {type(message).__name__} with {type(error).__name__}; "
        "the request was refused; the server's log has the traceback, report it"
    )


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: EPDError) -> None:
    if not future.done():
        future.set_exception(error)
