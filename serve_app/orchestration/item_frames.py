"""Reads the frames of one item's groups from the media workers that have it; of a long video, from several.

    groups        | 0 1 2 3 | 4 5 6 7 | 8 9 ...      runs
    reader 0 (v0)      stream              stream    each reads its granted groups in order
    reader 1 (v1)                stream              v1 gets the file first

A run is decoded as a stream of its own, from the keyframe before it: longer runs decode fewer frames twice,
shorter ones let later readers begin before the room for frames is used up by earlier runs.
No group is read before there is room for its frames. A reader whose worker is lost reads on at another one.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from epd.encoders.groups import MediaGroup
from epd.errors import UnavailableError
from epd.serve_app.fleet import Bulk, WorkerLostError, send_surely
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media_messages import CloseStream, DecodeOrder, NotHeldError, ReadFrames, ReadImage
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.requests import Attempt, Shared
from epd.serve_app.service import HeldItem

_MIN_RUN, _MAX_RUN = 4, 16
_RUNS_PER_READER = 2
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0  # between attempts, doubled after each
_MAX_READS = 5  # of one group, with workers that are alive


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive groups [start, stop) of a video, decoded by one reader."""

    start: int
    stop: int
    reader: int

    def __contains__(self, group: int) -> bool:
        return self.start <= group < self.stop


def plan_runs(num_groups: int, num_readers: int) -> tuple[Run, ...]:
    """Returns runs in order, without gaps, dealt to readers in turn; a short video is one run of reader 0.

    num_readers: workers that can read it now
    """
    if num_readers < 2 or num_groups < 2 * _MIN_RUN:
        return (Run(0, num_groups, 0),)
    length = math.ceil(num_groups / (num_readers * _RUNS_PER_READER))
    length = min(max(length, _MIN_RUN), _MAX_RUN)
    starts = range(0, num_groups, length)
    return tuple(
        Run(start, min(start + length, num_groups), number % num_readers)
        for number, start in enumerate(starts)
    )


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of a run's groups at a media worker."""

    worker: str
    id: str
    run: Run


class _Lane:
    """Reads some of an item's groups, one after another.

    wanted: the worker to read from while it has the item; None for any that has it
    """

    def __init__(
        self, shared: Shared, media: FleetMedia, losses: LossCounter, attempt: Attempt, item: int, name: str
    ) -> None:
        self.wanted: str | None = None
        self._shared = shared
        self._fleet = shared.fleet
        self._media = media
        self._losses = losses
        self._attempt = attempt
        self._item = item
        self._name = name
        self._source = attempt.answer.request.media[item]
        self._stream: _Stream | None = None
        self._num_streams = 0

    async def read(self, group: MediaGroup, run: Run, patience_s: float) -> tuple[int, Bulk]:
        """See `ItemFrames.read`."""
        deadline = asyncio.get_running_loop().time() + patience_s
        num_reads, pause_s = 0, _RETRY_S
        while True:
            worker, held = await self._place()
            try:
                num_reads += 1
                with self._shared.asking(self._attempt, worker):
                    return await self._read(worker, held, group, run)
            except UnavailableError as error:
                if isinstance(error, WorkerLostError | NotHeldError):
                    self._media.leave(self._source, worker)
                await self.close()
                if num_reads >= _MAX_READS or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(pause_s)
                await self._losses.check(self._attempt.answer.request)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _place(self) -> tuple[str, HeldItem]:
        """Returns a worker that has the item, ready to be read."""
        if self._source.kind != "video":
            return await self._media.image(self._source)
        if self.wanted is not None:
            held = await self._media.lend(self._source, self.wanted)
            if held is not None:
                return self.wanted, held
            self.wanted = None
        return await self._media.place(self._source)

    async def _read(self, worker: str, held: HeldItem, group: MediaGroup, run: Run) -> tuple[int, Bulk]:
        if self._source.kind != "video":
            return await self._fleet.fetch("video", worker, ReadImage(held, group.start, group.stop))
        stream, order = self._stream, None
        if stream is None or (stream.worker, stream.run) != (worker, run):
            await self.close()
            self._num_streams += 1
            stream_id = f"{self._attempt.id}/{self._item}/{self._name}.{self._num_streams}"
            stream = self._stream = _Stream(worker, stream_id, run)
            self._media.reading[worker] += 1
            order = self._order(held, run)
        message = ReadFrames(stream.id, group.index - run.start, order)
        return await self._fleet.fetch("video", worker, message)

    def _order(self, held: HeldItem, run: Run) -> DecodeOrder:
        """Returns the order for the groups of a run."""
        plan = self._attempt.answer.plan
        whole = plan.media[self._item]
        sizes = tuple(group.num_frames for group in plan.groups if group.item == self._item)
        return DecodeOrder(held, whole.times_s, sizes, whole.size).groups(run.start, run.stop)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._media.reading[stream.worker] -= 1
            await send_surely(self._fleet, "video", stream.worker, CloseStream(stream.id))


class ItemFrames:
    """Reads the frames of one item. Lanes may be read at once, each in order."""

    def __init__(
        self, shared: Shared, media: FleetMedia, losses: LossCounter, attempt: Attempt, item: int
    ) -> None:
        """Chooses the readers of a long video among the workers that read nothing now."""
        num_groups = sum(group.item == item for group in attempt.answer.plan.groups)
        source = attempt.answer.request.media[item]
        others = media.spare_workers(source) if source.kind == "video" else []
        self._runs = plan_runs(num_groups, 1 + len(others))
        self._readers = [
            _Lane(shared, media, losses, attempt, item, str(number))
            for number in range(1 + max(run.reader for run in self._runs))
        ]
        for reader, worker in zip(self._readers[1:], others, strict=False):
            reader.wanted = worker

    def reader_of(self, group: MediaGroup) -> int:
        """Returns the number of the reader of a group."""
        return self._run_of(group).reader

    def _run_of(self, group: MediaGroup) -> Run:
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
