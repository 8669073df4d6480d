"""Shows what each layer of a loaded language model gives for a prompt, as answers are computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from epd.encoders import Adapter, Embeddings, PromptPlan
from epd.encoders.device import arrays_to_device, device_of
from epd.stages.decoder.decoder import DecoderInputs
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment, visual_of
from epd.stages.engine.setup import BLOCK_SIZE, kv_shape
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.types import Int64Array, ceil_div


class LayerProbe(ModelRunner):
    """Runs one prompt, as far as a layer or to its logits, with a cache of its own."""

    @classmethod
    def of(cls, model: Any, adapter: Adapter, num_tokens: int, *, by_modules: bool = False) -> Self:
        """Takes a model, and room for a prompt of so many tokens. by_modules: see `ModelRunner`."""
        room = num_tokens + 2 * BLOCK_SIZE
        shape = kv_shape(model, room, max_num_seqs=1, max_chunk_tokens=room)
        return cls(model, adapter, shape.build(device=device_of(model)), by_modules=by_modules)

    @torch.inference_mode()
    def hidden(self, segment: Segment, num_layers: int) -> Tensor:
        """Returns the input of layer `num_layers`, [T, C]; of all layers, what their norm gives."""
        segments = self._segments(segment)
        packed = self.packed(segments)
        ids, positions, visual_rows = arrays_to_device(
            [packed.token_ids, packed.positions, packed.visual_rows], self._device
        )
        embeds: Tensor = self._embed(ids)
        visual = visual_of(segments)
        if visual is not None:
            visual = visual.mapped(lambda part: part.to(self._device))
            embeds = embeds.index_copy(0, visual_rows, visual.rows.to(embeds.dtype))
        if num_layers == 0:
            return embeds
        plans = self._plans(packed.batches, segments)
        paged = self._caches_of(plans, self._states_of(packed))
        prompt_ids = self._prompt_ids(packed, ids)
        inputs = DecoderInputs(positions, paged, visual_rows, visual, prompt_ids=prompt_ids)
        return self._decoder.run(embeds, inputs, range(num_layers))

    def logits(self, segment: Segment, num_last: int) -> Tensor:
        """Returns the logits of the last tokens, [num_last, vocabulary]."""
        *first, last = self._segments(segment)
        return self.run(
            [*(replace(each, num_logits=0) for each in first), replace(last, num_logits=num_last)]
        )

    def _segments(self, segment: Segment) -> list[Segment]:
        """Places a prompt in the pools, in parts where visual tokens attend each other: in one pass.

        The keys of all parts are written before any part attends.
        """
        num_groups = len(self.pools.groups)
        tables = list(segment.block_tables) * num_groups
        states = None if self.pools.states is None else (None, 0)
        bounds = {0, len(segment.token_ids)}
        starts: set[int] = set()
        if self.attends_both_ways and segment.visual is not None:
            is_start = np.diff(segment.visual.indices, prepend=-2) != 1
            starts = set(segment.visual.indices[is_start].tolist())
            bounds |= starts | {int(last) + 1 for last in segment.visual.indices[np.roll(is_start, -1)]}
        return [
            replace(
                segment,
                token_ids=segment.token_ids[start:stop],
                positions=segment.positions[:, start:stop],
                num_cached=[start] * num_groups,
                block_tables=tables,
                visual=_part(segment.visual, start, stop),
                states=states,
                is_both_ways=start in starts,
                num_prompt=max(0, min(stop, segment.num_prompt) - start),
            )
            for start, stop in pairwise(sorted(bounds))
        ]


def _part(placed: PlacedEmbeddings | None, start: int, stop: int) -> PlacedEmbeddings | None:
    """Returns the visual tokens among tokens [start, stop), if there are any."""
    if placed is None:
        return None
    first, last = np.searchsorted(placed.indices, (start, stop)).tolist()
    if first == last:
        return None
    return PlacedEmbeddings(placed.embeddings.cut(first, last), placed.indices[first:last] - start)


def segment_of(prompt: PromptPlan, visual: Embeddings | None, answer: Int64Array) -> Segment:
    """Returns a prompt, with the embeddings of all its media, and an answer behind it as one segment."""
    num_tokens = len(prompt) + len(answer)
    behind = prompt.next_position + np.arange(len(answer), dtype=np.int64)
    positions = np.broadcast_to(behind, (len(prompt.positions), len(answer)))
    placed = None
    if visual is not None:
        indices = [item.token_indices(0, len(item.units)) for item in prompt.media]
        placed = PlacedEmbeddings(visual, np.concatenate(indices))
    return Segment(
        np.concatenate([prompt.token_ids, answer]),
        np.concatenate([prompt.positions, positions], axis=1),
        [0],
        [np.arange(ceil_div(num_tokens, BLOCK_SIZE), dtype=np.int32)],
        placed,
        num_prompt=len(prompt),
    )
