"""Describes a worker as others know it, and what it has on its device.

Imports no torch: the board, a small process, holds these too.
"""

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
    lent: roles that it has for others, until one of them is there again
    """

    name: str
    roles: frozenset[Stage]
    is_alive: bool = True
    incarnation: int = 1
    closed: frozenset[Stage] = frozenset()
    leaving: frozenset[Stage] = frozenset()
    lent: frozenset[Stage] = frozenset()

    @property
    def own_roles(self) -> frozenset[Stage]:
        """Returns the roles that it keeps: its place among the workers."""
        return self.roles - self.lent

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


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Describes what a worker has on its device.

    device: where its models run, and in which type
    allowed_bytes: that it may use: of a GPU its share, of a CPU what this machine gives us
    weight_bytes: of its models; those of a CPU are shared by the workers of a machine
    embedding_bytes, kv_bytes: of its pools; those of a CPU take memory as they are filled
    num_embeddings, num_kv_tokens: that they have room for
    """

    device: str = ""
    allowed_bytes: int = 0
    weight_bytes: int = 0
    embedding_bytes: int = 0
    kv_bytes: int = 0
    num_embeddings: int = 0
    num_kv_tokens: int = 0

    def line(self) -> str:
        """Returns it for people: "weights 15.2 GB, room for embeddings 1 GB (...), ..."."""
        parts = [f"weights {_gb(self.weight_bytes)}"]
        if self.kv_bytes:
            tokens = f"{self.num_kv_tokens:,} tokens"
            parts.append(f"room for keys and values {_gb(self.kv_bytes)} ({tokens})")
        if self.embedding_bytes:
            tokens = f"{self.num_embeddings:,} tokens"
            parts.append(f"room for embeddings {_gb(self.embedding_bytes)} ({tokens})")
        return f"{', '.join(parts)} of {_gb(self.allowed_bytes)} as {self.device}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
