"""Takes the weights of layers from the modules of transformers, and merges them, once for all engines.

A rank computes with its part of matrices, of which all ranks together have the whole:

    columns of a product    QKV, gate and up: a rank has some rows of the matrix, and nothing is exchanged
    sums of a product       output and down: a rank has some columns, and the products are added up
    experts                 a rank has some channels of each, and routes as all do; the outputs are added up
    gated delta layers      a rank has some heads of keys, with those of values that they serve
    vocabulary              a rank embeds its token ids and others' as 0, added up; logits are gathered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from epd.stages.attention.support import MIXED_HEADS, RECURRENT, WINDOWED
from epd.stages.decoder.delta_layer import DeltaLayer, GatedDelta
from epd.stages.decoder.experts import Experts, SparseMlp
from epd.stages.decoder.gemma4 import CappedHead, ExpertsBeside, LayerEmbedding, LayerEmbeddings, unit_norm
from epd.stages.decoder.linear import JoinedLinear, Linear, LinearKind, kind_for, linear, linear_kind
from epd.stages.decoder.operations import RmsNorm, gelu_mul, silu_mul
from epd.stages.loading.merged_weights import DELTA, GATE_UP, QKV, merged
from epd.stages.loading.quantized_linear import QuantizedLinear, can_merge, product_of
from epd.stages.rank import Collectives, Rank, summed


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Multiplies a rank's columns of the rows by its columns of a matrix, and adds up what the ranks have.

    bias: [N], the whole one, added once.
    """

    part: Linear
    bias: Tensor | None
    ranks: Collectives

    def __call__(self, rows: Tensor) -> Tensor:
        product = summed(self.part(rows), self.ranks)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True)
class SplitEmbedding:
    """Embeds token ids of which a rank has a part.

    weight: [V of the rank, C]. num_ids: V of all ranks. scale: of the rows.
    """

    weight: Tensor
    num_ids: int
    ranks: Collectives
    scale: Tensor | None = None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns [T, C] for int64 [T]."""
        start, stop = self.ranks.rank.part(self.num_ids)
        is_elsewhere = (token_ids < start) | (token_ids >= stop)
        rows = functional.embedding((token_ids - start).clamp_(0, stop - start - 1), self.weight)
        rows.masked_fill_(is_elsewhere[:, None], 0)
        self.ranks.add_up(rows)
        return rows if self.scale is None else rows.mul_(self.scale.to(rows.dtype))


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """Computes logits of which a rank has a part. num_ids: V of all ranks."""

    part: Linear
    num_ids: int
    ranks: Collectives

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [R, V] of rows [R, C] to rank 0, and [R, 0] to others."""
        size = self.ranks.rank.size
        counts = [
            stop - start for start, stop in (Rank(each, size).part(self.num_ids) for each in range(size))
        ]
        logits = self.part(rows)
        if not len(rows):
            return logits.new_empty(0, self.num_ids)
        padded = functional.pad(logits, (0, max(counts) - logits.shape[1])).contiguous()
        parts = self.ranks.gather(padded)
        if not parts:
            return logits[:, :0]
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Holds one layer with attention.

    qkv, out: of attention; gates of queries, if there are any, follow the query of each head.
    head_norms: of queries and of keys, where the model has them, and of values.
    mlp: [T, C] of normed rows [T, C].
    later_norms: of what attention and MLP add, where the model has them.
    is_local: whether it has a sliding window.
    borrows: whether it attends keys and values of an earlier layer; its product has queries alone then.
    beside: what works beside the MLP. embedding: of the layer's own. scalar: that all rows are multiplied by.
    """

    attention_norm: RmsNorm
    qkv: Linear
    head_norms: tuple[RmsNorm, ...]
    out: Linear
    mlp_norm: RmsNorm
    mlp: Callable[[Tensor], Tensor]
    later_norms: tuple[RmsNorm, RmsNorm] | None = None
    is_local: bool = False
    borrows: bool = False
    beside: ExpertsBeside | None = None
    embedding: LayerEmbedding | None = None
    scalar: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """Holds all layers, and the norm after the last. embeddings: of tokens for each layer, if any."""

    layers: tuple[DecoderLayer | DeltaLayer, ...]
    norm: RmsNorm
    embeddings: LayerEmbeddings | None = None


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Computes down(silu(gate(x)) * up(x)). gate_up: both matrices, one above the other."""

    gate_up: Linear
    down: Linear
    activate: Callable[[Tensor], Tensor] = silu_mul

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(rows)))


# Engines of one model share its merged and its packed matrices.
_heads: WeakKeyDictionary[nn.Module, Linear] = WeakKeyDictionary()
_made: WeakKeyDictionary[nn.Module, DecoderLayers] = WeakKeyDictionary()


def layers_of(decoder: Any, ranks: Collectives | None = None) -> DecoderLayers:
    """Returns the layers of a decoder of transformers that `text_model` knows.

    Its modules keep their parameters, as views of the merged ones.
    ranks: of which one has this decoder; always the same for one decoder.
    """
    made = _made.get(decoder)
    if made is None:
        made = _made[decoder] = _layers(decoder, ranks)
    return made


def head_of(model: Any, ranks: Collectives | None = None) -> Linear:
    """Returns what makes logits [R, V] of the last layer's rows [R, C], for all engines of the model."""
    head: Any = model.get_output_embeddings()
    made = _heads.get(head)
    if made is None:
        made = linear_of(head)
        cap = getattr(model.get_decoder().config, "final_logit_softcapping", None)
        made = made if cap is None else CappedHead(made, cap)
        made = _heads[head] = made if ranks is None else GatheredHead(made, head.out_features, ranks)
    return made


def linear_of(module: Any) -> Linear:
    """Returns the product with the matrix of one module, which all ranks have whole."""
    return _linear(module, _kind([module]))


def embedding_of(model: Any, ranks: Collectives | None = None) -> Callable[[Tensor], Tensor]:
    """Returns what makes rows [T, C] of token ids, int64 [T]."""
    return _embedding(model.get_input_embeddings(), ranks)


def _embedding(module: Any, ranks: Collectives | None) -> Callable[[Tensor], Tensor]:
    if ranks is None:
        made: Callable[[Tensor], Tensor] = module
        return made
    scale = getattr(module, "embed_scale", None)
    return SplitEmbedding(module.weight, module.num_embeddings, ranks, scale)


def _layers(decoder: Any, ranks: Collectives | None) -> DecoderLayers:
    kind = _kind(decoder.layers.modules())
    layers = tuple(_layer(layer, decoder.config, kind, ranks) for layer in decoder.layers)
    has_embeddings = hasattr(decoder, "embed_tokens_per_layer")
    embeddings = _layer_embeddings(decoder, kind, ranks) if has_embeddings else None
    return DecoderLayers(layers, _norm(decoder.norm, decoder.config), embeddings)


def _layer_embeddings(decoder: Any, kind: LinearKind, ranks: Collectives | None) -> LayerEmbeddings:
    return LayerEmbeddings(
        _embedding(decoder.embed_tokens_per_layer, ranks),
        _linear(decoder.per_layer_model_projection, kind),
        _norm(decoder.per_layer_projection_norm, decoder.config),
        (decoder.per_layer_model_projection_scale, decoder.per_layer_input_scale),
    )


def _norm(module: Any, config: Any) -> RmsNorm:
    is_centred = config.model_type in (RECURRENT | WINDOWED) - MIXED_HEADS
    return RmsNorm.of(module.weight, config.rms_norm_eps, is_centred=is_centred)


def _layer(layer: Any, config: Any, kind: LinearKind, ranks: Collectives | None) -> DecoderLayer | DeltaLayer:
    if hasattr(layer, "linear_attn"):
        return _delta_layer(layer, config, kind, ranks)
    attention = layer.self_attn
    before_mlp, later_norms = _later_norms(layer, config)
    return DecoderLayer(
        attention_norm=_norm(layer.input_layernorm, config),
        qkv=_merged(attention, projections_of(attention), kind),
        head_norms=_head_norms(attention, config),
        out=_summed(attention.o_proj, kind, ranks),
        mlp_norm=before_mlp,
        mlp=_mlp(layer.mlp, kind, ranks, gelu_mul if config.model_type in WINDOWED else silu_mul),
        later_norms=later_norms,
        is_local=bool(getattr(attention, "is_sliding", False)),
        borrows=getattr(attention, "is_kv_shared_layer", False),
        beside=_beside(layer, config, ranks) if hasattr(layer, "router") else None,
        embedding=_layer_embedding(layer, config, kind) if hasattr(layer, "per_layer_input_gate") else None,
        scalar=float(getattr(layer, "layer_scalar", 1.0)),
    )


def _later_norms(layer: Any, config: Any) -> tuple[RmsNorm, tuple[RmsNorm, RmsNorm] | None]:
    """Returns the norm before the MLP, and those of what attention and MLP add, if the layer has them."""
    names: tuple[str, ...] = ("post_attention_layernorm",)
    if hasattr(layer, "pre_feedforward_layernorm"):
        names = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    elif hasattr(layer, "post_mlp_layernorm"):
        names = ("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    before, *behind = (_norm(getattr(layer, name), config) for name in names)
    return before, (behind[0], behind[1]) if behind else None


def projections_of(attention: Any) -> tuple[str, ...]:
    """Names what makes queries, keys and values; where these are the keys before their norm, keys twice."""
    if getattr(attention, "is_kv_shared_layer", False):
        return ("q_proj",)
    return ("q_proj", "k_proj", "k_proj") if attention.v_proj is None else QKV


def _head_norms(attention: Any, config: Any) -> tuple[RmsNorm, ...]:
    norms = [
        _norm(getattr(attention, name), config) for name in ("q_norm", "k_norm") if hasattr(attention, name)
    ]
    if hasattr(attention, "v_norm"):
        weight = attention.q_norm.weight
        norms.append(unit_norm(len(weight), config.rms_norm_eps, weight))
    return tuple(norms)


def _beside(layer: Any, config: Any, ranks: Collectives | None) -> ExpertsBeside:
    names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    of_mlp, before, behind = (_norm(getattr(layer, name), config) for name in names)
    return ExpertsBeside(layer.router, Experts.of(layer.experts, gelu_mul), (of_mlp, before, behind), ranks)


def _layer_embedding(layer: Any, config: Any, kind: LinearKind) -> LayerEmbedding:
    gate, projection = (
        _linear(each, kind) for each in (layer.per_layer_input_gate, layer.per_layer_projection)
    )
    return LayerEmbedding(gate, projection, _norm(layer.post_per_layer_input_norm, config))


def _delta_layer(layer: Any, config: Any, kind: LinearKind, ranks: Collectives | None) -> DeltaLayer:
    delta = layer.linear_attn
    return DeltaLayer(
        attention_norm=_norm(layer.input_layernorm, config),
        mixer=GatedDelta.of(delta, config, _merged(delta, DELTA, kind)),
        out=_summed(delta.out_proj, kind, ranks),
        mlp_norm=_norm(layer.post_attention_layernorm, config),
        mlp=_mlp(layer.mlp, kind, ranks),
    )


def _mlp(
    mlp: Any,
    kind: LinearKind,
    ranks: Collectives | None,
    activate: Callable[[Tensor], Tensor] = silu_mul,
) -> Callable[[Tensor], Tensor]:
    if hasattr(mlp, "experts"):
        return _sparse_mlp(mlp, kind, ranks)
    is_one = hasattr(mlp, "gate_up_proj")
    gate_up = _linear(mlp.gate_up_proj, kind) if is_one else _merged(mlp, GATE_UP, kind)
    return GatedMlp(gate_up, _summed(mlp.down_proj, kind, ranks), activate)


def _sparse_mlp(mlp: Any, kind: LinearKind, ranks: Collectives | None) -> SparseMlp:
    """The shared expert is a rank's part too, and added up with the others."""
    shared = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    gate = getattr(mlp, "shared_expert_gate", None)
    return SparseMlp(
        mlp.gate,
        Experts.of(mlp.experts),
        None if shared is None else _mlp(shared, kind, None),
        None if gate is None else _linear(gate, kind),
        ranks,
    )


def _kind(modules: Iterable[nn.Module]) -> LinearKind:
    """Returns how the matrices of linear modules are multiplied that are not quantised."""
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    return linear_kind(weights[0], sum(weight.nbytes for weight in weights)) if weights else "plain"


def _summed(module: Any, kind: LinearKind, ranks: Collectives | None) -> Linear:
    """Returns the product with a matrix whose columns the ranks share."""
    if ranks is None:
        return _linear(module, kind)
    if isinstance(module, QuantizedLinear):
        product = product_of([module])
        return SummedLinear(replace(product, bias=None), product.bias, ranks)
    return SummedLinear(linear(module.weight, None, kind_for(module.weight, kind)), module.bias, ranks)


def _merged(module: Any, names: tuple[str, ...], kind: LinearKind) -> Linear:
    parts = [getattr(module, name) for name in names]
    if can_merge(parts):
        return product_of(parts)
    if any(isinstance(part, QuantizedLinear) for part in parts):
        return JoinedLinear(tuple(_linear(part, kind) for part in parts))
    weight, bias = merged(parts, "weight"), merged(parts, "bias")
    assert weight is not None
    return linear(weight, bias, kind_for(weight, kind))


def _linear(module: Any, kind: LinearKind) -> Linear:
    if isinstance(module, QuantizedLinear):
        return product_of([module])
    return linear(module.weight, module.bias, kind_for(module.weight, kind))
