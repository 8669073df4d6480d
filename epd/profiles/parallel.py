"""Computes what stages cost on devices that share each layer of the language model: tensor parallelism.

Source: Megatron-LM (arXiv 1909.08053, section 3). Each device has a share of every matrix, and two
all-reduces a layer add up what they computed. A ring all-reduce of b bytes over n devices moves
2 (n - 1) / n b on a link. Experts are cut by width, and recurrent states by heads, as the server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from epd.profiles.cost import StageTable
from epd.profiles.memory import MemoryNeeds
from epd.topology import Stage
from epd.types import ceil_div

_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class ParallelStack:
    """Describes a stack of layers whose heads are shared out."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Describes a language model and its links to share layers between devices.

    link_bytes_per_s: that an all-reduce reaches
    reduce_s: of one all-reduce beside its bytes
    shared: costs of prefill and of decoding by the number of devices, where their kernels are known
    launch_s: that a layer of prefill takes at least, on any number of devices
    """

    language: ParallelStack
    bytes_per_value: int
    link_bytes_per_s: float
    reduce_s: float
    shared: Mapping[int, tuple[StageTable, StageTable]] = field(default_factory=dict)
    launch_s: float = 0.0

    def allows(self, roles: AbstractSet[Stage], degree: int) -> bool:
        """Returns whether a worker can have so many devices: its language model's heads divide by them.

        The tower runs on the first device, so that a worker that only encodes has one.
        """
        if not roles & {"prefill", "decode"}:
            return degree == 1
        return self.language.num_heads % degree == self.language.num_kv_heads % degree == 0

    def stages(self, prefill: StageTable, decode: StageTable, degree: int) -> tuple[StageTable, StageTable]:
        """Returns the costs of prefill and decoding on `degree` devices."""
        least_s = self.language.num_layers * self.launch_s
        return self.shared.get(degree) or (
            self._stage(prefill, degree, least_s),
            self._stage(decode, degree, 0.0),
        )

    def _stage(self, table: StageTable, degree: int, least_s: float) -> StageTable:
        """Returns the cost on `degree` devices. least_s: that weights and launches take together"""
        stack = self.language
        cost, num_reduces = table.cost, _REDUCES_PER_LAYER * stack.num_layers
        bytes_per_unit = stack.hidden * self.bytes_per_value * 2 * (degree - 1) / degree
        return replace(
            table,
            cost=replace(
                cost.times(1 / degree),
                fixed_s=cost.fixed_s + num_reduces * self.reduce_s,
                floor_s=max(cost.floor_s / degree, least_s - cost.experts_s / degree),
                per_unit_s=cost.per_unit_s / degree + num_reduces * bytes_per_unit / self.link_bytes_per_s,
            ),
        )

    def memory(self, needs: MemoryNeeds, degree: int) -> MemoryNeeds:
        """Returns the needs of the first of the devices, which has the tower.

        Activations and embeddings are on each in full.
        """
        kv_heads = self.language.num_kv_heads

        def of_heads(num_bytes: int) -> int:
            return ceil_div(num_bytes * ceil_div(kv_heads, degree), kv_heads)

        return replace(
            needs,
            language_weight_bytes=ceil_div(needs.language_weight_bytes, degree),
            kv_bytes_per_token=of_heads(needs.kv_bytes_per_token),
            window_bytes_per_token=of_heads(needs.window_bytes_per_token),
            state_bytes=ceil_div(needs.state_bytes, degree),
        )
