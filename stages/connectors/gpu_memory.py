"""Reaches the memory of GPUs from other processes of the machine: handles of pools, and pinned host memory.

    sender: export, once for each receiver  --handle-->  receiver: open, read in place, drop

Connectors know `GpuMemory` alone, and are tested with another one on the CPU. `make gpu` opens handles of
`CudaMemory` in a second process on one GPU; handles across GPUs have not been opened yet.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

logger = logging.getLogger(__name__)

# Where `reduce_tensor` puts the number of the GPU, which another process may know under another number.
_DEVICE_ARGUMENT = 6


class HandleError(Exception):
    """Raised for memory that this process cannot open."""


class GpuMemory(Protocol):
    """Makes and opens handles of GPU memory."""

    def holds(self, device: torch.device) -> bool:
        """Returns whether memory on the device is a GPU's, which files cannot share."""
        ...

    def visible(self) -> frozenset[str]:
        """Returns the ids of the GPUs whose memory this process can open."""
        ...

    def gpu(self, memory: Tensor) -> str:
        """Returns the id of the GPU that the memory belongs to; empty for memory of the host."""
        ...

    def export(self, memory: Tensor) -> bytes:
        """Returns a handle that one process may open once. The memory must stay until that is gone."""
        ...

    def open(self, handle: bytes) -> Tensor:
        """Returns the memory of another process: uint8, valid until dropped. Raises HandleError."""
        ...

    def pin(self, memory: Tensor) -> None:
        """Pins mapped host memory, so that GPUs copy to and from it by themselves."""
        ...

    def unpin(self, memory: Tensor) -> None:
        """Ends what `pin` began; memory that is not pinned is left alone."""
        ...


class CudaMemory:
    """Uses CUDA IPC, by torch's own means: it keeps a count of openers, and the memory until all are gone."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()

    def holds(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def visible(self) -> frozenset[str]:
        if not torch.cuda.is_available():
            return frozenset()
        return frozenset(_gpu_id(index) for index in range(torch.cuda.device_count()))

    def gpu(self, memory: Tensor) -> str:
        return _gpu_id(memory.device.index or 0) if memory.device.type == "cuda" else ""

    def export(self, memory: Tensor) -> bytes:
        _, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
        return pickle.dumps((self.gpu(memory), arguments))

    def open(self, handle: bytes) -> Tensor:
        gpu, arguments = pickle.loads(handle)
        indices = [index for index in range(torch.cuda.device_count()) if _gpu_id(index) == gpu]
        if not indices:
            raise HandleError(f"this process does not see the GPU {gpu}")
        given = list(arguments)
        given[_DEVICE_ARGUMENT] = indices[0]
        try:
            memory: Tensor = rebuild_cuda_tensor(*given)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise HandleError(str(error)) from error
        return memory

    def pin(self, memory: Tensor) -> None:
        if not torch.cuda.is_available() or memory.data_ptr() in self._pinned:
            return
        error = _runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) == 0:
            self._pinned.add(memory.data_ptr())
        else:
            logger.warning(
                "%d bytes for staging are not pinned, copies wait: CUDA error %s", memory.nbytes, error
            )

    def unpin(self, memory: Tensor) -> None:
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            _runtime().cudaHostUnregister(memory.data_ptr())


def _gpu_id(index: int) -> str:
    """Returns what names the same GPU in every process, whatever CUDA_VISIBLE_DEVICES shows it."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
