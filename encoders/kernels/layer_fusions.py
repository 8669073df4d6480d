"""Computes patches and what lies between the matrix products of a layer on a GPU, by one kernel each.

    patchify        frames to normalised patches, one program for each patch
    add_rms_norm    one program for each row
    rotate_pairs    one program for some heads of a patch, in place
    silu_mul        one program for a piece of a row

Value i of a patch is [channel, frame, y, x] flattened, and the patches of one visual token follow each other:

    patch   ((t * token_rows + token_row) * token_columns + token_column) * merge^2 + row * merge + column
    byte    (((t * frames_per_unit + frame) * height + y) * width + x) * 3 + channel

Import this module only where Triton is. The twins in plain torch: `patchify_plain` in `encoders/patches.py`,
`stages/decoder/operations.py`, and `rotate` in `encoders/families/qwen_tower.py`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.device import constants
from epd.encoders.kernels.dispatch import check_contiguous
from epd.types import ceil_div

_BLOCK = 1024
_MOST_VALUES = 1024  # of a row of gates that a program computes
_HEADS = 8  # that a program rotates


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _patchify_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and compile-time numbers
    frames,
    mean,
    std,
    patches,
    num_frames,
    height,
    width,
    FRAMES: tl.constexpr,
    SIDE: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    inner = patch % (MERGE * MERGE)
    token = patch // (MERGE * MERGE)
    token_columns = width // (SIDE * MERGE)
    token_rows = height // (SIDE * MERGE)
    row = (token // token_columns) % token_rows * MERGE + inner // MERGE
    column = token % token_columns * MERGE + inner % MERGE
    unit = token // (token_columns * token_rows)
    size = 3 * FRAMES * SIDE * SIDE
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        x = index % SIDE
        y = index // SIDE % SIDE
        frame = index // (SIDE * SIDE) % FRAMES
        channel = index // (SIDE * SIDE * FRAMES)
        source = tl.minimum(unit * FRAMES + frame, num_frames - 1)  # the last frame fills the last unit
        pixel = (source * height + row * SIDE + y) * width + column * SIDE + x
        byte = tl.load(frames + pixel * 3 + channel, mask=inside, other=0).to(tl.float32)
        shifted = byte - tl.load(mean + channel, mask=inside, other=0.0)
        value = tl.div_rn(shifted, tl.load(std + channel, mask=inside, other=1.0))
        tl.store(patches + patch * size + index, value.to(patches.dtype.element_ty), mask=inside)


def patchify_fused(
    frames: Tensor,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    frames_per_unit: int,
    side: int,
    merge: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Converts frames uint8 [N, H, W, 3] to patches [P, 3 * frames_per_unit * side * side] of `dtype`.

    The patches are on the same device.

    mean, std: of the channels, on the 0..255 scale. side: pixels of a patch's edge. merge: patches of a
    visual token's edge. The arithmetic is float32, rounded as IEEE has it: equal to the twin bit by bit.
    """
    num_frames, height, width, _ = frames.shape
    num_units = ceil_div(num_frames, frames_per_unit)
    num_patches = num_units * (height // side) * (width // side)
    size = 3 * frames_per_unit * side * side
    patches = torch.empty(num_patches, size, dtype=dtype, device=frames.device)
    _patchify_kernel[(num_patches,)](
        frames.contiguous(),
        constants(mean, frames.device),
        constants(std, frames.device),
        patches,
        num_frames,
        height,
        width,
        FRAMES=frames_per_unit,
        SIDE=side,
        MERGE=merge,
        BLOCK=_BLOCK,
    )
    return patches


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    residual,
    added,
    weight,
    out,
    size,
    eps,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        values += tl.load(added + start + at, mask=inside, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + start + at, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm_fused(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds to `residual` [T, C] in place, and returns its RMS norm. All are contiguous."""
    check_contiguous(residual, residual if added is None else added, weight)
    out = torch.empty_like(residual)
    size = residual.shape[1]
    block = int(triton.next_power_of_2(size))
    if len(residual):
        _add_rms_norm_kernel[(len(residual),)](
            residual,
            residual if added is None else added,
            weight,
            out,
            size,
            eps,
            HAS_ADDED=added is not None,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _rotate_pairs_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    pairs,
    cos,
    sin,
    patch_stride,
    num_heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    is_value = at < HALF
    inside = (head < num_heads)[:, None] & is_value[None, :]
    place = pairs + patch * patch_stride + head[:, None] * (2 * HALF) + at[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = patch * 2 * HALF + at
    first_cos = tl.load(cos + turn, mask=is_value, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + turn, mask=is_value, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + turn + HALF, mask=is_value, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + turn + HALF, mask=is_value, other=0.0).to(tl.float32)[None, :]
    first = a * first_cos - b * first_sin
    second = b * second_cos + a * second_sin
    tl.store(place, first.to(pairs.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(pairs.dtype.element_ty), mask=inside)


def rotate_pairs_fused(pairs: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys [P, 2, H, D] in place; those of a patch are contiguous.

    cos, sin: [P, D], contiguous.
    """
    check_contiguous(pairs[0], cos, sin)
    num_patches, _, num_heads, dim = pairs.shape
    grid = (num_patches, int(triton.cdiv(2 * num_heads, _HEADS)))
    _rotate_pairs_kernel[grid](
        pairs,
        cos,
        sin,
        pairs.stride(0),
        2 * num_heads,
        HALF=dim // 2,
        HEADS=_HEADS,
        BLOCK=int(triton.next_power_of_2(dim // 2)),
        num_warps=1,  # of one warp no lane reads what another has written already
    )


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _silu_mul_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    gate_up,
    out,
    size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + token * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * size + at, product.to(out.dtype.element_ty), mask=inside)


def silu_mul_fused(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [T, I], of contiguous [T, 2 I]."""
    check_contiguous(gate_up)
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block = min(_MOST_VALUES, int(triton.next_power_of_2(size)))
    if num_tokens:
        _silu_mul_kernel[(num_tokens, int(triton.cdiv(size, block)))](gate_up, out, size, BLOCK=block)
    return out
