"""Simulates a worker's encoder: the live batch policy over groups that wait, driven by costs."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from epd.control.elasticity.cluster import StageSample
from epd.encode.encoder_cache import EncoderCacheManager, GroupKey
from epd.encode.sharding import pick_batch
from epd.profiles.profile import Profile
from epd.simulate.clock import WorkDone, ticks_of
from epd.simulate.receiving import GroupReceiver
from epd.simulate.requests import RequestState

_WRITER = "batch"  # holds groups that are being encoded


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Describes one group of a request to the batch policy.

    key: of its content
    transfer_id: of this group on this way; receiver: where it goes, if caches are simulated
    """

    state: RequestState
    group: int
    key: GroupKey
    transfer_id: str = ""
    receiver: GroupReceiver | None = None

    @property
    def num_patches(self) -> int:
        return self.state.job.groups[self.group].media.num_patches

    @property
    def num_embeddings(self) -> int:
        return self.state.job.groups[self.group].media.num_tokens

    @property
    def shape(self) -> tuple[str | float | None, ...]:
        return (self.num_patches,)


class EncodeSide:
    """Batches waiting groups; all groups of a batch finish at once. cache: None where none is simulated."""

    def __init__(
        self,
        profile: Profile,
        max_batch_patches: int,
        cache: EncoderCacheManager | None = None,
    ) -> None:
        self.cache = cache
        self._waiting: OrderedDict[GroupKey, list[EncodeTask]] = OrderedDict()  # by content, oldest first
        self._cost = profile.encode.cost
        self._max_batch_patches = max_batch_patches
        self._batch: list[EncodeTask] = []
        self._done = WorkDone()

    @property
    def is_waited_for(self) -> bool:
        """Returns whether groups wait, apart from those that are being encoded."""
        return bool(self._waiting)

    def has_work(self) -> bool:
        return bool(self._waiting or self._batch)

    def add(self, task: EncodeTask) -> None:
        self._waiting.setdefault(task.key, []).append(task)

    def take_back(self) -> list[EncodeTask]:
        """Removes and returns all waiting groups, for other encoders."""
        tasks = self._queue()
        self._waiting.clear()
        return tasks

    def start(self) -> int | None:
        """Takes the next batch; returns its ticks, None if nothing waits."""
        if not self._waiting:
            return None
        oldest = (tasks[0] for tasks in self._waiting.values())
        picked = pick_batch(oldest, self._max_batch_patches)
        keys = list(itertools.islice(self._waiting, picked[-1] + 1))
        taken = [self._waiting.pop(key) for key in self._with_room([keys[index] for index in picked])]
        if not taken:
            return None
        self._batch = [task for tasks in taken for task in tasks]
        ticks = ticks_of(self._cost.seconds(_patches(tasks[0] for tasks in taken), len(taken)))
        self._done.add(_patches(self._batch), ticks)
        return ticks

    def _with_room(self, keys: list[GroupKey]) -> list[GroupKey]:
        """Reserves room for groups; returns those before the first without it."""
        if self.cache is None:
            return keys
        for number, key in enumerate(keys):
            num_embeddings = self._waiting[key][0].num_embeddings
            if not self.cache.can_reserve(num_embeddings):
                return keys[:number]
            self.cache.reserve(key, num_embeddings, _WRITER)
        return keys

    def take_hits(self) -> list[EncodeTask]:
        """Takes waiting groups that are in the cache already."""
        cache = self.cache
        if cache is None:
            return []
        hits = [key for key in self._waiting if cache.is_ready(key)]
        tasks = [task for key in hits for task in self._waiting.pop(key)]
        for task in tasks:
            cache.acquire(task.key, task.transfer_id)
        return tasks

    def end(self) -> list[EncodeTask]:
        """Ends the batch that `start` took. Groups of equal content have shared the work."""
        done, self._batch = self._batch, []
        if self.cache is not None:
            for key in dict.fromkeys(task.key for task in done):
                self.cache.commit(key)
            for task in done:
                self.cache.acquire(task.key, task.transfer_id)
            for key in dict.fromkeys(task.key for task in done):
                self.cache.release(key, _WRITER)
        return done

    def release(self, task: EncodeTask) -> None:
        """Makes a group that has come evictable."""
        if self.cache is not None:
            self.cache.release(task.key, task.transfer_id)

    def sample(self) -> StageSample:
        """Samples finished work, a batch from its beginning on, and waiting work."""
        queue = self._queue()
        return self._done.sample(len({id(task.state) for task in queue}), _patches(queue))

    def _queue(self) -> list[EncodeTask]:
        return [task for tasks in self._waiting.values() for task in tasks]


def _patches(tasks: Iterable[EncodeTask]) -> int:
    return sum(task.num_patches for task in tasks)
