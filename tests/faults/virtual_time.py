"""A clock that moves when nothing is left to do, an event loop on it, and processes that share the loop.

A process is known by the context of a callback. One that is dead is never called again, as after SIGKILL; one
that is frozen is called once it is thawed, with all that it missed in order, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random, SystemRandom
from typing import Any
from unittest import mock

from epd.serve_app.network import memory

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_START_S = 1000.0  # of the monotonic clock
_BOOTED_S = 10_000.0  # between the starts of two machines
_UNIX_S = 1_700_000_000.0  # its Unix time
_JUMPS_S = (-7200.0, -200.0, 200.0, 7200.0)
_MAX_EXECUTOR_S = 0.02  # that work in a thread takes
_NUM_ENDS = 10  # times that a task is cancelled, at most


class NothingLeftError(Exception):
    """Raised when something is awaited and nothing is scheduled: it would be awaited for ever."""


class Process:
    """A process of the simulation. machine: what it is lost with, and whose clocks it reads.

    context: of everything that runs in it
    rng: gives its random names
    """

    def __init__(self, loop: VirtualLoop, name: str, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.rng: Random = Random(f"{loop.seed} {name} names")
        self.is_dead = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop
        self._missed: list[tuple[Callable[..., Any], tuple[Any, ...], contextvars.Context]] | None = None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context.copy())

    @property
    def is_frozen(self) -> bool:
        return self._missed is not None

    def freeze(self) -> None:
        self._missed = self._missed or []

    def thaw(self) -> None:
        missed, self._missed = self._missed or [], None
        for callback, arguments, context in missed:
            self._loop.call_soon(callback, *arguments, context=context)

    def miss(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        assert self._missed is not None
        self._missed.append((callback, arguments, contextvars.copy_context()))


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
        return self.now_s + (_BOOTED_S * int(process.machine[1:]) if process else 0.0)

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


class _Selector(selectors.DefaultSelector):
    """Waits by moving the clock: there is no real input."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError
        self._clock.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in virtual time. Work for threads is done at once, and its result comes later.

    network: opens connections and servers of asyncio
    is_ending: whether dead processes are called too, to end what they had begun
    """

    network: Any
    is_ending = False

    def __init__(self, clock: Clock, seed: int) -> None:
        super().__init__(_Selector(clock))
        self.seed = seed
        self._virtual = clock
        self._executor_rng = Random(f"{seed} executor")

    def time(self) -> float:
        return self._virtual.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(self._gated, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, self._gated, callback, args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

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

    def _gated(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Calls back, as far as the process of the context can be called."""
        process = _PROCESS.get()
        if self.is_ending or process is None or not (process.is_dead or process.is_frozen):
            callback(*arguments)
        elif not process.is_dead:
            process.miss(callback, arguments)

    def end(self) -> None:
        """Ends all tasks, those of dead processes too, so that none of them ends in another simulation."""
        self.is_ending = True
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


@contextmanager
def decided(clock: Clock) -> Iterator[None]:
    """Takes all times and random names of this process from a simulation: the one place that replaces any.

    Memory never ends: what other programs of the machine use of it decides nothing.
    """
    with (
        mock.patch.object(time, "monotonic", clock.monotonic),
        mock.patch.object(time, "perf_counter", clock.monotonic),
        mock.patch.object(time, "time", clock.unix),
        mock.patch.object(secrets, "token_hex", lambda num_bytes=32: _rng().randbytes(num_bytes).hex()),
        mock.patch.object(secrets, "token_bytes", lambda num_bytes=32: _rng().randbytes(num_bytes)),
        mock.patch.object(secrets, "randbelow", lambda below: _rng().randrange(below)),
        mock.patch.object(memory, "available_memory_bytes", return_value=1 << 60),
        mock.patch.object(
            uuid, "uuid4", side_effect=lambda: uuid.UUID(bytes=_rng().randbytes(16), version=4)
        ),
    ):
        yield
