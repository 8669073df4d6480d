"""Contains Triton kernels, each beside a plain torch twin that defines its result.

A kernel is imported at its first use: only machines with a GPU need Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd.encoders.kernels.dispatch import at_first_use

if TYPE_CHECKING:
    from epd.encoders.kernels.layer_fusions import (
        add_rms_norm_fused,
        patchify_fused,
        rotate_pairs_fused,
        silu_mul_fused,
    )

__all__ = ["add_rms_norm_fused", "patchify_fused", "rotate_pairs_fused", "silu_mul_fused"]

_MODULES = {
    "add_rms_norm_fused": "layer_fusions",
    "patchify_fused": "layer_fusions",
    "rotate_pairs_fused": "layer_fusions",
    "silu_mul_fused": "layer_fusions",
}

__getattr__ = at_first_use(__name__, _MODULES)
