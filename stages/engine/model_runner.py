"""Runs a model's decoder over the new tokens of many requests at once, with our paged cache behind it.

Tokens are packed by `stages/engine/packed_pass.py`, layers computed by `stages/decoder/`, attention by
`stages/attention/`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epd.encoders import Adapter, Embeddings, num_deepstack, place
from epd.encoders.device import arrays_to_device, device_of, to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.errors import RequestError
from epd.lora_modules import LoRAModule
from epd.stages.attention.attention import AttentionBatch, AttentionPlan, warm_up
from epd.stages.attention.device import DeviceHeads
from epd.stages.attention.support import (
    MIXED_HEADS,
    adds_embeddings,
    attends_both_ways,
    layer_windows,
    lenders,
    state_layers,
)
from epd.stages.decoder.decoder import Decoder, DecoderInputs, FusedDecoder, LayerCaches, decoder_of
from epd.stages.decoder.delta_rule import DeltaPlan
from epd.stages.decoder.draft_head import DraftHead, has_draft_head
from epd.stages.decoder.gemma4 import ids_read
from epd.stages.decoder.layers import embedding_of, head_of
from epd.stages.decoder.linear import Linear
from epd.stages.decoder.lora import LoRARows, not_ours, read_adapters
from epd.stages.engine.chunk_graphs import ChunkGraphs, chunk_sizes
from epd.stages.engine.graphs import Capturing, DecodeGraphs, PassShape, graph_sizes
from epd.stages.engine.kv_pool import KVLayout, KVPools, layer_places
from epd.stages.engine.packed_pass import (
    GroupKind,
    PackedPass,
    Segment,
    attention_batches,
    ends_of,
    packed_pass,
    visual_of,
)
from epd.stages.rank import ALONE, Collectives, RankGroup
from epd.stages.reduction.propagation import ObservedRows, num_whole_layers, rows_going_on
from epd.stages.reduction.pruning import ROWS, PrunedRows
from epd.stages.reduction.question_views import ViewedRows, question_slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Holds the arrays of a pass on the device, all int64.

    token_ids: [T]. positions: [rows, T].
    logit_rows: [R], of the last layer's output, those that logits are wanted of.
    visual_rows: [V], the packed rows of visual tokens.
    next_ids: [S], the tokens after the segments, for a pass that writes rows of a head for drafts.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    visual_rows: Tensor
    next_ids: Tensor | None = None


class ModelRunner:
    """Runs the language model of one checkpoint with its KV pools.

    followers: ranks that repeat what is done to the pools; None for a runner that leads none.
    """

    followers: RankGroup | None = None

    def __init__(
        self,
        model: Any,
        adapter: Adapter | None,
        pools: KVPools,
        *,
        by_modules: bool = False,
        ranks: Collectives | None = None,
        capturing: Capturing | None = None,
    ) -> None:
        """Takes a model of transformers, whose parameters or attention function may be changed.

        adapter: may be left out for a text model that our decoder knows.
        by_modules: computes the layers with its modules, even if our decoder knows the text model.
        ranks: that share the model and run the same passes; the logits are rank 0's.
        capturing: which passes are captured; None to capture nothing.
        """
        self.pools = pools
        self._ranks = ranks
        self._adapters: Mapping[str, int] = {}
        self._embed = embedding_of(model, ranks)
        self._decoder: Decoder = decoder_of(model, adapter, by_modules=by_modules, ranks=ranks)
        self._head: Linear | nn.Module = (
            model.get_output_embeddings() if by_modules else head_of(model, ranks)
        )
        self._device = device_of(model.get_decoder())
        self._ids_read = ids_read(model.config, self._device)
        self._dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self._max_positions: int = model.get_decoder().config.max_position_embeddings
        windows, config = [group.window for group in pools.shape.groups], model.get_decoder().config
        self._kinds = [GroupKind(window, attends_both_ways(config, window)) for window in windows]
        self.attends_both_ways = any(kind.is_both_ways for kind in self._kinds)
        self._adds = adds_embeddings(config)
        self.draft_head = DraftHead.of(model, pools.groups[0].layer(-1))
        # Of each layer, its group, the first for one without attention, and its caches.
        self._groups, self._caches = layer_places(config, pools)
        self._heads = [DeviceHeads.of(pool.layer(0)[0], config.num_attention_heads) for pool in pools.groups]
        if uses_kernels(pools.memory):
            self._warm_up(config.num_attention_heads)
        self._num_deepstack = num_deepstack(model.config)
        self._graphs, self._chunk_graphs = self._captured(capturing)

    def serve_adapters(self, model: Any, modules: Sequence[LoRAModule]) -> None:
        """Reads adapters of the model that requests may name. Raises ModelError, UnsupportedModelError."""
        if not isinstance(self._decoder, FusedDecoder):
            raise not_ours(modules[0])
        adapters = read_adapters(modules, model, ALONE if self._ranks is None else self._ranks.rank)
        self._adapters = adapters.numbers
        self._decoder.add_adapters(adapters)

    def _lora_rows(self, packed: PackedPass) -> LoRARows | None:
        """Returns the adapters of the rows. Raises RequestError for one that is not served."""
        if not packed.adapters:
            return None
        unknown = next((name for name in packed.adapters if name and name not in self._adapters), None)
        if unknown is not None:
            served = ", ".join(self._adapters) or "none"
            raise RequestError(f"received the LoRA module '{unknown}'; allowed: {served}; use one of these")
        numbers = [self._adapters.get(name, -1) for name in packed.adapters]
        return LoRARows.of(numbers, np.diff(packed.batches[0].query_starts).tolist(), self._device)

    @property
    def num_spare_blocks(self) -> int:
        """Returns how many blocks of each pool no request may get: the last ones."""
        return 0 if self._graphs is None and self._chunk_graphs is None else 1

    @torch.inference_mode()
    def _warm_up(self, num_heads: int) -> None:
        """Compiles the kernels of every pass. num_heads: of queries."""
        for pool, kind in zip(self.pools.groups, self._kinds, strict=True):
            warm_up(*pool.layer(0), num_heads, kind.window, marks_some=self._adds)
            if isinstance(self._decoder, FusedDecoder):
                self._decoder.warm_up(pool.layer(0))
        if self.pools.states is not None and isinstance(self._decoder, FusedDecoder):
            self._decoder.warm_up_states(self.pools.states.layer(0))

    @torch.inference_mode()
    def _captured(self, capturing: Capturing | None) -> tuple[DecodeGraphs | None, ChunkGraphs | None]:
        """Captures passes; none where it cannot be done, as with a decoder that waits."""
        decoder = self._decoder
        if capturing is None or not isinstance(decoder, FusedDecoder) or decoder.waits:
            return None, None
        maker, sizes = capturing.maker, chunk_sizes(capturing.max_tokens)
        num_seqs, most = capturing.max_num_seqs, self._max_positions
        shape = PassShape.of(self.pools, self._heads, decoder.num_position_rows, num_seqs, most)
        try:
            has_decodes, has_chunks = (kind in capturing.kinds for kind in ("decodes", "chunks"))
            decodes = DecodeGraphs(maker, self._decoded, shape, self._device) if has_decodes else None
            hidden = self._embed(torch.zeros(sizes[-1], dtype=torch.int64, device=self._device))
            of_chunks = shape, hidden, self._num_deepstack, sizes
            chunks = ChunkGraphs(maker, self._layered, *of_chunks) if has_chunks else None
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.warning("passes could not be captured; they are as with enforce_eager", exc_info=True)
            return None, None
        most_seqs, most_tokens = graph_sizes(num_seqs)[-1] if decodes else 0, sizes[-1] if chunks else 0
        logger.info("captured: %d decodes at most, other passes of %d tokens", most_seqs, most_tokens)
        return decodes, chunks

    def _decoded(
        self, token_ids: Tensor, positions: Tensor, plans: Sequence[AttentionPlan], states: DeltaPlan
    ) -> Tensor:
        """Computes one token of each sequence: logits [T, V]."""
        hidden = self._embed(self._as_read(token_ids))
        logits: Tensor = self._head(self._layered(hidden, positions, plans, states))
        return logits

    def _layered(
        self,
        hidden: Tensor,
        positions: Tensor,
        plans: Sequence[AttentionPlan],
        states: DeltaPlan,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Computes the layers of embedded tokens: [T, C]. deepstack: of all of them, for the first layers."""
        visual = Embeddings(hidden, tuple(deepstack)) if deepstack else None
        rows = torch.arange(len(hidden), device=self._device) if deepstack else positions[0, :0]
        inputs = DecoderInputs(positions, self._caches_of(plans, states), rows, visual)
        return self._decoder.run(hidden, inputs, range(self._decoder.num_layers))

    def _as_read(self, token_ids: Tensor) -> Tensor:
        return token_ids if self._ids_read is None else self._ids_read.index_select(0, token_ids)

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Computes all segments in one pass, filling the cache. Returns logits [R, V], R = all num_logits.

        Raises RequestError as `packed` does.
        """
        return self.run_packed(self.packed(segments), visual_of(segments))

    def run_ahead(self, packed: PackedPass, visual: Embeddings | None, token_ids: Tensor | None) -> Tensor:
        """Computes a pass as `run` does.

        token_ids: int64 [T], on the device, instead of those of the pass, if some are not known yet.
        """
        return self.run_packed(packed, visual, token_ids)

    def packed(self, segments: Sequence[Segment]) -> PackedPass:
        """Packs segments as this runner's pools need them.

        Raises RequestError for segments that do not keep or read everything, where something needs it.
        """
        kept = "a recurrent state of all" if self.pools.states is not None else None
        kept = "a sliding window" if any(kind.window for kind in self._kinds) else kept
        kept = "media that attend each other" if self._adds else kept
        if kept is not None and not all(segment.is_whole for segment in segments):
            raise RequestError(
                f"received a reduction that drops tokens of some layers, where others have {kept}; allowed: "
                "a method that chooses before the language model; use another --reduction"
            )
        return packed_pass(segments, self._kinds, self.pools.block_size)

    @torch.inference_mode()
    def run_packed(
        self, packed: PackedPass, visual: Embeddings | None, token_ids: Tensor | None = None
    ) -> Tensor:
        """Computes a pass as `run` and `run_ahead` do."""
        is_whole = not packed.segments
        if self._graphs is not None and is_whole and self._graphs.fits(packed):
            return self._graphs.run(packed, token_ids)
        inputs = self._inputs(packed, token_ids)
        if self._chunk_graphs is not None and is_whole and self._chunk_graphs.fits(packed):
            hidden, visual = self._embedded(visual, inputs)
            rows = self._chunk_graphs.run(packed, hidden, inputs.visual_rows, visual)
            logits: Tensor = self._head(rows.index_select(0, inputs.logit_rows))
        else:
            logits = self._head(self._decode(packed, inputs, visual))
        return logits

    @torch.inference_mode()
    def run_with_head(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Computes segments as `run` does, and writes rows of the head for drafts.

        Returns also what the last layer gives for the rows of the logits, [R, C].
        """
        packed, visual = self.packed(segments), visual_of(segments)
        next_ids = np.array([each.next_id for each in segments], dtype=np.int64)
        inputs = replace(self._inputs(packed), next_ids=to_device(torch.from_numpy(next_ids), self._device))
        rows = self._decode(packed, inputs, visual)
        return self._head(rows), rows

    @torch.inference_mode()
    def draft(
        self, segments: Sequence[Segment], hidden: Tensor, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Lets the head for drafts propose the second next token of each of S sequences: int64 [S].

        segments: the last token whose next one is known, which is in its place. hidden: [S, C], what the
        last layer, or the head, gives for it. token_ids: int64 [S], the next ones, if they are not read yet.
        Returns also what the head gives.
        """
        assert self.draft_head is not None
        packed = packed_pass(segments, self._kinds, self.pools.block_size)
        inputs, plan = self._inputs(packed, token_ids), self._plans(packed.batches, segments)[0]
        rows = self.draft_head.run(self._embed(inputs.token_ids), hidden, inputs.positions, plan)
        return self._head(rows).argmax(-1), rows

    def _inputs(self, packed: PackedPass, token_ids: Tensor | None = None) -> PassInputs:
        arrays = [packed.token_ids, packed.positions, packed.logit_rows, packed.visual_rows]
        inputs = PassInputs(*arrays_to_device(arrays, self._device))
        ids = inputs.token_ids if token_ids is None else token_ids
        return replace(inputs, token_ids=self._as_read(ids))

    def _decode(self, packed: PackedPass, inputs: PassInputs, visual: Embeddings | None) -> Tensor:
        """Returns the last layer's output for the rows that logits are wanted of, [R, C]."""
        num_layers, segments = self._decoder.num_layers, packed.segments
        plans = self._plans(packed.batches, segments)
        hidden, visual = self._embedded(visual, inputs)
        following = self._following(hidden, packed, inputs)
        caches, lora = self._caches_of(plans, self._states_of(packed)), self._lora_rows(packed)
        ids, prompt_ids = inputs.token_ids, self._prompt_ids(packed, inputs.token_ids)
        whole = DecoderInputs(inputs.positions, caches, inputs.visual_rows, visual, lora, ids, prompt_ids)
        if self.draft_head is not None and following is not None:
            rows = self._decoder.run(hidden, whole, range(num_layers))
            self.draft_head.write(following, rows, inputs.positions, plans[0])
            return rows.index_select(0, inputs.logit_rows)
        if all(segment.going_on is None for segment in segments):
            return self._decoder.run(hidden, whole, range(num_layers), inputs.logit_rows)
        # Before anything runs, since a view begins anew whenever its question is planned.
        rest = [segment.later() for segment in segments]
        later_plans = self._plans(attention_batches(rest, self._kinds, self.pools.block_size), rest)
        num_whole = num_whole_layers(num_layers, len(visual.deepstack) if visual is not None else 0)
        hidden = self._decoder.run(hidden, whole, range(num_whole))
        going_on = [(len(segment.token_ids), segment.going_on) for segment in segments]
        rows = rows_going_on(going_on, self._device)
        if num_whole == num_layers:
            return hidden[rows[inputs.logit_rows]]
        caches, lora = self._caches_of(later_plans, None), lora and lora.only(rows)
        prompt_ids = None if prompt_ids is None else prompt_ids[rows]
        places = inputs.positions[:, rows]
        later = DecoderInputs(places, caches, inputs.visual_rows, lora=lora, prompt_ids=prompt_ids)
        return self._decoder.run(hidden[rows], later, range(num_whole, num_layers), inputs.logit_rows)

    def _following(self, embedded: Tensor, packed: PackedPass, inputs: PassInputs) -> Tensor | None:
        """Returns embeddings of the tokens after those of a pass, [T, C], where a head reads them."""
        if inputs.next_ids is None:
            return None
        last = torch.from_numpy(packed.batches[0].query_starts[1:].astype(np.int64) - 1)
        rows = to_device(last, self._device)
        return embedded.roll(-1, 0).index_copy_(0, rows, self._embed(inputs.next_ids))

    def _prompt_ids(self, packed: PackedPass, token_ids: Tensor) -> Tensor | None:
        """Returns ids of tokens of prompts, and -1 for others: int64 [T]; None where nobody reads them."""
        if not packed.num_prompt or isinstance(self._decoder, FusedDecoder):
            return None
        starts = packed.batches[0].query_starts
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        is_prompt = places < np.repeat(packed.num_prompt, np.diff(starts))
        return token_ids.masked_fill(~to_device(torch.from_numpy(is_prompt), self._device), -1)

    def _caches_of(self, plans: Sequence[AttentionPlan], states: DeltaPlan | None) -> LayerCaches:
        """Returns the caches and the plan of each layer. plans: of each layer group."""
        return LayerCaches(self._caches, [plans[group] for group in self._groups], states)

    def _states_of(self, packed: PackedPass) -> DeltaPlan:
        return DeltaPlan.build(packed.batches[0].query_starts, packed.states, self._device)

    def _plans(self, batches: Sequence[AttentionBatch], segments: Sequence[Segment]) -> list[AttentionPlan]:
        ends = ends_of(segments)
        return [
            replace(
                AttentionPlan.build(batch, self._device, self._heads[group]),
                pruned=tuple(self._pruned_rows(segments, ends, group)),
                viewed=tuple(self._viewed_rows(segments, ends, group)),
            )
            for group, batch in enumerate(batches)
        ]

    def _viewed_rows(
        self, segments: Sequence[Segment], ends: Sequence[int], group: int
    ) -> Iterator[ViewedRows]:
        for segment, end in zip(segments, ends, strict=True):
            view, start, cached = segment.view, end - len(segment.token_ids), segment.num_cached[group]
            if view is None:
                continue
            view.begin(len(self._caches), self._device)
            slots = question_slots(segment.block_tables[group], cached + end - start, self.pools.block_size)
            yield ViewedRows(start, end, to_device(slots, self._device), view, self._ranks)

    def _pruned_rows(
        self, segments: Sequence[Segment], ends: Sequence[int], group: int
    ) -> Iterator[PrunedRows]:
        for segment, end in zip(segments, ends, strict=True):
            if segment.num_kept is None:
                continue
            num_tokens = len(segment.token_ids)
            rows = end - num_tokens, end, segment.num_kept, self._ranks
            if segment.going_on is None:
                yield ROWS[segment.method](*rows)
                continue
            context = segment.num_cached[group] + num_tokens
            slots = question_slots(segment.block_tables[group], context, self.pools.block_size)
            yield ObservedRows(*rows, to_device(slots, self._device), segment.going_on)

    def _embedded(self, visual: Embeddings | None, inputs: PassInputs) -> tuple[Tensor, Embeddings | None]:
        """Embeds [T, C] with visual rows in their places; returns also what is placed there."""
        embeds: Tensor = self._embed(inputs.token_ids)
        if visual is None:
            return embeds, None
        visual = visual.mapped(lambda part: to_device(part, self._device))
        return place(embeds[None], inputs.visual_rows, visual, adds=self._adds)[0], visual


def kv_layouts(model: Any, *, int8_values: bool = False) -> list[tuple[KVLayout, int | None]]:
    """Describes what a token of `model` leaves in the cache of each layer group, and the group's window.

    Layers of all tokens come first, and of them the head for drafts last. int8_values: see `KVLayout`.
    """
    decoder = model.get_decoder()
    config, dtype = decoder.config, next(decoder.parameters()).dtype
    windows, lent, has_states = layer_windows(config), lenders(config), state_layers(config)
    own = [each for each in range(len(windows)) if lent[each] == each and not has_states[each]]
    kinds = sorted({windows[each] for each in own}, key=lambda window: window or 0)
    found = []
    for kind in kinds:
        layers = [each for each in own if windows[each] == kind]
        heads = _kv_heads(config, decoder.layers[layers[0]])
        num_layers = len(layers) + (kind is None and has_draft_head(model))
        found.append((KVLayout(num_layers, *heads, dtype, int8_values), kind))
    return found


def kv_bytes_per_token(model: Any, *, int8_values: bool = False) -> int:
    """Counts the bytes that a token leaves in the cache, of all layers with attention."""
    return sum(layout.bytes_per_token for layout, _ in kv_layouts(model, int8_values=int8_values))


def _kv_heads(config: Any, layer: Any) -> tuple[int, int]:
    """Returns how many heads of keys a layer has, and the channels of each."""
    if config.model_type in MIXED_HEADS:
        attention = layer.self_attn
        return config.num_attention_heads // attention.num_key_value_groups, attention.head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, head_dim
