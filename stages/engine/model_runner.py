"""Runs a model's decoder over the new tokens of many requests at once, with our paged cache behind it.

    T new tokens of the pass, one segment per request, packed without padding:

    | prefill chunk of a ......... | chunk of b ... | c | d | e |        c, d, e decode: one token each

The layers are computed by `stages/decoder/`, attention by `stages/attention/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from encoders import Adapter, Embeddings, concatenated, place
from encoders.device import arrays_to_device, device_of, to_device
from encoders.kernels.dispatch import uses_kernels
from epd.types import Int32Array, Int64Array
from stages.attention.attention import AttentionBatch, AttentionPlan
from stages.attention.warm_up import warm_up
from stages.decoder.decoder import Decoder, DecoderInputs, FusedDecoder, LayerCaches, decoder_of
from stages.decoder.layers import embedding_of, head_of
from stages.decoder.linear import Linear
from stages.engine.kv_pool import KVLayout, KVPools
from stages.rank import Collectives
from stages.reduction.propagation import GoingOn, ObservedRows, num_whole_layers, rows_going_on
from stages.reduction.pruning import PrunedRows
from stages.reduction.question_views import QuestionView, ViewedRows, question_slots
from stages.visual_inputs import PlacedEmbeddings


@dataclass(frozen=True, slots=True)
class Segment:
    """Holds the new tokens of one request.

    token_ids: int64 [n].
    positions: int64 [rows, n], three rows for M-RoPE, else one.
    num_cached: tokens in the cache before these, of each layer group.
    block_tables: of each layer group, with room for the new ones.
    visual: visual tokens among the new ones, indices counted from the first of them.
    num_logits: how many of the last new tokens to give logits for.
    num_kept: how many new tokens stay in the cache, chosen by each layer; all of them if None.
    going_on: receives which, where the later layers compute those alone.
    view: what of the cache a question reads, if not all.
    """

    token_ids: Int64Array
    positions: Int64Array
    num_cached: Sequence[int]
    block_tables: Sequence[Int32Array]
    visual: PlacedEmbeddings | None = None
    num_logits: int = 1
    num_kept: int | None = None
    going_on: GoingOn | None = None
    view: QuestionView | None = None

    def later(self) -> Segment:
        """Returns the segment of later layers: with as many rows as continue, all of which they keep."""
        if self.going_on is None:
            return self
        return replace(self, token_ids=self.token_ids[: self.num_kept], num_kept=None, going_on=None)


@dataclass(frozen=True, slots=True)
class _PassInputs:
    """Holds the arrays of a pass on the device, all int64.

    token_ids: [T]. positions: [rows, T].
    logit_rows: [R], of the last layer's output, those that logits are wanted of.
    visual_rows: [V], the packed rows of visual tokens.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    visual_rows: Tensor


class ModelRunner:
    """Runs the language model of one checkpoint with its KV pools."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        pools: KVPools,
        *,
        by_modules: bool = False,
        ranks: Collectives | None = None,
    ) -> None:
        """Takes a model of transformers, whose parameters or attention function may be changed.

        by_modules: computes the layers with its modules, even if our decoder knows the text model.
        ranks: that share the model and run the same passes; the logits are rank 0's.
        """
        self.pools = pools
        self._embed = embedding_of(model, ranks)
        self._decoder: Decoder = decoder_of(model, adapter, by_modules=by_modules, ranks=ranks)
        self._head: Linear | nn.Module = (
            model.get_output_embeddings() if by_modules else head_of(model, ranks)
        )
        self._device = device_of(model.get_decoder())
        # Of each layer, its group and its caches.
        self._groups = [
            group for group, pool in enumerate(pools.groups) for _ in range(pool.layout.num_layers)
        ]
        self._caches = [pools.layer(index) for index in range(len(self._groups))]
        if uses_kernels(self._caches[0][0]):
            self._warm_up(model.get_decoder().config.num_attention_heads)

    @torch.inference_mode()
    def _warm_up(self, num_heads: int) -> None:
        """Compiles the kernels of every pass. num_heads: of queries."""
        for pool in self.pools.groups:
            warm_up(*pool.layer(0), num_heads)
            if isinstance(self._decoder, FusedDecoder):
                self._decoder.warm_up(pool.layer(0))

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Computes all segments in one pass, filling the cache. Returns logits [R, V], R = all num_logits."""
        logits: Tensor = self._head(self._decode(segments, self._inputs(segments)))
        return logits

    def _inputs(self, segments: Sequence[Segment]) -> _PassInputs:
        """Moves what the pass needs besides its plans to the device, in one copy."""
        later = [segment.later() for segment in segments]
        placed = [
            segment.visual.indices + (end - len(segment.token_ids))
            for segment, end in zip(segments, _ends(segments), strict=True)
            if segment.visual is not None
        ]
        arrays = [
            _joined([segment.token_ids for segment in segments]),
            _joined([segment.positions for segment in segments]),
            _logit_rows(later, _ends(later)),
            _joined(placed) if placed else np.empty(0, dtype=np.int64),
        ]
        return _PassInputs(*arrays_to_device(arrays, self._device))

    def _decode(self, segments: Sequence[Segment], inputs: _PassInputs) -> Tensor:
        """Returns the last layer's output for the rows that logits are wanted of, [R, C]."""
        num_layers = self._decoder.num_layers
        plans = self._plans(segments)
        hidden, visual = self._embedded(segments, inputs)
        whole = DecoderInputs(inputs.positions, self._caches_of(plans), inputs.visual_rows, visual)
        if all(segment.going_on is None for segment in segments):
            return self._decoder.run(hidden, whole, range(num_layers), inputs.logit_rows)
        # Before anything runs, since a view begins anew whenever its question is planned.
        later_plans = self._plans([segment.later() for segment in segments])
        num_whole = num_whole_layers(num_layers, len(visual.deepstack) if visual is not None else 0)
        hidden = self._decoder.run(hidden, whole, range(num_whole))
        going_on = [(len(segment.token_ids), segment.going_on) for segment in segments]
        rows = rows_going_on(going_on, self._device)
        later = DecoderInputs(inputs.positions[:, rows], self._caches_of(later_plans), inputs.visual_rows)
        return self._decoder.run(hidden[rows], later, range(num_whole, num_layers), inputs.logit_rows)

    def _caches_of(self, plans: Sequence[AttentionPlan]) -> LayerCaches:
        """Returns the caches and the plan of each layer. plans: of each layer group."""
        return LayerCaches(self._caches, [plans[group] for group in self._groups])

    def _plans(self, segments: Sequence[Segment]) -> list[AttentionPlan]:
        """Builds the plan of each layer group."""
        ends = _ends(segments)
        return [
            replace(
                AttentionPlan.build(self._attention_batch(segments, ends, group), self._device),
                pruned=tuple(self._pruned_rows(segments, ends, group)),
                viewed=tuple(self._viewed_rows(segments, ends, group)),
            )
            for group in range(len(self.pools.groups))
        ]

    def _attention_batch(
        self, segments: Sequence[Segment], ends: Sequence[int], group: int
    ) -> AttentionBatch:
        block_size = self.pools.block_size
        starts = np.array([0, *ends], dtype=np.int32)
        cached = np.array([segment.num_cached[group] for segment in segments], dtype=np.int32)
        lengths = np.diff(starts)
        tables = _padded([segment.block_tables[group] for segment in segments])
        owners, at = np.arange(len(segments)), cached  # of each new token: its request, its place in it
        if ends[-1] > len(segments):
            owners = np.repeat(owners, lengths)
            at = np.arange(ends[-1]) + (cached - starts[:-1])[owners]
        slots = tables[owners, at // block_size].astype(np.int64) * block_size + at % block_size
        return AttentionBatch(starts, cached + lengths, tables, slots, block_size)

    def _viewed_rows(
        self, segments: Sequence[Segment], ends: Sequence[int], group: int
    ) -> Iterator[ViewedRows]:
        for segment, end in zip(segments, ends, strict=True):
            view, start, cached = segment.view, end - len(segment.token_ids), segment.num_cached[group]
            if view is None:
                continue
            view.begin(len(self._caches), self._device)
            slots = question_slots(segment.block_tables[group], cached + end - start, self.pools.block_size)
            yield ViewedRows(start, end, to_device(slots, self._device), view)

    def _pruned_rows(
        self, segments: Sequence[Segment], ends: Sequence[int], group: int
    ) -> Iterator[PrunedRows]:
        for segment, end in zip(segments, ends, strict=True):
            if segment.num_kept is None:
                continue
            num_tokens = len(segment.token_ids)
            rows = end - num_tokens, end, segment.num_kept
            if segment.going_on is None:
                yield PrunedRows(*rows)
                continue
            context = segment.num_cached[group] + num_tokens
            slots = question_slots(segment.block_tables[group], context, self.pools.block_size)
            yield ObservedRows(*rows, to_device(slots, self._device), segment.going_on)

    def _embedded(self, segments: Sequence[Segment], inputs: _PassInputs) -> tuple[Tensor, Embeddings | None]:
        """Embeds [T, C] with visual rows in their places; returns also what is placed there."""
        embeds: Tensor = self._embed(inputs.token_ids)
        placed = [segment.visual.embeddings for segment in segments if segment.visual is not None]
        if not placed:
            return embeds, None
        visual = concatenated(placed).mapped(lambda part: to_device(part, self._device))
        return place(embeds[None], inputs.visual_rows, visual)[0], visual


def _ends(segments: Sequence[Segment]) -> list[int]:
    """Returns, for each segment, the packed row after its last."""
    return list(accumulate(len(segment.token_ids) for segment in segments))


def _joined(arrays: Sequence[Int64Array]) -> Int64Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def _padded(tables: Sequence[Int32Array]) -> Int32Array:
    """Pads to int32 [S, the longest]; what is past a table's end is 0."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _logit_rows(segments: Sequence[Segment], ends: Sequence[int]) -> Int64Array:
    counts = np.array([segment.num_logits for segment in segments])
    stops = np.array(ends, dtype=np.int64)
    firsts = np.repeat(stops - counts, counts)
    rows: Int64Array = firsts + np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows


def kv_layout(model: Any) -> KVLayout:
    """Describes what one token of `model` leaves in the cache, all layers in one group."""
    config = model.get_decoder().config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = next(model.get_decoder().parameters()).dtype
    return KVLayout(config.num_hidden_layers, config.num_key_value_heads, head_dim, dtype)
