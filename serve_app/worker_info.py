"""Describes a worker as others know it. Imports no torch: the board, a small process, holds these too."""

from __future__ import annotations

from dataclasses import dataclass

from epd.topology import Stage

# Of a worker that leaves for good: no switch of roles gives up all three, as prefill decodes what it merges.
EVERY_STAGE: frozenset[Stage] = frozenset({"encode", "prefill", "decode"})


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Describes the current state of a worker. incarnation: number of times it was started, from 1.

    closed: roles that it is giving up or taking on, for which it gets no work meanwhile
    leaving: stages that it gives up, whose work every orchestrator takes elsewhere; `EVERY_STAGE` for good
    """

    name: str
    roles: frozenset[Stage]
    is_alive: bool = True
    incarnation: int = 1
    closed: frozenset[Stage] = frozenset()
    leaving: frozenset[Stage] = frozenset()

    def takes(self, stage: Stage) -> bool:
        """Returns whether it can be given work for the role."""
        is_staying = stage not in self.closed and stage not in self.leaving
        return self.is_alive and stage in self.roles and is_staying

    @property
    def is_draining(self) -> bool:
        """Returns whether it ends once its work is done."""
        return self.leaving == EVERY_STAGE

    @property
    def is_gone(self) -> bool:
        """Returns whether it has ended for good: its name may be given to another."""
        return self.is_draining and not self.is_alive
