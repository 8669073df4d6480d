"""Serves a media worker to fronts, and what it reads to encoders and other media workers, over links."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from epd.control.elasticity.cluster import MediaSample
from epd.errors import EPDError
from epd.serve_app.fleet import FramesLostError
from epd.serve_app.media_messages import CompressVideo, NotHeldError, PlanImages, ReadFrames
from epd.serve_app.messages import Message, WorkerLoad, WorkerReport
from epd.serve_app.network.calls import Answer, Channel, Channels
from epd.serve_app.network.link import Link, LinkClosedError
from epd.serve_app.network.members import BoardClient, Hello, KnownFronts, ProcessAddress, Purpose, View
from epd.serve_app.network.membership import Membership
from epd.serve_app.network.wire import (
    BulkPlace,
    FetchCall,
    Fetched,
    FrontLost,
    ReleaseBulk,
    TakeBulk,
    WorkerCall,
)
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker.worker_thread import fault_of
from epd.serve_app.worker_info import EVERY_STAGE
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

_REPORT_S = 0.5
_MAX_STEP_S = 120.0  # a worker that is busy with one read for this time ends


class MediaHost(Protocol):
    """Does the work of a media worker: a `MediaWorker`."""

    async def answer(
        self, message: Message[Any], owner: str, bulk: UInt8Array | None
    ) -> tuple[Any, UInt8Array | None]:
        """Returns the reply, and frames if there are any. Raises EPDError, or any error of a bug."""
        ...

    def drop_owner(self, owner: str) -> None:
        """Frees everything of a front that is gone."""
        ...

    def close(self) -> None:
        """Frees everything. May block for some seconds."""
        ...

    def load(self) -> WorkerLoad: ...

    @property
    def busy_s(self) -> float:
        """Returns seconds that the oldest read in progress has taken; 0 without any."""
        ...

    @property
    def num_holds(self) -> int:
        """Returns the number of requests whose media it holds."""
        ...


class _KeptFrames:
    """Keeps frames by number, each with the front that owns them, until they are released or that is gone."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[str, UInt8Array]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._frames)

    def keep(self, owner: str, frames: UInt8Array | None) -> int | None:
        """Returns the number by which they are fetched; None without any."""
        if frames is None:
            return None
        number = next(self._numbers)
        self._frames[number] = owner, frames
        return number

    def give(self, call: TakeBulk, answer: Answer) -> None:
        """Answers with frames, which stay until they are released."""
        _, frames = self._frames.get(call.number, ("", None))
        answer(
            FramesLostError("the frames were released; have them decoded again") if frames is None else frames
        )

    def release(self, release: ReleaseBulk) -> None:
        self._frames.pop(release.number, None)

    def drop_owner(self, owner: str) -> None:
        self._frames = {number: kept for number, kept in self._frames.items() if kept[0] != owner}

    def clear(self) -> None:
        self._frames = {}


class MediaServer:
    """Runs one media worker. Used from one event loop."""

    def __init__(
        self,
        board: BoardClient,
        place: ProcessAddress,
        host: MediaHost,
        purpose: Purpose | None = None,
        num_threads: int = 2,
    ) -> None:
        """Starts without links. num_threads: decodes that the host does at once."""
        self.membership = Membership(board, "media", place, purpose)
        self._num_threads = num_threads
        self._num_decoding = self._num_decoded = 0
        self._host = host
        self._fronts: dict[str, Channel] = {}
        self._known_fronts = KnownFronts()
        self._kept = _KeptFrames()
        self._loops = Loops(Counter(), lambda loop: self.membership.on_ended(f"its loop '{loop}' has ended"))
        self._tasks = Tasks()
        self._channels: Channels | None = None  # to other media workers
        self.is_healthy = True

    async def start(self) -> None:
        """Joins, and takes work."""
        await self.membership.join(self._accept)
        self._channels = Channels(self.membership.credentials.key, Hello("media", self.membership.epoch))
        self.membership.on_view = self._take_view
        self._loops.start("board", self.membership.run)
        self._loops.start("load", self._report)
        await self.membership.update(is_ready=True)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new items, waits until those in work are read, and leaves. Returns whether all were."""
        self._set_closed()
        try:
            async with asyncio.timeout(timeout_s):
                while self._host.num_holds:
                    await asyncio.sleep(_REPORT_S / 10)
        except TimeoutError:
            return False
        finally:
            await self.membership.leave()
        return True

    async def close(self) -> None:
        """Ends the worker with what it has. May be called again."""
        self.is_healthy = False
        await self.membership.leave()
        await self._loops.close()
        self._tasks.cancel()
        await self._tasks.wait()
        if self._channels is not None:
            self._channels.close()
        await asyncio.to_thread(self._host.close)
        self._kept.clear()

    # Links

    def _accept(self, link: Link) -> None:
        channel = Channel(link)
        channel.on_push = partial(self._greet, channel)

    def _greet(self, channel: Channel, hello: Hello) -> None:
        if hello.kind == "front":
            self._known_fronts.add(hello)
            self._fronts[hello.epoch] = channel
            channel.on_call = partial(self._take, hello.epoch)
            channel.on_push = self._kept.release
            channel.push(self.membership.info)
        elif hello.kind in ("stage", "media"):
            channel.on_call = self._kept.give

    def _take(self, owner: str, call: FetchCall | WorkerCall, answer: Answer) -> None:
        self._tasks.spawn(self._handle(owner, call, answer))

    async def _handle(self, owner: str, call: FetchCall | WorkerCall, answer: Answer) -> None:
        message = call.message
        is_decoding = isinstance(message, ReadFrames | PlanImages | CompressVideo)
        self._num_decoding += is_decoding
        try:
            bulk = await self._bulk(call) if isinstance(call, WorkerCall) else None
            value, frames = await self._host.answer(message, owner, bulk)
        except EPDError as error:
            answer(error)
        except Exception as error:  # what cannot be read fails its request alone
            logger.exception("media worker %s failed on a message", self.membership.info.name)
            answer(fault_of(self.membership.info.name, message, error))
        else:
            if isinstance(call, FetchCall):
                value = Fetched(value, self._kept.keep(owner, frames) if owner in self._fronts else None)
            answer(value)
        finally:
            self._num_decoding -= is_decoding
            self._num_decoded += is_decoding

    async def _bulk(self, call: WorkerCall) -> UInt8Array | None:
        """Returns the bytes that come with a message. Raises NotHeldError if they are gone."""
        if not isinstance(call.bulk, BulkPlace):
            return call.bulk
        assert self._channels is not None
        try:
            there = TakeBulk(call.bulk.number)
            found: UInt8Array = await self._channels.call(call.bulk.address, there)
        except LinkClosedError as error:
            raise NotHeldError(f"the bytes are lost: {error}; send them again") from error
        return found

    # The board

    def _take_view(self, view: View) -> None:
        for owner in self._known_fronts.lost(view):
            self._drop_front(owner)

    def _drop_front(self, owner: str) -> None:
        channel = self._fronts.pop(owner, None)
        if channel is not None:
            channel.push(FrontLost())
            channel.close("the front was declared lost")
        self._kept.drop_owner(owner)
        self._host.drop_owner(owner)

    def _set_closed(self) -> None:
        info = self.membership.info
        info = replace(info, closed=info.roles, leaving=EVERY_STAGE)
        self.membership.set(info=info)
        for channel in self._fronts.values():
            channel.push(info)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            if self._host.busy_s > _MAX_STEP_S:
                self.is_healthy = False
                self.membership.on_ended(f"a step of {self._host.busy_s:.0f} s")
            report = WorkerReport(self.membership.info.name, load=self._load())
            for channel in self._fronts.values():
                channel.push(report)

    def _load(self) -> WorkerLoad:
        name = self.membership.info.name
        media = MediaSample(name, self._num_threads, self._num_decoding, self._num_decoded)
        return replace(self._host.load(), media=media)
