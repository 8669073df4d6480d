"""Moves what a pass needs to its device without waiting, and reads results back where that is named.

Memory that can be swapped out makes a copy to a GPU wait for everything queued before it; pinned memory does
not. torch keeps pinned memory until the copies from it are done, so it may be dropped at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epd.types import ceil_div

CPU = torch.device("cpu")
# Every array of a common copy starts at a multiple of this, or Triton compiles kernels for each alignment.
_ALIGNMENT_BYTES = 16


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's parameters, which all lie on one; of a module without any, the CPU."""
    parameter = next(module.parameters(), None)
    return CPU if parameter is None else parameter.device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device; the copy is queued there, and the host does not wait for it.

    On a CPU, a tensor that is there is returned as it is.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=device.type != "cpu")
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns some rows of a tensor, whose numbers the host knows; it does not wait."""
    return tensor.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), tensor.device))


def arrays_to_device(arrays: Sequence[np.ndarray[Any, np.dtype[Any]]], device: torch.device) -> list[Tensor]:
    """Moves the small arrays of a pass in one copy; on a CPU they share memory with the arrays."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    packed = _packed(tensors, pin_memory=True).to(device, non_blocking=True)
    return _unpacked(packed, tensors)


def room_bytes(arrays: Sequence[Tensor]) -> int:
    """Returns the bytes of memory that arrays of these shapes and types take side by side."""
    return sum(map(_room_bytes, arrays))


def arrays_over(memory: Tensor, arrays: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of memory, uint8 [n], in which arrays of these shapes and types lie side by side."""
    return _unpacked(memory[: room_bytes(arrays)], arrays)


def bytes_into(memory: Tensor, host: Tensor) -> None:
    """Copies bytes of the host, uint8 [n], to the beginning of memory, uint8; nothing waits.

    They may be written again at once.
    """
    pinned = host if memory.device.type == "cpu" else host.pin_memory()
    memory[: len(host)].copy_(pinned, non_blocking=True)


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns float32 [n] on a device, where they are moved once."""
    return to_device(torch.tensor(values), device)


def to_host(tensor: Tensor) -> Tensor:
    """Reads a tensor back, and so waits for all that was queued before: for values that the host needs."""
    return tensor.cpu()


def all_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Reads tensors of one device back, in one copy; those of a CPU are returned as they are."""
    return HostCopy(tensors).wait()


class HostCopy:
    """Copies tensors of one device to the host, behind what is queued there now and before what follows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._is_there = all(tensor.device.type == "cpu" for tensor in tensors)
        if not self._is_there:
            packed = _packed(tensors)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._done = torch.cuda.current_stream(packed.device).record_event()

    def wait(self) -> list[Tensor]:
        """Waits for the copy, and returns the tensors; those of a CPU are returned as they are."""
        if self._is_there:
            return self._tensors
        self._done.synchronize()
        return _unpacked(self._host, self._tensors)


def _packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns the bytes of tensors of one device one after the other, aligned: uint8 [n]."""
    packed = torch.empty(
        room_bytes(tensors), dtype=torch.uint8, device=tensors[0].device, pin_memory=pin_memory
    )
    for place, tensor in zip(_unpacked(packed, tensors), tensors, strict=True):
        place.copy_(tensor)
    return packed


def _unpacked(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of the packed bytes, of the shapes and types of these tensors."""
    pieces = torch.split(packed, list(map(_room_bytes, tensors)))
    return [
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]


def _room_bytes(tensor: Tensor) -> int:
    return ceil_div(tensor.nbytes, _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
