"""Brings the groups of one attempt to encoders as room is granted; frames are fetched in order, by item.

granted  ->  an encoder has it cached?  ->  frames: from the image, or from a video decoder  ->  encoder
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from epd.control.routing import Router
from epd.encode.sharding import Sharding, wanted_encoder
from epd.errors import EPDError, InternalError, UnavailableError
from epd.transfer.reception import Grant
from serve_app.fleet import Bulk, Fleet, send_surely
from serve_app.messages import CloseStream, DecodeOrder, EncodeGroup, ReadFrames
from serve_app.orchestration.attempt import Attempt
from serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from serve_app.orchestration.isolation import Isolation
from serve_app.orchestration.loss_counter import LossCounter
from serve_app.task_group import Tasks
from serve_app.worker.worker_roles import Clock

logger = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.05, 1.0  # between attempts, doubled after each
_MAX_READS = 5  # of one group, with decoders that are alive


class _ItemFrames:
    """Reads the frames of one item, from one video worker for as long as that answers."""

    def __init__(
        self, fleet: Fleet, router: Router, losses: LossCounter, attempt: Attempt, item: int
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._losses = losses
        self._attempt = attempt
        self._item = item
        self._worker: str | None = None
        self._failed: str | None = None
        self._num_streams = 0
        self._is_open = False  # whether the decoder has received the stream's order

    async def read(self, index: int, patience_s: float) -> tuple[int, Bulk]:
        """Reads the item's group `index`. Returns the number of substituted frames, and all frames.

        Raises MediaError, and UnavailableError if no decoder delivers it.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        num_reads, pause_s = 0, _RETRY_S
        while True:
            try:
                worker = self._worker or self._choose()
                num_reads += 1
                message = ReadFrames(self._stream_id, index, None if self._is_open else self._order())
                with self._losses.asking(self._attempt, worker):
                    reply = await self._fleet.fetch("video", worker, message)
                self._is_open = True
                return reply
            except UnavailableError:  # also when that worker is lost
                self._leave()
                if num_reads >= _MAX_READS or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _order(self) -> DecodeOrder:
        """Returns the order for all groups of the item."""
        plan, source = self._attempt.answer.plan, self._attempt.answer.request.media[self._item]
        whole = plan.media[self._item].plan
        sizes = tuple(group.num_frames for group in plan.groups if group.item == self._item)
        return DecodeOrder(source.path, whole.times_s, sizes, whole.size, source.label)

    @property
    def _stream_id(self) -> str:
        return f"{self._attempt.id}/{self._item}/{self._num_streams}"

    def _choose(self) -> str:
        """Returns the video worker that reads the fewest items; one that just failed only if it is alone."""
        names = [info.name for info in self._fleet.workers.values() if info.takes("video")]
        if not names:
            raise UnavailableError("no video worker is alive; retry")
        self._num_streams += 1
        self._is_open = False
        self._worker = self._router.video([name for name in names if name != self._failed] or names)
        self._router.add(self._worker, num_videos=1)
        return self._worker

    def _leave(self) -> str | None:
        """Releases the video worker. Returns its name, if there was one."""
        self._failed, self._worker = self._worker, None
        if self._failed is not None:
            self._router.add(self._failed, num_videos=-1)
        return self._failed

    async def close(self) -> None:
        worker = self._leave()
        if worker is not None:
            await send_surely(self._fleet, "video", worker, CloseStream(self._stream_id))


class GroupFeed:
    """Brings every granted group to an encoder; a group may be granted again."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        dispatcher: EncodeDispatcher,
        losses: LossCounter,
        isolation: Isolation,
        attempt: Attempt,
        clock: Clock,
        *,
        patience_s: float,
        sharding: Sharding = "groups",
    ) -> None:
        """Starts with nothing granted. patience_s: how long to wait for a video decoder when all are lost."""
        self._fleet = fleet
        self._router = router
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
            self._frames[item] = _ItemFrames(self._fleet, self._router, self._losses, self._attempt, item)
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
        image = plan.image_of(number)
        if image is not None:
            return image
        start_s = self._clock()
        group = plan.groups[number]
        num_substituted, frames = await self._frames[group.item].read(group.index, self._patience_s)
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
