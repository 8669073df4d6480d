"""Contains Triton kernels of the language model, each beside a plain torch twin that defines its result.

A kernel is imported at its first use: only machines with a GPU need Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd.encoders.kernels.dispatch import at_first_use

if TYPE_CHECKING:
    from epd.stages.kernels.delta_layers import delta_inputs_fused, gate_norm_fused
    from epd.stages.kernels.delta_rule import delta_chunks_fused, delta_steps_fused
    from epd.stages.kernels.grouped_products import experts_fused, num_few_pairs
    from epd.stages.kernels.kv_slots import copy_blocks_fused, norm_rotate_write_fused, write_slots
    from epd.stages.kernels.paged_attention import attend_tiles
    from epd.stages.kernels.quantized_products import fp8_product, fp8_rows, int4_product

__all__ = [
    "attend_tiles",
    "copy_blocks_fused",
    "delta_chunks_fused",
    "delta_inputs_fused",
    "delta_steps_fused",
    "experts_fused",
    "fp8_product",
    "fp8_rows",
    "gate_norm_fused",
    "int4_product",
    "norm_rotate_write_fused",
    "num_few_pairs",
    "write_slots",
]

_MODULES = {
    "attend_tiles": "paged_attention",
    "copy_blocks_fused": "kv_slots",
    "delta_chunks_fused": "delta_rule",
    "delta_inputs_fused": "delta_layers",
    "delta_steps_fused": "delta_rule",
    "experts_fused": "grouped_products",
    "fp8_product": "quantized_products",
    "fp8_rows": "quantized_products",
    "gate_norm_fused": "delta_layers",
    "int4_product": "quantized_products",
    "norm_rotate_write_fused": "kv_slots",
    "num_few_pairs": "grouped_products",
    "write_slots": "kv_slots",
}

__getattr__ = at_first_use(__name__, _MODULES)
