"""Keeps weights in pinned memory of the host, from where a GPU worker copies those of its roles.

The file of `write_weights` is one for all workers of a machine. Each maps the same pages and registers its
mapping with its driver; copies then run at the speed of the bus, 25 GB/s and more, without a thread's help.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epd.stages.loading.weight_files import MappedWeights, StoredTensor

logger = logging.getLogger(__name__)

_PART_BYTES = 1 << 28


class HostWeights:
    """Maps a file of weights for as long as its worker runs, pinned if the driver can.

    file: of `write_weights`
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        """Maps the file. device: the GPU that copies from it; unpinned too, slower, with a warning."""
        self.file = file
        self._device = device
        self._mapped = MappedWeights(file, is_shared=True)
        memory = self._mapped.memory
        is_pinned = device.type == "cuda" and _register(memory, device)
        # Not at the exit of the process: its memory is unpinned with it, and the driver may be gone by then.
        self._unpin = weakref.finalize(self, _unregister, memory) if is_pinned else None
        if self._unpin is not None:
            self._unpin.atexit = False

    def tensors(self, stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
        """Yields tensors of the file, which are its memory, and waits for the copies queued of them."""
        for each in stored:
            yield each, self._mapped.tensor(each)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).record_event().synchronize()

    def close(self) -> None:
        """Unpins the memory. May be called again."""
        if self._unpin is not None:
            self._unpin()


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Returns the seconds that a copy of so many bytes from pinned memory takes, by one of a part of them."""
    part = torch.empty(min(num_bytes, _PART_BYTES), dtype=torch.uint8, pin_memory=True)
    target = torch.empty(part.shape, dtype=torch.uint8, device=device)
    for _ in range(2):  # the first also takes memory
        start_s = time.perf_counter()
        target.copy_(part)  # waits
    return (time.perf_counter() - start_s) * num_bytes / part.nbytes


def _register(memory: Tensor, device: torch.device) -> bool:
    """Pins the pages of a mapping, and returns whether that worked; says so either way."""
    cudart, start_s = _cudart(), time.perf_counter()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    seconds, size = time.perf_counter() - start_s, memory.nbytes / 1e9
    if int(error) == 0:
        logger.info("pinned %.2f GB of weights in %.1f s, from which roles are changed", size, seconds)
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device=device)  # or the next kernel would be blamed for this error
    logger.warning(
        "%.2f GB of weights are not pinned: %s; roles change slower, from memory that can be swapped out; "
        "give the container more memory and a larger ulimit -l",
        size,
        cudart.cudaGetErrorString(error),
    )
    return False


def _unregister(memory: Tensor) -> None:
    _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
