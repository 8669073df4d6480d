"""Brings the groups of one attempt to encoders as room is granted; frames are fetched in order, by item.

granted  ->  an encoder has it?  ->  frames: from a media worker that has the item  ->  encoder

The frames of one item's groups come from the media workers that have it; of a long video, from several.

    groups        | 0 1 2 3 | 4 5 6 7 | 8 9 ...      runs
    reader 0 (v0)      stream              stream    each reads its granted groups in order
    reader 1 (v1)                stream              v1 gets the file first

A run is decoded as a stream of its own, from the keyframe before it: longer runs decode fewer frames twice,
shorter ones let later readers begin before the room for frames is used up by earlier runs.
No group is read before there is room for its frames. A reader whose worker is lost reads on at another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from epd.encode.sharding import wanted_encoder
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import ItemReduction, begins_reading
from epd.errors import EPDError, InternalError, UnavailableError
from epd.serve_app.fleet import Bulk, Fleet, WorkerLostError, send_surely
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media_messages import CloseStream, DecodeOrder, NotHeldError, ReadFrames, ReadImage
from epd.serve_app.messages import EncodeGroup
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.service import HeldItem
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.transfer.transfers import Grant

_MIN_RUN, _MAX_RUN, _RUNS_PER_READER = 4, 16, 2
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0  # until another worker is asked; doubled after each failed read
_MAX_READS = 5  # of one group, with workers that are alive
logger = logging.getLogger(__name__)

_Place = tuple[int, int]  # an item, and one of its readers


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Consecutive groups [start, stop) of a video, decoded by one reader."""

    start: int
    stop: int
    reader: int

    def __contains__(self, group: int) -> bool:
        return self.start <= group < self.stop


def plan_runs(num_groups: int, num_readers: int) -> tuple[GroupRun, ...]:
    """Returns runs in order, without gaps, dealt to readers in turn; a short video is one run of reader 0.

    num_readers: workers that can read it now
    """
    if num_readers < 2 or num_groups < 2 * _MIN_RUN:
        return (GroupRun(0, num_groups, 0),)
    length = math.ceil(num_groups / (num_readers * _RUNS_PER_READER))
    length = min(max(length, _MIN_RUN), _MAX_RUN)
    starts = range(0, num_groups, length)
    return tuple(
        GroupRun(start, min(start + length, num_groups), number % num_readers)
        for number, start in enumerate(starts)
    )


class ItemFrames:
    """Reads the frames of one item. Readers may read at once, each in order.

    shared, media, losses, isolation, attempt, item: what its readers read, and by what
    """

    def __init__(
        self,
        shared: Shared,
        media: FleetMedia,
        losses: LossCounter,
        isolation: Isolation,
        attempt: Attempt,
        item: int,
    ) -> None:
        """Chooses the readers of a long video among the workers that read nothing now."""
        self.shared, self.media, self.losses, self.isolation = shared, media, losses, isolation
        self.attempt, self.item = attempt, item
        self.source = attempt.answer.request.media[item]
        num_groups = sum(group.item == item for group in attempt.answer.plan.groups)
        others = media.spare_workers(self.source) if self.source.kind == "video" else []
        self._runs = plan_runs(num_groups, 1 + len(others))
        workers = [None, *others][: 1 + max(run.reader for run in self._runs)]
        self._readers = [_Reader(self, str(number), worker) for number, worker in enumerate(workers)]

    def reader_of(self, group: MediaGroup) -> int:
        """Returns the number of the reader of a group."""
        return self._run_of(group).reader

    def _run_of(self, group: MediaGroup) -> GroupRun:
        return next(run for run in self._runs if group.index in run)

    async def read(self, group: MediaGroup, patience_s: float) -> tuple[int, Bulk]:
        """Reads a group of the item. Returns the number of substituted frames, and all frames.

        Raises MediaError, and UnavailableError if no media worker delivers it.
        """
        run = self._run_of(group)
        return await self._readers[run.reader].read(group, run, patience_s)

    async def close(self) -> None:
        """Closes the streams."""
        for reader in self._readers:
            await reader.close()


class _Reader:
    """Reads some of an item's groups, one after another, by one stream at a time."""

    def __init__(self, frames: ItemFrames, name: str, wanted: str | None) -> None:
        """wanted: the worker to read from while it has the item; None for any that has it."""
        self._frames = frames
        self._name = name
        self._wanted = wanted
        self._stream: tuple[str, GroupRun, str] | None = None  # its worker, its groups, its id
        self._num_streams = 0

    async def read(self, group: MediaGroup, run: GroupRun, patience_s: float) -> tuple[int, Bulk]:
        """See `ItemFrames.read`."""
        item, deadline = self._frames, asyncio.get_running_loop().time() + patience_s
        num_reads, pause_s = 0, _RETRY_S
        while True:
            worker, held = await self._place()
            if not item.isolation.allowed(item.attempt, "video", [worker]):
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                num_reads += 1
                with item.shared.asking(item.attempt, worker):
                    frames = await self._read(worker, held, group, run)
                item.attempt.isolated_at -= {"video"}  # it got further than where it was lost
                return frames
            except UnavailableError as error:
                if isinstance(error, WorkerLostError | NotHeldError):
                    item.media.leave(item.source, worker)
                await self.close()
                if num_reads >= _MAX_READS or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(pause_s)
                await item.losses.check(item.attempt.answer.request)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _place(self) -> tuple[str, HeldItem]:
        """Returns a worker that has the item, ready to be read."""
        media, source = self._frames.media, self._frames.source
        if source.kind != "video":
            return await media.image(source)
        if self._wanted is not None:
            held = await media.lend(source, self._wanted)
            if held is not None:
                return self._wanted, held
            self._wanted = None
        return await media.place(source)

    async def _read(self, worker: str, held: HeldItem, group: MediaGroup, run: GroupRun) -> tuple[int, Bulk]:
        item, fleet = self._frames, self._frames.shared.fleet
        if item.source.kind != "video":
            return await fleet.fetch("video", worker, ReadImage(held, group.start, group.stop))
        order = None
        if self._stream is None or self._stream[:2] != (worker, run):
            await self.close()
            self._num_streams += 1
            stream_id = f"{item.attempt.id}/{item.item}/{self._name}.{self._num_streams}"
            self._stream = worker, run, stream_id
            item.media.reading[worker] += 1
            order = self._order(held, run)
        message = ReadFrames(self._stream[2], group.index - run.start, order)
        return await fleet.fetch("video", worker, message)

    def _order(self, held: HeldItem, run: GroupRun) -> DecodeOrder:
        """Returns the order for the groups of a run."""
        plan, item = self._frames.attempt.answer.plan, self._frames.item
        whole = plan.media[item]
        sizes = tuple(group.num_frames for group in plan.groups if group.item == item)
        return DecodeOrder(held, whole.times_s, sizes, whole.size).groups(run.start, run.stop)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            worker, _, stream_id = stream
            self._frames.media.reading[worker] -= 1
            await send_surely(self._frames.shared.fleet, "video", worker, CloseStream(stream_id))


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


class _Readings:
    """Finds the readings of an attempt's items, and the encoder that gets all groups of each."""

    def __init__(self, fleet: Fleet, attempt: Attempt) -> None:
        self._fleet = fleet
        self._attempt = attempt
        self._found: dict[int, dict[int, ItemReduction | None]] = {}  # by item and first group

    def beginning_with(self, granted: Grant) -> ItemReduction | None:
        """Returns the reading that begins with a group, if what is kept of it is wanted and one does."""
        if not granted.ticket.key.reading:
            return None
        group = self._attempt.answer.plan.groups[granted.group]
        if group.item not in self._found:
            self._found[group.item] = self._of_item(group.item)
        return self._found[group.item].get(group.index)

    def _of_item(self, number: int) -> dict[int, ItemReduction | None]:
        """Returns the readings of an item by their first groups. Each group is looked at once."""
        plan = self._attempt.answer.plan
        item, groups = plan.prompt.media[number], [each for each in plan.groups if each.item == number]
        starts = [group.index for group in groups if begins_reading(item, group)]
        return {
            start: ItemReduction.of(plan.prompt, groups[start:stop])
            for start, stop in pairwise([*starts, len(groups)])
        }

    def is_of_several(self, granted: Grant) -> bool:
        """Returns whether what is kept of a group depends on other groups, or theirs on it."""
        reading = self.beginning_with(granted)
        return bool(granted.ticket.key.reading) and (reading is None or not reading.is_of_a_group)

    def give_to(self, worker: str, granted: Grant) -> bool:
        """Gives all groups of a reading to an encoder, unless another has them.

        Returns whether that encoder, if it was not started again since, has them.
        """
        peer = NamedPeer(worker, self._fleet.workers[worker].incarnation)
        return self._attempt.readers.setdefault(granted.ticket.key.reading, peer) == peer


class GroupFeed:
    """Brings every granted group to an encoder; a group may be granted again."""

    def __init__(
        self, shared: Shared, media: FleetMedia, losses: LossCounter, isolation: Isolation, attempt: Attempt
    ) -> None:
        """Starts with nothing granted."""
        self._shared, self._dispatcher, self._attempt = shared, shared.dispatcher, attempt
        self._media, self._losses, self._isolation = media, losses, isolation
        self._last_encoder: str | None = None
        self._granted: dict[_Place, asyncio.Queue[Grant]] = {}
        self._frames: dict[int, ItemFrames] = {}  # by item
        self._readings = _Readings(shared.fleet, attempt)
        self._sent = _SentGroups()
        self._tasks = Tasks()

    def grant(self, granted: Grant) -> None:
        """Notes that there is room for a group."""
        group = self._attempt.answer.plan.groups[granted.group]
        if group.item not in self._frames:
            self._frames[group.item] = ItemFrames(
                self._shared, self._media, self._losses, self._isolation, self._attempt, group.item
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

    async def _serve_reader(self, reader: _Place) -> None:
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
        group = self._attempt.answer.plan.groups[granted.group]
        if self._readings.is_of_several(granted):
            reader = self._reader(granted, group)
            name = await self._dispatcher.encoders.next(reader, allowed, lambda: not self._sent.awaits(group))
            if not self._readings.give_to(name, granted):
                self._attempt.end(Outcome.TAKEN_BACK)
                await asyncio.Event().wait()  # until the feed is stopped
            return name
        self._last_encoder = await self._dispatcher.encoders.next(
            self._wanted_encoder(), allowed, num_patches=group.spec.num_patches
        )
        return self._last_encoder

    def _wanted_encoder(self) -> str | None:
        """Returns the encoder that the sharding mode selects for the next group."""
        sharding = self._shared.config.sharding
        return wanted_encoder(sharding, self._attempt.prefill_worker, self._last_encoder)

    def _reader(self, granted: Grant, group: MediaGroup) -> str | None:
        """Returns the encoder that gets all groups of a group's reading, chosen now for the first to come.

        None if no encoder is alive.
        """
        known = self._attempt.readers.get(granted.ticket.key.reading)
        if known is not None:
            return known.name
        name = self._dispatcher.encoders.preferred(self._wanted_encoder(), group.spec.num_patches)
        if name is not None and self._readings.give_to(name, granted):
            self._last_encoder = name
        return name

    async def _from_cache(self, granted: Grant) -> bool:
        group = self._attempt.answer.plan.groups[granted.group]
        worker = self._dispatcher.encoders.with_group(group)
        reader = self._attempt.readers.get(granted.ticket.key.reading)
        if self._shared.config.cache_dir is not None and (worker is None or reader is not None):
            wanted = self._wanted_encoder() if reader is None else reader.name
            allowed = partial(self._isolation.allowed, self._attempt, ("encode", granted.group))
            worker = await self._dispatcher.encoders.next(wanted, allowed, needs_room=lambda: False)
        if worker is None or not self._isolation.allowed(self._attempt, ("encode", granted.group), [worker]):
            return False
        if self._readings.is_of_several(granted) and not self._readings.give_to(worker, granted):
            return False
        self._dispatcher.record(worker, self._attempt.prefill_worker, granted, group)
        is_taken = await self._dispatcher.give(worker, self._message(granted, self._frames_s(group)), None)
        if is_taken:
            self._sent.add(group)
        return is_taken

    def _frames_s(self, group: MediaGroup) -> float | None:
        """Returns the seconds in which frames like a group's came of late; None if that is not known."""
        return self._shared.reading.seconds(_num_read(group), self._shared.requests.clock())

    async def _read(self, number: int) -> Bulk:
        plan = self._attempt.answer.plan
        start_s = self._shared.requests.clock()
        group = plan.groups[number]
        num_substituted, frames = await self._frames[group.item].read(
            group, self._shared.config.unavailable_s
        )
        if self._attempt.answer.reuses is not None:
            self._attempt.answer.reuses.read(group.item, group.index)
            self._shared.reading.add(_num_read(group), start_s, self._shared.requests.clock())
        if plan.media[group.item].kind != "video":
            return frames
        self._attempt.answer.substituted.note(group.spec.key, num_substituted)
        self._attempt.answer.timings.decode_video_s += self._shared.requests.clock() - start_s
        self._attempt.event_s = self._shared.requests.clock()
        self._attempt.answer.note_span("decode_video", "video", start_s, item=group.item, group=group.index)
        return frames

    async def _give(self, worker: str, granted: Grant, frames: Bulk) -> None:
        """Sends the group until an encoder takes it: an encoder's role may just have changed."""
        group = self._attempt.answer.plan.groups[granted.group]
        while not await self._dispatcher.give(worker, self._message(granted), frames):
            await asyncio.sleep(_RETRY_S)
            worker = await self._encoder(granted)
            self._dispatcher.record(worker, self._attempt.prefill_worker, granted, group)

    def _message(self, granted: Grant, frames_s: float | None = None) -> EncodeGroup:
        plan = self._attempt.answer.plan
        group, reading = plan.groups[granted.group], self._readings.beginning_with(granted)
        return EncodeGroup(self._attempt.id, granted.ticket, group, reading=reading, frames_s=frames_s)


def _num_read(group: MediaGroup) -> float:
    """Returns patches of a group, of all frames of the source that are decoded on the way to those wanted."""
    return group.spec.num_patches * max(1.0, group.plan.unit_span_s * group.plan.source_fps)
