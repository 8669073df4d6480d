"""Runs the Qwen towers with fewer and larger operations than transformers; what they compute is the same.

    patch embedding    a convolution whose stride is its kernel is one matrix product over flat patches
    attention          runs of patches that attend each other, batched by length; where lengths differ, on a
                       GPU in 16 bits, in one call of torch's kernel for runs of any length:

    runs    | 64 patches | 64 patches | 32 | 64 patches | 64 patches | 32 |
    calls   one for the four of 64, one for the two of 32

    rotation           queries and keys in place; on a CPU some patches at a time: in 32 bits all of them
                       would be the most that a layer holds
    gated product      in place too, where a layer has one
    places, cells      of GLM: its table is read for one frame of a batch, whose frames have one size; the
                       convolution that joins the patches of a token is a product, too

On a GPU a layer with a gated product has its norms, rotation and gate computed by one kernel each, and gate
and up are one matrix. Its width, 3420 for Qwen2.5-VL, is padded with zeros to whole tiles of a GPU: products
of rows that do not begin at a multiple of 16 bytes are several times as slow.

P patches, H heads, D channels of a head.

What a tower takes of the grids in a batch, transformers computes anew in each call, and reads it back from
the device in every layer. Here it is computed on the host, moved in one copy, and kept for the batches seen
last. Run lengths stay on the host: the towers cut their queries and keys by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import grid_sample, linear, pad, scaled_dot_product_attention, silu

from epd.encoders import kernels
from epd.encoders.checkpoint import published
from epd.encoders.device import arrays_to_device, to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.encoders.plans import Grid

_MAX_GRIDS = 32
_MAX_KEPT = 64
# Patches that are rotated together: few enough for a CPU's caches.
_ROTATED_TOGETHER = 512
_HALF_TYPES = (torch.float16, torch.bfloat16)
_WIDTH_TILE = 128  # channels between norms of a gated layer on a GPU are a multiple


@dataclass(frozen=True, slots=True)
class WindowGeometry:
    """Describes a tower with windows. merge: patches of a token's edge. window, patch: edges, pixels."""

    merge: int
    window: int
    patch: int


@dataclass(frozen=True, slots=True)
class TableGeometry:
    """Describes a tower with a learned table of places. merge: as above. side: places along its edge."""

    merge: int
    side: int


@lru_cache(_MAX_GRIDS)
@torch.inference_mode(mode=False)
def framed_inputs(grids: tuple[Grid, ...], merge: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the arguments of a tower without windows or tables of its own. device: the tower's.

    Each frame has a grid of its own, as GLM's reads its table.
    """
    moved = _moved({"position_ids": _position_ids(grids, merge)}, device)
    frames = tuple(grid.cut(1) for grid in grids for _ in range(grid.t))
    return {"grid_thw": _tensor(frames), "cu_seqlens": _frame_ends(grids), **moved}


@lru_cache(_MAX_GRIDS)
@torch.inference_mode(mode=False)
def windowed_inputs(
    grids: tuple[Grid, ...], geometry: WindowGeometry, device: torch.device
) -> dict[str, Tensor]:
    """Returns the arguments of Qwen2.5-VL's tower besides the patches. device: the tower's."""
    grid_thw = _tensor(grids)
    index, run_ends = published().get_vision_window_index(
        grid_thw, geometry.merge, geometry.window, geometry.patch
    )
    moved = {"position_ids": _position_ids(grids, geometry.merge)}
    return {
        "grid_thw": grid_thw,
        "cu_seqlens": _frame_ends(grids),
        "cu_window_seqlens": run_ends,
        **_moved({**moved, "window_index": index}, device),
    }


@lru_cache(_MAX_GRIDS)
@torch.inference_mode(mode=False)
def tabled_inputs(
    grids: tuple[Grid, ...], geometry: TableGeometry, device: torch.device
) -> dict[str, Tensor]:
    """Returns the arguments of Qwen3-VL's tower besides the patches. device: the tower's."""
    tabled = [_table_weights(grid, geometry) for grid in grids]
    moved = {
        "position_ids": _position_ids(grids, geometry.merge),
        "interp_indices": torch.cat([indices for indices, _ in tabled]),
        "interp_weights": torch.cat([weights for _, weights in tabled]),
    }
    return {"grid_thw": _tensor(grids), "cu_seqlens": _frame_ends(grids), **_moved(moved, device)}


def _tensor(grids: tuple[Grid, ...]) -> Tensor:
    """Returns int64 [grids, 3]: time, height, width."""
    return torch.tensor([[grid.t, grid.h, grid.w] for grid in grids])


def _frame_ends(grids: tuple[Grid, ...]) -> Tensor:
    """Returns where frames end among the patches, after a 0: int32 [frames + 1]."""
    sizes = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def _position_ids(grids: tuple[Grid, ...], merge: int) -> Tensor:
    """Returns row and column of each patch: int64 [P, 2]."""
    return torch.cat([torch.stack(_places(grid, merge), -1).repeat(grid.t, 1) for grid in grids])


def _places(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Returns rows and columns of a frame's patches, those of a visual token together: int64 [h * w] each."""
    raster = torch.arange(grid.h * grid.w).view(grid.h // merge, merge, grid.w // merge, merge)
    ordered = raster.transpose(1, 2).flatten()
    return ordered // grid.w, ordered % grid.w


def _table_weights(grid: Grid, geometry: TableGeometry) -> tuple[Tensor, Tensor]:
    """Returns the four places in the table around each patch, and their weights: [P, 4] each.

    The table's corners are those of the frame; between its places it is bilinear.
    """
    rows, columns = _places(grid, geometry.merge)
    row_places, row_weights = _around(rows, grid.h, geometry.side)
    places, weights = _around(columns, grid.w, geometry.side)
    indices = (row_places[:, :, None] * geometry.side + places[:, None, :]).flatten(1)
    return indices.repeat(grid.t, 1), (row_weights[:, :, None] * weights[:, None, :]).flatten(1).repeat(
        grid.t, 1
    )


def _around(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns the two places on either side of each index, int64 [N, 2], and their weights, float32 [N, 2].

    index: int64 [N], below `size`. side: places in the table's edge.
    """
    at = index.float() * (side - 1) / max(size - 1, 1)
    before = at.floor()
    places = (before.long()[:, None] + torch.arange(2)).clamp(max=side - 1)
    near = 1 - (at - before)[:, None]
    return places, torch.cat([near, 1 - near], dim=1)


def _moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    moved = arrays_to_device([tensor.numpy() for tensor in tensors.values()], device)
    return dict(zip(tensors, moved, strict=True))


def prepare_tower(tower: nn.Module) -> nn.Module:
    """Lets a tower embed patches and attend as described above, and returns it. Twice is as once."""
    parts: Any = tower
    parts.patch_embed.forward = MethodType(_embed_patches, parts.patch_embed)
    if hasattr(parts, "embeddings"):
        parts.embeddings.forward = MethodType(_add_places, parts.embeddings)
    if hasattr(parts, "downsample"):
        parts.downsample.forward = MethodType(_join_cells, parts.downsample)
    for block in parts.blocks:
        block.attn.forward = MethodType(_attend, block.attn)
        if hasattr(block.mlp, "gate_proj") and parts.config.hidden_act == "silu":
            block.mlp.forward = MethodType(_gate, block.mlp)
            if hasattr(block.norm1, "variance_epsilon"):  # an RMS norm
                block.forward = MethodType(_run_gated_block, block)
    return tower


def _run_gated_block(module: Any, hidden_states: Tensor, **inputs: Any) -> Tensor:
    """Runs a layer whose norms are RMS norms. hidden_states: [P, C], overwritten on a GPU."""
    if torch.is_grad_enabled() or not uses_kernels(hidden_states):
        found: Tensor = type(module).forward(module, hidden_states, **inputs)
        return found
    attended = module.attn(_normed(module.norm1, hidden_states, None), **inputs)
    gated = module.mlp(_normed(module.norm2, hidden_states, attended))
    return hidden_states.add_(gated)


def _normed(norm: Any, residual: Tensor, added: Tensor | None) -> Tensor:
    """Adds to the residual [P, C] in place on a GPU, and returns its norm."""
    normed: Tensor = kernels.add_rms_norm_fused(residual, added, norm.weight, norm.variance_epsilon)
    return normed


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """Embeds flat patches [P, channels of a patch]: [P, C]."""
    weight = module.proj.weight
    return linear(patches.to(weight.dtype), weight.flatten(1), module.proj.bias)


def _add_places(
    module: Any, patches: Tensor, lengths: Tensor, grids: Tensor, rows: Tensor, columns: Tensor
) -> Tensor:
    """Adds to patches [P, C] what the table has at their places, computed once for frames of one size.

    lengths: patches of each frame. grids: int64 [frames, 3], on the host.
    rows, columns: int64 [P], of each patch in its frame.
    """
    sizes = {(height, width) for _, height, width in grids.tolist()}
    if len(sizes) > 1:
        found: Tensor = type(module).forward(module, patches, lengths, grids, rows, columns)
        return found
    ((height, width),) = sizes
    table = module.position_embedding.weight
    side, count = round(len(table) ** 0.5), height * width
    at = torch.stack(((columns[:count] + 0.5) / width, (rows[:count] + 0.5) / height), dim=-1) * 2 - 1
    square = table.float().t().reshape(1, -1, side, side)
    sampled = grid_sample(square, at[None, :, None], "bicubic", "border", align_corners=False)
    places = sampled[0, :, :, 0].t().to(table.dtype)
    return (patches.view(-1, count, patches.shape[1]) + places).flatten(0, 1)


def _join_cells(module: Any, cells: Tensor) -> Tensor:
    """Joins the patches of visual tokens [V, C, merge, merge] to [V, channels of the language model]."""
    return linear(cells.flatten(1), module.weight.flatten(1), module.bias)


def _attend(
    module: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor | StaticRuns,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Attends within runs of patches. hidden_states: [P, C]. cu_seqlens: int32 [runs + 1], on the host, or
    of a captured call.
    """
    num_patches = len(hidden_states)
    qkv = module.qkv(hidden_states).view(num_patches, 3, module.num_heads, -1)
    if hasattr(module, "q_norm"):
        qkv = torch.stack((module.q_norm(qkv[:, 0]), module.k_norm(qkv[:, 1]), qkv[:, 2]), dim=1)
    if torch.is_grad_enabled():
        cos, sin = (each[:, None, None].float() for each in position_embeddings)
        pairs = qkv[:, :2].float()
        query, key = (pairs * cos + _half_turned(pairs) * sin).to(qkv.dtype).unbind(1)
        value = qkv[:, 2]
    else:
        rotate(qkv[:, :2], *position_embeddings)
        query, key, value = qkv.unbind(1)
    if isinstance(cu_seqlens, StaticRuns):
        out = cu_seqlens.attend(query, key, value, module.scaling)
    else:
        out = attend_runs(query, key, value, tuple(cu_seqlens.tolist()), module.scaling)
    attended: Tensor = module.proj(out.flatten(1))
    return attended


def rotate(pairs: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys [P, 2, H, D] in place, as `apply_rotary_pos_emb_vision` does with copies.

    cos, sin: [P, D].
    """
    if uses_kernels(pairs):
        kernels.rotate_pairs_fused(pairs, cos, sin)
        return
    parts = (torch.split(each, _ROTATED_TOGETHER) for each in (pairs, cos, sin))
    for part, part_cos, part_sin in zip(*parts, strict=True):
        values = part.float()
        turned = _half_turned(values).mul_(part_sin[:, None, None].float())
        part.copy_(values.mul_(part_cos[:, None, None].float()).add_(turned))


def _half_turned(values: Tensor) -> Tensor:
    """Turns each channel of the first half of [..., D] by a quarter, with its partner in the second."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _gate(module: Any, hidden_state: Tensor) -> Tensor:
    """Computes a gated feed-forward layer with one intermediate less. hidden_state: [P, C]."""
    if torch.is_grad_enabled():
        found: Tensor = type(module).forward(module, hidden_state)
        return found
    if uses_kernels(hidden_state) and type(module.gate_proj) is nn.Linear:
        return _gate_in_tiles(module, hidden_state)
    gate = silu(module.gate_proj(hidden_state), inplace=True)
    down: Tensor = module.down_proj(gate.mul_(module.up_proj(hidden_state)))
    return down


def _gate_in_tiles(module: Any, hidden_state: Tensor) -> Tensor:
    """Computes a gated feed-forward layer on a GPU, gate and up as one product. hidden_state: [P, C]."""
    if not hasattr(module, "tiled"):
        module.tiled = TiledGate.of(module)
    tiled: TiledGate = module.tiled
    gate_up = linear(hidden_state, tiled.gate_up, tiled.gate_up_bias)
    return linear(kernels.silu_mul_fused(gate_up), tiled.down, module.down_proj.bias)


class TiledGate(NamedTuple):
    """Holds the matrices of a gated layer whose I channels are padded with zeros to I', a multiple of a tile.

    gate_up: [2 I', C]. gate_up_bias: [2 I'], or None. down: [C, I'].
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor

    @classmethod
    def of(cls, module: Any) -> Self:
        """Moves a module's weights there; its own become views of them."""
        parts, down = (module.gate_proj, module.up_proj), module.down_proj
        size = down.in_features
        more = -size % _WIDTH_TILE
        gate_up = torch.cat([pad(part.weight, (0, 0, 0, more)) for part in parts])
        biases = None
        if parts[0].bias is not None:
            biases = torch.cat([pad(part.bias, (0, more)) for part in parts])
        tiled = cls(gate_up, biases, pad(down.weight, (0, more)))
        for index, part in enumerate(parts):
            part.weight.data = gate_up.narrow(0, index * (size + more), size)
        down.weight.data = tiled.down.narrow(1, 0, size)
        return tiled


class StaticRuns(NamedTuple):
    """Holds runs of patches where a captured call reads them.

    bounds: int32 [runs + 1], on the device; runs at the end may be empty. longest: patches of a run at most.
    """

    bounds: Tensor
    longest: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attends query, key and value [P, H, D] within the runs: [P, H, D]."""
        if not query.is_cuda:
            return attend_runs(query, key, value, tuple(self.bounds.tolist()), scale)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # of empty runs it reads and writes nothing
            return _attend_varlen(query, key, value, self.bounds, self.longest, scale)


def attend_runs(query: Tensor, key: Tensor, value: Tensor, ends: tuple[int, ...], scale: float) -> Tensor:
    """Attends query, key and value [P, H, D] within runs [ends[i], ends[i + 1]): [P, H, D]."""
    by_length = runs_by_length(ends, query.device)
    if len(by_length) == 1:
        return attend_alike(query, key, value, by_length[0][0], scale)
    if uses_kernels(query) and query.dtype in _HALF_TYPES:
        return _attend_varlen(query, key, value, static_bounds(ends, query.device), by_length[-1][0], scale)
    out = torch.empty_like(query)
    for length, rows in by_length:
        q, k, v = (each.index_select(0, rows) for each in (query, key, value))
        out.index_copy_(0, rows, attend_alike(q, k, v, length, scale))
    return out


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
) -> Tensor:
    # Imports torch's compiler, which a CPU needs not.
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    attended = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)
    assert isinstance(attended, Tensor)  # nothing else was asked for
    return attended


def attend_alike(query: Tensor, key: Tensor, value: Tensor, length: int, scale: float) -> Tensor:
    """Attends within runs of one length, one after the other: [P, H, D]."""
    q, k, v = (each.view(-1, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


@lru_cache(_MAX_KEPT)
@torch.inference_mode(mode=False)
def static_bounds(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the ends of runs on the device, int32."""
    return to_device(torch.tensor(ends, dtype=torch.int32), device)


@lru_cache(_MAX_KEPT)
@torch.inference_mode(mode=False)
def runs_by_length(ends: tuple[int, ...], device: torch.device) -> tuple[tuple[int, Tensor], ...]:
    """Returns the lengths of runs, ascending, each with the patches of all runs of it: int64, run by run."""
    bounds = np.array(ends, np.int64)
    lengths = np.diff(bounds)
    return tuple(
        (length, to_device(torch.from_numpy(_rows(bounds[:-1][lengths == length], length)), device))
        for length in sorted(set(lengths[lengths > 0].tolist()))
    )


def _rows(starts: np.ndarray[Any, np.dtype[np.int64]], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (starts[:, None] + np.arange(length)).ravel()
