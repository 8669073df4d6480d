"""Names one of the processes that share every layer of a language model, and what they ask of each other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """Names one of `size` processes. index: from 0, the one that schedules and samples."""

    index: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"rank {self.index} is not one of {self.size}")

    def part(self, count: int) -> tuple[int, int]:
        """Returns which of `count` things are this rank's, [start, stop); shares differ by one at most."""
        return count * self.index // self.size, count * (self.index + 1) // self.size


ALONE = Rank(0, 1)


class Collectives(Protocol):
    """Connects the ranks of a group. All of them call the same, in the same order."""

    @property
    def rank(self) -> Rank: ...

    def add_up(self, tensor: Tensor) -> None:
        """Puts the sum of the ranks' tensors, which have one shape, into each: the same bits in all."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the ranks' tensors, of one shape, in order to rank 0, and nothing to others."""


def summed(part: Tensor, ranks: Collectives | None) -> Tensor:
    """Returns the sum over all ranks, from which all of them choose alike; may overwrite the part."""
    if ranks is None:
        return part
    whole = part.contiguous()
    ranks.add_up(whole)
    return whole


def averaged(part: Tensor, ranks: Collectives | None) -> Tensor:
    """Returns the mean over all ranks as `summed` returns the sum."""
    whole = summed(part, ranks)
    return whole if ranks is None else whole.div_(ranks.rank.size)


class RankGroup(Collectives, Protocol):
    """Is rank 0's connection to ranks that repeat what it tells them."""

    def tell(self, step: object) -> None:
        """Sends a step to all other ranks, which begin it at once. Raises RankLostError."""

    def ask(self, step: object) -> list[Any]:
        """Sends a step like `tell`, and returns the replies of the other ranks, in order."""

    def share(self, tensor: Tensor) -> None:
        """Puts the tensor into those of the other ranks, of the same shape and type."""

    def computing(self) -> AbstractContextManager[None]:
        """Encloses rank 0's part of a step that it has told.

        Whatever is raised inside leaves the ranks at different places, so it ends the group. Raises
        RankLostError instead of it.
        """
