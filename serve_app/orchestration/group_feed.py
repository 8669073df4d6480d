"""Brings the groups of one attempt to encoders as room is granted; frames are fetched in order, by item.

granted  ->  an encoder has it cached?  ->  frames: from a media worker that has the item  ->  encoder
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from epd.encode.sharding import wanted_encoder
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import Reading
from epd.errors import EPDError, InternalError
from epd.serve_app.fleet import Bulk
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.messages import EncodeGroup
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.item_frames import ItemFrames
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.transfer.reception import Grant

logger = logging.getLogger(__name__)

_RETRY_S = 0.05  # until another encoder is asked
_Reader = tuple[int, int]  # an item, and one of its readers


class _SentGroups:
    """Tracks which groups of each item were sent: an encoder that reads an item waits for the next one."""

    def __init__(self) -> None:
        self._ahead: dict[int, set[int]] = {}  # of each item, groups sent before an earlier one
        self._next: Counter[int] = Counter()

    def add(self, group: MediaGroup) -> None:
        """Notes that an encoder has the group."""
        ahead = self._ahead.setdefault(group.item, set())
        ahead.add(group.index)
        while self._next[group.item] in ahead:
            ahead.remove(self._next[group.item])
            self._next[group.item] += 1

    def awaits(self, group: MediaGroup) -> bool:
        """Returns whether all groups before it have been sent."""
        return group.index <= self._next[group.item]


class GroupFeed:
    """Brings every granted group to an encoder; a group may be granted again."""

    def __init__(
        self, shared: Shared, media: FleetMedia, losses: LossCounter, isolation: Isolation, attempt: Attempt
    ) -> None:
        """Starts with nothing granted."""
        self._shared = shared
        self._media = media
        self._dispatcher = shared.dispatcher
        self._losses = losses
        self._isolation = isolation
        self._attempt = attempt
        self._last_encoder: str | None = None
        self._granted: dict[_Reader, asyncio.Queue[Grant]] = {}
        self._frames: dict[int, ItemFrames] = {}  # by item
        self._sent = _SentGroups()
        self._tasks = Tasks()

    def grant(self, granted: Grant) -> None:
        """Notes that there is room for a group."""
        group = self._attempt.answer.plan.groups[granted.group]
        if group.item not in self._frames:
            self._frames[group.item] = ItemFrames(
                self._shared, self._media, self._losses, self._attempt, group.item
            )
        reader = (group.item, self._frames[group.item].reader_of(group))
        if reader not in self._granted:
            self._granted[reader] = asyncio.Queue()
            self._tasks.spawn(self._guarded(partial(self._serve_reader, reader)))
        self._granted[reader].put_nowait(granted)

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

    async def _serve_reader(self, reader: _Reader) -> None:
        queue, plan = self._granted[reader], self._attempt.answer.plan
        while True:
            granted = await queue.get()
            if await self._from_cache(granted):
                continue
            frames = await self._read(granted.group)
            worker = await self._encoder(granted)
            self._dispatcher.record(worker, self._attempt.prefill_worker, granted, plan.groups[granted.group])
            self._sent.add(plan.groups[granted.group])
            self._tasks.spawn(self._guarded(partial(self._give, worker, granted, frames)))
            del frames

    async def _encoder(self, granted: Grant) -> str:
        """Returns the encoder that the sharding mode selects for a group, or the least loaded one.

        Ends the attempt if what is kept of the group is wanted, and the encoder that chooses it is gone.
        """
        allowed = partial(self._isolation.allowed, self._attempt, ("encode", granted.group))
        if granted.ticket.key.reading and self._attempt.sole_encoder is not None:
            sole, group = self._attempt.sole_encoder, self._attempt.answer.plan.groups[granted.group]
            name = await self._dispatcher.encoder(sole.name, allowed, lambda: not self._sent.awaits(group))
            if not self._is_sole_encoder(name):
                self._attempt.end(Outcome.TAKEN_BACK)
                await asyncio.Event().wait()  # until the feed is stopped
            return name
        wanted = wanted_encoder(
            self._shared.config.sharding, self._attempt.prefill_worker, self._last_encoder
        )
        self._last_encoder = await self._dispatcher.encoder(wanted, allowed)
        return self._last_encoder

    def _is_sole_encoder(self, worker: str | None) -> bool:
        """Returns whether a worker is the encoder of all groups, and was not started again since."""
        if worker is None:
            return False
        return NamedPeer(worker, self._shared.fleet.workers[worker].incarnation) == self._attempt.sole_encoder

    async def _from_cache(self, granted: Grant) -> bool:
        group = self._attempt.answer.plan.groups[granted.group]
        worker = self._dispatcher.encoder_with(group)
        if granted.ticket.key.reading and not self._is_sole_encoder(worker):
            return False
        if worker is None or not self._isolation.allowed(self._attempt, ("encode", granted.group), [worker]):
            return False
        self._dispatcher.record(worker, self._attempt.prefill_worker, granted, group)
        is_taken = await self._dispatcher.give(worker, self._message(granted), None)
        if is_taken:
            self._sent.add(group)
        return is_taken

    async def _read(self, number: int) -> Bulk:
        plan = self._attempt.answer.plan
        start_s = self._shared.requests.clock()
        group = plan.groups[number]
        num_substituted, frames = await self._frames[group.item].read(
            group, self._shared.config.unavailable_s
        )
        if plan.media[group.item].kind != "video":
            return frames
        self._attempt.answer.substituted.note(group.spec.key, num_substituted)
        self._attempt.answer.timings.decode_video_s += self._shared.requests.clock() - start_s
        self._attempt.progress(self._shared.requests.clock())
        self._attempt.answer.note_span("decode_video", "video", start_s, item=group.item, group=group.index)
        return frames

    async def _give(self, worker: str, granted: Grant, frames: Bulk) -> None:
        """Sends the group until an encoder takes it: an encoder's role may just have changed."""
        group = self._attempt.answer.plan.groups[granted.group]
        while not await self._dispatcher.give(worker, self._message(granted), frames):
            await asyncio.sleep(_RETRY_S)
            worker = await self._encoder(granted)
            self._dispatcher.record(worker, self._attempt.prefill_worker, granted, group)

    def _message(self, granted: Grant) -> EncodeGroup:
        plan = self._attempt.answer.plan
        group, reading = plan.groups[granted.group], None
        if granted.ticket.key.reading and group.index == 0:
            reading = Reading.of(plan.prompt, plan.groups, group.item)
        return EncodeGroup(self._attempt.id, granted.ticket, group, reading=reading)
