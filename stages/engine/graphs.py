"""Captures work for a GPU once, to be launched as one thing from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class GraphMaker(Protocol):
    """Captures work."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns what repeats on the device all that `run` does there, from and to the same memory.

        run: waits for nothing, and may be called several times. What it allocates is its own until it ends;
        other graphs of this maker use the same memory for theirs, so they are replayed one after another.
        What it reads and writes besides must be kept by the caller.
        """


class CudaGraphMaker:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._once(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use the device meanwhile: encoders do.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay

    def _once(self, run: Callable[[], None]) -> None:
        """Runs it as it is, so that kernels are compiled and libraries have their memory."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
