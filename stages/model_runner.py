"""Runs a model's decoder over chunks of a prompt and over single tokens, with our cache behind it.

Shapes: T tokens of a chunk, C channels, one request at a time, so the batch is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encoders import Adapter, Embeddings, PromptPlan, place, visual_mask
from encoders.adapter import Int64Array
from stages.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PlacedEmbeddings:
    """Visual tokens and the prompt positions, int64 [V], that they stand at."""

    embeddings: Embeddings
    indices: Int64Array

    def __post_init__(self) -> None:
        if len(self.embeddings) != len(self.indices):
            raise ValueError(
                f"{len(self.embeddings)} visual tokens need as many places, got {len(self.indices)}"
            )


class ModelRunner:
    """The language model of one checkpoint."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        self._adapter = adapter
        self._embed: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for `capacity` tokens; it grows when that is not enough."""
        num_layers: int = self._decoder.config.num_hidden_layers  # type: ignore[union-attr,assignment]
        return KVCache(num_layers, capacity)

    def prefill(
        self, cache: KVCache, prompt: PromptPlan, stop: int, visual: PlacedEmbeddings | None = None
    ) -> Tensor:
        """Appends prompt tokens [len(cache), stop) to the cache; returns the logits [vocab] that follow."""
        start = len(cache)
        token_ids = torch.from_numpy(prompt.token_ids[start:stop])[None]
        positions = torch.from_numpy(prompt.positions[:, start:stop])
        embeds = self._embed(token_ids)
        if visual is None:
            return self._forward(cache, embeds, positions, {})
        mask = visual_mask(visual.indices, start, stop)
        extra = self._adapter.decoder_kwargs(mask, visual.embeddings)
        return self._forward(cache, place(embeds, mask, visual.embeddings), positions, extra)

    def decode(self, cache: KVCache, token_id: int, positions: Tensor) -> Tensor:
        """Appends one token at positions int64 [rows, 1]; returns the logits [vocab] of the next."""
        return self._forward(cache, self._embed(torch.tensor([[token_id]])), positions, {})

    def _forward(self, cache: KVCache, embeds: Tensor, positions: Tensor, extra: dict[str, Any]) -> Tensor:
        """embeds: [1, T, C]. positions: int64 [rows, T], three rows for M-RoPE, else one."""
        position_ids = positions[:, None] if len(positions) > 1 else positions
        hidden = self._decoder(
            inputs_embeds=embeds,
            position_ids=position_ids,
            past_key_values=cache.as_past,
            use_cache=True,
            **extra,
        ).last_hidden_state
        logits: Tensor = self._head(hidden[0, -1])
        return logits
