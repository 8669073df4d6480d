"""Stands for a GPU whose memory is the CPU's: handles are numbers, as all workers are one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from epd.stages.connectors.gpu_memory import HandleError


@dataclass
class FakeGpuMemory:
    """One GPU that all workers have their pools on.

    broken: whether handles can be made and not be opened
    exported: memory by handle
    num_opened: handles that were opened; each may be opened once
    """

    broken: bool = False
    exported: dict[bytes, Tensor] = field(default_factory=dict)
    num_opened: int = 0

    def holds(self, _device: torch.device) -> bool:
        return True

    def visible(self) -> frozenset[str]:
        return frozenset({"GPU-a"})

    def gpu(self, _memory: Tensor) -> str:
        return "GPU-a"

    def export(self, memory: Tensor) -> bytes:
        handle = str(len(self.exported)).encode()
        self.exported[handle] = memory
        return handle

    def open(self, handle: bytes) -> Tensor:
        if self.broken:
            raise HandleError("invalid device context")
        self.num_opened += 1
        return self.exported[handle]

    def pin(self, memory: Tensor) -> None:
        pass

    def unpin(self, memory: Tensor) -> None:
        pass
