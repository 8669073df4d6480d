"""Defines what a reduction method before the language model does, and what it may know of an item.

Shapes: U units of the window, S tokens of a unit, in raster order, C channels, k tokens to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ItemOutline:
    """Says what is known of an item before its units come.

    grid: tokens of a unit, (height, width).
    is_one_window: whether one window is all of it.
    surviving_share: of what is kept of it, the share that is left once a question is computed.
    """

    grid: tuple[int, int] = (1, 1)
    is_one_window: bool = False
    surviving_share: float = 1.0


class Method(Protocol):
    """Selects tokens, with a state of one reading."""

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        """Returns int64 [k], ascending, of the window's tokens, on the host: it places them in the prompt.

        units: [U, S, C], of the next window.
        """
        ...

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Returns the rows [k, C] that replace the window's rows [U * S, C] at the chosen places.

        chosen: what `choose` has returned, on the device of the rows.
        """
        ...

    def is_key(self, chosen: Tensor) -> Tensor:
        """Marks those of the last window's chosen tokens, int64 [k], that no question may drop: bool [k]."""
        ...


class Dropping:
    """Drops the tokens that are not chosen."""

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return rows[chosen]

    def is_key(self, chosen: Tensor) -> Tensor:
        return torch.zeros(len(chosen), dtype=torch.bool)
