"""Fewer visual tokens than the vision tower gives: how the prompt is laid out, and which ones are kept."""

from encoders.reduction.layout import reduce_prompt
from encoders.reduction.reducer import Kept, TokenReducer

__all__ = ["Kept", "TokenReducer", "reduce_prompt"]
