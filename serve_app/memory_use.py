"""Says what a worker has on its device: to workers, which report it, and to those who show it."""

from __future__ import annotations

from dataclasses import dataclass


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
