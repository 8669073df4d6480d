"""A worker's encoder: the live batch policy over groups that wait, driven by costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epd.elasticity import StageSample
from epd.encode_batching import WaitingGroup, pick_batch
from epd.encoder_cache import GroupKey
from epd.profiles.profile import Profile
from epd.simulate.clock import ticks_of
from epd.simulate.requests import RequestState
from epd.simulate.work_done import WorkDone


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """One group of a request, as the batch policy sees it."""

    state: RequestState
    group: int
    waiting: WaitingGroup


def encode_task(state: RequestState, group: int, key: GroupKey) -> EncodeTask:
    patches = state.job.groups[group].media.num_patches
    return EncodeTask(state, group, WaitingGroup(key, (patches,), patches))


class EncodeSide:
    """Groups wait, some are taken together, all of them are done at once."""

    def __init__(self, profile: Profile, max_batch_patches: int) -> None:
        self.queue: list[EncodeTask] = []
        self._cost = profile.encode.cost
        self._max_batch_patches = max_batch_patches
        self._batch: list[EncodeTask] = []
        self._done = WorkDone()

    def has_work(self) -> bool:
        return bool(self.queue or self._batch)

    def start(self) -> int | None:
        """Takes the next batch; its ticks, None if nothing waits."""
        if not self.queue:
            return None
        waiting = [task.waiting for task in self.queue[: self._max_batch_patches]]
        picked = pick_batch(waiting, self._max_batch_patches)
        keys = {waiting[index].key for index in picked}
        self._batch = [task for task in self.queue if task.waiting.key in keys]
        self.queue = [task for task in self.queue if task.waiting.key not in keys]
        patches = sum(waiting[index].num_patches for index in picked)
        ticks = ticks_of(self._cost.seconds(patches, len(picked)))
        self._done.add(_patches(self._batch), ticks)
        return ticks

    def end(self) -> list[EncodeTask]:
        """The batch that `start` took. Groups of equal content have shared the work."""
        done, self._batch = self._batch, []
        return done

    def sample(self) -> StageSample:
        """What has been done, a batch from its beginning on, and what waits."""
        return self._done.sample(len({id(task.state) for task in self.queue}), _patches(self.queue))


def _patches(tasks: Iterable[EncodeTask]) -> int:
    return sum(task.waiting.num_patches for task in tasks)
