"""Tells the other ranks which of a worker's engines a step is for: a worker that changes roles has two."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epd.stages.rank import Rank, RankGroup


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Addresses a step to one engine. step: None ends the engine, and frees its pools."""

    engine: str
    step: object


class EngineRanks:
    """Is one engine's connection to its counterparts at the other ranks."""

    def __init__(self, ranks: RankGroup, engine: str) -> None:
        self._ranks = ranks
        self._engine = engine

    @property
    def rank(self) -> Rank:
        return self._ranks.rank

    def tell(self, step: object) -> None:
        self._ranks.tell(EngineStep(self._engine, step))

    def ask(self, step: object) -> list[Any]:
        return self._ranks.ask(EngineStep(self._engine, step))

    def close(self) -> None:
        """Ends the engine at the other ranks."""
        self.tell(None)

    def add_up(self, tensor: Tensor) -> None:
        self._ranks.add_up(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._ranks.gather(tensor)

    def share(self, tensor: Tensor) -> None:
        self._ranks.share(tensor)

    def computing(self) -> AbstractContextManager[None]:
        return self._ranks.computing()
