"""Reduces visual tokens: lays out the shorter prompt, and selects the tokens that are kept."""

from encoders.reduction.layout import reduce_prompt
from encoders.reduction.reducer import Kept, KeptCells, TokenReducer, kept_cells

__all__ = ["Kept", "KeptCells", "TokenReducer", "kept_cells", "reduce_prompt"]
