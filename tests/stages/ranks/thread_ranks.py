"""Ranks in one process: the others are threads that do what their processes would do.

They exchange tensors within the process, at a twelfth of gloo's CPU time. Over real gloo:
`tests/stages/ranks/test_ranked_engine.py`; in processes, and both kinds of exchanges side by side:
`tests/stages/ranks/test_process_ranks.py`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from epd.stages.placement import CPU_FLOAT32, Placement
from epd.stages.rank import Rank
from epd.stages.ranks.communicator import Communicator
from epd.stages.ranks.group import Follower, FollowerSettings

END_S = 60.0


class Meeting:
    """Where the threads of a group hand tensors to each other."""

    def __init__(self, size: int) -> None:
        self._brought: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=END_S)

    @contextmanager
    def exchange(self, index: int, tensor: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """What all ranks bring, unchanged until all have left. Raises RuntimeError if one is late."""
        self._brought[index] = tensor
        self._barrier.wait()
        brought = list(self._brought)
        yield brought
        self._barrier.wait()


class ThreadGroup:
    """Does what a process group of torch.distributed does for a `Communicator`, and is done at once."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self._index = meeting, index

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        with self._meeting.exchange(self._index, tensors[0]) as brought:
            total = reduce(torch.add, brought)
        tensors[0].copy_(total)
        return _DONE

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        with self._meeting.exchange(self._index, tensors[0]) as brought:
            if self._index != options.rootRank:
                tensors[0].copy_(brought[options.rootRank])
        return _DONE

    def gather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], _options: Any) -> Any:
        with self._meeting.exchange(self._index, tensors[0]) as brought:
            for to, one in zip(outputs[0] if outputs else (), brought, strict=bool(outputs)):
                to.copy_(one)
        return _DONE


_DONE = SimpleNamespace(wait=lambda: None)


class ThreadCommunicator(Communicator):
    """Connects one rank to the threads of the others."""

    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        self.rank, self._device = rank, torch.device("cpu")
        self._group = ThreadGroup(meeting, rank.index)


class _Other:
    """Another rank, on a thread. meeting: a file where it connects itself, over gloo, or of threads."""

    def __init__(self, path: Path, meeting: Path | Meeting, rank: Rank) -> None:
        file = meeting if isinstance(meeting, Path) else Path()
        settings = FollowerSettings(path, CPU_FLOAT32, rank, file, torch.get_num_threads())
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.follower = Follower(settings)
        if isinstance(meeting, Meeting):
            self.follower._ranks = ThreadCommunicator(rank, meeting)
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        if self.follower._ranks is None:
            self.follower.connect()
        while (step := self.told.get()) is not None:
            reply = self.follower.carry_out(pickle.loads(step))
            if reply is not None:
                self.replies.put(pickle.dumps(reply))


class ThreadRanks(ThreadCommunicator):
    """Rank 0. follower: rank 1, followers: all others. steps: all that they were told, by type."""

    def __init__(self, path: Path, size: int = 2, *, gloo_folder: Path | None = None) -> None:
        """gloo_folder: an empty one, where ranks meet that exchange over gloo."""
        meeting = Meeting(size) if gloo_folder is None else gloo_folder / "meeting"
        self.steps: list[str] = []
        self._others = [_Other(path, meeting, Rank(index, size)) for index in range(1, size)]
        self.followers = [each.follower for each in self._others]
        self.follower = self.followers[0]
        for each in self._others:
            each.thread.start()
        if isinstance(meeting, Meeting):
            super().__init__(Rank(0, size), meeting)
        else:
            Communicator.__init__(self, Rank(0, size), meeting, torch.device("cpu"))

    def tell(self, step: object) -> None:
        self.steps.append(type(step).__name__)
        for each in self._others:
            each.told.put(pickle.dumps(step))

    def ask(self, step: object) -> list[Any]:
        self.tell(step)
        return [pickle.loads(each.replies.get(timeout=END_S)) for each in self._others]

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Returns when the followers have done all that they were told."""
        for each in self._others:
            each.told.put(None)
            each.thread.join(END_S)
            assert not each.thread.is_alive()


class StartedThreadRanks(ThreadRanks):
    """Stands for `ProcessRanks` of two, without its processes."""

    def __init__(self, path: Path, _placement: Placement, size: int, *, num_threads: int = 1) -> None:
        assert size == 2
        assert num_threads
        self._path = path

    def connect(self) -> None:
        """Loads the other rank's part now: in one process, models are loaded one after the other."""
        super().__init__(self._path)

    def check(self) -> None: ...


def recorded(engine: Any) -> list[torch.Tensor]:
    """The logits of all passes of an engine from now on."""
    logits: list[torch.Tensor] = []
    run = engine._runner.run

    def run_recorded(segments: Any) -> torch.Tensor:
        logits.append(run(segments))
        return logits[-1].clone()

    engine._runner.run = run_recorded
    return logits
