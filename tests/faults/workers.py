"""Real workers of a simulation, without their threads: each turn is one callback, and takes a drawn time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from epd.errors import EPDError, UnavailableError
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.media_messages import ReadFrames
from epd.serve_app.messages import DropOwner, Message, WorkerLoad, WorkerReport
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_thread import IDLE_S, Call, WorkerThread
from epd.types import UInt8Array

_LOAD_S = (0.05, 1.0)  # to load weights
_STEP_S = (0.01, 0.03, 0.05, 0.1)
_SLOWNESS = (0.3, 1.0, 1.0, 6.0)  # of a worker
_RARE_STEP_S = (0.1, 1.0)  # three in a hundred
_READ_S = (0.001, 0.05)
_LEAST_WAIT_S = 0.2  # every message wakes: looking more often only takes real time
_IDLE_S = 2.0
_PATIENCE_S = 60.0  # real time that media threads get, in which virtual time stands still

# Gets a message that a worker is about to handle; returns whether that ends the worker.
IsDeadly = Callable[[Message[Any]], bool]
# Gets a message that a worker has handled, or an event or token that it reports.
OnTurn = Callable[[object], None]


class _Wake:
    """Stands for the event that a worker's thread waits for. wait_s: how long the last turn would wait."""

    def __init__(self) -> None:
        self.wait_s: float | None = None
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self.wait_s = None
        self._event.clear()

    def wait(self, timeout_s: float) -> None:
        self.wait_s = _IDLE_S if timeout_s >= IDLE_S else _LEAST_WAIT_S

    async def waited(self) -> None:
        try:
            async with asyncio.timeout(self.wait_s):
                await self._event.wait()
        except TimeoutError:
            return


class SimulatedThread(WorkerThread):
    """Does what a worker's thread does, turn by turn, in the loop.

    Of the class: rng draws the times that turns take, is_deadly says which messages end the worker, on_turn
    gets each message that was handled, and each event and token that is reported.
    """

    rng = Random(0)
    is_deadly: IsDeadly = staticmethod(lambda _message: False)
    on_turn: OnTurn = staticmethod(lambda _message: None)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wake: Any = _Wake()
        self._is_killed = False
        self._slowness = self.rng.choice(_SLOWNESS)

    async def start(self) -> None:
        await asyncio.sleep(self.rng.uniform(*_LOAD_S))
        self.core = WorkerCore(*self._arguments)
        self._turns = asyncio.create_task(self._take_turns(self.core))

    def join(self, timeout_s: float) -> None: ...

    async def _take_turns(self, core: WorkerCore) -> None:
        try:
            while not self.is_stopped:
                self.turn(core)
                rare = self.rng.random() < 0.03
                if self._wake.wait_s is None:
                    step_s = self.rng.uniform(*_RARE_STEP_S) if rare else self.rng.choice(_STEP_S)
                    await asyncio.sleep(step_s * self._slowness)
                else:
                    await self._wake.waited()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._end(error if isinstance(error, EPDError) else UnavailableError(reason), reason)
            raise
        finally:
            core.close()

    def _answer(self, core: WorkerCore, call: Call) -> None:
        if not self._is_killed and type(self).is_deadly(call.message):
            self._is_killed = True
        if not self._is_killed:
            super()._answer(core, call)
            type(self).on_turn(call.message)

    def _report(self, report: WorkerReport | None) -> None:
        super()._report(report)
        for event in () if report is None else (*report.events, *report.outputs):
            type(self).on_turn(event)


class SimulatedMedia:
    """Does the work of a media worker, each message at once, and answers after a drawn time."""

    def __init__(self, settings: MediaSettings, rng: Random, is_deadly: IsDeadly) -> None:
        self.worker = MediaWorker(settings)
        self._rng = rng
        self._is_deadly = is_deadly

    async def answer(
        self, message: Message[Any], owner: str, bulk: UInt8Array | None
    ) -> tuple[Any, UInt8Array | None]:
        if isinstance(message, ReadFrames) and self._is_deadly(message):
            await asyncio.Event().wait()
        reply = self.worker.submit(message, owner, bulk).result(_PATIENCE_S)
        await asyncio.sleep(self._rng.uniform(*_READ_S))
        return reply

    def drop_owner(self, owner: str) -> None:
        self.worker.submit(DropOwner(owner)).result(_PATIENCE_S)

    def close(self) -> None:
        self.worker.close()

    def load(self) -> WorkerLoad:
        return self.worker.load()

    @property
    def busy_s(self) -> float:
        return 0.0

    @property
    def num_holds(self) -> int:
        return self.worker.num_holds
