"""Sizes the memory of a worker by its roles: weights, activations, embeddings, keys and values.

    device | fixed | weights | embeddings | activations | keys and values ........ | kept free |
           |                   fixed by the settings     | the rest                | 1 - utilization

Recurrent states and sliding windows are fixed by the settings too, as in `epd/kv/kv_room.py`.
A worker that encodes beside its passes holds the activations of both; one that takes turns, of the larger.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from epd.errors import InfeasibleError
from epd.kv.kv_room import state_slots, window_blocks
from epd.topology import Stage, role_letters


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Sizes memory in bytes.

    kv_per_token: keys and values of the layers that attend all tokens
    embedding: of one visual token, as it travels
    max_kv_tokens: upper bound for a worker, however many would fit
    encode_per_patch: activations at the peak of the tower, of a patch of the batch; 0 if not known
    prefill_per_token: activations at the peak of the language model, of a token of the pass; 0 if not known
    logits_per_sequence: of a sequence that gets its next token
    fixed: runtime of the device, workspaces
    state: of a sequence's recurrent layers
    window_per_token: keys and values of the layers that attend the last window_tokens tokens alone
    """

    device_bytes: int
    vision_weight_bytes: int
    language_weight_bytes: int
    kv_bytes_per_token: int
    embedding_bytes_per_token: int
    max_kv_tokens: int | None = None
    encode_bytes_per_patch: float = 0.0
    prefill_bytes_per_token: float = 0.0
    logits_bytes_per_sequence: float = 0.0
    fixed_bytes: int = 0
    state_bytes: int = 0
    window_bytes_per_token: int = 0
    window_tokens: int = 0

    def sequence_bytes(self, num_tokens: int) -> int:
        """Returns what a sequence of so many tokens holds of a cache, and what travels when it moves."""
        windowed = self.window_bytes_per_token * min(num_tokens, self.window_tokens)
        return self.kv_bytes_per_token * num_tokens + windowed + self.state_bytes

    def worker(self, roles: AbstractSet[Stage], limits: MemoryLimits) -> WorkerMemory:
        """Returns the memory of a worker, whether it fits or not.

        limits: sizes that its settings allow
        """
        has_language = bool(roles & {"prefill", "decode"})
        used = WorkerMemory(
            role_letters(roles),
            self.device_bytes,
            limits.utilization,
            self.fixed_bytes,
            self._weight_bytes(roles),
            self._activation_bytes(roles, limits),
            len(roles & {"encode", "prefill"}) * limits.num_embeddings * self.embedding_bytes_per_token,
            kv_bytes=0,
            kv_bytes_per_token=self.kv_bytes_per_token if has_language else 0,
        )
        if not has_language:
            return used
        states_bytes = state_slots(limits.num_seqs) * self.state_bytes if limits.num_seqs else 0
        used = replace(used, sequence_bytes=states_bytes)
        num_windowed = self._windowed_tokens(used.free_bytes, limits)
        used = replace(used, sequence_bytes=states_bytes + num_windowed * self.window_bytes_per_token)
        tokens = self._fitting(used.free_bytes) if limits.kv_tokens is None else limits.kv_tokens
        return replace(used, kv_bytes=tokens * self.kv_bytes_per_token)

    def _windowed_tokens(self, free_bytes: int, limits: MemoryLimits) -> int:
        """Returns the tokens for which layers with a window have room: of all windows, or of the others."""
        if not self.window_bytes_per_token:
            return 0
        size = limits.block_size
        most = size * window_blocks(self.window_tokens, size, limits.num_seqs, limits.chunk_tokens)
        alike = free_bytes // (self.kv_bytes_per_token + self.window_bytes_per_token)
        return min(most, max(alike, 0) if limits.kv_tokens is None else limits.kv_tokens)

    def _weight_bytes(self, roles: AbstractSet[Stage]) -> int:
        language = self.language_weight_bytes if roles & {"prefill", "decode"} else 0
        return language + (self.vision_weight_bytes if "encode" in roles else 0)

    def _activation_bytes(self, roles: AbstractSet[Stage], limits: MemoryLimits) -> int:
        turns = [0.0]
        if "encode" in roles:
            turns.append(self.encode_bytes_per_patch * limits.encode_patches)
        if roles & {"prefill", "decode"}:
            tokens = limits.pass_tokens if "prefill" in roles else limits.num_seqs
            turns.append(
                self.prefill_bytes_per_token * tokens + self.logits_bytes_per_sequence * limits.num_seqs
            )
        return round(sum(turns) if limits.encode_beside else max(turns))

    def _fitting(self, free_bytes: int) -> int:
        fitting = max(0, free_bytes // self.kv_bytes_per_token)
        return fitting if self.max_kv_tokens is None else min(fitting, self.max_kv_tokens)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Holds the sizes that settings allow at once, on which the memory of a worker depends.

    encode_patches: in a batch of the tower
    pass_tokens: in a pass with prefill chunks
    num_seqs: that get a token in one pass
    num_embeddings: that an encoder keeps, and a prefill worker receives, each
    kv_tokens: None for as many as fit
    utilization: share of the device that may be used, fragments left out
    encode_beside: at the same time as passes of the language model
    chunk_tokens: of a prompt in one pass. block_size: tokens of a block
    """

    encode_patches: int = 0
    pass_tokens: int = 0
    num_seqs: int = 0
    num_embeddings: int = 0
    kv_tokens: int | None = None
    utilization: float = 0.9
    encode_beside: bool = False
    chunk_tokens: int = 0
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Lists what one worker holds at its peak, bytes.

    letters: its roles, such as "ep". sequence: of recurrent states and sliding windows
    """

    letters: str
    device_bytes: int
    utilization: float
    fixed_bytes: int
    weight_bytes: int
    activation_bytes: int
    embedding_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    sequence_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self._without_kv + self.kv_bytes

    @property
    def allowed_bytes(self) -> int:
        return int(self.device_bytes * self.utilization)

    @property
    def free_bytes(self) -> int:
        """Returns what is left for keys and values, below 0 where the rest alone is too much."""
        return self.allowed_bytes - self._without_kv

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else 0

    @property
    def _without_kv(self) -> int:
        held_bytes = self.activation_bytes + self.embedding_bytes + self.sequence_bytes
        return self.fixed_bytes + self.weight_bytes + held_bytes

    def check(self, model: str, device: str, least_kv_tokens: int) -> None:
        """Raises InfeasibleError where the worker, with so many tokens of KV at least, does not fit.

        model, device: names for the message
        """
        least_bytes = max(self.kv_bytes, least_kv_tokens * self.kv_bytes_per_token)
        if self._without_kv + least_bytes <= self.allowed_bytes:
            return
        raise InfeasibleError(
            f"memory binds: received a worker of the roles {self.letters} for {model}, which needs "
            f"{_gb(self._without_kv + least_bytes)} ({self.parts(least_bytes)}); allowed are "
            f"{_gb(self.allowed_bytes)}, {self.utilization:.0%} of {device}; take a larger device, "
            f"{self._advice()}"
        )

    def _advice(self) -> str:
        if self.activation_bytes + self.embedding_bytes > self.weight_bytes:
            return "smaller batches or shorter chunks"
        return "split the encoder off" if "e" in self.letters and self.letters != "e" else "a smaller model"

    def parts(self, kv_bytes: int | None = None) -> str:
        """Returns the parts that are not empty, in words."""
        named = {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "embeddings": self.embedding_bytes,
            "runtime": self.fixed_bytes,
            "states and windows": self.sequence_bytes,
            "keys and values": self.kv_bytes if kv_bytes is None else kv_bytes,
        }
        return ", ".join(f"{name} {_gb(size)}" for name, size in named.items() if size)

    def record(self) -> dict[str, str | int]:
        """Returns the record of a plan."""
        return {
            "roles": self.letters,
            "peak_bytes": self.peak_bytes,
            "allowed_bytes": self.allowed_bytes,
            "weight_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "embedding_bytes": self.embedding_bytes,
            "fixed_bytes": self.fixed_bytes,
            "kv_bytes": self.kv_bytes,
            "sequence_bytes": self.sequence_bytes,
        }

    def __str__(self) -> str:
        share = self.peak_bytes / self.device_bytes
        return f"{self.letters}: {_gb(self.peak_bytes)} at most, {share:.0%} of the device ({self.parts()})"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
