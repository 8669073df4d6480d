"""Ranks in one process: the others are threads that do what their processes would do, over real gloo."""

from __future__ import annotations

import pickle
import queue
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from epd.stages.placement import CPU_FLOAT32, Placement
from epd.stages.rank import Rank
from epd.stages.ranks.communicator import Communicator
from epd.stages.ranks.group import Follower, FollowerSettings

END_S = 60.0


class _Other:
    """Another rank, on a thread."""

    def __init__(self, path: Path, meeting: Path, rank: Rank) -> None:
        settings = FollowerSettings(path, CPU_FLOAT32, rank, meeting, torch.get_num_threads())
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.follower = Follower(settings)
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        self.follower.connect()
        while (step := self.told.get()) is not None:
            reply = self.follower.carry_out(pickle.loads(step))
            if reply is not None:
                self.replies.put(pickle.dumps(reply))


class ThreadRanks(Communicator):
    """Rank 0. follower: rank 1, followers: all others. steps: all that they were told, by type."""

    def __init__(self, path: Path, folder: Path, size: int = 2) -> None:
        meeting = folder / "meeting"
        self.steps: list[str] = []
        self._others = [_Other(path, meeting, Rank(index, size)) for index in range(1, size)]
        self.followers = [each.follower for each in self._others]
        self.follower = self.followers[0]
        for each in self._others:
            each.thread.start()
        super().__init__(Rank(0, size), meeting, torch.device("cpu"))

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
        with tempfile.TemporaryDirectory(prefix="epd-ranks-") as folder:
            super().__init__(self._path, Path(folder))

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
