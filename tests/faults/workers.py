"""Real workers of a simulation, without their threads: each turn is one callback, and takes a drawn time.

Nor do they call a kernel: pools are named in a dictionary, and what a thread would do is done at once.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from epd.errors import EPDError, UnavailableError
from epd.serve_app import fair_threads
from epd.serve_app.media import image_planner, media_spool, media_worker
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.media_messages import ReadFrames
from epd.serve_app.messages import DropOwner, Message, WorkerLoad, WorkerReport
from epd.serve_app.network import routes, worker_server
from epd.serve_app.network.memory import PoolFiles
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_thread import IDLE_S, Call, WorkerThread
from epd.stages.encode import encoder_pool
from epd.stages.engine import kv_pool
from epd.stages.engine.pool_memory import pool_memory
from epd.types import UInt8Array

_LOAD_S = (0.05, 1.0)  # to load weights
_STEP_S = (0.01, 0.03, 0.05, 0.1)
_SLOWNESS = (0.3, 1.0, 1.0, 6.0)  # of a worker
_RARE_STEP_S = (0.1, 1.0)  # three in a hundred
_READ_S = (0.001, 0.05)
_LEAST_WAIT_S = 0.2  # every message wakes: looking more often only takes real time
_IDLE_S = 2.0

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


class _AtOnce(Executor):
    """Does at once what a thread would do."""

    def __init__(self, *_arguments: object, **_options: object) -> None: ...

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **options))
        except Exception as error:  # noqa: BLE001 - the future raises it
            done.set_exception(error)
        return done


def _swap_task(loop: asyncio.AbstractEventLoop | None, task: asyncio.Task[Any] | None) -> Any:
    """Makes a task the one that runs; returns the one before. Since Python 3.14 a thread has only one."""
    swap = getattr(asyncio.tasks, "_swap_current_task", None)  # of Python 3.12 and newer
    return swap(loop, task) if swap is not None and loop is not None else None


class _AtOnceLoop(asyncio.BaseEventLoop):
    """Calls back at once, from within the loop of the simulation, until nothing is left to do."""

    _is_calling = False

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = self.call_soon(callback, *args, context=context)
        if not self._is_calling:
            outer, self._is_calling = asyncio._get_running_loop(), True
            task = _swap_task(outer, None)
            asyncio._set_running_loop(self)
            try:
                self._call_all()
            finally:
                asyncio._set_running_loop(outer)
                _swap_task(outer, task)
                self._is_calling = False
        return handle

    def _call_all(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        while ready:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


class _MediaWorker(MediaWorker):
    """Has no thread, and handles messages while it begins with them."""

    def __init__(self, settings: MediaSettings) -> None:
        super().__init__(settings)
        self._lock = threading.RLock()  # type: ignore[assignment]

    def _begun_loop(self) -> asyncio.AbstractEventLoop:
        return _AtOnceLoop()

    def _end_loop(self) -> None:
        self._loop.close()


def _remove_none(_parent: Path, _prefix: str) -> None: ...


class _SpoolFolder:
    """Stands for a folder that a lock marks as held, under another name: other simulations have its own."""

    def __init__(self, _path: Path) -> None:
        self.path = Path(tempfile.mkdtemp())

    def remove(self) -> None:
        shutil.rmtree(self.path)


class _Names(PoolFiles):
    """Names the pools of one process, without links, folders and locks. Each process removes its own.

    memory: of a world's pools, by name
    """

    memory: dict[Path, Tensor]

    def hold(self) -> None: ...

    def create(self, name: str, num_bytes: int) -> Path:
        path = Path("/", self._name, f"{name}-{secrets.token_hex(4)}")
        self.memory[path] = pool_memory(num_bytes)
        self._pools[path] = num_bytes
        return path

    def shared(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Path:  # noqa: ARG002
        path = Path(tempfile.gettempdir(), name)
        if not path.exists():
            write(path)
        return path

    def remove(self, path: Path) -> None:
        self.memory.pop(path, None)
        self._pools.pop(path, None)

    def remove_ended(self, worker: str) -> None: ...

    def release(self) -> None:
        for path in list(self._pools):
            self.remove(path)

    def paths(self, name: str = "") -> list[Path]:
        return sorted(path for path in self.memory if path.name.startswith(name))


@contextmanager
def named_memory() -> Iterator[None]:
    """Lets workers have pools of a world's memory, instead of the machine's."""

    class Names(_Names):
        memory: dict[Path, Tensor] = {}  # noqa: RUF012

    def memory_of(num_bytes: int, path: Path | None = None, device: torch.device | str = "cpu") -> Tensor:
        return pool_memory(num_bytes, device=device) if path is None else Names.memory[path]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(worker_server, "PoolFiles", Names))
        for module in (kv_pool, encoder_pool):
            stack.enter_context(mock.patch.object(module, "pool_memory", memory_of))
        stack.enter_context(
            mock.patch.object(routes, "map_memory", lambda path, _num_bytes: Names.memory.get(path))
        )
        yield


@contextmanager
def no_threads() -> Iterator[None]:
    """Lets media workers do their work at once, with folders that nobody else looks for."""
    with ExitStack() as stack:
        for module in (fair_threads, image_planner, media_worker):
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", _AtOnce))
        stack.enter_context(mock.patch.object(media_spool, "HeldFolder", _SpoolFolder))
        stack.enter_context(mock.patch.object(media_spool, "remove_abandoned", _remove_none))
        yield


class SimulatedMedia:
    """Does the work of a media worker, each message at once, and answers after a drawn time."""

    def __init__(self, settings: MediaSettings, rng: Random, is_deadly: IsDeadly) -> None:
        self.worker = _MediaWorker(settings)
        self._rng = rng
        self._is_deadly = is_deadly

    async def answer(
        self, message: Message[Any], owner: str, bulk: UInt8Array | None
    ) -> tuple[Any, UInt8Array | None]:
        if isinstance(message, ReadFrames) and self._is_deadly(message):
            await asyncio.Event().wait()
        reply = self.worker.submit(message, owner, bulk).result(0.0)
        await asyncio.sleep(self._rng.uniform(*_READ_S))
        return reply

    def drop_owner(self, owner: str) -> None:
        self.worker.submit(DropOwner(owner)).result(0.0)

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
