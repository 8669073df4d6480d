"""Reduces visual tokens: lays out the shorter prompt, and selects the tokens that are kept."""

from epd.encoders.reduction.reading import (
    ItemReduction,
    begins_reading,
    is_cut_at_encoder,
    kept_spec,
    reduce_prompt,
    windows_of,
    without_keys,
)
from epd.encoders.reduction.selection import Kept, TokenReducer, kept_cells

__all__ = [
    "ItemReduction",
    "Kept",
    "TokenReducer",
    "begins_reading",
    "is_cut_at_encoder",
    "kept_cells",
    "kept_spec",
    "reduce_prompt",
    "windows_of",
    "without_keys",
]
