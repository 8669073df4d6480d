"""Brings the groups of one attempt to encoders as room is granted; frames are fetched in order, by item.

granted  ->  an encoder has it cached?  ->  frames: from the media worker that has the item  ->  encoder
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from encoders.groups import MediaGroup
from epd.encode.sharding import Sharding, wanted_encoder
from epd.errors import EPDError, InternalError, UnavailableError
from epd.transfer.reception import Grant
from serve_app.fleet import Bulk, Fleet, WorkerLostError, send_surely
from serve_app.media.fleet_media import FleetMedia
from serve_app.messages import CloseStream, DecodeOrder, EncodeGroup, NotHeldError, ReadFrames, ReadImage
from serve_app.orchestration.attempt import Attempt
from serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from serve_app.orchestration.isolation import Isolation
from serve_app.orchestration.loss_counter import LossCounter
from serve_app.service import HeldItem
from serve_app.task_group import Tasks
from serve_app.worker.worker_roles import Clock

logger = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.05, 1.0  # between attempts, doubled after each
_MAX_READS = 5  # of one group, with decoders that are alive


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of an item's groups at a media worker."""

    worker: str
    id: str


class _ItemFrames:
    """Reads the frames of one item, from the media worker that has it."""

    def __init__(
        self, fleet: Fleet, media: FleetMedia, losses: LossCounter, attempt: Attempt, item: int
    ) -> None:
        self._fleet = fleet
        self._media = media
        self._losses = losses
        self._attempt = attempt
        self._item = item
        self._source = attempt.answer.request.media[item]
        self._stream: _Stream | None = None
        self._num_streams = 0

    async def read(self, group: MediaGroup, patience_s: float) -> tuple[int, Bulk]:
        """Reads a group of the item. Returns the number of substituted frames, and all frames.

        Raises MediaError, and UnavailableError if no media worker delivers it.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        num_reads, pause_s = 0, _RETRY_S
        while True:
            worker, held = await self._place()
            try:
                num_reads += 1
                with self._losses.asking(self._attempt, worker):
                    return await self._read(worker, held, group)
            except UnavailableError as error:
                if isinstance(error, WorkerLostError | NotHeldError):
                    self._media.leave(self._source, worker)
                await self.close()
                if num_reads >= _MAX_READS or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _place(self) -> tuple[str, HeldItem]:
        """Returns the worker that has the item, ready to be read."""
        is_image = self._source.kind == "image"
        return await (self._media.image(self._source) if is_image else self._media.place(self._source))

    async def _read(self, worker: str, held: HeldItem, group: MediaGroup) -> tuple[int, Bulk]:
        if self._source.kind == "image":
            return await self._fleet.fetch("video", worker, ReadImage(held, group.start, group.stop))
        stream = self._stream
        order = None
        if stream is None or stream.worker != worker:
            self._num_streams += 1
            stream_id = f"{self._attempt.id}/{self._item}/{self._num_streams}"
            stream, order = _Stream(worker, stream_id), self._order(held)
            self._stream = stream
        return await self._fleet.fetch("video", worker, ReadFrames(stream.id, group.index, order))

    def _order(self, held: HeldItem) -> DecodeOrder:
        """Returns the order for all groups of the item."""
        plan = self._attempt.answer.plan
        whole = plan.media[self._item]
        sizes = tuple(group.num_frames for group in plan.groups if group.item == self._item)
        return DecodeOrder(held, whole.times_s, sizes, whole.size)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await send_surely(self._fleet, "video", stream.worker, CloseStream(stream.id))


class GroupFeed:
    """Brings every granted group to an encoder; a group may be granted again."""

    def __init__(
        self,
        fleet: Fleet,
        media: FleetMedia,
        dispatcher: EncodeDispatcher,
        losses: LossCounter,
        isolation: Isolation,
        attempt: Attempt,
        clock: Clock,
        *,
        patience_s: float,
        sharding: Sharding = "groups",
    ) -> None:
        """Starts with nothing granted. patience_s: how long to try to read a group."""
        self._fleet = fleet
        self._media = media
        self._dispatcher = dispatcher
        self._losses = losses
        self._isolation = isolation
        self._attempt = attempt
        self._clock = clock
        self._patience_s = patience_s
        self._sharding = sharding
        self._last_encoder: str | None = None
        self._granted: dict[int, asyncio.Queue[Grant]] = {}  # by item
        self._frames: dict[int, _ItemFrames] = {}
        self._tasks = Tasks()

    def grant(self, granted: Grant) -> None:
        """Notes that there is room for a group."""
        item = self._attempt.answer.plan.groups[granted.group].item
        if item not in self._granted:
            self._granted[item] = asyncio.Queue()
            self._frames[item] = _ItemFrames(self._fleet, self._media, self._losses, self._attempt, item)
            self._tasks.spawn(self._guarded(partial(self._serve_item, item)))
        self._granted[item].put_nowait(granted)

    def stop(self) -> None:
        """Stops sending groups."""
        self._tasks.cancel()

    async def close(self) -> None:
        """Ends what was stopped, and releases the decoders."""
        await self._tasks.wait()
        for frames in self._frames.values():
            await frames.close()

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs work; an error that is not recovered ends the attempt."""
        try:
            await work()
        except EPDError as error:
            self._attempt.fail(error)
        except Exception as error:  # nothing else ends the attempt
            logger.exception("dispatching the groups of an item failed")
            self._attempt.fail(InternalError.of(error))

    async def _serve_item(self, item: int) -> None:
        queue, plan = self._granted[item], self._attempt.answer.plan
        while True:
            granted = await queue.get()
            if await self._from_cache(granted):
                continue
            frames = await self._read(granted.group)
            worker = await self._encoder(granted.group)
            self._dispatcher.book(worker, self._attempt.prefill_worker, granted, plan.groups[granted.group])
            self._tasks.spawn(self._guarded(partial(self._give, worker, granted, frames)))
            del frames

    async def _encoder(self, number: int) -> str:
        """Returns the encoder that the sharding mode selects for a group, or the least loaded one."""
        allowed = partial(self._isolation.allowed, self._attempt, ("encode", number))
        wanted = wanted_encoder(self._sharding, self._attempt.prefill_worker, self._last_encoder)
        self._last_encoder = await self._dispatcher.encoder(wanted, allowed)
        return self._last_encoder

    async def _from_cache(self, granted: Grant) -> bool:
        group = self._attempt.answer.plan.groups[granted.group]
        worker = self._dispatcher.encoder_with(group)
        if worker is None or not self._isolation.allowed(self._attempt, ("encode", granted.group), [worker]):
            return False
        self._dispatcher.book(worker, self._attempt.prefill_worker, granted, group)
        return await self._dispatcher.give(worker, self._message(granted), None)

    async def _read(self, number: int) -> Bulk:
        plan = self._attempt.answer.plan
        start_s = self._clock()
        group = plan.groups[number]
        num_substituted, frames = await self._frames[group.item].read(group, self._patience_s)
        if plan.media[group.item].kind == "image":
            return frames
        self._attempt.answer.substituted.note(group.spec.key, num_substituted)
        self._attempt.answer.timings.decode_video_s += self._clock() - start_s
        self._attempt.event_s = self._clock()
        self._attempt.answer.note_span("decode_video", "video", start_s, item=group.item, group=group.index)
        return frames

    async def _give(self, worker: str, granted: Grant, frames: Bulk) -> None:
        """Sends the group until an encoder takes it: an encoder's role may just have changed."""
        group = self._attempt.answer.plan.groups[granted.group]
        while not await self._dispatcher.give(worker, self._message(granted), frames):
            await asyncio.sleep(_RETRY_S)
            worker = await self._encoder(granted.group)
            self._dispatcher.book(worker, self._attempt.prefill_worker, granted, group)

    def _message(self, granted: Grant) -> EncodeGroup:
        group = self._attempt.answer.plan.groups[granted.group]
        return EncodeGroup(self._attempt.id, granted.ticket, group)
