"""Runs the Qwen towers with fewer and larger operations than transformers; what they compute is the same.

    patch embedding    a convolution whose stride is its kernel is one matrix product over flat patches
    attention          runs of patches that attend each other, batched by length:

    runs    | 64 patches | 64 patches | 32 | 64 patches | 64 patches | 32 |
    calls   one for the four of 64, one for the two of 32

    rotation           queries and keys in place, some patches at a time: in 32 bits all of them would be the
                       most that a layer holds
    gated product      in place too, where a layer has one

P patches, H heads, D channels of a head.
"""

from __future__ import annotations

from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision, rotate_half

from encoders.device import to_device

_MAX_KEPT = 64
# Patches that are rotated together: few enough for a CPU's caches, and enough to keep a GPU busy.
_ROTATED_ON_CPU, _ROTATED_ON_GPU = 512, 16_384


def prepare_tower(tower: nn.Module) -> nn.Module:
    """Lets a tower embed patches and attend as described above, and returns it. Twice is as once."""
    parts: Any = tower
    parts.patch_embed.forward = MethodType(_embed_patches, parts.patch_embed)
    for block in parts.blocks:
        block.attn.forward = MethodType(_attend, block.attn)
        if hasattr(block.mlp, "gate_proj") and parts.config.hidden_act == "silu":
            block.mlp.forward = MethodType(_gate, block.mlp)
    return tower


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """Embeds flat patches [P, channels of a patch]: [P, C]."""
    weight = module.proj.weight
    return linear(patches.to(weight.dtype), weight.flatten(1), module.proj.bias)


def _attend(
    module: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Attends within runs of patches. hidden_states: [P, C]. cu_seqlens: int32 [runs + 1], on the host."""
    num_patches = len(hidden_states)
    qkv = module.qkv(hidden_states).view(num_patches, 3, module.num_heads, -1)
    if torch.is_grad_enabled():
        query, key = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], *position_embeddings)
        value = qkv[:, 2]
    else:
        rotate(qkv[:, :2], *position_embeddings)
        query, key, value = qkv.unbind(1)
    out = attend_runs(query, key, value, tuple(cu_seqlens.tolist()), module.scaling)
    attended: Tensor = module.proj(out.flatten(1))
    return attended


def rotate(pairs: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys [P, 2, H, D] in place, as `apply_rotary_pos_emb_vision` does with copies.

    cos, sin: [P, D].
    """
    rows = _ROTATED_ON_GPU if pairs.is_cuda else _ROTATED_ON_CPU
    parts = (torch.split(each, rows) for each in (pairs, cos, sin))
    for part, part_cos, part_sin in zip(*parts, strict=True):
        values = part.float()
        turned = rotate_half(values).mul_(part_sin[:, None, None].float())
        part.copy_(values.mul_(part_cos[:, None, None].float()).add_(turned))


def _gate(module: Any, hidden_state: Tensor) -> Tensor:
    """Computes a gated feed-forward layer with one intermediate less. hidden_state: [P, C]."""
    if torch.is_grad_enabled():
        found: Tensor = type(module).forward(module, hidden_state)
        return found
    gate = silu(module.gate_proj(hidden_state), inplace=True)
    down: Tensor = module.down_proj(gate.mul_(module.up_proj(hidden_state)))
    return down


def attend_runs(query: Tensor, key: Tensor, value: Tensor, ends: tuple[int, ...], scale: float) -> Tensor:
    """Attends query, key and value [P, H, D] within runs [ends[i], ends[i + 1]): [P, H, D]."""
    by_length = runs_by_length(ends, query.device)
    if len(by_length) == 1:
        return _attend_alike(query, key, value, by_length[0][0], scale)
    out = torch.empty_like(query)
    for length, rows in by_length:
        q, k, v = (each.index_select(0, rows) for each in (query, key, value))
        out.index_copy_(0, rows, _attend_alike(q, k, v, length, scale))
    return out


def _attend_alike(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Attends within runs of one length, one after the other."""
    q, k, v = (each.view(-1, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


@lru_cache(_MAX_KEPT)
@torch.inference_mode(mode=False)
def runs_by_length(ends: tuple[int, ...], device: torch.device) -> tuple[tuple[int, Tensor], ...]:
    """Returns, for each length of a run, the patches of all runs of that length: int64, run by run."""
    bounds = np.array(ends, np.int64)
    lengths = np.diff(bounds)
    return tuple(
        (int(length), to_device(torch.from_numpy(_rows(bounds[:-1][lengths == length], length)), device))
        for length in np.unique(lengths[lengths > 0])
    )


def _rows(starts: np.ndarray[Any, np.dtype[np.int64]], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (starts[:, None] + np.arange(length)).ravel()
