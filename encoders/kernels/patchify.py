"""Converts frames to normalised patches in one pass on a GPU. Its twin is `patchify_plain`.

One program makes one patch. Value i of a patch is [channel, frame, y, x] flattened, and the patches of one
visual token follow each other:

    patch   ((t * token_rows + token_row) * token_columns + token_column) * merge^2 + row * merge + column
    byte    (((t * frames_per_unit + frame) * height + y) * width + x) * 3 + channel

Import this module only where Triton is: it is imported when the first frames arrive on a GPU.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.device import constants
from epd.types import ceil_div

_BLOCK = 1024


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
