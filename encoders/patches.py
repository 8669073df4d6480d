"""Converts uint8 frames to the patches of the Qwen vision towers, in one pass over the bytes.

A patch is `frames_per_unit` x `side` x `side` pixels of three channels. Patches are ordered so that the
`merge` x `merge` neighbours that become one visual token follow each other:

    t, h // merge, w // merge, merge rows, merge columns       each [channel, frame, y, x] flattened
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from epd.encoders import kernels
from epd.encoders.device import constants
from epd.encoders.kernels.dispatch import uses_kernels
from epd.encoders.plans import Grid
from epd.errors import UnsupportedModelError
from epd.types import ceil_div

# Pillow's number of a resampling filter: torch's name. Those with a native uint8 kernel.
INTERPOLATION = {2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """Describes the geometry and normalisation of one processor, image or video.

    side: pixels of a patch's edge.
    merge: patches of a visual token's edge.
    mean, std: of the channels, on the 0..255 scale.
    """

    side: int
    merge: int
    frames_per_unit: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @property
    def factor(self) -> int:
        """Returns the number of pixels that frame height and width must be multiples of."""
        return self.side * self.merge

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """Returns the grid of `num_frames` frames of `height` x `width` pixels; a last unit may be short."""
        return Grid(ceil_div(num_frames, self.frames_per_unit), height // self.side, width // self.side)

    def tokens_per_unit(self, grid: Grid) -> int:
        """Counts the visual tokens of one unit, after merging."""
        return grid.h * grid.w // self.merge**2


def patch_spec(processor: Any) -> PatchSpec:
    """Reads a transformers image or video processor. Raises UnsupportedModelError for unsupported steps."""
    settings = {name: getattr(processor, name, None) for name in ("do_resize", "do_rescale", "do_normalize")}
    resample = int(getattr(processor, "resample", 3))
    if not all(settings.values()) or resample not in INTERPOLATION:
        raise UnsupportedModelError(
            f"a processor with {settings} and resample={resample} is not supported; "
            "it must resize (bilinear or bicubic), rescale and normalise"
        )
    scale = 1.0 / float(processor.rescale_factor)
    return PatchSpec(
        side=int(processor.patch_size),
        merge=int(processor.merge_size),
        frames_per_unit=int(processor.temporal_patch_size),
        mean=tuple((torch.tensor(processor.image_mean) * scale).tolist()),
        std=tuple((torch.tensor(processor.image_std) * scale).tolist()),
        resample=resample,
    )


def resize_image(image: Tensor, size: tuple[int, int], resample: int) -> Tensor:
    """Resizes uint8 [H, W, 3] to uint8 [1, h, w, 3]. resample: the processor's filter.

    The bytes stay channels last, as they came: the same numbers as channels first, three times as fast.
    """
    if image.shape[:2] == size:
        return image[None]
    mode = INTERPOLATION[resample]
    return interpolate(image[None].permute(0, 3, 1, 2), size, mode=mode, antialias=True).permute(0, 2, 3, 1)


def patchify(frames: Tensor, spec: PatchSpec) -> Tensor:
    """Turns frames uint8 [N, H, W, 3] into patches, float32 [P, 3 * frames_per_unit * side * side].

    The last frame is repeated to fill the last unit. Equal to the Hugging Face processors bit for bit.
    """
    if not uses_kernels(frames):
        return patchify_plain(frames, spec)
    fused: Tensor = kernels.patchify_fused(
        frames,
        mean=spec.mean,
        std=spec.std,
        frames_per_unit=spec.frames_per_unit,
        side=spec.side,
        merge=spec.merge,
    )
    return fused


def patchify_plain(frames: Tensor, spec: PatchSpec) -> Tensor:
    """Implements `patchify` on any device, in plain torch.

    Bytes are put in order first, at a quarter of the traffic, then normalised by the two float32 operations
    of the processors. A unit of one frame is put in order once and repeated on the way to floats.
    """
    unit = spec.frames_per_unit
    if len(frames) > 1 and (missing := -len(frames) % unit):
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    grid = spec.grid(len(frames), frames.shape[1], frames.shape[2])
    depth = len(frames) // grid.t
    blocks = frames.reshape(
        grid.t, depth,
        grid.h // spec.merge, spec.merge, spec.side,
        grid.w // spec.merge, spec.merge, spec.side,
        3,
    )  # fmt: skip
    ordered = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid.num_patches, 3, depth, -1)
    patches = ordered.expand(-1, -1, unit, -1).to(torch.float32, memory_format=torch.contiguous_format)
    patches.sub_(constants(spec.mean, frames.device)[:, None, None])
    patches.div_(constants(spec.std, frames.device)[:, None, None])
    return patches.reshape(grid.num_patches, -1)
