"""Says how much memory a device has, and refuses weights that it has no room for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from epd.errors import InfeasibleError
from epd.machine import available_memory_bytes, memory_limit_bytes
from epd.stages.placement import Placement

_GB = 1e9


def free_bytes(device: torch.device) -> int:
    """Returns the memory that is free on a device now; on a CPU, what this container may still take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()


def total_bytes(device: torch.device) -> int:
    """Returns the memory of a device; on a CPU, what this container may have in all."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total)
    return memory_limit_bytes()


def check_room(path: Path, parts: Mapping[str, int], placement: Placement) -> None:
    """Raises InfeasibleError if weights take more memory than is free, before any is read.

    path: of the model
    parts: bytes of its weights in the placement's type, by what they are of
    """
    needed, free = sum(parts.values()), free_bytes(placement.device)
    if needed <= free:
        return
    sizes = ", ".join(f"{name} {num_bytes / _GB:.1f} GB" for name, num_bytes in parts.items() if num_bytes)
    half = "--dtype bfloat16, " if placement.dtype == torch.float32 else ""
    raise InfeasibleError(
        f"the weights at '{path}' take {needed / _GB:.1f} GB as {placement} ({sizes}), where "
        f"{free / _GB:.1f} of {total_bytes(placement.device) / _GB:.1f} GB are free; use {half}a smaller "
        "model, another --device, or more memory"
    )
