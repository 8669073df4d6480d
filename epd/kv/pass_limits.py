"""Limits a forward pass. Limits that nobody has set are chosen by the memory of the device that computes it.

A large GPU computes thousands of tokens in the time of a few hundred, and reads its weights once for all
answers of a pass. The classes are those of vLLM's servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["recompute", "offload"]
_LARGE_BYTES = 70 * 10**9
# Tokens of a pass, answers at once.
_ON_CPU, _ON_GPU, _ON_LARGE_GPU = (2048, 64), (2048, 256), (8192, 1024)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits one forward pass.

    max_num_batched_tokens: of all requests together.
    max_num_seqs: answers that grow at once.
    max_chunk_tokens: of one request's prefill in one pass.
    preemption: whether a preempted request's tokens are computed again, or kept in host memory.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_chunk_tokens: int = 2048
    preemption: PreemptionMode = "offload"

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.max_chunk_tokens) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Holds the limits that are set, as `SchedulerConfig` has them; None for those of the device."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_chunk_tokens: int | None = None

    def on(self, gpu_bytes: int, *, keeps_states: bool = False) -> SchedulerConfig:
        """Returns the limits on a device.

        gpu_bytes: what a worker has of a GPU; 0 on a CPU.
        keeps_states: whether each answer has room of its own before it begins, for a state or a window; then
        there are no more of them than on a CPU.
        """
        is_large = gpu_bytes >= _LARGE_BYTES
        num_tokens, num_seqs = _ON_LARGE_GPU if is_large else _ON_GPU if gpu_bytes else _ON_CPU
        return SchedulerConfig(
            self.max_num_batched_tokens or num_tokens,
            self.max_num_seqs or (_ON_CPU[1] if keeps_states else num_seqs),
            self.max_chunk_tokens or num_tokens,
        )
