"""Two ranks in one process: the other is a thread that does what its process would do, over real gloo."""

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


class ThreadRanks(Communicator):
    """Rank 0 of two. follower: the other rank. steps: all that it was told, by type."""

    def __init__(self, path: Path, folder: Path) -> None:
        meeting = folder / "meeting"
        self.steps: list[str] = []
        self._told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        num_threads = torch.get_num_threads()
        settings = FollowerSettings(path, CPU_FLOAT32, Rank(1, 2), meeting, num_threads)
        self.follower = Follower(settings)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        super().__init__(Rank(0, 2), meeting, torch.device("cpu"))

    def _follow(self) -> None:
        self.follower.connect()
        while (step := self._told.get()) is not None:
            reply = self.follower.carry_out(pickle.loads(step))
            if reply is not None:
                self._replies.put(pickle.dumps(reply))

    def tell(self, step: object) -> None:
        self.steps.append(type(step).__name__)
        self._told.put(pickle.dumps(step))

    def ask(self, step: object) -> list[Any]:
        self.tell(step)
        return [pickle.loads(self._replies.get(timeout=END_S))]

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Returns when the follower has done all that it was told."""
        self._told.put(None)
        self._thread.join(END_S)
        assert not self._thread.is_alive()


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
