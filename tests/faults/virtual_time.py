"""A clock that moves when nothing is left to do, an event loop on it, and processes that share the loop.

A process is known by the context of a callback. One that is dead is never called again, as after SIGKILL; one
that is frozen is called once it is thawed, with all that it missed in order, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import secrets
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from random import Random, SystemRandom
from typing import Any
from unittest import mock

from epd.stages import device_memory

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_START_S = 1000.0  # of the monotonic clock
_BOOTED_S = 10_000.0  # between the starts of two machines
_UNIX_S = 1_700_000_000.0  # its Unix time
_JUMPS_S = (-7200.0, -200.0, 200.0, 7200.0)
_MAX_EXECUTOR_S = 0.02  # that work in a thread takes
_own_pid = os.getpid
_NUM_ENDS = 10  # times that a task is cancelled, at most


class NothingLeftError(Exception):
    """Raised when something is awaited and nothing is scheduled: it would be awaited for ever."""


class Process:
    """A process of the simulation. machine: what it is lost with, and whose clocks it reads.

    pid: its number
    context: of everything that runs in it
    booted_s: by how much its monotonic clock is ahead
    missed: callbacks since it was frozen; None if it is not
    rng: gives its random names
    """

    def __init__(self, loop: VirtualLoop, name: str, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.pid = next(loop.pids)
        self.booted_s = _BOOTED_S * int(machine[1:])
        self.rng: Random = Random(f"{loop.seed} {name} names")
        self.is_dead = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop
        self.missed: list[_Handle] | None = None
        loop.processes.append(self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context.copy())

    @property
    def is_frozen(self) -> bool:
        return self.missed is not None

    def freeze(self) -> None:
        self.missed = self.missed or []

    def thaw(self) -> None:
        missed, self.missed = self.missed or [], None
        self._loop._next.extend(missed)


def process_now() -> Process | None:
    """Returns the process that runs now; None for the world around them."""
    return _PROCESS.get()


class Clock:
    """The time of a simulation, seconds. Machines count it from times of their own.

    jumps_s: by how much the wall clock of each machine was set since its start
    """

    def __init__(self) -> None:
        self.now_s = _START_S
        self.jumps_s: dict[str, float] = {}

    def monotonic(self) -> float:
        process = _PROCESS.get()
        return self.now_s if process is None else self.now_s + process.booted_s

    def unix(self) -> float:
        process = _PROCESS.get()
        return _UNIX_S + self.elapsed_s + (self.jumps_s.get(process.machine, 0.0) if process else 0.0)

    def jump(self, machine: str, drawn: float) -> None:
        """Sets the wall clock of a machine. drawn: how far, below 1."""
        jump_s = _JUMPS_S[int(drawn * len(_JUMPS_S))]
        self.jumps_s[machine] = self.jumps_s.get(machine, 0.0) + jump_s

    @property
    def elapsed_s(self) -> float:
        return self.now_s - _START_S


class _Handle:
    """Stands for what is called back once, unless it is cancelled. context: of its process."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled")

    def __init__(self, callback: Any, arguments: tuple[Any, ...], context: contextvars.Context) -> None:
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.arguments = None, ()  # what it holds is freed now, as by asyncio

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Task(asyncio.Task[Any]):
    """Has a place in sets that is drawn, where the place of others is their address."""

    def __init__(self, work: Any, place: int, **options: Any) -> None:
        self._place = place
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._place


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in virtual time. Work for threads is done at once, and its result comes later.

    run: of the seed; in each, sets of tasks have another order, which is to decide nothing
    network: opens connections and servers of asyncio
    is_ending: whether dead processes are called too, to end what they had begun
    processes: all that there were
    """

    network: Any
    is_ending = False

    def __init__(self, clock: Clock, seed: int, run: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.pids = count(1)
        self.processes: list[Process] = []
        self._of_dead: list[_Handle] = []  # that are not called before the end
        self._place_rng = Random(f"{seed} places {run}")
        self._virtual = clock
        self._executor_rng = Random(f"{seed} executor")
        self._next: deque[_Handle] = deque()
        self._later: list[tuple[float, int, _Handle]] = []  # a heap: of one time, in the order of calls
        self._num_later = 0

    def time(self) -> float:
        return self._virtual.now_s

    def create_task(self, coro: Any, **options: Any) -> _Task:
        return _Task(coro, self._place_rng.getrandbits(60), loop=self, **options)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._next.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._num_later += 1
        heappush(self._later, (when, self._num_later, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self._virtual.now_s + delay, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        """Calls back what is ready, until the loop stops. Where nothing is, the clock moves on."""
        ready, later = self._next, self._later
        while True:
            while later and later[0][2].is_cancelled:
                heappop(later)
            if not ready and not self._stopping:
                if not later:
                    raise NothingLeftError
                self._virtual.now_s = max(self._virtual.now_s, later[0][0])
            while later and later[0][0] <= self._virtual.now_s:
                ready.append(heappop(later)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.is_cancelled:
                    self._call(handle)
            if self._stopping:
                return

    def _call(self, handle: _Handle) -> None:
        """Calls back, as far as the process of the context can be called."""
        context = handle.context
        process = context.get(_PROCESS)
        if process is not None and not self.is_ending:
            if process.is_dead:
                self._of_dead.append(handle)
                return
            if process.missed is not None:
                process.missed.append(handle)
                return
        try:
            context.run(handle.callback, *handle.arguments)
        except (SystemExit, KeyboardInterrupt, NothingLeftError):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio's own handles
            self.call_exception_handler({"message": "a callback failed", "exception": error})

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        future = self.create_future()

        def work() -> None:
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001 - whoever awaits the thread gets it
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(value)

        self.call_later(self._executor_rng.uniform(0.0, _MAX_EXECUTOR_S), work)
        return future

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # noqa: ARG002
        return self.network.listen(protocol_factory, host)

    def remove_reader(self, fd: Any) -> bool:  # noqa: ARG002 - no listening socket is real
        return False

    def end(self) -> None:
        """Ends all tasks, those of dead processes too, so that none of them ends in another simulation.

        One whose turn a dead or frozen process missed has it now, or it would not hear that it is cancelled.
        """
        self.is_ending = True
        self._next.extend(self._of_dead)
        for process in self.processes:
            process.thaw()
        for _ in range(_NUM_ENDS):
            tasks = asyncio.all_tasks(self)
            for task in tasks:
                task.cancel()
            if tasks:
                self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


def _rng() -> Random:
    """Returns what draws names now. Threads, which may draw at any time, take none from a process."""
    process = _PROCESS.get()
    return SystemRandom() if process is None else process.rng


def _uuid4() -> uuid.UUID:
    return uuid.UUID(bytes=_rng().randbytes(16), version=4)


def _pid() -> int:
    process = _PROCESS.get()
    return _own_pid() if process is None else process.pid


def _much() -> int:
    """Returns the bytes of a memory that never ends."""
    return 1 << 60


@contextmanager
def decided(clock: Clock) -> Iterator[None]:
    """Takes times, random names and numbers of processes from a simulation: the one place that replaces any.

    Memory never ends: what other programs of the machine use of it decides nothing.
    """
    with (
        mock.patch.object(time, "monotonic", clock.monotonic),
        mock.patch.object(time, "perf_counter", clock.monotonic),
        mock.patch.object(time, "time", clock.unix),
        mock.patch.object(secrets, "token_hex", lambda num_bytes=32: _rng().randbytes(num_bytes).hex()),
        mock.patch.object(secrets, "token_bytes", lambda num_bytes=32: _rng().randbytes(num_bytes)),
        mock.patch.object(secrets, "randbelow", lambda below: _rng().randrange(below)),
        mock.patch.object(device_memory, "memory_limit_bytes", _much),
        mock.patch.object(uuid, "uuid4", _uuid4),
        mock.patch.object(os, "getpid", _pid),
    ):
        yield
