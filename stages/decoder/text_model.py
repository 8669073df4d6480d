"""Recognises the text models that our decoder computes, and describes what distinguishes them.

Qwen2, Qwen2.5, Qwen3, with experts too, Molmo 2, Llama and Mistral share one stack: RMS norm, attention with
rotary positions, RMS norm, gated SiLU. What differs are biases, norms of queries and keys, and how M-RoPE
deals frequencies to its three rows. Qwen3.5 has gated delta layers in place of most attention, gates of
queries, heads that are rotated in part, and norms whose weights are centred on 1. Gemma 3 has such norms
too, behind attention and MLP as well as before them, a gated GELU, and layers with sliding windows, whose
rotary positions have a base of their own. Of Gemma 4, these have heads of their own too: see `gemma4.py`.
GLM-4.xV have norms behind attention and MLP, gate and up in one matrix, and heads that are rotated in part,
most of them channel by channel: neighbours make a pair, not halves. GLM-4.5V is like Qwen2.5 with experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epd.encoders.device import to_device
from epd.stages.attention.support import MIXED_HEADS, RECURRENT, WINDOWED

# How the frequencies of a head are dealt to rows of positions: all to one; the first ones to time, the next
# to height, the rest to width; or by turns, and what is left to time.
Dealing = Literal["plain", "in_sections", "by_turns"]
# Text models by their `model_type` in transformers.
_KNOWN: dict[str, Dealing] = {
    "llama": "plain",
    "mistral": "plain",
    "gemma3_text": "plain",
    "gemma4_text": "plain",
    "molmo2_text": "plain",
    "glm4v_moe_text": "in_sections",
    "glm4v_text": "in_sections",
    "glm_ocr_text": "in_sections",
    "qwen2": "plain",
    "qwen3": "plain",
    "qwen3_moe": "plain",
    "qwen2_5_vl_text": "in_sections",
    "qwen2_vl_text": "in_sections",
    "qwen3_vl_text": "by_turns",
    "qwen3_vl_moe_text": "by_turns",
    "qwen3_5_text": "by_turns",
    "qwen3_5_moe_text": "by_turns",
}
# Those of them that rotate a part of a head, or neighbouring channels.
_GLM = frozenset({"glm4v_moe_text", "glm4v_text", "glm_ocr_text"})
_BY_NEIGHBOURS = _GLM - {"glm4v_moe_text"}
# Kinds of rotary positions whose frequencies are the same for every length; of "dynamic" ones, up to the
# original context, and longer prompts are refused.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "dynamic"})
_STATIC_BY_KIND = _STATIC_ROPE - {"dynamic"} | {"proportional"}
_MODULES = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})
# Of Molmo 2, for layers whose positions are not scaled: none of those that are known.
_UNSCALED = frozenset({"rotary_emb_unscaled"})
_LAYER_MODULES = frozenset({"mlp", "input_layernorm", "post_attention_layernorm"})
_MORE_NORMS = frozenset({"pre_feedforward_layernorm", "post_feedforward_layernorm"})
_NORMS_BEHIND = frozenset({"post_self_attn_layernorm", "post_mlp_layernorm"})
# Of Gemma 4: embeddings of each layer, in the decoder and in a layer, and experts beside the MLP.
_EMBEDDINGS = frozenset({"embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"})
_EMBEDDING = frozenset(
    {"act_fn", "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"}
)
_BESIDE = frozenset(
    {
        "router",
        "experts",
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    }
)
_DELTA = frozenset({"conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_SPARSE = {"gate", "experts"}
_MLPS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    _SPARSE,
    _SPARSE | {"shared_experts"},
    _SPARSE | {"shared_expert", "shared_expert_gate"},
)


@dataclass(frozen=True, slots=True)
class TextModel:
    """Describes a text model that our decoder computes.

    inv_freq: float32 [R / 2], of the rotary positions; R of a head's channels are rotated, most often all.
    rope_scale: that cosines and sines are multiplied by.
    row_of_frequency: int64 [R / 2], the row of positions that a frequency turns by; None with one row.
    by_neighbours: whether channels 2 i and 2 i + 1 are rotated together; else i and i + R / 2.
    has_gates: whether what is attended is multiplied by gates that come with the queries.
    local: the same model in layers with sliding windows, if these have rotary positions of their own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    inv_freq: Tensor
    rope_scale: float
    row_of_frequency: Tensor | None
    by_neighbours: bool = False
    has_gates: bool = False
    local: TextModel | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Returns heads of queries, heads of keys, and the channels of each."""
        return self.num_heads, self.num_kv_heads, self.head_dim


def text_model(decoder: Any) -> TextModel | None:
    """Describes a decoder of transformers; None if our decoder might compute something else."""
    config = decoder.config
    dealing = _KNOWN.get(config.model_type)
    if dealing is None or not _is_plain(config) or not _has_known_modules(decoder):
        return None
    attention = next(layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
    if config.model_type in WINDOWED:
        return _with_local(config, decoder)
    rotary, is_recurrent = decoder.rotary_emb, config.model_type in RECURRENT
    is_whole = len(rotary.inv_freq) == attention.head_dim // 2
    if attention.head_dim % 2 or not (is_whole or is_recurrent or config.model_type in _GLM):
        return None
    sections = list(rotary.mrope_section) if dealing != "plain" else []
    rows = rows_of_frequencies(dealing, sections, len(rotary.inv_freq))
    return TextModel(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        inv_freq=rotary.inv_freq,
        rope_scale=rotary.attention_scaling,
        row_of_frequency=None if rows is None else to_device(rows, rotary.inv_freq.device),
        by_neighbours=config.model_type in _BY_NEIGHBOURS,
        has_gates=is_recurrent,
    )


def _with_local(config: Any, decoder: Any) -> TextModel | None:
    """Describes a model whose kinds of layers have rotary positions, and maybe heads, of their own."""
    rotary = decoder.rotary_emb
    kinds = {config.layer_types[layer.self_attn.layer_idx]: layer.self_attn for layer in decoder.layers}
    if any(attention.head_dim % 2 for attention in kinds.values()):
        return None
    local, whole = (
        TextModel(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_attention_heads // kinds[kind].num_key_value_groups,
            head_dim=kinds[kind].head_dim,
            scale=kinds[kind].scaling,
            inv_freq=getattr(rotary, f"{kind}_inv_freq"),
            rope_scale=getattr(rotary, f"{kind}_attention_scaling"),
            row_of_frequency=None,
        )
        for kind in ("sliding_attention", "full_attention")
    )
    return replace(whole, local=local)


def rows_of_frequencies(dealing: Dealing, sections: list[int], num_frequencies: int) -> Tensor | None:
    """Returns the row of positions, 0 to 2, that each frequency turns by: int64 [num_frequencies].

    sections: how many frequencies time, height and width have.
    """
    if dealing == "plain":
        return None
    if dealing == "in_sections":
        rows = [index % 3 for index, count in enumerate(sections) for _ in range(count)]
        return torch.tensor(rows[:num_frequencies], dtype=torch.int64, device="cpu")
    rows = [0] * num_frequencies
    for row in (1, 2):
        for frequency in range(row, min(3 * sections[row], num_frequencies), 3):
            rows[frequency] = row
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _is_plain(config: Any) -> bool:
    if config.model_type in WINDOWED:
        kinds = set(config.layer_types)
        ropes = {rope["rope_type"] for rope in config.rope_parameters.values()}
        is_known = kinds == {"sliding_attention", "full_attention"} and ropes <= _STATIC_BY_KIND
        return is_known and config.hidden_activation == "gelu_pytorch_tanh"
    if config.model_type == "molmo2_text" and not _is_as_qwen3(config):
        return False
    rope = config.rope_parameters or {}
    kind, context = rope.get("rope_type", "default"), config.max_position_embeddings
    if kind == "dynamic" and rope.get("original_max_position_embeddings", context) != context:
        return False
    return config.hidden_act in ("silu", "swish") and kind in _STATIC_ROPE


def _is_as_qwen3(config: Any) -> bool:
    """Reports whether Molmo 2 has Qwen3's layers: norms by head and before, the same positions in all."""
    scaled = set(config.rope_scaling_layers)
    is_one = config.rope_parameters["rope_type"] == "default" or len(scaled) == config.num_hidden_layers
    return config.qk_norm_type == "qwen3" and not config.norm_after and is_one


def _has_known_modules(decoder: Any) -> bool:
    """Reports whether the decoder consists of what we compute, and of nothing else."""
    if _children(decoder) not in (_MODULES, _MODULES | _EMBEDDINGS, _MODULES | _UNSCALED):
        return False
    layers: Any = decoder.layers
    has_attention = any(hasattr(layer, "self_attn") for layer in layers)
    is_mixed = decoder.config.model_type in MIXED_HEADS
    return has_attention and all(
        _has_known_mixer(layer, is_mixed=is_mixed)
        and _children(layer.mlp) - {"act_fn", "activation_fn"} in _MLPS
        for layer in layers
    )


def _has_known_mixer(layer: Any, *, is_mixed: bool) -> bool:
    if _children(layer) == _LAYER_MODULES | {"linear_attn"}:
        return _children(layer.linear_attn) == _DELTA
    if is_mixed:
        norms = _LAYER_MODULES | _MORE_NORMS | {"self_attn"}
        return _children(layer) - _EMBEDDING - _BESIDE == norms
    known = (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS)
    modules = _children(layer) - {"self_attn"}
    with_norms = (_LAYER_MODULES, _LAYER_MODULES | _MORE_NORMS, _LAYER_MODULES | _NORMS_BEHIND)
    return modules in with_norms and _children(layer.self_attn) in known


def _children(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_children())
