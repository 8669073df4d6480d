"""Moves tensors between the ranks of a group, by gloo or NCCL, and tells ranks which engine a step is for.

All ranks are on one machine and meet at a file; gloo listens on the loopback device alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epd.stages.rank import Rank, RankGroup

# How long a rank waits for the others in one exchange. They may be compiling kernels, not loading weights.
EXCHANGE_S = 60.0
_LOOPBACK = "127.0.0.1"


class Communicator:
    """Connects one rank to the others. Exchanges raise RuntimeError when another is lost or late."""

    def __init__(
        self, rank: Rank, meeting: Path, device: torch.device, timeout_s: float = EXCHANGE_S
    ) -> None:
        """Waits for the others. meeting: a file that is not there yet, the same for all of them."""
        self.rank = rank
        self._device = device
        store = dist.FileStore(str(meeting), rank.size)  # type: ignore[attr-defined]
        self._group = _group(store, rank, device, timedelta(seconds=timeout_s))
        self.add_up(torch.zeros(1, device=device))

    def add_up(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._group.allreduce([tensor]).wait()

    def share(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        options = dist.GatherOptions()
        options.rootRank = 0
        gathered = [] if self.rank.index else [torch.empty_like(tensor) for _ in range(self.rank.size)]
        self._group.gather([gathered] if gathered else [], [tensor], options).wait()
        return gathered

    def abort(self) -> None:
        """Ends exchanges that wait, from any thread."""
        self._group.abort()


def _group(store: Any, rank: Rank, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # of this thread, which launches all of its kernels
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank.index, rank.size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank.index, rank.size, gloo)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Addresses a step to one engine. step: None ends the engine, and frees its pools."""

    engine: str
    step: object


class EngineRanks:
    """Is one engine's connection to its counterparts at the other ranks."""

    def __init__(self, ranks: RankGroup, engine: str) -> None:
        self._ranks = ranks
        self._engine = engine

    @property
    def rank(self) -> Rank:
        return self._ranks.rank

    def tell(self, step: object) -> None:
        self._ranks.tell(EngineStep(self._engine, step))

    def ask(self, step: object) -> list[Any]:
        return self._ranks.ask(EngineStep(self._engine, step))

    def close(self) -> None:
        """Ends the engine at the other ranks."""
        self.tell(None)

    def add_up(self, tensor: Tensor) -> None:
        self._ranks.add_up(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._ranks.gather(tensor)

    def share(self, tensor: Tensor) -> None:
        self._ranks.share(tensor)

    def computing(self) -> AbstractContextManager[None]:
        return self._ranks.computing()
