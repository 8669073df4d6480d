"""Allocates a pool's memory: this process's own, or a file in memory that other processes map too."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from epd.errors import InfeasibleError


def pool_memory(
    num_bytes: int, shared_file: Path | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Allocates uint8 [num_bytes], zeros until written: garbage read as floats could be NaN.

    A CPU's memory is taken page by page when it is written first, so a pool costs what is used of it.

    Raises ValueError for a shared file on another device than the CPU, InfeasibleError where the process may
    not have so much address space.
    """
    is_host = torch.device(device).type == "cpu"
    if shared_file is None and is_host:
        # torch writes its zeros at once, and NumPy asks for huge pages.
        try:
            return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        except OSError as error:
            raise InfeasibleError(
                f"a pool needs {num_bytes / 1e9:.1f} GB ({error.strerror}); where ulimit -v limits memory, "
                "raise it; else lower num_kv_tokens"
            ) from error
    if shared_file is None:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if not is_host:
        raise ValueError(f"memory of '{device}' cannot be shared, only the CPU's; leave out the file")
    return torch.from_file(str(shared_file), shared=True, size=num_bytes, dtype=torch.uint8)
