"""Describes what the scheduler has decided for one step: what is computed, preempted and restored."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd.kv.block_pool import BlockCopy
from epd.kv.scheduled_request import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """Covers tokens [start, stop) of a request; the last `num_drafts` of them are drafts.

    num_pruned: tokens that are computed besides these, and do not stay.
    """

    request: ScheduledRequest
    start: int
    stop: int
    num_drafts: int = 0
    num_pruned: int = 0

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens to compute."""
        return self.stop - self.start + self.num_pruned

    @property
    def is_sampled(self) -> bool:
        """Returns whether the chunk ends with the last known token, so that the next can be sampled."""
        return self.stop - self.num_drafts == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Preemption:
    """Records a preempted request.

    block_tables: of each layer group, where the `num_tokens` tokens that the cache held still are.
    state: the slot where their recurrent state still is; None without any.
    """

    request: ScheduledRequest
    num_tokens: int
    block_tables: tuple[tuple[int, ...], ...]
    state: int | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Covers held tokens [start, stop) of a request that come back from host memory into its new blocks."""

    request: ScheduledRequest
    start: int
    stop: int


@dataclass(slots=True)
class SchedulerOutput:
    """Describes one step; its fields are carried out in order. admitted: requests that got their blocks."""

    preemptions: list[Preemption] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[ScheduledRequest] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_inputs for chunk in self.chunks)
