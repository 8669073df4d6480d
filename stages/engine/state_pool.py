"""Stores recurrent states: the memory behind the slots of a `KVCacheManager`, which knows what is where.

A slot holds what gated delta layers keep of a sequence, layer by layer: the last inputs of the convolution,
and a matrix for each head.

    tails       [num_states, num_layers, window, channels]           of the model's type
    matrices    [num_states, num_layers, H, Dk, Dv]                  float32

The channels are those of queries, of keys and of values. Of several ranks, each has some heads of all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epd.stages.attention.support import state_layers
from epd.stages.decoder.delta_layer import delta_sizes
from epd.stages.rank import ALONE, Rank


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Describes the recurrent state of one sequence.

    num_channels: of the convolution. window: how many of its last inputs are kept.
    num_heads, key_dim, value_dim: of the matrices. dtype: of the inputs.
    """

    num_layers: int
    num_channels: int
    window: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def tail_bytes(self) -> int:
        return self.num_layers * self.window * self.num_channels * self.dtype.itemsize

    @property
    def matrix_bytes(self) -> int:
        num_values = self.num_layers * self.num_heads * self.key_dim * self.value_dim
        return num_values * torch.float32.itemsize

    @property
    def channels(self) -> list[int]:
        """Returns the channels of queries, of keys and of values."""
        of_values = self.num_heads * self.value_dim
        of_keys = (self.num_channels - of_values) // 2
        return [of_keys, of_keys, of_values]

    def of_ranks(self, size: int) -> StateLayout:
        """Returns the layout that so many ranks have together, each with one like this."""
        return replace(self, num_channels=self.num_channels * size, num_heads=self.num_heads * size)

    @property
    def bytes_per_sequence(self) -> int:
        return self.tail_bytes + self.matrix_bytes


@dataclass(frozen=True, slots=True)
class StatesShape:
    """Sizes the states of one worker."""

    num_states: int
    layout: StateLayout

    @property
    def num_bytes(self) -> int:
        return self.num_states * self.layout.bytes_per_sequence


class StatePool:
    """Holds the states of one worker. memory: uint8 [num_bytes]."""

    def __init__(self, shape: StatesShape, memory: Tensor) -> None:
        self.shape = shape
        num, layout = shape.num_states, shape.layout
        matrices, tails = torch.split(memory, [num * layout.matrix_bytes, num * layout.tail_bytes])
        heads = (layout.num_heads, layout.key_dim, layout.value_dim)
        self.matrices = matrices.view(torch.float32).view(num, layout.num_layers, *heads)
        rows = (layout.window, layout.num_channels)
        self.tails = tails.view(layout.dtype).view(num, layout.num_layers, *rows)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the tails and the matrices of the group's layer `index`, of all slots: views."""
        return self.tails[:, index], self.matrices[:, index]

    def copy(
        self, source: StatePool, source_slot: int, target_slot: int, rank: Rank = ALONE, of: Rank = ALONE
    ) -> None:
        """Copies a state from another pool of the same layout; from a GPU it is queued and not waited for.

        rank, of: that have this pool and the source. Of different ones, the heads that both have are copied.
        Raises ValueError for another layout.
        """
        ours, theirs = self.shape.layout.of_ranks(rank.size), source.shape.layout.of_ranks(of.size)
        if ours != theirs:
            raise ValueError(f"cannot copy a state of {theirs} into a pool of {ours}")
        if rank == of:
            for target, tensor in ((self.tails, source.tails), (self.matrices, source.matrices)):
                target[target_slot].copy_(tensor[source_slot], non_blocking=True)
            return
        for to, given in zip(self._by_head(target_slot), source._by_head(source_slot), strict=True):
            our_start, their_start = rank.index * to.shape[-1], of.index * given.shape[-1]
            start = max(our_start, their_start)
            stop = min(our_start + to.shape[-1], their_start + given.shape[-1])
            if start < stop:
                heads = given[..., start - their_start : stop - their_start]
                to[..., start - our_start : stop - our_start].copy_(heads)

    def _by_head(self, slot: int) -> list[Tensor]:
        """Returns the parts of a state, views, whose last dimensions are those that ranks share."""
        by_kind = torch.split(self.tails[slot], self.shape.layout.channels, dim=-1)
        return [*by_kind, self.matrices[slot].movedim(1, -1)]

    def to_host(self, slot: int) -> StatePool:
        """Copies a state to slot 0 of a pool of its own in host memory, pinned for a GPU's."""
        shape = StatesShape(1, self.shape.layout)
        memory = torch.empty(shape.num_bytes, dtype=torch.uint8, pin_memory=self.matrices.is_cuda)
        host = StatePool(shape, memory)
        host.copy(self, slot, 0)
        return host


def state_layout(model: Any) -> StateLayout | None:
    """Describes the recurrent state of a sequence; None for a model without any."""
    config = model.get_decoder().config
    num_layers = sum(state_layers(config))
    if not num_layers:
        return None
    sizes, dtype = delta_sizes(config), next(model.get_decoder().parameters()).dtype
    window = config.linear_conv_kernel_dim - 1
    heads = sizes.num_heads, sizes.key_dim, sizes.value_dim
    return StateLayout(num_layers, sizes.num_channels, window, *heads, dtype)
