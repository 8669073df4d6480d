"""Contains Triton kernels of the language model, each beside a plain torch twin that defines its result.

A kernel is imported at its first use: only machines with a GPU need Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.kernels.kv_slots import write_slots
    from stages.kernels.layer_fusions import add_rms_norm_fused, norm_rotate_write_fused, silu_mul_fused
    from stages.kernels.paged_attention import attend_tiles
    from stages.kernels.quantized_products import fp8_product, int4_product

__all__ = [
    "add_rms_norm_fused",
    "attend_tiles",
    "fp8_product",
    "int4_product",
    "norm_rotate_write_fused",
    "silu_mul_fused",
    "write_slots",
]

_MODULES = {
    "add_rms_norm_fused": "layer_fusions",
    "attend_tiles": "paged_attention",
    "fp8_product": "quantized_products",
    "int4_product": "quantized_products",
    "norm_rotate_write_fused": "layer_fusions",
    "silu_mul_fused": "layer_fusions",
    "write_slots": "kv_slots",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
