"""The thread that runs a worker's stages beside the event loop of its process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from epd.errors import EPDError, UnavailableError
from epd.routing import Stage
from epd.types import UInt8Array
from serve_app.messages import Message, WorkerLoad, WorkerReport
from serve_app.worker_core import WorkerCore
from serve_app.worker_stages import Transport, WorkerSettings

logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # between steps of a worker with nothing to do
_POLL_S = 0.01  # between steps of one that waits for others, should it not be woken


@dataclass(slots=True)
class Call:
    """A message whose reply is wanted. reply: of the event loop."""

    message: Message[Any]
    bulk: UInt8Array | None
    reply: asyncio.Future[Any]


class WorkerThread:
    """Made, started and asked by one event loop; the stages live in the thread alone."""

    def __init__(
        self, name: str, roles: frozenset[Stage], settings: WorkerSettings, transport: Transport
    ) -> None:
        self.failure = ""
        self._arguments = (name, roles, settings, transport)
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Call] = deque()
        self._reports: list[WorkerReport] = []
        self._has_news = asyncio.Event()
        self._wake = threading.Event()
        self._step_began_s = 0.0
        self._told_load = WorkerLoad()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Returns when the weights are loaded. Raises EPDError when they do not load."""
        self._thread.start()
        await self._ready

    def put(self, call: Call) -> None:
        self._inbox.append(call)
        self._wake.set()

    def wake(self) -> None:
        """Something has come for the stages. From any thread."""
        self._wake.set()

    def stop(self) -> None:
        """The thread ends after the step under way."""
        self._is_stopped = True
        self._wake.set()

    @property
    def busy_s(self) -> float:
        """How long the step under way has taken so far."""
        began_s = self._step_began_s
        return time.monotonic() - began_s if began_s else 0.0

    async def take_reports(self, wait_s: float) -> list[WorkerReport]:
        """Those since the last time: at once if there are any, else what has come after `wait_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), wait_s)
        self._has_news.clear()
        reports, self._reports = self._reports, []
        return reports

    def _run(self) -> None:
        try:
            core = WorkerCore(*self._arguments)
            self._post(_resolve, self._ready, None)
            while not self._is_stopped:
                self._turn(core)
        except EPDError as error:
            self._break(error)
        except Exception as error:  # the process boundary: the fleet ends this process and starts another
            logger.exception("worker %s broke", self._thread.name)
            self._break(UnavailableError(f"{type(error).__name__}: {error}"))

    def _break(self, error: EPDError) -> None:
        """The thread ends; who waits for the start, or for reports, is told."""
        self.failure = str(error)
        self._post(_fail, self._ready, error)
        self._post(self._has_news.set)

    def _turn(self, core: WorkerCore) -> None:
        self._wake.clear()
        self._step_began_s = time.monotonic()
        has_mail = bool(self._inbox)
        while self._inbox:
            self._answer(core, self._inbox.popleft())
        has_moved = core.step()
        is_busy = has_moved or has_mail
        report = core.take_report() or (None if is_busy else self._changed_load(core))
        self._step_began_s = 0.0
        if report is not None:
            self._told_load = report.load
            self._post(self._tell, report)
        if not is_busy:
            self._wake.wait(_POLL_S if core.has_work() else _IDLE_S)

    def _changed_load(self, core: WorkerCore) -> WorkerReport | None:
        """A report of nothing but the load, when that has changed without news: by a receipt, say."""
        load = core.load()
        return WorkerReport(core.name, load=load) if load != self._told_load else None

    def _answer(self, core: WorkerCore, call: Call) -> None:
        try:
            value = core.handle(call.message, call.bulk)
        except EPDError as error:
            self._post(_fail, call.reply, error)
        else:
            self._post(_resolve, call.reply, value)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls something in the event loop; nothing when that has ended, and with it the process."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self._has_news.set()


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: EPDError) -> None:
    if not future.done():
        future.set_exception(error)
