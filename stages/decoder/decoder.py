"""Runs the layers of a text model over the packed rows of a pass, with the paged cache behind them.

Two do the same: `FusedDecoder` from merged matrices with few operations a layer, for the text models that it
knows, and `ModulesDecoder` with the modules of transformers, for all others, and as its twin in tests.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from epd.encoders import Adapter
from epd.encoders.adapter import Embeddings
from epd.errors import UnsupportedModelError
from epd.stages.attention.attention import AttentionPlan, attend, attend_layer, register
from epd.stages.attention.support import MIXED_HEADS, RECURRENT, check_attention
from epd.stages.decoder.delta_layer import DeltaLayer
from epd.stages.decoder.delta_rule import DeltaPlan
from epd.stages.decoder.experts import SparseMlp
from epd.stages.decoder.gemma4 import ExpertsBeside
from epd.stages.decoder.layers import DecoderLayer, DecoderLayers, layers_of
from epd.stages.decoder.lora import LoRAAdapters, LoRAPass, LoRARows
from epd.stages.decoder.operations import Rotations, add_rms_norm, norm_rotate_write, rotate, split_gates
from epd.stages.decoder.text_model import TextModel, text_model
from epd.stages.rank import Collectives

_ATTENTION = "epd_paged"
# Rows of a chunk, for which products with quantised matrices have tiles of their own.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Holds what layers need to know of a pass.

    caches: of each layer, keys and values, or tails and matrices of its recurrent states.
    plans: of each layer; those of layers with a recurrent state are not read, which have `states` in common.
    """

    caches: Sequence[tuple[Tensor, Tensor]]
    plans: Sequence[AttentionPlan]
    states: DeltaPlan | None = None

    def layer(self, index: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        return *self.caches[index], self.plans[index]


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """Holds what a pass gives to its layers besides the rows.

    positions: int64 [rows, T], three rows for M-RoPE, else one.
    visual_rows: int64 [V], the packed rows of visual tokens.
    visual: their embeddings; None without any.
    lora: which adapters the rows have; None without any.
    token_ids: int64 [T], for a model that embeds them for each layer; None for others.
    prompt_ids: int64 [T], the same, -1 for tokens of answers; None where all are.
    """

    positions: Tensor
    paged: LayerCaches
    visual_rows: Tensor
    visual: Embeddings | None = None
    lora: LoRARows | None = None
    token_ids: Tensor | None = None
    prompt_ids: Tensor | None = None


class Decoder(Protocol):
    """Computes a run of layers."""

    @property
    def num_layers(self) -> int: ...

    def run(self, hidden: Tensor, inputs: DecoderInputs, layers: range, rows: Tensor | None = None) -> Tensor:
        """Returns what the layers make of hidden [T, C], which may be overwritten: [T, C].

        layers: that follow each other; after the model's last one comes its norm.
        rows: int64 [R], of the model's last layer only these are wanted: [R, C]; None for all.
        """


def decoder_of(
    model: Any, adapter: Adapter | None, *, by_modules: bool = False, ranks: Collectives | None = None
) -> Decoder:
    """Returns the decoder of a model of transformers.

    adapter: needed for one that ours does not know. by_modules: never ours, not even where it is known.
    ranks: that share the layers, each with a model of `cut_model`.
    Raises UnsupportedModelError for attention that nothing here computes.
    """
    decoder = model.get_decoder()
    known = None if by_modules else text_model(decoder)
    if known is None and decoder.config.model_type in RECURRENT | MIXED_HEADS:
        raise UnsupportedModelError(
            f"received the language model '{decoder.config.model_type}' with layers, positions or an "
            "activation of another kind; allowed: those of its authors' checkpoints; use one of these"
        )
    if known is None:
        if adapter is None:
            raise ValueError("a text model that our decoder does not know needs its adapter")
        return ModulesDecoder(model, adapter)
    check_attention(decoder.config)
    return FusedDecoder(known, layers_of(decoder, ranks))


class FusedDecoder:
    """Computes the layers of a known text model."""

    def __init__(self, model: TextModel, layers: DecoderLayers) -> None:
        self._model = model
        self._layers = layers
        self._lora = LoRAPass()

    def add_adapters(self, adapters: LoRAAdapters) -> None:
        """Lets the rows of passes have adapters from now on."""
        self._layers, self._lora = adapters.wrapped(self._layers), adapters.current

    @property
    def num_layers(self) -> int:
        return len(self._layers.layers)

    @property
    def num_position_rows(self) -> int:
        """Returns how many rows of positions matter."""
        return 1 if self._model.row_of_frequency is None else 3

    @property
    def waits(self) -> bool:
        """Reports whether passes cannot be captured: a layer has a window."""
        return any(isinstance(each, DecoderLayer) and each.is_local for each in self._layers.layers)

    def warm_up(self, caches: tuple[Tensor, Tensor]) -> None:
        """Launches every kernel of a layer, so that no request waits for one; what is in the caches stays."""
        layer = next(self._writing(caches))
        model = self._model_of(layer)
        held, dtype = [cache[0, 0].clone() for cache in caches], caches[0].dtype
        weight = layer.attention_norm.weight
        hidden = weight.new_zeros(1, len(weight), dtype=dtype)
        still = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        rotations = Rotations.of(model, still, dtype)
        qkv, _ = self._qkv(layer, add_rms_norm(hidden, None, layer.attention_norm))
        norm_rotate_write(qkv, model.heads, layer.head_norms, rotations, caches, still[0])
        add_rms_norm(hidden, layer.mlp(hidden), layer.mlp_norm)
        chunk = weight.new_zeros(_CHUNK, len(weight), dtype=dtype)
        layer.qkv(chunk)
        layer.out(weight.new_zeros(_CHUNK, model.heads[0] * model.heads[2], dtype=dtype))
        for mlp in {type(each.mlp): each.mlp for each in self._layers.layers}.values():
            mlp(chunk)
        for sparse in itertools.islice(self._with_experts(), 1):
            sparse.experts.warm_up(hidden, sparse.router(hidden)[1])
        for cache, values in zip(caches, held, strict=True):
            cache[0, 0] = values

    def warm_up_states(self, states: tuple[Tensor, Tensor]) -> None:
        """Launches the kernels of a gated delta layer. states: tails and matrices of one, which stay."""
        next(each for each in self._layers.layers if isinstance(each, DeltaLayer)).mixer.warm_up(*states)

    def _with_experts(self) -> Iterator[SparseMlp | ExpertsBeside]:
        for layer in self._layers.layers:
            for each in (layer.mlp, layer.beside if isinstance(layer, DecoderLayer) else None):
                if isinstance(each, SparseMlp | ExpertsBeside):
                    yield each

    def _writing(self, caches: tuple[Tensor, Tensor]) -> Iterator[DecoderLayer]:
        """Yields the layers that write keys and values of the heads that these caches have."""
        for layer in self._layers.layers:
            heads = self._model_of(layer).heads[1:]
            if isinstance(layer, DecoderLayer) and not layer.borrows and heads == caches[0].shape[2:]:
                yield layer

    def _model_of(self, layer: DecoderLayer | DeltaLayer) -> TextModel:
        """Returns the positions and the heads of a layer."""
        is_local = isinstance(layer, DecoderLayer) and layer.is_local
        return self._model.local if is_local and self._model.local is not None else self._model

    def run(self, hidden: Tensor, inputs: DecoderInputs, layers: range, rows: Tensor | None = None) -> Tensor:
        rotations = Rotations.of(self._model, inputs.positions, hidden.dtype)
        by_local = self._model.local and Rotations.of(self._model.local, inputs.positions, hidden.dtype)
        deepstack = inputs.visual.deepstack if inputs.visual is not None else ()
        residual, added = hidden, None
        embedded = self._embedded(hidden, inputs)
        self._lora.rows = inputs.lora
        for index in layers:
            is_local = self._model_of(self._layers.layers[index]) is not self._model
            turned = by_local if by_local and is_local else rotations
            attended = self._attend(index, residual, added, inputs, turned)
            if index + 1 == self.num_layers and rows is not None and index >= len(deepstack):
                if self._lora.rows is not None:
                    self._lora.rows = self._lora.rows.only(rows)
                embedded = None if embedded is None else _only(rows, embedded)
                residual, attended, rows = _only(rows, residual), _only(rows, attended), None
            added = self._finished(index, residual, self._mix(index, residual, attended), embedded)
            if added is not None and index < len(deepstack):
                added.index_add_(0, inputs.visual_rows, deepstack[index].to(added.dtype))
        if layers.stop < self.num_layers:
            return residual if added is None else residual.add_(added)
        normed = add_rms_norm(residual, added, self._layers.norm)
        return normed if rows is None else _only(rows, normed)

    def write(self, hidden: Tensor, inputs: DecoderInputs) -> None:
        """Writes keys and values of hidden [T, C] in the first layer, which has attention; nothing else."""
        layer, model = self._layers.layers[0], self._model
        assert isinstance(layer, DecoderLayer)
        qkv, _ = self._qkv(layer, add_rms_norm(hidden, None, layer.attention_norm))
        keys, values, plan = inputs.paged.layer(0)
        rotations = Rotations.of(model, inputs.positions, hidden.dtype)
        norm_rotate_write(qkv, model.heads, layer.head_norms, rotations, (keys, values), plan.slot_mapping)

    def _embedded(self, hidden: Tensor, inputs: DecoderInputs) -> Tensor | None:
        """Returns the embeddings of tokens for each layer, [T, L, P], where the model has them."""
        embeddings = self._layers.embeddings
        if embeddings is None:
            return None
        assert inputs.token_ids is not None
        return embeddings(inputs.token_ids, hidden)

    def _attend(
        self,
        index: int,
        residual: Tensor,
        added: Tensor | None,
        inputs: DecoderInputs,
        rotations: Rotations,
    ) -> Tensor:
        """Adds to the residual, and returns what its rows attend: [T, Hq * D].

        Of a gated delta layer, what its rows read of their states: [T, H * Dv].
        """
        layer = self._layers.layers[index]
        normed = add_rms_norm(residual, added, layer.attention_norm)
        if isinstance(layer, DeltaLayer):
            assert inputs.paged.states is not None
            return layer.mixer(normed, *inputs.paged.caches[index], inputs.paged.states)
        model = self._model_of(layer)
        qkv, gates = self._qkv(layer, normed)
        *caches, plan = inputs.paged.layer(index)
        if layer.borrows:
            queries = qkv.view(len(qkv), -1, model.head_dim)
            queries.copy_(layer.head_norms[0](queries))
            rotate(queries, rotations)
            return attend(queries, caches[0], caches[1], plan, model.scale).flatten(1)
        queries, keys, values = norm_rotate_write(
            qkv, model.heads, layer.head_norms, rotations, (caches[0], caches[1]), plan.slot_mapping
        )
        attended = attend_layer(index, queries, keys, values, caches[0], caches[1], plan, model.scale)
        return attended.flatten(1) if gates is None else attended.flatten(1) * gates.sigmoid()

    def _qkv(self, layer: DecoderLayer, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns queries, keys and values side by side, and the gates of what is attended, if any."""
        qkv = layer.qkv(normed)
        return split_gates(qkv, self._model.heads) if self._model.has_gates else (qkv, None)

    def _mix(self, index: int, residual: Tensor, attended: Tensor) -> Tensor:
        """Adds what was attended to the residual, and returns what the layer adds after that: [T, C]."""
        layer = self._layers.layers[index]
        if isinstance(layer, DeltaLayer) or layer.later_norms is None:
            return layer.mlp(add_rms_norm(residual, layer.out(attended), layer.mlp_norm))
        behind_attention, behind_mlp = layer.later_norms
        added = add_rms_norm(layer.out(attended), None, behind_attention)
        mixed = layer.mlp(add_rms_norm(residual, added, layer.mlp_norm))
        mixed = mixed if layer.beside is None else layer.beside(mixed, residual)
        return add_rms_norm(mixed, None, behind_mlp)

    def _finished(
        self, index: int, residual: Tensor, added: Tensor, embedded: Tensor | None
    ) -> Tensor | None:
        """Adds the layer's own embedding, and scales all rows; returns what is still to be added, if any."""
        layer = self._layers.layers[index]
        if isinstance(layer, DeltaLayer) or (layer.embedding is None and layer.scalar == 1.0):
            return added
        residual.add_(added)
        if layer.embedding is not None and embedded is not None:
            residual.add_(layer.embedding(residual, embedded[:, index]))
        residual.mul_(layer.scalar)
        return None


class ModulesDecoder:
    """Computes the layers with the modules of transformers, whose attention function becomes ours."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        register(_ATTENTION)
        model.set_attn_implementation({"text_config": _ATTENTION})
        self._adapter = adapter
        self._decoder: nn.Module = model.get_decoder()
        adapter.prepare_decoder(self._decoder)

    @property
    def num_layers(self) -> int:
        layers: Any = self._decoder.layers
        return len(layers)

    def run(self, hidden: Tensor, inputs: DecoderInputs, layers: range, rows: Tensor | None = None) -> Tensor:
        extra: dict[str, Any] = {}
        if inputs.visual is not None and layers.start == 0:
            extra = self._adapter.decoder_kwargs(inputs.visual_rows, inputs.visual)
        if inputs.prompt_ids is not None:
            extra |= self._adapter.prompt_kwargs(inputs.prompt_ids)
        positions = inputs.positions
        computed: Tensor = self._part(layers)(
            inputs_embeds=hidden[None],
            position_ids=positions if len(positions) == 1 else positions[:, None],
            use_cache=False,
            paged=inputs.paged,
            **extra,
        ).last_hidden_state[0]
        return computed if rows is None else _only(rows, computed)

    def _part(self, layers: range) -> nn.Module:
        """Returns a decoder of some layers alone, which shares the weights."""
        if len(layers) == self.num_layers:
            return self._decoder
        held: Any = self._decoder.layers
        part = copy.copy(self._decoder)
        part._modules = {**self._decoder._modules, "layers": held[layers.start : layers.stop]}
        if layers.stop < self.num_layers:
            part.norm = nn.Identity()
        return part


def _only(rows: Tensor, of: Tensor) -> Tensor:
    """Returns some rows, int64 [R], of [T, C]; as many as there are, are all of them in order."""
    return of if len(rows) == len(of) else of.index_select(0, rows)
