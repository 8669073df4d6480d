"""Implements a fleet of threads in this process: for `epd serve --local`, and for tests.

Each worker is a thread with its own stages and pools; it shares only the connectors with others. Workers can
be killed on purpose, with all they hold, and frozen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from epd.errors import CancelledError, EPDError
from epd.machine import Looks
from epd.serve_app.fleet import (
    Bulk,
    FleetBroken,
    FleetEvent,
    WorkerBack,
    WorkerLost,
    WorkerLostError,
    state_after,
)
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.messages import Message, ReplyT, WorkerReport, endpoint, worker_of
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_thread import IDLE_S, Call, WorkerCallbacks, WorkerThread, fault_of
from epd.serve_app.worker_info import WorkerInfo
from epd.stages.connectors.mailbox import InProcessHub
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.placement import Placement
from epd.stages.ranks.group_pools import GroupPools, PoolSharing
from epd.topology import ROLE_LETTERS, Stage
from epd.transfer.connectors import EncoderConnector, KVConnector
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

_FROZEN_S = 0.1  # between a frozen worker's checks whether it has ended
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalFleetConfig:
    """Configures a fleet of threads.

    workers: roles of each, by name
    hang_s: a worker without a heartbeat for this time is lost
    restart_s: until a lost worker is restarted
    own: settings of workers that have others than the rest, by name
    media: settings of media workers, by default those for the model of the other workers
    processes: read the media; None for threads of this process
    """

    workers: Mapping[str, frozenset[Stage]]
    hang_s: float = 30.0
    restart_s: float = 0.05
    own: Mapping[str, WorkerSettings] = field(default_factory=dict)
    media: MediaSettings | None = None
    processes: MediaProcesses | None = None

    def media_worker(self, model_path: Path) -> MediaWorker:
        return MediaWorker(self.media or MediaSettings(model_path), self.processes)


@dataclass(slots=True)
class Hubs:
    """Holds the hubs of all workers: one for embeddings, one for keys and values."""

    embeddings: InProcessHub = field(default_factory=InProcessHub)
    kv: InProcessHub = field(default_factory=InProcessHub)

    def receivers(self, name: str) -> set[str]:
        """Returns the ends that were offered anything by the ends of that name."""
        ends = (self.embeddings.find(name), self.kv.find(name))
        return {receiver for end in ends if end is not None for receiver in end.receivers}

    def close(self, name: str) -> None:
        self.embeddings.disconnect(name)
        self.kv.disconnect(name)


@dataclass(slots=True)
class LocalTransport:
    """Connects a worker to the hubs. wake: notifies its thread of new messages."""

    hubs: Hubs = field(default_factory=Hubs)
    wake: Callable[[], None] | None = None
    _names: set[str] = field(default_factory=set)

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device
    ) -> tuple[EncoderPool, EncoderConnector]:
        pool = shape.build(device=device)
        self._names.add(name)
        return pool, self.hubs.embeddings.connect(name, pool, self.wake)

    def kv(
        self, name: str, shape: KVPoolsShape, device: torch.device, sharing: PoolSharing | None = None
    ) -> tuple[KVPools, KVConnector]:
        pools = shape.build(device=device) if sharing is None else GroupPools(shape, sharing, device)
        self._names.add(name)
        return pools, self.hubs.kv.connect(name, pools, self.wake)

    def weights(self, path: Path, placement: Placement) -> Path | None:  # noqa: ARG002 - each reads its own
        return None

    def routes(self) -> Mapping[str, str]:
        receivers = {receiver for name in self._names for receiver in self.hubs.receivers(name)}
        return {worker_of(receiver): "same process" for receiver in receivers}

    def close(self, name: str) -> None:
        self._names.discard(name)
        self.hubs.close(name)


class _LocalWorker(WorkerThread):
    """Runs one incarnation of a worker. calls: awaited replies. is_frozen: whether it hangs."""

    def __init__(
        self, info: WorkerInfo, settings: WorkerSettings, hubs: Hubs, listener: WorkerCallbacks
    ) -> None:
        transport = LocalTransport(hubs)
        super().__init__(info.name, info.roles, settings, transport, listener)
        transport.wake = self.wake
        self.is_frozen = False
        self.calls: set[asyncio.Future[Any]] = set()

    def turn(self, core: WorkerCore) -> None:
        if self.is_frozen:
            time.sleep(_FROZEN_S)
        else:
            super().turn(core)

    def lose(self, reason: str) -> None:
        """Ends the thread, and the calls that it has not answered."""
        self.stop()
        for reply in list(self.calls):
            if not reply.done():
                reply.set_exception(WorkerLostError(f"{reason}; send to another worker"))


class LocalFleet:
    """Runs workers as threads. A "video" worker is a media worker and has no other role.

    media: the media workers by name. Frames are arrays of this process.
    """

    def __init__(self, config: LocalFleetConfig, settings: WorkerSettings) -> None:
        self._config = config
        self._settings = settings
        self._hubs = Hubs()
        self._infos = {name: WorkerInfo(name, roles) for name, roles in config.workers.items()}
        self._threads: dict[str, _LocalWorker] = {}
        self._started: list[_LocalWorker] = []  # also those that are over
        self.media: dict[str, MediaWorker] = {}
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        self._tasks = Tasks()
        self._loops = Loops(Counter(), lambda loop: self._events.put_nowait(FleetBroken(loop)))
        self._is_closed = False

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return self._infos

    async def start(self) -> None:
        names = [name for name, info in self._infos.items() if "video" in info.roles]
        self.media = {name: self._config.media_worker(self._settings.model_path) for name in names}
        starting = [self._start(name) for name in self._infos if name not in self.media]
        if self._config.processes is not None:
            starting.append(asyncio.to_thread(self._config.processes.start))
        await asyncio.gather(*starting)
        self._loops.start("watch", self._watch)
        self._loops.start("media", self._report_media)

    async def _start(self, name: str) -> None:
        listener = WorkerCallbacks(self._take, lambda reason: self._lose(name, reason))
        settings = self._config.own.get(name, self._settings)
        thread = _LocalWorker(self._infos[name], settings, self._hubs, listener)
        self._threads[name] = thread
        self._started.append(thread)
        await thread.start()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._loops.close()
        self._tasks.cancel()
        for thread in self._threads.values():
            thread.lose("the fleet is closed")
        for worker in self.media.values():
            worker.close()
        for thread in self._started:
            await asyncio.to_thread(thread.join, _JOIN_S)
        self._events.put_nowait(None)

    async def send(
        self, stage: Stage, target: str, message: Message[ReplyT], bulk: Bulk | None = None
    ) -> ReplyT:
        if stage == "video":
            assert bulk is None or isinstance(bulk, np.ndarray)
            reply, _ = await self._ask_media(target, message, bulk)
            return cast(ReplyT, reply)
        thread = self._threads.get(target)
        if thread is None or thread.is_stopped or not self._infos[target].is_alive:
            raise WorkerLostError(f"worker '{target}' is gone; it is being started again")
        assert bulk is None or isinstance(bulk, np.ndarray)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        thread.calls.add(answered)
        answered.add_done_callback(thread.calls.discard)
        thread.put(Call(message, bulk, answered))
        self._infos[target] = state_after(self._infos[target], message)
        return cast(ReplyT, await answered)

    async def fetch(self, stage: Stage, target: str, message: Message[ReplyT]) -> tuple[ReplyT, Bulk]:
        assert stage == "video"
        return await self._ask_media(target, message)

    async def _ask_media(
        self, target: str, message: Message[Any], bulk: UInt8Array | None = None
    ) -> tuple[Any, UInt8Array | None]:
        before = self._infos.get(target)
        if target not in self.media or before is None or not before.is_alive:
            raise WorkerLostError(f"worker '{target}' is gone; it is being started again")
        try:
            return await self.media[target].answer(message, bulk=bulk)
        except CancelledError as error:
            if self._infos[target] == before:
                raise
            raise WorkerLostError(f"worker '{target}' was lost meanwhile; send to another worker") from error
        except EPDError:
            raise
        except Exception as error:  # as in a thread: it fails its sender alone
            logger.exception("worker %s failed on a message", target)
            raise fault_of(target, message, error) from error

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event

    async def _report_media(self) -> None:
        """Reports the loads of media workers, as they have no thread that does."""
        while True:
            for name, worker in self.media.items():
                self._take(WorkerReport(name, load=worker.load()))
            await asyncio.sleep(IDLE_S)

    def _take(self, report: WorkerReport) -> None:
        """Takes the report of a thread, and ignores those of lost workers."""
        if self._infos[report.worker].is_alive:
            self._events.put_nowait(report)

    # Loss

    def kill(self, name: str) -> None:
        """Kills the worker with all it holds; it is restarted after `restart_s`."""
        self._lose(name, "it was killed")

    def _lose(self, name: str, reason: str) -> None:
        info = self._infos[name]
        if self._is_closed or not info.is_alive:
            return
        self._infos[name] = replace(info, is_alive=False, closed=frozenset(), leaving=frozenset())
        if name in self.media:
            self.media[name].close()
        else:
            self._threads[name].lose(f"worker '{name}' is gone: {reason}")
            for stage in ROLE_LETTERS:
                self._hubs.close(endpoint(name, stage))
        self._events.put_nowait(WorkerLost(name, reason, info.incarnation))
        self._tasks.spawn(self._restart(name))

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._config.restart_s)
        info = self._infos[name]
        self._infos[name] = replace(info, incarnation=info.incarnation + 1)
        if name in self.media:
            self.media[name] = self._config.media_worker(self._settings.model_path)
        else:
            while True:
                try:
                    await self._start(name)
                    break
                except EPDError:
                    logger.exception("worker %s does not start", name)
                await asyncio.sleep(max(self._config.restart_s, _FROZEN_S))
        self._infos[name] = replace(self._infos[name], is_alive=True)
        self._events.put_nowait(WorkerBack(name))

    async def _watch(self) -> None:
        """Finds workers that hang. A look that is late judges nobody: the workers had no core either."""
        interval_s = self._config.hang_s / 4
        looks = Looks(interval_s, time.monotonic())
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if looks.late_s(now) > interval_s:
                continue
            for name, thread in list(self._threads.items()):
                silent_s = max(now - thread.beat_s, thread.busy_s)
                if self._infos[name].is_alive and silent_s > self._config.hang_s:
                    self._lose(name, f"no heartbeat for {silent_s:.1f} s")
