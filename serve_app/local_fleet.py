"""A fleet of threads in this process: for tests, and for one machine without Ray.

Each worker is a thread with its own stages and pools; what it shares with others are the connectors. Workers
can be lost on purpose, with all they hold, and frozen.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from epd.connectors import EncoderConnector, KVConnector
from epd.errors import CancelledError, EPDError
from epd.routing import ROLE_LETTERS, Stage
from epd.types import UInt8Array
from serve_app.fleet import Bulk, FleetEvent, WorkerBack, WorkerInfo, WorkerLost, WorkerLostError
from serve_app.frame_reader import FrameReader
from serve_app.messages import Message, ReplyT, WorkerReport, endpoint
from serve_app.worker_core import WorkerCore
from serve_app.worker_stages import WorkerSettings
from stages.connectors import InProcessHub
from stages.encoder_pool import EncoderPool, EncoderPoolShape
from stages.kv_pool import KVPools, KVPoolsShape

logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # between signs of life of a worker with nothing to do
_POLL_S = 0.005  # between steps of one that waits for others


@dataclass(frozen=True, slots=True)
class LocalFleetConfig:
    """workers: roles of each, by name. hang_s: a worker without a sign of life for so long is lost.

    restart_s: until a lost worker is started again. num_video_threads: frames being read at once.
    """

    workers: Mapping[str, frozenset[Stage]]
    hang_s: float = 30.0
    restart_s: float = 0.05
    num_video_threads: int = 4


@dataclass(slots=True)
class Hubs:
    """Of all workers: one for embeddings, one for keys and values."""

    embeddings: InProcessHub = field(default_factory=InProcessHub)
    kv: InProcessHub = field(default_factory=InProcessHub)

    def close(self, name: str) -> None:
        self.embeddings.disconnect(name)
        self.kv.disconnect(name)


@dataclass(slots=True)
class LocalTransport:
    """A worker's way into the hubs. wake: tells its thread that there is mail."""

    hubs: Hubs = field(default_factory=Hubs)
    wake: Callable[[], None] | None = None

    def embeddings(self, name: str, shape: EncoderPoolShape) -> tuple[EncoderPool, EncoderConnector]:
        pool = shape.build()
        return pool, self.hubs.embeddings.connect(name, pool, self.wake)

    def kv(self, name: str, shape: KVPoolsShape) -> tuple[KVPools, KVConnector]:
        pools = shape.build()
        return pools, self.hubs.kv.connect(name, pools, self.wake)

    def weights(self, path: Path, dtype: torch.dtype) -> Path | None:  # noqa: ARG002 - each reads its own
        return None

    def close(self, name: str) -> None:
        self.hubs.close(name)


@dataclass(slots=True)
class _Call:
    message: Message[Any]
    bulk: UInt8Array | None
    reply: asyncio.Future[Any]


class _WorkerThread:
    """One incarnation of a worker. What it says reaches the event loop through `post`."""

    def __init__(
        self,
        info: WorkerInfo,
        settings: WorkerSettings,
        hubs: Hubs,
        post: Callable[..., None],
        on_event: Callable[[FleetEvent], None],
        ready: asyncio.Future[None],
    ) -> None:
        self.info = info
        self.core: WorkerCore | None = None
        self.beat_s = time.monotonic()
        self.is_gone = False
        self.is_frozen = False
        self.calls: set[asyncio.Future[Any]] = set()
        self._settings = settings
        self._hubs = hubs
        self._post = post
        self._on_event = on_event
        self._ready = ready
        self._inbox: deque[_Call] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=info.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, call: _Call) -> None:
        self._inbox.append(call)
        self._wake.set()

    def stop(self) -> None:
        """It takes part in nothing from now on; the thread ends after its step."""
        self.is_gone = True
        self._wake.set()

    def join(self) -> None:
        self._thread.join(timeout=10)

    def _run(self) -> None:
        transport = LocalTransport(self._hubs, self._wake.set)
        try:
            self.core = WorkerCore(self.info.name, self.info.roles, self._settings, transport)
        except EPDError as error:
            self._post(_fail, self._ready, error)
            return
        self._post(_resolve, self._ready, None)
        try:
            while not self.is_gone:
                self._turn(self.core)
        except Exception as error:  # the process boundary of this fleet
            logger.exception("worker %s broke", self.info.name)
            self._post(self._on_event, WorkerLost(self.info.name, f"{type(error).__name__}: {error}"))

    def _turn(self, core: WorkerCore) -> None:
        self._wake.clear()
        if self.is_frozen:
            self._wake.wait(_IDLE_S)
            return
        self.beat_s = time.monotonic()
        has_mail = bool(self._inbox)
        while self._inbox:
            self._answer(core, self._inbox.popleft())
        has_moved = core.step()
        report = core.take_report()
        if report is not None and not self.is_gone:
            self._post(self._on_event, report)
        if not (has_moved or has_mail):
            self._wake.wait(_POLL_S if core.has_work() else _IDLE_S)

    def _answer(self, core: WorkerCore, call: _Call) -> None:
        try:
            reply = core.handle(call.message, call.bulk)
        except EPDError as error:
            self._post(_fail, call.reply, error)
        else:
            self._post(_resolve, call.reply, reply)


class LocalFleet:
    """Threads as workers. A worker with the role "video" has no other; frames are arrays of this process."""

    def __init__(self, config: LocalFleetConfig, settings: WorkerSettings) -> None:
        self._config = config
        self._settings = settings
        self._hubs = Hubs()
        self._infos = {name: WorkerInfo(name, roles) for name, roles in config.workers.items()}
        self._threads: dict[str, _WorkerThread] = {}
        self._stopped: list[_WorkerThread] = []
        self.readers: dict[str, FrameReader] = {}
        self._executor = ThreadPoolExecutor(config.num_video_threads, thread_name_prefix="video")
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return self._infos

    def core(self, name: str) -> WorkerCore:
        """The stages of a worker, for tests: look at them only while nothing runs."""
        core = self._threads[name].core
        assert core is not None
        return core

    async def start(self) -> None:
        self.readers = {name: FrameReader() for name, info in self._infos.items() if "video" in info.roles}
        await asyncio.gather(*(self._start(name) for name in self._infos if name not in self.readers))
        self._spawn(self._watch())

    async def _start(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        post = _poster(loop)
        thread = _WorkerThread(self._infos[name], self._settings, self._hubs, post, self._take, ready)
        self._threads[name] = thread
        thread.start()
        await ready

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for thread in self._threads.values():
            self._stop(thread, "the fleet is closed")
        for reader in self.readers.values():
            reader.close()
        await asyncio.to_thread(self._join)
        self._events.put_nowait(None)

    def _join(self) -> None:
        for thread in self._stopped:
            thread.join()
        self._executor.shutdown()

    async def send(
        self, stage: Stage, target: str, message: Message[ReplyT], bulk: Bulk | None = None
    ) -> ReplyT:
        if stage == "video":
            return cast(ReplyT, await self._read(target, message))
        thread = self._threads.get(target)
        if thread is None or thread.is_gone or not self._infos[target].is_alive:
            raise WorkerLostError(f"worker '{target}' is gone; it is being started again")
        assert bulk is None or isinstance(bulk, np.ndarray)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        thread.calls.add(reply)
        reply.add_done_callback(thread.calls.discard)
        thread.put(_Call(message, bulk, reply))
        self._infos[target] = self._infos[target].told(message)
        return cast(ReplyT, await reply)

    async def fetch(self, stage: Stage, target: str, message: Message[None]) -> Bulk:
        assert stage == "video"
        return await self._read(target, message)

    async def _read(self, target: str, message: Message[Any]) -> UInt8Array | None:
        reader, before = self.readers[target], self._infos[target]
        if not before.is_alive:
            raise WorkerLostError(f"worker '{target}' is gone; it is being started again")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, reader.handle, message)
        except CancelledError as error:
            if self._infos[target] == before:
                raise
            raise WorkerLostError(f"worker '{target}' was lost meanwhile; ask another") from error

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event

    def _take(self, event: FleetEvent) -> None:
        """What a thread says; nothing of one that is gone counts."""
        if isinstance(event, WorkerReport):
            if self._infos[event.worker].is_alive:
                self._events.put_nowait(event)
        elif isinstance(event, WorkerLost):
            self._lose(event.name, event.reason)

    # Loss

    def kill(self, name: str) -> None:
        """The worker is lost with all it holds, and started again after `restart_s`."""
        self._lose(name, "it was killed")

    def freeze(self, name: str) -> None:
        """The worker does nothing any more, and says nothing, until it is found to hang."""
        self._threads[name].is_frozen = True

    def _lose(self, name: str, reason: str) -> None:
        info = self._infos[name]
        if self._is_closed or not info.is_alive:
            return
        self._infos[name] = replace(info, is_alive=False, closed=frozenset())
        if name in self.readers:
            self.readers[name].close()
        else:
            self._stop(self._threads[name], f"worker '{name}' is gone: {reason}")
            for stage in ROLE_LETTERS:
                self._hubs.close(endpoint(name, stage))
        self._events.put_nowait(WorkerLost(name, reason))
        self._spawn(self._restart(name))

    def _stop(self, thread: _WorkerThread, reason: str) -> None:
        thread.stop()
        self._stopped.append(thread)
        for reply in list(thread.calls):
            _fail(reply, WorkerLostError(f"{reason}; send to another worker"))

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._config.restart_s)
        info = self._infos[name]
        self._infos[name] = replace(info, incarnation=info.incarnation + 1)
        if name in self.readers:
            self.readers[name] = FrameReader()
        else:
            await self._start(name)
        self._infos[name] = replace(self._infos[name], is_alive=True)
        self._events.put_nowait(WorkerBack(name))

    async def _watch(self) -> None:
        """Finds workers that hang."""
        while True:
            await asyncio.sleep(self._config.hang_s / 4)
            now = time.monotonic()
            for name, thread in list(self._threads.items()):
                if self._infos[name].is_alive and now - thread.beat_s > self._config.hang_s:
                    self._lose(name, f"no sign of life for {now - thread.beat_s:.1f} s")

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _poster(loop: asyncio.AbstractEventLoop) -> Callable[..., None]:
    """Calls something in the event loop, from a thread; nothing once the loop has ended."""

    def post(function: Callable[..., None], *arguments: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    return post


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: EPDError) -> None:
    if not future.done():
        future.set_exception(error)
