"""Shows what each layer of a loaded language model gives for a prompt, as answers are computed."""

from __future__ import annotations

from dataclasses import replace
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
        shape = kv_shape(model, num_tokens + 2 * BLOCK_SIZE, max_num_seqs=1)
        return cls(model, adapter, shape.build(device=device_of(model)), by_modules=by_modules)

    @torch.inference_mode()
    def hidden(self, segment: Segment, num_layers: int) -> Tensor:
        """Returns the input of layer `num_layers`, [T, C]; of all layers, what their norm gives."""
        segment = self._with_state(segment)
        packed = self.packed([segment])
        ids, positions, visual_rows = arrays_to_device(
            [packed.token_ids, packed.positions, packed.visual_rows], self._device
        )
        embeds: Tensor = self._embed(ids)
        visual = visual_of([segment])
        if visual is not None:
            visual = visual.mapped(lambda part: part.to(self._device))
            embeds = embeds.index_copy(0, visual_rows, visual.rows.to(embeds.dtype))
        if num_layers == 0:
            return embeds
        plans = self._plans(packed.batches, [segment])
        paged = self._caches_of(plans, self._states_of(packed))
        inputs = DecoderInputs(positions, paged, visual_rows, visual)
        return self._decoder.run(embeds, inputs, range(num_layers))

    def logits(self, segment: Segment, num_last: int) -> Tensor:
        """Returns the logits of the last tokens, [num_last, vocabulary]."""
        return self.run([replace(self._with_state(segment), num_logits=num_last)])

    def _with_state(self, segment: Segment) -> Segment:
        """Names a slot of the recurrent state, from its start on, where the model has one."""
        return segment if self.pools.states is None else replace(segment, states=(None, 0))


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
    )
